"""One attempt, from its hand-off to its outcome.

The job writes text into two pipes and frames into its channel; its supervisor tells of its end and
of the end of its tree. `Attempt` reads all four, puts what they say in order into the log, passes
signals on, watches time and memory, and decides what the end means. It ends when the supervisor has
proved the tree gone (or the agent has done so in its place); only then are the rest of the output
and the outcome written.

None of the four is trusted. A frame that is not what it should be is left out with a note
(`firepool_podagent.messages`); a supervisor that stays silent is replaced (`.silence`); anything
unforeseen ends the attempt with `AttemptBrokenError` rather than leaving it without an end. While
the disk has no room the job's output is not read, so the job waits and no more than the pipes hold
is kept in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import secrets
import signal
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from firepool_podagent import messages, processes, verdict, wire
from firepool_podagent.demultiplexer import RELEASE_SECONDS, STREAMS, Demultiplexer
from firepool_podagent.journal import AttemptLog
from firepool_podagent.memory import MemoryWatch
from firepool_podagent.output import CappedOutput, Coalescer
from firepool_podagent.silence import Silence
from firepool_podagent.templates import Spare

_HEADER = struct.Struct(">II")
_FRAME_LIMIT_BYTES = 512 << 20
_READ_BYTES = 256 << 10
_SIGNALS = {
    "interrupt": signal.SIGINT,
    "terminate": signal.SIGTERM,
    "kill": signal.SIGKILL,
}
TREE_DEADLINE_SECONDS = processes.KILL_DEADLINE_SECONDS + 2.0
ROOM_SECONDS = 0.1
"""How often a full disk is tried again."""
_NOTES_LIMIT = 10


class AttemptBrokenError(RuntimeError):
    """The agent cannot go on with an attempt: something is not as it has to be."""


def _guarded(function: Callable[..., None]) -> Callable[..., None]:
    """Make an error in what the loop calls the attempt's end, not a line in a log."""

    @functools.wraps(function)
    def call(attempt: Attempt, *args: Any) -> None:
        try:
            function(attempt, *args)
        except Exception as error:  # noqa: BLE001 - raised again by whoever runs the attempt
            attempt.fail(error)

    return call


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
        self._reading = True
        self._room_timer: asyncio.TimerHandle | None = None
        self._silence: Silence | None = None
        self._bad_frames = 0
        self._release_timer: asyncio.TimerHandle | None = None
        self._flush_timer: asyncio.TimerHandle | None = None
        self.on_started: Callable[[], None] = lambda: None
        self.on_exited: Callable[[], None] = lambda: None

    # --- running ---------------------------------------------------------------------------------

    def say(self, level: str, text: str) -> None:
        """Add a line for a person to the messages."""
        self.log.append({"type": "note", "level": level, "text": text})
        self._wait_for_room()

    def status(self, phase: str, **fields: Any) -> None:
        """Add a status to the messages."""
        self.log.append({"type": "status", "phase": phase, **fields})
        self._wait_for_room()

    @property
    def job_pid(self) -> int:
        """Process number of the job, 0 before it has one."""
        return self._spare.job if self._spare is not None else 0

    @property
    def handed_off(self) -> bool:
        """Whether a job was given the attempt."""
        return self._handed_off is not None

    def fail(self, error: Exception) -> None:
        """End it because of an error of the agent's own."""
        if not self._over.done():
            broken = AttemptBrokenError(f"{type(error).__name__}: {error}")
            broken.__cause__ = error
            self._over.set_exception(broken)
            self._over.exception()  # whoever runs the attempt may have ended already

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
        self._silence = Silence(spare, self._lose_supervisor)
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
            for timer in (
                *(*self._timers, self._release_timer, self._flush_timer, self._room_timer),
            ):
                if timer is not None:
                    timer.cancel()
            self._room_timer = None
            self._silence.close()
            self.tree.pids |= watch.seen

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self._timers.append(self._loop.call_later(seconds, action))

    # --- what the supervisor says ----------------------------------------------------------------

    @_guarded
    def _supervisor_says(self, message: dict[str, Any] | None) -> None:
        tree = self.tree
        if message is None:
            self._lose_supervisor()
        elif message["type"] == "exited":
            self._ended = time.time()
            tree.status = int(message["status"])
            tree.peak_kib = int(message["maxrss_kib"])
            self.on_exited()
            if self._silence is not None:
                self._silence.job_ended_was_told()
            self._after(TREE_DEADLINE_SECONDS, self._lose_supervisor)
        elif message["type"] == "dead":
            tree.clean = bool(message["clean"])
            tree.killed = list(message["killed"])
            tree.survivors = list(message["survivors"])
            tree.pids.update(message.get("pids", ()))
            if not self._over.done():
                self._over.set_result(None)

    def _lose_supervisor(self) -> None:
        """Go on without it: it is gone, or said nothing beyond its deadline."""
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
            if self._silence is not None:
                self._silence.wake()
            self._spare.tell({"type": "signal", "signal": int(_SIGNALS[name]), "group": True})

    def _kill(self) -> None:
        if self._spare is not None and self._ended is None:
            self._spare.tell({"type": "kill"})
            if self._silence is not None:
                self._silence.expect_word()
            self._after(TREE_DEADLINE_SECONDS, self._lose_supervisor)

    @_guarded
    def _time_is_up(self) -> None:
        seconds = float(self.spec["timeout_seconds"])
        self._force("Timeout", f"the job ran longer than its {seconds:g} s")
        self._send_signal("terminate")
        grace = self.spec.get("terminate_grace_seconds")
        self._after(wire.TERMINATE_GRACE_SECONDS if grace is None else float(grace), self._kill)

    @_guarded
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

    @_guarded
    def _read_pipe(self, stream: int) -> None:
        assert self._spare is not None
        try:
            data = os.read(self._spare.pipes[stream], _READ_BYTES)
        except BlockingIOError:
            return
        if data:
            self._demultiplexer.feed(stream, data)
            if self._reading and self._demultiplexer.crowded(stream):
                # Whoever floods one stream waits for the fence of the other, at most a second.
                self._loop.remove_reader(self._spare.pipes[stream])
                self._paused.add(stream)
        else:
            self._loop.remove_reader(self._spare.pipes[stream])
            self._open_pipes.discard(stream)
            self._demultiplexer.end(stream)
        self._arrange_timers()

    @_guarded
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
                self._refuse_frame(f"{total >> 20} MiB are more than a pod passes on")
                self._close_channel()
                return
            if len(self._buffer) < total:
                return
            text = bytes(self._buffer[_HEADER.size : _HEADER.size + text_length])
            del self._buffer[:total]
            try:
                sequence, message = messages.decode(text)
            except messages.BadFrameError as error:  # user code wrote into the channel
                self._refuse_frame(str(error))
            else:
                self._take(sequence, message)

    def _refuse_frame(self, reason: str) -> None:
        self._bad_frames += 1
        if self._bad_frames <= _NOTES_LIMIT:
            self.say("warning", f"a message of the job was left out: {reason}")

    def _close_channel(self) -> None:
        """Take no more frames: where the next one begins is not known. Text goes on."""
        assert self._spare is not None
        self._buffer.clear()
        self._loop.remove_reader(self._spare.channel)
        with contextlib.suppress(OSError):
            self._spare.channel.shutdown(socket.SHUT_RDWR)

    def _take(self, sequence: int, message: dict[str, Any]) -> None:
        if message["type"] == "status" and message["phase"] == "started":
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
        self._wait_for_room()
        self._resume()

    def _wait_for_room(self) -> None:
        """While the disk is full, read nothing more of the job, and try again."""
        pressed = self._output.pressed if self._spare is not None else self.log.pressed
        if pressed and self._room_timer is None:
            self._set_reading(False)
            self._room_timer = self._loop.call_later(ROOM_SECONDS, self._try_again)

    @_guarded
    def _try_again(self) -> None:
        self._room_timer = None
        room = self._output.retry() if self._spare is not None else self.log.retry()
        if room:
            self._set_reading(True)
            self._arrange_timers()
        else:
            self._wait_for_room()

    def _set_reading(self, reading: bool) -> None:
        if self._spare is None or self._reading == reading or self._spare.closed:
            return
        self._reading = reading
        for stream in self._open_pipes:
            if reading:
                self._loop.add_reader(self._spare.pipes[stream], self._read_pipe, stream)
            else:
                self._loop.remove_reader(self._spare.pipes[stream])
        self._paused.clear()
        if reading:
            self._loop.add_reader(self._spare.channel, self._read_channel)
        else:
            self._loop.remove_reader(self._spare.channel)

    def _resume(self) -> None:
        assert self._spare is not None
        if not self._reading:
            return
        for stream in tuple(self._paused):
            if not self._demultiplexer.crowded(stream):
                self._paused.discard(stream)
                self._loop.add_reader(self._spare.pipes[stream], self._read_pipe, stream)

    @_guarded
    def _flush(self) -> None:
        self._flush_timer = None
        self._coalescer.flush()

    @_guarded
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
        self._reading = False
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
        self.abandon()

    def abandon(self) -> None:
        """Let go of the job's pipes, whatever they hold."""
        if self._room_timer is not None:
            self._room_timer.cancel()
        spare = self._spare
        if spare is not None and not spare.closed:
            self._loop.remove_reader(spare.channel)
            for descriptor in spare.pipes:
                self._loop.remove_reader(descriptor)
            spare.close()

    def outcome(self) -> dict[str, Any]:
        """Say what the end means, once the tree is gone and the output is complete."""
        end = self._end_frame or {}
        self.imported = end.get("imported", [])
        status = self.tree.status
        number = os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None
        exit_code = os.WEXITSTATUS(status) if status is not None and number is None else None
        results = list(end.get("results", ()))
        if not end and exit_code == 0:
            results = verdict.not_brought_back(self.spec)
            for result in results:
                self.say("warning", f"{result['error']}: os._exit and its like end it at once")
        peak = max(self.tree.peak_kib >> 10, self._watch.peak_bytes >> 20 if self._watch else 0)
        return self._record(
            exit_code=exit_code,
            number=number,
            error=verdict.error_of(
                verdict.End(exit_code, number, self._end_frame),
                self._forced,
                self._interrupted,
                self._watch,
                self.spec.get("memory_mib"),
            ),
            peak_mib=peak,
            results=results,
            imports_seconds=end.get("imports_seconds"),
        )

    def outcome_without_job(self, error_class: str, message: str) -> dict[str, Any]:
        """Return the outcome of an attempt whose job never ran."""
        if self._forced is not None:
            error_class, message = self._forced
        elif self._interrupted:
            error_class, message = "Interrupted", "the job was interrupted before it began"
        return self._record(
            exit_code=None, number=None, error=verdict.error(error_class, message), peak_mib=None
        )

    def outcome_broken(self, error: Exception) -> dict[str, Any]:
        """Return the outcome of an attempt that the agent could not see through to its end."""
        message = f"the pod failed: {type(error).__name__}: {error}"
        if isinstance(error, AttemptBrokenError):
            message = f"the pod failed: {error}"
        return self.outcome_without_job("PodLost" if self.handed_off else "LaunchFailed", message)

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
