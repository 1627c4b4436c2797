"""One attempt, from its hand-off to its outcome.

The job writes text into two pipes and frames into its channel; its supervisor tells of its end and
of the end of its tree. `Attempt` reads all four, puts what they say in order into the log, passes
signals on, watches time and memory, and decides what the end means. It ends when the supervisor has
proved the tree gone (or the agent has done so in its place); only then are the rest of the output
and the outcome written.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from firepool_podagent import processes, wire
from firepool_podagent.demultiplexer import RELEASE_SECONDS, STREAMS, Demultiplexer
from firepool_podagent.journal import AttemptLog
from firepool_podagent.memory import MemoryWatch
from firepool_podagent.output import CappedOutput, Coalescer
from firepool_podagent.templates import Spare, signal_name

_HEADER = struct.Struct(">II")
_FRAME_LIMIT_BYTES = 512 << 20
_READ_BYTES = 256 << 10
_SIGNALS = {
    "interrupt": signal.SIGINT,
    "terminate": signal.SIGTERM,
    "kill": signal.SIGKILL,
}
TREE_DEADLINE_SECONDS = processes.KILL_DEADLINE_SECONDS + 2.0


@dataclass
class Tree:
    """What is known of the end of the job's processes.

    Attributes
    ----------
    status : int or None
        Raw wait status of the job; ``None`` when nobody could learn it.
    peak_kib : int
        Largest peak resident memory of one process.
    clean : bool
        Whether the kernel has confirmed that none is left.
    killed : list of dict
        Background processes that were ended.
    survivors : list of str
        Those that did not go away.
    pids : set of int
        Processes that belonged to the job.
    """

    status: int | None = None
    peak_kib: int = 0
    clean: bool = False
    killed: list[dict[str, Any]] = field(default_factory=list)
    survivors: list[str] = field(default_factory=list)
    pids: set[int] = field(default_factory=set)
    supervisor_lost: bool = False


class Attempt:
    """Runs one attempt in a spare.

    Parameters
    ----------
    spec : dict
        The attempt as the broker sent it.
    log : AttemptLog
        Where its messages go.
    received : float
        Unix seconds at which it was asked for.
    """

    def __init__(self, spec: dict[str, Any], log: AttemptLog, received: float) -> None:
        self.spec = spec
        self.log = log
        self.tree = Tree()
        self.tier = "fresh"
        self.imported: list[str] = []
        self._received = received
        self._handed_off: float | None = None
        self._first_instruction: float | None = None
        self._ended: float | None = None
        self._end_frame: dict[str, Any] | None = None
        self._spare: Spare | None = None
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = self._loop.create_future()
        self.stopped: asyncio.Future[None] = self._loop.create_future()
        """Done once the attempt was asked to end, in whatever way."""
        self._forced: tuple[str, str] | None = None
        self._interrupted = False
        self._timers: list[asyncio.TimerHandle] = []
        self._buffer = bytearray()
        self._watch: MemoryWatch | None = None
        self._paused: set[int] = set()
        self._open_pipes = {0, 1}
        self._release_timer: asyncio.TimerHandle | None = None
        self._flush_timer: asyncio.TimerHandle | None = None
        self.on_started: Callable[[], None] = lambda: None
        self.on_exited: Callable[[], None] = lambda: None

    # --- running ---------------------------------------------------------------------------------

    def say(self, level: str, text: str) -> None:
        """Add a line for a person to the messages."""
        self.log.append({"type": "note", "level": level, "text": text})

    def status(self, phase: str, **fields: Any) -> None:
        """Add a status to the messages."""
        self.log.append({"type": "status", "phase": phase, **fields})

    @property
    def job_pid(self) -> int:
        """Process number of the job, 0 before it has one."""
        return self._spare.job if self._spare is not None else 0

    @property
    def stopped_early(self) -> bool:
        """Whether it was to end before it began."""
        return self._spare is None and (self._forced is not None or self._interrupted)

    async def run(self, spare: Spare, tier: str, paths: dict[str, Any], tail: Path) -> None:
        """Hand the attempt to a spare and see it through to the end of its tree."""
        self._spare = spare
        self.tier = tier
        nonce = secrets.token_hex(16)
        limit = int(self.spec.get("output_limit_bytes") or wire.OUTPUT_LIMIT_BYTES)
        self._output = CappedOutput(self.log, limit, tail)
        self._coalescer = Coalescer(self._output.emit, self._loop.time)
        self._demultiplexer = Demultiplexer(nonce, self._coalescer.text, self._coalescer.message)
        spare.on_packet = self._supervisor_says
        for stream, descriptor in enumerate(spare.pipes):
            self._loop.add_reader(descriptor, self._read_pipe, stream)
        watch = MemoryWatch(
            spare.supervisor, spare.job, self.spec.get("memory_mib"), self._memory_hit
        )
        self._watch = watch
        self.tree.pids.add(spare.job)
        order = json.dumps({**self.spec, "nonce": nonce, "paths": paths}).encode()
        watching = None
        try:
            self._handed_off = time.time()
            with contextlib.suppress(OSError):  # a job that is gone is reported by its supervisor
                await self._loop.sock_sendall(spare.channel, _HEADER.pack(len(order), 0) + order)
            self._loop.add_reader(spare.channel, self._read_channel)
            if self.spec.get("timeout_seconds"):
                self._after(float(self.spec["timeout_seconds"]), self._time_is_up)
            watching = asyncio.ensure_future(watch.run())
            await self._over
        finally:
            if watching is not None:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
            for timer in (*self._timers, self._release_timer, self._flush_timer):
                if timer is not None:
                    timer.cancel()
            self.tree.pids |= watch.seen

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self._timers.append(self._loop.call_later(seconds, action))

    # --- what the supervisor says ----------------------------------------------------------------

    def _supervisor_says(self, message: dict[str, Any] | None) -> None:
        tree = self.tree
        if message is None:
            if not self._over.done():
                tree.supervisor_lost = True
                self._over.set_result(None)
        elif message["type"] == "exited":
            self._ended = time.time()
            tree.status = int(message["status"])
            tree.peak_kib = int(message["maxrss_kib"])
            self.on_exited()
            self._after(TREE_DEADLINE_SECONDS, self._supervisor_is_stuck)
        elif message["type"] == "dead":
            tree.clean = bool(message["clean"])
            tree.killed = list(message["killed"])
            tree.survivors = list(message["survivors"])
            tree.pids.update(message.get("pids", ()))
            if not self._over.done():
                self._over.set_result(None)

    def _supervisor_is_stuck(self) -> None:
        """Stop waiting for one that said nothing beyond its deadline: stopped, or worse."""
        if not self._over.done():
            self.tree.supervisor_lost = True
            self._over.set_result(None)

    # --- signals ---------------------------------------------------------------------------------

    def signal(self, name: str, grace_seconds: float, error_class: str | None) -> None:
        """Interrupt, terminate or kill the job.

        Parameters
        ----------
        name : {"interrupt", "terminate", "kill"}
        grace_seconds : float
            How long a terminated job may take before it is killed.
        error_class : str or None
            Class of the outcome; ``Cancelled`` by default for terminate and kill.
        """
        if not self.stopped.done():
            self.stopped.set_result(None)
        if name == "interrupt":
            self._interrupted = True
            self._send_signal("interrupt")
        elif name == "terminate":
            self._force(error_class or "Cancelled", "the job was asked to end")
            self._send_signal("terminate")
            self._after(grace_seconds, self._kill)
        else:
            self._force(error_class or "Cancelled", "the job was ended by force")
            self._kill()

    def _force(self, error_class: str, message: str) -> None:
        if self._forced is None:
            self._forced = (error_class, message)

    def _send_signal(self, name: str) -> None:
        if self._spare is not None and self._ended is None:
            self._spare.tell({"type": "signal", "signal": int(_SIGNALS[name]), "group": True})

    def _kill(self) -> None:
        if self._spare is not None and self._ended is None:
            self._spare.tell({"type": "kill"})
            self._after(TREE_DEADLINE_SECONDS, self._supervisor_is_stuck)

    def _time_is_up(self) -> None:
        seconds = float(self.spec["timeout_seconds"])
        self._force("Timeout", f"the job ran longer than its {seconds:g} s")
        self._send_signal("terminate")
        grace = self.spec.get("terminate_grace_seconds")
        self._after(wire.TERMINATE_GRACE_SECONDS if grace is None else float(grace), self._kill)

    def _memory_hit(self, name: str, pid: int) -> None:
        limit = self.spec.get("memory_mib")
        if self._spare is not None and pid != self._spare.job:
            self._coalescer.message(
                {
                    "type": "note",
                    "level": "warning",
                    "text": f"the memory limit of {limit} MiB was hit: ended the largest "
                    f"process, {name} ({pid})",
                }
            )

    # --- what the job says -----------------------------------------------------------------------

    def _read_pipe(self, stream: int) -> None:
        assert self._spare is not None
        try:
            data = os.read(self._spare.pipes[stream], _READ_BYTES)
        except BlockingIOError:
            return
        if data:
            self._demultiplexer.feed(stream, data)
            if self._demultiplexer.crowded(stream):
                # Whoever floods one stream waits for the fence of the other, at most a second.
                self._loop.remove_reader(self._spare.pipes[stream])
                self._paused.add(stream)
        else:
            self._loop.remove_reader(self._spare.pipes[stream])
            self._open_pipes.discard(stream)
            self._demultiplexer.end(stream)
        self._arrange_timers()

    def _read_channel(self) -> None:
        assert self._spare is not None
        try:
            data = self._spare.channel.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._spare.channel)
            return
        self._buffer += data
        self._take_frames()
        self._arrange_timers()

    def _take_frames(self) -> None:
        while len(self._buffer) >= _HEADER.size:
            text_length, binary_length = _HEADER.unpack_from(self._buffer)
            total = _HEADER.size + text_length + binary_length
            if total > _FRAME_LIMIT_BYTES:
                self._buffer.clear()
                self.say("warning", f"a message of {total >> 20} MiB is more than a pod passes on")
                return
            if len(self._buffer) < total:
                return
            text = bytes(self._buffer[_HEADER.size : _HEADER.size + text_length])
            del self._buffer[:total]
            with contextlib.suppress(ValueError):  # user code wrote into the channel
                message = json.loads(text)
                if isinstance(message, dict) and "type" in message:
                    self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        sequence = int(message.pop("seq", 0))
        if message["type"] == "status" and message.get("phase") == "started":
            if self._first_instruction is None:
                self._first_instruction = float(message.get("time") or time.time())
                self.on_started()
        elif message["type"] == "end":
            self._end_frame = message
            message = {"type": "fence"}
        self._demultiplexer.frame(sequence, message)

    def _arrange_timers(self) -> None:
        due = self._coalescer.due_in()
        if due is not None and self._flush_timer is None:
            self._flush_timer = self._loop.call_later(due, self._flush)
        if self._demultiplexer.waiting and self._release_timer is None:
            self._release_timer = self._loop.call_later(RELEASE_SECONDS, self._release)
        elif not self._demultiplexer.waiting and self._release_timer is not None:
            self._release_timer.cancel()
            self._release_timer = None
        self._resume()

    def _resume(self) -> None:
        assert self._spare is not None
        for stream in tuple(self._paused):
            if not self._demultiplexer.crowded(stream):
                self._paused.discard(stream)
                self._loop.add_reader(self._spare.pipes[stream], self._read_pipe, stream)

    def _flush(self) -> None:
        self._flush_timer = None
        self._coalescer.flush()

    def _release(self) -> None:
        self._release_timer = None
        self._demultiplexer.release()
        self._arrange_timers()

    # --- the end ---------------------------------------------------------------------------------

    def drain(self) -> None:
        """Read what the dead job left in pipes and channel, and send all of it."""
        spare = self._spare
        assert spare is not None
        self._loop.remove_reader(spare.channel)
        with contextlib.suppress(OSError):
            while data := spare.channel.recv(_READ_BYTES):
                self._buffer += data
        self._take_frames()
        # Both pipes by turns, so that neither's text is held back for long.
        open_pipes = set(self._open_pipes)
        while open_pipes:
            for stream in tuple(open_pipes):
                try:
                    data = os.read(spare.pipes[stream], _READ_BYTES)
                except OSError:  # BlockingIOError: nothing left though someone holds it open
                    data = b""
                if data:
                    self._demultiplexer.feed(stream, data)
                else:
                    open_pipes.discard(stream)
        for stream in range(len(STREAMS)):
            self._loop.remove_reader(spare.pipes[stream])
        self._demultiplexer.close()
        self._coalescer.flush()
        for timer in (self._release_timer, self._flush_timer):
            if timer is not None:
                timer.cancel()
        self._output.close()
        spare.close()

    def outcome(self) -> dict[str, Any]:
        """Say what the end means, once the tree is gone and the output is complete."""
        end = self._end_frame or {}
        self.imported = [str(name) for name in end.get("imported", ())]
        status = self.tree.status
        number = os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None
        exit_code = os.WEXITSTATUS(status) if status is not None and number is None else None
        peak = max(self.tree.peak_kib >> 10, self._watch.peak_bytes >> 20 if self._watch else 0)
        return self._record(
            exit_code=exit_code,
            number=number,
            error=self._error(exit_code, number, end),
            peak_mib=peak,
            results=list(end.get("results", ())),
            imports_seconds=end.get("imports_seconds"),
        )

    def outcome_without_job(self, error_class: str, message: str) -> dict[str, Any]:
        """Return the outcome of an attempt whose job never ran."""
        if self._forced is not None:
            error_class, message = self._forced
        elif self._interrupted:
            error_class, message = "Interrupted", "the job was interrupted before it began"
        return self._record(
            exit_code=None, number=None, error=_error(error_class, message), peak_mib=None
        )

    def _record(
        self,
        exit_code: int | None,
        number: int | None,
        error: dict[str, Any] | None,
        peak_mib: int | None,
        results: list[dict[str, Any]] | None = None,
        imports_seconds: float | None = None,
    ) -> dict[str, Any]:
        return {
            "attempt": self.log.attempt,
            "exit_code": exit_code,
            "signal": number,
            "error": error,
            "times": {
                "received": self._received,
                "handed_off": self._handed_off,
                "first_instruction": self._first_instruction,
                "ended": self._ended or time.time(),
            },
            "tier": self.tier,
            "imports_seconds": imports_seconds,
            "peak_memory_mib": peak_mib,
            "killed": self.tree.killed,
            "results": results or [],
            "next": self.log.next,
        }

    def _error(
        self, exit_code: int | None, number: int | None, end: dict[str, Any]
    ) -> dict[str, Any] | None:
        told = end.get("error")
        watch = self._watch
        limit = self.spec.get("memory_mib")
        if exit_code == 0 and self._forced is None:
            return None
        if watch is not None and watch.job_killed:
            return _error(
                "OOM",
                f"the job needed more than its {limit} MiB of memory and was ended; ask for a "
                "larger size or use less",
            )
        if self._forced is not None and (exit_code != 0 or end == {}):
            error_class, message = self._forced
            return _error(error_class, message, told)
        if exit_code == 0:
            return None  # it ended by itself before the signal reached it
        if number == signal.SIGKILL and watch is not None and watch.kernel_killed():
            return _error("OOM", "the kernel ended the job because its memory limit was reached")
        if self._interrupted and (
            number == signal.SIGINT or (told or {}).get("ename") == "KeyboardInterrupt"
        ):
            return _error("Interrupted", "the job was interrupted", told)
        if number is not None:
            name = signal_name(number)
            return _error(
                "Signal", f"the job was ended by {name}, which neither broker nor pod sent", told
            )
        if exit_code is None:
            return _error(
                "Signal", "the job's end could not be observed: its supervisor was killed"
            )
        if told and told.get("class"):
            return {**_error(str(told["class"]), str(told.get("message") or "")), **told}
        return _error("NonZeroExit", f"the job ended with exit code {exit_code}", told)


def _error(error_class: str, message: str, told: dict[str, Any] | None = None) -> dict[str, Any]:
    told = told or {}
    return {
        "class": error_class,
        "message": message,
        "ename": told.get("ename"),
        "evalue": told.get("evalue"),
        "traceback": told.get("traceback"),
    }
