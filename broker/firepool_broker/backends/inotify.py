"""An event for "this file has appeared", so that nobody polls for it.

The standard library has no binding of inotify; three calls of the C library are enough. Where
the system has none, `FolderWatch.open` returns None and the caller falls back to looking again.
"""

from __future__ import annotations

import ctypes
import os

__all__ = ["FolderWatch"]

_IN_MOVED_TO = 0x80
_IN_NONBLOCK = os.O_NONBLOCK
_IN_CLOEXEC = getattr(os, "O_CLOEXEC", 0)


class FolderWatch:
    """Becomes readable whenever a file was renamed into the folder."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def open(cls, folder: str) -> FolderWatch | None:
        """Watch a folder; None where the system cannot."""
        library = ctypes.CDLL(None, use_errno=True)
        if not hasattr(library, "inotify_init1"):
            return None
        descriptor = library.inotify_init1(_IN_NONBLOCK | _IN_CLOEXEC)
        if descriptor < 0:
            return None  # the user's limit of watches is used up
        if library.inotify_add_watch(descriptor, os.fsencode(folder), _IN_MOVED_TO) < 0:
            os.close(descriptor)
            return None
        return cls(descriptor)

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._descriptor

    def clear(self) -> None:
        """Take what has been reported so far."""
        try:
            while os.read(self._descriptor, 65536):
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Stop watching."""
        os.close(self._descriptor)
