"""A supervisor that does not speak: stopped or held by the job, which may do so.

The kernel tells of the job's end as well (a descriptor of its process becomes readable), so the
agent knows when a word is due. A stopped supervisor is woken; one that is stopped again at once, or
that is silent all the same, is given up: its work is the agent's then.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable

from firepool_podagent import processes
from firepool_podagent.templates import Spare

LOOK_SECONDS = 0.5
"""How often a supervisor that should speak is looked at."""
_LOOKS_STOPPED = 2
_LOOKS_SILENT = 4


class Silence:
    """Watches over the words of one supervisor.

    Parameters
    ----------
    spare : Spare
        The supervisor and its job.
    lost : callable
        Called when the supervisor is given up, perhaps more than once.
    """

    def __init__(self, spare: Spare, lost: Callable[[], None]) -> None:
        self._spare = spare
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._looks = 0
        self._job_gone = False
        self._told = False
        self._descriptor = -1
        try:
            self._descriptor = os.pidfd_open(spare.job)
        except (OSError, AttributeError):  # no such thing here, or the job is gone already
            return
        self._loop.add_reader(self._descriptor, self._job_ended)

    def close(self) -> None:
        """Stop watching."""
        self._forget_job()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def job_ended_was_told(self) -> None:
        """Take the supervisor's word for the job's end; one more is due, that the tree is gone."""
        self._told = True
        self.expect_word()

    def expect_word(self) -> None:
        """Look from now on whether the supervisor can speak, until `close`."""
        if self._timer is None:
            self._look()

    def wake(self) -> bool:
        """Let a stopped supervisor go on; True when it was stopped."""
        pid = self._spare.supervisor
        if not pid and (job := processes.process(self._spare.job)) is not None:
            pid = job.parent
        found = processes.process(pid) if pid > 1 else None
        if found is None or found.state not in "Tt":
            return False
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGCONT)
        return True

    def _look(self) -> None:
        self._looks += 1
        stopped = self.wake()
        silent = self._job_gone and not self._told
        if (stopped and self._looks > _LOOKS_STOPPED) or (silent and self._looks > _LOOKS_SILENT):
            self._lost()
            return
        self._timer = self._loop.call_later(LOOK_SECONDS, self._look)

    def _job_ended(self) -> None:
        self._forget_job()
        self._job_gone = True
        self._looks = 0
        if not self._told:
            self.expect_word()

    def _forget_job(self) -> None:
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1
