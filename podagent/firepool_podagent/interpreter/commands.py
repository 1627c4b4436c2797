"""Jobs that are a command: a program, or a line for the shell."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import FrameType
from typing import Any

from firepool_podagent.interpreter import errors

_NOT_EXECUTABLE = 126
_NOT_FOUND = 127
_BY_SIGNAL = 128


def run(argv: list[str] | None, line: str | None) -> tuple[int, dict[str, Any] | None]:
    """Run a command with the job's own output; return its exit code and the error it stands for.

    The command has a process group of its own, to which interrupts and terminations are passed on:
    they reach a whole pipeline, and the command decides what they mean.
    """
    command = argv if argv else ["/bin/sh", "-c", line or ""]
    received: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def forward(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        if process is not None:
            _signal_group(process.pid, number)

    for number in (signal.SIGINT, signal.SIGTERM):  # before there is anyone to hear of it
        signal.signal(number, forward)
    try:
        process = _start(command)
    except OSError as error:
        code = _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE
        text = f"cannot run {command[0]}: {error.strerror}"
        print(text, file=sys.stderr)
        return code, _error("NonZeroExit", text)
    for early in received:
        _signal_group(process.pid, early)
    code = process.wait()
    if code and signal.SIGINT in received:
        return errors.INTERRUPTED_EXIT, _error("Interrupted", "the command was interrupted")
    if code < 0:
        name = signal.Signals(-code).name
        return _BY_SIGNAL - code, _error("Signal", f"the command was ended by {name}")
    return code, _error("NonZeroExit", f"the command ended with exit code {code}") if code else None


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:  # it ended just now
        return


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    if sys.version_info >= (3, 11):
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=os.setpgrp)


def _error(kind: str, text: str) -> dict[str, Any]:
    return {"class": kind, "message": text, "ename": None, "evalue": None, "traceback": None}
