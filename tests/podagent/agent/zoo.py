"""Processes that do not want to end with their job. Forks without exec, so that a run is short.

Every animal holds the writing end of a FIFO: whoever reads it sees the end of the file exactly when
none is left, whatever their numbers, names, groups and namespaces are by then.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable

_libc = ctypes.CDLL(None, use_errno=True)
_NEW_PID_AND_MOUNT = 0x20000000 | 0x00020000
_NEW_USER = 0x10000000
_PTRACE_ATTACH, _PTRACE_CONT = 16, 7
_SYS_EXIT = 60 if os.uname().machine == "x86_64" else 93


def _sleep() -> None:
    while True:
        time.sleep(1000)


def _twice() -> None:
    """Fork twice: an orphan in a session of its own."""
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)


def daemon(ready: Callable[[], None]) -> None:
    _twice()
    ready()
    os.execve("/bin/sleep", ["sleep", "98765"], {})


def new_session(ready: Callable[[], None]) -> None:
    os.setsid()
    ready()
    _sleep()


def new_group(ready: Callable[[], None]) -> None:
    os.setpgid(0, 0)
    ready()
    _sleep()


def deaf(ready: Callable[[], None]) -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        if number < 32:
            signal.signal(number, signal.SIG_IGN)
    ready()
    _sleep()


def stopped(ready: Callable[[], None]) -> None:
    _twice()
    ready()
    os.kill(os.getpid(), signal.SIGSTOP)
    _sleep()


def traced(ready: Callable[[], None]) -> None:
    tracee = os.fork()
    if tracee == 0:
        os.setsid()
        _sleep()
    if _libc.ptrace(_PTRACE_ATTACH, tracee, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "ptrace")
    os.waitpid(tracee, 0)
    ready()
    _sleep()


def nested_namespaces(ready: Callable[[], None]) -> None:
    _twice()
    flags = _NEW_PID_AND_MOUNT | (0 if os.geteuid() == 0 else _NEW_USER)
    if _libc.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    if os.fork():
        _sleep()
    # PID 1 of a namespace, deaf to everything from inside; with a child that nests once more.
    if os.fork() == 0:
        os.setsid()
        if _libc.unshare(_NEW_PID_AND_MOUNT) == 0 and os.fork() == 0:
            ready()
        _sleep()
    _sleep()


def dead_leader(ready: Callable[[], None]) -> None:
    _twice()
    threading.Thread(target=lambda: (time.sleep(0.01), ready(), _sleep())).start()
    _libc.syscall(_SYS_EXIT, 0)  # only the first thread


def nested_subreaper(ready: Callable[[], None]) -> None:
    _libc.prctl(36, 1, 0, 0, 0)
    os.setsid()
    if os.fork() == 0:
        if os.fork() == 0:
            os.setsid()
            time.sleep(0.005)
            ready()
            _sleep()
        os._exit(0)
    _sleep()


def renamed(ready: Callable[[], None]) -> None:
    _twice()
    _libc.prctl(15, b"kworker/0:0", 0, 0, 0)
    os.chdir("/")
    ready()
    _sleep()


def _hop(ready: Callable[[], None], session_each_time: bool) -> None:
    _twice()
    ready()
    while True:
        if os.fork():
            os._exit(0)
        if session_each_time:
            os.setsid()


def hopper(ready: Callable[[], None]) -> None:
    _hop(ready, False)


def hopper_with_sessions(ready: Callable[[], None]) -> None:
    _hop(ready, True)


ANIMALS: tuple[Callable[[Callable[[], None]], None], ...] = (
    daemon,
    new_session,
    new_group,
    deaf,
    stopped,
    traced,
    nested_namespaces,
    dead_leader,
    nested_subreaper,
    renamed,
    *(hopper,) * 4,
    *(hopper_with_sessions,) * 4,
)


def release(fifo: str, animals: tuple[str, ...] = ()) -> list[str]:
    """Let them all out; returns the names of those that are up."""
    chosen = [a for a in ANIMALS if not animals or a.__name__ in animals]
    held = os.open(fifo, os.O_WRONLY)
    os.set_inheritable(held, True)
    reader, writer = os.pipe()
    for animal in chosen:
        if os.fork() == 0:
            try:
                os.close(reader)
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, signal.SIG_DFL)
                animal(lambda name=animal.__name__: os.write(writer, f"{name}\n".encode()))  # type: ignore[misc]
            finally:
                os._exit(1)
    os.close(writer)
    os.close(held)
    up: list[str] = []
    deadline = time.monotonic() + 10
    rest = b""
    os.set_blocking(reader, False)
    while len(up) < len(chosen) and time.monotonic() < deadline:
        try:
            rest += os.read(reader, 4096)
        except BlockingIOError:
            time.sleep(0.001)
        *lines, rest = rest.split(b"\n")
        up += [line.decode() for line in lines]
    os.close(reader)
    return up
