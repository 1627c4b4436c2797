"""The interface that every backend implements: make, watch, annotate and delete pods.

A backend knows nothing of jobs, callers or claims, and decides nothing. It reports what happens
to a pod through the callback given to `Backend.start`, in the order in which it happened, and
exactly once per pod: `PodServing` or `PodFailed` first, `PodExited` when a serving pod is gone.
Deleting a pod that is already gone is no error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from msgspec import Struct, field

__all__ = [
    "Annotations",
    "Backend",
    "BackendUnavailable",
    "PodAddress",
    "PodExited",
    "PodFailed",
    "PodRecord",
    "PodServing",
    "PodSpec",
    "WatchEvent",
]

Annotations = Mapping[str, object]


class BackendUnavailable(RuntimeError):
    """The list of pods could not be read. Never to be taken for an empty fleet."""


class PodSpec(Struct, frozen=True):
    """A pod that is wanted; its name is chosen, and known to the core, before it exists.

    Attributes
    ----------
    name, uid
        Name within the broker, and an identifier that is never used twice.
    pool
        Name of its pool.
    memory_mib, cores
        What its shape promises.
    preload
        Modules that its spares import ahead.
    annotations
        Written down together with the name.
    """

    name: str
    uid: str
    pool: str
    memory_mib: int | None = None
    cores: float | None = None
    preload: tuple[str, ...] = ()
    annotations: Annotations = field(default_factory=dict)


class PodAddress(Struct, frozen=True):
    """Where a pod's agent listens, and the key that its requests are signed with."""

    uid: str
    key: bytes
    unix: str | None = None
    tcp: tuple[str, int] | None = None


class PodRecord(Struct, frozen=True):
    """A pod as the backend finds it when it lists them.

    Attributes
    ----------
    serving
        False while its agent has not come up yet.
    isolation
        ``namespaces``, ``process`` or ``none``; empty while unknown.
    created_at
        Unix seconds.
    """

    name: str
    uid: str
    pool: str
    revision: str
    serving: bool
    isolation: str
    created_at: float
    annotations: Annotations


class PodServing(Struct, frozen=True):
    """A pod's agent answers at its address for the first time."""

    name: str
    uid: str
    isolation: str
    revision: str


class PodFailed(Struct, frozen=True):
    """A pod never came up; `reason` ends with its own last words. It is deleted already."""

    name: str
    reason: str


class PodExited(Struct, frozen=True):
    """A pod that served is gone, with every process that ran in it.

    Attributes
    ----------
    begun
        Ids of the attempts that its journal named when it died; None when nobody could read it.
    """

    name: str
    reason: str
    begun: frozenset[str] | None = None


WatchEvent = PodServing | PodFailed | PodExited


class Backend(Protocol):
    """What the loop asks of the place where pods run."""

    #: Name as configuration and API say it.
    name: str
    #: Revision of the pod template that new pods are made from.
    revision: str

    async def start(self, watch: Callable[[WatchEvent], None]) -> None:
        """Begin to watch. `watch` is called on the loop's thread."""

    async def stop(self) -> None:
        """Stop watching and leave every pod as it is."""

    async def list_pods(self) -> list[PodRecord]:
        """List every pod, those of earlier brokers included, and watch them from now on.

        Raises
        ------
        BackendUnavailable
            When the list could not be read completely.
        """

    async def create(self, spec: PodSpec) -> None:
        """Write the pod's name down, then begin to start it; the watch reports how it went.

        Raises
        ------
        OSError
            When it could not even be begun; nothing is left of it then.
        """

    async def delete(self, name: str, *, grace_seconds: float = 0.0) -> None:
        """End a pod, verify that it is gone and remove what belonged to it alone.

        Parameters
        ----------
        grace_seconds
            How long its agent, which was told to end, may take before it is killed.
        """

    async def annotate(self, name: str, annotations: Annotations) -> None:
        """Merge annotations into the pod's own record; a value of None removes its key."""

    def shared_folder(self, name: str) -> str:
        """Name a folder that broker and agent see under one path.

        Raises
        ------
        KeyError
            When there is no such pod.
        """

    def address(self, name: str) -> PodAddress:
        """Say where the pod's agent is reached.

        Raises
        ------
        KeyError
            When there is no such pod.
        """
