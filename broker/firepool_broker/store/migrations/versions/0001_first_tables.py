"""The first tables.

Revision 0001.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "bindings",
        sa.Column(
            "sequence",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("pod_name", sa.String(length=255), nullable=False),
        sa.Column("pod_uid", sa.String(length=64), nullable=False),
        sa.Column("caller", sa.String(length=255), nullable=False),
        sa.Column("lease_tag", sa.String(length=255), nullable=True),
        sa.Column("queue", sa.String(length=255), nullable=False),
        sa.Column("committed_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("sequence", name=op.f("pk_bindings")),
    )
    op.create_index(
        op.f("ix_bindings_job_id_attempt"), "bindings", ["job_id", "attempt"], unique=False
    )
    op.create_index(
        op.f("ix_bindings_pod_uid_sequence"), "bindings", ["pod_uid", "sequence"], unique=False
    )
    op.create_table(
        "idempotency",
        sa.Column("caller", sa.String(length=255), nullable=False),
        sa.Column("key", sa.String(length=255), nullable=False),
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("request_digest", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("caller", "key", name=op.f("pk_idempotency")),
    )
    op.create_index(op.f("ix_idempotency_job_id"), "idempotency", ["job_id"], unique=False)
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("caller", sa.String(length=255), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("name", sa.String(length=255), nullable=True),
        sa.Column("lease_tag", sa.String(length=255), nullable=True),
        sa.Column("client_id", sa.String(length=255), nullable=True),
        sa.Column("queue", sa.String(length=255), nullable=False),
        sa.Column("sku", sa.String(length=255), nullable=True),
        sa.Column("attached", sa.Boolean(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("request", sa.LargeBinary(length=67108864), nullable=False),
        sa.Column("request_digest", sa.String(length=64), nullable=False),
        sa.Column("user_retries", sa.Integer(), nullable=False),
        sa.Column("infra_retries", sa.Integer(), nullable=False),
        sa.Column("acquisition_path", sa.String(length=32), nullable=True),
        sa.Column("acquisition_reason", sa.String(length=1024), nullable=True),
        sa.Column("error", sa.LargeBinary(length=67108864), nullable=True),
        sa.Column("outcome", sa.LargeBinary(length=67108864), nullable=True),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("submitted_at", sa.Double(), nullable=False),
        sa.Column("queued_at", sa.Double(), nullable=True),
        sa.Column("claimed_at", sa.Double(), nullable=True),
        sa.Column("committed_at", sa.Double(), nullable=True),
        sa.Column("handed_off_at", sa.Double(), nullable=True),
        sa.Column("first_instruction_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
    )
    op.create_index(op.f("ix_jobs_state_ended_at"), "jobs", ["state", "ended_at"], unique=False)
    op.create_index(op.f("ix_jobs_submitted_at_id"), "jobs", ["submitted_at", "id"], unique=False)
    op.create_table(
        "leadership",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("holder", sa.String(length=255), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_leadership")),
    )
    op.create_table(
        "sessions",
        sa.Column("caller", sa.String(length=255), nullable=False),
        sa.Column("lease_tag", sa.String(length=255), nullable=False),
        sa.Column("client_id", sa.String(length=255), nullable=False),
        sa.Column("request", sa.LargeBinary(length=67108864), nullable=False),
        sa.Column("session_dir", sa.String(length=4096), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("caller", "lease_tag", name=op.f("pk_sessions")),
    )
    op.create_table(
        "tokens",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("caller", sa.String(length=255), nullable=False),
        sa.Column("lease_tag", sa.String(length=255), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_tokens")),
    )
    op.create_index(
        op.f("ix_tokens_caller_lease_tag"), "tokens", ["caller", "lease_tag"], unique=False
    )


def downgrade() -> None:
    op.drop_index(op.f("ix_tokens_caller_lease_tag"), table_name="tokens")
    op.drop_table("tokens")
    op.drop_table("sessions")
    op.drop_table("leadership")
    op.drop_index(op.f("ix_jobs_submitted_at_id"), table_name="jobs")
    op.drop_index(op.f("ix_jobs_state_ended_at"), table_name="jobs")
    op.drop_table("jobs")
    op.drop_index(op.f("ix_idempotency_job_id"), table_name="idempotency")
    op.drop_table("idempotency")
    op.drop_index(op.f("ix_bindings_pod_uid_sequence"), table_name="bindings")
    op.drop_index(op.f("ix_bindings_job_id_attempt"), table_name="bindings")
    op.drop_table("bindings")
