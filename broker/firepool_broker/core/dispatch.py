"""The dispatcher: claims pods for as many queued jobs as it can, best job first.

One pass over a pool looks at the heads of its lanes only. A lane whose head finds no pod is left
for this pass, a caller at its limit with all its lanes, and the others go on: a blocked job never
blocks others.
"""

from __future__ import annotations

import heapq

from firepool_broker.core.instructions import CommitLaunch, Instruction, NotifyPod
from firepool_broker.core.jobs import Job
from firepool_broker.core.queue import JobQueue, LaneKey, OrderKey
from firepool_broker.core.supply import Supply
from firepool_broker.core.tracker import Claim, Refusal, Tracker


class Dispatcher:
    """Places queued jobs on pods.

    Parameters
    ----------
    tracker, queue, supply
        The parts it works with.
    """

    def __init__(self, tracker: Tracker, queue: JobQueue, supply: Supply) -> None:
        self._tracker = tracker
        self._queue = queue
        self._supply = supply

    def dispatch(self, pool: str, now: float, out: list[Instruction]) -> None:
        """Claim pods for the pool's eligible jobs, in order, and have the launches committed."""
        bucket = self._tracker.buckets[pool]
        queue = self._queue.pool(pool)
        if not queue.eligible and not queue.single_use:
            return
        for job_id in list(bucket.reserved):
            job = self._queue.jobs.get(job_id)
            if job is not None and self._queue.is_eligible(job):
                self._place(job, now, out)
        heads: list[tuple[OrderKey, LaneKey]] = []
        if bucket.idle:
            heads = [(lane[0][0], key) for key, lane in queue.lanes.items()]
        elif bucket.held:
            for caller in bucket.held:
                for key in queue.by_caller.get(caller or "", ()):
                    heads.append((queue.lanes[key][0][0], key))
        heapq.heapify(heads)
        full: set[str] = set()
        while heads:
            _, key = heapq.heappop(heads)
            if key[0] in full:
                continue
            placed = self._place(queue.lanes[key][0][1], now, out)
            if placed is Refusal.POD_LIMIT or placed is Refusal.GPU_LIMIT:
                full.add(key[0])
            elif placed is None:
                lane = queue.lanes.get(key)
                if lane is not None:
                    heapq.heappush(heads, (lane[0][0], key))

    def _place(self, job: Job, now: float, out: list[Instruction]) -> Refusal | None:
        claim = self._tracker.claim(job, now)
        if not isinstance(claim, Claim):
            return claim
        pod = claim.pod
        self._queue.take(job)
        job.claimed = True
        job.attempt += 1
        job.path = claim.path
        job.reason = claim.reason
        self._supply.busy(job.sku, job.caller, 1, now)
        self._supply.forget(job)
        out.append(
            CommitLaunch(
                job.id,
                job.attempt,
                job.version,
                ((pod.name, pod.uid),),
                claim.path,
                claim.reason,
                now,
            )
        )
        out.append(NotifyPod(pod.name))
        return None
