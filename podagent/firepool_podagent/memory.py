"""The memory of a job's tree: its peak, its limit, and telling running out of it from other kills.

The limit is watched from ``/proc``, more often the closer the job is to it. Above it the largest
process of the tree is killed: when that is the job itself the attempt ended of it (``OOM``); when
it is a child, the job goes on and is told. Where the pod has a cgroup of its own the kernel's
counter of such kills is read too. A SIGKILL without either is just a signal.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

from firepool_podagent import processes

_FASTEST_GROWTH_BYTES_PER_SECOND = 4 << 30
_INTERVAL_SECONDS = (0.01, 0.5)
_EXACT_FROM = 0.8
_EVENTS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")


class MemoryWatch:
    """Watches the descendants of a supervisor.

    Parameters
    ----------
    supervisor, job : int
        Process numbers.
    limit_mib : int or None
        Limit of the whole tree; without one only the peak is kept.
    on_hit : callable
        Called with name and number of a process that was killed for the limit.
    """

    def __init__(
        self,
        supervisor: int,
        job: int,
        limit_mib: int | None,
        on_hit: Callable[[str, int], None],
    ) -> None:
        self._supervisor = supervisor
        self._job = job
        self._limit = None if limit_mib is None else limit_mib << 20
        self._on_hit = on_hit
        self._kills_before = cgroup_oom_kills()
        self.peak_bytes = 0
        self.seen: set[int] = set()
        self.killed: set[int] = set()

    @property
    def job_killed(self) -> bool:
        """Whether the job itself was ended for its memory."""
        return self._job in self.killed

    def kernel_killed(self) -> bool:
        """Whether the kernel ended a process of the pod's cgroup for its memory meanwhile."""
        return cgroup_oom_kills() > self._kills_before

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            used, sizes = self._measure()
            self.peak_bytes = max(self.peak_bytes, used)
            if self._limit is None:
                await asyncio.sleep(_INTERVAL_SECONDS[1])
                continue
            if used > self._limit and sizes:
                self._kill_largest(sizes)
            headroom = max(0, self._limit - used)
            pause = headroom / _FASTEST_GROWTH_BYTES_PER_SECOND
            await asyncio.sleep(min(max(pause, _INTERVAL_SECONDS[0]), _INTERVAL_SECONDS[1]))

    def _measure(self) -> tuple[int, dict[int, int]]:
        pids = processes.descendants(self._supervisor)
        self.seen.update(pids)
        sizes = {pid: processes.resident_bytes(pid) for pid in pids}
        used = sum(sizes.values())
        if self._limit is not None and used > self._limit * _EXACT_FROM and len(sizes) > 1:
            # Forked processes share pages: count each page once before anyone is killed for it.
            sizes = {pid: processes.proportional_bytes(pid) for pid in pids}
            used = sum(sizes.values())
        return used, sizes

    def _kill_largest(self, sizes: dict[int, int]) -> None:
        largest = max(sizes, key=lambda pid: sizes[pid])
        if largest in self.killed:
            return  # it is on its way out
        name = processes.display_name(largest)
        try:
            os.kill(largest, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.killed.add(largest)
        self._on_hit(name, largest)


def cgroup_oom_kills() -> int:
    """How many processes of this cgroup the kernel has ended for lack of memory."""
    for path in _EVENTS:
        try:
            with open(path) as file:
                for line in file:
                    name, _, value = line.partition(" ")
                    if name == "oom_kill":
                        return int(value)
        except (OSError, ValueError):
            continue
    return 0
