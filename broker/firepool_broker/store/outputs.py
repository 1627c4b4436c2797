"""The outputs of jobs: one append-only file of numbered messages each, and who follows them.

The contract: line ``n`` of ``<job>.ndjson`` is message ``n``; numbers are contiguous over the
attempts of a job. Each line also carries its attempt and how many of the agent's messages were
taken, so that after a crash the agent is asked for exactly what is missing. A message is shown to
followers when it was written (a killed broker loses nothing of it) and acknowledged to the agent
when it is synced (a lost machine neither). A torn last line is cut off when the file is opened.
Followers hold a position, never a queue: a slow one costs no memory and delays nobody.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from firepool_broker.api.types import OutputPosition, StreamEvent
from firepool_broker.store.errors import OutputGap, StoreError, StoreUnavailable
from firepool_broker.store.files import translated
from firepool_broker.store.outputlog import OutputLog

_READ_BYTES = 256 * 1024
_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# what explains a job is worth more than the cap that its text has used up
_ALWAYS_KEPT = frozenset({"error", "result", "note", "divider"})
_ALWAYS_KEPT_BYTES = 16 * 1024 * 1024
_REMEMBERED = 10_000

Message = Mapping[str, object]


class OutputStore:
    """All outputs under one folder.

    Parameters
    ----------
    directory
        The folder; created (mode 0700) when missing.
    limit_bytes
        Bytes kept of one job. The agent caps what it sends; this holds against one that does not.
    """

    def __init__(self, directory: Path, *, limit_bytes: int = 2 * 64 * 1024 * 1024) -> None:
        with translated(directory):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._logs: dict[str, OutputLog] = {}
        self._ended: OrderedDict[str, OutputPosition] = OrderedDict()

    # -- writing -------------------------------------------------------------------------------

    async def append(
        self, job_id: str, messages: Sequence[Message], *, attempt: int | None = None
    ) -> int:
        """Store messages durably; returns the job's next number.

        Parameters
        ----------
        job_id
            The job.
        messages
            JSON objects. With ``attempt`` their ``n`` is the agent's number: those that are
            stored already are skipped. Without it they are the broker's own (a divider, a note).
        attempt
            The attempt that they come from.

        Raises
        ------
        OutputGap
            A number is missing; nothing from it on was stored.
        StoreFull, StoreUnavailable
            The disk refused; what was not synced must be sent again.
        """
        log = self._log(job_id)
        lines: list[bytes] = []
        number = log.next
        kept_bytes = log.bytes
        dropped_bytes = log.dropped_bytes
        own_attempt, position = log.attempt, log.position
        if attempt is not None and attempt != own_attempt:
            own_attempt, position = attempt, 0
        gap: OutputGap | None = None
        for message in messages:
            if attempt is not None:
                agents = message["n"]
                if not isinstance(agents, int):
                    raise OutputGap(job_id, position, -1)
                if agents < position:
                    continue
                if agents > position:
                    gap = OutputGap(job_id, position, agents)
                    break
                position += 1
            line = _line(message, number, own_attempt, position)
            limit = self._limit_bytes
            if message.get("type") in _ALWAYS_KEPT:
                limit += _ALWAYS_KEPT_BYTES
            if kept_bytes + len(line) > limit:
                dropped_bytes += len(line)
                continue
            lines.append(line)
            number += 1
            kept_bytes += len(line)
        log.write(lines, own_attempt, position, dropped_bytes)
        await log.sync()
        if gap is not None:
            raise gap
        return log.next

    def position(self, job_id: str, attempt: int) -> int:
        """Return the number of the agent's message to ask for next, after a restart too."""
        log = self._log(job_id)
        return log.position if log.attempt == attempt else 0

    def publish(self, job_id: str, event: str, data: bytes) -> None:
        """Show an un-numbered event to whoever follows now; only the last of a kind is kept."""
        log = self._logs.get(job_id)
        if log is not None:
            log.publish(event, data)

    def finish(self, job_id: str) -> None:
        """Tell followers that nothing more will come, and close the file."""
        log = self._logs.pop(job_id, None)
        if log is not None:
            log.finish()
            self._remember(job_id, log)

    # -- reading -------------------------------------------------------------------------------

    def summary(self, job_id: str) -> OutputPosition:
        """Return how much is kept of a job."""
        log = self._logs.get(job_id)
        if log is not None:
            return _position(log)
        known = self._ended.get(job_id)
        if known is not None:
            return known
        log = self._opened(job_id, write=False)
        return OutputPosition() if log is None else self._remember(job_id, log)

    async def read(self, job_id: str, start: int = 0) -> AsyncIterator[StreamEvent]:
        """Yield what is stored now, from number ``start``."""
        log = self._logs.get(job_id)
        if log is None:
            log = await asyncio.to_thread(self._opened, job_id, write=False)
        if log is None:
            return
        number, end = start, log.next
        while number < end:
            lines = await log.read(number, _READ_BYTES)
            if not lines:
                return  # the retention took the file away meanwhile
            for line in lines:
                if number < end:
                    yield _event(line, number)
                    number += 1

    async def follow(self, job_id: str, start: int = 0) -> AsyncIterator[StreamEvent]:
        """Yield stored messages from ``start``, then new ones and events until ``finish``.

        For a job that has not ended: nobody will finish the output of one that has (``read``).
        """
        log = self._log(job_id)
        follower = log.follower()
        number = start
        try:
            while True:
                while number < log.next:
                    lines = await log.read(number, _READ_BYTES)
                    if not lines:
                        return
                    for line in lines:
                        yield _event(line, number)
                        number += 1
                for event, data in follower.take_events():
                    yield StreamEvent(event, data)
                if number >= log.next and not follower.has_events:
                    if log.finished:
                        return
                    await follower.changed()
        finally:
            log.leave(follower)

    # -- upkeep --------------------------------------------------------------------------------

    def sweep(self, now: float, retention_seconds: float, keep: Collection[str]) -> list[str]:
        """Delete outputs not written to for ``retention_seconds``; returns the jobs' ids.

        Blocking; run it in a thread. ``keep`` are the jobs that have not ended.
        """
        deleted: list[str] = []
        for path in self._directory.glob("*.ndjson"):
            job_id = path.stem
            if job_id in keep or job_id in self._logs:
                continue
            with translated(path):
                try:
                    if now - path.stat().st_mtime > retention_seconds:
                        path.unlink()
                        self._ended.pop(job_id, None)
                        deleted.append(job_id)
                except FileNotFoundError:
                    continue
        return deleted

    def close(self) -> None:
        """End all followers and close all files."""
        for job_id in list(self._logs):
            self.finish(job_id)

    # -- private -------------------------------------------------------------------------------

    def _path(self, job_id: str) -> Path:
        if _JOB_ID.fullmatch(job_id) is None:
            raise StoreUnavailable(f"{job_id!r} is not a job id")
        return self._directory / f"{job_id}.ndjson"

    def _log(self, job_id: str) -> OutputLog:
        log = self._logs.get(job_id)
        if log is None:
            log = self._opened(job_id, write=True)
            if log is None:
                raise StoreError(f"output of {job_id} cannot be opened")
            self._logs[job_id] = log
            self._ended.pop(job_id, None)
        return log

    def _remember(self, job_id: str, log: OutputLog) -> OutputPosition:
        """Keep the position of an ended output: lists of jobs ask for it again and again."""
        position = self._ended[job_id] = _position(log)
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
        return position

    def _opened(self, job_id: str, *, write: bool) -> OutputLog | None:
        path = self._path(job_id)
        flags = os.O_RDWR | os.O_CREAT if write else os.O_RDONLY
        try:
            with translated(path):
                descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
        except StoreUnavailable as error:
            if not write and isinstance(error.__cause__, FileNotFoundError):
                return None
            raise
        log = OutputLog(path, descriptor, writable=write)
        if not write:
            log.finish()  # readers open the file by its path
        return log


def _position(log: OutputLog) -> OutputPosition:
    return OutputPosition(next=log.next, bytes=log.bytes, dropped_bytes=log.dropped_bytes)


def _line(message: Message, number: int, attempt: int, position: int) -> bytes:
    place = {"n": number, "attempt": attempt, "taken": position}
    return msgspec.json.encode({**place, **message, **place}) + b"\n"


class _Typed(msgspec.Struct):
    type: str = "message"


_typed = msgspec.json.Decoder(_Typed)


def _event(line: bytes, number: int) -> StreamEvent:
    return StreamEvent(_typed.decode(line).type, line, number)
