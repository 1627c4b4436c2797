"""The store's methods, as the loop and the API use them.

The contract: every write is durable when its call returns, is conditional on the leader's epoch
(``LeadershipLost`` otherwise) and is committed together with whatever else queued meanwhile;
what one write does never depends on which others share its transaction. Reads see every write
that returned before them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from firepool_broker.store.records import BindingRow, JobChange, JobRow, Launch, SessionRow


class StorePort(Protocol):
    """Durable jobs, bindings, sessions, tokens and leadership."""

    # -- leadership ----------------------------------------------------------------------------

    async def acquire_leadership(
        self, holder: str, ttl_seconds: float, now: float, *, predecessor_is_dead: bool = False
    ) -> int:
        """Become the leader; returns the new epoch.

        ``predecessor_is_dead`` (the caller holds the file lock of the embedded broker) takes a
        lease over that has not run out. Raises ``LeadershipHeld`` otherwise.
        """
        ...

    async def renew_leadership(self, ttl_seconds: float, now: float) -> None:
        """Extend the lease; raises ``LeadershipLost``."""
        ...

    # -- jobs ----------------------------------------------------------------------------------

    async def insert_job(
        self, row: JobRow, *, idempotency_key: str | None = None
    ) -> tuple[JobRow, bool]:
        """Insert a job; returns the stored row and whether this call made it.

        The same id or the same (caller, key) with the same ``request_digest`` returns the job
        that was made first. Raises ``IdempotencyConflict`` for a different request.
        """
        ...

    async def commit_launch(self, launch: Launch) -> bool:
        """``QUEUED -> RUNNING`` with its bindings; ``False``: the version was another."""
        ...

    async def commit_transition(
        self, job_id: str, version: int, to_state: str, change: JobChange | None = None
    ) -> bool:
        """Move a job (or change columns of it); the version rises by one when it succeeds."""
        ...

    async def get_job(self, job_id: str) -> JobRow | None:
        """Return one job."""
        ...

    async def list_jobs(
        self,
        *,
        caller: str | None = None,
        state: str | None = None,
        lease_tag: str | None = None,
        limit: int = 100,
        before: str | None = None,
    ) -> list[JobRow]:
        """List jobs, newest first; ``before`` is the id of a job to continue after."""
        ...

    async def unfinished_jobs(self) -> list[JobRow]:
        """Return every job that is not terminal, oldest first."""
        ...

    async def delete_jobs(self, ended_before: float, limit: int = 1000) -> list[str]:
        """Delete terminal jobs that ended before a time; returns their ids."""
        ...

    async def bindings_by_pod_uid(self, uids: Iterable[str]) -> dict[str, BindingRow]:
        """Return the last committed binding of each pod that ever had one."""
        ...

    async def bindings_of_jobs(self, job_ids: Iterable[str]) -> dict[str, list[BindingRow]]:
        """Return the bindings of each job's last attempt."""
        ...

    # -- sessions and tokens -------------------------------------------------------------------

    async def upsert_session(self, row: SessionRow) -> None:
        """Insert or replace a session (caller, tag)."""
        ...

    async def touch_sessions(self, sessions: Sequence[tuple[str, str]], expires_at: float) -> None:
        """Renew sessions, given as (caller, tag)."""
        ...

    async def end_session(self, caller: str, lease_tag: str, now: float) -> bool:
        """Record a goodbye and revoke the session's tokens; ``False``: no such open session."""
        ...

    async def delete_session(self, caller: str, lease_tag: str) -> None:
        """Forget a session once its folder is wiped."""
        ...

    async def sessions(self) -> list[SessionRow]:
        """Return all stored sessions, ended ones included."""
        ...

    async def put_token(self, digest: str, caller: str, lease_tag: str, now: float) -> None:
        """Remember the SHA-256 of a session token."""
        ...

    async def token(self, digest: str) -> tuple[str, str] | None:
        """Return (caller, tag) of a token's SHA-256, ``None`` when unknown or revoked."""
        ...

    async def close(self) -> None:
        """Commit what is queued and close the database."""
        ...
