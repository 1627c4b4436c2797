"""Supply: which pods to create, which to retire, and whose hold to break.

One :meth:`Supply.reconcile` serves a pool: it takes the census, applies the scaler's plan, gives
the new pods to the jobs that are entitled to them, and, when jobs are blocked at the ceiling,
breaks holds. Nothing here places a job; the dispatcher does.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from functools import partial
from random import Random

from firepool_broker.core.bucket import Bucket
from firepool_broker.core.deadlines import Deadlines, Due
from firepool_broker.core.instructions import CreatePod, Instruction, NotifyPod, RetirePod
from firepool_broker.core.jobs import Job
from firepool_broker.core.pods import Pod, PodState
from firepool_broker.core.policy import PoolPolicies, PoolPolicy
from firepool_broker.core.queue import JobQueue, LaneKey
from firepool_broker.core.scaler import Census, Knobs, match, median, plan
from firepool_broker.core.tracker import Tracker

_MEASURED = 20
_BACKOFF_LEAST_SECONDS = 1.0
_BACKOFF_MOST_SECONDS = 60.0
# Looking for blocked jobs walks the queue; longer queues are walked by ticks only.
_WALK_AT_EVENTS = 256


class PoolState:
    """What the supply remembers of one pool.

    Attributes
    ----------
    starts, runs
        Measured seconds of the last pod starts and attempts.
    failures, backoff_until, failure
        Pod starts that failed in a row, until when none is tried, and why the last one failed.
    window_start, created
        The current reconcile interval and the creations in it, for ``step``.
    wake_at
        When the pool is next looked at for something that time alone changes.
    entitled
        Jobs that waited too long at the ceiling, by id, in order.
    blocked
        How many jobs the last look found blocked at the ceiling.
    peaks
        Each caller's concurrency over the last hold period.
    """

    __slots__ = (
        "backoff_until",
        "blocked",
        "created",
        "entitled",
        "failure",
        "failures",
        "peaks",
        "runs",
        "starts",
        "wake_at",
        "window_start",
    )

    def __init__(self) -> None:
        self.starts: deque[float] = deque(maxlen=_MEASURED)
        self.runs: deque[float] = deque(maxlen=_MEASURED)
        self.failures = 0
        self.backoff_until = 0.0
        self.failure = ""
        self.wake_at = 0.0
        self.window_start = float("-inf")
        self.created = 0
        self.entitled: dict[str, Job] = {}
        self.blocked = 0
        self.peaks: dict[str, Peak] = {}


class Peak:
    """A caller's concurrency in one pool: its level now and its peak over a window."""

    __slots__ = ("level", "samples")

    def __init__(self) -> None:
        self.level = 0
        self.samples: deque[tuple[float, int]] = deque()

    def change(self, by: int, now: float, window: float) -> None:
        """Note that the level changed."""
        self.level += by
        self.samples.append((now, self.level))
        self._prune(now, window)

    def peak(self, now: float, window: float) -> int:
        """Return the highest level during the last ``window`` seconds."""
        self._prune(now, window)
        return max((level for _, level in self.samples), default=0)

    def _prune(self, now: float, window: float) -> None:
        samples = self.samples
        # The sample before the window tells the level at its beginning.
        while len(samples) > 1 and samples[1][0] <= now - window:
            samples.popleft()


