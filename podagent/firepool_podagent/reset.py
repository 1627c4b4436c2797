"""The verified reset between two attempts: what is the pod's own is emptied, or the pod must go.

Order: the processes first (nothing can be emptied while someone writes), then mounts, folders,
shared memory, IPC. Every step either confirms that nothing is left or names what is; anything not
confirmed makes the report unclean. A reset deletes nothing that the pod did not make:

with namespaces
    ``/tmp``, ``/dev/shm``, System V IPC and message queues are the pod's own, entirely;
without
    only folders that the agent made, and System V shared memory that was made during the attempt
    by a process of the attempt. What else appeared meanwhile is named in ``left`` and stays.
"""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from firepool_podagent import ipc, processes
from firepool_podagent.mounts import View
from firepool_podagent.removal import Removal

LEFT_LIMIT = 50
_LOOKS = 40
_LOOK_SECONDS = 0.005
_OWN_ENTRIES = frozenset(
    (
        "agent.json",
        ".agent.json",
        "epoch",
        ".epoch",
        "journal",
        "blobs",
        "packages",
        "scratch",
        "trash",
        "mqueue",
        "code",
        "template.log",
        "supervisors.json",
        ".supervisors.json",
    )
)
_OTHERS_PREFIXES = ("state.json", "annotations", "agent.log", "agent.sock")
"""What the broker keeps in the pod's directory, and writes there at any time."""


@dataclass
class Places:
    """Folders of a pod.

    Attributes
    ----------
    directory : Path
        The pod's own directory.
    view : View or None
        The private view, with namespaces.
    """

    directory: Path
    view: View | None
    kept: frozenset[str] = frozenset()
    _trashed: int = 0

    def __post_init__(self) -> None:
        for name in ("blobs", "packages", "scratch", "trash"):
            (self.directory / name).mkdir(mode=0o700, exist_ok=True)

    @property
    def run(self) -> Path:
        """Folder of the present attempt: package, temporary files, the tail of its output."""
        return self.directory / "scratch" / "run"

    @property
    def temporary(self) -> Path:
        """The job's temporary folder."""
        return Path("/tmp") if self.view is not None else self.run / "tmp"

    def begin(self) -> None:
        """Make the folders of a new attempt; a reset that found them empty has left them."""
        self.run.mkdir(mode=0o700, exist_ok=True)
        if self.view is None:
            (self.run / "tmp").mkdir(mode=0o700, exist_ok=True)

    def run_is_empty(self) -> bool:
        """Whether the attempt left nothing in its folders."""
        try:
            inside = os.listdir(self.run)
            return not inside or (
                self.view is None
                and inside == ["tmp"]
                and stat.S_IMODE(os.lstat(self.temporary).st_mode) == 0o700
                and not os.listdir(self.temporary)
            )
        except OSError:
            return False

    def set_aside(self, path: Path) -> Path:
        """Move something out of the next job's reach, to be deleted."""
        self._trashed += 1
        target = self.directory / "trash" / f"{self._trashed}-{path.name[:100]}"
        if os.path.lexists(path):
            path.rename(target)
        return target


@dataclass
class Before:
    """What was there when an attempt started, to tell later what appeared meanwhile."""

    time: float = 0.0
    objects: set[tuple[str, int]] = field(default_factory=set)
    shared_memory: set[str] = field(default_factory=set)
    temporary: set[str] = field(default_factory=set)

    @classmethod
    def look(cls, places: Places) -> Before:
        """Look around; needed only where the pod shares these with others."""
        if places.view is not None:
            return cls(time.time())
        return cls(
            time.time(),
            {(found.kind, found.number) for found in ipc.objects()},
            _listing("/dev/shm"),
            _listing("/tmp"),
        )


@dataclass
class Findings:
    """What a reset has to say."""

    problems: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    escapees: int = 0

    def report(self, attempt: str, seconds: float) -> dict[str, Any]:
        """Return the reset report of an attempt."""
        reason = "; ".join(self.problems[:5]) or None
        return {
            "attempt": attempt,
            "clean": not self.problems,
            "reason": reason,
            "left": self.left[:LEFT_LIMIT],
            "seconds": round(seconds, 6),
            "escapees": self.escapees,
        }


