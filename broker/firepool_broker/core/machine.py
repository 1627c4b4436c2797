"""The machine: events in, instructions out.

``Machine.handle`` takes one event and the time, changes its own state, places what can be placed,
brings every pool it touched to what policy and queue ask for, and returns what the loop must do. It
does no I/O and reads no clock; the same object serves the production broker, the tests and a
simulation.

An event about something unknown, or about an attempt that is over, changes nothing, so replays are
harmless. The launch order is: claim, ``CommitLaunch``, ``LaunchCommitted``, ``Launch``; no code of
a job runs before the commit that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from random import Random
from typing import Any

from firepool_broker.core import events as e
from firepool_broker.core import verdict
from firepool_broker.core.deadlines import Due
from firepool_broker.core.dispatch import Dispatcher
from firepool_broker.core.errors import Draining, NotAvailable, QuotaImpossible
from firepool_broker.core.instructions import (
    Instruction,
    NotifyJob,
    Waiting,
)
from firepool_broker.core.job_rules import JobRules
from firepool_broker.core.jobs import Job
from firepool_broker.core.pod_rules import PodRules
from firepool_broker.core.pods import (
    Binding,
    ObservedPod,
)
from firepool_broker.core.policy import PoolPolicies
from firepool_broker.core.recovery import Recovery
from firepool_broker.core.session_rules import SessionRules
from firepool_broker.core.sessions import Session
from firepool_broker.core.state import State
from firepool_broker.core.waiting import Explainer

_NOTIFIED_POSITIONS = 200


class Machine:
    """All decisions of one broker.

    Parameters
    ----------
    policies
        Pools and limits.
    random
        Source of pod names; a seeded one makes a run reproducible.

    Attributes
    ----------
    jobs
        Every job that is not terminal, by id.
    tracker, queue, sessions, supply
        The collections that hold pods, waiting jobs and sessions, and what drives the number of
        pods. Read them, change nothing.
    idle_since
        Unix seconds since when there has been no live session and no unfinished job; None while
        there is one.
    """

    def __init__(self, policies: PoolPolicies, random: Random) -> None:
        self._state = state = State(policies, random)
        self.policies = policies
        self.tracker = state.tracker
        self.queue = state.queue
        self.sessions = state.sessions
        self.supply = state.supply
        self.jobs = state.jobs
        self.idle_since: float | None = None
        self._dispatcher = Dispatcher(state.tracker, state.queue, state.supply)
        self._explainer = Explainer(state.tracker, state.queue, state.supply)
        self._next_pass = float("-inf")
        pods = PodRules(state)
        jobs = JobRules(state, pods)
        sessions = SessionRules(state, jobs, pods)
        self._recovery = Recovery(state, jobs, pods)
        self._session_rules = sessions
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            e.Tick: self._on_tick,
            **jobs.handlers,
            **pods.handlers,
            **sessions.handlers,
        }
        self._due: dict[Due, Callable[[str, str, float], None]] = {
            Due.POOL: self._due_pool,
            **jobs.due,
            **pods.due,
            **sessions.due,
        }

    def admit(self, job: Job) -> None:
        """Refuse a job that could never run; call it before the job's row is inserted.

        Raises
        ------
        UnknownSku, NotAvailable, QuotaImpossible, Draining
            Each names the fix and, where one is at fault, the field.
        """
        if self.draining:
            raise Draining("the broker is shutting down; submit again in a moment")
        pool = self.policies.get(job.sku)
        if job.pods < 1:
            raise QuotaImpossible(f"pods is {job.pods}; ask for at least 1", field="pods")
        if job.pods > pool.max_count:
            raise QuotaImpossible(
                f"the job needs {job.pods} pods, {pool.name} has at most {pool.max_count}",
                field="pods",
            )
        limits = (
            ("pods", job.pods, self.policies.max_pods_per_caller),
            ("GPUs", job.pods * pool.shape.gpu, self.policies.max_gpus_per_caller),
        )
        for what, needed, limit in limits:
            if limit is not None and needed > limit:
                raise QuotaImpossible(
                    f"the job needs {needed} {what}, one caller may use at most {limit}",
                    field="pods" if what == "pods" else "sku",
                )
        if job.pods > 1:
            raise NotAvailable(
                f"{pool.name} runs jobs on one pod; leave out pods or use 1", field="pods"
            )

    def handle(self, event: e.Event, now: float) -> list[Instruction]:
        """Take one event and return what must be done, in order.

        Parameters
        ----------
        event
            What happened.
        now
            Unix seconds.
        """
        self._state.out = []
        self._expire(now)
        self._handlers[type(event)](event, now)
        self._settle(now)
        return self._state.out

    def restore(
        self,
        pods: Iterable[ObservedPod],
        jobs: Iterable[Job],
        sessions: Iterable[Session],
        bindings: Mapping[str, Binding],
        now: float,
    ) -> list[Instruction]:
        """Rebuild everything after a start, before any other event.

        Parameters
        ----------
        pods
            What the backend has, with what the agents said.
        jobs
            Every job of the store that is not terminal.
        sessions
            The stored sessions; they count as open for one period.
        bindings
            The last committed lease of each pod, by its uid.
        now
            Unix seconds.

        Returns
        -------
        list of Instruction
            A RUNNING job with a living pod stays on it: the loop asks the agent and answers with
            an event when there is anything to say. One without is decided here.
        """
        self._state.out = []
        self._recovery.restore(pods, jobs, sessions, bindings, now)
        self._settle(now)
        return self._state.out

    def next_wakeup(self) -> float | None:
        """Return the Unix time at which a ``Tick`` has something to do; None when never."""
        return self._state.deadlines.next()

    @property
    def draining(self) -> bool:
        """Whether no job is placed any more."""
        return self._state.draining

    @property
    def drained(self) -> bool:
        """Whether a drain is over: no pod is left."""
        return self.draining and not self.tracker.pods

    def waiting(self, job_id: str, now: float) -> Waiting | None:
        """Return why a job waits; None when it does not (or is unknown)."""
        job = self.queue.jobs.get(job_id)
        return None if job is None else self._explainer.explain(job, now)

    def estimate(self, pool: str, now: float) -> float | None:
        """Return about how many seconds a job submitted now would wait for a pod of ``pool``."""
        return self._explainer.estimate(pool, len(self.queue.pool(pool).order) + 1, now)

    def validate_state(self, now: float) -> None:
        """Compare every collection with a recomputation; for tests and doctors.

        Raises
        ------
        InvariantBroken
            Something differs.
        """
        verdict.validate(self, now)

    def _expire(self, now: float) -> None:
        for due, key, second in self._state.deadlines.due(now):
            self._due[due](key, second, now)

    def _settle(self, now: float) -> None:
        """Place what can be placed and bring the touched pools into shape."""
        timed = self._state.timed
        if now >= self._next_pass:
            self._next_pass = now + self.policies.reconcile_seconds
            self._state.deadlines.add(self._next_pass, Due.POOL, "")
            timed = set(self.tracker.buckets)
        touched = self._state.dirty | timed
        touched.update(
            name for name, queue in self.queue.pools.items() if queue.eligible or queue.single_use
        )
        self._state.dirty = set()
        self._state.timed = set()
        for pool in self.tracker.buckets:
            if pool in touched and not self.draining:
                self._dispatcher.dispatch(pool, now, self._state.out)
                self.supply.reconcile(pool, now, self._state.out, tick=pool in timed)
        self._session_rules.prepare()
        self._notify(now, everyone=bool(timed))
        if self.jobs or self.sessions.any_live():
            self.idle_since = None
        elif self.idle_since is None:
            self.idle_since = now

    def _notify(self, now: float, *, everyone: bool) -> None:
        jobs = self._state.new
        self._state.new = []
        if everyone:
            jobs = [*jobs]
            for queue in self.queue.pools.values():
                entries = [entry for lane in queue.lanes.values() for entry in lane[:8]]
                entries.sort(key=lambda entry: entry[0])
                jobs += [job for _, job in entries[:_NOTIFIED_POSITIONS]]
        for job in jobs:
            if job.id in self.queue.jobs:
                self._tell(job, now)

    def _tell(self, job: Job, now: float) -> None:
        """Say why a job waits, if that changed."""
        waiting = self._explainer.explain(job, now)
        if waiting is not None and self._state.told.get(job.id) != waiting:
            self._state.told[job.id] = waiting
            self._state.out.append(NotifyJob(job.id, waiting))

    def _on_tick(self, event: e.Tick, now: float) -> None:
        self._state.timed = set(self.tracker.buckets)

    def _due_pool(self, pool: str, _: str, now: float) -> None:
        self._state.timed.update([pool] if pool else self.tracker.buckets)
