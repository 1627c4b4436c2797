"""The pods of a broker that does not run, ended without one."""

from __future__ import annotations

import os
import signal
import time

from firepool_broker import processes
from firepool_broker.backends.agents import descendants, marked_processes, supervisors

__all__ = ["end_pods"]

_SUPERVISOR_SECONDS = 3.0


def end_pods(directory: str, timeout_seconds: float) -> int:
    """Kill every pod whose folder lies in a directory; returns how many there were.

    Their folders stay for the next broker, which finds nothing alive there.

    Raises
    ------
    TimeoutError
        When one of their processes does not die in time; the message names it.
    """
    deadline = time.monotonic() + timeout_seconds
    ended: set[str] = set()
    while True:
        # what is dead forks no more: once a look finds none, there is none
        found = [each for each in marked_processes() if os.path.dirname(each[1]) == directory]
        if not found:
            return len(ended)
        targets = [(pid, started) for pid, _ in found if (started := processes.start_time(pid))]
        folders = {folder for _, folder in found}
        watchers = [target for folder in folders for target in supervisors(folder)]
        for target in targets:
            processes.kill(*target)
        for target in targets:
            _await(target, deadline)
        for target in watchers:
            _end_supervisor(target, deadline)
        ended |= folders


def _end_supervisor(target: tuple[int, int], deadline: float) -> None:
    processes.kill(*target, signal.SIGCONT)
    patience = min(_SUPERVISOR_SECONDS, max(0.0, deadline - time.monotonic()))
    if processes.wait_for_exit(*target, patience):
        return
    while tree := descendants(*target):
        for process in tree:
            processes.kill(*process)
        for process in tree:
            _await(process, deadline)
    processes.kill(*target)
    _await(target, deadline)


def _await(target: tuple[int, int], deadline: float) -> None:
    if not processes.wait_for_exit(*target, max(0.0, deadline - time.monotonic())):
        raise TimeoutError(f"process {target[0]} does not die")
