"""The base of every handler: authentication, strict decoding, errors, server-sent events.

The contract: a handler is reached only with a good token unless it says ``OPEN``; what the caller
did wrong is answered below 500; an event stream holds a bounded buffer of its own and waits for
its own reader only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from http.client import responses
from typing import Any, ClassVar, TypeVar

import msgspec
from tornado import web
from tornado.iostream import StreamClosedError

from firepool_broker import strict
from firepool_broker.api import errors, types
from firepool_broker.api.operations import Operation
from firepool_broker.api.refusals import refusal_for
from firepool_broker.api.service import BrokerService
from firepool_broker.identity.identities import Identity
from firepool_broker.identity.tokens import Authenticator
from firepool_broker.metrics import Metrics
from firepool_broker.store.blobs import BlobStore

T = TypeVar("T")

_log = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder()
_LINE_ENDS = tuple(
    (character.encode(), b"\\u%04x" % ord(character)) for character in "\x85\u2028\u2029"
)
_BUFFER_BYTES = 256 * 1024


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """What the handlers work with.

    Parameters
    ----------
    service
        The broker's loop.
    authenticator
        Tells whose token a request carries.
    blobs
        Blobs and packages.
    metrics
        What ``/metrics`` shows.
    package_limit_bytes
        Bytes of one package.
    same_machine
        Clients reach the broker through a Unix socket: they may name files.
    heartbeat_seconds
        An event stream is never silent for longer.
    """

    service: BrokerService
    authenticator: Authenticator
    blobs: BlobStore
    metrics: Metrics
    package_limit_bytes: int = 512 * 1024**2
    same_machine: bool = True
    heartbeat_seconds: float = 10.0


class Handler(web.RequestHandler):
    """Base of all handlers."""

    OPEN: ClassVar[bool] = False
    """Answers without a token."""
    OPERATIONS: ClassVar[Mapping[str, Operation]] = {}
    """What each method takes and answers."""

    parts: Parts
    identity: Identity

    def initialize(self, parts: Parts) -> None:
        """Take what the handler works with."""
        self.parts = parts
        self._stream: _EventStream | None = None

    async def prepare(self) -> None:
        """Authenticate, and refuse methods and query parameters that do not exist."""
        if not self.OPEN:
            header = self.request.headers.get("Authorization")
            identity = self.parts.authenticator.cached(header)
            if identity is None:
                identity = await self._guarded(self.parts.authenticator.authenticate, header)
            if identity is None:
                if not self._finished:
                    self.set_header("WWW-Authenticate", "Bearer")
                    self.refuse(
                        errors.Unauthorized("send 'Authorization: Bearer' with a valid token")
                    )
                return
            self.identity = identity
        operation = self.operation
        if operation is None:
            self.set_header("Allow", ", ".join(self.OPERATIONS))
            self.refuse(errors.MethodNotAllowed(f"{self.request.method} is not possible here"))
            return
        known = [each.name for each in operation.parameters if each.place == "query"]
        for name in self.request.query_arguments:
            if name not in known:
                fault = strict.unknown_name(name, known, "query parameter")
                self.refuse(errors.UnknownField(str(fault), field=name))
                return

    async def _guarded(self, call: Callable[..., Any], *arguments: object) -> Any:
        try:
            return await call(*arguments)
        except Exception as error:  # noqa: BLE001 - the one place that turns errors into answers
            self.fail(error)
            return None

    @property
    def operation(self) -> Operation | None:
        """What the request's method declares."""
        return self.OPERATIONS.get(self.request.method or "")

    # -- input ---------------------------------------------------------------------------------

    def body(self, kind: type[T]) -> T:
        """Decode the request's body; an empty one counts as ``{}``."""
        try:
            return strict.decode(self.request.body or b"{}", kind)
        except strict.NotStrict as error:
            refusal = errors.UnknownField if error.unknown else errors.Invalid
            raise refusal(str(error), field=error.field) from None

    def query(self, name: str) -> str | None:
        """Return a query parameter."""
        return self.get_query_argument(name, None)

    def query_integer(self, name: str, *, low: int, high: int, default: int) -> int:
        """Return a query parameter that is a number within bounds."""
        return self.integer(self.query(name), name, low=low, high=high, default=default)

    def integer(self, text: str | None, name: str, *, low: int, high: int, default: int) -> int:
        """Return a number that came as text."""
        if text is None:
            return default
        # int() would also take '1_000', ' 5' and digits of other scripts
        if text.isascii() and text.isdigit() and len(text) <= 18 and low <= int(text) <= high:
            return int(text)
        raise errors.Invalid(f"{name} must be a number within {low} and {high}", field=name)

    # -- output --------------------------------------------------------------------------------

    def answer(self, view: Any, status: int | None = None) -> None:
        """Answer with a JSON document."""
        if status is not None:
            self.set_status(status)
        elif self.operation is not None:
            self.set_status(self.operation.status)
        self.set_header("Content-Type", "application/json")
        self.finish(_encoder.encode(view))

    def refuse(self, refusal: errors.Refused) -> None:
        """Answer with a typed error."""
        if self._finished:
            return
        if self._headers_written:  # a stream that is under way can only end
            self.finish()
            return
        self.set_status(refusal.status)
        self.set_header("Content-Type", "application/json")
        if refusal.retry_after is not None:
            self.set_header("Retry-After", str(max(1, round(refusal.retry_after))))
        self.finish(without_nulls(refusal.view()))

    def fail(self, error: Exception) -> None:
        """Answer with whatever an exception stands for; a defect is logged and answered 500."""
        if isinstance(error, StreamClosedError):
            return  # nobody is there to be told
        refusal = refusal_for(error)
        if refusal is None:
            _log.error("%s %s failed", self.request.method, self.request.path, exc_info=error)
            refusal = errors.Refused("the broker failed; its log says why")
            refusal.status, refusal.error_class = 500, "InternalError"
        self.refuse(refusal)

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Answer what tornado itself refuses, and what a handler did not catch."""
        kind = kwargs.get("exc_info", (None, None, None))
        if isinstance(kind[1], Exception) and not isinstance(kind[1], web.HTTPError):
            self.fail(kind[1])
            return
        refusal = errors.Refused(responses.get(status_code, "refused"))
        refusal.status = status_code
        self.refuse(refusal)

    def log_exception(self, typ: Any, value: Any, tb: Any) -> None:
        """Leave logging to ``fail``: a refusal is no event worth a traceback."""

    # -- server-sent events --------------------------------------------------------------------

    def begin_events(self) -> None:
        """Set the headers of an event stream."""
        self.set_header("Content-Type", "text/event-stream")
        self.set_header("Cache-Control", "no-cache")
        self.set_header("X-Accel-Buffering", "no")  # proxies would hold small events back

    async def send_events(
        self, events: AsyncIterator[types.StreamEvent], *, at_once: bool = False
    ) -> None:
        """Send events until they end or the reader goes; an error before the first is raised.

        Parameters
        ----------
        events
            What to send.
        at_once
            Begin the answer before there is any event, for a stream that may be silent for long.
        """
        stream = self._stream = _EventStream(events)
        try:
            if not at_once and not await stream.first():
                return
            self.begin_events()
            if at_once:
                await asyncio.sleep(0)  # the source listens before the reader may act on it
                await self.flush()
            async for piece in stream.pieces(self.parts.heartbeat_seconds):
                self.write(piece)
                await self.flush()
        except StreamClosedError:
            return
        finally:
            await stream.close()

    def on_connection_close(self) -> None:
        """End the event stream when its reader goes."""
        super().on_connection_close()
        if self._stream is not None:
            self._stream.stop()

    def compute_etag(self) -> str | None:
        """Answer without an etag: what the broker says changes, and hashing it costs."""
        return None


class _EventStream:
    """Events on their way to one reader.

    Parameters
    ----------
    events
        Where they come from.
    """

    def __init__(self, events: AsyncIterator[types.StreamEvent]) -> None:
        self._events = events
        self._buffer: list[bytes] = []
        self._bytes = 0
        self._ready = asyncio.Event()
        self._room = asyncio.Event()
        self._stopped = False
        self._pump = asyncio.ensure_future(self._run())

    def stop(self) -> None:
        """End ``pieces``: the reader has gone."""
        self._stopped = True
        self._buffer.clear()
        self._ready.set()

    async def first(self) -> bool:
        """Wait for the first event; ``False`` when there is none. Raises what the source raises."""
        await self._ready.wait()
        if not self._buffer and self._pump.done():
            self._pump.result()
        return bool(self._buffer)

    async def pieces(self, heartbeat_seconds: float) -> AsyncIterator[bytes]:
        """Yield what is there, a comment when nothing came for a while."""
        while True:
            if self._buffer:
                piece = b"".join(self._buffer)
                self._buffer.clear()
                self._bytes = 0
                self._room.set()
                yield piece
            elif self._stopped:
                return
            elif self._pump.done():
                self._pump.result()
                return
            self._ready.clear()
            if self._buffer or self._stopped or self._pump.done():
                continue
            try:
                await asyncio.wait_for(self._ready.wait(), heartbeat_seconds)
            except asyncio.TimeoutError:
                yield b": heartbeat\n\n"

    async def close(self) -> None:
        """Stop asking for events."""
        self._pump.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([self._pump])
        if not self._pump.cancelled():
            self._pump.exception()  # it was raised to the handler already, or came after the end

    async def _run(self) -> None:
        try:
            async for event in self._events:
                data = encoded(event)
                self._buffer.append(data)
                self._bytes += len(data)
                self._ready.set()
                while self._bytes > _BUFFER_BYTES:
                    self._room.clear()
                    await self._room.wait()
        finally:
            closing = getattr(self._events, "aclose", None)
            if closing is not None:
                await closing()
            self._ready.set()


def encoded(event: types.StreamEvent) -> bytes:
    """Return an event as it goes over the wire."""
    number = b"" if event.number is None else b"id: %d\n" % event.number
    data = event.data.strip().replace(b"\n", b" ")
    # many clients split a stream into lines as Python does, not as the standard says; in JSON
    # these characters stand in strings only, so that their escapes mean the same
    for character, escape in _LINE_ENDS:
        if character in data:
            data = data.replace(character, escape)
    return b"%sevent: %s\ndata: %s\n\n" % (number, event.event.encode(), data)


def without_nulls(view: types.ErrorView) -> bytes:
    """Encode a refusal; what it does not say is left out."""
    detail = {
        key: value for key, value in msgspec.to_builtins(view.error).items() if value is not None
    }
    return _encoder.encode({"error": detail})
