"""What a stopped job printed before it stopped, and nobody wants to wait for.

A job that floods its output is ahead of what a notebook can show. When ■ has stopped it, the rest
of the text is passed over but for its end; all of it stays at the broker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Backlog"]

_LOOK_EVERY_SECONDS = 0.5
_WORTH_MESSAGES = 40
_SHOWN_AT_THE_END_MESSAGES = 10


class Backlog:
    """Decides which text of a stopped job is shown.

    Parameters
    ----------
    ended
        Asks the broker: the number of messages of the job once it has ended, else None.

    Attributes
    ----------
    passed_over_characters
        How much text was not shown.
    """

    def __init__(self, ended: Callable[[], int | None]) -> None:
        self._ended = ended
        self._look_at: float | None = None
        self._until = 0
        self.passed_over_characters = 0

    def pressed(self, now: float) -> None:
        """Note that the person asked the job to stop."""
        if self._look_at is None:
            self._look_at = now + _LOOK_EVERY_SECONDS

    def passes_over(self, kind: str, message: Mapping[str, Any], now: float) -> bool:
        """Tell whether a message is not shown.

        Parameters
        ----------
        kind
            Its type: only ``stream`` messages are passed over.
        message
            With its number ``n``.
        now
            Monotonic seconds.
        """
        number = int(message.get("n", 0))
        if self._look_at is not None and now >= self._look_at and not self._until:
            self._look_at = now + _LOOK_EVERY_SECONDS
            total = self._ended()
            if total is not None and total - number > _WORTH_MESSAGES:
                self._until = total - _SHOWN_AT_THE_END_MESSAGES
        if kind != "stream" or number >= self._until:
            return False
        self.passed_over_characters += len(message["text"])
        return True

    def note(self, job_id: str) -> str | None:
        """Return the line that says what was passed over, once."""
        count, self.passed_over_characters = self.passed_over_characters, 0
        if not count:
            return None
        return (
            f"{count:,} characters that were printed before the stop are not shown; "
            f"%firepool logs {job_id} shows all"
        )
