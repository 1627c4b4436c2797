"""The record of attempts on the pod's disk: messages by number, then the outcome, then the reset.

One folder per attempt, one NDJSON line per message, in segments that go as the broker
acknowledges them. The outcome is the last line of the last segment and is on the disk
(``fsync``) before anyone is told. A line that was torn by the death of the agent is not there.

A full disk tears nothing and loses nothing while there is hope: a line that finds no room is taken
back to the last whole one and waits in memory with those behind it (`AttemptLog.pressed`), and
whoever feeds the log stops doing so until `AttemptLog.retry` has written them. For an attempt that
ends meanwhile a reserve was set apart when there was room: it takes the outcome, and as much of
what waits as it can hold.

An attempt that was begun and has no outcome when an agent starts is ``lost``; it is never run again
under the same id. After the outcome was acknowledged only a small record stays, so that starting a
known attempt still answers with how it ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from firepool_podagent import strictjson
from firepool_podagent.removal import Removal

SEGMENT_BYTES = 4 << 20
READ_BYTES = 256 << 10
RECORDS_KEPT = 256
RESERVE_BYTES = 1 << 20
_NOTE_BYTES = 1 << 10
_RESERVE_NAME = ".reserve"
_INDEX_EVERY = 64


def encode(message: dict[str, Any]) -> bytes:
    """One NDJSON line, strict JSON in UTF-8 whatever the message holds."""
    return strictjson.utf8_bytes(message) + b"\n"


class Reserve:
    """Room on the disk that nothing else can take, for the end of one attempt."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / _RESERVE_NAME

    def ensure(self) -> None:
        """Set the room apart, if it is not.

        Raises
        ------
        OSError
            The disk has none.
        """
        if self.path.exists():
            return
        temporary = self.path.with_name(f"{_RESERVE_NAME}.new")
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, RESERVE_BYTES)
            temporary.rename(self.path)
        except OSError:
            temporary.unlink()
            raise
        finally:
            os.close(descriptor)


@dataclass
class _Segment:
    path: Path
    first: int
    size: int = 0
    index: list[tuple[int, int]] = field(default_factory=list)

    def note(self, number: int, length: int) -> None:
        """Take note of a line that was written at the end."""
        if (number - self.first) % _INDEX_EVERY == 0:
            self.index.append((number, self.size))
        self.size += length

    def offset_before(self, number: int) -> int:
        offset = 0
        for indexed, position in self.index:
            if indexed > number:
                break
            offset = position
        return offset


