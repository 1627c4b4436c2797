"""System calls that Python has no function for, and facts about this process from ``/proc``."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Adopt the orphans among all descendants instead of losing them to init."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Be killed when the parent dies, also when it is dead already."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def thread_count() -> int:
    """Return the number of threads of this process, those of C libraries included."""
    return len(os.listdir("/proc/self/task"))


def resident_mib() -> int:
    """Return this process's resident memory in MiB."""
    with open("/proc/self/statm", "rb") as statm:
        pages = int(statm.read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // (1 << 20)


def device_files() -> set[str]:
    """Return the accelerator device files that this process has open or mapped."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # the listing's own descriptor
            continue
        if _is_device(target):
            found.add(target)
    with open("/proc/self/maps", "rb") as maps:
        for line in maps:
            start = line.find(b"/dev/")
            if start >= 0 and _is_device(path := os.fsdecode(line[start:].strip())):
                found.add(path)
    return found


def _is_device(path: str) -> bool:
    return path.startswith(("/dev/nvidia", "/dev/dri/", "/dev/kfd", "/dev/accel"))
