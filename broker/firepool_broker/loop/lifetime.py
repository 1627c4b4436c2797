"""How a broker stays, and how it ends.

It leads for as long as it can renew its lease. It ends when somebody asks, when another broker
leads, or by itself when nobody needs it any more; draining ends its pods with it, everything else
leaves them for the next broker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from firepool_broker.core import events
from firepool_broker.loop.dispatcher import Dispatcher
from firepool_broker.store.errors import LeadershipLost, StoreError
from firepool_broker.store.store import Store

__all__ = ["LEASE_SECONDS", "Lifetime"]

log = logging.getLogger(__name__)

#: A leader's lease. The embedded broker leads by holding a file lock, so this can be long.
LEASE_SECONDS = 3600.0

_STOP_SECONDS = 8.0
_KILL_SECONDS = 3.0


class Lifetime:
    """Decides when the broker ends, and waits until it may.

    Parameters
    ----------
    dispatcher
        Tells what is left to do.
    store
        Keeps the leader's lease.
    clock
        Unix seconds.
    idle_exit_seconds
        After how long without session, job or watcher the broker ends; None for never.
    watched
        Tells whether a panel or a follower is there.
    accept
        Ends (or begins) to take jobs.
    hurry
        Lets nobody wait for agents that are silent.
    kill_pods
        Kills every pod, for a reason.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        store: Store,
        clock: Callable[[], float],
        idle_exit_seconds: float | None,
        watched: Callable[[], bool],
        accept: Callable[[bool], None],
        hurry: Callable[[], None],
        kill_pods: Callable[[str], None],
    ) -> None:
        self._hurry = hurry
        self._kill_pods = kill_pods
        self._limit: asyncio.TimerHandle | None = None
        self._dispatcher = dispatcher
        self._store = store
        self._clock = clock
        self._idle_exit_seconds = idle_exit_seconds
        self._watched = watched
        self._accept = accept
        self._started_at = clock()
        self._last_watched = self._started_at
        self._ending = asyncio.Event()
        self._drained = asyncio.Event()
        self.draining = False
        self.deposed = False
        dispatcher.listen(self._observe)

    # -- ending ----------------------------------------------------------------------------

    def end(self, drain: bool, *, cancel: bool = False) -> None:
        """Begin to end; draining lets what runs finish and removes the pods.

        Parameters
        ----------
        drain
            Remove the pods; otherwise they stay for the next broker.
        cancel
            What runs was cancelled: end in time, whatever the pods do.
        """
        if drain and cancel and self._limit is None:
            loop = asyncio.get_running_loop()
            self._limit = loop.call_later(_STOP_SECONDS, self._end_pods)
        if self._ending.is_set() and (self.draining or not drain):
            if not drain:
                self._drained.set()  # asked again, and not to wait this time
            return
        self.draining = drain
        self._accept(False)
        if drain:
            self._dispatcher.post(events.DrainRequested())
            self._hurry()
        self._ending.set()

    def _end_pods(self) -> None:
        """Kill the pods that are still there; the broker goes even if one cannot die."""
        if self._dispatcher.machine.drained:
            return
        log.warning("the pods have not ended within %g s: they are killed", _STOP_SECONDS)
        self._kill_pods("the broker was stopped")
        asyncio.get_running_loop().call_later(_KILL_SECONDS, self._drained.set)

    def depose(self, reason: str) -> None:
        """End at once, because another broker leads."""
        if not self.deposed:
            log.error("this broker ends: %s", reason)
            self.deposed = True
            self.draining = False
            self._ending.set()
            self._drained.set()

    async def ending(self) -> None:
        """Wait until the broker begins to end."""
        await self._ending.wait()

    async def drained(self) -> None:
        """Wait until nothing of the broker is left, when it drains."""
        if self.draining and not self._dispatcher.machine.drained:
            await self._drained.wait()

    # -- staying ---------------------------------------------------------------------------

    async def lead(self) -> None:
        """Renew the lease, until another broker leads."""
        while True:
            await asyncio.sleep(LEASE_SECONDS / 3)
            try:
                await self._store.renew_leadership(LEASE_SECONDS, self._clock())
            except LeadershipLost as error:
                self.depose(str(error))
                return
            except StoreError as error:
                log.warning("the lease could not be renewed: %s", error)

    def _observe(self, event: events.Event) -> None:
        if self.draining:
            if self._dispatcher.machine.drained:
                self._drained.set()
        elif isinstance(event, events.Tick) and not self._ending.is_set():
            self._look_whether_idle()

    def _look_whether_idle(self) -> None:
        if self._idle_exit_seconds is None:
            return
        now = self._clock()
        if self._watched():
            self._last_watched = now
        since = self._dispatcher.machine.idle_since
        if since is None:
            return
        idle_seconds = now - max(since, self._last_watched, self._started_at)
        if idle_seconds >= self._idle_exit_seconds:
            log.info("nobody has needed this broker for %.0f s: it ends", idle_seconds)
            self.end(drain=True)