class AttemptLog:
    """Messages, outcome and reset report of one attempt.

    Attributes
    ----------
    attempt : str
        Its id.
    next : int
        Number of the next message.
    outcome, reset : dict or None
        Set once they are known.
    lost : bool
        The agent that ran it died before the outcome.
    """

    def __init__(self, folder: Path, attempt: str, reserve: Reserve | None = None) -> None:
        self.attempt = attempt
        self.folder = folder
        self._reserve = reserve
        self._backlog: deque[tuple[int, bytes]] = deque()
        self.next = 0
        self.outcome: dict[str, Any] | None = None
        self.reset: dict[str, Any] | None = None
        self.lost = False
        self.trimmed = False
        self._settled = False
        self._segments: list[_Segment] = []
        self._file: int | None = None
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def results(self) -> Path:
        """Folder of results that are too large to be sent inline."""
        return self.folder / "results"

    def state(self) -> dict[str, Any]:
        """Return the answer to a question about the attempt."""
        ended = self.outcome is not None
        return {
            "attempt": self.attempt,
            "state": "ended" if ended else "lost" if self.lost else "running",
            "next": self.next,
            "outcome": self.outcome,
            "reset": self.reset,
        }

    # --- writing ---------------------------------------------------------------------------------

    def begin(self, with_results: bool = True) -> None:
        """Make the attempt known on the disk, with a folder for results if it may have any."""
        self.folder.mkdir(mode=0o700)
        if with_results:
            self.results.mkdir(mode=0o700)
        self._open_segment(0)

    @property
    def pressed(self) -> bool:
        """Whether lines wait for room on the disk."""
        return bool(self._backlog)

    def append(self, message: dict[str, Any]) -> int:
        """Write a message and return its number."""
        number = self.next
        self.append_line(encode({"n": number, **message}))
        return number

    def append_line(self, line: bytes) -> None:
        """Write a line that carries the next number already."""
        number = self.next
        self.next += 1
        if self._backlog or not self._store(number, line):
            self._backlog.append((number, line))
        else:
            self._wake()

    def retry(self) -> bool:
        """Write what waits for room; True when nothing waits any more."""
        before = len(self._backlog)
        while self._backlog and self._store(*self._backlog[0]):
            self._backlog.popleft()
        if len(self._backlog) < before:
            self._wake()
        return not self._backlog

    def finish(self, outcome: dict[str, Any]) -> None:
        """Write the outcome and wait for the disk; only then does it exist for others.

        Raises
        ------
        OSError
            The disk takes neither the outcome nor all that waits before it; see
            `finish_in_reserve`.
        """
        if not self.retry():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        assert self._file is not None
        segment = self._segments[-1]
        size = segment.size
        self._write(segment, self.next, encode({"type": "outcome", **outcome}))
        try:
            os.fdatasync(self._file)
        except OSError:
            self._truncate(segment, size)
            raise
        self.outcome = outcome
        self._wake()

    def finish_in_reserve(self, outcome: dict[str, Any], cut: bool) -> bool:
        """Write what waits and the outcome into the room that was set apart for it.

        Parameters
        ----------
        outcome : dict
            Its ``next``, and results for which there is no room, are put right.
        cut : bool
            Whether messages may be left out, with a note of it, when there is no room for all.

        Returns
        -------
        bool
            False when messages would have to be left out, and nothing was done.

        Raises
        ------
        OSError
            The reserve is gone as well.
        """
        assert self._reserve is not None
        room = RESERVE_BYTES - _NOTE_BYTES
        outcome = _within(outcome, room)
        room -= len(encode({"type": "outcome", **outcome}))
        kept: list[tuple[int, bytes]] = []
        for number, line in self._backlog:
            if len(line) > room:
                break
            room -= len(line)
            kept.append((number, line))
        first = kept[0][0] if kept else self.next - len(self._backlog)
        lost = len(self._backlog) - len(kept)
        if lost and not cut:
            return False
        following = self.next
        if lost:
            following = first + len(kept)
            text = f"{lost} messages of output were lost here: the pod's disk is full"
            note = {"n": following, "type": "note", "level": "warning", "text": text}
            kept.append((following, encode(note)))
            following += 1
        outcome["next"] = following
        descriptor = os.open(self._reserve.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            path = self.folder / f"{first:012d}.ndjson"
            segment = _Segment(path, first)
            for number, line in [*kept, (following, encode({"type": "outcome", **outcome}))]:
                _write_whole(descriptor, line)
                segment.note(number, len(line))
            os.ftruncate(descriptor, segment.size)
            os.fdatasync(descriptor)
            self._reserve.path.rename(path)
        except OSError:
            os.close(descriptor)
            raise
        if self._file is not None:
            os.close(self._file)
        self._file = descriptor
        if self._segments and self._segments[-1].first == first:
            self._segments.pop()  # it was empty, and has been replaced
        self._segments.append(segment)
        self._backlog.clear()
        self.next = following
        self.outcome = outcome
        self._wake()
        return True

    def report_reset(self, report: dict[str, Any]) -> None:
        """Write the report of the reset that followed.

        On a full disk it is told and not written: an agent that starts anew takes the pod for one
        that was not reset.
        """
        assert self._file is not None
        with contextlib.suppress(OSError):
            self._write(self._segments[-1], self.next, encode({"type": "reset", **report}))
        self.reset = report
        os.close(self._file)
        self._file = None
        if self._settled:
            self._trim()
        self._wake()

    def _open_segment(self, first: int) -> _Segment:
        if self._file is not None:
            os.fsync(self._file)
        segment = _Segment(self.folder / f"{first:012d}.ndjson", first)
        file = os.open(segment.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        if self._file is not None:
            os.close(self._file)
        self._file = file
        self._segments.append(segment)
        return segment

    def _store(self, number: int, line: bytes) -> bool:
        """Write a line wholly or not at all; False when there is no room for it."""
        try:
            segment = self._segments[-1]
            if segment.size >= SEGMENT_BYTES:
                segment = self._open_segment(number)
            self._write(segment, number, line)
        except OSError:
            return False
        return True

    def _write(self, segment: _Segment, number: int, line: bytes) -> None:
        assert self._file is not None
        try:
            _write_whole(self._file, line)
        except OSError:
            self._truncate(segment, segment.size)
            raise
        segment.note(number, len(line))

    def _truncate(self, segment: _Segment, size: int) -> None:
        """Take back what was written of a line, so that none is ever half there."""
        assert self._file is not None
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, size)
        segment.size = size

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    # --- reading ---------------------------------------------------------------------------------

    def change(self) -> asyncio.Future[None]:
        """Return a future that is done once more was written; `forget` it afterwards."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return waiter

    def forget(self, waiter: asyncio.Future[None]) -> None:
        """Take back a future of `change`."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)

    def reader(self, number: int) -> Reader:
        """Read the messages from a number on."""
        return Reader(self, number)

    # --- forgetting ------------------------------------------------------------------------------

    def acknowledge(self, number: int, outcome: bool = False) -> None:
        """Drop what the broker has stored.

        Parameters
        ----------
        number : int
            Messages below it are stored; segments wholly below it go.
        outcome : bool
            Whether the outcome and its results are stored as well: then only a record stays.
        """
        if outcome and self.outcome is not None:
            self._settled = True
            if self.reset is not None:
                self._trim()
        while len(self._segments) > 1 and self._segments[1].first <= number:
            segment = self._segments.pop(0)
            with contextlib.suppress(FileNotFoundError):
                segment.path.unlink()

    def _trim(self) -> None:
        """Keep nothing but the record of how it ended."""
        if self.trimmed:
            return
        record = self.folder / "record.json"
        temporary = self.folder / ".record.json"
        try:
            temporary.write_bytes(encode({"outcome": self.outcome, "reset": self.reset}))
            temporary.rename(record)
        except OSError:  # a full disk: the segments stay, which say the same
            temporary.unlink(missing_ok=True)
            return
        for segment in self._segments:
            with contextlib.suppress(FileNotFoundError):
                segment.path.unlink()
        self._segments.clear()
        Removal(self.results).run()
        self.trimmed = True

    # --- after a restart -------------------------------------------------------------------------

    def load(self) -> None:
        """Read back what an earlier agent left."""
        record = self.folder / "record.json"
        if record.exists():
            known = json.loads(record.read_bytes())
            self.outcome, self.reset = known["outcome"], known["reset"]
            self.next = int(known["outcome"]["next"])
            self.trimmed = True
            return
        for path in sorted(self.folder.glob("*.ndjson")):
            segment = _Segment(path, int(path.stem))
            self._segments.append(segment)
            self.next = segment.first
            for line, message in _lines(path):
                number = self.next
                if message.get("type") == "outcome":
                    self.outcome = {k: v for k, v in message.items() if k != "type"}
                elif message.get("type") == "reset":
                    self.reset = {k: v for k, v in message.items() if k != "type"}
                else:
                    number = int(message["n"])
                    self.next = number + 1
                segment.note(number, len(line))
        self.lost = self.outcome is None
        if self.outcome is not None and self.reset is None:
            self.reset = {
                "attempt": self.attempt,
                "clean": False,
                "reason": "the agent ended before the reset was confirmed",
                "left": [],
                "seconds": 0.0,
                "escapees": 0,
            }


class Reader:
    """Position in the messages of an attempt; gives whole lines, never the outcome."""

    def __init__(self, log: AttemptLog, number: int) -> None:
        self._log = log
        self._number = number
        self._segment: _Segment | None = None
        self._offset = 0

    @property
    def at_end(self) -> bool:
        """Whether every message so far has been read."""
        return self._log.trimmed or self._number >= self._log.next

    def read(self) -> bytes:
        """Next lines, about `READ_BYTES` of them; empty when there are none."""
        while not self.at_end:
            segment = self._locate()
            if segment is None:
                return b""
            chunk = self._chunk(segment)
            lines = chunk.splitlines(keepends=True)
            wanted = []
            for line in lines:
                self._offset += len(line)
                number = _number(line)
                if number is not None and number >= self._number:
                    wanted.append(line)
                    self._number = number + 1
            if wanted:
                return b"".join(wanted)
            if not lines:
                return b""
        return b""

    def _locate(self) -> _Segment | None:
        segments = self._log._segments
        if not segments:
            return None
        place = segments[0]
        for segment in segments:
            if segment.first > self._number:
                break
            place = segment
        self._number = max(self._number, place.first)
        if self._segment is not place:
            self._segment, self._offset = place, place.offset_before(self._number)
        return place

    def _chunk(self, segment: _Segment) -> bytes:
        """Whole lines from the present offset, at least one if there is one."""
        length = READ_BYTES
        with open(segment.path, "rb", buffering=0) as file:
            while True:
                left = segment.size - self._offset
                data = os.pread(file.fileno(), min(length, left), self._offset)
                end = data.rfind(b"\n") + 1
                if end or len(data) >= left or not data:
                    return data[:end]
                length *= 4


class Journal:
    """All attempts that this pod knows of, oldest first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.attempts: dict[str, AttemptLog] = {}
        folder.mkdir(mode=0o700, exist_ok=True)
        self._reserve = Reserve(folder)
        with contextlib.suppress(OSError):  # `begin` tries again, and says so
            self._reserve.ensure()
        found = []
        for path in folder.iterdir():
            if path.name.startswith(_RESERVE_NAME):
                continue
            log = AttemptLog(path, unquote(path.name))
            log.load()
            found.append((path.stat().st_mtime, log))
        for _, log in sorted(found, key=lambda pair: pair[0]):
            self.attempts[log.attempt] = log

    def begin(self, attempt: str, with_results: bool = True) -> AttemptLog:
        """Start the record of a new attempt.

        Raises
        ------
        OSError
            The disk has no room for it, or none for its end.
        """
        self._reserve.ensure()
        log = AttemptLog(self._folder / quote(attempt, safe=":"), attempt, self._reserve)
        try:
            log.begin(with_results)
        except OSError:
            Removal(log.folder).run()
            raise
        self.attempts[attempt] = log
        self._forget_oldest()
        return log

    def _forget_oldest(self) -> None:
        done = [log for log in self.attempts.values() if log.trimmed]
        for log in done[: max(0, len(done) - RECORDS_KEPT)]:
            del self.attempts[log.attempt]
            Removal(log.folder).run()


def _write_whole(descriptor: int, line: bytes) -> None:
    view = memoryview(line)
    while view:
        view = view[os.write(descriptor, view) :]


def _within(outcome: dict[str, Any], limit: int) -> dict[str, Any]:
    """Return an outcome whose line is no longer than a limit, the largest parts left out first."""
    outcome = dict(outcome)
    if len(encode(outcome)) > limit // 2:
        lost = "the pod's disk is full: there was no room for the value"
        outcome["results"] = [
            {**result, "data": None, "error": lost} if result.get("data") is not None else result
            for result in outcome.get("results", ())
        ]
    if len(encode(outcome)) > limit // 2 and outcome.get("error"):
        texts = {k: v[:1000] for k, v in outcome["error"].items() if isinstance(v, str)}
        outcome["error"] = {**outcome["error"], **texts, "traceback": None}
    if len(encode(outcome)) > limit // 2:
        outcome["results"], outcome["killed"] = [], []
    return outcome


def _number(line: bytes) -> int | None:
    if not line.startswith(b'{"n":'):
        return None
    return int(line[5 : line.index(b",", 5)])


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    with open(path, "rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return  # torn by the death of the agent: nobody was told of it
            yield line, json.loads(line)
