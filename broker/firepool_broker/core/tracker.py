"""The tracker: every pod and every lease, in one index behind one lock.

No other module keeps a list of pods. A claim finds a pod, checks that the transition is legal and
the caller within its limits, and records the lease in one step under the lock, so that no two
claims ever get one pod and none overruns a limit. :meth:`Tracker.may_use` is the one predicate that
says who may take which pod; the claim, the scaler, hold breaking and estimates all ask it.

Pods are found by name, by pool (never-used ones last-in first-out, held ones by caller and then by
queue and tag) and by the job that holds their lease. :meth:`Tracker.validate` compares every index
with a recomputation.

The broker uses the tracker from one thread; the lock guards whoever embeds it otherwise.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from enum import Enum
from threading import Lock
from types import EllipsisType
from typing import Final, NamedTuple

from firepool_broker.core.bucket import (
    ASSIGNED,
    DRAINING,
    GONE,
    HELD,
    IDLE,
    RESETTING,
    RETIRING,
    RUNNING,
    STARTING,
    UNHEALTHY,
    Bucket,
)
from firepool_broker.core.errors import IllegalTransition, InvariantBroken
from firepool_broker.core.jobs import Job
from firepool_broker.core.pods import TRANSITIONS, Pod, PodState
from firepool_broker.core.policy import PoolPolicy
from firepool_broker.core.sessions import SessionKey

_LOG_LENGTH: Final = 20_000
# How many pods of one group a claim looks at for one whose environment fits: a preference must not
# turn a constant-time step into a search.
_PREFERENCE_DEPTH: Final = 8

_OWN: Final = "the pod this session used before"
_CROSSED: Final = "no pod of this session was held, another of its caller's was"
_HINTED: Final = "another session's pod of the same caller (the tag is only a hint here)"
_NONE_HELD: Final = "none of the caller's pods was held"
_ALL_OPEN: Final = "the caller's held pods belong to sessions that are open"
_CREATED: Final = "no pod was idle when the job was queued"
_OWN_POD: Final = "the job asked for a pod of its own"
_ENTITLED: Final = "the job waited at the pool's ceiling and was given the next slot"


class Refusal(Enum):
    """Why a claim got nothing."""

    NO_POD = "no_pod"
    POD_LIMIT = "pod_limit"
    GPU_LIMIT = "gpu_limit"


class Claim(NamedTuple):
    """A granted claim: the pod, the acquisition path, and why no warmer one was used."""

    pod: Pod
    path: str
    reason: str


class Usage:
    """What one caller's jobs lease at this moment."""

    __slots__ = ("gpus", "pods")

    def __init__(self) -> None:
        self.pods = 0
        self.gpus = 0


