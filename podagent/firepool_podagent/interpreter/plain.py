"""Cells without IPython: the same prints, last value, ``await`` and exceptions, in plain Python."""

from __future__ import annotations

import ast
import asyncio
import builtins
import inspect
import linecache
import selectors
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from firepool_podagent.interpreter.streams import Outlet

NOTHING: Any = object()
"""The value of a cell that has none."""


@dataclass
class CellResult:
    """What a cell came to: the value of its last expression, or the error and how it was shown."""

    value: Any = NOTHING
    error: BaseException | None = None
    traceback: list[str] | None = None


def new_main_module() -> types.ModuleType:
    """Return an empty ``__main__``, as an interactive interpreter has it."""
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    return module


def run_coroutine(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine in a loop of its own; tasks that it leaves are cancelled quietly.

    The loop exists for this call only: a cell without ``await`` runs with no loop at all, so
    ``asyncio.run`` works in it. An interrupt raises `KeyboardInterrupt` where code runs; where
    everything waits, it cancels the coroutine, so that its ``finally`` blocks run and the traceback
    shows the line that waited.

    Raises
    ------
    KeyboardInterrupt
        The coroutine was cancelled by an interrupt.
    """
    main_task: asyncio.Task[Any] | None = None
    loop: asyncio.AbstractEventLoop | None = None

    async def main() -> Any:
        nonlocal main_task, loop
        loop = asyncio.get_running_loop()
        main_task = asyncio.current_task()
        try:
            return await coroutine
        finally:
            loop.set_exception_handler(_ignore)

    def interrupt(_signal: int, frame: types.FrameType | None) -> None:
        waits = frame is not None and frame.f_code.co_filename.startswith(_WAITING_CODE)
        if _interrupted or not waits or loop is None or main_task is None or main_task.done():
            raise KeyboardInterrupt
        _interrupted.append(True)
        main_task.cancel()
        loop.call_soon_threadsafe(_nothing)  # wakes the loop

    previous = signal.getsignal(signal.SIGINT)
    ours = (
        previous is signal.default_int_handler
        and threading.current_thread() is threading.main_thread()
    )
    if ours:
        signal.signal(signal.SIGINT, interrupt)
    try:
        value = asyncio.run(main())
    except asyncio.CancelledError as error:
        raise as_interrupt(error) or error from None
    finally:
        if ours:
            signal.signal(signal.SIGINT, previous)
    return value


_interrupted: list[bool] = []
"""Not empty once an interrupt cancelled what waited."""


def as_interrupt(error: BaseException | None) -> KeyboardInterrupt | None:
    """Return the `KeyboardInterrupt` that a cancellation stands for, None for any other error."""
    if _interrupted and isinstance(error, asyncio.CancelledError):
        return KeyboardInterrupt().with_traceback(error.__traceback__)
    return None


def call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``function``; run what it returns to its end if that is awaitable."""
    value = function(*args, **kwargs)
    if inspect.isawaitable(value):

        async def wait() -> Any:
            return await value

        return run_coroutine(wait())
    return value


WARM_UP = ("pass", "await __import__('asyncio').sleep(0)", "def f():\n    1 / 0\nf()")


def forget_warm_up(namespace: dict[str, Any]) -> None:
    """Remove what the warm-up cells left."""
    namespace.pop("f", None)
    linecache.cache.pop("<warm-up>", None)


def _nothing() -> None:
    """Nobody waits for a warm-up's first instruction."""


def _ignore(_loop: asyncio.AbstractEventLoop, _context: dict[str, Any]) -> None:
    """Say nothing about tasks that are ended with their loop."""


def remember_sources(sources: dict[str, str]) -> None:
    """Make the sources of the notebook's own functions known, by the file names in their code."""
    for filename, text in sources.items():
        remember_source(filename, text)


def remember_source(filename: str, source: str) -> None:
    """Make ``source`` known to tracebacks and `inspect` under ``filename``."""
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)


