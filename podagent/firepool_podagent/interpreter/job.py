"""A job, from its start frame to its end frame.

The process waits on its channel with everything imported and the shell made. On the start frame it
takes on the attempt's surroundings, binds the inputs, says ``started`` and runs the code; then it
waits for the threads that the code left, collects the outputs, runs exit handlers, flushes what the
code left open, sends ``end`` and exits. Interpreter shutdown itself is skipped: it can take longer
than the cell.

An interrupt after the code ends whatever is waited for then. What the end needs is bound when this
module is imported, and a step of it that fails costs no other: a cell may patch anything.
"""

from __future__ import annotations

import _io
import atexit
import builtins
import faulthandler
import functools
import gc
import getpass
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from firepool_podagent.interpreter import (
    commands,
    errors,
    fresh,
    importclock,
    inputs,
    pickling,
    plain,
    results,
    sessionpip,
    surroundings,
)
from firepool_podagent.interpreter.frames import Channel, ChannelClosedError
from firepool_podagent.interpreter.shell import Shell, make_shell
from firepool_podagent.interpreter.streams import (
    Outlet,
    TextStream,
    print_whole,
    private_fd,
    standard_input,
    unwrapped,
)

_exit = os._exit
_set_signal = unwrapped(signal.signal)
_get_signal = unwrapped(signal.getsignal)
_SIGINT, _SIG_IGN, _SIG_DFL = signal.SIGINT, signal.SIG_IGN, signal.SIG_DFL
_default_interrupt = signal.default_int_handler
_run_exit_handlers = atexit._run_exitfuncs
_collect_garbage, _all_objects = gc.collect, gc.get_objects
_now, _round, _isinstance = time.time, round, isinstance
_BaseException, _KeyboardInterrupt, _OSError = BaseException, KeyboardInterrupt, OSError
_ValueError, _SystemExit, _list, _callable = ValueError, SystemExit, list, callable
_IOBase = _io._IOBase


class InputUnavailableError(RuntimeError):
    """Code asked for keyboard input where there is none."""


def _refuse_input(*_args: object, **_kwargs: object) -> NoReturn:
    raise InputUnavailableError(
        "a remote cell has no keyboard: ask with input() in the notebook, and send the answer in"
        " with -i NAME"
    )


def _refuse_breakpoint(*_args: object, **_kwargs: object) -> NoReturn:
    raise InputUnavailableError(
        "a remote cell has no keyboard for a debugger: run the cell without %%firepool to step"
        " through it, or print what you look for"
    )


