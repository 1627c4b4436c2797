"""The store's writes: what each does inside a transaction that it shares with others.

The contract: ``apply`` raises ``WriteRefused`` before it changed a row, or not at all; its
return value is the result of the write. Whatever else it raises makes the committer roll the
whole transaction back and run each of its writes alone.
"""

from __future__ import annotations

from typing import Any, Protocol

from msgspec import UNSET, Struct

from firepool_broker.store.database import Database
from firepool_broker.store.errors import IdempotencyConflict, LeadershipHeld, LeadershipLost
from firepool_broker.store.records import BindingRow, JobChange, JobRow, Launch, SessionRow

_REASON_CHARACTERS = 1024
_JOB_COLUMNS = (
    "id",
    "caller",
    "state",
    "version",
    "attempt",
    "kind",
    "name",
    "lease_tag",
    "client_id",
    "queue",
    "sku",
    "attached",
    "priority",
    "request",
    "request_digest",
    "user_retries",
    "infra_retries",
    "acquisition_path",
    "acquisition_reason",
    "error",
    "outcome",
    "exit_code",
    "submitted_at",
    "queued_at",
    "claimed_at",
    "committed_at",
    "handed_off_at",
    "first_instruction_at",
    "ended_at",
)
_SESSION_COLUMNS = (
    "caller",
    "lease_tag",
    "client_id",
    "request",
    "session_dir",
    "created_at",
    "expires_at",
    "ended_at",
)
_UNCHANGED: dict[str, object] = {
    f"{prefix}_{name}": value
    for name in JobChange.__struct_fields__
    for prefix, value in (("set", False), ("new", None))
}


def job_from(row: tuple[Any, ...]) -> JobRow:
    """Return a job from a row of a ``job…`` query."""
    values = dict(zip(_JOB_COLUMNS, row, strict=True))
    values["attached"] = bool(values["attached"])  # SQLite has no booleans of its own
    return JobRow(**values)


def binding_from(row: tuple[Any, ...]) -> BindingRow:
    """Return a binding from a row of a ``binding_of_…`` query."""
    return BindingRow(**dict(zip(BindingRow.__struct_fields__, row, strict=True)))


def session_from(row: tuple[Any, ...]) -> SessionRow:
    """Return a session from a row of ``session_list``."""
    return SessionRow(**dict(zip(_SESSION_COLUMNS, row, strict=True)))


class Write(Protocol):
    """One write, applied inside a transaction."""

    def apply(self, database: Database) -> object:
        """Change the rows; returns the result of the write."""
        ...


class InsertJob(Struct, frozen=True):
    """Insert a job unless the same request made one before."""

    row: JobRow
    key: str | None

    def apply(self, database: Database) -> tuple[JobRow, bool]:
        """Return the stored job and whether it is new."""
        row = self.row
        if self.key is not None:
            known = database.row("idempotency", {"of_caller": row.caller, "of_key": self.key})
            if known is not None:
                job_id, digest = known
                if digest != row.request_digest:
                    raise IdempotencyConflict(
                        f"idempotency key {self.key!r} was used for a different request, which "
                        f"made job {job_id}; use a new key",
                        job_id,
                    )
                found = database.row("job", {"job_id": job_id})
                if found is not None:
                    return job_from(found), False
        found = database.row("job", {"job_id": row.id})
        if found is not None:
            job = job_from(found)
            if job.caller != row.caller:
                raise IdempotencyConflict(f"job id {row.id!r} is taken; use another id", None)
            if job.request_digest != row.request_digest:
                raise IdempotencyConflict(
                    f"job id {row.id!r} was used for a different request; use another id", job.id
                )
            return job, False
        database.run("job_insert", {name: getattr(row, name) for name in _JOB_COLUMNS})
        if self.key is not None:
            database.run(
                "idempotency_insert",
                {
                    "caller": row.caller,
                    "key": self.key,
                    "job_id": row.id,
                    "request_digest": row.request_digest,
                },
            )
        return row, True


class CommitLaunch(Struct, frozen=True):
    """``QUEUED -> RUNNING`` with the bindings of its pods."""

    launch: Launch

    def apply(self, database: Database) -> bool:
        """Return whether the job still had its version and state."""
        launch = self.launch
        changed = database.run(
            "job_launch",
            {
                "job_id": launch.job_id,
                "old_version": launch.version,
                "from_state": "QUEUED",
                "to_state": "RUNNING",
                "new_attempt": launch.attempt,
                "path": launch.path,
                "reason": launch.reason[:_REASON_CHARACTERS],
                "new_claimed_at": launch.claimed_at,
                "new_committed_at": launch.committed_at,
            },
        )
        if not changed:
            return False
        for name, uid in launch.pods:
            database.run(
                "binding_insert", {"job_id": launch.job_id, "pod_name": name, "pod_uid": uid}
            )
        return True


