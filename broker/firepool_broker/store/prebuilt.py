"""Schema and statements for SQLite, compiled by ``prebuild.py``; not to be edited."""

from __future__ import annotations

REVISION = "0001"
OLDER_REVISIONS: tuple[str, ...] = ()

SCHEMA: tuple[str, ...] = (
    (
        "CREATE TABLE alembic_version ( version_num VARCHAR(32) NOT NULL, CONSTRAINT "
        "alembic_version_pkc PRIMARY KEY (version_num) )"
    ),
    (
        "CREATE TABLE bindings ( sequence INTEGER NOT NULL, job_id VARCHAR(64) NOT "
        "NULL, attempt INTEGER NOT NULL, pod_name VARCHAR(255) NOT NULL, pod_uid "
        "VARCHAR(64) NOT NULL, caller VARCHAR(255) NOT NULL, lease_tag VARCHAR(255), "
        "queue VARCHAR(255) NOT NULL, committed_at DOUBLE NOT NULL, CONSTRAINT "
        "pk_bindings PRIMARY KEY (sequence) )"
    ),
    (
        'CREATE TABLE idempotency ( caller VARCHAR(255) NOT NULL, "key" VARCHAR(255) '
        "NOT NULL, job_id VARCHAR(64) NOT NULL, request_digest VARCHAR(64) NOT NULL, "
        'CONSTRAINT pk_idempotency PRIMARY KEY (caller, "key") )'
    ),
    (
        "CREATE TABLE jobs ( id VARCHAR(64) NOT NULL, caller VARCHAR(255) NOT NULL, "
        "state VARCHAR(16) NOT NULL, version INTEGER NOT NULL, attempt INTEGER NOT "
        "NULL, kind VARCHAR(16) NOT NULL, name VARCHAR(255), lease_tag VARCHAR(255), "
        "client_id VARCHAR(255), queue VARCHAR(255) NOT NULL, sku VARCHAR(255), "
        "attached BOOLEAN NOT NULL, priority INTEGER NOT NULL, request BLOB NOT NULL, "
        "request_digest VARCHAR(64) NOT NULL, user_retries INTEGER NOT NULL, "
        "infra_retries INTEGER NOT NULL, acquisition_path VARCHAR(32), "
        "acquisition_reason VARCHAR(1024), error BLOB, outcome BLOB, exit_code "
        "INTEGER, submitted_at DOUBLE NOT NULL, queued_at DOUBLE, claimed_at DOUBLE, "
        "committed_at DOUBLE, handed_off_at DOUBLE, first_instruction_at DOUBLE, "
        "ended_at DOUBLE, CONSTRAINT pk_jobs PRIMARY KEY (id) )"
    ),
    (
        "CREATE TABLE leadership ( id INTEGER NOT NULL, holder VARCHAR(255) NOT NULL, "
        "epoch BIGINT NOT NULL, expires_at DOUBLE NOT NULL, CONSTRAINT pk_leadership "
        "PRIMARY KEY (id) )"
    ),
    (
        "CREATE TABLE sessions ( caller VARCHAR(255) NOT NULL, lease_tag VARCHAR(255) "
        "NOT NULL, client_id VARCHAR(255) NOT NULL, request BLOB NOT NULL, session_dir "
        "VARCHAR(4096) NOT NULL, created_at DOUBLE NOT NULL, expires_at DOUBLE NOT "
        "NULL, ended_at DOUBLE, CONSTRAINT pk_sessions PRIMARY KEY (caller, lease_tag) "
        ")"
    ),
    (
        "CREATE TABLE tokens ( digest VARCHAR(64) NOT NULL, caller VARCHAR(255) NOT "
        "NULL, lease_tag VARCHAR(255) NOT NULL, created_at DOUBLE NOT NULL, CONSTRAINT "
        "pk_tokens PRIMARY KEY (digest) )"
    ),
    "CREATE INDEX ix_bindings_job_id_attempt ON bindings (job_id, attempt)",
    "CREATE INDEX ix_bindings_pod_uid_sequence ON bindings (pod_uid, sequence)",
    "CREATE INDEX ix_idempotency_job_id ON idempotency (job_id)",
    "CREATE INDEX ix_jobs_state_ended_at ON jobs (state, ended_at)",
    "CREATE INDEX ix_jobs_submitted_at_id ON jobs (submitted_at, id)",
    "CREATE INDEX ix_tokens_caller_lease_tag ON tokens (caller, lease_tag)",
)