def run_fresh(channel_fd: int, frame_fd: int) -> NoReturn:
    """Run the job whose start frame lies in ``frame_fd``, in an interpreter started for it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    with open(frame_fd, "rb") as file:
        spec = json.load(file)
    # The attempt's own import path comes first: its requirements may bring another IPython.
    surroundings.prepare_parked()
    surroundings.enter(spec)
    channel = Channel(socket.socket(fileno=private_fd(channel_fd)))
    os.close(channel_fd)
    shell, _ = make_shell()
    Job(channel, shell).run(spec)


def run_parked(channel_fd: int, stdout_fd: int, stderr_fd: int, shell: Shell) -> NoReturn:
    """Be a parked job: wait on ``channel_fd`` and run what comes. Runs in the forked process."""
    channel = Channel(socket.socket(fileno=private_fd(channel_fd)))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(stdout_fd, 1)
    os.dup2(stderr_fd, 2)
    for fd in {channel_fd, null, stdout_fd, stderr_fd} - {0, 1, 2}:
        os.close(fd)
    surroundings.prepare_parked()
    job = Job(channel, shell)
    gc.enable()
    if not channel.has_data():
        # The first cell after a fork copies the pages that it touches; done now, it costs no one.
        shell.touch()
    try:
        spec, _ = channel.receive()
    except ChannelClosedError:  # the agent does not need this spare any more
        os._exit(0)
    reason = fresh.reason(spec)
    if reason is not None:
        job.tell({"type": "status", "phase": "fresh", "reason": reason})
        fresh.replace_process(channel.fileno(), spec)
    job.run(spec)


def _wait_for_threads() -> None:
    """Wait for the threads that are not daemons, as an interpreter does at its end.

    Not by ``threading._shutdown`` alone: it does not let an interrupt through from Python 3.13 on.
    """
    ends = getattr(threading, "_threading_atexits", [])
    while ends:  # the pools of concurrent.futures send their idle workers home
        ends.pop()()
    while waiting := [
        thread
        for thread in threading.enumerate()
        if not thread.daemon and thread is not threading.main_thread()
    ]:
        waiting[0].join()
    threading._shutdown()  # type: ignore[attr-defined]


class Job:
    """One job in this process."""

    def __init__(self, channel: Channel, shell: Shell) -> None:
        self._shell = shell
        self._outlet = Outlet(channel, (1, 2))
        self._clock = importclock.ImportClock()
        self._error: BaseException | None = None
        self._told: dict[str, Any] | None = None
        self._exit_code = 0
        self._command: tuple[int, dict[str, Any] | None] | None = None
        self._interrupted = False
        sys.stdin = sys.__stdin__ = standard_input()  # type: ignore[misc]
        sys.stdout = sys.__stdout__ = TextStream(self._outlet, 1, "<stdout>")  # type: ignore[misc]
        sys.stderr = sys.__stderr__ = TextStream(self._outlet, 2, "<stderr>")  # type: ignore[misc]
        builtins.input = _refuse_input
        builtins.print = print_whole
        getpass.getpass = _refuse_input
        sys.breakpointhook = _refuse_breakpoint
        # What is ours after the code runs with the functions that it knows, whatever a cell put in
        # their places; the code's own threads are over by then.
        self._restore_builtins = functools.partial(vars(builtins).update, vars(builtins).copy())
        faulthandler.enable()
        pickling.prepare()  # not to be counted among the job's own imports
        shell.connect(self._outlet)

    def run(self, spec: dict[str, Any]) -> NoReturn:
        """Run the attempt and exit."""
        self._spec = spec
        self._outlet.begin(spec["nonce"])
        sessionpip.attempt = spec
        signal.signal(signal.SIGINT, signal.default_int_handler)
        found: list[dict[str, Any]] = []
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
            surroundings.enter(spec)
            call = inputs.bind(spec["inputs"], spec["paths"]["blobs"], self._shell.namespace)
            self._clock.start()
            value = self._run_kind(call)
            self._hear_interrupts()
            _wait_for_threads()
            self._clock.stop()
            self._restore_builtins()
            if self._exit_code == 0:
                found = self._collect(value)
        except _BaseException as error:  # the interrupt may come anywhere
            self._restore_builtins()
            _set_signal(_SIGINT, _SIG_IGN)
            failure = error
            self._guarded(lambda: self._fail(failure))
        self._end(found)

    def _hear_interrupts(self) -> None:
        """Let an interrupt end what comes after the code, unless the code handles it in its way."""
        handler = _get_signal(_SIGINT)
        if handler in (_SIG_IGN, _SIG_DFL, None, _default_interrupt):
            _set_signal(_SIGINT, self._on_interrupt)

    def _on_interrupt(self, _signal: int, _frame: object) -> NoReturn:
        self._interrupted = True
        raise _KeyboardInterrupt

    def _guarded(self, step: Callable[[], object]) -> None:
        """Run a step of the end; one that fails costs no other."""
        try:
            step()
        except _KeyboardInterrupt:  # whoever sent it is told by `_interrupted`
            return
        except _BaseException as error:
            if self._exit_code == 0 and self._error is None:
                self._exit_code = 1
                text = f"{error.__class__.__name__}: {errors.text_of(error)}"
                message = f"the end of the job failed: {text}"
                self._told = {"class": "NonZeroExit", "message": message}

    def tell(self, message: dict[str, Any]) -> None:
        """Send the agent something whose place among the output does not matter."""
        self._outlet.send_unordered(message)

    def _started(self) -> None:
        self.tell({"type": "status", "phase": "started", "time": _now()})

    def _run_kind(self, call: Any) -> Any:
        spec = self._spec
        if spec["kind"] == "command":
            self._started()
            self._command = commands.run(spec["argv"], spec["shell"])
            return plain.NOTHING
        if spec["kind"] == "call":
            function, args, kwargs = call
            result = self._shell.run_call(function, args, kwargs, self._started)
        else:
            result = self._shell.run_cell(
                spec["code"],
                spec.get("filename") or "<cell>",
                spec.get("line_offset") or 0,
                self._started,
            )
        if result.error is not None:
            self._fail(result.error, result.traceback)
        return result.value

    def _collect(self, value: Any) -> list[dict[str, Any]]:
        spec = self._spec
        collector = results.Collector(
            spec["paths"]["results"], spec["inline_result_bytes"], lambda: self._interrupted
        )
        names = _list(spec["outputs"])
        found = []
        if spec["kind"] == "call":
            found.append(
                collector.encode("return", value)
                if value is not plain.NOTHING
                else results.failed("return", "", "the call ended the job before it returned")
            )
        elif "_" in names:
            names.remove("_")
            if value is not plain.NOTHING:
                found += collector.small("_", value)
        found += collector.collect(names, self._shell.namespace)
        for name in collector.moved:
            self._note(f"{name}: tensors of an accelerator come back as CPU tensors")
        return found

    def _note(self, text: str) -> None:
        self._outlet.send({"type": "note", "level": "info", "text": text})

    def _fail(self, error: BaseException, lines: list[str] | None = None) -> None:
        if self._error is not None:
            return
        self._restore_builtins()
        self._error = error
        self._exit_code = errors.exit_code_of(error)
        if self._exit_code == 0:
            return
        lines = lines if lines is not None else self._shell.format_error(error)
        self._told = errors.describe(error, lines)
        self._outlet.send(errors.message(error, lines))

    def _end(self, found: list[dict[str, Any]]) -> NoReturn:
        _set_signal(_SIGINT, _SIG_IGN)
        try:
            self._clock.stop()
            if self._error is None and self._command is not None:
                self._exit_code, self._told = self._command
            failed = self._exit_code != 0
            self._error = None
            if found:  # an exit handler that ends the process does not take them along
                self._guarded(lambda: self._outlet.send(self._end_frame(found, [])))
            interrupted, self._interrupted = self._interrupted, False
            _set_signal(_SIGINT, self._on_interrupt)
            self._guarded(_run_exit_handlers)
            self._guarded(self._release)
            _set_signal(_SIGINT, _SIG_IGN)
            if self._interrupted and not interrupted and not failed:
                self._guarded(lambda: self._fail(_KeyboardInterrupt()))
            imported: list[str] = []
            self._guarded(lambda: imported.extend(self._clock.installed()))
            self._outlet.send(self._end_frame(found, imported))
        finally:
            _exit(self._exit_code)

    def _end_frame(self, found: list[dict[str, Any]], imported: list[str]) -> dict[str, Any]:
        return {
            "type": "end",
            "exit_code": self._exit_code,
            "error": self._told,
            "results": found,
            "imports_seconds": _round(self._clock.seconds, 6),
            "imported": imported,
        }

    def _release(self) -> None:
        """Let go of the cell's objects, as the end of an interpreter would: files get written."""
        self._shell.namespace.clear()
        _collect_garbage()
        for each in _all_objects():
            if _isinstance(each, _IOBase) and not _isinstance(each, TextStream):
                try:
                    if not each.closed and each.writable():
                        each.flush()
                except (_OSError, _ValueError):
                    continue
