"""What panels watch: changes of jobs, pods, pools and sessions, as they happen.

A watcher that does not keep up loses the oldest changes rather than memory; it polls the lists
anyway when it comes back.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

import msgspec

from firepool_broker.api.types import StreamEvent, View

__all__ = ["Hub"]

_BACKLOG = 1000


class _Watcher:
    __slots__ = ("changes", "signal")

    def __init__(self) -> None:
        self.changes: deque[tuple[str | None, StreamEvent]] = deque(maxlen=_BACKLOG)
        self.signal = asyncio.Event()


class Hub:
    """Passes changes on to whoever watches."""

    def __init__(self) -> None:
        self._watchers: set[_Watcher] = set()
        self._closed = False

    @property
    def watched(self) -> bool:
        """Whether anybody watches."""
        return bool(self._watchers)

    def publish(self, kind: str, view: View, caller: str | None = None) -> None:
        """Tell watchers of a change; with a caller, only that caller's."""
        if self._watchers:
            event = StreamEvent(kind, msgspec.json.encode(view))
            for watcher in self._watchers:
                watcher.changes.append((caller, event))
                watcher.signal.set()

    async def watch(self, caller: str, *, everything: bool) -> AsyncIterator[StreamEvent]:
        """Yield changes as they happen, until the hub is closed."""
        watcher = _Watcher()
        self._watchers.add(watcher)
        try:
            while not self._closed:
                await watcher.signal.wait()
                watcher.signal.clear()
                while watcher.changes:
                    owner, event = watcher.changes.popleft()
                    if everything or owner is None or owner == caller:
                        yield event
        finally:
            self._watchers.discard(watcher)

    def close(self) -> None:
        """End every watch."""
        self._closed = True
        for watcher in self._watchers:
            watcher.signal.set()
