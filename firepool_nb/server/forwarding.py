"""One request on its way to the broker and back.

- Nobody is heard before Jupyter has authenticated and authorized them, not even their body.
- Headers pass by allow-list, in both directions: Jupyter's cookies and tokens never reach the
  broker, the broker's token never reaches the browser, and hop-by-hop headers end here. The
  headers that pass files by path stay out too: they are for programs on the broker's machine.
- Small bodies are kept, so that a request can be sent again to a broker that was replaced
  meanwhile; others are streamed with back-pressure. Answers are always streamed.
- A client that goes away ends its exchange with the broker, and so does the server's stop.
"""

from __future__ import annotations

import asyncio
import collections
import http.client
import json
import re
from collections.abc import AsyncIterator, Awaitable
from typing import Any, cast
from urllib.parse import unquote

import httpx
from jupyter_core.utils import ensure_async
from jupyter_server.auth.decorator import authorized
from jupyter_server.auth.utils import HTTP_METHOD_TO_AUTH_ACTION
from jupyter_server.base.handlers import APIHandler
from tornado import iostream, web

from firepool_nb.server.upstream import (
    Broker,
    BrokerTimeout,
    BrokerUnreachable,
    Upstream,
    UpstreamError,
)

__all__ = ["AUTH_RESOURCE", "FirepoolHandler", "ForwardHandler"]

AUTH_RESOURCE = "firepool"

_ANSWER_TIMEOUT_SECONDS = 30.0
_KEPT_BODY_BYTES = 1 << 20
_BODY_LIMIT_BYTES = 4 << 30  # the broker has limits of its own, and names them
_CHUNKS_AHEAD = 4

_REQUEST_HEADERS = (
    *("Accept", "Content-Encoding", "Content-Type", "Idempotency-Key", "If-None-Match"),
    *("Last-Event-ID", "Range"),
)
_RESPONSE_HEADERS = (
    *("Accept-Ranges", "Cache-Control", "Content-Encoding", "Content-Length", "Content-Range"),
    *("Content-Type", "ETag", "Last-Modified", "Retry-After"),
)
#: Query arguments that are Jupyter's own; the bare number is how JupyterLab keeps caches away.
_JUPYTER_ARGUMENTS = re.compile(r"(token|_xsrf|no_track_activity)(=.*)?|\d+")
#: Requests that bring work: they start the machine's own broker when none runs.
_STARTING = re.compile(r"(POST|PUT) v1/(jobs|sessions|packages/[^/]+|blobs/[^/]+)")


class FirepoolHandler(APIHandler):
    """What the routes have in common."""

    auth_resource = AUTH_RESOURCE

    @property
    def broker(self) -> Broker:
        """The broker of this server's user."""
        return cast(Broker, self.settings["firepool_broker"])

    async def prepare(self) -> None:  # type: ignore[override]  # as in Jupyter's APIHandler
        """Let reading (a panel that refreshes itself) not count as activity of the user."""
        self._track_activity = self.request.method not in {"GET", "HEAD"}
        await super().prepare()

    def reply(self, document: dict[str, Any], status: int = 200) -> None:
        """Answer with JSON."""
        self.set_status(status)
        self.set_header("Cache-Control", "no-store")
        self.finish(json.dumps(document), set_content_type="application/json")

    def reply_error(self, error: UpstreamError) -> None:
        """Answer with a typed error, in the form of the broker's own."""
        body = {"class": error.error_class, "message": str(error)}
        self.reply({"error": body}, error.status)

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Answer what was raised in the same form; ``message`` is where Jupyter has it too."""
        error = kwargs.get("exc_info", (None, None, None))[1]
        message = getattr(error, "log_message", None) or http.client.responses.get(status_code, "")
        name = {401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 405: "MethodNotAllowed"}
        error_class = name.get(status_code, "BadRequest" if status_code < 500 else "ServerError")
        document = {"error": {"class": error_class, "message": message}, "message": message}
        self.finish(json.dumps(document), set_content_type="application/json")

    def explain(self, upstream: Upstream | None, error: BaseException) -> UpstreamError:
        """Turn a failed exchange into an error that says what to do, and forget the address."""
        if isinstance(error, asyncio.TimeoutError) or upstream is None:
            fix = "ask its operator" if self.broker.kind == "remote" else "try `firepool doctor`"
            return BrokerTimeout(f"the broker does not answer in time; {fix}")
        self.broker.forget(upstream)
        cause = str(error) or type(error).__name__
        repeatable = self.request.method in {"GET", "HEAD"} or isinstance(
            error, (httpx.ConnectError, httpx.ConnectTimeout)
        )
        if upstream.kind == "remote":
            return BrokerUnreachable(
                f"the broker at {upstream.url} cannot be reached ({cause}); check FIREPOOL_URL in"
                " the Jupyter server's environment and that the broker is up"
            )
        return BrokerUnreachable(
            f"the broker of this machine has gone ({cause}); the next cell or the panel's Start"
            " button starts a new one",
            repeatable=repeatable,
        )

    def refused(self, upstream: Upstream) -> UpstreamError:
        """Describe a broker that does not accept the server's token."""
        if upstream.kind == "remote":
            return BrokerUnreachable(
                f"the broker at {upstream.url} refuses the token; set FIREPOOL_TOKEN in the"
                " Jupyter server's environment to a valid one and restart the server"
            )
        return BrokerUnreachable(
            "the broker of this machine was replaced during the request; send it again",
            repeatable=True,
        )


