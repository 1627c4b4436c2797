"""A pod's annotations on the disk: a file that only grows, its last whole line being valid.

They change twice with every job. Replacing a file makes some file systems write everything out
first, for milliseconds in which the broker's loop would stand still; one appended line does not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

__all__ = ["AnnotationFile"]

_COMPACT_BYTES = 1024 * 1024


class AnnotationFile:
    """Keeps one pod's annotations.

    Parameters
    ----------
    path
        The file; it need not exist.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._current: dict[str, object] = {}
        self._size_bytes = 0

    @property
    def current(self) -> dict[str, object]:
        """What was written last."""
        return dict(self._current)

    def load(self) -> None:
        """Read what an earlier broker wrote; a torn last line is not there."""
        try:
            with open(self._path, "rb") as file:
                lines = file.read().split(b"\n")
        except FileNotFoundError:
            return
        self._size_bytes = sum(map(len, lines)) + len(lines) - 1
        for line in reversed(lines[:-1]):
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                self._current = found
                return

    def merge(self, changes: Mapping[str, object]) -> None:
        """Write changes down; a value of None removes its key.

        Raises
        ------
        OSError
            When they could not be written; nothing has changed then.
        """
        merged = {**self._current, **changes}
        kept = {name: value for name, value in merged.items() if value is not None}
        # the line break in front ends a line that a dead broker left torn
        line = b"\n" + json.dumps(kept).encode() + b"\n"
        fresh = self._size_bytes > _COMPACT_BYTES
        path = f"{self._path}.new" if fresh else self._path
        flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if fresh else os.O_APPEND)
        descriptor = os.open(path, flags, 0o600)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)
        if fresh:
            os.replace(path, self._path)
            self._size_bytes = 0
        self._size_bytes += len(line)
        self._current = kept
