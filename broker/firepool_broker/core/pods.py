"""Pods: their states, the one table of edges, and the flat record the tracker keeps of each.

Nothing but the tracker changes a :class:`Pod`. Records are flat (``__slots__``, no objects of
their own) because a full garbage collection over a hundred thousand of them would otherwise land
inside the tracker's lock. A pod's history is kept in the tracker's one log, see
``Tracker.story``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final


class PodState(str, Enum):
    """States of a pod; see :data:`TRANSITIONS`."""

    STARTING = "STARTING"
    """Asked for, not ready yet."""
    IDLE = "IDLE"
    """Ready and never used."""
    STANDBY = "STANDBY"
    """Ready on another pod's card, without memory of the card, waiting for its promotion."""
    ASSIGNED = "ASSIGNED"
    """Claimed; the commit that says so is under way."""
    RUNNING = "RUNNING"
    """The commit is durable; its attempt is handed over, runs, or is being ended."""
    RESETTING = "RESETTING"
    """Its attempt ended; the agent verifies that nothing of it is left."""
    HELD = "HELD"
    """Used, clean, reserved for its last caller."""
    DRAINING = "DRAINING"
    """Takes no more work; an attempt may still run on it."""
    UNHEALTHY = "UNHEALTHY"
    """Not trusted any more; an attempt may still run on it."""
    RETIRING = "RETIRING"
    """The backend was told to remove it."""
    GONE = "GONE"
    """Removed; no collection holds it."""


_ALIVE: Final = (
    PodState.STARTING,
    PodState.IDLE,
    PodState.STANDBY,
    PodState.ASSIGNED,
    PodState.RUNNING,
    PodState.RESETTING,
    PodState.HELD,
)

TRANSITIONS: Final[frozenset[tuple[PodState, PodState]]] = frozenset(
    {
        (PodState.STARTING, PodState.IDLE),
        (PodState.STARTING, PodState.STANDBY),
        (PodState.IDLE, PodState.ASSIGNED),
        (PodState.STANDBY, PodState.ASSIGNED),
        (PodState.HELD, PodState.ASSIGNED),
        # A claim whose commit failed goes back to where it came from.
        (PodState.ASSIGNED, PodState.IDLE),
        (PodState.ASSIGNED, PodState.STANDBY),
        (PodState.ASSIGNED, PodState.HELD),
        (PodState.ASSIGNED, PodState.RUNNING),
        (PodState.RUNNING, PodState.RESETTING),
        (PodState.RESETTING, PodState.HELD),
        (PodState.DRAINING, PodState.RETIRING),
        (PodState.UNHEALTHY, PodState.RETIRING),
        (PodState.DRAINING, PodState.UNHEALTHY),
        (PodState.RETIRING, PodState.GONE),
        (PodState.DRAINING, PodState.GONE),
        (PodState.UNHEALTHY, PodState.GONE),
    }
    | {(state, PodState.DRAINING) for state in _ALIVE}
    | {(state, PodState.UNHEALTHY) for state in _ALIVE}
    | {(state, PodState.GONE) for state in _ALIVE}  # a pod can vanish at any time
)
"""Every edge a pod may take."""

OPERATOR_WORDS: Final[Mapping[PodState, str]] = {
    PodState.STARTING: "warming",
    PodState.IDLE: "warm_ready",
    PodState.HELD: "warm_ready",
    PodState.STANDBY: "warm_ready",
    PodState.ASSIGNED: "busy",
    PodState.RUNNING: "busy",
    PodState.RESETTING: "busy",
    PodState.DRAINING: "draining",
    PodState.RETIRING: "draining",
    PodState.UNHEALTHY: "unhealthy",
}
"""The five words operators see."""