async def reset(
    places: Places,
    before: Before,
    job_pids: set[int],
    spared: Callable[[], set[int]],
    findings: Findings,
) -> None:
    """Empty the pod after an attempt whose tree is dead.

    Parameters
    ----------
    places : Places
        The pod's folders.
    before : Before
        What was there before the attempt.
    job_pids : set of int
        Processes that belonged to the attempt.
    spared : callable
        The processes of the pod that belong to no attempt.
    findings : Findings
        Takes what could not be confirmed.
    """
    await verify_processes(places, spared, findings)
    view = places.view
    if view is not None:
        await _empty_view(view, places, findings)
    if not places.run_is_empty():
        await _remove(places.set_aside(places.run), findings)
    await _remove_strangers(places, findings)
    if view is None:
        _account_for_shared(before, job_pids, findings)


async def verify_processes(
    places: Places, spared: Callable[[], set[int]], findings: Findings
) -> None:
    """Compare what runs with what may run; the rest is killed and makes the pod unclean."""
    strangers = _strangers(places, spared)
    for _ in range(_LOOKS):  # a spare that was let go, or a zombie, is on its way out
        if not strangers:
            return
        await asyncio.sleep(_LOOK_SECONDS)
        strangers &= _strangers(places, spared)
    for pid in strangers:
        name = processes.display_name(pid)
        findings.escapees += 1
        findings.problems.append(f"process {name} ({pid}) outlived the end of its job")
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            continue


def _strangers(places: Places, spared: Callable[[], set[int]]) -> set[int]:
    me = os.getpid()
    present = set(processes.all_pids() if places.view is not None else processes.children(me))
    present.discard(me)
    return present - spared() if present else present


async def _empty_view(view: View, places: Places, findings: Findings) -> None:
    view.hide_attempt()
    findings.problems.extend(view.undo_strange_mounts())
    if findings.problems:
        return  # with a mount out of place nothing may be deleted
    try:
        if view.shared_memory_is_dirty():
            view.renew_shared_memory()
        if view.temporary_is_dirty():
            old = view.renew_temporary()
            await _remove(places.set_aside(old), findings)
        if view.shared_memory_is_dirty() or view.temporary_is_dirty():
            findings.problems.append("the new /tmp or /dev/shm is not empty")
    except OSError as error:
        findings.problems.append(f"the pod's view: {error}")
    for found in ipc.objects():
        try:
            ipc.remove(found)
        except OSError as error:
            findings.problems.append(str(error))
    findings.problems.extend(f"{found} is still there" for found in ipc.objects())
    findings.problems.extend(ipc.remove_queues(view.queues))


async def _remove(path: Path, findings: Findings) -> None:
    removal = Removal(path)
    for _ in removal.steps():
        await asyncio.sleep(0)
    findings.problems.extend(f"cannot remove {failure}" for failure in removal.failures)


async def _remove_strangers(places: Places, findings: Findings) -> None:
    """Remove what a job put into the pod's own directory beside the pod's own entries."""
    known = _OWN_ENTRIES | places.kept
    for name in os.listdir(places.directory):
        if name not in known and not name.startswith(_OTHERS_PREFIXES):
            await _remove(places.directory / name, findings)
    current = {places.run.name}
    if places.view is not None:
        current.add(places.view.scratch.name)
    for name in os.listdir(places.directory / "scratch"):
        if name not in current:
            await _remove(places.directory / "scratch" / name, findings)
    for name in os.listdir(places.directory / "trash"):
        if not findings.problems:
            await _remove(places.directory / "trash" / name, findings)


def _account_for_shared(before: Before, job_pids: set[int], findings: Findings) -> None:
    """Without namespaces: remove what is certainly the job's, name what may be."""
    me = os.getuid()
    for found in ipc.objects():
        if (found.kind, found.number) in before.objects or found.owner != me:
            continue
        # The creator's number alone would not do: numbers are used again.
        certain = (
            found.kind == "shm"
            and found.creator in job_pids
            and found.changed >= int(before.time)
            and found.attached == 0
        )
        if not certain:
            findings.left.append(f"{found}: it cannot be told whose it is")
            continue
        try:
            ipc.remove(found)
        except OSError as error:
            findings.problems.append(str(error))
    for folder, known in (("/dev/shm", before.shared_memory), ("/tmp", before.temporary)):
        new = (os.path.join(folder, name) for name in _listing(folder) - known)
        findings.left.extend(f"{path}: it cannot be told whose it is" for path in _owned(new, me))


def _listing(folder: str) -> set[str]:
    try:
        return set(os.listdir(folder))
    except OSError:
        return set()


def _owned(paths: Iterable[str], owner: int) -> list[str]:
    found = []
    for path in paths:
        try:
            if os.lstat(path).st_uid == owner:
                found.append(path)
        except OSError:
            continue
    return sorted(found)
