"""Processes as the kernel tells of them: who descends from whom, how big, and how to end them all.

The numbers of processes come from ``/proc`` and are valid only at the moment of reading. Nothing
here relies on a listing being complete: `TreeKiller` takes "no child is left" from ``waitpid``
alone, and uses the listings only to find out whom to kill next.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from dataclasses import dataclass, field

WALL = 0x40000000
"""``__WALL``: wait for children whatever signal they announce their end with."""

KILL_DEADLINE_SECONDS = 5.0
HELPER_GRACE_SECONDS = 0.1
NAMES_LIMIT = 256

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Process:
    """One line of ``/proc/<pid>/stat``.

    Attributes
    ----------
    pid, parent, group, session : int
        As seen from the PID namespace of ``/proc``.
    state : str
        One letter. ``Z`` may have living threads: never read it as dead.
    start_ticks : int
        Clock ticks since boot (field 22).
    name : str
        The kernel's name for it, at most 15 bytes.
    """

    pid: int
    parent: int
    group: int
    session: int
    state: str
    start_ticks: int
    name: str


def process(pid: int) -> Process | None:
    """Read one process; ``None`` when it is gone, or where there is no ``/proc``."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            raw = file.read(2048)
    except OSError:
        return None
    opening, closing = raw.find(b"("), raw.rfind(b")")
    rest = raw[closing + 2 :].split()
    if opening < 0 or len(rest) < 20:
        return None
    return Process(
        pid=pid,
        parent=int(rest[1]),
        group=int(rest[2]),
        session=int(rest[3]),
        state=rest[0].decode(),
        start_ticks=int(rest[19]),
        name=raw[opening + 1 : closing].decode("utf-8", "replace"),
    )


def all_pids() -> list[int]:
    """Every process that ``/proc`` shows."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def children(pid: int) -> list[int]:
    """Children of a process; may miss some while they come and go."""
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children", "rb", buffering=0) as file:
                raw = file.read(1 << 16)
        except FileNotFoundError:
            if os.path.exists(f"/proc/{pid}/task/{thread}"):
                return _children_by_scan(pid)  # a kernel without CONFIG_PROC_CHILDREN
            continue
        except OSError:
            continue
        found.extend(int(word) for word in raw.split())
    return found


def _children_by_scan(parent: int) -> list[int]:
    return [p.pid for pid in all_pids() if (p := process(pid)) is not None and p.parent == parent]


def descendants(pid: int) -> list[int]:
    """Children, their children and so on, nearest first."""
    found: list[int] = []
    seen = {pid}
    queue = [pid]
    while queue:
        for child in children(queue.pop()):
            if child not in seen:
                seen.add(child)
                found.append(child)
                queue.append(child)
    return found


def command_line(pid: int) -> list[str]:
    """Arguments of a process, empty for one that has none or is gone."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb", buffering=0) as file:
            raw = file.read(4096)
    except OSError:
        return []
    return [part.decode("utf-8", "replace") for part in raw.split(b"\0") if part]


def display_name(pid: int) -> str:
    """Name a person knows a process by: its own, or the script's for a bare interpreter."""
    found = process(pid)
    if found is None:
        return "?"
    if not found.name.startswith("python"):
        return found.name
    arguments = command_line(pid)[1:]
    if "-m" in arguments[:-1]:
        return arguments[arguments.index("-m") + 1][:64]
    skip = False
    for argument in arguments:
        if argument == "-c":
            break
        if not skip and not argument.startswith("-"):
            return os.path.basename(argument)[:64]
        skip = argument in ("-X", "-W")
    return found.name


def is_helper(pid: int) -> bool:
    """Tell whether a process is one that ends by itself right after its owner.

    multiprocessing and loky keep a tracker (and a fork server) that exits when its pipe closes; it
    is nothing a person started, and the tracker unlinks leaked shared memory if it may finish.
    """
    return any(
        "resource_tracker" in part or "multiprocessing.forkserver" in part
        for part in command_line(pid)
    )


