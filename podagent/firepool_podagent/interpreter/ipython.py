"""The IPython shell of a job."""

# IPython's annotations differ from version to version, and most of its functions have none.
# mypy: disable-error-code="no-untyped-call, attr-defined, arg-type, union-attr, misc"

from __future__ import annotations

import atexit
import builtins
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

import IPython.core.interactiveshell
import IPython.core.magics.execution
from IPython.core.autocall import ExitAutocall
from IPython.core.compilerop import CachingCompiler
from IPython.core.error import UsageError
from IPython.core.history import HistoryManager
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.profiledir import ProfileDir
from traitlets import Type, observe

from firepool_podagent.interpreter import plain, sessionpip
from firepool_podagent.interpreter.displays import Formatter, Hook, Publisher
from firepool_podagent.interpreter.plain import CellResult
from firepool_podagent.interpreter.streams import Outlet

_SHELL_FUNCTIONS = frozenset(
    {"run_code", "run_ast_nodes", "run_cell_async", "_run_cell", "run_cell"}
)


class _NoProfile(ProfileDir):
    """A profile that is not on disk: a job reads no configuration and leaves no folder behind."""

    @observe("location")
    def _location_changed(self, change: Any) -> None:
        """Make no folders."""


class _Compiler(CachingCompiler):
    """Compiles under the name that the notebook gave, and shows it as a cell."""

    filename = "<cell>"

    def cache(self, transformed_code: str, number: int = 0, raw_code: str | None = None) -> str:
        plain.remember_source(self.filename, transformed_code)
        return self.filename

    def __call__(self, source: Any, filename: str, symbol: str, *args: Any, **kwargs: Any) -> Any:
        # ``%%time`` compiles the rest of the cell under a name of its own.
        if filename.startswith("<timed "):
            filename = self.filename
        return super().__call__(source, filename, symbol, *args, **kwargs)

    def format_code_name(self, name: str) -> tuple[str, str] | None:
        if name == self.filename and name.startswith("<"):
            return "Cell", name.strip("<>").removeprefix("cell").strip() or "here"
        return None


class _Exit(ExitAutocall):
    """``exit`` and ``quit``: end the job here."""

    def __call__(self, code: object = None) -> None:
        raise SystemExit(code)


