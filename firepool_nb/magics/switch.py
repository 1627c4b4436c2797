"""``%firepool on``: unmarked cells run remotely until ``%firepool off``.

The cells themselves stay plain Python, so that editors keep understanding them.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Switch"]

_LOCAL_STARTS = ("%%", "%firepool", "%load_ext", "%reload_ext", "%unload_ext", "%config", "?")


class Switch:
    """Turns the remote mode of a shell on and off."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._options = ""
        self._inside = 0
        self._is_on = False

    @property
    def is_on(self) -> bool:
        """Whether unmarked cells run remotely."""
        return self._is_on

    def on(self, options: str) -> None:
        """Send every following unmarked cell with these options."""
        self._options = options
        if self._is_on:
            return
        self._is_on = True
        self._inside = 1  # the cell that turns it on is still running
        self._shell.input_transformers_cleanup.append(self._mark)
        self._shell.events.register("pre_run_cell", self._enter)
        self._shell.events.register("post_run_cell", self._leave)

    def off(self) -> None:
        """Run cells here again."""
        if not self._is_on:
            return
        self._is_on = False
        self._shell.input_transformers_cleanup.remove(self._mark)
        self._shell.events.unregister("pre_run_cell", self._enter)
        self._shell.events.unregister("post_run_cell", self._leave)

    def _enter(self, info: Any) -> None:
        self._inside += 1

    def _leave(self, result: Any) -> None:
        self._inside = max(0, self._inside - 1)

    def _mark(self, lines: list[str]) -> list[str]:
        """Put the magic above a cell; code that a running cell transforms is left alone."""
        text = "".join(lines).lstrip()
        if self._inside or not text or text.startswith(_LOCAL_STARTS):
            return lines
        return [f"%%firepool {self._options}".rstrip() + "\n", *lines]
