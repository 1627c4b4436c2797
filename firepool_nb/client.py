"""Clients of the broker: `Client` for ordinary code, `AsyncClient` for event loops.

Both send the same `Call` objects and read the same events; both find the broker again when it has
died, and go on where they were: a request that may be repeated is repeated, a stream resumes after
the last message that came through.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

from . import calls
from .connection import Endpoint, check_wire, locate
from .errors import BrokerError, BrokerStartFailed, BrokerUnreachable, NoBroker, Refused
from .exchange import Call, ConnectionLost, Exchange, Response
from .sse import Event, EventParser
from .transport import AsyncConnection, BlockingConnection, BrokerSilent, pauses

__all__ = ["AsyncClient", "Client", "Wake"]

_IDLE_CONNECTIONS = 4
_RETRY_SECONDS = 15.0
_GLANCE_SECONDS = 1.0
_FOLLOW_RETRY_SECONDS = 120.0
_FINAL = (BrokerSilent, BrokerStartFailed, NoBroker)  # trying again would end the same way


class Wake(Protocol):
    """Ends a wait from outside: what ■ is for a waiting cell."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when the wait should end."""

    def raising(self) -> contextlib.AbstractContextManager[None]:
        """Let ■ raise KeyboardInterrupt meanwhile, where nothing can be torn apart."""


