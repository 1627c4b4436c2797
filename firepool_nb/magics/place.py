"""Where a cell stands: its number, its id, the line its code starts on, and what is not its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["CellPlace", "cell_labels", "first_line", "hidden_names"]

_NEVER = frozenset(
    {"In", "Out", "_", "__", "___", "_i", "_ii", "_iii", "_ih", "_oh", "_dh", "_exit_code", "_sh"}
    | {"get_ipython", "exit", "quit"}
)
_NAME = 60
_HISTORY = re.compile(r"_(?:i?\d+)")


@dataclass(frozen=True)
class CellPlace:
    """Where a cell stands in its notebook.

    Attributes
    ----------
    number
        Its number, which its prompt shows.
    label
        How people call it: ``In[5]``.
    filename
        File name that remote tracebacks show.
    line_offset
        Lines of the notebook's cell above the code.
    cell_id
        Id of the cell where the front end tells it.
    """

    number: int
    label: str
    filename: str
    line_offset: int
    cell_id: str | None

    @classmethod
    def of(cls, shell: Any, source: str) -> CellPlace:
        """Find out where the code that runs now stands."""
        # IPython 9 counts on before a cell runs, older ones after it; the result knows
        running = getattr(shell.displayhook, "exec_result", None)
        count = getattr(running, "execution_count", None) or shell.execution_count
        label = f"In[{count}]"
        parent = _parent(shell)
        whole = str((parent.get("content") or {}).get("code", ""))
        cell_id = (parent.get("metadata") or {}).get("cellId")
        return cls(count, label, f"<cell {label}>", _offset(whole, source), cell_id)


def _parent(shell: Any) -> dict[str, Any]:
    kernel = getattr(shell, "kernel", None)
    if kernel is None or not hasattr(kernel, "get_parent"):
        return {}
    parent: dict[str, Any] = kernel.get_parent() or {}
    return parent


def _offset(whole: str, source: str) -> int:
    body = source.strip("\n")
    position = whole.rfind(body) if body else -1
    if position < 0:
        return 1  # a terminal: the magic's own line
    leading = len(source) - len(source.lstrip("\n"))
    return max(0, whole[:position].count("\n") - leading)


def first_line(source: str) -> str | None:
    """Return the line that people know a cell by: its first one of code, shortened."""
    lines = [line for line in (" ".join(line.split()) for line in source.splitlines()) if line]
    code = [line for line in lines if line[0] not in "%!#"]
    for line in (*code, *lines):
        printable = "".join(c for c in line if c.isprintable())
        if printable:
            return printable if len(printable) <= _NAME else f"{printable[: _NAME - 1]}…"
    return None


def hidden_names(shell: Any) -> frozenset[str]:
    """Names of the namespace that belong to the shell and never travel.

    A name that the person has bound anew (``open = my_open``) is theirs.
    """
    namespace = shell.user_ns
    shells_own = shell.user_ns_hidden
    hidden = {n for n, v in shells_own.items() if n in namespace and namespace[n] is v}
    return frozenset(
        {*_NEVER, *hidden, *(n for n in namespace if n[:1] == "_" and _HISTORY.fullmatch(n))}
    )


def cell_labels(shell: Any) -> Callable[[str], str]:
    """Name the files that a shell keeps its cells in by the cells' numbers."""
    numbers: dict[str, int] = getattr(shell.compile, "_filename_map", {})

    def label(filename: str) -> str:
        number = numbers.get(filename)
        return filename if number is None else f"<cell In[{number}]>"

    return label
