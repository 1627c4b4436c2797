"""What this interpreter is: the environment that a session's jobs run in.

The digest says what is installed. It is made of the names and times of what lies directly in the
folders of installed packages, so that it costs a fraction of a millisecond and changes with every
install, upgrade and removal, also of editable ones.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
import warnings
from typing import Any

from .errors import WorkingFolderGone

__all__ = ["describe", "digest", "variables", "versions", "working_folder"]

_METADATA = (".dist-info", ".egg-info", ".egg-link", ".pth")
_VERSIONED = ("cloudpickle", "IPython", "numpy", "pandas", "torch", "pyarrow", "polars")
_folder_digests: dict[str, tuple[int, bytes]] = {}


def describe() -> dict[str, Any]:
    """Describe the environment as the broker's API takes it."""
    extra = _extra_path()
    return {
        "executable": sys.executable,
        "prefix": sys.prefix,
        "base_prefix": sys.base_prefix,
        "version": "{}.{}.{}".format(*sys.version_info[:3]),
        "digest": digest(),
        "path": extra,
        "visible": _visible(extra),
    }


def working_folder() -> str:
    """Return the folder that this process works in, where its cells run too.

    Raises
    ------
    WorkingFolderGone
        When it was deleted.
    """
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise WorkingFolderGone(
            "the folder that this kernel works in was deleted; os.chdir(...) to one that exists"
        ) from None


def variables() -> dict[str, str]:
    """Return the environment variables that can travel, which is those that are text.

    A value with bytes that are no UTF-8 cannot be told to the broker; such a variable is left out,
    with one warning that names it.
    """
    kept, odd = {}, []
    for name, value in os.environ.items():
        try:
            f"{name}={value}".encode()
            kept[name] = value
        except UnicodeEncodeError:
            odd.append(name.encode("utf-8", "backslashreplace").decode())
    if odd:
        warnings.warn(
            f"not in the pod's environment, since it is not UTF-8: {', '.join(sorted(odd))}",
            stacklevel=2,
        )
    return kept


def digest() -> str:
    """Return a digest of the interpreter and what is installed, in hexadecimal."""
    result = hashlib.sha256(f"{sys.executable}\n{sys.version}\n{sys.prefix}".encode())
    for folder in sys.path:
        parts = os.path.basename(folder)
        if parts in ("site-packages", "dist-packages"):
            result.update(_folder_digest(folder))
    for folder in _extra_path():
        result.update(folder.encode("utf-8", "surrogateescape") + b"\n")
    return result.hexdigest()


def _folder_digest(folder: str) -> bytes:
    try:
        modified = os.stat(folder).st_mtime_ns
    except OSError:
        return b""
    known = _folder_digests.get(folder)
    if known is not None and known[0] == modified:
        return known[1]
    with os.scandir(folder) as entries:
        lines = [
            f"{entry.name} {entry.stat().st_mtime_ns}\n"
            for entry in entries
            if entry.name.endswith(_METADATA)
        ]
    value = hashlib.sha256("".join(sorted(lines)).encode("utf-8", "surrogateescape")).digest()
    _folder_digests[folder] = (modified, value)
    return value


def _extra_path() -> list[str]:
    """Entries of ``sys.path`` that another interpreter of this environment would not have."""
    own = tuple({sys.prefix + os.sep, sys.base_prefix + os.sep, *_standard_folders()})
    here = working_folder()
    return [
        folder
        for folder in sys.path
        if folder
        and os.path.isabs(folder)
        and folder != here
        and not folder.startswith(own)
        and os.path.isdir(folder)
    ]


def _standard_folders() -> set[str]:
    paths = sysconfig.get_paths()
    return {paths[key] + os.sep for key in ("stdlib", "platstdlib", "purelib", "platlib")}


def _visible(extra: list[str]) -> list[str]:
    """Paths that a pod with a view of its own needs to see."""
    wanted = [sys.prefix, sys.base_prefix, *extra]
    socket = os.environ.get("SSH_AUTH_SOCK")
    if socket and os.path.exists(socket):
        wanted.append(socket)
    return sorted({os.path.abspath(path) for path in wanted})


def versions() -> dict[str, str]:
    """Return the versions of what is loaded and matters for what travels."""
    found = {"python": "{}.{}.{}".format(*sys.version_info[:3])}
    for name in _VERSIONED:
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str):
            found[name.lower()] = version
    return found
