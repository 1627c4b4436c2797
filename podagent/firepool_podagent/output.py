"""From pieces of text and messages to the numbered sequence: coalescing and the cap.

A first line goes out at once, so that a person sees it when it is printed (a piece without its
newline waits a moment: ``print`` writes the two apart); what follows within 50 ms goes out as one
message, so that a loop of prints does not become a flood of messages. Above the cap the first half
has been sent live; of the rest the last half is kept (on the pod's disk, not in memory) and sent at
the end, after a note that says how many bytes are missing. The cap never holds the writer back; a
disk without room does (`CappedOutput.pressed`).
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from firepool_podagent import journal

COALESCE_SECONDS = 0.05
REST_OF_LINE_SECONDS = 0.002
PIECE_BYTES = 128 << 10
_DROPPABLE = frozenset(
    ("stream", "display_data", "update_display_data", "execute_result", "clear_output")
)
_TAIL_PARTS = 8


class Coalescer:
    """Joins text that comes in quick succession.

    Parameters
    ----------
    emit : callable
        Takes a message.
    now : callable
        Seconds of a steady clock.
    """

    def __init__(self, emit: Callable[[dict[str, Any]], None], now: Callable[[], float]) -> None:
        self._emit = emit
        self._now = now
        self._pending: list[tuple[str, list[str]]] = []
        self._size = 0
        self._last = float("-inf")
        self._due = 0.0

    def text(self, name: str, text: str) -> None:
        """Take a piece of text of ``stdout`` or ``stderr``."""
        if not text:
            return
        if self._pending and self._pending[-1][0] == name:
            self._pending[-1][1].append(text)
        else:
            self._pending.append((name, [text]))
        now = self._now()
        if not self._size:
            self._due = max(self._last + COALESCE_SECONDS, now + REST_OF_LINE_SECONDS)
        self._size += len(text)
        line_ended = text.endswith("\n") and now - self._last >= COALESCE_SECONDS
        if line_ended or self._size >= PIECE_BYTES:
            self.flush()

    def message(self, message: dict[str, Any]) -> None:
        """Send a message after the text that came before it."""
        self.flush()
        self._emit(message)

    def flush(self) -> None:
        """Send the waiting text."""
        if not self._pending:
            return
        pending, self._pending, self._size = self._pending, [], 0
        self._last = self._now()
        for name, pieces in pending:
            self._emit({"type": "stream", "name": name, "text": "".join(pieces)})

    def due_in(self) -> float | None:
        """Seconds until waiting text should go out, ``None`` when none waits."""
        if not self._pending:
            return None
        return max(0.0, self._due - self._now())


class CappedOutput:
    """Writes messages to the log of an attempt, and no more of them than the cap.

    Parameters
    ----------
    log : AttemptLog
        Where they go.
    limit_bytes : int
        Cap on the encoded size of what a job outputs.
    folder : Path
        Where the tail waits; belongs to the pod.
    """

    def __init__(self, log: journal.AttemptLog, limit_bytes: int, folder: Path) -> None:
        self._log = log
        self._half = max(1, limit_bytes // 2)
        self._folder = folder
        self._sent = 0
        self._parts: list[tuple[int, int]] = []  # descriptor of a nameless file, size
        self._waiting: deque[bytes] = deque()
        self._dropped = 0
        self._kept_aside: list[bytes] = []
        self._part_count = 0

    @property
    def pressed(self) -> bool:
        """Whether messages wait for room on the disk."""
        return bool(self._waiting) or self._log.pressed

    def retry(self) -> bool:
        """Write what waits for room; True when nothing waits any more."""
        while self._waiting and self._store(self._waiting[0]):
            self._waiting.popleft()
        return self._log.retry() and not self._waiting

    @property
    def over(self) -> bool:
        """Whether the live half is used up."""
        return self._part_count > 0 or bool(self._waiting)

    def emit(self, message: dict[str, Any]) -> None:
        """Send a message, or set it aside for the tail."""
        droppable = message["type"] in _DROPPABLE
        if not self.over:
            if not droppable:
                self._log.append(message)
                return
            for piece in self._fit(message):
                line = journal.encode({"n": self._log.next, **piece})
                if (self._sent + len(line) > self._half and self._sent > 0) or self.over:
                    self._set_aside(piece)
                else:
                    self._sent += len(line)
                    self._log.append_line(line)
        elif message["type"] in ("status", "note"):
            self._log.append(message)  # said while the job runs, not part of its output
        else:
            self._set_aside(message)

    def _fit(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Cut text at the place where the live half ends."""
        if message["type"] != "stream":
            return [message]
        room = self._half - self._sent - 128
        text = message["text"]
        if len(text) * 4 <= room or room <= 0:
            return [message]
        raw = text.encode("utf-8", "surrogatepass")
        if len(raw) <= room:
            return [message]
        head = raw[:room].decode("utf-8", "ignore")
        if not head:
            return [message]
        return [{**message, "text": head}, {**message, "text": text[len(head) :]}]

    def _set_aside(self, message: dict[str, Any]) -> None:
        line = journal.encode(message)
        if self._waiting or not self._store(line):
            self._waiting.append(line)

    def _store(self, line: bytes) -> bool:
        """Put a line into the tail, wholly or not at all; False when there is no room for it."""
        part_limit = max(1, self._half // _TAIL_PARTS)
        try:
            if not self._parts or self._parts[-1][1] >= part_limit:
                self._open_part()
            part, size = self._parts[-1]
            written = 0
            while written < len(line):
                written += os.pwrite(part, line[written:], size + written)
        except OSError:  # what was written of it is written over
            return False
        self._parts[-1] = (part, size + len(line))
        while sum(size for _, size in self._parts[1:]) >= self._half:
            self._drop_part()
        return True

    def _open_part(self) -> None:
        path = self._folder / f"tail-{self._part_count}.ndjson"
        part = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        path.unlink()  # nobody else has a business with it, and it goes with the agent
        self._part_count += 1
        self._parts.append((part, 0))

    def _take_part(self) -> Iterator[bytes]:
        """Take the oldest part away, line by line."""
        part, size = self._parts.pop(0)
        with open(part, "rb") as file:
            file.seek(0)
            yield from file.read(size).splitlines(keepends=True)

    def _drop_part(self) -> None:
        for line in self._take_part():
            message = json.loads(line)
            if message["type"] not in _DROPPABLE:
                self._kept_aside.append(line)
            elif message["type"] == "stream":
                self._dropped += len(message["text"].encode())
            else:
                self._dropped += len(line)

    def close(self) -> int:
        """Send what was set aside; returns the number of bytes that are missing."""
        if self._dropped:
            text = (
                f"{self._dropped} bytes of output were dropped here: a job shows the first and the "
                f"last {self._half} bytes of its output; write the rest to a file"
            )
            self._log.append({"type": "note", "level": "warning", "text": text})
        for line in self._kept_aside:
            self._log.append(json.loads(line))
        while self._parts:
            for line in self._take_part():
                self._log.append(json.loads(line))
            self._log.retry()  # the part's own room is free now
        while self._waiting:
            self._log.append(json.loads(self._waiting.popleft()))
        return self._dropped
