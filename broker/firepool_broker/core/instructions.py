"""Instructions: what the loop must do, as frozen values, in the order given.

Commits of one job must be applied in the order they were issued. Everything else may run
concurrently. "Answer" names the event that the machine waits for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct

from firepool_broker.core.jobs import JobError, JobState, Outcome
from firepool_broker.core.sessions import SessionState

PodRef = tuple[str, str]
"""``(name, uid)`` of a pod."""


class CreatePod(Struct, frozen=True):
    """Make a pod of this name. Answer: ``PodReady``, ``PodStartFailed`` or ``PodGone``."""

    name: str
    pool: str
    reason: str


class RetirePod(Struct, frozen=True):
    """Remove a pod, retrying until it is gone. Answer: ``PodGone``. May be repeated."""

    name: str
    reason: str


class CommitQueued(Struct, frozen=True):
    """Commit PENDING → QUEUED. No answer."""

    job_id: str
    version: int


class CommitLaunch(Struct, frozen=True):
    """Commit QUEUED → RUNNING with its bindings. Answer: ``LaunchCommitted`` or ``LaunchLost``."""

    job_id: str
    attempt: int
    version: int
    pods: tuple[PodRef, ...]
    path: str
    reason: str
    claimed_at: float


class Launch(Struct, frozen=True):
    """Hand a committed attempt over. Answer: ``AttemptEnded``, ``LaunchFailed`` or ``PodGone``.

    The hand-off is repeated (it is idempotent) until its fate is known: ``LaunchFailed`` may be
    said only when the attempt certainly does not run.
    """

    job_id: str
    attempt: int
    pods: tuple[PodRef, ...]


class SignalAttempt(Struct, frozen=True):
    """Signal an attempt, after its hand-off when that is still under way. No answer of its own."""

    job_id: str
    attempt: int
    pods: tuple[PodRef, ...]
    signal: Literal["interrupt", "terminate", "kill"]
    grace_seconds: float


class CommitRequeue(Struct, frozen=True):
    """Commit RUNNING → QUEUED with the retry counts. No answer.

    ``error`` says why the last attempt does not count.
    """

    job_id: str
    version: int
    user_retries: int
    infra_retries: int
    error: JobError


class FinishJob(Struct, frozen=True):
    """Commit a terminal state. No answer; the machine has forgotten the job.

    ``outcome`` is the last attempt's, absent when no process ever exited.
    """

    job_id: str
    version: int
    state: JobState
    error: JobError | None
    outcome: Outcome | None
    user_retries: int
    infra_retries: int


class AnnotatePod(Struct, frozen=True):
    """Persist annotations on a pod, best effort; a None value removes the key. No answer."""

    name: str
    annotations: Mapping[str, str | None]


class PreparePod(Struct, frozen=True):
    """Have the pod's agent keep a spare of this session's environment, best effort. No answer."""

    name: str
    caller: str
    lease_tag: str


class Waiting(Struct, frozen=True):
    """Why a job waits, and for about how long.

    Parameters
    ----------
    reason
        A word for programs.
    message
        One line for people, without a trailing dot.
    position
        1 for the job that is served next.
    estimate_seconds
        None when nothing is known.
    """

    reason: Literal[
        "pod_starting",
        "no_capacity",
        "quota",
        "session_order",
        "withheld",
        "package",
        "requirements",
        "priority",
    ]
    message: str
    position: int
    estimate_seconds: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the API's form."""
        return {
            "reason": self.reason,
            "message": self.message,
            "position": self.position,
            "estimate_seconds": self.estimate_seconds,
        }


class NotifyJob(Struct, frozen=True):
    """A job's waiting line changed; tell who watches it. No answer."""

    job_id: str
    waiting: Waiting


class NotifyPod(Struct, frozen=True):
    """A pod changed; tell panels. No answer."""

    name: str


class NotifySession(Struct, frozen=True):
    """A session changed by itself (it lapsed); tell panels. No answer. None: it ended."""

    caller: str
    tag: str
    state: SessionState | None


Instruction = (
    CreatePod
    | RetirePod
    | CommitQueued
    | CommitLaunch
    | Launch
    | SignalAttempt
    | CommitRequeue
    | FinishJob
    | AnnotatePod
    | PreparePod
    | NotifyJob
    | NotifyPod
    | NotifySession
)
