"""One job's output file: where each message lies, its recent lines in memory, its followers.

The contract: only whole lines are ever visible; a write that fails is undone before it raises.
"""

from __future__ import annotations

import asyncio
import os
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import msgspec

from firepool_broker.store.files import translated

_INDEX_EVERY_BYTES = 64 * 1024
_RECENT_BYTES = 512 * 1024
_SCAN_BYTES = 1024 * 1024
_TAIL_BYTES = 64 * 1024


class _Mark(msgspec.Struct):
    """What a line says about its place."""

    n: int
    attempt: int
    taken: int


_mark = msgspec.json.Decoder(_Mark)


class Follower:
    """One reader's place to wait, and the last un-numbered event of each kind it has not seen."""

    def __init__(self) -> None:
        self._events: dict[str, bytes] = {}
        self._signal = asyncio.Event()

    @property
    def has_events(self) -> bool:
        """Whether there are events to take."""
        return bool(self._events)

    def put(self, event: str, data: bytes) -> None:
        """Keep an event, in place of an older one of its kind."""
        self._events.pop(event, None)
        self._events[event] = data
        self._signal.set()

    def wake(self) -> None:
        """Let the reader look at the log again."""
        self._signal.set()

    def take_events(self) -> list[tuple[str, bytes]]:
        """Return the events that came since the last call."""
        events = list(self._events.items())
        self._events.clear()
        return events

    async def changed(self) -> None:
        """Wait until something happened since the last wait."""
        await self._signal.wait()
        self._signal.clear()


