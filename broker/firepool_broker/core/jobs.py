"""Jobs: the caller's intent, and the states it passes through.

A :class:`Job` holds what decisions need and nothing else: no code, no inputs, no environment
values. The store's row is the truth; this object is its shadow inside the machine, which owns it
from ``JobSubmitted`` (or ``restore``) on and is the only one to change it.

The row's ``version`` rises by one with every commit. The machine counts along: an instruction that
commits names the version it is conditional on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal

OnLost = Literal["fail", "requeue"]
AcquisitionPath = Literal["warm", "recycled", "standby", "new", "custom_image", "single_use"]


class JobState(str, Enum):
    """States of a job; see :data:`TRANSITIONS`."""

    PENDING = "PENDING"
    """Accepted; something it needs (its package) is not there yet."""
    QUEUED = "QUEUED"
    """Waits for a pod. A claim whose commit is under way is still QUEUED."""
    RUNNING = "RUNNING"
    """The commit that binds it to a pod is durable."""
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def terminal(self) -> bool:
        """Whether nothing follows this state."""
        return self in _TERMINAL


_TERMINAL: Final = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})

TRANSITIONS: Final[frozenset[tuple[JobState, JobState]]] = frozenset(
    {
        (JobState.PENDING, JobState.QUEUED),
        (JobState.PENDING, JobState.FAILED),
        (JobState.PENDING, JobState.CANCELLED),
        (JobState.QUEUED, JobState.RUNNING),
        (JobState.QUEUED, JobState.FAILED),
        (JobState.QUEUED, JobState.CANCELLED),
        (JobState.RUNNING, JobState.QUEUED),
        (JobState.RUNNING, JobState.SUCCEEDED),
        (JobState.RUNNING, JobState.FAILED),
        (JobState.RUNNING, JobState.CANCELLED),
    }
)
"""Every edge a job may take."""

CANCELLING_CLASSES: Final = frozenset({"Cancelled", "Interrupted", "SessionClosed"})
"""Error classes that end a job CANCELLED; every other class ends it FAILED."""

USER_RETRY_CLASSES: Final = frozenset({"OOM", "NonZeroExit", "Signal", "Timeout"})
"""Failures of the user's own code: retried within ``max_retries``, never on our budget."""

INFRA_RETRY_CLASSES: Final = frozenset({"LaunchFailed", "PodLost"})
"""Failures of pods and launches: retried within ``max_infra_retries``, never on the user's."""


@dataclass(frozen=True, slots=True)
class JobError:
    """Why a job did not succeed.

    Parameters
    ----------
    error_class
        One of the classes of the API (``OOM``, ``PodLost``, ``Cancelled`` and so on).
    message
        One line for a person.
    """

    error_class: str
    message: str

    def as_dict(self) -> dict[str, str]:
        """Return the two keys that the store and the API use."""
        return {"class": self.error_class, "message": self.message}


@dataclass(slots=True, eq=False)
class Job:
    """What decisions need to know about one job.

    The first group is what was asked and never changes; the second is what the store's row says
    (give it when restoring); the third is the machine's own and is left at its defaults.

    Parameters
    ----------
    id, caller
        The job's id and the verified identity that submitted it.
    sku
        The pool's name, already resolved by ``Machine.admit``.
    queue, lease_tag, client_id
        The caller's stream, session name and client process; the last two may be absent.
    submitted_at
        Unix seconds.
    attached, parallel, on_lost
        Whether its submitter waits; whether it may overtake its session's other jobs; what a lost
        attempt means.
    max_retries, timeout_seconds, queue_timeout_seconds
        The user's own limits.
    single_use
        Needs a pod of its own that nothing ran on and nothing runs on afterwards.
    pods
        How many pods it needs at once.
    environment
        Digest of the interpreter's environment; a preference among pods, never a fence.
    bound
        ``(name, uid)`` of the pods of the last committed attempt.
    """

    id: str
    caller: str
    sku: str
    submitted_at: float
    queue: str = "default"
    lease_tag: str | None = None
    client_id: str | None = None
    priority: int = 0
    attached: bool = True
    parallel: bool = False
    on_lost: OnLost = "fail"
    max_retries: int = 0
    timeout_seconds: float | None = None
    queue_timeout_seconds: float | None = None
    single_use: bool = False
    pods: int = 1
    environment: str | None = None
    name: str | None = None

    state: JobState = JobState.QUEUED
    version: int = 0
    attempt: int = 0
    user_retries: int = 0
    infra_retries: int = 0
    queued_at: float | None = None
    bound: tuple[tuple[str, str], ...] = ()
    path: str | None = None
    reason: str | None = None

    sequence: int = 0
    claimed: bool = False
    ordered: bool = False
    withheld: bool = False
    blocked_since: float | None = None
    quota_blocked: bool = False
    not_before: float = 0.0
    started_at: float | None = None
    cancelling: JobError | None = None
    interrupted: bool = False
    killed: bool = False

    @property
    def session(self) -> tuple[str, str] | None:
        """The ``(caller, lease_tag)`` key of its session, if it names one."""
        return None if self.lease_tag is None else (self.caller, self.lease_tag)


Outcome = Mapping[str, object]
"""An attempt's outcome as the agent journalled it. The core reads ``error.class``,
``error.message``, ``error.ename``, ``exit_code`` and ``signal``, and passes the rest through."""
