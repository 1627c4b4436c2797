"""Attempts: handed over, followed, signalled and brought to their end.

The hand-off is repeated until its fate is known. Output goes into the store as it comes and is
shown at once; syncing it to disk and telling the agent so happen behind. `AttemptEnded` is
posted only when output, results and outcome are all stored, so that what the client is told is
true whatever dies next. An attempt whose pod is gone ends with its pod, after what its agent
managed to send has been read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from firepool_broker.core import events
from firepool_broker.core.instructions import FinishJob, Launch, SignalAttempt
from firepool_broker.launch.agent_client import (
    AgentAbsent,
    AgentClient,
    AgentLied,
    AgentRefused,
    AgentUnreachable,
)
from firepool_broker.launch.delivery import Delivery, Undeliverable
from firepool_broker.loop.fleet import Fleet
from firepool_broker.loop.guard import Attempt, Guard
from firepool_broker.loop.livejobs import LiveJob
from firepool_broker.metrics import Metrics
from firepool_broker.store.blobs import BlobStore
from firepool_broker.store.errors import OutputGap, StoreError
from firepool_broker.store.outputs import OutputStore

__all__ = ["Attempts"]

log = logging.getLogger(__name__)

_ACKNOWLEDGE_SECONDS = 1.0
_APPENDS_IN_FLIGHT = 8
_RETRY_SECONDS = (0.02, 0.1, 0.3, 1.0, 2.0)
_READ_ON_SECONDS = 2.0
_INTERRUPT_SECONDS = 10.0
_SIGNAL_TIMEOUT_SECONDS = 3.0
_UNREADABLE_TRIES = 3


class Attempts:
    """Executes launches and signals, and follows what runs.

    Parameters
    ----------
    fleet
        The pods.
    outputs, blobs
        Where output and large results are kept.
    post
        Takes the core's events.
    delivery
        Puts an attempt's documents and files together.
    on_deposed
        Called when an agent has seen a newer leader.
    metrics
        Counts resets.
    tell
        Tells a job's followers that its pod is silent, or (None) that it answers again.
    """

    def __init__(
        self,
        fleet: Fleet,
        outputs: OutputStore,
        blobs: BlobStore,
        post: Callable[[events.Event], None],
        delivery: Delivery,
        on_deposed: Callable[[str], None],
        metrics: Metrics,
        tell: Callable[[str, str | None], Coroutine[Any, Any, None]],
    ) -> None:
        self._fleet = fleet
        self._outputs = outputs
        self._blobs = blobs
        self._post = post
        self._delivery = delivery
        self._on_deposed = on_deposed
        self._metrics = metrics
        self._by_pod: dict[str, Attempt] = {}
        self.guard = Guard(fleet, self._by_pod, tell)
        self._signals: set[asyncio.Task[None]] = set()
        fleet.before_gone(self._read_on)

    # -- the core's instructions -----------------------------------------------------------

    def launch(self, instruction: Launch) -> None:
        """Hand an attempt over and follow it."""
        attempt = Attempt(instruction.job_id, instruction.attempt, instruction.pods[0][0])
        self._begin(attempt, self._launch(attempt))

    def resume(self, job_id: str, number: int, pod: str) -> None:
        """Follow an attempt that an earlier broker handed over, from what is stored on."""
        attempt = Attempt(job_id, number, pod)
        attempt.sent = attempt.accepted = True
        attempt.handed_over.set()
        self._begin(attempt, self._follow(attempt))

    def signal(self, instruction: SignalAttempt) -> None:
        """Signal an attempt, once it has been handed over; told to end, it ends in time."""
        attempt = self._by_pod.get(instruction.pods[0][0])
        attempt_id = f"{instruction.job_id}:{instruction.attempt}"
        if attempt is None or attempt.id != attempt_id:
            return
        if instruction.signal != "interrupt":
            self.guard.told_to_end(attempt, instruction.grace_seconds)
        self._track(self._signal(attempt, instruction))

    async def stop(self) -> None:
        """Stop following and leave the attempts as they are."""
        tasks = [*self._signals, *(a.task for a in self._by_pod.values() if a.task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.guard.stop()
        # what was read is stored: the next broker resumes behind it
        appends = [task for attempt in self._by_pod.values() for task in attempt.appends]
        await asyncio.gather(*appends, return_exceptions=True)
        self._by_pod.clear()

    # -- handing over ----------------------------------------------------------------------

    async def _launch(self, attempt: Attempt) -> None:
        try:
            spec = await self._delivery.specification(attempt.job_id, attempt.number)
        except Undeliverable as error:
            self._failed(attempt, error.error_class, str(error))
            return
        if not await self._deliver(attempt) or not await self._hand_over(attempt, spec):
            return
        attempt.handed_over.set()
        await self._follow(attempt)

    async def _deliver(self, attempt: Attempt) -> bool:
        """Bring the attempt's files to its pod; False when that is settled otherwise."""
        for pause in self._pauses(attempt):
            client = self._client(attempt)
            if client is None:
                return False  # the pod is gone: the fleet says so
            try:
                folder = self._fleet.backend.shared_folder(attempt.pod)
                await self._delivery.deliver(client, folder, attempt.job_id)
                self.guard.heard(attempt)
                return True
            except AgentUnreachable as error:
                if self._given_up(attempt, error):
                    return False
                await attempt.pause(pause)
            except AgentRefused as error:
                if await self._refused(attempt, error):
                    return False
                await attempt.pause(pause)
            except AgentLied as error:
                self._fleet.condemn(attempt.pod, str(error))
                return False
            except OSError as error:
                self._failed(attempt, "LaunchFailed", f"its files cannot be delivered: {error}")
                return False
        return False

    async def _hand_over(self, attempt: Attempt, spec: dict[str, Any]) -> bool:
        """Start the attempt, asking again until its fate is known; False when it does not run."""
        for pause in self._pauses(attempt):
            client = self._client(attempt)
            if client is None:
                return False
            try:
                await client.start_attempt(spec)
                attempt.sent = attempt.accepted = True
                self.guard.heard(attempt)
                return True
            except AgentUnreachable as error:
                # unless nobody was there at all, nobody knows whether it runs
                attempt.sent = attempt.sent or not isinstance(error, AgentAbsent)
                if self._given_up(attempt, error):
                    return False
                await attempt.pause(pause)
            except AgentRefused as error:
                if await self._refused(attempt, error):
                    return False
                await attempt.pause(pause)
            except AgentLied as error:
                self._fleet.condemn(attempt.pod, str(error))
                return False
        return False

    def _given_up(self, attempt: Attempt, error: AgentUnreachable) -> bool:
        """Give an attempt up that its agent cannot have got; True then."""
        now = asyncio.get_running_loop().time()
        if not isinstance(error, AgentAbsent):
            attempt.absent_since = None
        elif attempt.absent_since is None:
            attempt.absent_since = now
        if not self.guard.is_past_handing_over(attempt):
            return False
        self._failed(attempt, "LaunchFailed", f"it never got there: {error}", pod_suspect=True)
        return True

    def _failed(
        self, attempt: Attempt, error_class: str, message: str, *, pod_suspect: bool = False
    ) -> None:
        """Say that an attempt certainly does not run."""
        self._post(
            events.LaunchFailed(attempt.job_id, attempt.number, error_class, message, pod_suspect)
        )

    async def _refused(self, attempt: Attempt, error: AgentRefused) -> bool:
        """Deal with a refused hand-off; True when that settles it."""
        if error.error_class == "StaleEpoch":
            self._on_deposed(error.message)
            return True
        if error.error_class == "Internal" and await self._was_started(attempt):
            return False  # something went wrong afterwards: asking again tells its state
        if error.error_class == "Unauthorized":
            self._fleet.condemn(attempt.pod, f"its agent refuses our signature: {error.message}")
            return True
        self._failed(
            attempt,
            "PackageInvalid" if error.error_class == "DigestMismatch" else "LaunchFailed",
            f"{error.error_class}: {error.message}",
            pod_suspect=error.error_class not in ("Missing", "DigestMismatch", "BadRequest"),
        )
        return True

    async def _was_started(self, attempt: Attempt) -> bool:
        client = self._client(attempt)
        try:
            return client is not None and await client.attempt(attempt.id) is not None
        except (AgentUnreachable, AgentRefused, AgentLied):
            return True  # not known: ask again

    # -- following -------------------------------------------------------------------------

    async def _follow(self, attempt: Attempt) -> None:
        unreadable = 0
        reason = ""
        for pause in self._pauses(attempt):
            client = self._client(attempt)
            if client is None:
                return
            start = self._outputs.position(attempt.job_id, attempt.number)
            outcome: dict[str, Any] | None = None
            try:
                async for messages in client.output(attempt.id, start):
                    self.guard.heard(attempt)
                    if messages and await self._take(attempt, client, messages):
                        return
            except AgentUnreachable as error:
                if str(error) != reason:
                    reason = str(error)
                    log.info("output of %s broke off: %s", attempt.id, reason)
                if not attempt.dead.is_set():
                    outcome = await self.guard.probe(attempt)
            except OutputGap as error:
                log.warning("%s: %s; asking again", attempt.id, error)
            except AgentLied as error:
                self._fleet.condemn(attempt.pod, str(error))
                return
            except AgentRefused as error:
                if error.error_class == "StaleEpoch":
                    self._on_deposed(error.message)
                    return
                if error.status == 404:
                    self._unknown(attempt)
                    return
                if error.error_class != "Internal":
                    self._fleet.condemn(attempt.pod, f"it refuses its output: {error.message}")
                    return
                outcome = await self.guard.probe(attempt)
            except StoreError as error:
                log.error("output of %s cannot be stored: %s", attempt.id, error)
            finally:
                attempt.ending = False
            # whatever of them failed is asked for again, from what is stored
            await asyncio.gather(*attempt.appends, return_exceptions=True)
            attempt.appends.clear()
            moved = self._outputs.position(attempt.job_id, attempt.number) > start
            unreadable = 0 if moved or outcome is None else unreadable + 1
            if unreadable >= _UNREADABLE_TRIES and outcome is not None:
                await self._end_without_output(attempt, client, outcome)
                return
            await attempt.pause(pause)

    async def _end_without_output(
        self, attempt: Attempt, client: AgentClient, outcome: dict[str, Any]
    ) -> None:
        """End an attempt whose outcome its agent knows and whose output it cannot read any more."""
        log.error("the rest of the output of %s cannot be read from its pod", attempt.id)
        try:
            if not attempt.outcome_posted:
                await self._end(attempt, client, outcome)
        except (AgentUnreachable, AgentLied, StoreError) as error:
            self._fleet.condemn(attempt.pod, f"{attempt.id} cannot be brought to its end: {error}")
            return
        self._fleet.await_reset(attempt.pod)

    async def _take(
        self, attempt: Attempt, client: AgentClient, messages: list[dict[str, Any]]
    ) -> bool:
        """Store messages; True when the attempt's reset was reported."""
        numbered = [message for message in messages if "n" in message]
        if numbered:
            self._append(attempt, numbered)
            for message in numbered:
                if message.get("type") == "status" and message.get("phase") == "started":
                    self._started(attempt, message)
            if len(attempt.appends) > _APPENDS_IN_FLIGHT:
                await self._settle_appends(attempt)
        for message in messages[len(numbered) :]:
            if message.get("type") == "outcome" and not attempt.outcome_posted:
                await self._end(attempt, client, message)
            elif message.get("type") == "reset":
                reason = message.get("reason")
                clean = message.get("clean") is True
                self._metrics.reset(float(message.get("seconds") or 0.0), clean=clean)
                left = tuple(str(name) for name in message.get("left") or ())
                if left:
                    log.info("the reset of %s left what is not the pod's: %s", attempt.pod, left)
                self._post(events.ResetFinished(attempt.pod, clean, reason, left))
                return True
        return False

    def _append(self, attempt: Attempt, messages: list[dict[str, Any]]) -> None:
        appending = asyncio.create_task(
            self._outputs.append(attempt.job_id, messages, attempt=attempt.number)
        )
        attempt.appends.add(appending)
        appending.add_done_callback(lambda task: self._appended(attempt, task))

    def _appended(self, attempt: Attempt, task: asyncio.Task[int]) -> None:
        if task.cancelled() or task.exception() is not None:
            return  # stays among the appends, for whoever settles them to raise
        attempt.appends.discard(task)
        if attempt.acknowledging is None:
            attempt.acknowledging = asyncio.get_running_loop().call_later(
                _ACKNOWLEDGE_SECONDS, self._acknowledge, attempt
            )

    async def _settle_appends(self, attempt: Attempt) -> None:
        """Wait until everything taken so far is on the disk; raises what went wrong."""
        while attempt.appends:
            pending = list(attempt.appends)
            try:
                await asyncio.gather(*pending)
            finally:
                attempt.appends.difference_update(task for task in pending if task.done())

    def _acknowledge(self, attempt: Attempt) -> None:
        attempt.acknowledging = None
        following = self._outputs.position(attempt.job_id, attempt.number)
        client = self._client(attempt)
        if client is not None and not attempt.appends and following > attempt.acknowledged:
            attempt.acknowledged = following
            self._track(_acknowledge(client, attempt.id, following))

    def _started(self, attempt: Attempt, message: Mapping[str, Any]) -> None:
        moment = message.get("time", message.get("t"))
        if isinstance(moment, int | float):
            self._post(events.AttemptStarted(attempt.job_id, attempt.number, float(moment)))

    async def _end(self, attempt: Attempt, client: AgentClient, message: dict[str, Any]) -> None:
        attempt.ending = True
        outcome = {name: value for name, value in message.items() if name != "type"}
        if outcome.get("attempt") != attempt.id:
            raise AgentLied(f"it reports {outcome.get('attempt')!r} as {attempt.id}")
        await self._settle_appends(attempt)
        for result in outcome.get("results") or ():
            await self._fetch(attempt, client, result)
        if attempt.acknowledging is not None:
            attempt.acknowledging.cancel()
            attempt.acknowledging = None
        attempt.outcome_posted = True
        self._post(events.AttemptEnded(attempt.job_id, attempt.number, outcome))

    async def _fetch(self, attempt: Attempt, client: AgentClient, result: dict[str, Any]) -> None:
        """Bring a large result into the blob store; one that cannot come says why."""
        digest = result.get("sha256")
        if digest is None or result.get("data") is not None or result.get("error") is not None:
            return
        try:
            if self._blobs.path(digest) is not None:
                return
            async with self._blobs.upload(digest) as upload:
                async for piece in client.result(attempt.id, str(result["name"])):
                    await upload.write(piece)
                await upload.commit()
        except (StoreError, AgentRefused) as error:
            result["sha256"] = None
            result["error"] = f"it could not be fetched from the pod: {error}"

    # -- the ends of things ----------------------------------------------------------------

    def _unknown(self, attempt: Attempt) -> None:
        """Deal with an agent that has never heard of the attempt, so that it does not run."""
        if attempt.outcome_posted:  # its journal is gone before the reset was told of
            self._fleet.await_reset(attempt.pod)
            return
        self._failed(attempt, "LaunchFailed", "the attempt never reached its pod")

    def settled(self, live: LiveJob, instruction: FinishJob) -> None:
        """Tell the agent that an attempt is settled, so that it may forget it."""
        if instruction.outcome is None or not live.pods or self._fleet.is_leaving(live.pods[0]):
            return
        attempt_id = f"{live.row.id}:{live.row.attempt}"
        following = instruction.outcome.get("next")
        client = self._fleet.client(live.pods[0])
        self._track(_acknowledge(client, attempt_id, int(str(following or 0)), settled=True))

    async def _signal(self, attempt: Attempt, instruction: SignalAttempt) -> None:
        await attempt.handed_over.wait()
        loop = asyncio.get_running_loop()
        began = loop.time()
        for pause in self._pauses(attempt):
            client = self._client(attempt)
            current = self._by_pod.get(attempt.pod) is attempt
            if client is None or not current or attempt.outcome_posted:
                return
            try:
                passed = await client.signal(
                    attempt.id,
                    instruction.signal,
                    instruction.grace_seconds,
                    _SIGNAL_TIMEOUT_SECONDS,
                )
                self.guard.heard(attempt)
                if not passed:  # it has ended for its agent, and we wait for its outcome
                    await self.guard.probe(attempt)
                return
            except AgentUnreachable as error:
                # what is to end is ended by the guard; a late Ctrl-C helps nobody
                if instruction.signal == "interrupt" and loop.time() - began > _INTERRUPT_SECONDS:
                    log.warning("%s cannot be interrupted: %s", attempt.id, error)
                    return
                await attempt.pause(pause)
            except (AgentRefused, AgentLied) as error:
                log.warning("%s cannot be signalled: %s", attempt.id, error)
                return

    async def _read_on(self, pod: str) -> None:
        """Read what a dead agent still had sent, before its pod is said to be gone."""
        attempt = self._by_pod.get(pod)
        if attempt is None or attempt.task is None:
            return
        attempt.dead.set()
        await asyncio.wait([attempt.task], timeout=_READ_ON_SECONDS)
        attempt.task.cancel()
        await asyncio.gather(attempt.task, *attempt.appends, return_exceptions=True)
        self._by_pod.pop(pod, None)
        if not attempt.accepted and self._fleet.never_began(pod, attempt.id):
            self._failed(attempt, "LaunchFailed", "its pod ended before it began", pod_suspect=True)

    # -- small parts -----------------------------------------------------------------------

    def _begin(self, attempt: Attempt, work: Any) -> None:
        self._by_pod[attempt.pod] = attempt
        attempt.task = asyncio.create_task(work)
        attempt.task.add_done_callback(lambda task: self._finished(attempt, task))

    def _finished(self, attempt: Attempt, task: asyncio.Task[None]) -> None:
        attempt.handed_over.set()  # nobody may wait for ever to signal it
        if self._by_pod.get(attempt.pod) is attempt:
            del self._by_pod[attempt.pod]
        if not task.cancelled() and task.exception() is not None:
            log.error("following %s failed", attempt.id, exc_info=task.exception())
            self._fleet.condemn(attempt.pod, f"{attempt.id} cannot be followed")

    def _track(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._signals.add(task)
        task.add_done_callback(self._signals.discard)

    def _client(self, attempt: Attempt) -> AgentClient | None:
        if self._fleet.is_leaving(attempt.pod):
            return None
        try:
            return self._fleet.client(attempt.pod)
        except KeyError:
            return None

    def _pauses(self, attempt: Attempt) -> Any:
        """Yield pauses between tries, for as long as the attempt's pod is there."""
        tries = 0
        while not attempt.dead.is_set() and self._client(attempt) is not None:
            yield _RETRY_SECONDS[min(tries, len(_RETRY_SECONDS) - 1)]
            tries += 1


async def _acknowledge(
    client: AgentClient, attempt_id: str, following: int, *, settled: bool = False
) -> None:
    try:
        await client.acknowledge(attempt_id, following, settled=settled)
    except (AgentUnreachable, AgentRefused, AgentLied) as error:
        log.info("%s could not be acknowledged: %s", attempt_id, error)
