"""A small HTTP/1.1 client on asyncio streams, for agents behind a Unix socket or an address.

It does what talking to an agent needs and no more: keep-alive, bodies with a length or in
chunks, one deadline per request. A request that meets a connection which the agent had closed
meanwhile is sent once more on a fresh one; everything an agent offers may be repeated safely.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any

from msgspec import Struct

__all__ = ["AgentAbsent", "AgentUnreachable", "Response", "Transport"]

_IDLE_CONNECTIONS = 4
_HEAD_LIMIT_BYTES = 64 * 1024


class AgentUnreachable(ConnectionError):
    """The agent cannot be connected to, went away in the middle, or did not answer in time."""


class AgentAbsent(AgentUnreachable):
    """Nobody listens at the agent's address: the request certainly did not reach it."""


class _Stale(Exception):
    """A kept connection turned out to be closed before anything of an answer came."""


class _Wire(Struct, eq=False):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    used: bool = False


class Response:
    """An answer whose body has not been read yet; read it or close it."""

    def __init__(
        self, transport: Transport, wire: _Wire, status: int, headers: Mapping[str, str]
    ) -> None:
        self.status = status
        self.headers = headers
        self._transport = transport
        self._wire = wire

    async def read(self) -> bytes:
        """Return the whole body and give the connection back."""
        pieces = [piece async for piece in self.pieces()]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def pieces(self, silence_seconds: float | None = None) -> AsyncIterator[bytes]:
        """Yield the body as it comes.

        Parameters
        ----------
        silence_seconds
            Longest time without a byte; None to wait for ever.

        Raises
        ------
        AgentUnreachable
            When the body breaks off or stays silent for too long.
        """
        reader = self._wire.reader
        complete = False
        try:
            if self.headers.get("transfer-encoding", "").lower() == "chunked":
                while True:
                    line = await _within(reader.readline(), silence_seconds)
                    size = int(line, 16)
                    piece = await _within(reader.readexactly(size + 2), silence_seconds)
                    if size == 0:
                        break
                    yield piece[:-2]
            else:
                left = int(self.headers.get("content-length", "0"))
                while left > 0:
                    piece = await _within(reader.read(min(left, 1 << 20)), silence_seconds)
                    if not piece:
                        raise AgentUnreachable("the agent broke off its answer")
                    left -= len(piece)
                    yield piece
            complete = True
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            if isinstance(error, AgentUnreachable):
                raise
            raise AgentUnreachable(f"the agent broke off its answer: {error}") from error
        finally:
            self._transport.put_back(self._wire, keep=complete)

    def close(self) -> None:
        """Drop the connection without reading on."""
        self._transport.put_back(self._wire, keep=False)


class Transport:
    """Keeps a few connections to one agent.

    Parameters
    ----------
    unix
        Path of its Unix socket, or
    tcp
        its host and port.
    """

    def __init__(self, unix: str | None, tcp: tuple[str, int] | None) -> None:
        self._unix = unix
        self._tcp = tcp
        self._idle: list[_Wire] = []
        self._open: set[_Wire] = set()
        self._closed = False

    async def request(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: bytes,
        timeout_seconds: float,
    ) -> Response:
        """Send a request and return the answer as soon as its head is there.

        Raises
        ------
        AgentUnreachable
            When no connection could be made, it broke, or the time was over.
        """
        lines = [f"{method} {target} HTTP/1.1", "Host: pod", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        message = ("\r\n".join(lines) + "\r\n\r\n").encode() + body
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        while True:
            wire = await self._take(deadline - loop.time())
            late = loop.call_later(max(0.0, deadline - loop.time()), wire.writer.transport.abort)
            try:
                return await self._exchange(wire, message)
            except _Stale:
                self.put_back(wire, keep=False)
            except (OSError, ValueError, EOFError, asyncio.LimitOverrunError) as error:
                self.put_back(wire, keep=False)
                if loop.time() >= deadline:
                    raise AgentUnreachable(
                        f"the agent did not answer within {timeout_seconds:g} s"
                    ) from error
                raise AgentUnreachable(f"the connection to the agent broke: {error}") from error
            except BaseException:
                self.put_back(wire, keep=False)
                raise
            finally:
                late.cancel()

    def put_back(self, wire: _Wire, *, keep: bool) -> None:
        """Keep a connection for the next request, or close it."""
        if keep and not self._closed and len(self._idle) < _IDLE_CONNECTIONS:
            self._idle.append(wire)
            return
        self._open.discard(wire)
        wire.writer.close()

    def close(self) -> None:
        """Close every connection; requests under way break."""
        self._closed = True
        for wire in self._open:
            wire.writer.transport.abort()
        self._open.clear()
        self._idle.clear()

    async def _take(self, timeout_seconds: float) -> _Wire:
        while self._idle:
            wire = self._idle.pop()
            if not wire.reader.at_eof() and not wire.writer.is_closing():
                wire.used = True
                return wire
            self.put_back(wire, keep=False)
        if self._closed:
            raise AgentUnreachable("the connection to the agent was closed")
        try:
            if self._unix is not None:
                opening = asyncio.open_unix_connection(self._unix, limit=_HEAD_LIMIT_BYTES)
            else:
                assert self._tcp is not None
                opening = asyncio.open_connection(*self._tcp, limit=_HEAD_LIMIT_BYTES)
            reader, writer = await asyncio.wait_for(opening, timeout_seconds)
        except asyncio.TimeoutError as error:
            raise AgentUnreachable("the agent does not take connections") from error
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise AgentAbsent(f"the agent cannot be reached: {error}") from error
        except OSError as error:
            raise AgentUnreachable(f"the agent cannot be reached: {error}") from error
        wire = _Wire(reader, writer)
        self._open.add(wire)
        return wire

    async def _exchange(self, wire: _Wire, message: bytes) -> Response:
        try:
            wire.writer.write(message)
            await wire.writer.drain()
            head = await wire.reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            if wire.used and not error.partial:
                raise _Stale from None
            raise EOFError("it was closed") from error
        except (ConnectionResetError, BrokenPipeError):
            if wire.used:
                raise _Stale from None
            raise
        first, *rest = head.decode("latin-1").split("\r\n")
        headers = {}
        for line in rest:
            name, colon, value = line.partition(":")
            if colon:
                headers[name.strip().lower()] = value.strip()
        return Response(self, wire, int(first.split(" ", 2)[1]), headers)


async def _within(work: Coroutine[Any, Any, bytes], seconds: float | None) -> bytes:
    if seconds is None:
        return await work
    try:
        return await asyncio.wait_for(work, seconds)
    except asyncio.TimeoutError as error:
        raise AgentUnreachable(f"the agent has been silent for {seconds:g} s") from error
