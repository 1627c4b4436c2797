"""Jobs: accepted durably, committed in the core's order, and shown to those who follow them.

Every state that a client is told is durable before it is told. A commit that the store cannot
take now is tried again for as long as it takes; only a launch is given up instead, since its
pods can serve others meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import msgspec

from firepool_broker.api import types
from firepool_broker.core import events
from firepool_broker.core.instructions import (
    CommitLaunch,
    CommitQueued,
    CommitRequeue,
    FinishJob,
    NotifyJob,
    Waiting,
)
from firepool_broker.core.jobs import JobState
from firepool_broker.loop.hub import Hub
from firepool_broker.loop.livejobs import LiveJob, LiveJobs
from firepool_broker.loop.views import finish_change, job_view, status_event, waiting_view
from firepool_broker.metrics import Metrics
from firepool_broker.store.errors import LeadershipLost, StoreClosed, StoreError
from firepool_broker.store.outputs import OutputStore
from firepool_broker.store.records import JobChange, JobRow, Launch
from firepool_broker.store.store import Store

__all__ = ["Jobs"]

log = logging.getLogger(__name__)

_RETRY_SECONDS = (0.05, 0.2, 1.0, 5.0)
_PHASES = ("dispatch", "hand_off", "first_instruction")
_TERMINAL = frozenset(state.value for state in JobState if state.terminal)


class Jobs:
    """Executes the core's commits and answers questions about jobs.

    Parameters
    ----------
    store, outputs
        Where jobs and their outputs are kept.
    hub
        Tells panels.
    post
        Takes the core's events.
    clock
        Unix seconds.
    on_deposed
        Called when another broker leads.
    metrics
        Counts acquisitions, starts and ends.
    explain
        Says why a job waits.
    """

    def __init__(
        self,
        store: Store,
        outputs: OutputStore,
        hub: Hub,
        post: Callable[[events.Event], None],
        clock: Callable[[], float],
        on_deposed: Callable[[str], None],
        metrics: Metrics,
        explain: Callable[[str], Waiting | None],
    ) -> None:
        self.live = LiveJobs()
        self._store = store
        self._outputs = outputs
        self._hub = hub
        self._post = post
        self._clock = clock
        self._on_deposed = on_deposed
        self._metrics = metrics
        self._explain = explain
        self._tasks: set[asyncio.Task[None]] = set()
        self._finished: list[Callable[[LiveJob, FinishJob], None]] = []

    def on_finished(self, listener: Callable[[LiveJob, FinishJob], None]) -> None:
        """Tell somebody of every job whose end is durable."""
        self._finished.append(listener)

    # -- questions -------------------------------------------------------------------------

    async def find(self, job_id: str) -> tuple[JobRow, LiveJob | None] | None:
        """Return a job's row, and its live part while it is not finished."""
        live = self.live.get(job_id)
        if live is not None:
            return live.row, live
        row = await self._store.get_job(job_id)
        return None if row is None else (row, self.live.get(job_id))

    def launched(self, job_id: str) -> tuple[str, str, str | None, types.JobRequest]:
        """Return caller, pool, tag and request of an unfinished job, for its launch."""
        live = self.live.get(job_id)
        if live is None:
            raise KeyError(job_id)
        return live.row.caller, live.row.sku or "", live.row.lease_tag, live.request

    async def listed(
        self, caller: str, state: str | None, lease_tag: str | None, limit: int, before: str | None
    ) -> list[JobRow]:
        """List a caller's jobs, newest first."""
        return await self._store.list_jobs(
            caller=caller, state=state, lease_tag=lease_tag, limit=limit, before=before
        )

    def view(self, row: JobRow, live: LiveJob | None) -> types.JobView:
        """Describe a job to its caller."""
        if live is not None and row.state != "RUNNING":
            live.waiting = waiting_view(self._explain(row.id))
        if live is not None and live.silent:
            return job_view(row, live, types.OutputPosition())
        return job_view(row, live, self._outputs.summary(row.id))

    async def stream(
        self, row: JobRow, live: LiveJob | None, start: int
    ) -> AsyncIterator[types.StreamEvent]:
        """Yield a job, its output from a number on as it comes, and its end."""
        yield types.StreamEvent("job", msgspec.json.encode(self.view(row, live)))
        if self.live.get(row.id) is not None and live is not None:
            # nothing may come between this check and the first step of `follow`: a log that has
            # been finished is not followed any more
            async for event in self._outputs.follow(row.id, start):
                yield event
        else:
            async for event in self._outputs.read(row.id, start):
                yield event
        ended = live.row if live is not None else row
        if ended.state in _TERMINAL:
            yield types.StreamEvent("end", msgspec.json.encode(self.view(ended, None)))
        # otherwise this broker stops, and the client resumes with the next one

    # -- accepting -------------------------------------------------------------------------

    async def insert(self, live: LiveJob, idempotency_key: str | None) -> tuple[JobRow, bool]:
        """Store a new job; returns the row that is stored, and whether it is this one."""
        try:
            row, created = await self._store.insert_job(live.row, idempotency_key=idempotency_key)
        except LeadershipLost as error:
            self._on_deposed(str(error))
            raise
        if created:
            if self.live.get(row.id) is None:
                self.add(live)
            self._metrics.started("accept", self._clock() - row.submitted_at)
        return row, created

    def add(self, live: LiveJob) -> None:
        """Take an unfinished job in and tell panels."""
        self.live.add(live)
        self._announce(live)

    async def say(self, job_id: str, message: dict[str, object]) -> None:
        """Put a line of the broker's own into a job's output."""
        live = self.live.get(job_id)
        if live is not None:
            live.silent = False
        try:
            await self._outputs.append(job_id, [message])
        except StoreError as error:
            log.warning("a note for %s is lost: %s", job_id, error)

    async def tell_silence(self, job_id: str, text: str | None) -> None:
        """Tell a running job's followers that its pod is silent, or (None) that it answers."""
        live = self.live.get(job_id)
        if live is None:
            return
        live.waiting = None if text is None else types.Waiting("pod_silent", text, 0)
        self._announce(live)
        if text is None:
            text = "its pod answers again"
        message = {"type": "note", "t": self._clock(), "level": "warning", "text": text}
        await self.say(job_id, message)

    async def stop(self) -> None:
        """Give up what is being retried; what was committed stays."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- the core's instructions -----------------------------------------------------------

    def commit_queued(self, instruction: CommitQueued) -> None:
        """Commit PENDING → QUEUED."""
        self._spawn(self._commit_queued(instruction))

    def commit_launch(self, instruction: CommitLaunch) -> None:
        """Commit QUEUED → RUNNING with its bindings."""
        self._spawn(self._commit_launch(instruction))

    def commit_requeue(self, instruction: CommitRequeue) -> None:
        """Commit RUNNING → QUEUED."""
        self._spawn(self._commit_requeue(instruction))

    def finish(self, instruction: FinishJob) -> None:
        """Commit a terminal state, and end the job's stream."""
        live = self.live.get(instruction.job_id)
        if live is not None:
            self._spawn(self._finish(live, instruction))

    def notify(self, instruction: NotifyJob) -> None:
        """Show a job's waiting line."""
        live = self.live.get(instruction.job_id)
        if live is not None:
            live.waiting = waiting_view(instruction.waiting)
            self._announce(live)

    # -- how it is done --------------------------------------------------------------------

    async def _commit_queued(self, instruction: CommitQueued) -> None:
        live = self.live.get(instruction.job_id)
        if live is None:
            return
        change = JobChange(queued_at=self._clock())
        if await self._transition(live, instruction.version, "QUEUED", change):
            self._announce(live)

    async def _commit_launch(self, instruction: CommitLaunch) -> None:
        live = self.live.get(instruction.job_id)
        if live is None:
            self._post(events.LaunchLost(instruction.job_id, instruction.attempt))
            return
        launch = Launch(
            job_id=instruction.job_id,
            version=instruction.version,
            attempt=instruction.attempt,
            pods=instruction.pods,
            path=instruction.path,
            reason=instruction.reason,
            claimed_at=instruction.claimed_at,
            committed_at=self._clock(),
        )
        try:
            committed = await self._store.commit_launch(launch)
        except LeadershipLost as error:
            self._on_deposed(str(error))
            self._post(events.LaunchLost(instruction.job_id, instruction.attempt))
            return
        except StoreError as error:
            log.warning("the launch of %s was not committed: %s", live.row.id, error)
            self._post(events.LaunchLost(instruction.job_id, instruction.attempt))
            return
        if not committed:
            version = await self._version(instruction.job_id)
            self._post(events.LaunchLost(instruction.job_id, instruction.attempt, version))
            return
        row = live.row
        row.state = "RUNNING"
        row.version = instruction.version + 1
        row.attempt = instruction.attempt
        row.acquisition_path = instruction.path
        row.acquisition_reason = instruction.reason
        row.claimed_at = instruction.claimed_at
        row.committed_at = launch.committed_at
        live.pods = tuple(name for name, _ in instruction.pods)
        live.waiting = None
        live.silent = False
        self._metrics.acquired(instruction.path, instruction.reason)
        if instruction.attempt > 1 and self._outputs.summary(row.id).next:
            text = f"attempt {instruction.attempt}: the job runs again from its beginning"
            await self.say(row.id, {"type": "divider", "t": launch.committed_at, "text": text})
        self._post(events.LaunchCommitted(instruction.job_id, instruction.attempt))
        self._announce(live)

    async def _version(self, job_id: str) -> int | None:
        try:
            row = await self._store.get_job(job_id)
        except StoreError:
            return None
        return None if row is None else row.version

    async def _commit_requeue(self, instruction: CommitRequeue) -> None:
        live = self.live.get(instruction.job_id)
        if live is None:
            return
        change = JobChange(
            queued_at=self._clock(),
            user_retries=instruction.user_retries,
            infra_retries=instruction.infra_retries,
        )
        if await self._transition(live, instruction.version, "QUEUED", change):
            live.pods = ()
            error = instruction.error
            live.notes.append(
                f"attempt {live.row.attempt} ended with {error.error_class}: {error.message}"
            )
            self._announce(live)

    async def _finish(self, live: LiveJob, instruction: FinishJob) -> None:
        change = finish_change(instruction, live, self._clock())
        await self._transition(live, instruction.version, instruction.state.value, change)
        self.live.remove(instruction.job_id)
        live.waiting = None
        self._outputs.finish(instruction.job_id)
        self._count(live.row, instruction)
        if self._hub.watched:
            self._hub.publish("job", self.view(live.row, None), live.row.caller)
        for listener in self._finished:
            listener(live, instruction)

    async def _transition(self, live: LiveJob, version: int, state: str, change: JobChange) -> bool:
        """Commit, for as long as it takes; afterwards the row in memory says the same."""
        tries = 0
        while True:
            try:
                applied = await self._store.commit_transition(live.row.id, version, state, change)
                break
            except LeadershipLost as error:
                self._on_deposed(str(error))
                raise asyncio.CancelledError from error
            except StoreClosed:
                raise asyncio.CancelledError from None
            except StoreError as error:
                log.warning("%s → %s is not committed yet: %s", live.row.id, state, error)
                await asyncio.sleep(_RETRY_SECONDS[min(tries, len(_RETRY_SECONDS) - 1)])
                tries += 1
        if not applied:
            log.error("%s → %s found another version than %d", live.row.id, state, version)
            row = await self._store.get_job(live.row.id)
            if row is not None:
                live.row = row
            return False
        _apply(live.row, change)
        live.row.state = state
        live.row.version = version + 1
        return True

    def _count(self, row: JobRow, instruction: FinishJob) -> None:
        error = instruction.error
        self._metrics.job_ended(row.state, None if error is None else error.error_class)
        moments = (row.queued_at, row.committed_at, row.handed_off_at, row.first_instruction_at)
        for phase, begin, end in zip(_PHASES, moments, moments[1:], strict=False):
            if begin is not None and end is not None:
                self._metrics.started(phase, end - begin)

    def _announce(self, live: LiveJob) -> None:
        self._outputs.publish(live.row.id, "status", msgspec.json.encode(status_event(live)))
        if self._hub.watched:
            self._hub.publish("job", self.view(live.row, live), live.row.caller)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a commit failed", exc_info=task.exception())


def _apply(row: JobRow, change: JobChange) -> None:
    for name in change.__struct_fields__:
        value = getattr(change, name)
        if value is not msgspec.UNSET:
            setattr(row, name, value)