class Supply:
    """Decides about the number of pods.

    Parameters
    ----------
    policies, tracker, queue, deadlines
        The parts it looks at.
    random
        Source of pod names; a seeded one makes them reproducible.
    """

    def __init__(
        self,
        policies: PoolPolicies,
        tracker: Tracker,
        queue: JobQueue,
        deadlines: Deadlines,
        random: Random,
    ) -> None:
        self._policies = policies
        self._tracker = tracker
        self._queue = queue
        self._deadlines = deadlines
        self._random = random
        self.pools: dict[str, PoolState] = {policy.name: PoolState() for policy in policies.pools}

    def _wake(self, pool: str, when: float, now: float) -> None:
        """Have the pool looked at again at ``when``, unless that happens earlier anyway."""
        state = self.pools[pool]
        if not now < state.wake_at <= when:
            state.wake_at = when
            self._deadlines.add(when, Due.POOL, pool)

    # ------------------------------------------------------------------ what happened

    def started(self, pod: Pod, now: float) -> None:
        """Note that a pod became ready."""
        state = self.pools[pod.pool]
        state.failures = 0
        state.backoff_until = 0.0
        state.starts.append(max(0.0, now - pod.created_at))

    def start_failed(self, pool: str, reason: str, now: float) -> None:
        """Note that a pod never became ready; further tries wait longer and longer."""
        state = self.pools[pool]
        pause = min(_BACKOFF_LEAST_SECONDS * 2.0**state.failures, _BACKOFF_MOST_SECONDS)
        state.failures += 1
        state.failure = reason
        state.backoff_until = now + pause
        self._wake(pool, now + pause, now)

    def busy(self, pool: str, caller: str, by: int, now: float) -> None:
        """Note that a caller uses one pod more (1) or less (-1)."""
        state = self.pools[pool]
        peak = state.peaks.get(caller)
        if peak is None:
            peak = state.peaks[caller] = Peak()
        peak.change(by, now, self._tracker.buckets[pool].policy.hold_seconds)
        if not peak.level and len(state.peaks) > 1024:
            self._drop_quiet_peaks(pool, now)

    def _drop_quiet_peaks(self, pool: str, now: float) -> None:
        state = self.pools[pool]
        window = self._tracker.buckets[pool].policy.hold_seconds
        for caller in [one for one, peak in state.peaks.items() if not peak.peak(now, window)]:
            del state.peaks[caller]

    def forget(self, job: Job) -> None:
        """Give up what was meant for a job that was placed, cancelled or withheld."""
        self.pools[job.sku].entitled.pop(job.id, None)
        job.blocked_since = None
        pod = self._tracker.buckets[job.sku].reserved.get(job.id)
        if pod is not None and not pod.single_use and pod.job is None:
            self._tracker.update(pod, reserved_for=None)

    def start_seconds(self, pool: str) -> float:
        """Return the time a pod start takes: the median measured, else the policy's."""
        measured = median(self.pools[pool].starts)
        return (
            self._tracker.buckets[pool].policy.pod_start_seconds if measured is None else measured
        )

    # ------------------------------------------------------------------ retiring

    def retire(self, pod: Pod, reason: str, now: float, out: list[Instruction]) -> None:
        """Take a pod out of service and, once no attempt is on it, have it removed."""
        if self._tracker.retire(pod, reason, now):
            out.append(RetirePod(pod.name, pod.retire_reason or reason))
            self._deadlines.add(now + self._policies.reconcile_seconds, Due.RETIRE, pod.name)
        out.append(NotifyPod(pod.name))

    def on_the_way(self, bucket: Bucket) -> int:
        """Return how many slots become free by themselves: pods leaving with nothing on them."""
        if not bucket.leaving and not bucket.single_use:
            return 0
        gone = (PodState.DRAINING, PodState.RETIRING, PodState.UNHEALTHY)
        return sum(pod.state in gone and pod.job is None for pod in bucket.pods.values())

    def wants_slot(self, pod: Pod, now: float) -> bool:
        """Whether a pod that has just become held must go, for a job entitled to its slot."""
        bucket = self._tracker.buckets[pod.pool]
        entitled = self.pools[pod.pool].entitled
        if not entitled or now - pod.created_at < bucket.policy.hold_break_tenure_seconds:
            return False
        if any(self._tracker.may_use(pod, job) for job in entitled.values()):
            return False  # it can have the pod itself
        waiting = sum(job_id not in bucket.reserved for job_id in entitled)
        room = max(0, bucket.policy.max_count - len(bucket.pods))
        return waiting > room + self.on_the_way(bucket)

    # ------------------------------------------------------------------ census

    def census(self, pool: str, now: float) -> tuple[Census, dict[LaneKey, int]]:
        """Return a pool's census, and how many jobs of each lane held pods could serve."""
        bucket = self._tracker.buckets[pool]
        queue = self._queue.pool(pool)
        stale, running, assigned, starting, idle, held = bucket.terms
        matched = self._match_held(bucket)
        matched_held = sum(matched.values())
        entitled = sum(1 for job_id in self.pools[pool].entitled if job_id in bucket.reserved)
        free = len(bucket.idle) + len(bucket.starting)
        timeout = bucket.policy.idle_timeout_seconds
        return Census(
            queued=queue.eligible,
            starting=starting,
            idle=idle,
            assigned=assigned,
            running=running,
            held=held,
            stale=stale,
            single_use=bucket.single_use,
            leaving=bucket.leaving + self._capped_soon(bucket, now),
            replaced=bucket.replaced,
            matched_held=matched_held,
            unmatched=max(0, queue.eligible - matched_held - entitled - free),
            expired_idle=sum(now - pod.ready_at >= timeout for pod in bucket.idle),
        ), matched

    def _match_held(self, bucket: Bucket) -> dict[LaneKey, int]:
        """Match each caller's queued jobs to its pods that are held, or about to be."""
        queue = self._queue.pool(bucket.policy.name)
        matched: dict[LaneKey, int] = {}
        if not queue.lanes or not (bucket.held or bucket.resetting):
            return matched
        supply: dict[str, list[tuple[Pod, int]]] = {}
        for pod in bucket.resetting:
            if pod.owner in queue.by_caller:
                supply.setdefault(pod.owner, []).append((pod, 1))
        if len(bucket.held) <= len(queue.by_caller):
            owners = [owner for owner in bucket.held if owner in queue.by_caller]
        else:
            owners = [caller for caller in queue.by_caller if caller in bucket.held]
        for owner in owners:
            for group in bucket.held[owner].values():
                supply.setdefault(owner or "", []).append((next(iter(group)), len(group)))
        for caller, pods in supply.items():
            heads = {lane: queue.lanes[lane][0][1] for lane in queue.by_caller[caller]}
            demand = {lane: len(queue.lanes[lane]) for lane in heads}
            matched.update(match(demand, pods, partial(self._usable, heads)))
        return matched

    def _usable(self, heads: dict[LaneKey, Job], pod: Pod, lane: LaneKey) -> bool:
        return self._tracker.may_use(pod, heads[lane])

    def _capped_soon(self, bucket: Bucket, now: float) -> int:
        """Count pods without a job that the lifetime cap ends within one pod start."""
        lifetime = bucket.policy.max_pod_lifetime_seconds
        if lifetime is None:
            return 0
        soon = now + self.start_seconds(bucket.policy.name)
        states = (PodState.IDLE, PodState.HELD, PodState.RESETTING)
        return sum(
            pod.state in states and pod.created_at + lifetime <= soon
            for pod in bucket.pods.values()
        )

    # ------------------------------------------------------------------ passes

    def reconcile(self, pool: str, now: float, out: list[Instruction], *, tick: bool) -> None:
        """Bring one pool to what its policy and its queue ask for.

        Parameters
        ----------
        pool
            Its name.
        now
            Unix seconds.
        out
            Where instructions are put.
        tick
            A pass by time: pods past their keep-alive may go, long queues are walked.
        """
        bucket = self._tracker.buckets[pool]
        policy = bucket.policy
        state = self.pools[pool]
        if now - state.window_start >= self._policies.reconcile_seconds or now < state.window_start:
            state.window_start = now
            state.created = 0
        blocked_by_backoff = now < state.backoff_until
        room = policy.max_count - len(bucket.pods)
        if not blocked_by_backoff and room > 0:
            room -= self._create_reserved(bucket, now, room, out)
        census, matched = self.census(pool, now)
        knobs = Knobs(
            floor=policy.min_count,
            ceiling=policy.max_count,
            max_idle=policy.max_idle_count,
            step=max(0, policy.step - state.created),
            headroom=0 if blocked_by_backoff else float("inf"),
        )
        decided = plan(census, knobs)
        if decided.add:
            reason = _creation_reason(decided.demand_deficit, decided.replace_deficit)
            for _ in range(decided.add):
                self._create(policy, now, reason, out)
        elif decided.remove and tick:
            self._remove_expired(bucket, decided.remove, now, out)
        if census.unmatched and state.created >= policy.step:
            self._wake(pool, state.window_start + self._policies.reconcile_seconds, now)
        if tick:
            self._retire_outdated(bucket, now, out)
        waiting = self._queue.pool(pool)
        if len(bucket.pods) >= policy.max_count and (waiting.eligible or waiting.single_use):
            if tick or waiting.eligible <= _WALK_AT_EVENTS:
                self._relieve(bucket, matched, now, out)
        elif state.blocked or state.entitled:
            self._unblock(pool)

    def _create(
        self,
        policy: PoolPolicy,
        now: float,
        reason: str,
        out: list[Instruction],
        *,
        reserved_for: str | None = None,
        single_use: bool = False,
    ) -> None:
        name = f"{policy.name}-{self._random.getrandbits(32):08x}"
        while name in self._tracker.pods:
            name = f"{policy.name}-{self._random.getrandbits(32):08x}"
        self._tracker.add(name, policy.name, now, reserved_for=reserved_for, single_use=single_use)
        self.pools[policy.name].created += 1
        self._deadlines.add(now + policy.start_timeout_seconds, Due.START, name)
        out.append(CreatePod(name, policy.name, reason))
        out.append(NotifyPod(name))

    def _create_reserved(
        self, bucket: Bucket, now: float, room: int, out: list[Instruction]
    ) -> int:
        """Create pods for jobs entitled to one and for jobs that want one of their own."""
        created = 0
        for job in list(self.pools[bucket.policy.name].entitled.values()):
            if created < room and job.id not in bucket.reserved:
                waited = now - (job.blocked_since or now)
                reason = f"job {job.id} waited {waited:.0f} s at the ceiling"
                self._create(bucket.policy, now, reason, out, reserved_for=job.id)
                created += 1
        for _, job in self._queue.pool(bucket.policy.name).single_use:
            if created >= room:
                break
            if job.id in bucket.reserved or not self._tracker.limit_left(job.caller, job.sku):
                continue
            reason = f"job {job.id} asked for a pod of its own"
            self._create(bucket.policy, now, reason, out, reserved_for=job.id, single_use=True)
            created += 1
        return created

    def _remove_expired(
        self, bucket: Bucket, count: int, now: float, out: list[Instruction]
    ) -> None:
        timeout = bucket.policy.idle_timeout_seconds
        expired = [pod for pod in bucket.idle if now - pod.ready_at >= timeout]
        expired.sort(key=lambda pod: (pod.ready_at, pod.name))
        for pod in expired[:count]:
            self.retire(pod, "idle for longer than its keep-alive", now, out)

    def _retire_outdated(self, bucket: Bucket, now: float, out: list[Instruction]) -> None:
        """Retire pods past their lifetime, and never-used ones of an old template."""
        lifetime = bucket.policy.max_pod_lifetime_seconds
        at_rest = (PodState.IDLE, PodState.HELD)
        budget = bucket.policy.drain_budget - self.on_the_way(bucket)
        for pod in list(bucket.pods.values()):
            if pod.state not in at_rest:
                continue
            if pod.stale and pod.state is PodState.IDLE:
                if budget > 0:
                    budget -= 1
                    self.retire(pod, "made from an old template", now, out)
            elif (
                lifetime is not None
                and now - pod.created_at >= lifetime
                and not bucket.starting  # its replacement comes first
            ):
                self.retire(pod, "reached its lifetime", now, out)

    # ------------------------------------------------------------------ at the ceiling

    def _walk(self, bucket: Bucket, matched: dict[LaneKey, int]) -> Iterator[tuple[Job, bool]]:
        """Yield the eligible jobs in order, and whether each is blocked at the ceiling."""
        queue = self._queue.pool(bucket.policy.name)
        left = dict(matched)
        free = len(bucket.idle) + len(bucket.starting)
        allowance: dict[str, float] = {}
        lanes = [*queue.lanes.values(), queue.single_use]
        for _, job in heapq.merge(*lanes, key=lambda entry: entry[0]):
            allowed = allowance.get(job.caller)
            if allowed is None:
                allowed = self._tracker.limit_left(job.caller, job.sku)
            allowance[job.caller] = allowed - 1
            lane = (job.caller, job.queue, job.lease_tag)
            if allowed < 1 or job.id in bucket.reserved:
                yield job, False
            elif not job.single_use and left.get(lane, 0):
                left[lane] -= 1
                yield job, False
            elif not job.single_use and free:
                free -= 1
                yield job, False
            else:
                yield job, True

    def _relieve(
        self, bucket: Bucket, matched: dict[LaneKey, int], now: float, out: list[Instruction]
    ) -> None:
        """Free slots for jobs blocked at the ceiling: idle pods nobody may use, then holds."""
        policy = bucket.policy
        state = self.pools[policy.name]
        blocked: list[Job] = []
        queued: dict[str, list[Job]] = {}
        for job, is_blocked in self._walk(bucket, matched):
            queued.setdefault(job.caller, []).append(job)
            if not is_blocked:
                if job.id not in state.entitled:
                    job.blocked_since = None
                continue
            blocked.append(job)
            if job.blocked_since is None:
                job.blocked_since = now
                self._wake(policy.name, now + policy.starve_after_seconds, now)
            elif now - job.blocked_since >= policy.starve_after_seconds:
                state.entitled.setdefault(job.id, job)
        state.blocked = len(blocked)
        need = len(blocked) - self.on_the_way(bucket)
        if need <= 0:
            return
        for pod in self._breakable(bucket, queued, now):
            self.retire(pod, "its slot went to a job blocked at the ceiling", now, out)
            need -= 1
            if not need:
                return
        waiting = [job for job in state.entitled.values() if job.id not in bucket.reserved]
        short = len(waiting) - self.on_the_way(bucket)
        if short > 0:
            for pod in self._oldest_holds(bucket, now):
                if any(self._tracker.may_use(pod, job) for job in waiting):
                    continue
                self.retire(pod, "its slot went to a job that waited too long", now, out)
                short -= 1
                if not short:
                    return

    def _breakable(self, bucket: Bucket, queued: dict[str, list[Job]], now: float) -> Iterator[Pod]:
        """Yield pods that may be given up for a blocked job, the least useful first."""
        policy = bucket.policy
        may_use = self._tracker.may_use
        everyone = [job for jobs in queued.values() for job in jobs]
        for pod in list(bucket.pods.values()):
            if pod.state is PodState.IDLE and not any(may_use(pod, job) for job in everyone):
                yield pod
        holds = []
        wanting: dict[str, float] = {}
        for pod in self._oldest_holds(bucket, now):
            if now - pod.released_at < policy.hold_break_held_seconds:
                self._wake(policy.name, pod.released_at + policy.hold_break_held_seconds, now)
                continue
            owner = pod.owner or ""
            if owner not in wanting:
                wanting[owner] = min(
                    len(queued.get(owner, ())), self._tracker.limit_left(owner, policy.name)
                )
            if wanting[owner] > 0 and any(may_use(pod, job) for job in queued.get(owner, ())):
                wanting[owner] -= 1
                continue
            holds.append(pod)
        excess = self._beyond_peak(bucket, now)
        holds.sort(
            key=lambda pod: (
                now < pod.hold_expires_at,
                excess.get(pod.owner or "", 0) <= 0,
                pod.released_at,
                pod.name,
            )
        )
        yield from holds

    def _oldest_holds(self, bucket: Bucket, now: float) -> list[Pod]:
        """Return held pods past the tenure, oldest hold first."""
        tenure = bucket.policy.hold_break_tenure_seconds
        old = []
        for groups in bucket.held.values():
            for group in groups.values():
                for pod in group:
                    if now - pod.created_at >= tenure:
                        old.append(pod)
                    else:
                        self._deadlines.add(pod.created_at + tenure, Due.POOL, bucket.policy.name)
        old.sort(key=lambda pod: (pod.released_at, pod.name))
        return old

    def _beyond_peak(self, bucket: Bucket, now: float) -> dict[str, int]:
        """Return by caller how many pods it has beyond its peak in the last hold period."""
        window = bucket.policy.hold_seconds
        peaks = self.pools[bucket.policy.name].peaks
        excess = {}
        for caller, groups in bucket.held.items():
            if caller is None:
                continue
            held = sum(len(group) for group in groups.values())
            peak = peaks.get(caller)
            level, top = (peak.level, peak.peak(now, window)) if peak else (0, 0)
            excess[caller] = held + level - top
        return excess

    def _unblock(self, pool: str) -> None:
        """Stop the clocks of jobs that were blocked: the pool is below its ceiling."""
        state = self.pools[pool]
        if state.blocked:
            state.blocked = 0
            for job in self._queue.jobs.values():
                if job.sku == pool and job.id not in state.entitled:
                    job.blocked_since = None


def _creation_reason(demand_deficit: int, replace_deficit: int) -> str:
    if demand_deficit:
        return "jobs are queued"
    if replace_deficit:
        return "replaces a pod that retires after its job"
    return "keeps the pool's floor"
