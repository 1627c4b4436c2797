"""Deleting what a job left: any tree, and nothing but that tree.

Works on descriptors and single names, so it follows no symbolic link, has no longest path, and
minds no name that is not text. Folders without permissions are given some first (through their own
descriptor). It never enters another file system and refuses a tree in which something is mounted.
Deep trees are unrolled by moving deep folders up, so that few descriptors are open at once.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

from firepool_podagent.mounts import mounts_below

_DEPTH_LIMIT = 48
_BATCH = 256
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass
class Removal:
    """Deletes one entry of a folder that belongs to the pod.

    Parameters
    ----------
    path : Path
        What to delete; its parent must be the pod's own.

    Attributes
    ----------
    failures : list of str
        Entries that could not be removed, with the reason, as paths relative to ``path``'s parent.
    removed : int
        Entries removed.
    """

    path: Path
    failures: list[str] = field(default_factory=list)
    removed: int = 0
    _device: int = 0
    _moved: int = 0

    def run(self) -> None:
        """Delete it all at once."""
        for _ in self.steps():
            pass

    def steps(self) -> Generator[None, None, None]:
        """Delete it in pieces, yielding after every few hundred entries."""
        if sys.platform.startswith("linux"):
            inside = mounts_below(str(self.path)) or _mounted_on(self.path)
            if inside:
                self._fail(self.path.name, f"something is mounted on {inside[0]}")
                return
        try:
            parent = os.open(self.path.parent, _FOLDER_FLAGS)
        except OSError as error:
            self._fail(self.path.name, str(error.strerror))
            return
        try:
            self._device = os.fstat(parent).st_dev
            yield from self._remove(parent, self.path.name, self.path.name)
        finally:
            os.close(parent)

    def _remove(self, parent: int, name: str, shown: str) -> Generator[None, None, None]:
        try:
            is_folder = stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
        except FileNotFoundError:
            return
        except OSError as error:
            self._fail(shown, str(error.strerror))
            return
        if not is_folder:
            self._unlink(parent, name, shown)
            return
        yield from self._remove_folder(parent, name, shown)

    def _remove_folder(self, top: int, name: str, shown: str) -> Generator[None, None, None]:
        waiting = [(name, shown)]  # folders that lie directly in `top`
        while waiting:
            name, shown = waiting.pop()
            root = self._open(top, name, shown)
            if root is None:
                continue
            # One level of the walk: descriptor, its parent, its name there, how to show it, and the
            # folders found in it that are still to be walked.
            levels: list[tuple[int, int, str, str, list[str]]] = [(root, top, name, shown, [])]
            try:
                levels[0][4].extend((yield from self._empty(root, shown)))
                while levels:
                    folder, parent, own_name, own_shown, inner = levels[-1]
                    if inner:
                        child = inner.pop()
                        child_shown = f"{own_shown}/{child}"
                        if len(levels) >= _DEPTH_LIMIT:
                            moved = self._move_up(folder, child, top, child_shown)
                            if moved is not None:
                                waiting.append((moved, child_shown))
                            continue
                        opened = self._open(folder, child, child_shown)
                        if opened is not None:
                            levels.append((opened, folder, child, child_shown, []))
                            levels[-1][4].extend((yield from self._empty(opened, child_shown)))
                        continue
                    levels.pop()
                    os.close(folder)
                    self._rmdir(parent, own_name, own_shown)
                    if self.removed % _BATCH == 0:
                        yield
            finally:
                for level in levels:
                    os.close(level[0])
            yield

    def _open(self, parent: int, name: str, shown: str) -> int | None:
        try:
            try:
                descriptor = os.open(name, _FOLDER_FLAGS, dir_fd=parent)
            except PermissionError:
                self._permit(parent, name)
                descriptor = os.open(name, _FOLDER_FLAGS, dir_fd=parent)
        except OSError as error:
            self._fail(shown, str(error.strerror))
            return None
        found = os.fstat(descriptor)
        if found.st_dev != self._device:
            os.close(descriptor)
            self._fail(shown, "it is another file system")
            return None
        if stat.S_IMODE(found.st_mode) & 0o700 != 0o700:
            try:
                os.fchmod(descriptor, 0o700)
            except OSError as error:
                self._fail(shown, str(error.strerror))
        return descriptor

    @staticmethod
    def _permit(parent: int, name: str) -> None:
        if not sys.platform.startswith("linux"):
            os.chmod(name, 0o700, dir_fd=parent)
            return
        flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        place = os.open(name, flags, dir_fd=parent)
        try:
            os.chmod(f"/proc/self/fd/{place}", 0o700)
        finally:
            os.close(place)

    def _empty(self, folder: int, shown: str) -> Generator[None, None, list[str]]:
        """Unlink what is not a folder; return the folders."""
        folders: list[str] = []
        with os.scandir(folder) as entries:
            names = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for name, is_folder in names:
            if is_folder:
                folders.append(name)
            else:
                try:
                    os.unlink(name, dir_fd=folder)
                except OSError:
                    self._unlink(folder, name, f"{shown}/{name}")
                else:
                    self.removed += 1
                    if self.removed % _BATCH == 0:
                        yield
        return folders

    def _move_up(self, folder: int, name: str, top: int, shown: str) -> str | None:
        self._moved += 1
        target = f".{os.getpid()}-{self._moved}-{os.path.basename(self.path.name)}"[:200]
        try:
            if os.geteuid() != 0:
                self._permit(folder, name)  # moving a folder writes its ".." entry
            os.rename(name, target, src_dir_fd=folder, dst_dir_fd=top)
        except OSError as error:
            self._fail(shown, str(error.strerror))
            return None
        return target

    def _unlink(self, folder: int, name: str, shown: str) -> None:
        try:
            os.unlink(name, dir_fd=folder)
            self.removed += 1
        except FileNotFoundError:
            return
        except OSError as error:
            self._fail(shown, str(error.strerror))

    def _rmdir(self, parent: int, name: str, shown: str) -> None:
        try:
            os.rmdir(name, dir_fd=parent)
            self.removed += 1
        except FileNotFoundError:
            return
        except OSError as error:
            if not self.failures:  # otherwise it is the consequence of one that has been named
                self._fail(shown, str(error.strerror))

    def _fail(self, shown: str, why: str) -> None:
        if len(self.failures) < 64:
            text = shown if len(shown) <= 300 else f"{shown[:140]}...{shown[-140:]}"
            printable = text.encode("utf-8", "backslashreplace").decode()
            self.failures.append(f"{printable!s}: {why}")


def _mounted_on(path: Path) -> list[str]:
    return [str(path)] if os.path.ismount(path) else []
