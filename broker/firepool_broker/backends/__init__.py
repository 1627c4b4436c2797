"""Where pods come from: one small interface, and the backends that implement it."""

from __future__ import annotations

from firepool_broker.backends.base import (
    Backend,
    BackendUnavailable,
    PodAddress,
    PodExited,
    PodFailed,
    PodRecord,
    PodServing,
    PodSpec,
    WatchEvent,
)

__all__ = [
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
