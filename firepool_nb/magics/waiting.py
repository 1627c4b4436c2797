"""The line that says why a cell waits, and goes without a trace.

In a front end with a person it is one display that updates; in a terminal a line that is wiped;
where nobody looks (nbclient, papermill, a pipe) it is nothing at all.
"""

from __future__ import annotations

import sys
import uuid
from typing import Any

from ..outputs import note_bundle

__all__ = ["WaitingLine", "has_person"]


def has_person(shell: Any) -> bool:
    """Tell whether a front end with a person shows this cell.

    Executors such as nbclient say that they have no standard input to offer; front ends with a
    person do.
    """
    kernel = getattr(shell, "kernel", None)
    return kernel is not None and bool(getattr(kernel, "_allow_stdin", False))


class WaitingLine:
    """One updating line.

    Parameters
    ----------
    shell
        The shell whose current cell shows it.
    quiet
        Show nothing.
    """

    def __init__(self, shell: Any, quiet: bool = False) -> None:
        self._shell = shell
        self._text = ""
        self._shown = False
        self._display_id: str | None = None
        self._is_notebook = not quiet and has_person(shell)
        self._is_terminal = (
            not quiet and getattr(shell, "kernel", None) is None and sys.stderr.isatty()
        )

    @property
    def can_show(self) -> bool:
        """Whether anything would be seen."""
        return self._is_notebook or self._is_terminal

    def show(self, text: str) -> None:
        """Show a text, in place of the one before."""
        if not self.can_show or (self._shown and text == self._text):
            return
        if self._is_terminal:
            sys.stderr.write(f"\r\x1b[2K{text}")
            sys.stderr.flush()
        else:
            update = self._display_id is not None and self._shown
            if not update:
                self._display_id = f"firepool-waiting-{uuid.uuid4().hex}"
            self._publish(note_bundle(text), update)
        self._text, self._shown = text, True

    def clear(self) -> None:
        """Take the line away."""
        if not self._shown:
            return
        self._shown = False
        if self._is_terminal:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()
        elif self._is_whole_output():
            self._shell.display_pub.clear_output(False)
        else:
            self._publish({"text/plain": ""}, update=True)

    def keep(self) -> None:
        """Leave what is shown; a later text gets a line of its own."""
        self._shown = False

    def _publish(self, bundle: dict[str, str], update: bool) -> None:
        self._shell.display_pub.publish(
            data=bundle, metadata={}, transient={"display_id": self._display_id}, update=update
        )

    def _is_whole_output(self) -> bool:
        """Tell whether nothing else can have been shown by this cell.

        That is so when the cell starts with a cell magic and none of its output came yet; then
        the output is cleared, which leaves nothing at all in the file.
        """
        parent = getattr(self._shell, "parent_header", None) or {}
        kernel = getattr(self._shell, "kernel", None)
        if kernel is not None:
            parent = kernel.get_parent() if hasattr(kernel, "get_parent") else parent
        code = str((parent.get("content") or {}).get("code", ""))
        return code.lstrip().startswith("%%firepool") and self.nothing_else_shown

    nothing_else_shown = True
    """Set to False by whoever shows something else in the same cell."""
