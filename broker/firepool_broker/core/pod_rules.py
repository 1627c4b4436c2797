"""Rules for pods: ready, released, reset, held, retired, gone.

A release never waits for anything: the pod resets and becomes held, or leaves when that was decided
before (it crossed a boundary, it serves once, its session said goodbye).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from firepool_broker.core import events as e
from firepool_broker.core.deadlines import Due
from firepool_broker.core.instructions import (
    AnnotatePod,
    NotifyPod,
    RetirePod,
)
from firepool_broker.core.jobs import Job, JobState
from firepool_broker.core.pods import (
    ATTEMPT,
    ENVIRONMENT,
    HOLD_SECONDS,
    JOB,
    JOBS_RUN,
    OWNER,
    QUEUE,
    RELEASED_AT,
    RETIRE_AFTER,
    SINGLE_USE,
    TAG,
    Pod,
    PodState,
)
from firepool_broker.core.state import State


class PodRules:
    """What happens to pods.

    Parameters
    ----------
    state
        What it changes.

    Attributes
    ----------
    handlers, due
        What it answers to, by the type of event and of deadline.
    on_lost
        What to do with a RUNNING job whose pod is gone: ``(job, reason, now)``.
    """

    on_lost: Callable[[Job, str, float], None]

    def __init__(self, state: State) -> None:
        self._state = state
        self.handlers: dict[type, Callable[[Any, float], None]] = {
            e.PodReady: self._on_pod_ready,
            e.PodStartFailed: self._on_start_failed,
            e.PodGone: self._on_pod_gone,
            e.PodUnhealthy: self._on_unhealthy,
            e.ResetFinished: self._on_reset,
            e.RetireRequested: self._on_retire,
            e.DrainRequested: self._on_drain,
        }
        self.due: dict[Due, Callable[[str, str, float], None]] = {
            Due.HOLD: self._due_hold,
            Due.IDLE: self._due_pool_of_pod,
            Due.START: self._due_start,
            Due.RESET: self._due_reset,
            Due.RETIRE: self._due_retire,
        }

    def release(self, job: Job, now: float) -> Pod | None:
        """End a lease; the pod resets, or leaves if that was decided before."""
        pod = self._state.tracker.end(job, now)
        self._state.supply.busy(job.sku, job.caller, -1, now)
        if pod is None:
            return None
        self._state.dirty.add(pod.pool)
        self._state.out.append(NotifyPod(pod.name))
        if pod.state is not PodState.RESETTING:
            self.retire(pod, pod.retire_reason or "draining", now)
        elif pod.single_use or pod.retire_after:
            self.retire(pod, _retire_after_reason(pod), now)
        else:
            timeout = self._state.tracker.buckets[pod.pool].policy.reset_timeout_seconds
            self._state.deadlines.add(now + timeout, Due.RESET, pod.name)
        return pod

    def release_unused(self, job: Job, now: float) -> None:
        """End a lease under which nothing ran: the pod is its owner's by the commit, and clean."""
        pod = self.release(job, now)
        if pod is not None and pod.state is PodState.RESETTING:
            self._hold(pod, now)

    def _hold(self, pod: Pod, now: float, left: tuple[str, ...] = ()) -> None:
        policy = self._state.tracker.buckets[pod.pool].policy
        seconds = policy.hold_seconds
        cause = f"clean; not the pod's, so left: {', '.join(left)}" if left else "clean"
        self._state.tracker.hold(pod, now, seconds, cause)
        self._state.dirty.add(pod.pool)
        self._state.deadlines.add(now + seconds, Due.HOLD, pod.name)
        if self._state.draining:
            self.retire(pod, "the broker shuts down", now)
        elif self._state.supply.wants_slot(pod, now):
            self.retire(pod, "its slot went to a job that waited too long", now)
        else:
            self._state.out.append(
                AnnotatePod(
                    pod.name,
                    {RELEASED_AT: f"{now:.3f}", HOLD_SECONDS: f"{seconds:g}", JOB: None},
                )
            )
            self._state.out.append(NotifyPod(pod.name))

    def annotate_lease(self, pod: Pod, job: Job) -> None:
        """Persist whose the pod is now."""
        self._state.out.append(
            AnnotatePod(
                pod.name,
                {
                    OWNER: job.caller,
                    TAG: job.lease_tag,
                    QUEUE: job.queue,
                    JOB: job.id,
                    ATTEMPT: str(job.attempt),
                    ENVIRONMENT: job.environment,
                    JOBS_RUN: str(pod.jobs_run),
                    RETIRE_AFTER: "true" if pod.retire_after else None,
                    SINGLE_USE: "true" if pod.single_use else None,
                    RELEASED_AT: None,
                    HOLD_SECONDS: None,
                },
            )
        )
        self._state.out.append(NotifyPod(pod.name))

    def retire(self, pod: Pod, reason: str, now: float) -> None:
        """Take a pod out of service; what runs on it is let finish."""
        self._state.supply.retire(pod, reason, now, self._state.out)
        self._state.dirty.add(pod.pool)

    def returned(self, pod: Pod, now: float) -> None:
        """Settle a pod that came back from a claim whose commit was lost."""
        if pod.state in (PodState.DRAINING, PodState.UNHEALTHY):
            self.retire(pod, pod.retire_reason or "draining", now)
        elif pod.state is PodState.HELD and pod.retire_reason is not None:
            self.retire(pod, pod.retire_reason, now)  # its session said goodbye meanwhile
        elif pod.state is PodState.HELD:
            self._state.deadlines.add(max(now, pod.hold_expires_at), Due.HOLD, pod.name)

    def _on_pod_ready(self, event: e.PodReady, now: float) -> None:
        pod = self._state.tracker.pods.get(event.name)
        if pod is None or pod.state is PodState.RETIRING:
            self._state.out.append(RetirePod(event.name, "it is not wanted any more"))
            return
        if pod.state is not PodState.STARTING:
            return
        self._state.tracker.ready(pod, event.uid, event.isolation, now)
        self._state.supply.started(pod, now)
        self._state.dirty.add(pod.pool)
        self._state.out.append(NotifyPod(pod.name))
        if event.attempts_started:
            self.retire(pod, "its agent ran an attempt before it was ready", now)
            return
        timeout = self._state.tracker.buckets[pod.pool].policy.idle_timeout_seconds
        self._state.deadlines.add(now + timeout, Due.IDLE, pod.name)

    def _on_start_failed(self, event: e.PodStartFailed, now: float) -> None:
        pod = self._state.tracker.pods.get(event.name)
        if pod is not None:
            if pod.state is PodState.STARTING:
                self._state.supply.start_failed(pod.pool, event.reason, now)
            self._gone(pod, event.reason, now)

    def _on_pod_gone(self, event: e.PodGone, now: float) -> None:
        pod = self._state.tracker.pods.get(event.name)
        if pod is not None:
            if pod.state is PodState.STARTING:
                self._state.supply.start_failed(pod.pool, event.reason or "it vanished", now)
            self._gone(pod, event.reason, now)

    def _gone(self, pod: Pod, reason: str, now: float) -> None:
        job = self._state.jobs.get(pod.job) if pod.job is not None else None
        if job is not None:
            self._state.tracker.end(job, now)
        self._state.tracker.remove(pod, reason or "gone", now)
        self._state.dirty.add(pod.pool)
        self._state.out.append(NotifyPod(pod.name))
        if job is not None and job.state is JobState.RUNNING:
            self.on_lost(job, f"pod {pod.name} is gone{f': {reason}' if reason else ''}", now)
        # A launch whose commit is under way is decided when the commit's answer comes.

    def _on_unhealthy(self, event: e.PodUnhealthy, now: float) -> None:
        pod = self._state.tracker.pods.get(event.name)
        leaving = (PodState.UNHEALTHY, PodState.RETIRING)
        if pod is None or pod.state in leaving:
            return
        if pod.state is PodState.STARTING:
            self._state.supply.start_failed(pod.pool, event.reason, now)
        self._state.tracker.distrust(pod, event.reason, now)
        self.retire(pod, event.reason, now)

    def _on_reset(self, event: e.ResetFinished, now: float) -> None:
        pod = self._state.tracker.pods.get(event.pod)
        if pod is None or pod.state is not PodState.RESETTING:
            return
        if not event.clean:
            reason = f"unclean reset: {event.reason or 'no reason given'}"
            self._state.tracker.distrust(pod, reason, now)
            self.retire(pod, reason, now)
        elif pod.retire_after:
            self.retire(pod, _retire_after_reason(pod), now)
        else:
            self._hold(pod, now, event.left)

    def _on_retire(self, event: e.RetireRequested, now: float) -> None:
        pod = self._state.tracker.pods.get(event.pod)
        if pod is not None:
            self.retire(pod, event.reason, now)

    def _on_drain(self, event: e.DrainRequested, now: float) -> None:
        self._state.draining = True
        for pod in list(self._state.tracker.pods.values()):
            self.retire(pod, "the broker shuts down", now)

    def _due_hold(self, name: str, _: str, now: float) -> None:
        pod = self._state.tracker.pods.get(name)
        if pod is None or pod.state is not PodState.HELD:
            return
        if now >= pod.hold_expires_at:
            self.retire(pod, "its hold ran out", now)

    def _due_start(self, name: str, _: str, now: float) -> None:
        pod = self._state.tracker.pods.get(name)
        if pod is not None and pod.state is PodState.STARTING:
            reason = f"not ready after {now - pod.created_at:.0f} s"
            self._state.supply.start_failed(pod.pool, reason, now)
            self.retire(pod, reason, now)

    def _due_reset(self, name: str, _: str, now: float) -> None:
        pod = self._state.tracker.pods.get(name)
        if pod is None or pod.state is not PodState.RESETTING:
            return
        timeout = self._state.tracker.buckets[pod.pool].policy.reset_timeout_seconds
        if now - pod.released_at >= timeout:
            reason = f"its reset did not end within {timeout:g} s"
            self._state.tracker.distrust(pod, reason, now)
            self.retire(pod, reason, now)

    def _due_retire(self, name: str, _: str, now: float) -> None:
        """Say again that a pod must go: the first time may have been lost with a broker."""
        pod = self._state.tracker.pods.get(name)
        if pod is not None and pod.state is PodState.RETIRING:
            self._state.out.append(RetirePod(name, pod.retire_reason or "retired"))
            self._state.deadlines.add(
                now + self._state.policies.reconcile_seconds, Due.RETIRE, name
            )

    def _due_pool_of_pod(self, name: str, _: str, now: float) -> None:
        pod = self._state.tracker.pods.get(name)
        if pod is not None:
            self._state.timed.add(pod.pool)


def _retire_after_reason(pod: Pod) -> str:
    if pod.retire_reason:
        return pod.retire_reason
    if pod.single_use or pod.isolation == "none":
        return "it serves one job only"
    return "it crossed a boundary or reached a cap"
