"""The record of attempts on the pod's disk: messages by number, then the outcome, then the reset.

One folder per attempt, one NDJSON line per message, in segments that go as the broker
acknowledges them. The outcome is the last line of the last segment and is on the disk
(``fsync``) before anyone is told. A line that was torn by the death of the agent is not there.
An attempt that was begun and has no outcome when an agent starts is ``lost``; it is never run again
under the same id. After the outcome was acknowledged only a small record stays, so that starting a
known attempt still answers with how it ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from firepool_podagent.removal import Removal

SEGMENT_BYTES = 4 << 20
READ_BYTES = 256 << 10
RECORDS_KEPT = 256
_INDEX_EVERY = 64


def encode(message: dict[str, Any]) -> bytes:
    """One NDJSON line, valid UTF-8 whatever the text holds."""
    text = json.dumps(message, ensure_ascii=False, separators=(",", ":"))
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:  # a lone surrogate is no character that JSON readers accept
        repaired = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return repaired.encode() + b"\n"


@dataclass
class _Segment:
    path: Path
    first: int
    size: int = 0
    index: list[tuple[int, int]] = field(default_factory=list)

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

    def __init__(self, folder: Path, attempt: str) -> None:
        self.attempt = attempt
        self.folder = folder
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
        self._open_segment()

    def append(self, message: dict[str, Any]) -> int:
        """Write a message and return its number."""
        number = self.next
        self.append_line(encode({"n": number, **message}))
        return number

    def append_line(self, line: bytes) -> None:
        """Write a line that carries the next number already."""
        segment = self._segments[-1]
        if segment.size >= SEGMENT_BYTES:
            segment = self._open_segment()
        self._write(segment, line)
        self.next += 1
        self._wake()

    def finish(self, outcome: dict[str, Any]) -> None:
        """Write the outcome and wait for the disk; only then does it exist for others."""
        self._write(self._segments[-1], encode({"type": "outcome", **outcome}))
        assert self._file is not None
        os.fdatasync(self._file)
        self.outcome = outcome
        self._wake()

    def report_reset(self, report: dict[str, Any]) -> None:
        """Write the report of the reset that followed."""
        self._write(self._segments[-1], encode({"type": "reset", **report}))
        self.reset = report
        assert self._file is not None
        os.close(self._file)
        self._file = None
        if self._settled:
            self._trim()
        self._wake()

    def _open_segment(self) -> _Segment:
        if self._file is not None:
            os.fsync(self._file)
            os.close(self._file)
        segment = _Segment(self.folder / f"{self.next:012d}.ndjson", self.next)
        self._file = os.open(
            segment.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        self._segments.append(segment)
        return segment

    def _write(self, segment: _Segment, line: bytes) -> None:
        if (self.next - segment.first) % _INDEX_EVERY == 0:
            segment.index.append((self.next, segment.size))
        view = memoryview(line)
        assert self._file is not None
        while view:
            view = view[os.write(self._file, view) :]
        segment.size += len(line)

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
        temporary.write_bytes(encode({"outcome": self.outcome, "reset": self.reset}))
        temporary.rename(record)
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
                if message.get("type") == "outcome":
                    self.outcome = {k: v for k, v in message.items() if k != "type"}
                elif message.get("type") == "reset":
                    self.reset = {k: v for k, v in message.items() if k != "type"}
                else:
                    if (self.next - segment.first) % _INDEX_EVERY == 0:
                        segment.index.append((self.next, segment.size))
                    self.next = int(message["n"]) + 1
                segment.size += len(line)
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
        found = []
        for path in folder.iterdir():
            log = AttemptLog(path, unquote(path.name))
            log.load()
            found.append((path.stat().st_mtime, log))
        for _, log in sorted(found, key=lambda pair: pair[0]):
            self.attempts[log.attempt] = log

    def begin(self, attempt: str, with_results: bool = True) -> AttemptLog:
        """Start the record of a new attempt."""
        log = AttemptLog(self._folder / quote(attempt, safe=":"), attempt)
        log.begin(with_results)
        self.attempts[attempt] = log
        self._forget_oldest()
        return log

    def _forget_oldest(self) -> None:
        done = [log for log in self.attempts.values() if log.trimmed]
        for log in done[: max(0, len(done) - RECORDS_KEPT)]:
            del self.attempts[log.attempt]
            Removal(log.folder).run()


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
