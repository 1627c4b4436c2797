"""Publish a job's output where it was asked for: in the notebook's cell, in a terminal, as text.

Every sink takes the numbered messages of an output stream in order. `ShellOutput` re-publishes
them through the shell's own streams, display publisher and display hook, so that ``%%capture``,
front ends and nbclient treat them as any cell's.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

__all__ = ["CollectedOutput", "Output", "ShellOutput", "TextOutput", "note_bundle"]

_FLUSH_SECONDS = 0.05
_ANSI = re.compile(r"\x1b\[[0-9;]*m")

# Jupyter servers drop what a kernel sends faster than about 1 MB/s over three seconds.
_RATE_BYTES_PER_SECOND = 800_000
_BURST_BYTES = 2_000_000


class Output:
    """Base of sinks: takes messages and keeps the ones that the job's end needs.

    Attributes
    ----------
    raised
        The last ``error`` message, which is shown by raising it.
    has_result
        Whether the value of a last expression was shown.
    hidden_topics
        Topics of notes that are not shown: ``pool`` is the line about the default pool.
    """

    def __init__(self) -> None:
        self.raised: dict[str, Any] | None = None
        self.has_result = False
        self.is_empty = True
        self.hidden_topics: frozenset[str] = frozenset()

    def message(self, kind: str, message: dict[str, Any]) -> None:
        """Take one message of an output stream."""
        if message.get("topic") in self.hidden_topics:
            return
        handler: Callable[[dict[str, Any]], None] | None = getattr(self, f"on_{kind}", None)
        if handler is not None:
            handler(message)

    def on_error(self, message: dict[str, Any]) -> None:
        """Remember the exception that ended the code."""
        self.raised = message


class TextOutput(Output):
    """Writes text to two streams, displays as their text.

    Parameters
    ----------
    stdout, stderr
        Where the job's streams go; notes go to stderr.
    show_errors
        Whether the traceback is written too, for callers that do not raise it.
    """

    def __init__(self, stdout: TextIO, stderr: TextIO, show_errors: bool = False) -> None:
        super().__init__()
        self._streams = {"stdout": stdout, "stderr": stderr}
        self._show_errors = show_errors

    def on_stream(self, message: dict[str, Any]) -> None:
        """Write text as it comes."""
        self.is_empty = False
        stream = self._streams[message["name"]]
        stream.write(message["text"])
        stream.flush()

    def on_display_data(self, message: dict[str, Any]) -> None:
        """Write the display's text."""
        text = (message.get("data") or {}).get("text/plain")
        if text:
            self.on_stream({"name": "stdout", "text": f"{text}\n"})

    on_update_display_data = on_display_data

    def on_execute_result(self, message: dict[str, Any]) -> None:
        """Write the value's text."""
        self.has_result = True
        self.on_display_data(message)

    def on_note(self, message: dict[str, Any]) -> None:
        """Write a line for people."""
        self.on_stream({"name": "stderr", "text": f"{message['text']}\n"})

    def on_divider(self, message: dict[str, Any]) -> None:
        """Write what separates two attempts."""
        self.on_stream({"name": "stderr", "text": f"--- {message['text']} ---\n"})

    def on_error(self, message: dict[str, Any]) -> None:
        """Remember the exception, and write its traceback when asked to."""
        super().on_error(message)
        if self._show_errors:
            lines = message.get("traceback") or [f"{message['ename']}: {message['evalue']}"]
            text = "\n".join(lines)
            if not self._streams["stderr"].isatty():
                text = _ANSI.sub("", text)
            self.on_stream({"name": "stderr", "text": f"{text}\n"})


class CollectedOutput(Output):
    """Keeps what was printed, for programs."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self.displays: list[dict[str, Any]] = []

    @property
    def stdout(self) -> str:
        """Everything written to standard output."""
        return "".join(self.texts["stdout"])

    @property
    def stderr(self) -> str:
        """Everything written to standard error."""
        return "".join(self.texts["stderr"])

    def on_stream(self, message: dict[str, Any]) -> None:
        """Keep text."""
        self.texts[message["name"]].append(message["text"])

    def on_display_data(self, message: dict[str, Any]) -> None:
        """Keep a display's bundle."""
        self.displays.append(message.get("data") or {})

    def on_execute_result(self, message: dict[str, Any]) -> None:
        """Keep the value's bundle."""
        self.has_result = True
        self.on_display_data(message)

    def on_clear_output(self, message: dict[str, Any]) -> None:
        """Forget what a front end would not show any more."""
        self.texts = {"stdout": [], "stderr": []}
        self.displays = []


