"""HTTP/1.1 over a socket: just as much of it as one broker needs.

Keep-alive, bodies with a Content-Length, chunked answers. A request is verified from its head
before any of its body is read; the body of an upload is streamed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from firepool_podagent import wire

_HEAD_LIMIT_BYTES = 32 << 10
_CHUNK_BYTES = 256 << 10
_CLOSE_SECONDS = 2.0
_REASONS = {
    200: "OK",
    201: "Created",
    202: "Accepted",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    409: "Conflict",
    413: "Content Too Large",
    422: "Unprocessable Content",
    424: "Failed Dependency",
    500: "Internal Server Error",
}


@dataclass
class Request:
    """One request, its body not yet read.

    Attributes
    ----------
    method : str
    target : str
        The raw path with its query, as signed.
    headers : dict of str
        Names in lower case.
    parts : list of str
        The path's parts, decoded.
    query : dict of list of str
    length : int
        Bytes of the body.
    """

    method: str
    target: str
    headers: dict[str, str]
    parts: list[str]
    query: dict[str, list[str]]
    length: int
    _reader: asyncio.StreamReader
    _left: int

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body in pieces."""
        while self._left:
            piece = await self._reader.read(min(self._left, _CHUNK_BYTES))
            if not piece:
                raise ConnectionResetError("the caller went away")
            self._left -= len(piece)
            yield piece

    async def json(self) -> dict[str, Any]:
        """Return the body as a JSON object, compared with its signed digest."""
        if self.length > wire.JSON_BODY_LIMIT_BYTES:
            limit = wire.JSON_BODY_LIMIT_BYTES >> 20
            raise wire.Refused("TooLarge", f"the body has more than {limit} MiB; send a blob")
        body = b"".join([piece async for piece in self.chunks()])
        if wire.digest(body) != self.headers[wire.HEADER_DIGEST.lower()]:
            raise wire.Refused("Unauthorized", "the body is not the one that was signed")
        if not body:
            return {}
        try:
            found = json.loads(body)
        except ValueError as error:
            raise wire.Refused("BadRequest", f"the body is no JSON: {error}") from None
        if not isinstance(found, dict):
            raise wire.Refused("BadRequest", "the body is no JSON object")
        return found

    @property
    def drained(self) -> bool:
        """Whether the whole body was read."""
        return self._left == 0


class Reply:
    """The answer to one request; send it whole, or as a stream of chunks."""

    def __init__(self, writer: asyncio.StreamWriter, head_only: bool) -> None:
        self._writer = writer
        self._head_only = head_only
        self.started = False
        self.finished = False

    def whole(self, status: int, body: bytes, kind: str = "application/json") -> None:
        """Send everything."""
        self._head(status, kind, f"Content-Length: {len(body)}")
        if not self._head_only:
            self._writer.write(body)
        self.finished = True

    def json(self, status: int, value: dict[str, Any]) -> None:
        """Send a JSON object."""
        self.whole(status, json.dumps(value, separators=(",", ":")).encode())

    def begin(self, kind: str) -> None:
        """Begin a stream."""
        self._head(200, kind, "Transfer-Encoding: chunked")

    async def chunk(self, data: bytes) -> None:
        """Send a piece, at the pace of the reader."""
        if data:
            self._writer.write(b"%x\r\n%b\r\n" % (len(data), data))
            await self._writer.drain()

    def end(self) -> None:
        """End the stream."""
        self._writer.write(b"0\r\n\r\n")
        self.finished = True

    def _head(self, status: int, kind: str, length: str) -> None:
        self.started = True
        reason = _REASONS.get(status, "")
        self._writer.write(
            f"HTTP/1.1 {status} {reason}\r\nContent-Type: {kind}\r\n{length}\r\n\r\n".encode()
        )


Handler = Callable[[Request, Reply], Awaitable[None]]


class Server:
    """Serves connections; ``handle`` may raise `wire.Refused`."""

    def __init__(self, handle: Handler) -> None:
        self._handle = handle
        self._writers: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it closes."""
        task = asyncio.current_task()
        assert task is not None
        self._writers[task] = writer
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, TimeoutError):
                while await self._serve_one(reader, writer):
                    await writer.drain()
        finally:
            del self._writers[task]
            writer.close()

    async def close(self) -> None:
        """Drop every connection and wait until it is served to its end."""
        for writer in self._writers.values():
            writer.close()
        if self._writers:
            await asyncio.wait(tuple(self._writers), timeout=_CLOSE_SECONDS)

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return False
        except asyncio.LimitOverrunError:
            Reply(writer, False).json(
                400, wire.Refused("BadRequest", "the head is too long").to_json()
            )
            return False
        reply = Reply(writer, head.startswith(b"HEAD "))
        request = None
        try:
            request = _parse(head, reader)
            await self._handle(request, reply)
        except wire.Refused as refusal:
            if reply.started:
                return False
            reply.json(refusal.status, refusal.to_json())
        except (ConnectionError, asyncio.IncompleteReadError):
            return False
        except Exception as error:  # noqa: BLE001 - one request never takes the agent down
            traceback.print_exc(file=sys.stderr)
            if reply.started:
                return False
            internal = wire.Refused("Internal", f"{type(error).__name__}: {error}")
            reply.json(internal.status, internal.to_json())
        # What was not read of a refused body would be taken for the next request.
        return request is not None and request.drained and reply.finished


def _parse(head: bytes, reader: asyncio.StreamReader) -> Request:
    first, *lines = head.decode("latin-1").split("\r\n")
    try:
        method, target, version = first.split(" ")
        if not version.startswith("HTTP/1."):
            raise ValueError(version)
        headers = {}
        for line in lines:
            if line:
                name, _, value = line.partition(":")
                headers[name.strip().lower()] = value.strip()
        length = int(headers.get("content-length", "0"))
    except ValueError:
        raise wire.Refused("BadRequest", "this is no HTTP/1.1 request") from None
    if "transfer-encoding" in headers or length < 0:
        raise wire.Refused("BadRequest", "a body needs a Content-Length")
    url = urlsplit(target)
    return Request(
        method=method,
        target=target,
        headers=headers,
        parts=[unquote(part) for part in url.path.split("/") if part],
        query=parse_qs(url.query),
        length=length,
        _reader=reader,
        _left=length,
    )
