"""One thread, one machine: events in, instructions out, in order.

Everything that happens is posted here; the machine's answers are handed to whoever executes
that kind of instruction. Handling takes microseconds and never waits, so the executors start
tasks and post what came of them. A posted event is handled before `Dispatcher.post` returns,
except when it is posted by an executor: then it follows the event that is being handled.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from firepool_broker.core.events import Event, Tick
from firepool_broker.core.instructions import Instruction
from firepool_broker.core.machine import Machine

__all__ = ["FALLBACK_TICK_SECONDS", "Dispatcher"]

log = logging.getLogger(__name__)

#: Events wake the dispatcher at once; this is how long a missed one could matter.
FALLBACK_TICK_SECONDS = 3.0

_Instruction = TypeVar("_Instruction", bound=Instruction)


class Dispatcher:
    """Owns the machine.

    Parameters
    ----------
    machine
        The decisions.
    clock
        Unix seconds.
    """

    def __init__(self, machine: Machine, clock: Callable[[], float]) -> None:
        self.machine = machine
        self._clock = clock
        self._executors: dict[type, Callable[[Any], None]] = {}
        self._queue: deque[Event] = deque()
        self._handling = False
        self._wakeup: asyncio.TimerHandle | None = None
        self._listeners: list[Callable[[Event], None]] = []
        self._running = False

    def now(self) -> float:
        """Return the time that events are handled at, in Unix seconds."""
        return self._clock()

    def executes(self, kind: type[_Instruction], executor: Callable[[_Instruction], None]) -> None:
        """Name who executes a kind of instruction."""
        self._executors[kind] = executor

    def listen(self, listener: Callable[[Event], None]) -> None:
        """Tell somebody of every event after it was handled."""
        self._listeners.append(listener)

    def start(self) -> None:
        """Begin to tick; events that were posted before are handled now."""
        self._running = True
        self._drain()

    def stop(self) -> None:
        """Handle nothing more."""
        self._running = False
        if self._wakeup is not None:
            self._wakeup.cancel()
            self._wakeup = None

    def execute(self, instructions: list[Instruction]) -> None:
        """Hand instructions to their executors."""
        for instruction in instructions:
            self._executors[type(instruction)](instruction)

    def post(self, event: Event) -> None:
        """Let the machine decide about an event."""
        self._queue.append(event)
        if self._running and not self._handling:
            self._drain()

    def _drain(self) -> None:
        self._handling = True
        try:
            while self._queue and self._running:
                event = self._queue.popleft()
                try:
                    self.execute(self.machine.handle(event, self._clock()))
                except Exception:
                    # a defect: one event is lost, and named, rather than every event after it
                    log.exception("the machine failed on %r", event)
                for listener in self._listeners:
                    listener(event)
        finally:
            self._handling = False
        self._schedule()

    def _schedule(self) -> None:
        if not self._running:
            return
        if self._wakeup is not None:
            self._wakeup.cancel()
        now = self._clock()
        wanted = self.machine.next_wakeup()
        delay = FALLBACK_TICK_SECONDS if wanted is None else wanted - now
        # the lower bound keeps a wish in the past from spinning
        delay = min(max(delay, 0.001), FALLBACK_TICK_SECONDS)
        self._wakeup = asyncio.get_running_loop().call_later(delay, self._tick)

    def _tick(self) -> None:
        self._wakeup = None
        self.post(Tick())
