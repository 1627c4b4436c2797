"""What an attempt's end means for its job: which error, which budget, which final state.

Also the machine's own consistency check, which judges the whole in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from firepool_broker.core.errors import InvariantBroken
from firepool_broker.core.jobs import (
    CANCELLING_CLASSES,
    USER_RETRY_CLASSES,
    Job,
    JobError,
    JobState,
    Outcome,
)

if TYPE_CHECKING:
    from firepool_broker.core.machine import Machine

Budget = Literal["user", "infra"]


def error_of(job: Job, outcome: Outcome) -> JobError | None:
    """Return the error that an attempt's outcome means; None when it succeeded.

    Somebody's wish to end the job explains any failure after it; a job that succeeded all the same
    has succeeded.
    """
    reported = outcome.get("error")
    exit_code = outcome.get("exit_code")
    signal = outcome.get("signal")
    if isinstance(reported, Mapping):
        error = JobError(str(reported.get("class")), str(reported.get("message") or ""))
        ename = reported.get("ename")
    elif signal is not None:
        error, ename = JobError("Signal", f"ended by signal {signal}"), None
    elif exit_code not in (0, None):
        error, ename = JobError("NonZeroExit", f"exit code {exit_code}"), None
    else:
        return None
    if job.cancelling is not None:
        return job.cancelling
    if job.interrupted and error.error_class != "OOM":
        stopped = (
            error.error_class in ("Interrupted", "Signal", "Cancelled")
            or ename == "KeyboardInterrupt"
        )
        if stopped:
            how = "killed after an interrupt" if job.killed else "the code in the pod was stopped"
            return JobError("Interrupted", how)
    return error


def as_wished(job: Job, error: JobError | None) -> JobError | None:
    """Return the error of an attempt that ended without an outcome, or before it began.

    Who wished the job's end, and got it, is told so: how its pod went does not matter to them.
    """
    if error is None:
        return None
    if job.cancelling is not None:
        return job.cancelling
    if error.error_class == "LaunchFailed" and job.interrupted:
        return JobError("Interrupted", "interrupted before it ran")
    if error.error_class == "PodLost" and job.killed:
        return JobError("Interrupted", f"killed after an interrupt; {error.message}")
    return error


def budget_of(
    job: Job, error: JobError | None, nothing_exited: bool, max_infra_retries: int
) -> Budget | None:
    """Return which budget pays for another attempt; None when there is none.

    Parameters
    ----------
    job
        Whose attempt is over.
    error
        Why it does not count.
    nothing_exited
        No process of the attempt reported an end.
    max_infra_retries
        The infrastructure's budget.
    """
    if error is None or job.cancelling is not None:
        return None
    if error.error_class in USER_RETRY_CLASSES:
        return "user" if job.user_retries < job.max_retries else None
    if job.infra_retries >= max_infra_retries:
        return None
    if error.error_class == "LaunchFailed":
        return "infra"
    if error.error_class == "PodLost" and nothing_exited and job.on_lost == "requeue":
        return "infra"
    return None


def final_state(error: JobError | None) -> JobState:
    """Return the terminal state that goes with an error."""
    if error is None:
        return JobState.SUCCEEDED
    if error.error_class in CANCELLING_CLASSES:
        return JobState.CANCELLED
    return JobState.FAILED


def validate(machine: Machine, now: float) -> None:
    """Check the machine as a whole: every entity in exactly one place, every index right.

    Raises
    ------
    InvariantBroken
        Something differs.
    """
    machine.tracker.validate()
    machine.queue.validate(now)
    for job in machine.jobs.values():
        waiting = job.id in machine.queue.jobs
        leased = machine.tracker.leases.get(job.id)
        if waiting == (job.claimed or job.state is JobState.RUNNING):
            raise InvariantBroken(f"{job.id} is {job.state.value} and in the queue: {waiting}")
        if waiting and leased is not None:
            raise InvariantBroken(f"{job.id} waits and holds {leased.name}")
        if job.state is JobState.RUNNING and leased is None:
            raise InvariantBroken(f"{job.id} runs on no pod")
    for job_id in machine.tracker.leases:
        if job_id not in machine.jobs:
            raise InvariantBroken(f"{job_id} is over and still holds a pod")
    for job_id in machine.queue.jobs:
        if job_id not in machine.jobs:
            raise InvariantBroken(f"{job_id} is over and still waits")
    for name, bucket in machine.tracker.buckets.items():
        for job_id in bucket.reserved:
            if job_id not in machine.jobs:
                raise InvariantBroken(f"{name} keeps a pod for {job_id}, which is over")
        for job_id in machine.supply.pools[name].entitled:
            if job_id not in machine.queue.jobs:
                raise InvariantBroken(f"{name}: {job_id} is entitled and does not wait")
    open_now = {s.key for s in machine.sessions if s.connected or now < s.open_until}
    if not machine.tracker.open_sessions >= {s.key for s in machine.sessions if s.connected}:
        raise InvariantBroken("a connected session does not count as open")
    if not machine.tracker.open_sessions >= open_now:
        raise InvariantBroken("an open session does not count as open")
