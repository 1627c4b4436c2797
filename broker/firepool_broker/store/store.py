"""The store: durable jobs, bindings, sessions, tokens and leadership (see ``ports.StorePort``).

Writes go through the committer's thread, reads through a thread and connection of their own, so
that neither the event loop nor a reader ever waits for a sync.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar, cast

from firepool_broker.store import writes
from firepool_broker.store.committer import CommitReport, Committer
from firepool_broker.store.database import Database
from firepool_broker.store.errors import StoreClosed, StoreUnavailable
from firepool_broker.store.records import BindingRow, JobChange, JobRow, Launch, SessionRow

T = TypeVar("T")

_SQLITE_SCHEME = "sqlite:///"


class Store:
    """The SQLite store; open it with ``await Store.open(...)``.

    Parameters
    ----------
    writer, reader
        Connections to the same file.
    on_commit
        Called on the event loop with a report of each transaction.
    """

    def __init__(
        self,
        writer: Database,
        reader: Database,
        on_commit: Callable[[CommitReport], None] | None = None,
    ) -> None:
        self._reader = reader
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="store-reader")
        self._committer = Committer(writer, time.monotonic, on_commit)
        self._holder = ""
        self._closed = False

    @classmethod
    async def open(
        cls,
        location: str | Path,
        *,
        on_commit: Callable[[CommitReport], None] | None = None,
    ) -> Store:
        """Open the store and bring its schema up to date.

        Parameters
        ----------
        location
            A file, or ``sqlite:///FILE``.
        on_commit
            Called on the event loop with a report of each transaction.

        Raises
        ------
        StoreUnavailable
            The file cannot be opened or created, or the URL names another database.
        StoreCorrupt, StoreBusy, StoreFull, SchemaTooNew
            As they say; the file is left as it is.
        """
        path = _path_of(location)
        writer, reader = await asyncio.to_thread(_open, path)
        return cls(writer, reader, on_commit)

    @property
    def epoch(self) -> int | None:
        """The epoch this broker leads under; ``None`` before it leads."""
        return self._committer.epoch

    async def close(self) -> None:
        """Commit what is queued and close the database."""
        if self._closed:
            return
        self._closed = True
        # the reader goes first: the last connection to close removes the write-ahead log
        await asyncio.to_thread(self._readers.shutdown)
        self._reader.close()
        await self._committer.close()

    # -- leadership ----------------------------------------------------------------------------

    async def acquire_leadership(
        self, holder: str, ttl_seconds: float, now: float, *, predecessor_is_dead: bool = False
    ) -> int:
        """Become the leader; returns the new epoch. See ``ports.StorePort``."""
        epoch = await self._write(
            writes.AcquireLeadership(holder, ttl_seconds, now, predecessor_is_dead)
        )
        self._holder = holder
        return cast("int", epoch)

    async def renew_leadership(self, ttl_seconds: float, now: float) -> None:
        """Extend the lease; raises ``LeadershipLost``."""
        epoch = self._committer.epoch or 0
        await self._write(writes.RenewLeadership(epoch, self._holder, now + ttl_seconds))

    # -- jobs ----------------------------------------------------------------------------------

    async def insert_job(
        self, row: JobRow, *, idempotency_key: str | None = None
    ) -> tuple[JobRow, bool]:
        """Insert a job; returns the stored row and whether this call made it."""
        result = await self._write(writes.InsertJob(row, idempotency_key))
        return cast("tuple[JobRow, bool]", result)

    async def commit_launch(self, launch: Launch) -> bool:
        """``QUEUED -> RUNNING`` with its bindings; ``False``: the version was another."""
        return cast("bool", await self._write(writes.CommitLaunch(launch)))

    async def commit_transition(
        self, job_id: str, version: int, to_state: str, change: JobChange | None = None
    ) -> bool:
        """Move a job; ``False``: the version was another."""
        write = writes.CommitTransition(job_id, version, to_state, change)
        return cast("bool", await self._write(write))

    async def get_job(self, job_id: str) -> JobRow | None:
        """Return one job."""
        row = await self._read(lambda database: database.row("job", {"job_id": job_id}))
        return None if row is None else writes.job_from(row)

    async def list_jobs(
        self,
        *,
        caller: str | None = None,
        state: str | None = None,
        lease_tag: str | None = None,
        limit: int = 100,
        before: str | None = None,
    ) -> list[JobRow]:
        """List jobs, newest first; an unknown ``before`` lists from the newest."""

        def query(database: Database) -> list[JobRow]:
            before_time: float | None = None
            if before is not None:
                last = database.row("job", {"job_id": before})
                before_time = None if last is None else writes.job_from(last).submitted_at
            rows = database.rows(
                "job_list",
                {
                    "of_caller": caller,
                    "in_state": state,
                    "under_tag": lease_tag,
                    "before_time": before_time,
                    "before_id": before,
                    "row_limit": limit,
                },
            )
            return [writes.job_from(row) for row in rows]

        return await self._read(query)

    async def unfinished_jobs(self) -> list[JobRow]:
        """Return every job that is not terminal, oldest first."""
        return await self._read(
            lambda database: [writes.job_from(row) for row in database.rows("job_unfinished", {})]
        )

    async def delete_jobs(self, ended_before: float, limit: int = 1000) -> list[str]:
        """Delete terminal jobs that ended before a time; returns their ids."""
        return cast("list[str]", await self._write(writes.DeleteJobs(ended_before, limit)))

    async def bindings_by_pod_uid(self, uids: Iterable[str]) -> dict[str, BindingRow]:
        """Return the last committed binding of each pod that ever had one."""
        wanted = list(uids)

        def query(database: Database) -> dict[str, BindingRow]:
            found: dict[str, BindingRow] = {}
            for uid in wanted:
                row = database.row("binding_of_pod", {"of_uid": uid})
                if row is not None:
                    found[uid] = writes.binding_from(row)
            return found

        return await self._read(query)

    async def bindings_of_jobs(self, job_ids: Iterable[str]) -> dict[str, list[BindingRow]]:
        """Return the bindings of each job's last attempt."""
        wanted = list(job_ids)

        def query(database: Database) -> dict[str, list[BindingRow]]:
            found: dict[str, list[BindingRow]] = {}
            for job_id in wanted:
                rows = database.rows("binding_of_job", {"of_job": job_id})
                bindings = [writes.binding_from(row) for row in rows]
                if bindings:
                    last = max(binding.attempt for binding in bindings)
                    found[job_id] = [each for each in bindings if each.attempt == last]
            return found

        return await self._read(query)

    # -- sessions and tokens -------------------------------------------------------------------

    async def upsert_session(self, row: SessionRow) -> None:
        """Insert or replace a session (caller, tag)."""
        await self._write(writes.UpsertSession(row))

    async def touch_sessions(self, sessions: Sequence[tuple[str, str]], expires_at: float) -> None:
        """Renew sessions, given as (caller, tag)."""
        await self._write(writes.TouchSessions(tuple(sessions), expires_at))

    async def end_session(self, caller: str, lease_tag: str, now: float) -> bool:
        """Record a goodbye and revoke the session's tokens."""
        return cast("bool", await self._write(writes.EndSession(caller, lease_tag, now)))

    async def delete_session(self, caller: str, lease_tag: str) -> None:
        """Forget a session once its folder is wiped."""
        await self._write(writes.DeleteSession(caller, lease_tag))

    async def sessions(self) -> list[SessionRow]:
        """Return all stored sessions, ended ones included."""
        return await self._read(
            lambda database: [writes.session_from(row) for row in database.rows("session_list", {})]
        )

    async def put_token(self, digest: str, caller: str, lease_tag: str, now: float) -> None:
        """Remember the SHA-256 of a session token."""
        await self._write(writes.PutToken(digest, caller, lease_tag, now))

    async def token(self, digest: str) -> tuple[str, str] | None:
        """Return (caller, tag) of a token's SHA-256, ``None`` when unknown or revoked."""
        row = await self._read(lambda database: database.row("token", {"of_digest": digest}))
        return None if row is None else (str(row[0]), str(row[1]))

    # -- private -------------------------------------------------------------------------------

    def _write(self, write: writes.Write) -> asyncio.Future[object]:
        return self._committer.submit(write)

    async def _read(self, query: Callable[[Database], T]) -> T:
        if self._closed:
            raise StoreClosed("the store is closed")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._readers, query, self._reader)


def _path_of(location: str | Path) -> Path:
    if isinstance(location, str) and "://" in location:
        if not location.startswith(_SQLITE_SCHEME):
            scheme = location.partition("://")[0]
            raise StoreUnavailable(f"store: no {scheme} here; use {_SQLITE_SCHEME}FILE")
        location = location[len(_SQLITE_SCHEME) :]
    return Path(location)


def _open(path: Path) -> tuple[Database, Database]:
    if not path.parent.is_dir():
        raise StoreUnavailable(f"{path} cannot be opened: {path.parent} is not a folder")
    writer = Database(path)
    try:
        writer.ensure_schema()
        path.chmod(0o600)  # jobs hold code and variables: nobody else's business
        return writer, Database(path, read_only=True)
    except BaseException:
        writer.close()
        raise
