"""The pods of one pool, indexed: what a claim can take, and the counts the scaler needs.

Never-used pods lie last-in first-out, held ones by owner and then by queue and tag. The counts by
scaler term are kept along with every change, so that a reconcile pass does not walk the pods.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from firepool_broker.core.pods import Pod, PodState
from firepool_broker.core.policy import PoolPolicy
from firepool_broker.core.sessions import SessionKey

STARTING, IDLE, ASSIGNED, RUNNING, RESETTING, HELD, DRAINING, UNHEALTHY, RETIRING, GONE = (
    PodState.STARTING,
    PodState.IDLE,
    PodState.ASSIGNED,
    PodState.RUNNING,
    PodState.RESETTING,
    PodState.HELD,
    PodState.DRAINING,
    PodState.UNHEALTHY,
    PodState.RETIRING,
    PodState.GONE,
)

TERMS: Final = ("stale", "running", "assigned", "starting", "idle", "held")
_STALE, _RUNNING, _ASSIGNED, _STARTING, _IDLE, _HELD = range(6)


def term_of(pod: Pod) -> int:
    """Return the index in :data:`TERMS` of the one scaler term that a pod counts in."""
    state = pod.state
    if pod.single_use:
        return _STALE
    if state is ASSIGNED:
        return _ASSIGNED
    if state is RUNNING:
        return _RUNNING
    if state is DRAINING:
        return _STALE if pod.job is None else _RUNNING
    if pod.stale or state is RETIRING or state is UNHEALTHY:
        return _STALE
    if state is HELD or state is RESETTING:
        return _HELD
    return _STARTING if state is STARTING else _IDLE


def _discard(stack: dict[Pod, None], pod: Pod) -> None:
    """Remove a pod from an ordered set.

    The newest is popped rather than deleted: a dict keeps a gap for every deleted key, and looking
    for the newest key walks over the gaps at its end; popping closes them.
    """
    if pod in stack:
        newest, _ = stack.popitem()
        if newest is not pod:
            stack[newest] = None
            del stack[pod]


HeldGroups = dict[tuple[str | None, str | None], dict[Pod, None]]
"""Held pods of one caller by ``(queue, tag)``."""


class Bucket:
    """The pods of one pool. Read by others, changed by the tracker.

    Attributes
    ----------
    policy, gpus, capped
        The pool's policy, GPUs of one pod, and whether a reuse cap is on.
    pods
        All of them by name.
    idle, starting
        Never-used pods that anybody may use, newest last.
    held
        Held pods by owner.
    resetting
        Pods about to be held.
    reserved
        Pods by the job they are reserved for.
    prepared
        Idle pods by the session for whose environment they keep a spare.
    terms
        Number of pods in each scaler term, see :data:`TERMS`.
    single_use, leaving, replaced
        Single-use pods; pods that are about to be missing; busy pods that retire afterwards.
    """

    __slots__ = (
        "capped",
        "gpus",
        "held",
        "idle",
        "leaving",
        "pods",
        "policy",
        "prepared",
        "replaced",
        "reserved",
        "resetting",
        "single_use",
        "starting",
        "terms",
    )

    def __init__(self, policy: PoolPolicy) -> None:
        self.policy = policy
        self.gpus = policy.shape.gpu
        self.capped = (
            policy.max_jobs_per_pod is not None or policy.max_pod_lifetime_seconds is not None
        )
        self.pods: dict[str, Pod] = {}
        self.idle: dict[Pod, None] = {}
        self.starting: dict[Pod, None] = {}
        self.held: dict[str | None, HeldGroups] = {}
        self.resetting: dict[Pod, None] = {}
        self.reserved: dict[str, Pod] = {}
        self.prepared: dict[SessionKey, Pod] = {}
        self.terms = [0] * len(TERMS)
        self.single_use = 0
        self.leaving = 0
        self.replaced = 0

    def held_by(self, caller: str) -> Iterator[Pod]:
        """Iterate over the pods held for a caller."""
        for group in self.held.get(caller, {}).values():
            yield from group

    def insert(self, pod: Pod) -> None:
        """Index a pod by its present state and flags."""
        state = pod.state
        self._count(pod, 1)
        if pod.reserved_for is not None:
            self.reserved[pod.reserved_for] = pod
            return
        if state is HELD:
            groups = self.held.get(pod.owner)
            if groups is None:
                groups = self.held[pod.owner] = {}
            key = (pod.queue, pod.tag)
            group = groups.get(key)
            if group is None:
                groups[key] = {pod: None}
            else:
                group[pod] = None
        elif state is IDLE:
            if not pod.stale and not pod.single_use:
                self.idle[pod] = None
                if pod.prepared_for is not None:
                    self.prepared[pod.prepared_for] = pod
        elif state is STARTING:
            if not pod.stale and not pod.single_use:
                self.starting[pod] = None
        elif state is RESETTING:
            self.resetting[pod] = None

    def assign(self, pod: Pod, job_id: str, retires: bool) -> None:
        """Mark a pod ASSIGNED to a job: every claim does this under the lock, so in one go.

        The same as :meth:`extract`, a change of state and :meth:`insert`, spelt out for the pods
        most claims get.
        """
        state = pod.state
        plain = state is IDLE and pod.reserved_for is None and pod.prepared_for is None
        if plain:
            self.terms[_IDLE] -= 1
            newest, _ = self.idle.popitem()
            if newest is not pod:
                self.idle[newest] = None
                del self.idle[pod]
        else:
            self.extract(pod)
        pod.came_from = state
        pod.state = ASSIGNED
        pod.job = job_id
        if plain and not retires:
            self.terms[_ASSIGNED] += 1
            return
        if retires:
            pod.retire_after = True
        self.insert(pod)

    def extract(self, pod: Pod) -> None:
        """Take a pod out of the index, before its state or flags change."""
        state = pod.state
        self._count(pod, -1)
        if pod.reserved_for is not None:
            self.reserved.pop(pod.reserved_for, None)
            return
        if state is HELD:
            groups = self.held[pod.owner]
            key = (pod.queue, pod.tag)
            group = groups[key]
            _discard(group, pod)
            if not group:
                del groups[key]
                if not groups:
                    del self.held[pod.owner]
        elif state is IDLE:
            _discard(self.idle, pod)
            if pod.prepared_for is not None and self.prepared.get(pod.prepared_for) is pod:
                del self.prepared[pod.prepared_for]
        elif state is STARTING:
            _discard(self.starting, pod)
        elif state is RESETTING:
            _discard(self.resetting, pod)

    def _count(self, pod: Pod, by: int) -> None:
        if pod.single_use:
            self.terms[_STALE] += by
            self.single_use += by
            return
        self.terms[term_of(pod)] += by
        state = pod.state
        if state is ASSIGNED or state is RUNNING:
            if pod.retire_after:
                self.replaced += by
                self.leaving += by
        elif state is DRAINING or state is RETIRING or state is UNHEALTHY:
            self.leaving += by