class ShellOutput(Output):
    """Re-publishes messages in an IPython shell.

    Parameters
    ----------
    shell
        The shell whose current cell shows them.
    run
        A word that is different for every run: display ids are made unique with it, so that two
        runs of a cell never update each other's output.
    before_first
        Called once before the first visible message.
    """

    def __init__(
        self, shell: Any, run: str, before_first: Callable[[], None] | None = None
    ) -> None:
        super().__init__()
        self._shell = shell
        self._run = run
        self._before_first = before_first
        self._flushed_at = 0.0
        self._unflushed = False
        self._pace = _Pace() if _server_limits(shell) else None

    def _visible(self) -> None:
        self.is_empty = False
        if self._before_first is not None:
            before, self._before_first = self._before_first, None
            before()

    def on_stream(self, message: dict[str, Any]) -> None:
        """Write text; the first piece is flushed at once, the rest every 50 ms."""
        self._visible()
        text = message["text"]
        if self._pace is not None:
            self._pace.wait(len(text))
        stream = sys.stdout if message["name"] == "stdout" else sys.stderr
        stream.write(text)
        now = time.monotonic()
        if now - self._flushed_at >= _FLUSH_SECONDS:
            stream.flush()
            self._flushed_at = time.monotonic()

    def _bundle(self, message: dict[str, Any], update: bool) -> None:
        self._visible()
        sys.stdout.flush()  # text written before a display comes before it
        sys.stderr.flush()
        transient = dict(message.get("transient") or {})
        if "display_id" in transient:
            transient["display_id"] = f"{transient['display_id']}-{self._run}"
        data = message.get("data") or {}
        if self._pace is not None:
            self._pace.wait(sum(len(v) for v in data.values() if isinstance(v, str)))
        self._shell.display_pub.publish(
            data=data,
            metadata=message.get("metadata") or {},
            transient=transient,
            update=update,
        )

    def on_display_data(self, message: dict[str, Any]) -> None:
        """Show a display."""
        self._bundle(message, update=False)

    def on_update_display_data(self, message: dict[str, Any]) -> None:
        """Update a display of this run."""
        self._bundle(message, update=True)

    def on_clear_output(self, message: dict[str, Any]) -> None:
        """Clear the cell's output, at once or before the next one."""
        self._visible()
        sys.stdout.flush()
        sys.stderr.flush()
        self._shell.display_pub.clear_output(bool(message.get("wait")))

    def on_execute_result(self, message: dict[str, Any]) -> None:
        """Show the value of the last expression as the cell's result."""
        self._visible()
        self.has_result = True
        sys.stdout.flush()
        sys.stderr.flush()
        data, metadata = message.get("data") or {}, message.get("metadata") or {}
        captured = getattr(sys.displayhook, "outputs", None)  # inside %%capture
        if isinstance(captured, list):
            captured.append({"data": data, "metadata": metadata})
            return
        hook = self._shell.displayhook
        hook.start_displayhook()
        hook.write_output_prompt()
        hook.write_format_data(data, metadata)
        hook.finish_displayhook()

    def on_note(self, message: dict[str, Any]) -> None:
        """Show a line for people."""
        self.note(message["text"], message.get("level", "info"))

    def on_divider(self, message: dict[str, Any]) -> None:
        """Show what separates two attempts."""
        self.note(message["text"])

    def note(self, text: str, level: str = "info") -> None:
        """Show a line of ours."""
        self._bundle({"data": note_bundle(text, level)}, update=False)


def note_bundle(text: str, level: str = "info") -> dict[str, str]:
    """Make the bundle for a line of ours, quiet enough not to be taken for output."""
    from html import escape

    colour = "var(--jp-warn-color0, #b45309)" if level == "warning" else "#6b7280"
    return {
        "text/plain": text,
        "text/html": f'<div style="color:{colour};font-size:90%">{escape(text)}</div>',
    }


class _Pace:
    """Keeps below the rate at which a Jupyter server starts to drop output."""

    def __init__(self) -> None:
        self._room = float(_BURST_BYTES)
        self._at = time.monotonic()

    def wait(self, size_bytes: int) -> None:
        now = time.monotonic()
        self._room = min(_BURST_BYTES, self._room + (now - self._at) * _RATE_BYTES_PER_SECOND)
        self._at = now
        self._room -= size_bytes
        if self._room < 0:
            import threading

            threading.Event().wait(-self._room / _RATE_BYTES_PER_SECOND)


def _server_limits(shell: Any) -> bool:
    """Tell whether a Jupyter server stands between this kernel and the person."""
    import os

    return getattr(shell, "kernel", None) is not None and "JPY_PARENT_PID" in os.environ