class Pod:
    """One pod as the tracker knows it. Changed by the tracker alone.

    Attributes
    ----------
    name, uid, pool
        Its name (chosen by the core before creation), the backend's id, its pool.
    state
        A :class:`PodState`.
    owner, tag, queue
        Who used it last, under which session name and queue; None when never used.
    environment
        Digest of the environment that ran on it last, or for which a spare was prepared.
    prepared_for
        ``(caller, lease_tag)`` for whose environment an idle pod keeps a spare.
    job
        Id of the job that holds its lease, while ASSIGNED, RUNNING, or draining with an attempt.
    reserved_for
        Id of the only job that may use it.
    retire_after
        It retires when the job on it ends (it crossed a boundary, or may serve only once).
    single_use, stale, borrowed
        Made for one job; of an old pod template; on somebody else's capacity.
    created_at, ready_at, released_at, hold_expires_at
        Unix seconds; ``ready_at`` is 0 until ready.
    jobs_run
        How many leases were committed on it.
    isolation
        ``namespaces``, ``process`` or ``none``.
    retire_reason
        Why it leaves, once it does.
    """

    __slots__ = (
        "borrowed",
        "came_from",
        "created_at",
        "environment",
        "hold_expires_at",
        "isolation",
        "job",
        "jobs_run",
        "name",
        "owner",
        "pool",
        "prepared_for",
        "queue",
        "ready_at",
        "released_at",
        "reserved_for",
        "retire_after",
        "retire_reason",
        "single_use",
        "stale",
        "state",
        "tag",
        "uid",
    )

    def __init__(self, name: str, pool: str, created_at: float) -> None:
        self.name = name
        self.pool = pool
        self.created_at = created_at
        self.uid = ""
        self.state = PodState.STARTING
        self.came_from = PodState.IDLE
        self.owner: str | None = None
        self.tag: str | None = None
        self.queue: str | None = None
        self.environment: str | None = None
        self.prepared_for: tuple[str, str] | None = None
        self.job: str | None = None
        self.reserved_for: str | None = None
        self.retire_after = False
        self.single_use = False
        self.stale = False
        self.borrowed = False
        self.ready_at = 0.0
        self.released_at = 0.0
        self.hold_expires_at = 0.0
        self.jobs_run = 0
        self.isolation = "process"
        self.retire_reason: str | None = None

    def __repr__(self) -> str:
        return f"<Pod {self.name} {self.state.value} owner={self.owner} job={self.job}>"


# Keys of the annotations that AnnotatePod carries; values are strings.
OWNER: Final = "owner"
TAG: Final = "tag"
QUEUE: Final = "queue"
JOB: Final = "job"
ATTEMPT: Final = "attempt"
ENVIRONMENT: Final = "environment"
RELEASED_AT: Final = "released_at"
HOLD_SECONDS: Final = "hold_seconds"
RETIRE_AFTER: Final = "retire_after"
SINGLE_USE: Final = "single_use"
JOBS_RUN: Final = "jobs_run"


@dataclass(frozen=True, slots=True)
class Binding:
    """The last committed lease of a pod, by its uid, as the store knows it.

    Parameters
    ----------
    job_id, attempt
        Whose lease it was.
    caller, queue, lease_tag
        Whom it makes the pod's owner.
    """

    job_id: str
    attempt: int
    caller: str
    queue: str = "default"
    lease_tag: str | None = None


@dataclass(frozen=True, slots=True)
class ObservedPod:
    """A pod as the backend and its agent describe it when a broker starts.

    Parameters
    ----------
    name, uid, pool, created_at
        As the backend knows it; ``created_at`` in Unix seconds.
    ready
        Its agent answered.
    agent_state
        ``idle``, ``running``, ``resetting``, ``unclean`` or ``draining``; None when not ready.
    attempts_started
        The agent's own counter; None when the agent could not be asked.
    annotations
        What was persisted with ``AnnotatePod``; absent keys are a pod never used.
    isolation
        ``namespaces``, ``process`` or ``none``.
    stale
        Of an old pod template.
    """

    name: str
    uid: str
    pool: str
    created_at: float
    ready: bool
    agent_state: str | None = None
    attempts_started: int | None = None
    annotations: Mapping[str, str] = field(default_factory=dict)
    isolation: str = "process"
    stale: bool = False
