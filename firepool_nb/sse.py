"""Server-sent events, decoded from bytes as they come."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

__all__ = ["Event", "EventParser"]


class Event(NamedTuple):
    """One event of a stream.

    Attributes
    ----------
    type
        The event's type; ``message`` when it names none.
    data
        Its data, decoded from JSON; None when it has none.
    number
        Its id as a number, for resuming; None for events that are not replayed.
    """

    type: str
    data: Any
    number: int | None


class EventParser:
    """Turns pieces of an event stream into events, wherever the pieces are cut.

    Comments (heartbeats) and unknown fields are skipped, as the format asks.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._type = ""
        self._data: list[bytes] = []
        self._number: int | None = None

    def feed(self, piece: bytes) -> list[Event]:
        """Take a piece of the stream and return the events that it completes."""
        events: list[Event] = []
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line:
                if self._data or self._type:
                    events.append(self._event())
                continue
            field, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if field == b"data":
                self._data.append(value)
            elif field == b"event":
                self._type = value.decode()
            elif field == b"id" and value.isdigit():
                self._number = int(value)
        return events

    def _event(self) -> Event:
        text = b"\n".join(self._data)
        event = Event(self._type or "message", json.loads(text) if text else None, self._number)
        self._type, self._data, self._number = "", [], None
        return event
