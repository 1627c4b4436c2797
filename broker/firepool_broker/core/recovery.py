"""Rebuilding the machine after a start, from three witnesses.

The store is the truth about jobs, the pods' annotations about ownership, and the agents' own
counters about use. A pod is *never used* only if all three say so. The last committed binding names
its owner; annotations may be one lease behind it, because they are written after the commit. Where
the witnesses contradict each other in any other way, the pod retires: that costs a pod, never the
isolation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from firepool_broker.core.deadlines import Due
from firepool_broker.core.instructions import RetirePod
from firepool_broker.core.job_rules import JobRules
from firepool_broker.core.jobs import Job, JobError, JobState
from firepool_broker.core.pod_rules import PodRules
from firepool_broker.core.pods import (
    ENVIRONMENT,
    HOLD_SECONDS,
    JOBS_RUN,
    OWNER,
    QUEUE,
    RELEASED_AT,
    RETIRE_AFTER,
    SINGLE_USE,
    TAG,
    Binding,
    ObservedPod,
    Pod,
    PodState,
)
from firepool_broker.core.sessions import Session
from firepool_broker.core.state import State


class Recovery:
    """Rebuilds the state of a machine.

    Parameters
    ----------
    state
        An empty one.
    jobs, pods
        The rules for what is found.
    """

    def __init__(self, state: State, jobs: JobRules, pods: PodRules) -> None:
        self._state = state
        self._jobs = jobs
        self._pods = pods

    def restore(
        self,
        pods: Iterable[ObservedPod],
        jobs: Iterable[Job],
        sessions: Iterable[Session],
        bindings: Mapping[str, Binding],
        now: float,
    ) -> None:
        """Fill an empty state; see ``Machine.restore``."""
        for session in sessions:
            session.connected = False
            self._state.sessions.put(session, now)
            self._state.deadlines.add(session.expires_at, Due.SESSION, *session.key)
        running: dict[str, Job] = {}
        orphans: list[Job] = []
        for job in sorted(jobs, key=lambda job: (job.submitted_at, job.id)):
            self._jobs.enter(job, now)
            if job.sku not in self._state.tracker.buckets:
                self._jobs.finish(
                    job, JobError("ShapeImpossible", f"there is no pool {job.sku}"), None, now
                )
            elif job.state is JobState.RUNNING:
                self._state.queue.activate(job)
                self._state.supply.busy(job.sku, job.caller, 1, now)
                orphans.append(job)
                for _, uid in job.bound:
                    running[uid] = job
            else:
                self._jobs.wait(job, now)
        for observed in sorted(pods, key=lambda pod: (pod.created_at, pod.name)):
            if observed.pool not in self._state.tracker.buckets:
                reason = f"there is no pool {observed.pool} any more"
                self._state.out.append(RetirePod(observed.name, reason))
                continue
            on_it = running.get(observed.uid)
            if (
                on_it is not None
                and observed.pool == on_it.sku
                and on_it.id not in self._state.tracker.leases
            ):
                self._adopt_running(observed, on_it, now)
            else:
                self._adopt_at_rest(observed, bindings.get(observed.uid), now)
        for job in orphans:
            if job.id not in self._state.tracker.leases:
                names = ", ".join(name for name, _ in job.bound) or "its pod"
                self._jobs.lost(job, f"{names} is gone since the broker was last up", now)

    def _adopt_running(self, observed: ObservedPod, job: Job, now: float) -> None:
        """Leave a RUNNING job on its pod; an event says how it went on."""
        owner = observed.annotations.get(OWNER)
        pod = _pod(observed)
        pod.state = PodState.RUNNING
        pod.owner, pod.tag, pod.queue = job.caller, job.lease_tag, job.queue
        pod.retire_after = (
            job.path == "recycled"
            or RETIRE_AFTER in observed.annotations
            or observed.isolation == "none"
        )
        self._state.tracker.adopt(pod, now, job)
        if owner is not None and owner != job.caller:
            self._pods.retire(
                pod, f"it is annotated as used by {owner}, {job.caller} runs on it", now
            )

    def _adopt_at_rest(self, observed: ObservedPod, binding: Binding | None, now: float) -> None:
        """Adopt a pod on which no job is RUNNING."""
        pod = _pod(observed)
        notes = observed.annotations
        used = binding is not None or OWNER in notes
        policy = self._state.tracker.buckets[pod.pool].policy
        if used:
            pod.owner = binding.caller if binding is not None else notes.get(OWNER)
            pod.queue = binding.queue if binding is not None else notes.get(QUEUE)
            pod.tag = binding.lease_tag if binding is not None else notes.get(TAG)
            pod.released_at = _number(notes.get(RELEASED_AT), now)
            seconds = _number(notes.get(HOLD_SECONDS), policy.hold_seconds)
            pod.hold_expires_at = pod.released_at + seconds
            resetting = observed.agent_state == "resetting"
            pod.state = PodState.RESETTING if resetting else PodState.HELD
            if resetting:
                pod.released_at = now
        else:
            pod.state = PodState.IDLE if observed.ready else PodState.STARTING
        self._state.tracker.adopt(pod, now)
        reason = _unusable(observed, binding, used)
        if reason is not None:
            self._state.tracker.distrust(pod, reason, now)
            self._pods.retire(pod, reason, now)
        elif pod.state is PodState.HELD:
            self._state.deadlines.add(max(now, pod.hold_expires_at), Due.HOLD, pod.name)
        elif pod.state is PodState.RESETTING:
            self._state.deadlines.add(now + policy.reset_timeout_seconds, Due.RESET, pod.name)
        elif pod.state is PodState.IDLE:
            self._state.deadlines.add(
                pod.ready_at + policy.idle_timeout_seconds, Due.IDLE, pod.name
            )
        else:
            started = max(now, pod.created_at + policy.start_timeout_seconds)
            self._state.deadlines.add(started, Due.START, pod.name)


def contradiction(observed: ObservedPod, binding: Binding | None) -> str | None:
    """Return why a pod's three witnesses cannot all be right; None when they can."""
    owner = observed.annotations.get(OWNER)
    attempts = observed.attempts_started
    if binding is None:
        if owner is not None:
            return f"it is annotated as used by {owner}, and no commit says so"
        if attempts:
            return f"its agent ran {attempts} attempts, and no commit says so"
        return None
    if owner is not None and owner != binding.caller:
        return f"it is annotated as used by {owner}, the last commit says {binding.caller}"
    if attempts == 0 and owner is not None and RELEASED_AT in observed.annotations:
        return f"it was released by {owner}, and its agent never ran an attempt"
    return None