def resident_bytes(pid: int) -> int:
    """Resident memory of a process, 0 when it is gone; pages shared with others count in full."""
    try:
        with open(f"/proc/{pid}/statm", "rb", buffering=0) as file:
            return int(file.read(256).split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0


def proportional_bytes(pid: int) -> int:
    """Resident memory with shared pages counted by share; resident memory where unknown."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb", buffering=0) as file:
            for line in file.read(4096).splitlines():
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resident_bytes(pid)


@dataclass
class TreeKiller:
    """Ends every descendant of this process, which must be a child subreaper or a PID 1.

    Call `step` until `done`. A step reaps what is dead, kills what it finds and returns at once.

    Why nothing escapes: a process leaves the descendants of a subreaper only by being reaped. When
    a parent dies its children go to the nearest subreaper above, which is this process or another
    one below it that is killed in its turn; changing group, session, name, environment, or entering
    a namespace does not change the parent. So once ``waitpid`` says ``ECHILD``, no descendant is
    left, and nothing else is taken as proof. SIGKILL can be neither caught nor ignored, reaches
    stopped and traced processes, the first process of a nested PID namespace (with which the kernel
    ends the whole namespace) and a process whose leading thread has exited. Processes that fork
    faster than they are listed lose the race because whole groups are signalled, which is atomic
    against fork, and because every step starts from those that were re-parented to this process.

    Attributes
    ----------
    deadline_seconds : float
        After this much time `done` holds with ``survivors``.
    killed : dict
        Process number to name, of those found alive (helpers excepted), in order of discovery.
    reaped : dict
        Process number to raw wait status of everything reaped.
    largest_kib : dict
        Process number to the peak resident memory that ``wait4`` told.
    """

    deadline_seconds: float = KILL_DEADLINE_SECONDS
    helper_grace_seconds: float = HELPER_GRACE_SECONDS
    unnamed: set[int] = field(default_factory=set)
    killed: dict[int, str] = field(default_factory=dict)
    reaped: dict[int, int] = field(default_factory=dict)
    largest_kib: dict[int, int] = field(default_factory=dict)
    survivors: list[str] = field(default_factory=list)
    steps: int = 0
    done: bool = False
    started: float = field(default_factory=time.monotonic)
    _seen: set[int] = field(default_factory=set)

    @property
    def clean(self) -> bool:
        """Whether the kernel has confirmed that no descendant is left."""
        return self.done and not self.survivors

    @property
    def seconds(self) -> float:
        """Time since the killer was made."""
        return time.monotonic() - self.started

    def reap(self) -> bool:
        """Reap whatever is dead.

        Returns
        -------
        bool
            Whether children are left.
        """
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG | WALL)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            self.reaped[pid] = status
            self.largest_kib[pid] = usage.ru_maxrss

    def step(self) -> None:
        """Reap, then kill what is still there."""
        if not self.reap():
            self.done = True
            return
        if self.seconds > self.deadline_seconds:
            me = os.getpid()
            left = descendants(me) or _children_by_scan(me)
            self.survivors = [f"{display_name(pid)} ({pid})" for pid in left] or ["a process"]
            self.done = True
            return
        me = os.getpid()
        # Direct children suffice for the proof; the deeper ones are killed early so that one that
        # cannot die at once (uninterruptible sleep) does not shield its children.
        found = descendants(me) if self.steps % 16 == 0 else children(me)
        if self.steps == 0 and not found:
            found = _children_by_scan(me)
        if self._only_helpers(found):
            return
        self.steps += 1
        own_group = os.getpgrp()
        groups: set[int] = set()
        for pid in found:
            self._note(pid)
            with contextlib.suppress(OSError):
                groups.add(os.getpgid(pid))
            with contextlib.suppress(OSError):  # gone, or not ours to kill: a survivor at the end
                os.kill(pid, signal.SIGKILL)
        # Every group here was made inside the tree: a process can only join groups of its session,
        # and the job leads its own.
        for group in groups - {0, 1, own_group}:
            with contextlib.suppress(OSError):
                os.killpg(group, signal.SIGKILL)

    def _only_helpers(self, found: list[int]) -> bool:
        if self.steps or self.seconds > self.helper_grace_seconds or not found:
            return False
        return all(is_helper(pid) for pid in found)

    def _note(self, pid: int) -> None:
        if pid in self._seen:
            return
        self._seen.add(pid)
        if pid in self.unnamed or len(self.killed) >= NAMES_LIMIT:
            return
        found = process(pid)
        if found is not None and found.state not in "ZX" and not is_helper(pid):
            self.killed[pid] = display_name(pid)


def become_subreaper() -> bool:
    """Let orphans among the descendants of this process become its children.

    Returns
    -------
    bool
        False where the system has no such thing (other systems than Linux).
    """
    if not sys.platform.startswith("linux"):
        return False
    import ctypes

    pr_set_child_subreaper = 36
    return bool(ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0) == 0)
