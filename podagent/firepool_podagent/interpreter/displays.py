"""Displays and values of cells in IPython, on their way to the notebook."""

# IPython's annotations differ from version to version, and most of its functions have none.
# mypy: disable-error-code="no-untyped-call, attr-defined, arg-type, union-attr, misc"

from __future__ import annotations

import base64
import json
import sys
from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.formatters import DisplayFormatter

from firepool_podagent.interpreter.streams import Outlet

_WIDGET = "application/vnd.jupyter.widget-view+json"


class Publisher(DisplayPublisher):
    """Sends displays to the agent."""

    outlet: Outlet | None = None
    _widget_note = False

    def publish(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        source: Any = None,
        *,
        transient: dict[str, Any] | None = None,
        update: bool = False,
        **kwargs: Any,
    ) -> None:
        """Send a display or an update of one; print its text where nobody listens."""
        message = {
            "type": "update_display_data" if update else "display_data",
            "data": self.portable(data),
            "metadata": jsonable(metadata or {}),
            "transient": jsonable(transient or {}),
        }
        if (self.outlet is None or not self.outlet.send(message)) and "text/plain" in data:
            print(data["text/plain"])

    def portable(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return a bundle as JSON; a widget, which needs a kernel, becomes its text."""
        if _WIDGET in data:
            data = {kind: value for kind, value in data.items() if kind != _WIDGET}
            if not self._widget_note:
                self._widget_note = True
                self.shell.tell("widgets show as text in a remote cell")
        return {kind: jsonable(value) for kind, value in data.items()}

    def clear_output(self, wait: bool = False) -> None:
        """Clear the cell's output, with ``wait`` only once something follows."""
        if self.outlet is not None:
            self.outlet.send({"type": "clear_output", "wait": bool(wait)})


class Hook(DisplayHook):
    """Sends the value of a cell's last expression."""

    def quiet(self) -> bool:
        """Tell whether the cell ends with a semicolon; there is no history to look it up in."""
        return bool(self.semicolon_at_end_of_expression(self.shell.cell))

    def write_output_prompt(self) -> None:
        """Show no prompt."""

    def write_format_data(
        self, format_dict: dict[str, Any], md_dict: dict[str, Any] | None = None
    ) -> None:
        """Send the value of the cell."""
        publisher = self.shell.display_pub
        message = {
            "type": "execute_result",
            "data": publisher.portable(format_dict),
            "metadata": jsonable(md_dict or {}),
        }
        if publisher.outlet is None or not publisher.outlet.send(message):
            print(format_dict.get("text/plain", ""))

    def finish_displayhook(self) -> None:
        """Write no separator."""
        self._is_active = False


class Formatter(DisplayFormatter):
    """Shows figures as pictures, and remembers them so that none is shown again at the end."""

    def format(self, obj: Any, include: Any = None, exclude: Any = None) -> Any:
        """Return an object's representations."""
        module = sys.modules.get("matplotlib.figure")
        if module is None or not isinstance(obj, module.Figure):
            return super().format(obj, include=include, exclude=exclude)
        self._draw_figures(module.Figure)
        formatted = super().format(obj, include=include, exclude=exclude)
        self.parent.shown_figures.append(obj)
        return formatted

    def _draw_figures(self, figure: type) -> None:
        """Do what importing pyplot does; a figure that came from the notebook needs no pyplot."""
        try:
            if any(figure in each.type_printers for each in self.formatters.values()):
                return
            from IPython.core.pylabtools import select_figure_formats
            from matplotlib_inline.config import InlineBackend
        except ImportError:  # no inline backend in this environment: its text, as before
            return
        backend = InlineBackend.instance(parent=self.parent)
        select_figure_formats(self.parent, backend.figure_formats, **backend.print_figure_kwargs)


def jsonable(value: Any) -> Any:
    """Return a display's data as JSON can carry it: bytes as base64, the rest by its text."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        if isinstance(value, dict):
            return {str(key): jsonable(each) for key, each in value.items()}
        if isinstance(value, (list, tuple, set)):
            return [jsonable(each) for each in value]
        return repr(value)
    return value