class _Shell(InteractiveShell):
    compiler_class = Type(_Compiler)
    display_pub_class = Type(Publisher)
    displayhook_class = Type(Hook)
    started: Callable[[], None] | None = None
    cell = ""
    line_offset = 0

    @observe("ipython_dir")
    def _ipython_dir_changed(self, change: Any) -> None:
        """Make no folder."""

    @observe("exit_now")
    def _update_exit_now(self, change: Any) -> None:
        """End by `SystemExit`, not by a flag."""

    def init_history(self) -> None:
        self.history_manager = HistoryManager(shell=self, parent=self, enabled=False)
        self.configurables.append(self.history_manager)

    def init_virtualenv(self) -> None:
        """Leave ``sys.path`` alone: it is the job's own."""

    def init_user_ns(self) -> None:
        super().init_user_ns()
        for name in ("exit", "quit"):
            self.user_ns[name] = _Exit()

    def enable_matplotlib(self, gui: str | None = None) -> Any:
        if gui not in (None, "inline", "auto", "agg"):
            raise UsageError(
                f"%matplotlib {gui} needs a kernel or a screen, which a remote cell has not; "
                "plots are shown inline without it"
            )
        return super().enable_matplotlib(gui)

    def ask_exit(self) -> None:
        raise SystemExit

    def enable_gui(self, gui: str | None = None) -> None:
        if gui not in (None, "inline"):
            raise UsageError(f"a remote cell has no screen for {gui!r}; plots are shown inline")

    def init_display_formatter(self) -> None:
        self.display_formatter = Formatter(parent=self)
        self.configurables.append(self.display_formatter)
        self.shown_figures: list[Any] = []
        # Registered before matplotlib's own flush, which comes when its backend is imported.
        self.events.register("post_execute", self._close_shown_figures)

    def _close_shown_figures(self) -> None:
        pyplot = sys.modules.get("matplotlib.pyplot")
        while self.shown_figures:
            figure = self.shown_figures.pop()
            if pyplot is not None:
                pyplot.close(figure)

    # --- the cell's own text and line numbers --------------------------------------------------

    def transform_cell(self, raw_cell: str) -> str:
        transformed: str = super().transform_cell(raw_cell)
        above = self._lines_above(raw_cell)
        numbered = "\n" * above + transformed
        if above > self.line_offset:
            plain.remember_source(self.compile.filename, numbered)
        return numbered

    def _lines_above(self, raw_cell: str) -> int:
        """Lines of the notebook's cell above the code that ``raw_cell`` becomes.

        IPython drops empty lines at the top, and a cell magic such as ``%%time`` hands on the
        rest of the cell, which is recognised by being its end.
        """
        if not raw_cell.strip() or not self.cell.rstrip().endswith(raw_cell.rstrip()):
            return 0
        position = self.cell.rstrip().rindex(raw_cell.rstrip())
        blank = len(raw_cell) - len(raw_cell.lstrip())
        empty = raw_cell[:blank].count("\n")
        return self.line_offset + self.cell[:position].count("\n") + empty

    async def run_code(self, code_obj: Any, result: Any = None, *, async_: bool = False) -> bool:
        __tracebackhide__ = "__ipython_bottom__"
        if self.started is not None:
            started, self.started = self.started, None
            started()
        failed: bool = await super().run_code(code_obj, result, async_=async_)
        if failed and result is not None:
            interrupt = plain.as_interrupt(result.error_in_exec)
            if interrupt is not None:
                result.error_in_exec = interrupt
                self.last_error = (interrupt, self.format_error(interrupt))
        return failed

    # --- errors -------------------------------------------------------------------------------

    def showtraceback(
        self,
        exc_tuple: Any = None,
        filename: str | None = None,
        tb_offset: int | None = None,
        exception_only: bool = False,
        running_compiled_code: bool = False,
    ) -> None:
        error = self._get_exc_info(exc_tuple)[1]
        self._shown(error, self.format_error(error, tb_offset), sys._getframe(1).f_code)

    def showsyntaxerror(
        self, filename: str | None = None, running_compiled_code: bool = False
    ) -> None:
        error = self._get_exc_info()[1]
        self._shown(error, self.format_error(error), sys._getframe(1).f_code)

    def showindentationerror(self) -> None:
        error = self._get_exc_info()[1]
        self._shown(error, self.format_error(error), sys._getframe(1).f_code)

    def show_usage_error(self, exc: BaseException) -> None:
        self._shown(exc, [f"UsageError: {exc}"], sys._getframe(1).f_code)

    def _shown(self, error: BaseException, lines: list[str], caller: Any) -> None:
        # The cell's own error is kept for the end; one that user code asks to see is printed.
        # ``%%time`` of IPython before 8.29 shows the error of what it times and goes on.
        if caller.co_name in _SHELL_FUNCTIONS and "interactiveshell" in caller.co_filename:
            self.last_error = (error, lines)
        elif caller.co_name == "time" and caller.co_filename == _EXECUTION_MAGICS:
            self.last_error = self.swallowed = (error, lines)
        else:
            print("\n".join(lines), file=sys.stderr)

    last_error: tuple[BaseException, list[str]] | None = None
    swallowed: tuple[BaseException, list[str]] | None = None

    def format_error(self, error: BaseException, tb_offset: int | None = None) -> list[str]:
        """Return IPython's (coloured) traceback of ``error``."""
        if isinstance(error, SystemExit):
            return [f"SystemExit: {error}"]
        if isinstance(error, UsageError):
            return [f"UsageError: {error}"]
        if isinstance(error, sessionpip.RequirementsFailed):
            return [f"RequirementsFailed: {error}"]
        try:
            if isinstance(error, SyntaxError):
                inside = traceback.extract_tb(_user_frames(error))
                return _lines(self.SyntaxTB.structured_traceback(type(error), error, inside))
            if _has_group(error):  # IPython's own formatters do not know exception groups
                return plain.format_traceback(error)
            return _lines(
                self.InteractiveTB.structured_traceback(
                    type(error), error, _user_frames(error), tb_offset=0
                )
            )
        except Exception:  # noqa: BLE001 - an exception that IPython cannot show
            return plain.format_traceback(error)

    def init_magics(self) -> None:
        super().init_magics()
        self.register_magic_function(self._pip, "line", "pip")
        self.register_magic_function(self._uv, "line", "uv")
        for name in ("conda", "mamba", "micromamba"):
            self.register_magic_function(_refuse_conda, "line", name)

    def _pip(self, line: str) -> None:
        """Install into the session's overlay."""
        try:
            sessionpip.run(line, self.tell)
        except sessionpip.RequirementsFailed:
            raise
        except sessionpip.PipError as error:
            raise UsageError(str(error)) from None

    def _uv(self, line: str) -> None:
        """Understand ``%uv pip …`` as ``%pip …``."""
        tool, _, rest = line.strip().partition(" ")
        if tool != "pip":
            raise UsageError(f"%uv {tool} is not available in a remote cell; %uv pip install is")
        self._pip(rest)

    def tell(self, text: str) -> None:
        """Show a note to the person."""
        outlet = self.display_pub.outlet
        if outlet is None or not outlet.send({"type": "note", "level": "info", "text": text}):
            print(text)

    # --- subprocesses --------------------------------------------------------------------------

    def system(self, cmd: str) -> None:
        command = self.var_expand(cmd, depth=1)
        if command.rstrip().endswith("&"):
            raise OSError("Background processes not supported.")
        self.user_ns["_exit_code"] = run_in_shell(command)

    system_piped = system
    system_raw = system


def _refuse_conda(_line: str) -> None:
    """Say why there is no conda."""
    raise UsageError(
        "conda would change the environment, which a remote cell cannot;"
        " %pip install fills an overlay of this session"
    )


