"""Events: everything that can happen, as frozen values. ``Machine.handle`` takes one at a time.

Events about an attempt carry its number; the machine ignores those of an attempt that is over, so
a replay is harmless. Times are Unix seconds.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from firepool_broker.core.jobs import Job, Outcome
from firepool_broker.core.sessions import Session


class JobSubmitted(Struct, frozen=True):
    """A job was accepted by ``Machine.admit`` and its row inserted (``job.version`` is the row's).

    ``job.state`` is QUEUED, or PENDING while something it needs is not there yet. The machine owns
    the object from here on.
    """

    job: Job


class JobReady(Struct, frozen=True):
    """What a PENDING job waited for is there. The machine answers with ``CommitQueued``."""

    job_id: str


class JobImpossible(Struct, frozen=True):
    """What a PENDING job waited for will never be there (a refused package); it fails."""

    job_id: str
    error_class: str
    message: str


class CancelRequested(Struct, frozen=True):
    """Somebody wants a job to end; a running attempt is terminated with its grace.

    Parameters
    ----------
    grace_seconds
        Between asking the attempt to end and killing it; None for the configured one.
    """

    job_id: str
    error_class: str = "Cancelled"
    message: str = "cancelled"
    grace_seconds: float | None = None


class InterruptRequested(Struct, frozen=True):
    """SIGINT (SIGKILL with ``kill``) for a running job; one that does not run is cancelled."""

    job_id: str
    kill: bool = False


class SessionOpened(Struct, frozen=True):
    """A client registered a session, or registered it again (a new environment, a new client)."""

    session: Session


class SessionConnected(Struct, frozen=True):
    """The client's stream is open."""

    caller: str
    tag: str
    client_id: str


class SessionDisconnected(Struct, frozen=True):
    """The client's stream closed without a goodbye."""

    caller: str
    tag: str
    client_id: str


class SessionEnded(Struct, frozen=True):
    """A goodbye. ``shutdown`` ends the session; ``restart`` keeps it and its holds.

    With a ``client_id``, a goodbye of a client that has been replaced is ignored.
    """

    caller: str
    tag: str
    how: Literal["shutdown", "restart"] = "shutdown"
    client_id: str | None = None


class ReleaseRequested(Struct, frozen=True):
    """A session gives its held pods back."""

    caller: str
    tag: str


class PodReady(Struct, frozen=True):
    """A pod passed its readiness check: the agent answers and has started no attempt."""

    name: str
    uid: str
    isolation: str = "process"
    attempts_started: int = 0


class PodStartFailed(Struct, frozen=True):
    """A pod could not be created, or died before it was ready. Nothing of it is left."""

    name: str
    reason: str


class PodGone(Struct, frozen=True):
    """A pod and every process in it are confirmed gone, whether asked for or not."""

    name: str
    reason: str = ""


class PodUnhealthy(Struct, frozen=True):
    """A pod is not trusted any more; it takes no more work. What runs on it is not killed."""

    name: str
    reason: str


class LaunchCommitted(Struct, frozen=True):
    """``CommitLaunch`` is durable."""

    job_id: str
    attempt: int


class LaunchLost(Struct, frozen=True):
    """``CommitLaunch`` was not applied; the pods go back untouched.

    ``version`` is what the job's row has now, when that is known.
    """

    job_id: str
    attempt: int
    version: int | None = None


class LaunchFailed(Struct, frozen=True):
    """A committed attempt could not be handed over, and it certainly does not run.

    ``LaunchFailed`` (the class) is retried on the infrastructure's budget; ``PackageInvalid`` and
    ``RequirementsFailed`` fail the job once. ``pod_suspect`` retires the pod; say False when its
    agent is well and only never heard of the attempt (a broker died before the hand-off).
    """

    job_id: str
    attempt: int
    error_class: str = "LaunchFailed"
    message: str = ""
    pod_suspect: bool = True


class AttemptStarted(Struct, frozen=True):
    """The attempt's first instruction ran at ``time``."""

    job_id: str
    attempt: int
    time: float


class AttemptEnded(Struct, frozen=True):
    """The attempt is over and everything of it (output, results, outcome) is stored.

    ``outcome`` is the agent's journalled outcome. ``ResetFinished`` follows for each of its pods,
    unless the machine answers with ``RetirePod``: such a pod needs no reset.
    """

    job_id: str
    attempt: int
    outcome: Outcome


class ResetFinished(Struct, frozen=True):
    """The reset after an attempt is over. Anything but a verified clean one costs the pod.

    Attributes
    ----------
    left
        What appeared on the machine meanwhile and could not be said to be the job's: it stays,
        and the pod's story names it (only without namespaces).
    """

    pod: str
    clean: bool
    reason: str | None = None
    left: tuple[str, ...] = ()


class RetireRequested(Struct, frozen=True):
    """Somebody wants a pod gone; a running attempt is let finish."""

    pod: str
    reason: str = "asked for"


class Tick(Struct, frozen=True):
    """Nothing happened but time. See ``Machine.next_wakeup``."""


class DrainRequested(Struct, frozen=True):
    """The broker shuts down: no claim from now on, running jobs finish, pods without one retire."""


Event = (
    JobSubmitted
    | JobReady
    | JobImpossible
    | CancelRequested
    | InterruptRequested
    | SessionOpened
    | SessionConnected
    | SessionDisconnected
    | SessionEnded
    | ReleaseRequested
    | PodReady
    | PodStartFailed
    | PodGone
    | PodUnhealthy
    | LaunchCommitted
    | LaunchLost
    | LaunchFailed
    | AttemptStarted
    | AttemptEnded
    | ResetFinished
    | RetireRequested
    | Tick
    | DrainRequested
)