class _NoWake:
    def fileno(self) -> int:
        return -1

    def raising(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class _Shared:
    """What both clients know: who they are for the broker and how to become it again."""

    def __init__(
        self,
        find: Callable[[], Endpoint | None] = locate,
        token: str | None = None,
    ) -> None:
        self._find = find
        self.token = token
        self.renew: Callable[[], None] | None = None
        self.on_new_broker: Callable[[], None] | None = None
        self.endpoint: Endpoint | None = None

    def _locate(self) -> Endpoint:
        endpoint = self._find()
        if endpoint is None:
            raise NoBroker("no broker runs; the next %%firepool cell or `firepool up` starts one")
        before, self.endpoint = self.endpoint, endpoint
        if before is not None and before.identity != endpoint.identity and self.on_new_broker:
            self.on_new_broker()
        return endpoint

    def _token_for(self, endpoint: Endpoint) -> str:
        return self.token or endpoint.token


class Client(_Shared):
    """Synchronous client; usable from several threads.

    Parameters
    ----------
    find
        Finds the broker, by default starting this machine's own.
    token
        Token to use instead of the owner's, for example a session's.
    """

    def __init__(
        self, find: Callable[[], Endpoint | None] = locate, token: str | None = None
    ) -> None:
        super().__init__(find, token)
        self._idle: list[BlockingConnection] = []
        self._lock = threading.Lock()
        self._pid = os.getpid()

    # -- connections ------------------------------------------------------------------------------

    def _take(self) -> BlockingConnection:
        with self._lock:
            if self._pid != os.getpid():  # a forked child must not share its parent's sockets
                self._idle, self._pid = [], os.getpid()
            while self._idle:
                connection = self._idle.pop()
                if not connection.is_stale():
                    return connection
                connection.close()
        return BlockingConnection(self._locate())

    def _give_back(self, connection: BlockingConnection, exchange: Exchange | None) -> None:
        if exchange is not None and exchange.finished and exchange.reusable():
            with self._lock:
                if len(self._idle) < _IDLE_CONNECTIONS:
                    self._idle.append(connection)
                    return
        connection.close()

    def close(self) -> None:
        """Close every idle connection."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- requests ---------------------------------------------------------------------------------

    def call(self, call: Call) -> Response:
        """Send a request and return its response.

        Raises
        ------
        Refused
            When the broker says no.
        BrokerUnreachable, ConnectionLost
            When it cannot be reached, after repeating what may be repeated.
        """
        response = self._call(call)
        if response.status == 401 and self.renew is not None:
            self.renew()
            response = self._call(call)
        return response.check()

    def _call(self, call: Call) -> Response:
        retries = pauses(_RETRY_SECONDS)
        while True:
            try:
                return self._call_once(call)
            except _FINAL:
                raise
            except (ConnectionLost, BrokerUnreachable):
                pause = next(retries, None) if call.repeatable else None
                if pause is None:
                    raise
                threading.Event().wait(pause)

    def _call_once(self, call: Call) -> Response:
        connection = self._take()
        exchange: Exchange | None = None
        try:
            exchange = connection.start(call, self._token_for(connection.endpoint))
            pieces: list[bytes] = []
            while not exchange.finished:
                pieces += connection.receive(exchange, call.timeout_seconds) or []
        except BaseException:
            connection.close()
            raise
        response = Response(exchange.status, exchange.headers, b"".join(pieces))
        self._give_back(connection, exchange)
        return response

    def glance(self, call: Call) -> Response | None:
        """Send a request if the broker is there: starts none, repeats nothing, raises nothing.

        Returns
        -------
        Response or None
            None when no answer came within a second, or the broker said no.
        """
        try:
            if locate(start=False) is None:
                return None
            once = replace(call, repeatable=False, timeout_seconds=_GLANCE_SECONDS)
            response = self._call_once(once)
        except BrokerError:
            return None
        return response if response.status < 400 else None

    # -- streams ----------------------------------------------------------------------------------

    def follow(
        self,
        job_id: str,
        first: Call | None = None,
        start: int = 0,
        wake: Wake | None = None,
        patience: Callable[[], float | None] | None = None,
    ) -> Iterator[Event | None]:
        """Yield the events of a job's output to its end, through broken connections.

        Parameters
        ----------
        job_id
            The job.
        first
            The submission that answers with the stream; left out for a job that exists.
        start
            Number of the first message wanted.
        wake
            Ends a wait: then None is yielded.
        patience
            Asked before each wait for its longest time in seconds, after which None is yielded;
            without it, or when it answers None, the wait has no end of its own.

        Raises
        ------
        Refused
            When the broker says no.
        BrokerUnreachable, ConnectionLost
            When no broker could be reached for two minutes.
        """
        waker: Wake = wake or _NoWake()
        call = first or calls.output(job_id, start)
        retries = pauses(_FOLLOW_RETRY_SECONDS)
        renewed = False
        while True:
            try:
                for event in self._events(call, waker, patience or _patiently):
                    if event is None:
                        yield None
                        continue
                    retries = pauses(_FOLLOW_RETRY_SECONDS)
                    if event.type == "job":
                        first = None  # it is submitted: from now on only its output is asked for
                    if event.number is not None:
                        if event.number < start:
                            continue
                        start = event.number + 1
                    yield event
                    if event.type == "end":
                        return
                raise ConnectionLost("the output stream ended before the job did")
            except Refused as error:
                if error.status != 401 or self.renew is None or renewed:
                    raise
                renewed = True
                self.renew()
            except _FINAL:
                raise
            except (ConnectionLost, BrokerUnreachable):
                pause = next(retries, None)
                if pause is None:
                    raise
                with waker.raising():
                    threading.Event().wait(pause)
                    self._locate()
            call = first or calls.output(job_id, start)

    def _events(
        self, call: Call, wake: Wake, patience: Callable[[], float | None]
    ) -> Iterator[Event | None]:
        with wake.raising():
            connection = self._take()
        exchange: Exchange | None = None
        try:
            exchange = connection.start(call, self._token_for(connection.endpoint))
            descriptor = wake.fileno() if wake.fileno() >= 0 else None
            parser = EventParser()
            refusal: list[bytes] = []
            while not exchange.finished:
                try:
                    pieces = connection.receive(exchange, patience(), descriptor)
                except BrokerSilent:
                    pieces = None
                if pieces is None:
                    yield None
                    continue
                if exchange.status >= 400:
                    refusal += pieces
                    continue
                for piece in pieces:
                    yield from parser.feed(piece)
            if exchange.status >= 400:
                Response(exchange.status, exchange.headers, b"".join(refusal)).check()
        except BaseException:
            connection.close()
            raise
        self._give_back(connection, exchange)

    # -- operations -------------------------------------------------------------------------------

    def check_broker(self) -> dict[str, Any]:
        """Ask who we are and compare wire versions.

        Raises
        ------
        WireMismatch
            When the broker speaks another version.
        """
        document: dict[str, Any] = self.call(calls.whoami()).json()
        endpoint = self.endpoint
        where = endpoint.describe() if endpoint is not None else "?"
        check_wire(int(document["broker"]["wire"]), f"the broker at {where}", "firepool stop")
        return document

    def submit(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Submit a job and return it as the broker sees it."""
        view: dict[str, Any] = self.call(calls.submit(request)).json()
        return view

    def job(self, job_id: str) -> dict[str, Any]:
        """Describe one job."""
        view: dict[str, Any] = self.call(calls.job(job_id)).json()
        return view

    def jobs(self, **query: Any) -> list[dict[str, Any]]:
        """List jobs, newest first; ``state``, ``lease_tag``, ``limit`` and ``before`` narrow it."""
        found: list[dict[str, Any]] = self.call(calls.jobs(**query)).json()["jobs"]
        return found

    def pools(self) -> dict[str, Any]:
        """List the pools and name the default one."""
        document: dict[str, Any] = self.call(calls.pools()).json()
        return document

    def pods(self) -> list[dict[str, Any]]:
        """List the pods."""
        found: list[dict[str, Any]] = self.call(calls.pods()).json()["pods"]
        return found

    def sessions(self) -> list[dict[str, Any]]:
        """List the caller's sessions."""
        found: list[dict[str, Any]] = self.call(calls.sessions()).json()["sessions"]
        return found


class AsyncClient(_Shared):
    """Asynchronous client; belongs to one event loop.

    Parameters
    ----------
    find
        Finds the broker, by default starting this machine's own.
    token
        Token to use instead of the owner's, for example a session's.
    """

    async def _open(self) -> AsyncConnection:
        loop = asyncio.get_running_loop()
        endpoint = await loop.run_in_executor(None, self._locate)
        connection = AsyncConnection(endpoint)
        await connection.open()
        return connection

    async def call(self, call: Call) -> Response:
        """Send a request and return its response; see `Client.call`."""
        response = await self._call(call)
        if response.status == 401 and self.renew is not None:
            await asyncio.get_running_loop().run_in_executor(None, self.renew)
            response = await self._call(call)
        return response.check()

    async def _call(self, call: Call) -> Response:
        retries = pauses(_RETRY_SECONDS)
        while True:
            try:
                connection = await self._open()
                try:
                    return await connection.request(call, self._token_for(connection.endpoint))
                finally:
                    await connection.close()
            except _FINAL:
                raise
            except (ConnectionLost, BrokerUnreachable):
                pause = next(retries, None) if call.repeatable else None
                if pause is None:
                    raise
                await asyncio.sleep(pause)

    async def follow(
        self, job_id: str, first: Call | None = None, start: int = 0
    ) -> AsyncIterator[Event]:
        """Yield the events of a job's output to its end; see `Client.follow`."""
        call = first or calls.output(job_id, start)
        retries = pauses(_FOLLOW_RETRY_SECONDS)
        while True:
            try:
                async for event in self._events(call):
                    retries = pauses(_FOLLOW_RETRY_SECONDS)
                    if event.type == "job":
                        first = None
                    if event.number is not None:
                        if event.number < start:
                            continue
                        start = event.number + 1
                    yield event
                    if event.type == "end":
                        return
                raise ConnectionLost("the output stream ended before the job did")
            except _FINAL:
                raise
            except (ConnectionLost, BrokerUnreachable):
                pause = next(retries, None)
                if pause is None:
                    raise
                await asyncio.sleep(pause)
            call = first or calls.output(job_id, start)

    async def _events(self, call: Call) -> AsyncIterator[Event]:
        connection = await self._open()
        try:
            exchange = await connection.start(call, self._token_for(connection.endpoint))
            parser, refusal = EventParser(), b""
            async for piece in connection.pieces(exchange, call.timeout_seconds):
                if exchange.status >= 400:
                    refusal += piece
                    continue
                for event in parser.feed(piece):
                    yield event
            if exchange.status >= 400:
                Response(exchange.status, exchange.headers, refusal).check()
        finally:
            await connection.close()

    async def submit(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Submit a job and return it as the broker sees it."""
        view: dict[str, Any] = (await self.call(calls.submit(request))).json()
        return view

    async def job(self, job_id: str) -> dict[str, Any]:
        """Describe one job."""
        view: dict[str, Any] = (await self.call(calls.job(job_id))).json()
        return view


def _patiently() -> float | None:
    """Wait for ever."""
    return None
