"""Sessions: registered, connected while their stream is open, and cleared away at last.

A session's folder belongs to the session. It is wiped when the session has ended by goodbye and
its last job has ended, or seven days after the session was last heard of; never before.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from msgspec import Struct, field

from firepool_broker.api import types
from firepool_broker.api.errors import Conflict, NotFound
from firepool_broker.api.variables import strip_protected
from firepool_broker.backends.folders import discard
from firepool_broker.core import events
from firepool_broker.core.instructions import FinishJob, NotifySession
from firepool_broker.core.sessions import Session
from firepool_broker.launch.specification import Setting
from firepool_broker.loop.hub import Hub
from firepool_broker.loop.livejobs import LiveJob, LiveJobs
from firepool_broker.store.errors import StoreError
from firepool_broker.store.records import SessionRow
from firepool_broker.store.store import Store

__all__ = ["Sessions"]

log = logging.getLogger(__name__)

_REQUESTS = msgspec.json.Decoder(types.SessionRequest)

Key = tuple[str, str]


class _Known(Struct, eq=False):
    row: SessionRow
    request: types.SessionRequest
    streams: Counter[str] = field(default_factory=Counter)
    used: bool = False

    @property
    def connected(self) -> bool:
        return self.streams[self.row.client_id] > 0


class Sessions:
    """Keeps the stored sessions and their folders.

    Parameters
    ----------
    store
        Where they are kept.
    directory
        Folder of the sessions' folders.
    live
        The unfinished jobs.
    hub
        Tells panels.
    post
        Takes the core's events.
    clock
        Unix seconds.
    ttl_seconds
        A session lapses this long after its stream closed.
    retention_seconds
        How long a lapsed session and its folder are kept.
    """

    def __init__(
        self,
        store: Store,
        directory: str,
        live: LiveJobs,
        hub: Hub,
        post: Callable[[events.Event], None],
        clock: Callable[[], float],
        ttl_seconds: float,
        retention_seconds: float,
    ) -> None:
        self._store = store
        self._directory = directory
        self._live = live
        self._hub = hub
        self._post = post
        self._clock = clock
        self.ttl_seconds = ttl_seconds
        self._retention_seconds = retention_seconds
        self._tasks: set[asyncio.Task[None]] = set()
        self._known: dict[Key, _Known] = {}
        # a folder is never wiped while a new client comes under its tag
        self._changing = asyncio.Lock()

    # -- restoring -------------------------------------------------------------------------

    async def restore(self, now: float) -> list[Session]:
        """Read the stored sessions; those that were not said goodbye to are returned."""
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        restored = []
        for row in await self._store.sessions():
            known = _Known(row, _REQUESTS.decode(row.request), used=True)
            self._known[row.caller, row.lease_tag] = known
            if row.ended_at is None:
                restored.append(self._core_session(known, now + self.ttl_seconds))
        return restored

    # -- what the API asks -----------------------------------------------------------------

    async def open(self, caller: str, request: types.SessionRequest) -> types.SessionOpened:
        """Register a client, or update what it registered before."""
        async with self._changing:
            return await self._open(caller, request)

    async def _open(self, caller: str, request: types.SessionRequest) -> types.SessionOpened:
        now = self._clock()
        key = (caller, request.lease_tag)
        request.env = strip_protected(request.env)
        known = self._known.get(key)
        resumed = known is not None and known.row.ended_at is None
        session_dir = self._folder(caller, request.lease_tag)
        await asyncio.to_thread(os.makedirs, session_dir, 0o700, exist_ok=True)
        row = SessionRow(
            caller=caller,
            lease_tag=request.lease_tag,
            client_id=request.client_id,
            request=msgspec.json.encode(request),
            session_dir=session_dir,
            created_at=known.row.created_at if known is not None and resumed else now,
            expires_at=now + self.ttl_seconds,
        )
        await self._store.upsert_session(row)
        fresh = _Known(row, request)
        if known is not None and resumed:
            fresh.streams = known.streams
            fresh.used = known.used
        self._known[key] = fresh
        self._post(events.SessionOpened(self._core_session(fresh, row.expires_at)))
        if fresh.connected:
            self._post(events.SessionConnected(caller, request.lease_tag, request.client_id))
        self._announce(caller, request.lease_tag)
        return types.SessionOpened(
            lease_tag=request.lease_tag,
            token="",
            ttl_seconds=self.ttl_seconds,
            session_dir=session_dir,
            resumed=resumed,
        )

    def connect(self, caller: str, tag: str, client_id: str) -> None:
        """Count a client's stream as open.

        Raises
        ------
        NotFound
            No such session.
        Conflict
            Another client has taken it over.
        """
        known = self._registered(caller, tag)
        if known.row.client_id != client_id:
            raise Conflict(
                f"the session {tag} was taken over by another client; open one with another tag",
                error_class="SessionTakenOver",
            )
        known.streams[client_id] += 1
        self._post(events.SessionConnected(caller, tag, client_id))
        self._announce(caller, tag)

    async def disconnect(self, caller: str, tag: str, client_id: str) -> None:
        """Count a client's stream as closed; it lapses when none is opened again in time."""
        known = self._known.get((caller, tag))
        if known is None:
            return
        known.streams[client_id] -= 1
        if known.streams[client_id] > 0:
            return
        del known.streams[client_id]
        if known.row.ended_at is not None or known.row.client_id != client_id:
            return
        self._post(events.SessionDisconnected(caller, tag, client_id))
        known.row.expires_at = self._clock() + self.ttl_seconds
        self._announce(caller, tag)
        try:
            await self._store.touch_sessions([(caller, tag)], known.row.expires_at)
        except StoreError as error:
            log.warning("the session %s was not renewed in the store: %s", tag, error)

    async def close(self, caller: str, tag: str, client_id: str | None, how: str) -> None:
        """Take a goodbye."""
        known = self._registered(caller, tag)
        if client_id is not None and client_id != known.row.client_id:
            return
        if how == "restart":
            self._post(events.SessionEnded(caller, tag, "restart", client_id))
            return
        known.row.ended_at = self._clock()
        await self._store.end_session(caller, tag, known.row.ended_at)
        self._post(events.SessionEnded(caller, tag, "shutdown", client_id))
        self._announce(caller, tag)
        await self.clear(caller, tag)

    def view(self, caller: str, tag: str, pods: list[str]) -> types.SessionView:
        """Describe a session; raises `NotFound`."""
        known = self._registered(caller, tag)
        row, request = known.row, known.request
        states = [job.row.state for job in self._live.of_session(caller, tag)]
        return types.SessionView(
            lease_tag=tag,
            client_id=row.client_id,
            connected=known.connected,
            expires_at=None if known.connected else row.expires_at,
            created_at=row.created_at,
            notebook=request.notebook,
            kernel_id=request.kernel_id,
            cwd=request.cwd,
            session_dir=row.session_dir,
            environment_digest=request.environment.digest if request.environment else None,
            pods=pods,
            jobs_running=states.count("RUNNING"),
            jobs_queued=len(states) - states.count("RUNNING"),
        )

    def tags(self, caller: str) -> list[str]:
        """List the tags of a caller's sessions."""
        return [
            tag
            for (owner, tag), known in self._known.items()
            if owner == caller and known.row.ended_at is None
        ]

    # -- what launching asks ---------------------------------------------------------------

    def setting(self, caller: str, tag: str | None, job_id: str) -> Setting:
        """Say where a job runs."""
        known = None if tag is None else self._known.get((caller, tag))
        if known is not None:
            return Setting(known.request, known.row.session_dir)
        # a tag that nobody registered is only a tag; a job without any has a folder of its own
        return Setting(None, self._folder(caller, tag if tag is not None else f"\0{job_id}"))

    def first_use(self, caller: str, tag: str | None) -> bool:
        """Tell whether a session's folder is fresh, and count it as used from now on."""
        known = None if tag is None else self._known.get((caller, tag))
        if known is None:
            return tag is None
        first = not known.used
        known.used = True
        return first

    def environment(self, caller: str, tag: str | None) -> str | None:
        """Return the digest of a session's interpreter."""
        known = None if tag is None else self._known.get((caller, tag))
        if known is None or known.request.environment is None:
            return None
        return known.request.environment.digest

    # -- clearing away ---------------------------------------------------------------------

    async def clear(self, caller: str, tag: str) -> None:
        """Wipe an ended session's folder, once none of its jobs is left."""
        async with self._changing:
            known = self._known.get((caller, tag))
            if known is None or known.row.ended_at is None or self._live.has_session(caller, tag):
                return
            del self._known[caller, tag]
            await asyncio.to_thread(discard, known.row.session_dir)
            try:
                await self._store.delete_session(caller, tag)
            except StoreError as error:
                log.warning("the ended session %s stays in the store: %s", tag, error)

    def job_finished(self, live: LiveJob, _: FinishJob) -> None:
        """Wipe what a finished job leaves: its own folder, or that of its ended session."""
        row = live.row
        if row.lease_tag is None:
            work: Coroutine[Any, Any, None] = asyncio.to_thread(discard, live.session_dir)
        elif not self.is_ended(row.caller, row.lease_tag):
            return
        else:
            work = self.clear(row.caller, row.lease_tag)
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def is_ended(self, caller: str, tag: str) -> bool:
        """Tell whether a goodbye ended the session."""
        known = self._known.get((caller, tag))
        return known is not None and known.row.ended_at is not None

    async def sweep(self, now: float) -> None:
        """Forget sessions that were not heard of for days; renew those that are connected."""
        connected = [key for key, known in self._known.items() if known.connected]
        if connected:
            await self._store.touch_sessions(connected, now + self.ttl_seconds)
            for key in connected:
                self._known[key].row.expires_at = now + self.ttl_seconds
        for (caller, tag), known in list(self._known.items()):
            silent_seconds = 0.0 if known.connected else now - known.row.expires_at
            if known.row.ended_at is None and silent_seconds > self._retention_seconds:
                known.row.ended_at = now
                await self._store.end_session(caller, tag, now)
                self._post(events.SessionEnded(caller, tag, "shutdown"))
            await self.clear(caller, tag)

    def notify(self, instruction: NotifySession) -> None:
        """Tell panels that a session changed by itself."""
        self._announce(instruction.caller, instruction.tag)

    # -- small parts -----------------------------------------------------------------------

    def _registered(self, caller: str, tag: str) -> _Known:
        known = self._known.get((caller, tag))
        if known is None or known.row.ended_at is not None:
            raise NotFound(f"there is no session {tag}")
        return known

    def _core_session(self, known: _Known, open_until: float) -> Session:
        row, request = known.row, known.request
        return Session(
            caller=row.caller,
            tag=row.lease_tag,
            client_id=row.client_id,
            environment=request.environment.digest if request.environment else None,
            connected=known.connected,
            open_until=open_until,
            expires_at=row.expires_at,
        )

    def _folder(self, caller: str, tag: str) -> str:
        digest = hashlib.sha256(f"{caller}\0{tag}".encode()).hexdigest()[:16]
        return os.path.join(self._directory, digest)

    def _announce(self, caller: str, tag: str) -> None:
        if self._hub.watched:
            try:
                view: Any = self.view(caller, tag, [])
            except NotFound:
                return
            self._hub.publish("session", view, caller)
