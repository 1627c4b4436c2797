"""Cells in IPython: its shell, with our own way out for displays, values and tracebacks.

The shell is made once, in the template, and does not claim to be a kernel: libraries that look for
one choose their text form. It reads no configuration, writes no history and starts no thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from firepool_podagent.interpreter.plain import CellResult, PlainShell

if TYPE_CHECKING:
    from firepool_podagent.interpreter.streams import Outlet


class Shell(Protocol):
    """What runs a job's code: IPython's shell or `PlainShell`."""

    @property
    def namespace(self) -> dict[str, Any]:
        """The names of the cell, ``__main__``'s own."""

    def warm_up(self) -> None:
        """Load everything that running a cell needs, leaving no trace in the namespace."""

    def touch(self) -> None:
        """Run an empty cell: the pages that every cell touches are this process's own then."""

    def connect(self, outlet: Outlet) -> None:
        """Send displays to ``outlet``."""

    def run_cell(
        self, code: str, filename: str, line_offset: int, started: Callable[[], None]
    ) -> CellResult:
        """Run one cell, calling ``started`` right before its first instruction."""

    def run_call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        started: Callable[[], None],
    ) -> CellResult:
        """Call a function, awaiting what it returns if it is awaitable."""

    def format_error(self, error: BaseException) -> list[str]:
        """Return the lines of a traceback without the frames of our own machinery."""


def make_shell() -> tuple[Shell, str | None]:
    """Return the best shell that this environment has, and why not IPython if it is broken."""
    try:
        import IPython  # noqa: F401
    except ImportError:
        return PlainShell(), None
    try:
        from firepool_podagent.interpreter.ipython import IPythonShell

        return IPythonShell(), None
    except Exception as error:  # noqa: BLE001 - an IPython that does not work must not cost the pod
        return PlainShell(), f"{type(error).__name__}: {error}"
