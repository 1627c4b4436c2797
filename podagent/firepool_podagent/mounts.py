"""The pod's own view of the file system: private ``/tmp`` and ``/dev/shm``, and what shows through.

All of it lives in a mount namespace of the pod. ``/tmp`` is a folder of the pod's own directory,
bound over; ``/dev/shm`` is a fresh tmpfs. What a job needs from the real ones (the notebook's
folder, an interpreter, a socket that the environment names) is bound in again from descriptors that
were opened before they were covered.

A renewed view detaches every mount under the private folders *before* the old content is deleted,
and the content is deleted through its own path in the pod's directory, where those mounts do not
exist: nothing that was bound in is ever walked.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000

_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8
_PR_SET_DUMPABLE = 4

_SHARED_MEMORY_FOLDER = "/dev/shm"
_QUEUE_FOLDER = "/dev/mqueue"


_PR_CAPBSET_DROP = 24
_CAPABILITY_VERSION = 0x20080522
_OUTSIDE_CAPABILITIES = {
    "CAP_SYS_MODULE": 16,
    "CAP_SYS_RAWIO": 17,
    "CAP_SYS_BOOT": 22,
    "CAP_SYS_TIME": 25,
    "CAP_WAKE_ALARM": 35,
}
"""What acts on the whole machine whatever the namespaces, and no notebook needs."""


def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Leave the given namespaces of the parent; `OSError` where that is not allowed."""
    _check(_library().unshare(flags), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Call mount(2)."""
    result = _library().mount(
        os.fsencode(source),
        os.fsencode(target),
        None if kind is None else kind.encode(),
        ctypes.c_ulong(flags),
        None if data is None else data.encode(),
    )
    _check(result, f"mount {kind or source} on {target}")


def detach(target: str) -> None:
    """Take a mount away from the view; its last user closes it."""
    _check(
        _library().umount2(os.fsencode(target), _MNT_DETACH | _UMOUNT_NOFOLLOW), f"umount {target}"
    )


def forbid_inspection() -> None:
    """Keep other processes of the same user from reading this one's memory."""
    _library().prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def drop_outside_capabilities() -> None:
    """Give up what would let a root pod change the machine itself, its clock for instance.

    For this process and, by its bounding set, for every program that is started from it. Without
    the right to do so there is nothing to give up.
    """
    library = _library()
    for number in _OUTSIDE_CAPABILITIES.values():
        library.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable: low words, then high ones
    if library.capget(header, sets) != 0:
        return
    for number in _OUTSIDE_CAPABILITIES.values():
        word, bit = divmod(number, 32)
        for index in range(3 * word, 3 * word + 3):
            sets[index] &= ~(1 << bit) & 0xFFFFFFFF
    library.capset(header, sets)


@dataclass(frozen=True)
class Mount:
    """One line of ``/proc/self/mountinfo``."""

    number: int
    point: str
    kind: str


def mounted() -> list[Mount]:
    """Every mount of this process's view, in order of mounting as the kernel lists it."""
    found = []
    with open("/proc/self/mountinfo", "rb") as file:
        for line in file:
            words = line.split()
            kind = words[words.index(b"-") + 1].decode()
            found.append(Mount(int(words[0]), _unescape(words[4]), kind))
    return found


def mounts_below(folder: str) -> list[str]:
    """Mount points inside a folder (itself not counted)."""
    prefix = folder.rstrip("/") + "/"
    return [m.point for m in mounted() if m.point.startswith(prefix)]


def _unescape(raw: bytes) -> str:
    if b"\\" in raw:
        for code, byte in ((b"040", b" "), (b"011", b"\t"), (b"012", b"\n"), (b"134", b"\\")):
            raw = raw.replace(b"\\" + code, byte)
    return os.fsdecode(raw)


@dataclass
class View:
    """The private folders of a pod and what is bound into them.

    Attributes
    ----------
    directory : Path
        The pod's own directory; generations of ``/tmp`` live in its ``scratch``.
    generation : int
        Counts up whenever the private ``/tmp`` is replaced.
    """

    directory: Path
    generation: int = 0
    _originals: dict[str, int] = field(default_factory=dict)
    _always: list[str] = field(default_factory=list)
    _bound: dict[str, bool] = field(default_factory=dict)  # target -> for the pod's whole life
    _skeleton: set[str] = field(default_factory=set)
    _expected: set[int] = field(default_factory=set)
    _queues: str = ""

    @property
    def scratch(self) -> Path:
        """The present generation's folder below the pod's directory."""
        return self.directory / "scratch" / str(self.generation)

    # --- making the view -------------------------------------------------------------------------

    def install(self, always: Iterable[str]) -> None:
        """Cover ``/tmp``, ``/dev/shm`` and the message queues; for a new mount namespace only.

        Parameters
        ----------
        always : iterable of str
            Absolute paths that stay visible for the pod's whole life.

        Raises
        ------
        OSError
            When the machine does not allow it.
        """
        mount("none", "/", None, _MS_REC | _MS_PRIVATE)
        for folder in ("/tmp", _SHARED_MEMORY_FOLDER):
            if os.path.isdir(folder):
                self._originals[folder] = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
        queues = _QUEUE_FOLDER if os.path.isdir(_QUEUE_FOLDER) else str(self.directory / "mqueue")
        os.makedirs(queues, mode=0o700, exist_ok=True)
        mount("mqueue", queues, "mqueue", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
        self._queues = queues
        self._always = sorted(
            {spelling for path in always for spelling in _spellings(path)}, key=len
        )
        self._expected = {m.number for m in mounted()}
        self._cover_temporary()
        self._cover_shared_memory()

    @property
    def queues(self) -> str:
        """Where the pod's POSIX message queues are listed."""
        return self._queues

    def _cover_temporary(self) -> None:
        private = self.scratch / "tmp"
        with self._directory_descriptor() as descriptor:
            relative = os.path.relpath(private, self.directory)
            parts = relative.split("/")
            for depth in range(1, len(parts) + 1):
                with contextlib.suppress(FileExistsError):
                    os.mkdir("/".join(parts[:depth]), 0o700, dir_fd=descriptor)
            inner = os.open(relative, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=descriptor)
            try:
                os.chmod(f"/proc/self/fd/{inner}", 0o1777)
                mount(f"/proc/self/fd/{inner}", "/tmp", None, _MS_BIND)
            finally:
                os.close(inner)
        self._remember("/tmp")
        self._skeleton.clear()
        for path in self._always:
            self._bind("/tmp", path, keep=True)

    def _cover_shared_memory(self) -> None:
        if _SHARED_MEMORY_FOLDER in self._originals:
            mount("tmpfs", _SHARED_MEMORY_FOLDER, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=1777")
            self._remember(_SHARED_MEMORY_FOLDER)
            for path in self._always:
                self._bind(_SHARED_MEMORY_FOLDER, path, keep=True)

    @contextlib.contextmanager
    def _directory_descriptor(self) -> Iterator[int]:
        """Open the pod's directory, also while it is hidden below a covered ``/tmp``."""
        path = str(self.directory)
        for root, original in self._originals.items():
            if _within(path, root):
                descriptor = os.open(
                    os.path.relpath(path, root),
                    os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC,
                    dir_fd=original,
                )
                break
        else:
            descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    # --- what shows through ----------------------------------------------------------------------

    def show(self, paths: Iterable[str], keep: bool = False) -> list[str]:
        """Bind paths that lie below a covered folder in again, from the real file system.

        Parameters
        ----------
        paths : iterable of str
            Absolute paths; those that lie elsewhere are visible anyway, those that do not exist
            are left out.
        keep : bool
            Whether they stay for the pod's whole life rather than for one attempt.

        Returns
        -------
        list of str
            Paths that cannot be shown since they are a covered folder itself.
        """
        covered: list[str] = []
        wanted = {p for path in paths if os.path.isabs(path) for p in _spellings(path)}
        for path in sorted(wanted, key=len):
            for root in self._originals:
                if path == root:
                    covered.append(path)
                elif _within(path, root):
                    self._bind(root, path, keep)
                    if keep and path not in self._always:
                        self._always.append(path)
        return covered

    def socket_place(self, value: str) -> str | None:
        """Return what to show so that a socket can be reached whose path is ``value``.

        Its folder (a socket may be made anew), or the socket alone when it lies directly in a
        covered folder; ``None`` when the value names no socket there.
        """
        for root, original in self._originals.items():
            if not _within(value, root) or value == root:
                continue
            try:
                found = os.stat(os.path.relpath(value, root), dir_fd=original)
            except (OSError, ValueError):
                return None
            if not stat.S_ISSOCK(found.st_mode):
                return None
            folder = os.path.dirname(os.path.normpath(value))
            return os.path.normpath(value) if folder == root else folder
        return None

    def _bind(self, root: str, path: str, keep: bool) -> None:
        if root not in self._originals or not _within(path, root) or path == root:
            return
        if any(_within(path, target) for target in self._bound):
            return
        try:
            source = os.open(
                os.path.relpath(path, root), os.O_PATH | os.O_CLOEXEC, dir_fd=self._originals[root]
            )
        except OSError:
            return
        try:
            self._make_place(root, path, stat.S_ISDIR(os.fstat(source).st_mode))
            mount(f"/proc/self/fd/{source}", path, None, _MS_BIND | _MS_REC)
        finally:
            os.close(source)
        self._bound[path] = keep
        self._remember_below(path)

    def _make_place(self, root: str, path: str, is_folder: bool) -> None:
        parts = os.path.relpath(path, root).split("/")
        for depth in range(1, len(parts) + 1):
            place = os.path.join(root, *parts[:depth])
            try:
                if depth < len(parts) or is_folder:
                    os.mkdir(place, 0o755)
                else:
                    os.close(os.open(place, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            except FileExistsError:
                continue
            self._skeleton.add(place)

    def _remember(self, point: str) -> None:
        descriptor = os.open(point, os.O_PATH | os.O_CLOEXEC)
        try:
            with open(f"/proc/self/fdinfo/{descriptor}") as file:
                for line in file:
                    if line.startswith("mnt_id:"):
                        self._expected.add(int(line.split()[1]))
        finally:
            os.close(descriptor)

    def _remember_below(self, point: str) -> None:
        self._remember(point)
        prefix = point + "/"
        self._expected.update(m.number for m in mounted() if m.point.startswith(prefix))

    # --- after an attempt ------------------------------------------------------------------------

    def hide_attempt(self) -> None:
        """Take away what was shown for one attempt only."""
        for path in [path for path, keep in self._bound.items() if not keep]:
            detach(path)
            del self._bound[path]
        for place in sorted(self._skeleton, key=len, reverse=True):
            try:
                os.rmdir(place) if not os.path.isfile(place) else os.unlink(place)
            except OSError:
                continue  # still in use by what stays, or not empty: `dirty` looks at it
            self._skeleton.discard(place)
        self._show_always()

    def _show_always(self) -> None:
        """Bind again what stays, where an attempt's folder lay over it."""
        for path in self._always:
            for root in self._originals:
                self._bind(root, path, keep=True)

    def undo_strange_mounts(self) -> list[str]:
        """Detach every mount that the pod did not make.

        Returns
        -------
        list of str
            What could not be put right, empty when the view is the pod's again.
        """
        present = mounted()
        strange = [m for m in present if m.number not in self._expected]
        for found in reversed(strange):
            with contextlib.suppress(OSError):  # gone with its parent, or seen again below
                detach(found.point)
        if strange:
            present = mounted()
        wrong = [m.point for m in present if m.number not in self._expected]
        points = {m.point for m in present if m.number in self._expected}
        lost = [p for p in (*self._originals, *self._bound) if p not in points]
        return [f"the mount on {p} does not go away" for p in wrong] + [
            f"the pod's mount on {p} is gone" for p in lost
        ]

    def temporary_is_dirty(self) -> bool:
        """Whether anything lies in ``/tmp`` that the pod did not put there."""
        return self._has_strangers("/tmp")

    def _has_strangers(self, folder: str) -> bool:
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            if path in self._bound:
                continue
            if path not in self._skeleton or os.path.islink(path):
                return True
            if os.path.isdir(path) and self._has_strangers(path):
                return True
        return False

    def renew_temporary(self) -> Path:
        """Put a new, empty ``/tmp`` in place.

        Returns
        -------
        Path
            The old generation's folder, now out of reach of anything but its own path.
        """
        old = self.scratch
        for path in [path for path in self._bound if _within(path, "/tmp")]:
            del self._bound[path]
        for point in reversed(mounts_below("/tmp")):
            with contextlib.suppress(OSError):  # gone with its parent
                detach(point)
        detach("/tmp")
        self.generation += 1
        self._cover_temporary()
        self._forget_gone()
        return old

    def shared_memory_is_dirty(self) -> bool:
        """Whether anything lies in ``/dev/shm``."""
        return _SHARED_MEMORY_FOLDER in self._originals and self._has_strangers(
            _SHARED_MEMORY_FOLDER
        )

    def renew_shared_memory(self) -> None:
        """Put a new, empty ``/dev/shm`` in place; the kernel frees the old one's memory."""
        for path in [path for path in self._bound if _within(path, _SHARED_MEMORY_FOLDER)]:
            detach(path)
            del self._bound[path]
        detach(_SHARED_MEMORY_FOLDER)
        self._cover_shared_memory()
        self._forget_gone()

    def uninstall(self) -> None:
        """Take every private mount away again, so that the pod's own folders can be deleted."""
        for path in (*reversed(self._bound), *self._originals, self._queues):
            for point in (*reversed(mounts_below(path)), path):
                with contextlib.suppress(OSError):  # gone with its parent
                    detach(point)
        self._bound.clear()

    def _forget_gone(self) -> None:
        # The kernel reuses mount numbers: one of ours that is gone must not vouch for another.
        self._expected &= {m.number for m in mounted()}


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _spellings(path: str) -> set[str]:
    """Return a path as written and with links resolved; the two may lie in different places."""
    return {os.path.normpath(path), os.path.realpath(path)}