class CommitTransition(Struct, frozen=True):
    """Move a job to a state and change columns of it."""

    job_id: str
    version: int
    to_state: str
    change: JobChange | None

    def apply(self, database: Database) -> bool:
        """Return whether the job still had its version."""
        parameters = {
            **_UNCHANGED,
            "job_id": self.job_id,
            "old_version": self.version,
            "to_state": self.to_state,
        }
        if self.change is not None:
            for name in JobChange.__struct_fields__:
                value = getattr(self.change, name)
                if value is not UNSET:
                    parameters[f"set_{name}"] = True
                    parameters[f"new_{name}"] = value
        return database.run("job_transition", parameters) > 0


class DeleteJobs(Struct, frozen=True):
    """Delete jobs that ended before a time, with what refers to them."""

    ended_before: float
    limit: int

    def apply(self, database: Database) -> list[str]:
        """Return the ids of the deleted jobs."""
        found = database.rows(
            "job_ended", {"ended_before": self.ended_before, "row_limit": self.limit}
        )
        ids = [str(row[0]) for row in found]
        for job_id in ids:
            database.run("binding_delete", {"job_id": job_id})
            database.run("idempotency_delete", {"of_job": job_id})
            database.run("job_delete", {"job_id": job_id})
        return ids


class UpsertSession(Struct, frozen=True):
    """Insert or replace a session."""

    row: SessionRow

    def apply(self, database: Database) -> None:
        """Write the row."""
        row = self.row
        changed = {f"new_{name}": getattr(row, name) for name in _SESSION_COLUMNS[2:]}
        key = {"of_caller": row.caller, "of_tag": row.lease_tag}
        if not database.run("session_replace", {**changed, **key}):
            database.run("session_insert", {name: getattr(row, name) for name in _SESSION_COLUMNS})


class TouchSessions(Struct, frozen=True):
    """Renew sessions."""

    sessions: tuple[tuple[str, str], ...]
    expires_at: float

    def apply(self, database: Database) -> None:
        """Write the new expiry of each."""
        for caller, tag in self.sessions:
            database.run(
                "session_touch",
                {"of_caller": caller, "of_tag": tag, "new_expires_at": self.expires_at},
            )


class EndSession(Struct, frozen=True):
    """Record a goodbye and revoke the session's tokens."""

    caller: str
    lease_tag: str
    now: float

    def apply(self, database: Database) -> bool:
        """Return whether the session was open."""
        key = {"of_caller": self.caller, "of_tag": self.lease_tag}
        ended = database.run("session_end", {**key, "new_ended_at": self.now}) > 0
        database.run("token_delete", key)
        return ended


class DeleteSession(Struct, frozen=True):
    """Forget a session."""

    caller: str
    lease_tag: str

    def apply(self, database: Database) -> None:
        """Delete the row and its tokens."""
        key = {"of_caller": self.caller, "of_tag": self.lease_tag}
        database.run("session_delete", key)
        database.run("token_delete", key)


class PutToken(Struct, frozen=True):
    """Remember the digest of a session token."""

    digest: str
    caller: str
    lease_tag: str
    now: float

    def apply(self, database: Database) -> None:
        """Insert the row unless it is there."""
        if database.row("token", {"of_digest": self.digest}) is None:
            database.run(
                "token_insert",
                {
                    "digest": self.digest,
                    "caller": self.caller,
                    "lease_tag": self.lease_tag,
                    "created_at": self.now,
                },
            )


class AcquireLeadership(Struct, frozen=True):
    """Become the leader."""

    holder: str
    ttl_seconds: float
    now: float
    predecessor_is_dead: bool

    def apply(self, database: Database) -> int:
        """Return the new epoch."""
        row = database.row("leader", {})
        expires_at = self.now + self.ttl_seconds
        if row is None:
            database.run(
                "leader_insert",
                {"id": 1, "holder": self.holder, "epoch": 1, "expires_at": expires_at},
            )
            return 1
        holder, epoch, held_until = row
        mine = holder == self.holder or self.predecessor_is_dead
        if not mine and held_until > self.now:
            raise LeadershipHeld(holder, held_until)
        database.run(
            "leader_take",
            {
                "old_epoch": epoch,
                "new_epoch": epoch + 1,
                "new_holder": self.holder,
                "new_expires_at": expires_at,
            },
        )
        return int(epoch) + 1


class RenewLeadership(Struct, frozen=True):
    """Extend the leader's lease."""

    epoch: int
    holder: str
    expires_at: float

    def apply(self, database: Database) -> None:
        """Write the new expiry."""
        changed = database.run(
            "leader_take",
            {
                "old_epoch": self.epoch,
                "new_epoch": self.epoch,
                "new_holder": self.holder,
                "new_expires_at": self.expires_at,
            },
        )
        if not changed:
            raise LeadershipLost("another broker leads now")
