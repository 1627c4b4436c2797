"""Connections that move an `Exchange`'s bytes: one that blocks, one for event loops.

The blocking one waits with ``select`` for its socket and, when it is given one, for a *wake* file
descriptor too. That is what makes ■ immediate: the waiting cell is woken, nothing is torn down in
the middle of a read, and what arrived is never lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import h11

from .connection import Endpoint
from .errors import BrokerUnreachable
from .exchange import Call, ConnectionLost, Exchange, Response

__all__ = ["AsyncConnection", "BlockingConnection", "BrokerSilent"]

_READ_BYTES = 256 * 1024
_CONNECT_SECONDS = 10.0


class BrokerSilent(ConnectionLost, TimeoutError):
    """The broker did not answer in time."""


class BlockingConnection:
    """A connection for synchronous code; one request at a time.

    Raises
    ------
    BrokerUnreachable
        When nobody listens there.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._http = h11.Connection(h11.CLIENT)
        self._socket = _connect(endpoint)

    def close(self) -> None:
        """Close the socket; safe to call twice."""
        self._socket.close()

    def abort(self) -> None:
        """Wake a thread that waits on this connection and end its wait."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def is_stale(self) -> bool:
        """Tell whether the other side closed the connection while it was idle."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def request(self, call: Call, token: str) -> Response:
        """Send a request and wait for its whole response.

        Raises
        ------
        ConnectionLost
            When the connection breaks.
        BrokerSilent
            When nothing comes within the call's timeout.
        """
        exchange = self.start(call, token)
        pieces: list[bytes] = []
        while not exchange.finished:
            pieces += self.receive(exchange, call.timeout_seconds) or []
        return Response(exchange.status, exchange.headers, b"".join(pieces))

    def start(self, call: Call, token: str) -> Exchange:
        """Send a request; its response is read with `receive`."""
        endpoint = self.endpoint
        exchange = Exchange(self._http, call, endpoint.host, endpoint.prefix, token)
        self._socket.settimeout(call.timeout_seconds)
        try:
            for piece in exchange.to_send():
                if piece:
                    self._socket.sendall(piece)
        except OSError as error:
            raise ConnectionLost(f"the broker did not take the request: {error}") from error
        return exchange

    def receive(
        self, exchange: Exchange, timeout_seconds: float | None, wake: int | None = None
    ) -> list[bytes] | None:
        """Wait for bytes of the response.

        Parameters
        ----------
        timeout_seconds
            Longest wait; None waits for ever.
        wake
            A file descriptor that also ends the wait.

        Returns
        -------
        list of bytes or None
            Pieces of the body; None when the wake descriptor ended the wait.

        Raises
        ------
        ConnectionLost, BrokerSilent
        """
        waiting: list[Any] = [self._socket] if wake is None else [self._socket, wake]
        try:
            if not self._pending():
                ready, _, _ = select.select(waiting, [], [], timeout_seconds)
                if not ready:
                    raise BrokerSilent(f"the broker was silent for {timeout_seconds:g} s")
                if self._socket not in ready:
                    return None
            data = self._socket.recv(_READ_BYTES)
        except (OSError, ValueError) as error:
            if isinstance(error, BrokerSilent):
                raise
            raise ConnectionLost(f"the connection to the broker broke: {error}") from error
        return exchange.received(data)

    def _pending(self) -> bool:
        """Tell whether bytes already stand in a TLS buffer, where select does not see them."""
        pending = getattr(self._socket, "pending", None)
        return pending is not None and bool(pending())


def _connect(endpoint: Endpoint) -> socket.socket:
    try:
        if endpoint.socket is not None:
            plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            plain.settimeout(_CONNECT_SECONDS)
            try:
                plain.connect(endpoint.socket)
            except BaseException:
                plain.close()
                raise
            return plain
        plain = socket.create_connection((endpoint.host, endpoint.port), _CONNECT_SECONDS)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not endpoint.secure:
            return plain
        import ssl

        return ssl.create_default_context().wrap_socket(plain, server_hostname=endpoint.host)
    except OSError as error:
        raise BrokerUnreachable(f"no broker answers at {endpoint.describe()}: {error}") from error


class AsyncConnection:
    """A connection for an event loop; one request at a time."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._http = h11.Connection(h11.CLIENT)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def open(self) -> None:
        """Connect.

        Raises
        ------
        BrokerUnreachable
            When nobody listens there.
        """
        endpoint = self.endpoint
        try:
            if endpoint.socket is not None:
                opening: Any = asyncio.open_unix_connection(endpoint.socket)
            else:
                context: Any = None
                if endpoint.secure:
                    import ssl

                    context = ssl.create_default_context()
                opening = asyncio.open_connection(endpoint.host, endpoint.port, ssl=context)
            self._reader, self._writer = await asyncio.wait_for(opening, _CONNECT_SECONDS)
        except (OSError, asyncio.TimeoutError) as error:
            raise BrokerUnreachable(
                f"no broker answers at {endpoint.describe()}: {error}"
            ) from error

    async def close(self) -> None:
        """Close the connection; safe to call twice."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def is_stale(self) -> bool:
        """Tell whether the other side closed the connection while it was idle."""
        return self._reader is None or self._reader.at_eof()

    async def request(self, call: Call, token: str) -> Response:
        """Send a request and wait for its whole response.

        Raises
        ------
        ConnectionLost, BrokerSilent
        """
        exchange = await self.start(call, token)
        pieces = [piece async for piece in self.pieces(exchange, call.timeout_seconds)]
        return Response(exchange.status, exchange.headers, b"".join(pieces))

    async def start(self, call: Call, token: str) -> Exchange:
        """Send a request; its response is read with `pieces`."""
        assert self._writer is not None
        endpoint = self.endpoint
        exchange = Exchange(self._http, call, endpoint.host, endpoint.prefix, token)
        try:
            for piece in exchange.to_send():
                if piece:
                    self._writer.write(piece)
                    await self._writer.drain()
        except OSError as error:
            raise ConnectionLost(f"the broker did not take the request: {error}") from error
        return exchange

    async def pieces(
        self, exchange: Exchange, timeout_seconds: float | None
    ) -> AsyncIterator[bytes]:
        """Yield pieces of the body as they come.

        Raises
        ------
        ConnectionLost, BrokerSilent
        """
        assert self._reader is not None
        while not exchange.finished:
            try:
                data = await asyncio.wait_for(self._reader.read(_READ_BYTES), timeout_seconds)
            except asyncio.TimeoutError as error:
                raise BrokerSilent(f"the broker was silent for {timeout_seconds:g} s") from error
            except OSError as error:
                raise ConnectionLost(f"the connection to the broker broke: {error}") from error
            for piece in exchange.received(data):
                yield piece


def pauses(total_seconds: float) -> Iterator[float]:
    """Yield pauses between attempts to reach a broker, until their time is over."""
    deadline, pause = time.monotonic() + total_seconds, 0.05
    while time.monotonic() + pause < deadline:
        yield pause
        pause = min(pause * 2, 2.0)