STATEMENTS: dict[str, str] = {
    "epoch": "SELECT leadership.epoch FROM leadership WHERE leadership.id = 1",
    "leader": (
        "SELECT leadership.holder, leadership.epoch, leadership.expires_at FROM "
        "leadership WHERE leadership.id = 1"
    ),
    "leader_insert": (
        "INSERT INTO leadership (id, holder, epoch, expires_at) VALUES (:id, :holder, "
        ":epoch, :expires_at)"
    ),
    "leader_take": (
        "UPDATE leadership SET holder=:new_holder, epoch=:new_epoch, "
        "expires_at=:new_expires_at WHERE leadership.id = 1 AND leadership.epoch = "
        ":old_epoch"
    ),
    "job_insert": (
        "INSERT INTO jobs (id, caller, state, version, attempt, kind, name, lease_tag, "
        "client_id, queue, sku, attached, priority, request, request_digest, "
        "user_retries, infra_retries, acquisition_path, acquisition_reason, error, "
        "outcome, exit_code, submitted_at, queued_at, claimed_at, committed_at, "
        "handed_off_at, first_instruction_at, ended_at) VALUES (:id, :caller, :state, "
        ":version, :attempt, :kind, :name, :lease_tag, :client_id, :queue, :sku, "
        ":attached, :priority, :request, :request_digest, :user_retries, "
        ":infra_retries, :acquisition_path, :acquisition_reason, :error, :outcome, "
        ":exit_code, :submitted_at, :queued_at, :claimed_at, :committed_at, "
        ":handed_off_at, :first_instruction_at, :ended_at)"
    ),
    "job": (
        "SELECT jobs.id, jobs.caller, jobs.state, jobs.version, jobs.attempt, "
        "jobs.kind, jobs.name, jobs.lease_tag, jobs.client_id, jobs.queue, jobs.sku, "
        "jobs.attached, jobs.priority, jobs.request, jobs.request_digest, "
        "jobs.user_retries, jobs.infra_retries, jobs.acquisition_path, "
        "jobs.acquisition_reason, jobs.error, jobs.outcome, jobs.exit_code, "
        "jobs.submitted_at, jobs.queued_at, jobs.claimed_at, jobs.committed_at, "
        "jobs.handed_off_at, jobs.first_instruction_at, jobs.ended_at FROM jobs WHERE "
        "jobs.id = :job_id"
    ),
    "job_launch": (
        "UPDATE jobs SET state=:to_state, version=(jobs.version + 1), "
        "attempt=:new_attempt, acquisition_path=:path, acquisition_reason=:reason, "
        "claimed_at=:new_claimed_at, committed_at=:new_committed_at WHERE jobs.id = "
        ":job_id AND jobs.version = :old_version AND jobs.state = :from_state"
    ),
    "binding_insert": (
        "INSERT INTO bindings (job_id, attempt, pod_name, pod_uid, caller, lease_tag, "
        "queue, committed_at) SELECT jobs.id, jobs.attempt, :pod_name AS anon_1, "
        ":pod_uid AS anon_2, jobs.caller, jobs.lease_tag, jobs.queue, "
        "jobs.committed_at FROM jobs WHERE jobs.id = :job_id"
    ),
    "job_transition": (
        "UPDATE jobs SET state=:to_state, version=(jobs.version + 1), attempt=CASE "
        "WHEN :set_attempt THEN :new_attempt ELSE jobs.attempt END, sku=CASE WHEN "
        ":set_sku THEN :new_sku ELSE jobs.sku END, user_retries=CASE WHEN "
        ":set_user_retries THEN :new_user_retries ELSE jobs.user_retries END, "
        "infra_retries=CASE WHEN :set_infra_retries THEN :new_infra_retries ELSE "
        "jobs.infra_retries END, acquisition_path=CASE WHEN :set_acquisition_path THEN "
        ":new_acquisition_path ELSE jobs.acquisition_path END, acquisition_reason=CASE "
        "WHEN :set_acquisition_reason THEN :new_acquisition_reason ELSE "
        "jobs.acquisition_reason END, error=CASE WHEN :set_error THEN :new_error ELSE "
        "jobs.error END, outcome=CASE WHEN :set_outcome THEN :new_outcome ELSE "
        "jobs.outcome END, exit_code=CASE WHEN :set_exit_code THEN :new_exit_code ELSE "
        "jobs.exit_code END, queued_at=CASE WHEN :set_queued_at THEN :new_queued_at "
        "ELSE jobs.queued_at END, claimed_at=CASE WHEN :set_claimed_at THEN "
        ":new_claimed_at ELSE jobs.claimed_at END, committed_at=CASE WHEN "
        ":set_committed_at THEN :new_committed_at ELSE jobs.committed_at END, "
        "handed_off_at=CASE WHEN :set_handed_off_at THEN :new_handed_off_at ELSE "
        "jobs.handed_off_at END, first_instruction_at=CASE WHEN "
        ":set_first_instruction_at THEN :new_first_instruction_at ELSE "
        "jobs.first_instruction_at END, ended_at=CASE WHEN :set_ended_at THEN "
        ":new_ended_at ELSE jobs.ended_at END WHERE jobs.id = :job_id AND jobs.version "
        "= :old_version"
    ),
    "job_list": (
        "SELECT jobs.id, jobs.caller, jobs.state, jobs.version, jobs.attempt, "
        "jobs.kind, jobs.name, jobs.lease_tag, jobs.client_id, jobs.queue, jobs.sku, "
        "jobs.attached, jobs.priority, jobs.request, jobs.request_digest, "
        "jobs.user_retries, jobs.infra_retries, jobs.acquisition_path, "
        "jobs.acquisition_reason, jobs.error, jobs.outcome, jobs.exit_code, "
        "jobs.submitted_at, jobs.queued_at, jobs.claimed_at, jobs.committed_at, "
        "jobs.handed_off_at, jobs.first_instruction_at, jobs.ended_at FROM jobs WHERE "
        "(:of_caller IS NULL OR jobs.caller = :of_caller) AND (:in_state IS NULL OR "
        "jobs.state = :in_state) AND (:under_tag IS NULL OR jobs.lease_tag = "
        ":under_tag) AND (:before_time IS NULL OR jobs.submitted_at < :before_time OR "
        "jobs.submitted_at = :before_time AND jobs.id < :before_id) ORDER BY "
        "jobs.submitted_at DESC, jobs.id DESC LIMIT :row_limit OFFSET 0"
    ),
    "job_unfinished": (
        "SELECT jobs.id, jobs.caller, jobs.state, jobs.version, jobs.attempt, "
        "jobs.kind, jobs.name, jobs.lease_tag, jobs.client_id, jobs.queue, jobs.sku, "
        "jobs.attached, jobs.priority, jobs.request, jobs.request_digest, "
        "jobs.user_retries, jobs.infra_retries, jobs.acquisition_path, "
        "jobs.acquisition_reason, jobs.error, jobs.outcome, jobs.exit_code, "
        "jobs.submitted_at, jobs.queued_at, jobs.claimed_at, jobs.committed_at, "
        "jobs.handed_off_at, jobs.first_instruction_at, jobs.ended_at FROM jobs WHERE "
        "jobs.state IN ('PENDING', 'QUEUED', 'RUNNING') ORDER BY jobs.submitted_at, "
        "jobs.id"
    ),
    "job_ended": (
        "SELECT jobs.id FROM jobs WHERE jobs.state IN ('SUCCEEDED', 'FAILED', "
        "'CANCELLED') AND jobs.ended_at < :ended_before LIMIT :row_limit OFFSET 0"
    ),
    "job_delete": "DELETE FROM jobs WHERE jobs.id = :job_id",
    "binding_delete": "DELETE FROM bindings WHERE bindings.job_id = :job_id",
    "binding_of_pod": (
        "SELECT bindings.job_id, bindings.attempt, bindings.pod_name, "
        "bindings.pod_uid, bindings.caller, bindings.lease_tag, bindings.queue, "
        "bindings.committed_at FROM bindings WHERE bindings.pod_uid = :of_uid ORDER BY "
        "bindings.sequence DESC LIMIT 1 OFFSET 0"
    ),
    "binding_of_job": (
        "SELECT bindings.job_id, bindings.attempt, bindings.pod_name, "
        "bindings.pod_uid, bindings.caller, bindings.lease_tag, bindings.queue, "
        "bindings.committed_at FROM bindings WHERE bindings.job_id = :of_job ORDER BY "
        "bindings.sequence"
    ),
    "idempotency": (
        "SELECT idempotency.job_id, idempotency.request_digest FROM idempotency WHERE "
        'idempotency.caller = :of_caller AND idempotency."key" = :of_key'
    ),
    "idempotency_insert": (
        'INSERT INTO idempotency (caller, "key", job_id, request_digest) VALUES '
        "(:caller, :key, :job_id, :request_digest)"
    ),
    "idempotency_delete": "DELETE FROM idempotency WHERE idempotency.job_id = :of_job",
    "session_insert": (
        "INSERT INTO sessions (caller, lease_tag, client_id, request, session_dir, "
        "created_at, expires_at, ended_at) VALUES (:caller, :lease_tag, :client_id, "
        ":request, :session_dir, :created_at, :expires_at, :ended_at)"
    ),
    "session_replace": (
        "UPDATE sessions SET client_id=:new_client_id, request=:new_request, "
        "session_dir=:new_session_dir, created_at=:new_created_at, "
        "expires_at=:new_expires_at, ended_at=:new_ended_at WHERE sessions.caller = "
        ":of_caller AND sessions.lease_tag = :of_tag"
    ),
    "session_touch": (
        "UPDATE sessions SET expires_at=:new_expires_at WHERE sessions.caller = "
        ":of_caller AND sessions.lease_tag = :of_tag AND sessions.ended_at IS NULL"
    ),
    "session_end": (
        "UPDATE sessions SET ended_at=:new_ended_at WHERE sessions.caller = :of_caller "
        "AND sessions.lease_tag = :of_tag AND sessions.ended_at IS NULL"
    ),
    "session_delete": (
        "DELETE FROM sessions WHERE sessions.caller = :of_caller AND sessions.lease_tag = :of_tag"
    ),
    "session_list": (
        "SELECT sessions.caller, sessions.lease_tag, sessions.client_id, "
        "sessions.request, sessions.session_dir, sessions.created_at, "
        "sessions.expires_at, sessions.ended_at FROM sessions ORDER BY "
        "sessions.created_at"
    ),
    "token": (
        "SELECT tokens.caller, tokens.lease_tag FROM tokens WHERE tokens.digest = :of_digest"
    ),
    "token_insert": (
        "INSERT INTO tokens (digest, caller, lease_tag, created_at) VALUES (:digest, "
        ":caller, :lease_tag, :created_at)"
    ),
    "token_delete": (
        "DELETE FROM tokens WHERE tokens.caller = :of_caller AND tokens.lease_tag = :of_tag"
    ),
}
