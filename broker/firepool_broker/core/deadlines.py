"""Deadlines: what becomes due by time alone, in one heap.

An entry is a hint, not a fact: whoever handles it looks whether it still holds. So nothing is ever
removed from the middle.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from enum import Enum


class Due(Enum):
    """What an entry is about; its key is a pod's, a job's, a session's or a pool's."""

    HOLD = "hold"
    IDLE = "idle"
    START = "start"
    RESET = "reset"
    RETIRE = "retire"
    POOL = "pool"
    DELAY = "delay"
    QUEUE = "queue"
    SESSION = "session"
    FORGET = "forget"


class Deadlines:
    """A heap of ``(when, what, key)``."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Due, str, str]] = []
        self._count = 0

    def add(self, when: float, due: Due, key: str, second: str = "") -> None:
        """Remember that something may be due at ``when`` (Unix seconds)."""
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, due, key, second))

    def due(self, now: float) -> Iterator[tuple[Due, str, str]]:
        """Take out everything due, earliest first."""
        while self._heap and self._heap[0][0] <= now:
            _, _, due, key, second = heapq.heappop(self._heap)
            yield due, key, second

    def next(self) -> float | None:
        """Return when the earliest entry is due."""
        return self._heap[0][0] if self._heap else None
