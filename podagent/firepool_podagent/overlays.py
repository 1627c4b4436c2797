"""Overlays: folders of installed packages that stand before an environment's own on a job's path.

``<root>/<environment digest>/<key>`` holds what one list of requirements adds to one environment.
An overlay is complete when it has its marker, which is written last; a folder without one is what
an installation left that did not end, and is removed. A lock file beside it keeps the pods of a
machine from filling the same overlay at once. The marker's time of change is the time of last use:
when the overlays of a root become too large, those unused for longest go first.
"""

from __future__ import annotations

import csv
import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

MARKER: Final = ".firepool-complete"
LIMIT_BYTES: Final = 20 * 1024**3
"""How much the overlays of one root may hold together."""


class Overlay:
    """One overlay folder.

    Parameters
    ----------
    path
        Where it is or will be.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lock = -1

    def is_complete(self) -> bool:
        """Return whether the overlay can be used; notes the use."""
        try:
            os.utime(self.path / MARKER)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def acquire(self) -> bool:
        """Take the overlay's lock; False when another process has it."""
        if self._lock >= 0:
            return True
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(self.path.with_name(f".{self.path.name}.lock"), flags, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        self._lock = lock
        return True

    def release(self) -> None:
        """Give the lock back."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def stage(self) -> Path:
        """Return a new empty folder to fill, beside the overlay; older ones are removed."""
        prefix = f".{self.path.name}.partial-"
        for left in self.path.parent.glob(f"{prefix}*"):
            shutil.rmtree(left)
        return Path(tempfile.mkdtemp(prefix=prefix, dir=self.path.parent))

    def put(self, filled: Path) -> None:
        """Make ``filled`` the overlay, in the place of what is there."""
        marker = {"size_bytes": sum(_sizes(filled))}
        (filled / MARKER).write_text(json.dumps(marker), encoding="utf-8")
        filled.chmod(0o755)
        old = self.path.with_name(f".{self.path.name}.partial-old")
        if self.path.exists():
            os.rename(self.path, old)
        os.rename(filled, self.path)
        if old.exists():
            shutil.rmtree(old)

    def clear_incomplete(self) -> None:
        """Remove the folder if an installation left it without a marker."""
        if self.path.exists() and not (self.path / MARKER).exists():
            shutil.rmtree(self.path)


def _sizes(folder: Path) -> Iterator[int]:
    for parent, _, files in os.walk(folder):
        for name in files:
            yield os.lstat(os.path.join(parent, name)).st_size


def evict(
    root: str | os.PathLike[str], *, limit_bytes: int = LIMIT_BYTES, keep: Collection[str] = ()
) -> list[str]:
    """Remove the overlays unused for longest until the rest fits; return what was removed.

    Those in ``keep``, and those that somebody is filling, stay.
    """
    found: list[tuple[float, int, Path]] = []
    for marker in Path(root).glob(f"*/*/{MARKER}"):
        try:
            size = int(json.loads(marker.read_text(encoding="utf-8"))["size_bytes"])
            found.append((marker.stat().st_mtime, size, marker.parent))
        except (FileNotFoundError, ValueError, KeyError):  # being removed, or damaged
            continue
    total = sum(size for _, size, _ in found)
    removed = []
    for _, size, path in sorted(found):
        if total <= limit_bytes:
            break
        overlay = Overlay(path)
        if str(path) in keep or not overlay.acquire():
            continue
        try:
            # Without its marker it is no overlay any more, however far the removal gets.
            (path / MARKER).unlink()
            shutil.rmtree(path)
        finally:
            overlay.release()
        total -= size
        removed.append(str(path))
    return removed


# --- distributions in a folder -------------------------------------------------------------------


def normalized(name: str) -> str:
    """Return a distribution's name in its normal form (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def distributions(folder: Path) -> dict[str, Path]:
    """Return the distributions installed in ``folder``: normal name to metadata folder."""
    found = {}
    for path in sorted(folder.glob("*.dist-info")):
        name, separator, _ = path.name.removesuffix(".dist-info").rpartition("-")
        if separator:
            found[normalized(name)] = path
    return found


def version_of(metadata: Path) -> str:
    """Return the version that a metadata folder is named after."""
    return metadata.name.removesuffix(".dist-info").rpartition("-")[2]


def modules_of(metadata: Path) -> list[str]:
    """Return the top-level modules that a distribution installs."""
    names = {
        path.partition("/")[0].partition(".")[0]
        for path in _recorded(metadata)
        if path.endswith((".py", ".so")) and not path.startswith("..")
    }
    return sorted(name for name in names if name.isidentifier())


def _recorded(metadata: Path) -> list[str]:
    try:
        with open(metadata / "RECORD", encoding="utf-8", newline="") as record:
            return [row[0] for row in csv.reader(record) if row]
    except FileNotFoundError:
        return []


def remove_distribution(folder: Path, metadata: Path) -> None:
    """Remove a distribution's files from ``folder``, and the folders that become empty."""
    parents: set[Path] = set()
    for name in _recorded(metadata):
        path = Path(os.path.normpath(folder / name))
        if folder in path.parents:  # a RECORD may name scripts elsewhere
            path.unlink(missing_ok=True)
            parents.update(each for each in path.parents if folder in each.parents)
    shutil.rmtree(metadata, ignore_errors=True)
    for parent in sorted(parents, key=lambda each: len(each.parts), reverse=True):
        shutil.rmtree(parent / "__pycache__", ignore_errors=True)
        try:
            parent.rmdir()
        except OSError:  # not empty, or gone
            continue


def merge(new: Path, into: Path) -> None:
    """Move the distributions of ``new`` into ``into``, in the place of other versions there."""
    present = distributions(into)
    for name in distributions(new):
        if name in present:
            remove_distribution(into, present[name])
    for parent, folders, files in os.walk(new):
        target = into / Path(parent).relative_to(new)
        for folder in folders:
            (target / folder).mkdir(exist_ok=True)
        for file in files:
            os.replace(os.path.join(parent, file), target / file)
    shutil.rmtree(new)


def copy_linked(source: Path, target: Path) -> None:
    """Copy a folder without copying the contents of its files."""
    shutil.copytree(source, target, symlinks=True, copy_function=os.link, dirs_exist_ok=True)
