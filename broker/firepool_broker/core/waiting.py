"""Why a job waits: one typed reason, one line for people, a position and an estimate.

Estimates come from measured pod starts and attempt times of the pool; without a measurement there
is the policy's expectation of a start, and no guess about anything else.
"""

from __future__ import annotations

import math

from firepool_broker.core.instructions import Waiting
from firepool_broker.core.jobs import Job
from firepool_broker.core.queue import JobQueue, Place
from firepool_broker.core.scaler import median
from firepool_broker.core.supply import Supply
from firepool_broker.core.tracker import Tracker


class Explainer:
    """Explains waits from the state of the tracker, the queue and the supply.

    Parameters
    ----------
    tracker, queue, supply
        The parts it looks at; it changes nothing.
    """

    def __init__(self, tracker: Tracker, queue: JobQueue, supply: Supply) -> None:
        self._tracker = tracker
        self._queue = queue
        self._supply = supply

    def explain(self, job: Job, now: float) -> Waiting | None:
        """Return why ``job`` waits at ``now``; None when it does not."""
        place = self._queue.place(job)
        if place is None:
            return None
        position = self._queue.position(job)
        if place is Place.PENDING:
            return Waiting("package", "waiting for its package", position)
        if place is Place.WITHHELD:
            return Waiting("withheld", "waiting for its notebook to come back", position)
        if place is Place.BEHIND:
            return Waiting("session_order", self._behind(job), position)
        if not self._tracker.limit_left(job.caller, job.sku):
            return Waiting("quota", self._quota(job), position)
        return self._for_pod(job, position, now)

    def estimate(self, pool: str, position: int, now: float) -> float | None:
        """Return about how many seconds the job at ``position`` waits for a pod of ``pool``."""
        bucket = self._tracker.buckets[pool]
        state = self._supply.pools[pool]
        start = self._supply.start_seconds(pool)
        rank = position - 1 - len(bucket.idle)
        if rank < 0:
            return 0.0
        created = sorted(pod.created_at for pod in bucket.starting)
        if rank < len(created):
            return max(0.0, start - (now - created[rank]))
        if now < state.backoff_until:
            return state.backoff_until - now + start
        if len(bucket.pods) < bucket.policy.max_count:
            return start
        run = median(state.runs)
        if run is None:
            return None
        rounds = math.ceil((rank - len(created) + 1) / bucket.policy.max_count)
        return run * rounds

    def _behind(self, job: Job) -> str:
        session = job.session
        line = self._queue.lines.get(session) if session is not None else None
        ahead = 0
        if line is not None:
            ahead = sum(entry[0] < job.sequence for entry in line.jobs) + (line.active is not None)
        earlier = "job" if ahead == 1 else f"{ahead} jobs"
        return f"waiting for the {earlier} before it in this session"

    def _quota(self, job: Job) -> str:
        users: dict[str, int] = {}
        for pod in self._tracker.leases.values():
            if pod.owner == job.caller:
                who = pod.tag or "jobs without a session"
                users[who] = users.get(who, 0) + 1
        usage = self._tracker.usage.get(job.caller)
        by = ", ".join(f"{tag}: {count}" for tag, count in sorted(users.items()))
        used = f"{usage.pods if usage is not None else 0} pods in use"
        return f"waiting for your own limit: {used}{f' ({by})' if by else ''}"

    def _for_pod(self, job: Job, position: int, now: float) -> Waiting:
        bucket = self._tracker.buckets[job.sku]
        state = self._supply.pools[job.sku]
        estimate = self.estimate(job.sku, position, now)
        about = f", ~{_seconds(estimate)}" if estimate is not None else ""
        reserved = bucket.reserved.get(job.id)
        if reserved is not None:
            left = max(0.0, self._supply.start_seconds(job.sku) - (now - reserved.created_at))
            message = f"waiting for a pod: its own is starting, ~{_seconds(left)}"
            return Waiting("pod_starting", message, position, left)
        starting = len(bucket.starting)
        if any(self._tracker.may_use(pod, job) for pod in bucket.resetting):
            return Waiting("pod_starting", "waiting for its pod's reset", position, estimate)
        if starting:
            message = f"waiting for a pod: {starting} starting{about}"
            return Waiting("pod_starting", message, position, estimate)
        if now < state.backoff_until:
            wait = _seconds(state.backoff_until - now)
            message = f"no pod could start ({state.failure}); next try in {wait}"
            return Waiting("no_capacity", message, position, estimate)
        leaving = self._supply.on_the_way(bucket)
        if leaving and len(bucket.pods) >= bucket.policy.max_count:
            message = f"waiting for a pod: {leaving} leaving, then one starts{about}"
            return Waiting("no_capacity", message, position, estimate)
        most = bucket.policy.max_count
        busy = bucket.terms[1] + bucket.terms[2]
        held = bucket.terms[5]
        others = f", {held} held" if held else ""
        queue = f", position {position}" if position > 1 else ""
        message = f"waiting for a pod: {busy} of {most} busy{others}{queue}{about}"
        if self._overtaken(job):
            return Waiting("priority", message, position, estimate)
        return Waiting("no_capacity", message, position, estimate)

    def _overtaken(self, job: Job) -> bool:
        """Whether the job at the head of its pool is there by priority alone."""
        order = self._queue.pool(job.sku).order
        return bool(order) and order[0][0] < -job.priority


def _seconds(seconds: float) -> str:
    """Return a duration as people say it."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 5400:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"
