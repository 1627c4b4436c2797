"""Which process is meant: a pid together with its start time, never a pid alone.

The kernel hands pids out again, so everything here that is written down (a broker's connection
file, a pod's ``agent.json``) names a process by pid *and* start time, and nothing is ever
signalled unless both still agree. Only the standard library; imported by every kernel.
"""

from __future__ import annotations

import os
import select
import signal
import time

__all__ = ["exit_descriptor", "is_alive", "kill", "start_time", "wait_for_exit"]

_POLL_SECONDS = 0.02  # only where the system has no pidfd


def start_time(pid: int) -> int | None:
    """Say when a process was started.

    Parameters
    ----------
    pid
        Process id as this process sees it.

    Returns
    -------
    int or None
        Clock ticks since boot (field 22 of ``/proc/<pid>/stat``); 0 on a system without
        ``/proc`` where the process exists; None when there is no such process or only what its
        parent has not collected yet.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            # the command's name may hold blanks and brackets: count from the last bracket
            fields = stat.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        if os.path.exists("/proc/self/stat"):
            return None
        return 0 if _answers(pid) else None
    if fields[0] in (b"Z", b"X") and not _has_living_thread(pid):
        return None
    return int(fields[19])


def is_alive(pid: int, started: int) -> bool:
    """Tell whether the process that had this pid and start time still runs."""
    return pid > 0 and start_time(pid) == started


def kill(pid: int, started: int, number: int = signal.SIGKILL) -> bool:
    """Signal a process, unless its pid belongs to somebody else by now.

    Returns
    -------
    bool
        Whether the signal was sent.
    """
    if not is_alive(pid, started):
        return False
    descriptor = exit_descriptor(pid)
    try:
        # with the descriptor open the pid cannot change hands between the check and the signal
        if not is_alive(pid, started):
            return False
        if descriptor is None:
            os.kill(pid, number)
        else:
            signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        if descriptor is not None:
            os.close(descriptor)
    return True


def exit_descriptor(pid: int) -> int | None:
    """Open a descriptor that becomes readable when the process exits.

    Returns
    -------
    int or None
        A file descriptor that the caller closes; None where the system has none or the process
        is gone (the caller then asks `is_alive`).
    """
    opener = getattr(os, "pidfd_open", None)
    if opener is None:
        return None
    try:
        return int(opener(pid))
    except OSError:
        return None


def wait_for_exit(pid: int, started: int, timeout_seconds: float) -> bool:
    """Block until the process is gone.

    Returns
    -------
    bool
        False when it still runs after `timeout_seconds`.
    """
    deadline = time.monotonic() + timeout_seconds
    descriptor = exit_descriptor(pid)
    try:
        while is_alive(pid, started):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if descriptor is None:
                time.sleep(min(_POLL_SECONDS, left))
            elif select.select([descriptor], [], [], left)[0] and is_alive(pid, started):
                time.sleep(min(_POLL_SECONDS, left))  # exited, last thread still being torn down
    finally:
        if descriptor is not None:
            os.close(descriptor)
    return True


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _has_living_thread(pid: int) -> bool:
    """Look behind a dead main thread: the process lives while any other thread does."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return False
    for thread in threads:
        if thread == str(pid):
            continue
        try:
            with open(f"/proc/{pid}/task/{thread}/stat", "rb") as stat:
                state = stat.read().rpartition(b")")[2].split()[0]
        except OSError:
            continue
        if state not in (b"Z", b"X"):
            return True
    return False