class IPythonShell:
    """The shell as a job uses it."""

    name = "ipython"

    def __init__(self) -> None:
        main = plain.new_main_module()
        IPython.core.interactiveshell.warn = _warn
        self._shell = _Shell.instance(
            ipython_dir=os.devnull,
            profile_dir=_NoProfile(location=os.devnull),
            user_module=main,
            loop_runner=plain.run_coroutine,
            # readable on light and dark ground: nobody here knows where it will be shown
            colors="Neutral" if IPython.version_info < (9, 0) else "neutral",
        )
        self._shell.autoawait = True
        # A job ends by its own order of things; the shell has nothing on disk to tidy.
        atexit.unregister(self._shell.atexit_operations)
        self._forget_warm_up()

    @property
    def namespace(self) -> dict[str, Any]:
        """The names of the cell, ``__main__``'s own."""
        namespace: dict[str, Any] = self._shell.user_ns
        return namespace

    def warm_up(self) -> None:
        """Load everything that running a cell needs, leaving no trace in the namespace."""
        for code in plain.WARM_UP:
            self.run_cell(code, "<warm-up>", 0, _nothing)
        # The pieces of a value's display, without showing one.
        self._shell.displayhook.compute_format_data(0)
        self._forget_warm_up()
        self._shell.last_error = None
        self._shell.last_execution_result = None
        for name in ("last_type", "last_value", "last_traceback"):
            vars(sys).pop(name, None)

    def touch(self) -> None:
        """Run an empty cell: the pages that every cell touches are this process's own then."""
        self.run_cell("pass", "<warm-up>", 0, _nothing)
        self._forget_warm_up()
        self._shell.last_execution_result = None

    def _forget_warm_up(self) -> None:
        plain.forget_warm_up(self.namespace)
        # a cell has no cells before it: a history that is there and empty would be misread
        for name in ("In", "Out", "_", "__", "___", "_i", "_ii", "_iii"):
            self.namespace.pop(name, None)

    def connect(self, outlet: Outlet) -> None:
        """Send displays to ``outlet``."""
        self._shell.display_pub.outlet = outlet
        sys.modules["__main__"] = self._shell.user_module

    def run_cell(
        self, code: str, filename: str, line_offset: int, started: Callable[[], None]
    ) -> CellResult:
        """Run one cell; its own lines begin after ``line_offset`` lines of the notebook's cell."""
        shell = self._shell
        shell.cell, shell.line_offset, shell.started = code, line_offset, started
        shell.compile.filename = filename
        outcome = shell.run_cell(code, store_history=False)
        error = outcome.error_before_exec or outcome.error_in_exec
        if error is None and shell.swallowed is not None:
            error = shell.swallowed[0]
        if error is None:
            return CellResult(plain.NOTHING if outcome.result is None else outcome.result)
        shown = shell.last_error
        lines = shown[1] if shown is not None and shown[0] is error else self.format_error(error)
        return CellResult(error=error, traceback=lines)

    def run_call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        started: Callable[[], None],
    ) -> CellResult:
        """Call a function, awaiting what it returns if it is awaitable."""
        result = CellResult()
        shell = self._shell
        with shell.builtin_trap, shell.display_trap:
            started()
            try:
                result.value = plain.call(function, args, kwargs)
            except BaseException as error:  # noqa: BLE001 - whatever user code raises is its result
                result.error = error
                result.traceback = self.format_error(error)
            finally:
                shell.events.trigger("post_execute")
        return result

    def format_error(self, error: BaseException) -> list[str]:
        """Return the lines of a traceback without the frames of our own machinery."""
        lines: list[str] = self._shell.format_error(error)
        return lines


def _nothing() -> None:
    """Nobody waits for a warm-up's first instruction."""


def run_in_shell(command: str) -> int:
    """Run a shell command whose output is the job's own; return its exit code.

    On an interrupt the command gets one too and two seconds to end.
    """
    shell = os.environ.get("SHELL") or "/bin/sh"
    process = subprocess.Popen(command, shell=True, executable=shell, stdin=subprocess.DEVNULL)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise


def _lines(shown: list[str]) -> list[str]:
    return "\n".join(shown).split("\n")


def _user_frames(error: BaseException) -> Any:
    """Return the traceback from the first frame that is neither ours nor IPython's own."""
    plain.hide_machinery(error)
    frame = error.__traceback__
    while frame is not None and _is_machinery(frame.tb_frame.f_code.co_filename):
        frame = frame.tb_next
    return frame


_EXECUTION_MAGICS = IPython.core.magics.execution.__file__
_SHELL_FILE = IPython.core.interactiveshell.__file__


def _is_machinery(filename: str) -> bool:
    return filename == _SHELL_FILE or plain.is_machinery(filename)


def _has_group(error: BaseException | None) -> bool:
    kind = getattr(builtins, "BaseExceptionGroup", None)
    while error is not None and kind is not None:
        if isinstance(error, kind):
            return True
        error = error.__cause__ or error.__context__
    return False


def _warn(message: Any, *args: Any, **kwargs: Any) -> None:
    """`warnings.warn` for the shell's module, without its advice on how to leave a terminal."""
    import warnings

    if not str(message).startswith("To exit:"):
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        warnings.warn(message, *args, **kwargs)
