"""Agents that fall silent: noticed, said, and got rid of when somebody wants them gone.

Locally pid and start time decide whether a pod lives, so silence alone ends nothing: an agent
that is stopped, swapped out or starved may come back, and its job with it. But nobody has to wait
for it. Whoever ends the job, retires the pod or stops the broker is obeyed within seconds,
whatever the agent does. And an agent that answers has to know its attempt: one that sits there
without, and without an outcome, has lost it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from msgspec import Struct, field

from firepool_broker.launch.agent_client import (
    AgentAbsent,
    AgentClient,
    AgentLied,
    AgentRefused,
    AgentUnreachable,
)
from firepool_broker.loop.fleet import Fleet

__all__ = ["Attempt", "Guard"]

log = logging.getLogger(__name__)

#: How long an agent that is told to end an attempt may stay silent, beyond the attempt's grace.
END_SECONDS = 5.0
#: And how long one may take that answers meanwhile: dying can be work.
WORK_SECONDS = 15.0

_LOOK_SECONDS = 1.0
_PROBE_SECONDS = 10.0
_PROBE_TIMEOUT_SECONDS = 5.0
_HURRIED_SECONDS = 6.0  # just above what an output stream may be silent for
_DELIVERY_SECONDS = 20.0
_SAID_AFTER_SECONDS = 30.0
_ABSENT_SECONDS = 20.0  # without a socket to connect to: gone, not slow
_UNKNOWN_SECONDS = 60.0
_UNSENT_SECONDS = 10.0


def _now() -> float:
    return asyncio.get_running_loop().time()


class Attempt(Struct, eq=False):
    """One attempt on its pod, and what was heard of it. Times are the loop's own."""

    job_id: str
    number: int
    pod: str
    handed_over: asyncio.Event = field(default_factory=asyncio.Event)
    sent: bool = False  # the agent may have been asked to start it
    accepted: bool = False  # and said that it did
    task: asyncio.Task[None] | None = None
    appends: set[asyncio.Task[int]] = field(default_factory=set)
    acknowledged: int = 0
    acknowledging: asyncio.TimerHandle | None = None
    ending: bool = False  # its outcome is here and is being stored
    outcome_posted: bool = False
    dead: asyncio.Event = field(default_factory=asyncio.Event)
    began: float = field(default_factory=_now)
    heard: float = field(default_factory=_now)
    probed: float = field(default_factory=_now)
    absent_since: float | None = None
    told_at: float | None = None  # when its agent was told to end it
    ends_by: float | None = None
    hurried: bool = False
    silence_said: bool = False
    probing: bool = False

    async def pause(self, seconds: float) -> None:
        """Wait before another try; not for a pod that has died."""
        try:
            await asyncio.wait_for(self.dead.wait(), seconds)
        except asyncio.TimeoutError:
            return

    @property
    def id(self) -> str:
        """The attempt's name at its agent."""
        return f"{self.job_id}:{self.number}"


