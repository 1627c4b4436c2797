"""The one thread that writes: it commits whatever queued while its last commit ran.

The contract: a write's future resolves after the transaction that holds it is durable; at most
256 writes share a transaction and no timer delays any; a transaction commits only while the
epoch in the database is this broker's. Writes are applied in the order in which they came.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from msgspec import Struct

from firepool_broker.store.database import Database
from firepool_broker.store.errors import (
    LeadershipLost,
    StoreBusy,
    StoreClosed,
    StoreError,
    WriteRefused,
)
from firepool_broker.store.writes import AcquireLeadership, Write

GROUP_LIMIT = 256
_IDLE_SECONDS = 0.5

T = TypeVar("T")


class CommitReport(Struct, frozen=True):
    """What one transaction did, for the metrics.

    Parameters
    ----------
    writes
        How many writes it carried.
    lost
        How many conditional ones found another version.
    seconds
        How long the transaction took, sync included.
    """

    writes: int
    lost: int
    seconds: float


class _Pending(Struct, frozen=True):
    write: Write
    future: asyncio.Future[object]


class Committer:
    """Owns the writing connection and its thread.

    Parameters
    ----------
    database
        The connection; no other thread uses it from now on.
    clock
        Monotonic seconds, for reports.
    on_commit
        Called on the event loop after each transaction.
    """

    def __init__(
        self,
        database: Database,
        clock: Callable[[], float],
        on_commit: Callable[[CommitReport], None] | None = None,
    ) -> None:
        self._database = database
        self._clock = clock
        self._on_commit = on_commit
        self._queue: queue.SimpleQueue[_Pending | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self.epoch: int | None = None
        """The epoch this broker leads under; ``None`` before it leads."""
        self._thread = threading.Thread(target=self._run, name="store-committer", daemon=True)
        self._thread.start()

    def submit(self, write: Write) -> asyncio.Future[object]:
        """Queue a write; the future has its result once it is durable."""
        future: asyncio.Future[object] = self._loop.create_future()
        if self._closed:
            future.set_exception(StoreClosed("the store is closed; the write was not taken"))
        else:
            self._queue.put(_Pending(write, future))
        return future

    async def close(self) -> None:
        """Commit what is queued and end the thread."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        dirty = False
        ending = False
        try:
            while not ending:
                try:
                    first = self._queue.get(timeout=_IDLE_SECONDS if dirty else None)
                except queue.Empty:
                    self._checkpoint(idle=True)
                    dirty = False
                    continue
                group, ending = self._gather(first)
                if group:
                    self._commit(group)
                    self._checkpoint(idle=False)
                    dirty = True
        finally:
            self._database.close()

    def _gather(self, first: _Pending | None) -> tuple[list[_Pending], bool]:
        """Return what is queued, and whether the end was reached."""
        group: list[_Pending] = []
        item = first
        while item is not None:
            group.append(item)
            if len(group) == GROUP_LIMIT:
                return group, False
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return group, False
        return group, True

    def _checkpoint(self, *, idle: bool) -> None:
        try:
            self._database.checkpoint(idle=idle)
        except StoreError:
            return  # the log only grows meanwhile; the next commit reports what is wrong

    def _commit(self, group: Sequence[_Pending]) -> None:
        started = self._clock()
        try:
            results = self._transaction(group)
        except StoreBusy as error:
            # nobody got the lock, and each alone would wait for it as long again
            results = [error] * len(group)
        except Exception as error:  # noqa: BLE001 - whatever one write raised must not cost others
            if len(group) == 1:
                results = [error]
            else:
                for pending in group:
                    self._commit([pending])
                return
        lost = sum(1 for result in results if result is False)
        report = CommitReport(len(group), lost, self._clock() - started)
        try:
            self._loop.call_soon_threadsafe(self._resolve, group, results, report)
        except RuntimeError:
            return  # the loop is closed: nobody waits for these any more

    def _transaction(self, group: Sequence[_Pending]) -> list[object]:
        """Apply the writes in one transaction; returns results, refusals included."""
        results: list[object] = []
        epoch = self.epoch
        with self._database.transaction():
            checked = False
            for pending in group:
                write = pending.write
                try:
                    if isinstance(write, AcquireLeadership):
                        epoch = write.apply(self._database)
                        results.append(epoch)
                        continue
                    if not checked:
                        self._check_epoch(epoch)
                        checked = True
                    results.append(write.apply(self._database))
                except WriteRefused as error:
                    results.append(error)
        self.epoch = epoch
        return results

    def _check_epoch(self, epoch: int | None) -> None:
        row = self._database.row("epoch", {})
        if epoch is None or row is None or row[0] != epoch:
            raise LeadershipLost(
                "this broker does not lead the store: nothing was written"
                if epoch is None
                else f"epoch {epoch} is over: another broker leads now; nothing was written"
            )

    def _resolve(
        self, group: Sequence[_Pending], results: Sequence[object], report: CommitReport
    ) -> None:
        for pending, result in zip(group, results, strict=True):
            if pending.future.done():  # its waiter was cancelled; the write is durable all the same
                continue
            if isinstance(result, BaseException):
                pending.future.set_exception(result)
            else:
                pending.future.set_result(result)
        if self._on_commit is not None:
            self._on_commit(report)