class OutputLog:
    """An open output file.

    Parameters
    ----------
    path, descriptor
        The file; the log owns the descriptor.
    writable
        Cut off a torn last line and accept writes.
    """

    def __init__(self, path: Path, descriptor: int, *, writable: bool) -> None:
        self._path = path
        self._descriptor: int | None = descriptor
        self._followers: set[Follower] = set()
        self._recent: deque[bytes] = deque()
        self._recent_bytes = 0
        # message numbers and the offsets at which they begin, about every 64 KiB
        self._numbers: list[int] = [0]
        self._offsets: list[int] = [0]
        # messages below this number were there when the file was opened: not indexed until read
        self._unindexed = 0
        self._syncing: asyncio.Future[None] | None = None
        self._synced_bytes = 0
        self.next = 0
        """Number that the next message will have."""
        self.bytes = 0
        """Bytes of whole lines."""
        self.dropped_bytes = 0
        """Bytes that the cap dropped since the file was opened."""
        self.attempt = 0
        """The attempt that wrote last; 0 before any."""
        self.position = 0
        """The agent's number that this attempt's next message will have."""
        self.finished = False
        """Nothing more will come."""
        try:
            with translated(path):
                self._read_tail(descriptor)
                if writable:
                    os.ftruncate(descriptor, self.bytes)
        except BaseException:
            self._close()
            raise

    def _read_tail(self, descriptor: int) -> None:
        """Find the last whole line; what follows the last line break is torn and not counted."""
        size = os.fstat(descriptor).st_size
        start, tail = size, b""
        while start > 0 and tail.count(b"\n") < 2:
            step = min(_TAIL_BYTES, start)
            start -= step
            tail = os.pread(descriptor, step, start) + tail
        end = tail.rfind(b"\n") + 1
        if end == 0:
            return
        mark = _mark.decode(tail[tail.rfind(b"\n", 0, end - 1) + 1 : end])
        self.next = mark.n + 1
        self.bytes = start + end
        self.attempt, self.position = mark.attempt, mark.taken
        self._numbers.append(self.next)
        self._offsets.append(self.bytes)
        self._unindexed = self.next
        self._synced_bytes = self.bytes

    # -- writing -------------------------------------------------------------------------------

    def write(
        self, lines: Sequence[bytes], attempt: int, position: int, dropped_bytes: int
    ) -> None:
        """Append whole lines and show them to followers; all of them or none."""
        if lines:
            descriptor = self._open_descriptor()
            with translated(self._path):
                try:
                    _write_all(descriptor, b"".join(lines), self.bytes)
                except OSError:
                    os.ftruncate(descriptor, self.bytes)
                    raise
            for line in lines:
                if self.bytes - self._offsets[-1] >= _INDEX_EVERY_BYTES:
                    self._numbers.append(self.next)
                    self._offsets.append(self.bytes)
                self.next += 1
                self.bytes += len(line)
                self._recent.append(line)
                self._recent_bytes += len(line)
            while self._recent_bytes > _RECENT_BYTES and len(self._recent) > 1:
                self._recent_bytes -= len(self._recent.popleft())
        self.attempt, self.position = attempt, position
        self.dropped_bytes = dropped_bytes
        for follower in self._followers:
            follower.wake()

    async def sync(self) -> None:
        """Return once everything written before this call is on the disk.

        Calls that come while a sync runs share the next one.
        """
        target = self.bytes
        while self._synced_bytes < target:
            if self._syncing is None:
                self._syncing = asyncio.ensure_future(self._sync_once())
                # a waiter that was cancelled does not look: the next sync reports again
                self._syncing.add_done_callback(lambda done: done.cancelled() or done.exception())
            await asyncio.shield(self._syncing)

    async def _sync_once(self) -> None:
        size = self.bytes
        # a descriptor of its own: the log may be finished and closed while the sync runs
        descriptor = os.dup(self._open_descriptor())
        try:
            with translated(self._path):
                await asyncio.to_thread(os.fdatasync, descriptor)
            self._synced_bytes = size
        finally:
            self._syncing = None
            os.close(descriptor)

    # -- reading -------------------------------------------------------------------------------

    async def read(self, number: int, limit_bytes: int) -> list[bytes]:
        """Return whole lines from ``number`` on, at least one, up to about ``limit_bytes``."""
        first_recent = self.next - len(self._recent)
        if number >= first_recent:
            return list(_limited(self._recent, number - first_recent, limit_bytes))
        if 0 < number < self._unindexed:
            self._merge(*await asyncio.to_thread(self._scan, self._unindexed))
        place = bisect_right(self._numbers, number) - 1
        offset, skip = self._offsets[place], number - self._numbers[place]
        return await asyncio.to_thread(self._read_lines, offset, skip, limit_bytes, self.bytes)

    def _scan(self, until: int) -> tuple[list[int], list[int]]:
        """Return where messages begin in what was there when the file was opened."""
        numbers, offsets = [0], [0]
        number = offset = 0
        with translated(self._path):
            try:
                with self._path.open("rb") as file:
                    while number < until and (chunk := file.read(_SCAN_BYTES)):
                        number += chunk.count(b"\n")
                        end = chunk.rfind(b"\n") + 1
                        if end:
                            numbers.append(number)
                            offsets.append(offset + end)
                        offset += len(chunk)
            except FileNotFoundError:
                return [0], [0]
        return numbers, offsets

    def _merge(self, numbers: list[int], offsets: list[int]) -> None:
        later = bisect_right(self._numbers, numbers[-1])
        self._numbers[:later] = numbers
        self._offsets[:later] = offsets
        self._unindexed = 0

    def _read_lines(self, offset: int, skip: int, limit_bytes: int, end: int) -> list[bytes]:
        with translated(self._path):
            try:
                # by path: the log may be closed meanwhile, and threads share no file position
                with self._path.open("rb") as file:
                    file.seek(offset)
                    lines: list[bytes] = []
                    size = 0
                    while offset < end and size < limit_bytes:
                        line = file.readline()
                        offset += len(line)
                        if not line.endswith(b"\n"):
                            break
                        if skip:
                            skip -= 1
                            continue
                        lines.append(line)
                        size += len(line)
                    return lines
            except FileNotFoundError:
                return []

    # -- followers -----------------------------------------------------------------------------

    def follower(self) -> Follower:
        """Add a follower."""
        follower = Follower()
        self._followers.add(follower)
        return follower

    def leave(self, follower: Follower) -> None:
        """Remove a follower."""
        self._followers.discard(follower)

    def publish(self, event: str, data: bytes) -> None:
        """Hand an un-numbered event to every follower."""
        for follower in self._followers:
            follower.put(event, data)

    def finish(self) -> None:
        """Close the file and let followers end."""
        self.finished = True
        self._close()
        for follower in self._followers:
            follower.wake()

    def _open_descriptor(self) -> int:
        if self._descriptor is None:
            raise ValueError(f"{self._path} was finished")
        return self._descriptor

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        offset += written
        view = view[written:]


def _limited(lines: deque[bytes], start: int, limit_bytes: int) -> Iterator[bytes]:
    size = 0
    for line in islice(lines, start, None):
        yield line
        size += len(line)
        if size >= limit_bytes:
            return
