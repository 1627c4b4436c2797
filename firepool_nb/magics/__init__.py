"""The magics: ``%%firepool`` above a cell, ``%firepool`` for everything around it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class
from traitlets import Unicode

from ..errors import FirepoolError
from ..job import Job
from ..session import Session, current
from . import help as help_module
from . import options as options_module
from .cell import CellRun, KernelState
from .switch import Switch

__all__ = ["FirepoolMagics", "load", "unload"]


@magics_class
class FirepoolMagics(Magics):
    """``%%firepool`` runs a cell on a warm pod; ``%firepool`` asks and steers."""

    default_sku = Unicode(
        os.environ.get("FIREPOOL_DEFAULT_SKU", ""),
        help="SKU of cells that name none; empty for the broker's own default.",
    ).tag(config=True)

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self.state = KernelState()
        self.switch = Switch(shell)
        self._session: Session | None = None

    @property
    def namespace(self) -> dict[str, Any]:
        """The notebook's namespace."""
        shell: Any = self.shell
        namespace: dict[str, Any] = shell.user_ns
        return namespace

    @property
    def session(self) -> Session:
        """The kernel's session; it opens at its first use."""
        if self._session is None:
            self._session = current()
        return self._session

    @line_cell_magic
    def firepool(self, line: str, cell: str | None = None) -> Job | None:
        """Run a cell on a warm pod, or ask and steer; ``?`` shows the options instead of this."""
        if cell is not None and help_module.asks_for_help(line):
            print(help_module.cell_help())
            return None
        if cell is None:
            from .lines import run_line

            run_line(self, line)
            return None
        if not cell.strip():
            raise UsageError("%%firepool: the cell is empty; put the code below this line")
        parsed = options_module.parse(line, self.default_sku)
        return CellRun(self.shell, self.session, self.state, parsed, cell).run()


FirepoolMagics.firepool.__doc__ = help_module.docstring()


def load(shell: Any) -> None:
    """Register the magics and warm up in the background; doing it twice does nothing more."""
    if _registered(shell) is not None:
        return
    magics = FirepoolMagics(shell)
    shell.register_magics(magics)
    shell.input_transformers_cleanup.append(help_module.rewrite_bare_help)
    _show_own_syntax_errors(shell)
    _say_goodbye_with_kernel(shell, magics)
    # the broker starts, the session registers and a pod prepares this interpreter while the
    # person still types
    threading.Thread(target=_warm_up, args=(magics,), name="firepool-warm-up", daemon=True).start()


def unload(shell: Any) -> None:
    """End the session and take the magics away."""
    magics = _registered(shell)
    if magics is None:
        return
    magics.switch.off()
    shell.input_transformers_cleanup.remove(help_module.rewrite_bare_help)
    vars(shell).pop("showsyntaxerror", None)
    magics.session.end()
    shell.magics_manager.registry.pop(FirepoolMagics.__name__, None)
    for kind in ("line", "cell"):
        shell.magics_manager.magics[kind].pop("firepool", None)


def _registered(shell: Any) -> FirepoolMagics | None:
    found = shell.magics_manager.registry.get(FirepoolMagics.__name__)
    return found if isinstance(found, FirepoolMagics) else None


def _warm_up(magics: FirepoolMagics) -> None:
    from ..capture import cell as _capture  # noqa: F401 - loaded now, not in the first cell

    with contextlib.suppress(FirepoolError):  # the first cell tries again and says why
        magics.session.open()


def _show_own_syntax_errors(shell: Any) -> None:
    """Let syntax errors of ours render themselves.

    IPython asks every exception how it wants to be shown, except syntax errors: of those it shows
    the frames that raised them, which are this package's.
    """
    show = shell.showsyntaxerror

    def showsyntaxerror(*args: Any, **kwargs: Any) -> Any:
        error = sys.exc_info()[1]
        if not isinstance(error, FirepoolError):
            return show(*args, **kwargs)
        return shell._showtraceback(type(error), error, error._render_traceback_())

    shell.showsyntaxerror = showsyntaxerror


def _say_goodbye_with_kernel(shell: Any, magics: FirepoolMagics) -> None:
    """Say goodbye when the kernel is shut down or restarted, which only it can tell apart."""
    kernel = getattr(shell, "kernel", None)
    if kernel is None or not hasattr(kernel, "do_shutdown"):
        return
    shut_down = kernel.do_shutdown

    def do_shutdown(restart: bool) -> Any:
        magics.session.end("restart" if restart else "shutdown")
        return shut_down(restart)

    kernel.do_shutdown = do_shutdown
