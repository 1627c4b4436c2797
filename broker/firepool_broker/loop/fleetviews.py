"""What the API answers about pools and pods, read from the machine's own collections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable

from firepool_broker.api import types
from firepool_broker.core.instructions import NotifyPod
from firepool_broker.core.machine import Machine
from firepool_broker.core.pods import OPERATOR_WORDS, Pod, PodState
from firepool_broker.identity.identities import Identity
from firepool_broker.loop.hub import Hub
from firepool_broker.metrics import FleetSnapshot

__all__ = ["FleetViews"]

_NOT_READY = frozenset({PodState.STARTING, PodState.DRAINING, PodState.RETIRING})
_ROUTABLE = frozenset({"warm_ready", "busy"})


class FleetViews:
    """Describes pools and pods.

    Parameters
    ----------
    machine
        Whose pods they are.
    hub
        Tells panels.
    clock
        Unix seconds.
    """

    def __init__(self, machine: Machine, hub: Hub, clock: Callable[[], float]) -> None:
        self._machine = machine
        self._hub = hub
        self._clock = clock
        self._isolation: str | None = None

    @property
    def isolation(self) -> str | None:
        """What isolates pods here, as their agents found it; None before the first pod."""
        for pod in self._machine.tracker.pods.values():
            if pod.ready_at:
                self._isolation = pod.isolation
                break
        return self._isolation

    # -- for the API -----------------------------------------------------------------------

    def pools(self, isolation: str) -> types.PoolList:
        """List pools with their counts."""
        now = self._clock()
        machine = self._machine
        views = []
        for policy in machine.policies.pools:
            knobs = policy.as_dict()
            shape, description = knobs.pop("shape"), knobs.pop("description")
            views.append(
                types.PoolView(
                    name=knobs.pop("name"),
                    shape=shape,
                    description=description,
                    policy=knobs,
                    counts=self._counts(machine.tracker.buckets[policy.name].pods.values()),
                    queue_length=len(machine.queue.pool(policy.name).order),
                    estimated_wait_seconds=machine.estimate(policy.name, now),
                    isolation=isolation,
                )
            )
        return types.PoolList(pools=views, default=machine.policies.default)

    def pods(self, identity: Identity) -> list[types.PodView]:
        """List pods; of another caller's pods only pool and state are told."""
        now = self._clock()
        stories = self._machine.tracker.stories()
        return [
            self._pod(pod, identity, now, stories[pod.name])
            for pod in self._machine.tracker.pods.values()
        ]

    def owner(self, name: str) -> str | None:
        """Return whose pod it is; an empty text for one never used, None when there is none."""
        pod = self._machine.tracker.pods.get(name)
        return None if pod is None else pod.owner or ""

    def pods_of_session(
        self, caller: str, tag: str, states: Collection[str] | None = None
    ) -> list[str]:
        """Name the pods that a session holds or uses, or those of them in some states."""
        return [
            pod.name
            for pod in self._machine.tracker.pods.values()
            if pod.owner == caller
            and pod.tag == tag
            and (states is None or pod.state.value in states)
        ]

    def notify(self, instruction: NotifyPod) -> None:
        """Tell panels that a pod changed, or is gone."""
        if not self._hub.watched:
            return
        pod = self._machine.tracker.pods.get(instruction.name)
        if pod is None:
            gone = types.PodView(
                name=instruction.name,
                uid=None,
                pool="",
                state=PodState.GONE.value,
                owner=None,
                session=None,
                queue=None,
                job=None,
                hold_expires_at=None,
                retire_after=False,
                isolation=None,
                age_seconds=0.0,
                jobs_run=0,
                story=[],
            )
            self._hub.publish("pod", gone)
            return
        everything = Identity(caller=pod.owner or "", operator=True)
        story = self._machine.tracker.story(pod.name)
        self._hub.publish("pod", self._pod(pod, everything, self._clock(), story), pod.owner)

    def snapshot(self) -> FleetSnapshot:
        """Count what ``/metrics`` shows."""
        now = self._clock()
        pods: Counter[tuple[str, ...]] = Counter()
        for pod in self._machine.tracker.pods.values():
            pods[pod.pool, OPERATOR_WORDS[pod.state]] += 1
        supply: dict[tuple[str, ...], int] = {}
        queue_length: dict[str, int] = {}
        queue_age_seconds: dict[str, float] = {}
        for name, bucket in self._machine.tracker.buckets.items():
            counts = self._counts(bucket.pods.values())
            for stage in ("requested", "scheduled", "ready", "routable"):
                supply[name, stage] = getattr(counts, stage)
            queue_length[name] = len(self._machine.queue.pool(name).order)
            since = [job.queued_at for job in self._machine.queue.jobs.values() if job.sku == name]
            oldest = min((moment for moment in since if moment is not None), default=now)
            queue_age_seconds[name] = now - oldest
        return FleetSnapshot(
            pods=pods,
            supply=supply,
            queue_length=queue_length,
            queue_age_seconds=queue_age_seconds,
        )

    # -- small parts -----------------------------------------------------------------------

    def _counts(self, pods: Iterable[Pod]) -> types.PodCounts:
        counts = types.PodCounts()
        for pod in pods:
            word = OPERATOR_WORDS[pod.state]
            setattr(counts, word, getattr(counts, word) + 1)
            counts.requested += 1
            counts.scheduled += 1  # a local pod has its place as soon as it is asked for
            if pod.state not in _NOT_READY:
                counts.ready += 1
            if word in _ROUTABLE:
                counts.routable += 1
        return counts

    def _pod(self, pod: Pod, identity: Identity, now: float, story: list[str]) -> types.PodView:
        mine = identity.operator or pod.owner is None or pod.owner == identity.caller
        return types.PodView(
            name=pod.name,
            uid=pod.uid or None if mine else None,
            pool=pod.pool,
            state=pod.state.value,
            owner=pod.owner if mine else None,
            session=pod.tag if mine else None,
            queue=pod.queue if mine else None,
            job=pod.job if mine else None,
            hold_expires_at=(pod.hold_expires_at or None) if mine else None,
            retire_after=pod.retire_after,
            isolation=pod.isolation if pod.ready_at else None,
            age_seconds=max(0.0, now - pod.created_at),
            jobs_run=pod.jobs_run if mine else 0,
            story=story if mine else [],
        )