class _Body:
    """A request's body on its way upstream, a few chunks ahead of the reader at most."""

    def __init__(self) -> None:
        self._chunks: collections.deque[bytes] = collections.deque()
        self._changed = asyncio.Event()
        self._complete = False
        self._unread = False

    async def put(self, chunk: bytes) -> None:
        """Hand on one chunk; returns when there is room for the next."""
        self._chunks.append(chunk)
        self._changed.set()
        while len(self._chunks) >= _CHUNKS_AHEAD and not self._unread:
            self._changed.clear()
            await self._changed.wait()

    def complete(self) -> None:
        """Say that nothing follows."""
        self._complete = True
        self._changed.set()

    def drop(self) -> None:
        """Say that nobody reads any more; what still comes is thrown away."""
        self._unread = True
        self._chunks.clear()
        self._changed.set()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            while self._chunks:
                yield self._chunks.popleft()
                self._changed.set()
            if self._complete:
                return
            self._changed.clear()
            await self._changed.wait()


@web.stream_request_body
class ForwardHandler(FirepoolHandler):
    """Forwards one request to the broker and streams the answer back."""

    _exchange: asyncio.Task[httpx.Response] | None = None
    _work: asyncio.Task[None] | None = None
    _body: _Body | None = None
    _kept: bytearray
    _upstream: Upstream | None = None

    async def prepare(self) -> None:  # type: ignore[override]  # as in Jupyter's APIHandler
        """Check who asks before anything of their body is taken, then begin with a long one."""
        await super().prepare()
        if self._finished or self.request.method == "OPTIONS":
            return
        await self._check_authorized()
        self._target()
        self._kept = bytearray()
        length = self.request.headers.get("Content-Length")
        chunked = "Transfer-Encoding" in self.request.headers
        if chunked or (length is not None and int(length) > _KEPT_BODY_BYTES):
            self.request.connection.set_max_body_size(_BODY_LIMIT_BYTES)  # type: ignore[union-attr]
            self._body = _Body()
            self._exchange = self._task(self._open(self._body, length))
            self._exchange.add_done_callback(self._opened)

    async def data_received(self, chunk: bytes) -> None:
        """Take a piece of the body."""
        if self._body is None:
            self._kept += chunk
        else:
            await self._body.put(chunk)

    def on_connection_close(self) -> None:
        """Give the broker up when the client has gone."""
        super().on_connection_close()
        for task in (self._work, self._exchange):
            if task is not None:
                task.cancel()

    @web.authenticated
    @authorized
    async def get(self, _path: str) -> None:
        """Forward a reading."""
        await self._forward()

    @web.authenticated
    @authorized
    async def head(self, _path: str) -> None:
        """Forward a question whether something is there."""
        await self._forward()

    @web.authenticated
    @authorized
    async def post(self, _path: str) -> None:
        """Forward an action."""
        await self._forward()

    @web.authenticated
    @authorized
    async def put(self, _path: str) -> None:
        """Forward a delivery."""
        await self._forward()

    @web.authenticated
    @authorized
    async def delete(self, _path: str) -> None:
        """Forward a removal."""
        await self._forward()

    def finish(self, *args: Any, **kwargs: Any) -> Any:
        """End the answer with the content type that it has; Jupyter's default is JSON."""
        kwargs.setdefault(
            "set_content_type", self._headers.get("Content-Type") or "application/json"
        )
        return super().finish(*args, **kwargs)

    async def _check_authorized(self) -> None:
        user = self.current_user
        action = HTTP_METHOD_TO_AUTH_ACTION.get(self.request.method or "")
        if user is None or action is None:
            raise web.HTTPError(403 if user is None else 405)
        if not await ensure_async(
            self.authorizer.is_authorized(self, user, action, self.auth_resource)
        ):
            raise web.HTTPError(403, f"you may not {action} the resource {self.auth_resource}")

    def _path(self) -> str:
        return self.request.path[len(self.base_url) :].split("firepool/", 1)[1]

    def _target(self) -> str:
        """Return path and query for the broker, exactly as they came, less Jupyter's arguments."""
        path = self._path()
        if any(unquote(part) in {".", ".."} for part in path.split("/")):
            raise web.HTTPError(400, "the path must not contain . or ..")
        arguments = [
            argument
            for argument in self.request.query.split("&")
            if argument and not _JUPYTER_ARGUMENTS.fullmatch(argument)
        ]
        return f"/{path}" + (f"?{'&'.join(arguments)}" if arguments else "")

    async def _forward(self) -> None:
        self._work = self._task(self._relay())
        try:
            await self._work
        except UpstreamError as error:
            if self._headers_written:
                self._break_off()
            else:
                self.clear()
                self.reply_error(error)
        except (asyncio.CancelledError, iostream.StreamClosedError):
            self._break_off()

    async def _relay(self) -> None:
        response = await self._answer()
        try:
            self.set_status(response.status_code, response.reason_phrase or None)
            self.clear_header("Content-Type")
            for name in _RESPONSE_HEADERS:
                if name in response.headers:
                    self.set_header(name, response.headers[name])
            if response.headers.get("Content-Type", "").startswith("text/event-stream"):
                self.set_header("Cache-Control", "no-store")
                self.set_header("X-Accel-Buffering", "no")  # proxies before Jupyter buffer else
                await self.flush()
            async for chunk in response.aiter_raw():
                self.write(chunk)
                await self.flush()
        except httpx.HTTPError as error:
            raise BrokerUnreachable(f"the broker broke its answer off ({error})") from error
        finally:
            await response.aclose()
        self.finish()

    async def _answer(self) -> httpx.Response:
        if self._exchange is not None:
            assert self._body is not None
            self._body.complete()
            return await self._accepted(await self._in_time(self._exchange))
        try:
            response = await self._in_time(self._open(bytes(self._kept), None))
            return await self._accepted(response)
        except BrokerUnreachable as error:
            if not error.repeatable or self.broker.kind == "remote":
                raise
        # Nothing was carried out, and there may be a successor by now
        response = await self._in_time(self._open(bytes(self._kept), None))
        return await self._accepted(response)

    async def _accepted(self, response: httpx.Response) -> httpx.Response:
        """Keep a refusal of the server's own token from looking like one of the user's."""
        if response.status_code != 401 or self._upstream is None:
            return response
        await response.aclose()
        self.broker.forget(self._upstream)
        raise self.refused(self._upstream)

    async def _open(self, body: bytes | _Body, length: str | None) -> httpx.Response:
        """Send the request; returns when the answer's headers are there."""
        target = self._target()
        starting = _STARTING.fullmatch(f"{self.request.method} {self._path()}")
        upstream = await self.broker.locate(start=starting is not None)
        self._upstream = upstream
        client = self.broker.client(upstream)
        headers = {
            name: self.request.headers[name]
            for name in _REQUEST_HEADERS
            if name in self.request.headers
        }
        headers["Accept-Encoding"] = "identity"
        if length is not None:
            headers["Content-Length"] = length
        request = client.build_request(
            self.request.method or "GET",
            upstream.url + target,
            headers=headers,
            content=body if isinstance(body, _Body) else (body or None),
        )
        try:
            return await client.send(request, stream=True)
        except httpx.HTTPError as error:
            raise self.explain(upstream, error) from error

    async def _in_time(self, answer: Awaitable[httpx.Response]) -> httpx.Response:
        try:
            return await asyncio.wait_for(answer, _ANSWER_TIMEOUT_SECONDS)
        except asyncio.TimeoutError as error:
            raise self.explain(self._upstream, error) from error

    def _opened(self, task: asyncio.Task[httpx.Response]) -> None:
        assert self._body is not None
        self._body.drop()
        if not task.cancelled():
            task.exception()  # looked at, also when the client has gone before the answer

    def _task(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        exchanges: set[asyncio.Task[Any]] = self.settings["firepool_exchanges"]
        exchanges.add(task)
        task.add_done_callback(exchanges.discard)
        return task

    def _break_off(self) -> None:
        """End an answer that cannot be completed, so that the client sees that it is not."""
        self._finished = True
        connection = self.request.connection
        if connection is not None:
            stream = getattr(connection, "stream", None)
            if stream is not None:
                stream.close()
