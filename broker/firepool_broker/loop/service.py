"""The broker's actions, as the HTTP API calls them (`api.service.BrokerService`).

Every method confines itself to the caller's own jobs and sessions: another caller's do not exist
here. What is refused is refused with a typed error before anything was stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import AsyncIterator, Callable

import msgspec

from firepool_broker.api import types
from firepool_broker.api.errors import (
    Impossible,
    Invalid,
    NotAvailable,
    NotFound,
    Refused,
    Unavailable,
)
from firepool_broker.api.service import Goodbye
from firepool_broker.core import errors as core_errors
from firepool_broker.core import events as happenings
from firepool_broker.core.instructions import FinishJob
from firepool_broker.core.jobs import Job
from firepool_broker.identity.identities import Identity
from firepool_broker.launch.specification import references
from firepool_broker.loop.dispatcher import Dispatcher
from firepool_broker.loop.fleetviews import FleetViews
from firepool_broker.loop.hub import Hub
from firepool_broker.loop.jobs import Jobs
from firepool_broker.loop.livejobs import LiveJob, core_job
from firepool_broker.loop.sessions import Sessions
from firepool_broker.store.blobs import BlobStore
from firepool_broker.store.errors import StoreError
from firepool_broker.store.records import JobRow

__all__ = ["Service"]

_ENDING_SECONDS = 2.0
_STOP_GRACE_SECONDS = 2.0


class Service:
    """Implements what the API's handlers call.

    Parameters
    ----------
    dispatcher, jobs, sessions, views, hub
        The loop's parts.
    blobs
        What was uploaded, packages included.
    clock
        Unix seconds.
    broker_info
        What ``whoami`` says about the broker.
    shut_down
        Begins to end the broker: whether pods end too, and whether what runs was cancelled.
    hurry
        Lets nobody wait for a pod whose agent is silent.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        jobs: Jobs,
        sessions: Sessions,
        views: FleetViews,
        hub: Hub,
        blobs: BlobStore,
        clock: Callable[[], float],
        broker_info: Callable[[], types.BrokerInfo],
        shut_down: Callable[[bool, bool], None],
        hurry: Callable[[str], None],
    ) -> None:
        self._dispatcher = dispatcher
        self._machine = dispatcher.machine
        self._jobs = jobs
        self._sessions = sessions
        self._views = views
        self._hub = hub
        self._blobs = blobs
        self._clock = clock
        self._broker_info = broker_info
        self._shut_down = shut_down
        self._hurry = hurry
        self._pending: dict[str, list[str]] = {}
        self._told_default: set[tuple[str, str | None]] = set()
        self._endings: dict[str, asyncio.Event] = {}
        self._withdrawn: dict[str, asyncio.Event] = {}
        self._accepting = False
        self._ending = False
        jobs.on_finished(self._finished)
        dispatcher.listen(self._look_for_uploads)
        dispatcher.listen(self._look_for_withdrawn)

    def accept(self, accepting: bool) -> None:
        """Begin or end to take jobs."""
        self._accepting = accepting
        self._ending = not accepting

    # -- jobs ------------------------------------------------------------------------------

    async def submit(
        self, identity: Identity, request: types.JobRequest, idempotency_key: str | None
    ) -> tuple[types.JobView, bool]:
        """Accept a job durably and wake the dispatcher."""
        if not self._accepting:
            raise Unavailable(self._not_accepting(), retry_after=1.0)
        now = self._clock()
        row = self._row(identity, request, now)
        missing = self._missing(request)
        row.state = "PENDING" if missing else "QUEUED"
        row.queued_at = None if missing else now
        environment = request.environment.digest if request.environment is not None else None
        job = core_job(
            row,
            request,
            environment=environment or self._sessions.environment(row.caller, row.lease_tag),
        )
        try:
            self._machine.admit(job)
        except core_errors.SubmitRefused as error:
            raise _refusal(error) from error
        setting = self._sessions.setting(row.caller, row.lease_tag, row.id)
        live = LiveJob(row=row, request=request, session_dir=setting.session_dir, silent=True)
        says_default = request.sku is None and request.shape is None and self._is_news(row)
        unknown = await self._is_unknown(row.id)
        if unknown and not (missing or says_default or idempotency_key is not None):
            return await self._submit_at_once(live, job)
        stored, created = await self._jobs.insert(live, idempotency_key)
        if not created:
            return self._jobs.view(stored, self._jobs.live.get(stored.id)), False
        if missing:
            self._pending[row.id] = missing
        if says_default:
            await self._say_default(row)
        self._note_first_use(live)
        view = self._jobs.view(row, live)
        self._dispatcher.post(happenings.JobSubmitted(job))
        return view, True

    async def _submit_at_once(self, live: LiveJob, job: Job) -> tuple[types.JobView, bool]:
        """Have a job placed while its row is being stored.

        The store applies writes in their order: a launch that follows at once shares the row's
        transaction, and one whose row was refused finds nothing to launch. So no code runs
        before both are durable, and a warm start waits for one sync instead of two.
        """
        self._note_first_use(live)
        self._jobs.add(live)
        live.insertion = asyncio.create_task(self._jobs.insert(live, None))
        self._dispatcher.post(happenings.JobSubmitted(job))
        try:
            stored, created = await asyncio.shield(live.insertion)
        except StoreError:
            await self._withdraw(live)
            raise
        finally:
            live.insertion = None
        if not created:
            await self._withdraw(live)
            return self._jobs.view(stored, None), False
        return self._jobs.view(live.row, live), True

    async def _withdraw(self, live: LiveJob) -> None:
        """Have a job forgotten that was placed and whose row was refused."""
        forgotten = self._withdrawn[live.row.id] = asyncio.Event()
        self._jobs.live.remove(live.row.id)
        self._dispatcher.post(happenings.CancelRequested(live.row.id))
        # its launch may still be on the way to being refused; nothing that is said about it then
        # may reach another job of that id
        with contextlib.suppress(asyncio.TimeoutError):  # a broker that ends handles nothing more
            await asyncio.wait_for(forgotten.wait(), _ENDING_SECONDS)

    async def _is_unknown(self, job_id: str) -> bool:
        """Tell whether no unfinished job has an id, once nothing about it is under way."""
        while True:
            forgotten = self._withdrawn.get(job_id)
            same = self._jobs.live.get(job_id)
            if forgotten is not None:
                await forgotten.wait()
            elif same is None or same.insertion is None:
                return same is None
            else:
                await asyncio.wait([same.insertion])
                await asyncio.sleep(0)  # its submitter goes first

    def _look_for_withdrawn(self, _: happenings.Event) -> None:
        for job_id in [each for each in self._withdrawn if each not in self._machine.jobs]:
            self._withdrawn.pop(job_id).set()

    def _note_first_use(self, live: LiveJob) -> None:
        first = self._sessions.first_use(live.row.caller, live.row.lease_tag)
        live.session_files = "fresh" if first else "kept"

    async def job(self, identity: Identity, job_id: str) -> types.JobView:
        """Return one job."""
        row, live = await self._own(identity, job_id)
        return self._jobs.view(row, live)

    async def jobs(
        self,
        identity: Identity,
        *,
        state: types.JobState | None,
        lease_tag: str | None,
        limit: int,
        before: str | None,
    ) -> list[types.JobView]:
        """List the caller's jobs, newest first."""
        rows = await self._jobs.listed(identity.caller, state, lease_tag, limit, before)
        return [self._jobs.view(row, self._jobs.live.get(row.id)) for row in rows]

    async def cancel(self, identity: Identity, job_id: str) -> types.JobView:
        """Cancel a job."""
        row, live = await self._own(identity, job_id)
        if live is None:
            return self._jobs.view(row, None)
        message = f"cancelled by {_who(identity, row)}"
        return await self._ending_of(live, happenings.CancelRequested(job_id, message=message))

    async def interrupt(self, identity: Identity, job_id: str, *, kill: bool) -> types.JobView:
        """Interrupt a running job; a job that does not run yet is cancelled."""
        row, live = await self._own(identity, job_id)
        if live is None:
            return self._jobs.view(row, None)
        return await self._ending_of(live, happenings.InterruptRequested(job_id, kill))

    async def output(
        self, identity: Identity, job_id: str, start: int
    ) -> AsyncIterator[types.StreamEvent]:
        """Stream a job, its messages and its end."""
        row, live = await self._own(identity, job_id)
        async for event in self._jobs.stream(row, live, start):
            yield event

    # -- sessions --------------------------------------------------------------------------

    async def open_session(
        self, identity: Identity, request: types.SessionRequest
    ) -> types.SessionOpened:
        """Register or update a session."""
        return await self._sessions.open(identity.caller, request)

    async def sessions(self, identity: Identity) -> list[types.SessionView]:
        """List the caller's sessions."""
        return [await self.session(identity, tag) for tag in self._sessions.tags(identity.caller)]

    async def session(self, identity: Identity, lease_tag: str) -> types.SessionView:
        """Return one session."""
        pods = self._views.pods_of_session(identity.caller, lease_tag)
        return self._sessions.view(identity.caller, lease_tag, pods)

    async def session_connected(self, identity: Identity, lease_tag: str, client_id: str) -> None:
        """Count a client's stream as open."""
        self._sessions.connect(identity.caller, lease_tag, client_id)

    async def session_disconnected(
        self, identity: Identity, lease_tag: str, client_id: str
    ) -> None:
        """Count a client's stream as closed."""
        await self._sessions.disconnect(identity.caller, lease_tag, client_id)

    async def close_session(
        self, identity: Identity, lease_tag: str, client_id: str | None, how: Goodbye
    ) -> None:
        """Take a goodbye."""
        await self._sessions.close(identity.caller, lease_tag, client_id, how)

    async def release_session(self, identity: Identity, lease_tag: str) -> list[str]:
        """Give the session's held pods back."""
        self._sessions.view(identity.caller, lease_tag, [])  # refuses one that is not there
        held = self._views.pods_of_session(identity.caller, lease_tag, ("HELD", "RESETTING"))
        self._dispatcher.post(happenings.ReleaseRequested(identity.caller, lease_tag))
        return held

    # -- pools, pods, events ---------------------------------------------------------------

    async def pools(self, identity: Identity) -> types.PoolList:
        """List pools with their counts."""
        return self._views.pools(self._broker_info().isolation)

    async def pods(self, identity: Identity) -> list[types.PodView]:
        """List pods; of another caller's pods only pool and state are told."""
        return self._views.pods(identity)

    async def retire_pod(self, identity: Identity, name: str) -> None:
        """Drain one of the caller's own pods (any pod for an operator)."""
        owner = self._views.owner(name)
        if owner is None or not (identity.operator or owner == identity.caller):
            raise NotFound(f"there is no pod {name}")
        self._dispatcher.post(happenings.RetireRequested(name))
        self._hurry(name)

    async def events(self, identity: Identity) -> AsyncIterator[types.StreamEvent]:
        """Stream changes, for panels."""
        async for event in self._hub.watch(identity.caller, everything=identity.operator):
            yield event

    # -- the broker itself -----------------------------------------------------------------

    def info(self) -> types.BrokerInfo:
        """Return what ``whoami`` says about the broker."""
        return self._broker_info()

    def ready(self) -> bool:
        """Tell whether jobs are accepted."""
        return self._accepting

    async def shutdown(self, identity: Identity, *, drain: bool, cancel: bool) -> None:
        """Begin to end the broker; returns at once."""
        if drain and cancel:
            for live in self._jobs.live:
                # a waiting job that is detached loses nothing: the next broker runs it
                if live.row.state == "RUNNING" or live.row.attached:
                    self._dispatcher.post(
                        happenings.CancelRequested(
                            live.row.id,
                            message="the broker was stopped",
                            grace_seconds=_STOP_GRACE_SECONDS,
                        )
                    )
        self._shut_down(drain, cancel)

    def _not_accepting(self) -> str:
        if not self._ending:
            return "the broker is starting; try again"
        running = [live.row.id for live in self._jobs.live if live.row.state == "RUNNING"]
        if not running:
            return "the broker is ending; try again in a moment"
        return (
            f"the broker is ending, waits for {', '.join(running)} and takes nothing new; "
            "`firepool stop` ends them now"
        )

    # -- small parts -----------------------------------------------------------------------

    def _row(self, identity: Identity, request: types.JobRequest, now: float) -> JobRow:
        canonical = msgspec.json.encode(request, order="deterministic")
        return JobRow(
            id=request.id or secrets.token_hex(8),
            caller=identity.caller,
            request=canonical,
            request_digest=hashlib.sha256(canonical).hexdigest(),
            kind=request.kind,
            queue=request.queue,
            submitted_at=now,
            name=request.name,
            lease_tag=request.lease_tag,
            client_id=request.client_id,
            sku=self._resolve(request),
            attached=request.attached,
            priority=request.priority,
        )

    def _resolve(self, request: types.JobRequest) -> str:
        model, _, count = ((request.shape and request.shape.gpu) or "").partition(":")
        if model.isdigit() and any(pool.shape.gpu for pool in self._machine.policies.pools):
            raise Invalid(
                f"{model!r} is no kind of GPU; write KIND or KIND:N, as in h200:{model}",
                field="shape.gpu",
            )
        try:
            return self._machine.policies.resolve(
                request.sku,
                gpu=_count(count) if model else 0,
                cpu=(request.shape and request.shape.cpu) or 0,
                memory_gib=(request.shape and request.shape.memory_gib) or 0,
                gpu_model=model or None,
            ).name
        except core_errors.SubmitRefused as error:
            raise _refusal(error) from error

    def _missing(self, request: types.JobRequest) -> list[str]:
        wanted = (digest for _, digest in references(request))
        return [digest for digest in wanted if self._blobs.path(digest) is None]

    def _look_for_uploads(self, event: happenings.Event) -> None:
        """Let jobs go on whose package or inputs have come."""
        if self._pending and isinstance(event, happenings.Tick):
            self.uploaded()

    def uploaded(self) -> None:
        """Look which pending jobs have everything now."""
        for job_id, missing in list(self._pending.items()):
            if all(self._blobs.path(digest) is not None for digest in missing):
                del self._pending[job_id]
                self._dispatcher.post(happenings.JobReady(job_id))

    def restore_pending(self) -> None:
        """Take up the jobs that waited for an upload when the last broker ended."""
        for live in self._jobs.live:
            if live.row.state == "PENDING":
                self._pending[live.row.id] = self._missing(live.request)
        self.uploaded()

    def _is_news(self, row: JobRow) -> bool:
        return (row.caller, row.lease_tag) not in self._told_default

    async def _say_default(self, row: JobRow) -> None:
        self._told_default.add((row.caller, row.lease_tag))
        shape = self._machine.policies.get(row.sku or "").shape
        others = [pool.name for pool in self._machine.policies.pools if pool.name != row.sku]
        hint = f"; others: {', '.join(others)}" if others else ""
        text = f"on {row.sku} ({shape.cpu:g} cores, {shape.memory_gib:.3g} GiB), the default{hint}"
        await self._jobs.say(
            row.id,
            {"type": "note", "t": row.submitted_at, "level": "info", "topic": "pool", "text": text},
        )

    async def _own(self, identity: Identity, job_id: str) -> tuple[JobRow, LiveJob | None]:
        found = await self._jobs.find(job_id)
        if found is None or found[0].caller != identity.caller:
            raise NotFound(f"there is no job {job_id}", job=job_id)
        return found

    async def _ending_of(self, live: LiveJob, event: happenings.Event) -> types.JobView:
        """Post what may end a job; one that did not run has ended when this returns."""
        if live.row.state == "RUNNING":
            self._dispatcher.post(event)
            return self._jobs.view(live.row, live)
        ended = self._endings.setdefault(live.row.id, asyncio.Event())
        self._dispatcher.post(event)
        try:
            await asyncio.wait_for(ended.wait(), _ENDING_SECONDS)
        except asyncio.TimeoutError:
            self._endings.pop(live.row.id, None)
        row = live.row
        return self._jobs.view(row, self._jobs.live.get(row.id))

    def _finished(self, live: LiveJob, instruction: FinishJob) -> None:
        self._pending.pop(live.row.id, None)
        ended = self._endings.pop(live.row.id, None)
        if ended is not None:
            ended.set()


def _who(identity: Identity, row: JobRow) -> str:
    if identity.session is None:
        return f"{identity.caller} (command line, panel or another client)"
    return "its own session" if identity.session == row.lease_tag else f"session {identity.session}"


def _refusal(error: core_errors.SubmitRefused) -> Refused:
    if isinstance(error, core_errors.UnknownSku):
        return Invalid(str(error), error_class=error.error_class, field=error.field)
    if isinstance(error, core_errors.NotAvailable):
        return NotAvailable(str(error), error_class=error.error_class, field=error.field)
    if isinstance(error, core_errors.Draining):
        return Unavailable(str(error), error_class=error.error_class, retry_after=1.0)
    return Impossible(str(error), error_class=error.error_class, field=error.field)


def _count(text: str) -> int:
    if not text:
        return 1
    if not text.isdigit() or int(text) < 1:
        raise Invalid(
            f"{text!r} is no number of GPUs; write MODEL or MODEL:COUNT, as in h200:2",
            field="shape.gpu",
        )
    return int(text)
