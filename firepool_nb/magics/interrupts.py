"""■ while a cell waits: what each press means, and how it reaches the wait.

`Presses` decides and knows neither signals nor clocks: the first press interrupts the remote code
and the wait goes on; a later one kills; one more leaves the wait. A press within two seconds of
the one that counted is ignored, so that an impatient double press never kills. Before the job runs
the first press cancels it. When a press could not be delivered the next one leaves.

`InterruptListener` catches SIGINT meanwhile, without raising: the waiting code is woken through a
pipe and asks for the presses. Where nothing can be torn apart (connecting, a request of our own)
it lets KeyboardInterrupt through, so that the wait can always be left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from enum import Enum
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Action", "InterruptListener", "Presses"]

QUIET_SECONDS = 2.0
"""A press this soon after the one that counted is ignored."""


class Action(Enum):
    """What a press asks for."""

    IGNORE = "ignore"
    CANCEL = "cancel"
    INTERRUPT = "interrupt"
    KILL = "kill"
    LEAVE = "leave"


class Presses:
    """Decides what each press of ■ means."""

    def __init__(self) -> None:
        self._last_at: float | None = None
        self._last = Action.IGNORE
        self._undelivered = False

    @property
    def last(self) -> Action:
        """The last action that counted."""
        return self._last

    def press(self, at: float, running: bool) -> Action:
        """Decide about a press.

        Parameters
        ----------
        at
            Time of the press, in seconds of any steady clock.
        running
            Whether the job runs.
        """
        if self._last_at is not None and at - self._last_at < QUIET_SECONDS:
            return Action.IGNORE
        self._last_at = at
        self._last = self._next(running)
        return self._last

    def undelivered(self) -> None:
        """Note that what the last press asked for did not reach the broker."""
        self._undelivered = True

    def _next(self, running: bool) -> Action:
        if self._undelivered or self._last in (Action.KILL, Action.CANCEL, Action.LEAVE):
            return Action.LEAVE
        if self._last is Action.INTERRUPT:
            return Action.KILL
        return Action.INTERRUPT if running else Action.CANCEL


class InterruptListener:
    """Collects presses of ■ while it is entered; usable only once.

    Outside the main thread, where Python delivers no signals, it does nothing.
    """

    def __init__(self) -> None:
        self._reader = self._writer = -1
        self._pressed_at: list[float] = []
        self._raising = 0
        self._previous: Any = None
        self._active = False

    def __enter__(self) -> InterruptListener:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._handle)
            self._active = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._active:
            signal.signal(signal.SIGINT, self._previous)
        os.close(self._reader)
        os.close(self._writer)
        self._reader = self._writer = -1

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._raising:
            raise KeyboardInterrupt
        self._pressed_at.append(time.monotonic())
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes just as well
            os.write(self._writer, b"\0")

    def fileno(self) -> int:
        """Return the descriptor that is readable after a press."""
        return self._reader

    def take(self) -> list[float]:
        """Return the times of the presses since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 4096)
        pressed, self._pressed_at = self._pressed_at, []
        return pressed

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Let a press raise KeyboardInterrupt inside."""
        self._raising += 1
        try:
            if self._pressed_at:
                self._pressed_at.clear()
                raise KeyboardInterrupt
            yield
        finally:
            self._raising -= 1