class PlainShell:
    """Runs cells with nothing but the standard library."""

    name = "python"

    def __init__(self) -> None:
        self.module = new_main_module()
        self._outlet: Outlet | None = None

    @property
    def namespace(self) -> dict[str, Any]:
        """The names of the cell, ``__main__``'s own."""
        return self.module.__dict__

    def warm_up(self) -> None:
        """Load everything that running a cell needs, leaving no trace in the namespace."""
        for code in WARM_UP:
            self.run_cell(code, "<warm-up>", 0, _nothing)
        forget_warm_up(self.namespace)

    def touch(self) -> None:
        """Run an empty cell: the pages that every cell touches are this process's own then."""
        self.run_cell("pass", "<warm-up>", 0, _nothing)
        forget_warm_up(self.namespace)

    def connect(self, outlet: Outlet) -> None:
        """Send displays to ``outlet``."""
        self._outlet = outlet
        sys.modules["__main__"] = self.module

    def run_cell(
        self, code: str, filename: str, line_offset: int, started: Callable[[], None]
    ) -> CellResult:
        """Run one cell; its own lines begin after ``line_offset`` lines of the notebook's cell."""
        source = "\n" * line_offset + code
        remember_source(filename, source)
        result = CellResult()
        try:
            body, last = _compile(source, filename)
            started()
            value = self._execute(body, last)
            if value is not None:
                self.namespace["_"] = value
                result.value = value
                self._show(value)
        except BaseException as error:  # noqa: BLE001 - whatever user code raises is its result
            result.error = error
            result.traceback = self.format_error(error)
        return result

    def run_call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        started: Callable[[], None],
    ) -> CellResult:
        """Call a function, awaiting what it returns if it is awaitable."""
        result = CellResult()
        started()
        try:
            result.value = call(function, args, kwargs)
        except BaseException as error:  # noqa: BLE001 - whatever user code raises is its result
            result.error = error
            result.traceback = self.format_error(error)
        return result

    def format_error(self, error: BaseException) -> list[str]:
        """Return the lines of a traceback without the frames of our own machinery."""
        return format_traceback(error)

    def _execute(self, body: types.CodeType, last: types.CodeType | None) -> Any:
        """Run a cell's statements; return the value of its last expression."""
        parts = [body] if last is None else [body, last]

        async def run_in_loop() -> Any:
            value = None
            for part in parts:
                value = eval(part, self.namespace)
                if part.co_flags & inspect.CO_COROUTINE:
                    value = await value
            return value

        if any(part.co_flags & inspect.CO_COROUTINE for part in parts):
            return run_coroutine(run_in_loop())
        values = [eval(part, self.namespace) for part in parts]
        return values[-1]

    def _show(self, value: Any) -> None:
        text = repr(value)
        message = {"type": "execute_result", "data": {"text/plain": text}, "metadata": {}}
        if self._outlet is None or not self._outlet.send(message):
            print(text)


def _compile(source: str, filename: str) -> tuple[types.CodeType, types.CodeType | None]:
    try:
        tree = ast.parse(source, filename)
    except SyntaxError as error:
        if any(line.lstrip().startswith(("%", "!")) for line in source.splitlines()):
            error.msg += "; magics and !commands need IPython in the environment"
        raise
    last: ast.Expression | None = None
    if tree.body and isinstance(tree.body[-1], ast.Expr) and not source.rstrip().endswith(";"):
        last = ast.Expression(tree.body.pop().value)  # type: ignore[attr-defined]
    # dont_inherit: a cell must not get the __future__ flags of this module.
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    body = compile(tree, filename, "exec", flags, dont_inherit=True)
    if last is None:
        return body, None
    return body, compile(last, filename, "eval", flags, dont_inherit=True)


def format_traceback(error: BaseException) -> list[str]:
    """Format an exception and its causes, leaving out our own frames at the outer end."""
    try:
        hide_machinery(error)
        entry = error.__traceback__
        while entry is not None and is_machinery(entry.tb_frame.f_code.co_filename):
            entry = entry.tb_next
        text = "".join(traceback.format_exception(type(error), error, entry))
    except Exception as failure:  # noqa: BLE001 - an exception whose own text cannot be made
        text = f"{type(error).__name__}: <its text cannot be shown: {type(failure).__name__}>"
    return text.rstrip("\n").split("\n")


def hide_machinery(error: BaseException) -> None:
    """Take our own frames out of the tracebacks of an exception and of what led to it."""
    seen = set()
    pending: list[BaseException | None] = [error]
    while pending:
        each = pending.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        frames = []
        entry = each.__traceback__
        while entry is not None:
            if not entry.tb_frame.f_code.co_filename.startswith(_OWN_FOLDER):
                frames.append(entry)
            entry = entry.tb_next
        pruned: types.TracebackType | None = None
        for entry in reversed(frames):
            pruned = types.TracebackType(pruned, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
        each.__traceback__ = pruned
        pending += [each.__cause__, each.__context__]


def is_machinery(filename: str) -> bool:
    """Return whether a frame of this file belongs to us or to what runs a cell's coroutine."""
    return filename.startswith((_OWN_FOLDER, _ASYNCIO_FOLDER))


_WAITING_CODE = (asyncio.__file__.rpartition("/")[0] + "/", selectors.__file__)
_OWN_FOLDER = __file__.rpartition("/")[0] + "/"
_ASYNCIO_FOLDER = asyncio.__file__.rpartition("/")[0] + "/"
