"""Rules for jobs: submission, cancellation, launch, the end of an attempt, another one or none.

The launch order is: claim, ``CommitLaunch``, ``LaunchCommitted``, ``Launch``. A commit that lost
gives the pod back untouched; a launch that failed is the infrastructure's retry.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from firepool_broker.core import events as e
from firepool_broker.core import verdict
from firepool_broker.core.deadlines import Due
from firepool_broker.core.errors import IllegalTransition
from firepool_broker.core.instructions import (
    CommitQueued,
    CommitRequeue,
    FinishJob,
    Launch,
    NotifyPod,
    SignalAttempt,
)
from firepool_broker.core.jobs import TRANSITIONS, Job, JobError, JobState, Outcome
from firepool_broker.core.pod_rules import PodRules
from firepool_broker.core.pods import (
    PodState,
)
from firepool_broker.core.sessions import SessionKey
from firepool_broker.core.state import State

_COMMIT_RETRY_SECONDS = 1.0


class JobRules:
    """What happens to jobs.

    Parameters
    ----------
    state
        What it changes.
    pods
        The rules for the pods under the jobs.

    Attributes
    ----------
    handlers, due
        What it answers to, by the type of event and of deadline.
    """

    def __init__(self, state: State, pods: PodRules) -> None:
        self._state = state
        self._pods = pods
        self._sequence = 0
        pods.on_lost = self.lost
        self.handlers: dict[type, Callable[[Any, float], None]] = {
            e.JobSubmitted: self._on_submitted,
            e.JobReady: self._on_ready_job,
            e.JobImpossible: self._on_impossible,
            e.CancelRequested: self._on_cancel,
            e.InterruptRequested: self._on_interrupt,
            e.LaunchCommitted: self._on_committed,
            e.LaunchLost: self._on_commit_lost,
            e.LaunchFailed: self._on_launch_failed,
            e.AttemptStarted: self._on_started,
            e.AttemptEnded: self._on_ended,
        }
        self.due: dict[Due, Callable[[str, str, float], None]] = {
            Due.DELAY: self._due_delay,
            Due.QUEUE: self._due_queue,
        }

    def _on_submitted(self, event: e.JobSubmitted, now: float) -> None:
        job = event.job
        if job.id in self._state.jobs:
            return
        self.enter(job, now)
        if self._state.tracker.buckets.get(job.sku) is None:
            self.finish(job, JobError("ShapeImpossible", f"there is no pool {job.sku}"), None, now)
            return
        if job.queued_at is None and job.state is JobState.QUEUED:
            job.queued_at = now
        session = job.session
        if session is not None:
            self._state.unprepared.pop(session, None)
            heard = self._state.sessions.heard(session, job.client_id, now)
            if heard is not None:
                self._state.deadlines.add(heard.expires_at, Due.SESSION, *session)
                self.let_go_on(session, now)
        self.wait(job, now)
        self._state.new.append(job)

    def enter(self, job: Job, now: float) -> None:
        """Take a job over, with its place in the order of submissions."""
        self._sequence += 1
        job.sequence = self._sequence
        session = job.session
        job.ordered = (
            job.attached and not job.parallel and self._state.sessions.get(session) is not None
        )
        self._state.jobs[job.id] = job

    def let_go_on(self, session: SessionKey, now: float) -> None:
        """Let the withheld jobs of a session go on: its client is back."""
        for job in list(self._state.queue.of_session(session)):
            if job.withheld:
                job.withheld = False
                self._state.queue.settle(job, now)
                self._state.dirty.add(job.sku)
                self._state.new.append(job)

    def wait(self, job: Job, now: float) -> None:
        """Put a job into the queue, with its deadline there."""
        self._state.queue.add(job, now)
        self._state.dirty.add(job.sku)
        limit = self._queue_limit(job)
        if limit is not None:
            self._state.deadlines.add(self._queued_since(job) + limit, Due.QUEUE, job.id)

    def _queue_limit(self, job: Job) -> float | None:
        policy = self._state.tracker.buckets[job.sku].policy
        limits = [
            limit
            for limit in (job.queue_timeout_seconds, policy.max_queue_seconds)
            if limit is not None
        ]
        return min(limits) if limits else None

    @staticmethod
    def _queued_since(job: Job) -> float:
        return job.submitted_at if job.queued_at is None else job.queued_at

    def _due_queue(self, job_id: str, _: str, now: float) -> None:
        job = self._state.queue.jobs.get(job_id)
        if job is None:
            return
        limit = self._queue_limit(job)
        waited = now - self._queued_since(job)
        if limit is not None and waited >= limit:
            message = f"waited {waited:.0f} s for a pod, the limit is {limit:g} s"
            self.finish(job, JobError("QueueTimeout", message), None, now)

    def _due_delay(self, job_id: str, _: str, now: float) -> None:
        job = self._state.queue.jobs.get(job_id)
        if job is not None:
            self._state.queue.settle(job, now)
            self._state.dirty.add(job.sku)

    def _on_ready_job(self, event: e.JobReady, now: float) -> None:
        job = self._state.jobs.get(event.job_id)
        if job is None or job.state is not JobState.PENDING:
            return
        self._state.out.append(CommitQueued(job.id, job.version))
        job.version += 1
        self.move(job, JobState.QUEUED)
        job.queued_at = now
        self._state.queue.settle(job, now)
        self._state.dirty.add(job.sku)
        limit = self._queue_limit(job)
        if limit is not None:
            self._state.deadlines.add(now + limit, Due.QUEUE, job.id)
        self._state.new.append(job)

    def _on_impossible(self, event: e.JobImpossible, now: float) -> None:
        job = self._state.jobs.get(event.job_id)
        if job is not None and job.state is JobState.PENDING:
            self.finish(job, JobError(event.error_class, event.message), None, now)

    def _on_cancel(self, event: e.CancelRequested, now: float) -> None:
        job = self._state.jobs.get(event.job_id)
        if job is not None:
            grace = self._state.policies.terminate_grace_seconds
            if event.grace_seconds is not None:
                grace = event.grace_seconds
            self.cancel(job, JobError(event.error_class, event.message), grace, now)

    def cancel(self, job: Job, error: JobError, grace_seconds: float, now: float) -> None:
        """End a job in whatever state it is."""
        if job.id in self._state.queue.jobs:
            self.finish(job, error, None, now)
        elif job.cancelling is None:
            job.cancelling = error
            if job.state is JobState.RUNNING:
                self._signal(job, "terminate", grace_seconds)

    def _on_interrupt(self, event: e.InterruptRequested, now: float) -> None:
        job = self._state.jobs.get(event.job_id)
        if job is None:
            return
        if job.state is not JobState.RUNNING:
            error = JobError("Interrupted", "interrupted before it ran")
            self.cancel(job, error, self._state.policies.terminate_grace_seconds, now)
            return
        job.interrupted = True
        job.killed = job.killed or event.kill
        self._signal(job, "kill" if event.kill else "interrupt", 0.0)

    def _signal(self, job: Job, signal: Any, grace_seconds: float) -> None:
        self._state.out.append(SignalAttempt(job.id, job.attempt, job.bound, signal, grace_seconds))

    def _on_committed(self, event: e.LaunchCommitted, now: float) -> None:
        job = self._claimed(event.job_id, event.attempt)
        if job is None:
            return
        job.version += 1
        job.claimed = False
        self.move(job, JobState.RUNNING)
        pod = self._state.tracker.leases.get(job.id)
        if pod is None or pod.state is PodState.UNHEALTHY:
            reason = "its pod was lost before the hand-off" if pod is None else pod.retire_reason
            self._pods.release(job, now)
            self.retry(
                job, JobError("LaunchFailed", reason or "its pod was not trusted"), None, now
            )
            return
        job.bound = ((pod.name, pod.uid),)
        self._state.tracker.begin(job, now)
        self._state.dirty.add(pod.pool)
        self._pods.annotate_lease(pod, job)
        if job.cancelling is not None:
            self._pods.release_unused(job, now)
            self.finish(job, job.cancelling, None, now)
            return
        self._state.out.append(Launch(job.id, job.attempt, job.bound))

    def _on_commit_lost(self, event: e.LaunchLost, now: float) -> None:
        job = self._claimed(event.job_id, event.attempt)
        if job is None:
            return
        job.claimed = False
        job.attempt -= 1
        job.path = job.reason = None
        if event.version is not None:
            job.version = event.version
        pod = self._state.tracker.undo(job, now)
        self._state.supply.busy(job.sku, job.caller, -1, now)
        if pod is not None:
            self._state.dirty.add(pod.pool)
            self._state.out.append(NotifyPod(pod.name))
            self._pods.returned(pod, now)
        if job.cancelling is not None:
            self.finish(job, job.cancelling, None, now)
            return
        job.not_before = now + _COMMIT_RETRY_SECONDS
        self._state.deadlines.add(job.not_before, Due.DELAY, job.id)
        self.wait(job, now)

    def _on_launch_failed(self, event: e.LaunchFailed, now: float) -> None:
        job = self._running(event.job_id, event.attempt)
        if job is None:
            return
        error = JobError(event.error_class, event.message)
        pod = self._state.tracker.leases.get(job.id)
        if pod is not None and event.pod_suspect and event.error_class == "LaunchFailed":
            self._pods.retire(pod, f"a launch failed: {event.message}", now)
        self._pods.release_unused(job, now)
        self.retry(job, error, None, now)

    def _on_started(self, event: e.AttemptStarted, now: float) -> None:
        job = self._running(event.job_id, event.attempt)
        if job is not None:
            job.started_at = event.time

    def _on_ended(self, event: e.AttemptEnded, now: float) -> None:
        job = self._running(event.job_id, event.attempt)
        if job is None:
            return
        if job.started_at is not None:
            self._state.supply.pools[job.sku].runs.append(max(0.0, now - job.started_at))
        error = verdict.error_of(job, event.outcome)
        self._pods.release(job, now)
        self.retry(job, error, event.outcome, now)

    def retry(self, job: Job, error: JobError | None, outcome: Outcome | None, now: float) -> None:
        """Finish a job whose attempt is over, or queue it again within its budgets."""
        if outcome is None:
            error = verdict.as_wished(job, error)
        if job.attached and self._state.sessions.has_lapsed(job.session):
            self.finish(job, error, outcome, now)  # nobody waits for another attempt
            return
        budget = verdict.budget_of(
            job, error, outcome is None, self._state.policies.max_infra_retries
        )
        if error is None or budget is None:
            self.finish(job, error, outcome, now)
            return
        if budget == "user":
            job.user_retries += 1
        else:
            job.infra_retries += 1
        self._state.out.append(
            CommitRequeue(job.id, job.version, job.user_retries, job.infra_retries, error)
        )
        job.version += 1
        self.move(job, JobState.QUEUED)
        job.queued_at = now
        job.bound = ()
        job.path = job.reason = None
        job.started_at = None
        job.interrupted = job.killed = False
        job.withheld = job.attached and self._state.sessions.is_away(job.session)
        self.wait(job, now)
        self._state.new.append(job)

    def lost(self, job: Job, reason: str, now: float) -> None:
        """End an attempt whose pod is gone: at once, by the job's ``on_lost``."""
        self._pods.release(job, now)
        self.retry(job, JobError("PodLost", reason), None, now)

    def finish(self, job: Job, error: JobError | None, outcome: Outcome | None, now: float) -> None:
        """Commit a terminal state and forget the job."""
        state = verdict.final_state(error)
        self.move(job, state)
        self._state.out.append(
            FinishJob(
                job.id, job.version, state, error, outcome, job.user_retries, job.infra_retries
            )
        )
        del self._state.jobs[job.id]
        self._state.told.pop(job.id, None)
        self._state.queue.discard(job, now)
        if job.sku in self._state.tracker.buckets:
            self.give_up_reservation(job, now)
            self._state.dirty.add(job.sku)

    def give_up_reservation(self, job: Job, now: float) -> None:
        """Give up what was meant for a job that does not wait any more."""
        self._state.supply.forget(job)
        pod = self._state.tracker.buckets[job.sku].reserved.get(job.id)
        if pod is not None and pod.job is None:
            self._state.tracker.update(pod, reserved_for=None)
            self._pods.retire(pod, "the job it was made for is over", now)

    def move(self, job: Job, state: JobState) -> None:
        """Move a job along one legal edge."""
        if (job.state, state) not in TRANSITIONS:
            raise IllegalTransition(f"job {job.id}", job.state.value, state.value, ())
        job.state = state

    def _claimed(self, job_id: str, attempt: int) -> Job | None:
        job = self._state.jobs.get(job_id)
        return job if job is not None and job.claimed and job.attempt == attempt else None

    def _running(self, job_id: str, attempt: int) -> Job | None:
        job = self._state.jobs.get(job_id)
        if job is None or job.state is not JobState.RUNNING or job.attempt != attempt:
            return None
        return job