class Tracker:
    """All pods and leases.

    Parameters
    ----------
    policies
        One per pool.
    max_pods_per_caller, max_gpus_per_caller
        What one caller may lease at once; None is off.
    """

    def __init__(
        self,
        policies: Iterable[PoolPolicy],
        max_pods_per_caller: int | None = None,
        max_gpus_per_caller: int | None = None,
    ) -> None:
        self._lock = Lock()
        self._max_pods: float = math.inf if max_pods_per_caller is None else max_pods_per_caller
        self._max_gpus: float = math.inf if max_gpus_per_caller is None else max_gpus_per_caller
        self.buckets: dict[str, Bucket] = {policy.name: Bucket(policy) for policy in policies}
        self.pods: dict[str, Pod] = {}
        self.leases: dict[str, Pod] = {}
        self.usage: dict[str, Usage] = {}
        self.open_sessions: set[SessionKey] = set()
        self._log: deque[tuple[str, str, str, float, str]] = deque(maxlen=_LOG_LENGTH)

    # ------------------------------------------------------------------ the predicate

    def may_use(self, pod: Pod, job: Job) -> bool:
        """Whether ``job`` may take ``pod``, now or once it is ready (starting, resetting)."""
        if pod.reserved_for is not None:
            return pod.reserved_for == job.id and (pod.state is IDLE or pod.state is STARTING)
        if job.single_use or pod.single_use or pod.retire_after:
            return False
        state = pod.state
        if state is HELD or state is RESETTING:
            caller = job.caller
            tag = pod.tag
            if pod.owner != caller:
                return False
            return tag is None or tag == job.lease_tag or (caller, tag) not in self.open_sessions
        return (state is IDLE or state is STARTING) and not pod.stale

    # ------------------------------------------------------------------ claim

    def claim(self, job: Job, now: float) -> Claim | Refusal:
        """Find a pod for a job and lease it, in one step.

        The order: a held pod of the same caller, queue and tag; one across a boundary, which
        retires afterwards; one reserved for the job; a never-used idle pod.

        Returns
        -------
        Claim or Refusal
            What was leased, or which limit (or lack) refused it. Nothing is held on a refusal.
        """
        with self._lock:
            bucket = self.buckets[job.sku]
            usage = self.usage.get(job.caller)
            if usage is not None:
                if usage.pods >= self._max_pods:
                    return Refusal.POD_LIMIT
                if bucket.gpus and usage.gpus + bucket.gpus > self._max_gpus:
                    return Refusal.GPU_LIMIT
            found = self._find(bucket, job)
            if found is None:
                return Refusal.NO_POD
            pod, path, _ = found
            state = pod.state
            if state is not IDLE and state is not HELD:
                raise self._illegal(pod, ASSIGNED)
            bucket.assign(
                pod,
                job.id,
                path == "recycled"
                or pod.isolation == "none"
                or (bucket.capped and self._reaches_cap(bucket, pod, now)),
            )
            self.leases[job.id] = pod
            if usage is None:
                usage = self.usage[job.caller] = Usage()
            usage.pods += 1
            usage.gpus += bucket.gpus
            self._log.append((pod.name, state.value, "ASSIGNED", now, job.id))
            return found

    def _find(self, bucket: Bucket, job: Job) -> Claim | None:
        may_use = self.may_use
        groups = bucket.held.get(job.caller)
        if groups is not None:
            key = (job.queue, job.lease_tag)
            group = groups.get(key)
            if group is not None:
                pod = self._pick(group, job)
                if pod is not None:
                    return Claim(pod, "warm", _OWN)
            crossed: Pod | None = None
            for other, group in groups.items():
                if other == key:
                    continue
                pod = self._pick(group, job)
                if pod is None:
                    continue
                if bucket.policy.tag_policy == "hint" and other[0] == job.queue:
                    return Claim(pod, "warm", _HINTED)
                crossed = crossed or pod
            if crossed is not None:
                return Claim(crossed, "recycled", _CROSSED)
        if bucket.reserved:
            pod = bucket.reserved.get(job.id)
            if pod is not None and pod.state is IDLE and may_use(pod, job):
                if pod.single_use:
                    return Claim(pod, "single_use", _OWN_POD)
                return Claim(pod, "new", _ENTITLED)
        if job.single_use or not bucket.idle:
            return None
        pod = self._pick_idle(bucket, job)
        if pod is None:
            return None
        queued_at = job.queued_at
        if queued_at is not None and pod.created_at >= queued_at:
            return Claim(pod, "new", _CREATED)
        return Claim(pod, "warm", _NONE_HELD if groups is None else _ALL_OPEN)

    def _pick(self, group: dict[Pod, None], job: Job) -> Pod | None:
        """Return the newest usable pod of a group, rather one with the job's environment."""
        usable: Pod | None = None
        left = _PREFERENCE_DEPTH
        for pod in reversed(group):
            if self.may_use(pod, job):
                if pod.environment == job.environment:
                    return pod
                usable = usable or pod
            left -= 1
            if not left:
                break
        return usable

    def _pick_idle(self, bucket: Bucket, job: Job) -> Pod | None:
        """Return the newest idle pod, rather one with a spare for the job's session."""
        if bucket.prepared:
            if job.lease_tag is not None:
                pod = bucket.prepared.get((job.caller, job.lease_tag))
                if pod is not None and self.may_use(pod, job):
                    return pod
            left = _PREFERENCE_DEPTH
            for pod in reversed(bucket.idle):
                if pod.prepared_for is None and self.may_use(pod, job):
                    return pod
                left -= 1
                if not left:
                    break
        for pod in reversed(bucket.idle):
            if self.may_use(pod, job):
                return pod
        return None

    @staticmethod
    def _reaches_cap(bucket: Bucket, pod: Pod, now: float) -> bool:
        policy = bucket.policy
        if policy.max_jobs_per_pod is not None and pod.jobs_run + 1 >= policy.max_jobs_per_pod:
            return True
        lifetime = policy.max_pod_lifetime_seconds
        return lifetime is not None and now - pod.created_at >= lifetime

    def limit_left(self, caller: str, pool: str) -> float:
        """Return how many more pods of a pool a caller's limits allow (infinite when off)."""
        usage = self.usage.get(caller) or _NOTHING
        left = self._max_pods - usage.pods
        gpus = self.buckets[pool].gpus
        if gpus:
            left = min(left, (self._max_gpus - usage.gpus) // gpus)
        return max(0, left)

    # ------------------------------------------------------------------ leases

    def begin(self, job: Job, now: float) -> Pod:
        """Mark a job's lease as committed: ASSIGNED → RUNNING, its caller is the owner now."""
        with self._lock:
            pod = self.leases[job.id]
            bucket = self.buckets[pod.pool]
            bucket.extract(pod)
            if pod.state is ASSIGNED:  # it may be draining by now
                self._move(pod, RUNNING, now, job.id)
            pod.owner, pod.tag, pod.queue = job.caller, job.lease_tag, job.queue
            pod.environment = job.environment
            pod.prepared_for = None
            pod.reserved_for = None
            pod.jobs_run += 1
            bucket.insert(pod)
            return pod

    def undo(self, job: Job, now: float) -> Pod | None:
        """Give a lease back whose commit failed; the pod returns to where it came from.

        Returns
        -------
        Pod or None
            The pod; None when the job has no lease (its pod vanished meanwhile).
        """
        with self._lock:
            pod = self._drop_lease(job)
            if pod is None:
                return None
            bucket = self.buckets[pod.pool]
            bucket.extract(pod)
            if pod.state is ASSIGNED:
                self._move(pod, pod.came_from, now, "commit lost")
                pod.retire_after = False
            pod.job = None
            bucket.insert(pod)
            return pod

    def end(self, job: Job, now: float) -> Pod | None:
        """End a job's lease: RUNNING → RESETTING, or only without an attempt when it is leaving.

        Returns
        -------
        Pod or None
            The pod; None when the job has no lease.
        """
        with self._lock:
            pod = self._drop_lease(job)
            if pod is None:
                return None
            bucket = self.buckets[pod.pool]
            bucket.extract(pod)
            if pod.state is RUNNING:
                self._move(pod, RESETTING, now, job.id)
                pod.released_at = now
            pod.job = None
            bucket.insert(pod)
            return pod

    def _drop_lease(self, job: Job) -> Pod | None:
        pod = self.leases.pop(job.id, None)
        if pod is not None:
            usage = self.usage[job.caller]
            usage.pods -= 1
            usage.gpus -= self.buckets[pod.pool].gpus
            if not usage.pods:
                del self.usage[job.caller]
        return pod

    # ------------------------------------------------------------------ pods

    def add(
        self,
        name: str,
        pool: str,
        now: float,
        *,
        reserved_for: str | None = None,
        single_use: bool = False,
    ) -> Pod:
        """Enter a pod that is about to be created."""
        with self._lock:
            if name in self.pods:
                raise InvariantBroken(f"a pod called {name} exists already")
            pod = Pod(name, pool, now)
            pod.reserved_for = reserved_for
            pod.single_use = single_use
            self._enter(pod)
            self._log.append((name, "", "STARTING", now, "created"))
            return pod

    def adopt(self, pod: Pod, now: float, job: Job | None = None) -> None:
        """Enter a pod that a restart found, in the state it has, with the job on it."""
        with self._lock:
            if job is not None:
                pod.job = job.id
                self.leases[job.id] = pod
                usage = self.usage.setdefault(job.caller, Usage())
                usage.pods += 1
                usage.gpus += self.buckets[pod.pool].gpus
            self._enter(pod)
            self._log.append((pod.name, "", pod.state.value, now, "found at start"))

    def _enter(self, pod: Pod) -> None:
        bucket = self.buckets[pod.pool]
        self.pods[pod.name] = pod
        bucket.pods[pod.name] = pod
        bucket.insert(pod)

    def ready(self, pod: Pod, uid: str, isolation: str, now: float) -> None:
        """Note that a pod passed its readiness check: STARTING → IDLE."""
        with self._lock:
            bucket = self.buckets[pod.pool]
            bucket.extract(pod)
            self._move(pod, IDLE, now, "ready")
            pod.uid = uid
            pod.isolation = isolation
            pod.ready_at = now
            bucket.insert(pod)

    def hold(self, pod: Pod, now: float, seconds: float, cause: str = "clean") -> None:
        """Keep a clean pod for its owner until ``now + seconds``: RESETTING → HELD."""
        with self._lock:
            bucket = self.buckets[pod.pool]
            bucket.extract(pod)
            self._move(pod, HELD, now, cause)
            pod.released_at = now
            pod.hold_expires_at = now + seconds
            bucket.insert(pod)

    def retire(self, pod: Pod, reason: str, now: float) -> bool:
        """Take a pod out of service: → DRAINING, and → RETIRING once no attempt is on it.

        Returns
        -------
        bool
            Whether the pod moved to RETIRING, so that the backend must be told.
        """
        with self._lock:
            state = pod.state
            if state is RETIRING or state is GONE:
                return False
            bucket = self.buckets[pod.pool]
            bucket.extract(pod)
            if pod.retire_reason is None:
                pod.retire_reason = reason
            if state is not DRAINING and state is not UNHEALTHY:
                self._move(pod, DRAINING, now, reason)
            moved = pod.job is None
            if moved:
                self._move(pod, RETIRING, now, reason)
            bucket.insert(pod)
            return moved

    def distrust(self, pod: Pod, reason: str, now: float) -> None:
        """Move a pod to UNHEALTHY; :meth:`retire` follows once no attempt is on it."""
        with self._lock:
            bucket = self.buckets[pod.pool]
            bucket.extract(pod)
            pod.retire_reason = reason
            self._move(pod, UNHEALTHY, now, reason)
            bucket.insert(pod)

    def remove(self, pod: Pod, reason: str, now: float) -> None:
        """Forget a pod that is gone. Its lease, if any, must have been dropped before."""
        with self._lock:
            bucket = self.buckets[pod.pool]
            bucket.extract(pod)
            self._move(pod, GONE, now, reason)
            del self.pods[pod.name]
            del bucket.pods[pod.name]

    def update(
        self,
        pod: Pod,
        *,
        retire_after: bool | None = None,
        reserved_for: str | EllipsisType | None = ...,
        prepared_for: SessionKey | EllipsisType | None = ...,
        environment: str | EllipsisType | None = ...,
    ) -> None:
        """Change a pod's flags, keeping every index right."""
        with self._lock:
            bucket = self.buckets[pod.pool]
            bucket.extract(pod)
            if retire_after is not None:
                pod.retire_after = retire_after
            if not isinstance(reserved_for, EllipsisType):
                pod.reserved_for = reserved_for
            if not isinstance(prepared_for, EllipsisType):
                pod.prepared_for = prepared_for
            if not isinstance(environment, EllipsisType):
                pod.environment = environment
            bucket.insert(pod)

    # ------------------------------------------------------------------ history

    def story(self, name: str) -> list[str]:
        """Return a pod's last transitions as lines, oldest first (as far as the log goes)."""
        return [
            f"{start or 'created'} → {finish} at {when:.3f} ({cause})"
            for pod, start, finish, when, cause in self._log
            if pod == name
        ]

    def stories(self) -> dict[str, list[str]]:
        """Return the story of every pod that exists, in one walk of the log."""
        stories: dict[str, list[str]] = {name: [] for name in self.pods}
        for pod, start, finish, when, cause in self._log:
            lines = stories.get(pod)
            if lines is not None:
                lines.append(f"{start or 'created'} → {finish} at {when:.3f} ({cause})")
        return stories

    def _move(self, pod: Pod, finish: PodState, now: float, cause: str) -> None:
        start = pod.state
        if (start, finish) not in TRANSITIONS:
            raise self._illegal(pod, finish)
        pod.state = finish
        self._log.append((pod.name, start.value, finish.value, now, cause))

    def _illegal(self, pod: Pod, finish: PodState) -> IllegalTransition:
        return IllegalTransition(
            f"pod {pod.name}", pod.state.value, finish.value, self.story(pod.name)
        )

    # ------------------------------------------------------------------ validation

    def validate(self) -> None:
        """Compare every index with a recomputation from the pods alone.

        Raises
        ------
        InvariantBroken
            Something differs; the message names the pool and the index.
        """
        with self._lock:
            fresh = {name: Bucket(bucket.policy) for name, bucket in self.buckets.items()}
            leases: dict[str, Pod] = {}
            for name, pod in self.pods.items():
                _require(pod.name == name, f"{name} is filed under a wrong name")
                _require(pod.state is not GONE, f"{name} is gone and still filed")
                bucket = fresh[pod.pool]
                bucket.pods[name] = pod
                bucket.insert(pod)
                busy = pod.state is ASSIGNED or pod.state is RUNNING
                _require(not busy or pod.job is not None, f"{name} is {pod.state} without a job")
                if pod.job is not None:
                    _require(pod.job not in leases, f"{pod.job} holds two pods")
                    leases[pod.job] = pod
                if pod.state is HELD or pod.state is RESETTING or pod.state is RUNNING:
                    _require(pod.owner is not None, f"{name} was used and has no owner")
                if pod.state is IDLE or pod.state is STARTING:
                    _require(pod.owner is None, f"{name} has an owner and counts as never used")
            _require(leases == self.leases, "leases differ from the pods")
            for name, bucket in self.buckets.items():
                for index in Bucket.__slots__:
                    mine, right = getattr(bucket, index), getattr(fresh[name], index)
                    _require(mine == right, f"{name}.{index} is {mine}, recomputed {right}")
                _require(
                    sum(bucket.terms) == len(bucket.pods), f"{name}: a pod is in no term, or in two"
                )
            total = sum(one.pods for one in self.usage.values())
            _require(total == len(leases), f"usage counts {total} pods, leased are {len(leases)}")
            for caller, one in self.usage.items():
                _require(0 < one.pods <= self._max_pods, f"{caller} uses {one.pods} pods")
                _require(one.gpus <= self._max_gpus, f"{caller} uses {one.gpus} GPUs")


_NOTHING: Final = Usage()


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvariantBroken(message)
