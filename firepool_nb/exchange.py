"""One request and its response as HTTP/1.1 without any I/O: the core that both clients share.

`Exchange` turns a `Call` into bytes to send and the received bytes into a status, headers and
pieces of the body. The synchronous and the asynchronous connection differ only in how they move
these bytes. (`httpx` would do the same, but importing it costs a third of a second, which the
first cell of every notebook would pay.)
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, Any
from urllib.parse import quote, urlencode

import h11

from .errors import BrokerError, refused

__all__ = ["Call", "ConnectionLost", "Exchange", "Response"]

_PIECE_BYTES = 256 * 1024


class ConnectionLost(BrokerError, ConnectionError):
    """The connection broke before the response was complete."""


@dataclass(frozen=True)
class Call:
    """A request to the broker, as data.

    Attributes
    ----------
    method, path
        What to call; the path is below the broker's address and quoted already.
    query
        Parameters; those that are None are left out.
    body
        A document that is sent as JSON.
    content
        Raw bytes instead, or a file that is read from its start.
    headers
        Additional ones.
    repeatable
        Whether sending it twice does no more than sending it once, so that a broken connection
        is answered by sending it again.
    timeout_seconds
        Longest silence of the broker; None waits for ever.
    """

    method: str
    path: str
    query: Mapping[str, Any] = field(default_factory=dict)
    body: Any = None
    content: bytes | IO[bytes] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    repeatable: bool = True
    timeout_seconds: float | None = 30.0

    def target(self) -> str:
        """Return path and query as they stand in the request line."""
        query = {k: v for k, v in self.query.items() if v is not None}
        return f"{self.path}?{urlencode(query)}" if query else self.path


def segment(text: str) -> str:
    """Quote a text as one segment of a path."""
    return quote(text, safe="")


@dataclass
class Response:
    """A complete response."""

    status: int
    headers: dict[str, str]
    content: bytes = b""

    def json(self) -> Any:
        """Decode the body; None when it is empty."""
        return json.loads(self.content) if self.content else None

    def check(self) -> Response:
        """Return itself, or raise what a refusal means.

        Raises
        ------
        Refused
            For every status from 400.
        """
        if self.status < 400:
            return self
        try:
            body = self.json()
        except ValueError:
            body = None
        raise refused(self.status, body)


class Exchange:
    """One request on one connection.

    Parameters
    ----------
    connection
        The state of the connection, ready for a new cycle.
    call
        What to send.
    host, prefix, token
        ``Host`` header, path below which the broker lives, and the bearer token.
    """

    def __init__(
        self, connection: h11.Connection, call: Call, host: str, prefix: str, token: str
    ) -> None:
        self._connection = connection
        self._call = call
        self._headers = [
            ("Host", host),
            ("Authorization", f"Bearer {token}"),
            *call.headers.items(),
        ]
        self._target = prefix + call.target()
        self.status = 0
        self.headers: dict[str, str] = {}
        self.finished = False

    def to_send(self) -> Iterator[bytes]:
        """Yield the request's bytes, large files piece by piece."""
        call, headers = self._call, list(self._headers)
        content: bytes | IO[bytes] | None = call.content
        if call.body is not None:
            content = json.dumps(call.body, separators=(",", ":")).encode()
            headers.append(("Content-Type", "application/json"))
        if content is None:
            length = 0
        elif isinstance(content, bytes):
            length = len(content)
        else:
            length = content.seek(0, 2)
            content.seek(0)
        if length or call.method in ("POST", "PUT"):
            headers.append(("Content-Length", str(length)))
        head = self._connection.send(
            h11.Request(method=call.method, target=self._target, headers=headers)
        )
        if isinstance(content, bytes):
            yield (head or b"") + (self._connection.send(h11.Data(data=content)) or b"")
        else:
            yield head or b""
            while content is not None and (piece := content.read(_PIECE_BYTES)):
                yield self._connection.send(h11.Data(data=piece)) or b""
        yield self._connection.send(h11.EndOfMessage()) or b""

    def received(self, data: bytes) -> list[bytes]:
        """Take bytes from the connection (none: it was closed) and return pieces of the body.

        Raises
        ------
        ConnectionLost
            When the connection ends or breaks the protocol before the response is complete.
        """
        pieces: list[bytes] = []
        try:
            self._connection.receive_data(data)
            while not self.finished:
                event = self._connection.next_event()
                if event is h11.NEED_DATA or event is h11.PAUSED:
                    break
                if isinstance(event, h11.Response):
                    self.status = event.status_code
                    self.headers = {
                        k.decode("latin-1").lower(): v.decode("latin-1") for k, v in event.headers
                    }
                elif isinstance(event, h11.Data):
                    pieces.append(bytes(event.data))
                elif isinstance(event, (h11.EndOfMessage, h11.ConnectionClosed)):
                    self.finished = True
        except h11.ProtocolError as error:
            raise ConnectionLost(f"the broker's answer broke off: {error}") from error
        if not self.status and self.finished:
            raise ConnectionLost("the broker closed the connection without an answer")
        return pieces

    def reusable(self) -> bool:
        """Make the connection ready for another request; False when it must be closed."""
        if (
            self._connection.our_state is not h11.DONE
            or self._connection.their_state is not h11.DONE
        ):
            return False
        self._connection.start_next_cycle()
        return True