def _pod(observed: ObservedPod) -> Pod:
    pod = Pod(observed.name, observed.pool, observed.created_at)
    notes = observed.annotations
    pod.uid = observed.uid
    pod.isolation = observed.isolation
    pod.stale = observed.stale
    pod.single_use = SINGLE_USE in notes
    pod.environment = notes.get(ENVIRONMENT)
    pod.jobs_run = int(_number(notes.get(JOBS_RUN), 0))
    pod.ready_at = observed.created_at if observed.ready else 0.0
    return pod


def _unusable(observed: ObservedPod, binding: Binding | None, used: bool) -> str | None:
    """Return why an adopted pod must go; None when it may stay."""
    notes = observed.annotations
    if used and not observed.ready:
        return "its agent does not answer"
    if observed.ready and observed.attempts_started is None:
        return "its agent could not say what it ran"
    state = observed.agent_state
    if state == "running":
        return "it runs an attempt that is over for the store"
    if state in ("unclean", "draining"):
        return f"its agent is {state}"
    if RETIRE_AFTER in notes or SINGLE_USE in notes or (used and observed.isolation == "none"):
        return "it served its last job"
    return contradiction(observed, binding)


def _number(text: str | None, default: float) -> float:
    try:
        return default if text is None else float(text)
    except ValueError:
        return default
