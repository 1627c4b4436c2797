"""Files that are there completely or not at all, whatever becomes of disk or machine."""

from __future__ import annotations

import contextlib
import os

__all__ = ["write_durably"]


def write_durably(path: str, content: bytes) -> None:
    """Write or replace a file that its owner alone can read: new name, sync, rename.

    Raises
    ------
    OSError
        When that is not possible, naming the file and the reason; what was there is there still.
    """
    temporary = f"{path}.{os.getpid()}.new"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            left = memoryview(content)
            while left:
                left = left[os.write(descriptor, left) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise OSError(error.errno, error.strerror, path) from error
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
