"""The schema, as SQLAlchemy tables: the source that migrations and statements are written from.

The contract: types and constraints that SQLite, MySQL and PostgreSQL share. Floating times are
doubles (a MySQL ``FLOAT`` would round them to minutes), binary columns have a length (a plain
MySQL ``BLOB`` ends at 64 KiB), and what is looked up is a bounded string.

Nothing that runs when a broker starts imports this module: importing SQLAlchemy costs more than
the whole start may. The statements are compiled ahead of time into ``prebuilt.py``.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
)

_DOCUMENT_BYTES = 64 * 1024 * 1024

metadata = MetaData(
    naming_convention={"ix": "ix_%(table_name)s_%(column_0_N_name)s", "pk": "pk_%(table_name)s"}
)

jobs = Table(
    "jobs",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("caller", String(255), nullable=False),
    Column("state", String(16), nullable=False),
    Column("version", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("kind", String(16), nullable=False),
    Column("name", String(255)),
    Column("lease_tag", String(255)),
    Column("client_id", String(255)),
    Column("queue", String(255), nullable=False),
    Column("sku", String(255)),
    Column("attached", Boolean, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("request", LargeBinary(_DOCUMENT_BYTES), nullable=False),
    Column("request_digest", String(64), nullable=False),
    Column("user_retries", Integer, nullable=False),
    Column("infra_retries", Integer, nullable=False),
    Column("acquisition_path", String(32)),
    Column("acquisition_reason", String(1024)),
    Column("error", LargeBinary(_DOCUMENT_BYTES)),
    Column("outcome", LargeBinary(_DOCUMENT_BYTES)),
    Column("exit_code", Integer),
    Column("submitted_at", Double, nullable=False),
    Column("queued_at", Double),
    Column("claimed_at", Double),
    Column("committed_at", Double),
    Column("handed_off_at", Double),
    Column("first_instruction_at", Double),
    Column("ended_at", Double),
    Index(None, "submitted_at", "id"),
    Index(None, "state", "ended_at"),
)

bindings = Table(
    "bindings",
    metadata,
    # the order of commits, which a clock that steps back would not give
    Column(
        "sequence",
        BigInteger().with_variant(Integer, "sqlite"),
        primary_key=True,
        autoincrement=True,
    ),
    Column("job_id", String(64), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("pod_name", String(255), nullable=False),
    Column("pod_uid", String(64), nullable=False),
    Column("caller", String(255), nullable=False),
    Column("lease_tag", String(255)),
    Column("queue", String(255), nullable=False),
    Column("committed_at", Double, nullable=False),
    Index(None, "pod_uid", "sequence"),
    Index(None, "job_id", "attempt"),
)

sessions = Table(
    "sessions",
    metadata,
    Column("caller", String(255), primary_key=True),
    Column("lease_tag", String(255), primary_key=True),
    Column("client_id", String(255), nullable=False),
    Column("request", LargeBinary(_DOCUMENT_BYTES), nullable=False),
    Column("session_dir", String(4096), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    Column("ended_at", Double),
)

idempotency = Table(
    "idempotency",
    metadata,
    Column("caller", String(255), primary_key=True),
    Column("key", String(255), primary_key=True),
    Column("job_id", String(64), nullable=False),
    Column("request_digest", String(64), nullable=False),
    Index(None, "job_id"),
)

tokens = Table(
    "tokens",
    metadata,
    Column("digest", String(64), primary_key=True),
    Column("caller", String(255), nullable=False),
    Column("lease_tag", String(255), nullable=False),
    Column("created_at", Double, nullable=False),
    Index(None, "caller", "lease_tag"),
)

leadership = Table(
    "leadership",
    metadata,
    # one row: whoever it names leads, and every write is conditional on its epoch
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("holder", String(255), nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("expires_at", Double, nullable=False),
)
