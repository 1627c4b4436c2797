"""What a job prints, in the order in which it happened.

``sys.stdout`` and ``sys.stderr`` write straight to file descriptors 1 and 2, which are pipes to the
agent: so Python, C code and subprocesses share one order within a stream, nothing waits in a buffer
when a process is killed, and threads and forked children need no care. What must be ordered against
the text (displays, errors, and the other stream) goes through the channel with a rising sequence
number; after each such frame a *marker* with that number is written into both pipes, so the agent
knows which text came before it.
"""

from __future__ import annotations

import fcntl
import io
import os
import select
import signal
import sys
import threading
from typing import Any

from firepool_podagent.interpreter.frames import Channel

_HIGH_FD = 200
"""Private descriptors are moved up here, so that user code sees the low numbers it expects."""


def unwrapped(function: Any) -> Any:
    """Return the C function behind one of `signal`'s, which look up more than they need."""
    return getattr(function, "__wrapped__", function)


# Bound here, like the functions of `frames`: a cell may patch the modules that they come from.
_write = os.write
_mask_signals = unwrapped(signal.pthread_sigmask)
_wait_writable = select.select
_BLOCK, _SETMASK = signal.SIG_BLOCK, signal.SIG_SETMASK
_view = memoryview
_BlockingIOError, _OSError = BlockingIOError, OSError
_type, _all, _isinstance, _map, _str = type, all, isinstance, map, str

_ALL_SIGNALS = frozenset(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}


def private_fd(fd: int) -> int:
    """Duplicate a descriptor to a high number that subprocesses do not inherit."""
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD)


def write_all(fd: int, data: bytes | bytearray | memoryview) -> None:
    """Write everything, also to a pipe that somebody switched to non-blocking."""
    view = _view(data)
    while view:
        try:
            view = view[_write(fd, view) :]
        except _BlockingIOError:  # a subprocess set O_NONBLOCK on the description that we share
            _wait_writable((), (fd,), ())


class Outlet:
    """Sends ordered messages to the agent and keeps the text in order with them.

    Parameters
    ----------
    channel
        The job's channel.
    pipes
        Descriptors of the pipes behind stdout and stderr.
    """

    def __init__(self, channel: Channel, pipes: tuple[int, int]) -> None:
        self._channel = channel
        self._pipes = tuple(private_fd(fd) for fd in pipes)
        self._lock = threading.RLock()
        self._sequence = 0
        self._last_writer = 0
        self._nonce = b""
        self.connected = True
        """False in a forked child of the job: its text still flows, its displays become text."""
        os.register_at_fork(after_in_child=self._disconnect)

    def begin(self, nonce: str) -> None:
        """Start numbering for an attempt whose markers carry ``nonce``."""
        self._nonce = nonce.encode("ascii")
        self._sequence = 0
        self._last_writer = 0

    def send(self, message: dict[str, Any]) -> bool:
        """Send a message that is ordered against the text; False when there is no agent to hear."""
        if not self.connected:
            return False
        with self._lock:
            self._last_writer = 0
            return self._fence(message)

    def send_unordered(self, message: dict[str, Any]) -> None:
        """Send a message whose place among the text does not matter."""
        if self.connected:
            with self._lock:
                blocked = _mask_signals(_BLOCK, _ALL_SIGNALS)
                try:
                    self._channel.send({"seq": 0, **message})
                except _OSError:
                    self.connected = False
                finally:
                    _mask_signals(_SETMASK, blocked)

    def writing(self, fd: int) -> None:
        """Note that text goes to ``fd`` next; a change of stream is fenced."""
        if self._last_writer != fd and self.connected and self._nonce:
            with self._lock:
                if self._last_writer:
                    self._fence({"type": "fence"})
                self._last_writer = fd

    def _fence(self, message: dict[str, Any]) -> bool:
        # With every signal blocked in this thread the frame leaves in one uninterrupted call. A
        # Python handler can still run (another thread may take the signal) and may raise after it:
        # the markers are written in any case, because the agent waits for them.
        blocked = _mask_signals(_BLOCK, _ALL_SIGNALS)
        try:
            self._sequence += 1
            marker = b"\x00\x1bFP" + self._nonce + b":%d\x00" % self._sequence
            try:
                self._channel.send({"seq": self._sequence, **message})
            finally:
                for pipe in self._pipes:
                    write_all(pipe, marker)
        except _OSError:  # the agent is gone, or user code closed every descriptor it could find
            self.connected = False
            return False
        finally:
            _mask_signals(_SETMASK, blocked)
        return True

    def _disconnect(self) -> None:
        self.connected = False
        self._lock = threading.RLock()  # another thread may have held it when the process forked
        self._channel.close()
        for pipe in self._pipes:
            try:
                os.close(pipe)
            except OSError:
                continue


class _Pipe(io.RawIOBase):
    """The unbuffered binary layer of a text stream."""

    def __init__(self, outlet: Outlet, fd: int, name: str) -> None:
        self._outlet = outlet
        self._fd = fd
        self.name = name
        self.mode = "wb"

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = _view(data).cast("B")
        self._outlet.writing(self._fd)
        write_all(self._fd, view)
        return view.nbytes


class TextStream(io.TextIOWrapper):
    """``sys.stdout`` or ``sys.stderr`` of a job: UTF-8, never buffered, never a terminal."""

    def __init__(self, outlet: Outlet, fd: int, name: str) -> None:
        # Text that UTF-8 cannot carry (a lone surrogate) is shown escaped: print() never fails.
        super().__init__(
            _Pipe(outlet, fd, name),
            encoding="utf-8",
            errors="backslashreplace",
            newline="\n",
            write_through=True,
        )
        self.mode = "w"  # type: ignore[misc]  # set as Python itself does for sys.stdout


_builtin_print = print


def print_whole(
    *values: object,
    sep: str | None = " ",
    end: str | None = "\n",
    file: Any = None,
    flush: bool = False,
) -> None:
    """Print the values to a stream, or to sys.stdout by default.

    As the built-in function, which writes each part by itself: with unbuffered streams the lines of
    threads and worker processes would mix within a line. Here a line is written at once.
    """
    target = sys.stdout if file is None else file
    if _type(target) is not TextStream or not _all(
        part is None or _isinstance(part, _str) for part in (sep, end)
    ):
        _builtin_print(*values, sep=sep, end=end, file=file, flush=flush)
        return
    between = " " if sep is None else sep
    last = "\n" if end is None else end
    target.write(between.join(_map(_str, values)) + last)


print_whole.__name__ = print_whole.__qualname__ = "print"
print_whole.__module__ = "builtins"


def standard_input() -> io.TextIOWrapper:
    """Return a text stream over fd 0 (``/dev/null``)."""
    raw = io.FileIO(0, "rb", closefd=False)
    return io.TextIOWrapper(io.BufferedReader(raw), encoding="utf-8", errors="surrogateescape")
