"""Folders of pods: records written atomically, and removal that nothing can stop for good."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import stat
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["clear_trash", "discard", "read_json", "write_json"]

log = logging.getLogger(__name__)

_TRASH = ".trash-"


def read_json(path: str) -> dict[str, Any] | None:
    """Read an object; None when the file is missing or is none."""
    try:
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def write_json(path: str, document: Mapping[str, Any]) -> None:
    """Replace a record atomically, or leave it as it was.

    It is not synced, for that would hold up the loop, and it need not survive the machine: its
    pods do not either.

    Raises
    ------
    OSError
        When that is not possible, naming the file and the reason.
    """
    temporary = f"{path}.new"
    try:
        with open(temporary, "w", encoding="utf-8", opener=_private) as file:
            json.dump(document, file)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise OSError(error.errno, error.strerror, path) from error


def discard(directory: str) -> None:
    """Remove a folder.

    It is renamed first, so its name is free at once and a half-removed folder is never taken for
    a pod. What cannot be removed (an immutable file, a mount) stays under its new name, is
    named in the log, and is tried again at the next start.
    """
    trash = os.path.join(os.path.dirname(directory), f"{_TRASH}{os.path.basename(directory)}")
    try:
        if os.path.lexists(trash):
            _remove(trash)
        os.rename(directory, trash)
    except FileNotFoundError:
        return
    except OSError:
        trash = directory
    _remove(trash)


def clear_trash(parent: str) -> None:
    """Try again to remove what earlier removals left."""
    for name in os.listdir(parent):
        if name.startswith(_TRASH):
            _remove(os.path.join(parent, name))


def _remove(path: str) -> None:
    failed: list[str] = []

    def again(function: Callable[[str], object], name: str, _: object) -> None:
        try:
            # a folder that its owner made unreadable is the usual reason
            os.chmod(os.path.dirname(name), stat.S_IRWXU)
            if os.path.isdir(name) and not os.path.islink(name):
                os.chmod(name, stat.S_IRWXU)
                if function is not os.rmdir:
                    shutil.rmtree(name)
                    return
            function(name)
        except OSError as error:
            failed.append(str(error))

    shutil.rmtree(path, onerror=again)
    if failed:
        log.warning("%s could not be removed completely: %s", path, failed[0])


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
