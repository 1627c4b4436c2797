"""What to do about a remote error, when the notebook knows more than the pod."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["hint_for", "only_there"]

_NAME = re.compile(r"name '([^']+)' is not defined")
_PATH = re.compile(r"No such file or directory: (['\"])(.+?)\1")


def only_there(name: str, cell: str, statement: str | None) -> str:
    """Say that a name exists in the pod only, and how the next cell gets it.

    Parameters
    ----------
    name
        The name.
    cell
        The cell that bound it.
    statement
        The import that did, if one did.
    """
    if statement is not None:
        return f"was imported only in the pod, by {cell}: add `{statement}` to this cell"
    return f"was defined only in the pod, by {cell}: bring it back there with -o {name}"


def hint_for(
    ename: str | None,
    evalue: str | None,
    namespace: Mapping[str, Any],
    remote_names: Mapping[str, str],
    session_dir: str | None,
) -> str | None:
    """Return one line that says how to put an error right, or None."""
    if ename == "NameError" and evalue:
        match = _NAME.search(evalue)
        if match is None:
            return None
        name = match[1]
        if name in namespace:
            return (
                f"{name} exists in this notebook, but the cell does not name it where it could "
                f"be seen: send it with -i {name}"
            )
        if name in remote_names:
            return f"{name} {remote_names[name]}"
        return None
    if ename == "FileNotFoundError" and evalue:
        match = _PATH.search(evalue)
        if match is None or not os.path.exists(match[2]):
            return None
        where = f" ({session_dir})" if session_dir else ""
        return (
            f"{match[2]} exists beside this notebook, but not where the cell ran: copy it to the "
            f"session's folder, FIREPOOL_SESSION_DIR{where}, or read it here and send it with -i"
        )
    return None
