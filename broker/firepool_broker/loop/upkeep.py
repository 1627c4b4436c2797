"""What is done now and then: outputs, blobs, jobs and sessions past their time are let go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from firepool_broker.launch.specification import references
from firepool_broker.loop.livejobs import LiveJobs
from firepool_broker.loop.sessions import Sessions
from firepool_broker.store.blobs import BlobStore
from firepool_broker.store.errors import LeadershipLost, StoreError
from firepool_broker.store.outputs import OutputStore
from firepool_broker.store.store import Store

__all__ = ["Upkeep"]

log = logging.getLogger(__name__)

_INTERVAL_SECONDS = 3600.0


class Upkeep:
    """Lets go what is past its time.

    Parameters
    ----------
    store, outputs, blobs, sessions, live
        What there is.
    clock
        Unix seconds.
    retention_seconds
        How long a finished job and its output are kept.
    """

    def __init__(
        self,
        store: Store,
        outputs: OutputStore,
        blobs: BlobStore,
        sessions: Sessions,
        live: LiveJobs,
        clock: Callable[[], float],
        retention_seconds: float,
    ) -> None:
        self._store = store
        self._outputs = outputs
        self._blobs = blobs
        self._sessions = sessions
        self._live = live
        self._clock = clock
        self._retention_seconds = retention_seconds

    async def run(self) -> None:
        """Sweep once an hour, for as long as the broker lives."""
        while True:
            await asyncio.sleep(_INTERVAL_SECONDS)
            try:
                await self.sweep(self._clock())
            except LeadershipLost:
                return
            except (StoreError, OSError) as error:
                log.warning("a sweep was not finished: %s", error)

    async def sweep(self, now: float) -> None:
        """Let go what is past its time."""
        await self._sessions.sweep(now)
        before = now - self._retention_seconds
        while len(await self._store.delete_jobs(before)) == 1000:
            continue
        keep = self._live.ids()
        await asyncio.to_thread(self._outputs.sweep, now, self._retention_seconds, keep)
        needed = {digest for job in self._live for _, digest in references(job.request)}
        await asyncio.to_thread(self._blobs.sweep, now, needed)
