"""Processes of pods, ended and waited for: by pid and start time, and to the last of a tree."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal

from firepool_broker import processes
from firepool_broker.backends.agents import descendants

__all__ = ["end_supervisor", "wait_gone"]

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.02
_SUPERVISOR_SECONDS = 3.0


async def wait_gone(target: tuple[int, int], deadline: float) -> None:
    """Wait until a process is gone.

    Parameters
    ----------
    target
        Its pid and start time.
    deadline
        The loop's time.

    Raises
    ------
    TimeoutError
        When it is still there then.
    """
    loop = asyncio.get_running_loop()
    descriptor = processes.exit_descriptor(target[0])
    exited = asyncio.Event()
    try:
        if descriptor is not None:
            loop.add_reader(descriptor, exited.set)
        while processes.is_alive(*target):
            if loop.time() > deadline:
                raise TimeoutError(f"process {target[0]} does not die")
            try:
                await asyncio.wait_for(exited.wait(), _POLL_SECONDS)
            except asyncio.TimeoutError:
                continue
    finally:
        if descriptor is not None:
            loop.remove_reader(descriptor)
            os.close(descriptor)


async def end_supervisor(target: tuple[int, int], deadline: float) -> None:
    """Wait for the supervisor of a dead agent to end its tree, or do its work when it does not.

    Raises
    ------
    TimeoutError
        When something of it is still there at the deadline.
    """
    loop = asyncio.get_running_loop()
    processes.kill(*target, signal.SIGCONT)  # its job may have stopped it
    with contextlib.suppress(TimeoutError):
        await wait_gone(target, min(deadline, loop.time() + _SUPERVISOR_SECONDS))
        return
    log.warning("supervisor %d does not end its job: its tree is killed", target[0])
    # orphans become its children: while it lives, nothing of the tree gets out of sight
    while tree := descendants(*target):
        for process in tree:
            processes.kill(*process)
        for process in tree:
            await wait_gone(process, deadline)
    processes.kill(*target)
    await wait_gone(target, deadline)