class Guard:
    """Looks after the agents of running attempts.

    Parameters
    ----------
    fleet
        The pods.
    attempts
        What runs, by pod; changes all the time.
    tell
        Tells a job's followers that its pod is silent (a sentence) or answers again (None).
    """

    def __init__(
        self,
        fleet: Fleet,
        attempts: Mapping[str, Attempt],
        tell: Callable[[str, str | None], Coroutine[Any, Any, None]],
    ) -> None:
        self._fleet = fleet
        self._attempts = attempts
        self._tell = tell
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self) -> None:
        """Look after all attempts, for as long as the broker lives."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            for attempt in list(self._attempts.values()):
                self.look(attempt)

    async def stop(self) -> None:
        """Ask nothing more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- what others report ----------------------------------------------------------------

    def heard(self, attempt: Attempt) -> None:
        """Note a sign of life of an attempt's agent."""
        attempt.heard = _now()
        attempt.absent_since = None
        if attempt.silence_said:
            attempt.silence_said = False
            log.info("pod %s answers again", attempt.pod)
            self._spawn(self._tell(attempt.job_id, None))

    def told_to_end(self, attempt: Attempt, grace_seconds: float) -> None:
        """Begin to wait for the end of an attempt that was signalled."""
        attempt.told_at = _now()
        ends_by = attempt.told_at + grace_seconds
        attempt.ends_by = ends_by if attempt.ends_by is None else min(attempt.ends_by, ends_by)

    def hurry(self, pod: str | None = None) -> None:
        """Let attempts go on that run, and not those whose agent is silent."""
        for attempt in self._attempts.values():
            if pod is None or attempt.pod == pod:
                attempt.hurried = True

    # -- looking ---------------------------------------------------------------------------

    def look(self, attempt: Attempt) -> None:
        """Decide about one attempt."""
        if attempt.ending or attempt.outcome_posted or self._fleet.is_leaving(attempt.pod):
            return
        now = _now()
        silent_seconds = now - attempt.heard
        reason = self._overdue(attempt, now, silent_seconds)
        if reason is not None:
            self._fleet.condemn(attempt.pod, reason, at_once=True)
            return
        if attempt.accepted and silent_seconds >= _SAID_AFTER_SECONDS and not attempt.silence_said:
            attempt.silence_said = True
            text = (
                f"pod {attempt.pod} has not answered for {silent_seconds:.0f} s; its process is "
                "there, so the job may go on (interrupting twice or cancelling ends it)"
            )
            log.warning("%s: %s", attempt.id, text)
            self._spawn(self._tell(attempt.job_id, text))
        pause = _HURRIED_SECONDS / 2 if attempt.hurried else _PROBE_SECONDS
        if attempt.accepted and not attempt.probing and now - attempt.probed >= pause:
            self._spawn(self.probe(attempt))

    def _overdue(self, attempt: Attempt, now: float, silent_seconds: float) -> str | None:
        """Say why an attempt's pod must go; None while it may stay."""
        if attempt.told_at is not None and attempt.ends_by is not None:
            answers = attempt.heard > attempt.told_at
            if now >= attempt.ends_by + (WORK_SECONDS if answers else END_SECONDS):
                late_seconds = now - attempt.ends_by
                return f"its agent did not end {attempt.id} in time ({late_seconds:.0f} s late)"
        # a delivery that has begun may take longer than an answer
        patience = _HURRIED_SECONDS if attempt.sent else _DELIVERY_SECONDS
        if attempt.hurried and silent_seconds >= patience:
            return f"it must go, and its agent has been silent for {silent_seconds:.0f} s"
        absent_seconds = 0.0 if attempt.absent_since is None else now - attempt.absent_since
        if min(absent_seconds, silent_seconds) >= _ABSENT_SECONDS:
            return "nobody listens at its agent's address any more"
        if not attempt.accepted and attempt.sent and silent_seconds >= _UNKNOWN_SECONDS:
            return f"its agent never said whether it started {attempt.id}"
        return None

    def is_past_handing_over(self, attempt: Attempt) -> bool:
        """Tell whether an attempt that no agent can have got has waited long enough."""
        if attempt.sent:
            return False
        absent = attempt.absent_since is not None and _now() - attempt.began >= _UNSENT_SECONDS
        return absent or _now() - attempt.heard >= _UNKNOWN_SECONDS or attempt.told_at is not None

    async def probe(self, attempt: Attempt) -> dict[str, Any] | None:
        """Ask the agent about an attempt; returns its outcome when it has one.

        An agent that has neither the attempt nor an outcome loses its pod.
        """
        if attempt.probing or attempt.outcome_posted:
            return None
        attempt.probing = True
        try:
            return await self._probe(attempt)
        except AgentAbsent:
            if attempt.absent_since is None:
                attempt.absent_since = _now()
        except (AgentUnreachable, KeyError):
            attempt.absent_since = None  # somebody takes connections: slow, not gone
        except (AgentRefused, AgentLied) as error:
            if getattr(error, "status", None) != 404:  # which following finds out and settles
                log.warning("%s cannot be asked after: %s", attempt.id, error)
        finally:
            attempt.probing = False
            attempt.probed = _now()
        return None

    async def _probe(self, attempt: Attempt) -> dict[str, Any] | None:
        client = self._fleet.client(attempt.pod)
        state = await self._state(attempt, client)
        if state is None:
            return None
        outcome: dict[str, Any] | None = state.get("outcome")
        if outcome is not None or attempt.ending or attempt.outcome_posted:
            return outcome
        if state.get("state") != "lost":
            health = await client.health(_PROBE_TIMEOUT_SECONDS)
            if health.get("active") == attempt.id:
                return None
            # it may have ended between the two questions
            state = await self._state(attempt, client)
            if state is None or state.get("outcome") is not None:
                return None if state is None else state["outcome"]
        if not (attempt.ending or attempt.outcome_posted):
            reason = f"its agent ended {attempt.id} and has no outcome of it"
            self._fleet.condemn(attempt.pod, reason, at_once=True)
        return None

    async def _state(self, attempt: Attempt, client: AgentClient) -> dict[str, Any] | None:
        state = await client.attempt(attempt.id, _PROBE_TIMEOUT_SECONDS)
        self.heard(attempt)
        return state

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("looking after an agent failed", exc_info=task.exception())
