"""Which broker this Jupyter server talks to, and the way there.

`Broker.locate` finds it, `Broker.start` starts the machine's own one; both work on threads of
their own, never on the event loop. The address is remembered until it stops working. Errors are
`UpstreamError`, whose message names what to do.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Mapping
from typing import Literal, Protocol, TypeVar

import httpx

from firepool_nb import embedded as _machine
from firepool_nb.embedded import Found
from firepool_nb.errors import BrokerError

__all__ = [
    "Broker",
    "BrokerNotRunning",
    "BrokerStartFailed",
    "BrokerTimeout",
    "BrokerUnreachable",
    "EmbeddedBroker",
    "Upstream",
    "UpstreamError",
]

T = TypeVar("T")

_CONNECT_TIMEOUT_SECONDS = 10.0
_START_TIMEOUT_SECONDS = 10.0


class UpstreamError(Exception):
    """The broker could not serve a request.

    Attributes
    ----------
    status
        HTTP status that the Jupyter server answers with.
    error_class
        What a program switches on (``error.class`` of the answer).
    """

    status = 502

    @property
    def error_class(self) -> str:
        """Name of the error, as in the broker's own error answers."""
        return type(self).__name__


class BrokerNotRunning(UpstreamError):
    """No broker runs on this machine and the request is none that starts one."""

    status = 503


class BrokerStartFailed(UpstreamError):
    """The machine's own broker was started and did not become ready."""

    status = 503


class BrokerUnreachable(UpstreamError):
    """There should be a broker, and it does not answer.

    Attributes
    ----------
    repeatable
        Whether it is certain that the request was not carried out.
    """

    def __init__(self, message: str, *, repeatable: bool = False) -> None:
        super().__init__(message)
        self.repeatable = repeatable


class BrokerTimeout(UpstreamError):
    """The broker took the request and did not begin to answer in time."""

    status = 504


class EmbeddedBroker(Protocol):
    """The machine's own broker, as `firepool_nb.embedded` offers it. Both calls may block."""

    def find(self) -> Found | None:
        """Return socket, token and more of the running one, or None."""

    def ensure_running(self, timeout_seconds: float) -> Found:
        """Return the same, starting the broker when none runs."""


@dataclasses.dataclass(frozen=True)
class Upstream:
    """Address and credential of a broker.

    Attributes
    ----------
    kind
        ``embedded`` (the machine's own, over a Unix socket) or ``remote``.
    url
        Base of its addresses, without a slash at the end.
    socket
        Path of its Unix socket, for an embedded one.
    token
        Credential for it. It never leaves the server.
    """

    kind: Literal["embedded", "remote"]
    url: str
    token: str = dataclasses.field(repr=False)
    socket: str | None = None


class Broker:
    """The broker that belongs to this Jupyter server's user.

    Parameters
    ----------
    environ
        Where ``FIREPOOL_URL`` and ``FIREPOOL_TOKEN`` are looked up.
    embedded
        The machine's own broker; `firepool_nb.embedded` when not given.
    """

    def __init__(self, environ: Mapping[str, str], embedded: EmbeddedBroker | None = None) -> None:
        self._remote = _remote(environ)
        self._embedded: EmbeddedBroker = embedded or _machine
        self._known: Upstream | None = self._remote
        self._starting: asyncio.Future[Upstream] | None = None
        self._clients: dict[Upstream, httpx.AsyncClient] = {}

    @property
    def kind(self) -> Literal["embedded", "remote"]:
        """Whose broker it is: the machine's own, or the one that ``FIREPOOL_URL`` names."""
        return "remote" if self._remote else "embedded"

    async def locate(self, *, start: bool = False) -> Upstream:
        """Return the address of the broker.

        Parameters
        ----------
        start
            Start the machine's own broker when none runs.

        Raises
        ------
        BrokerNotRunning, BrokerStartFailed
        """
        if self._known is None:
            found = await _in_thread(self._embedded.find)
            self._known = _embedded(found) if found else None
        if self._known is not None:
            return self._known
        if start:
            return await self.start()
        raise BrokerNotRunning(
            "no broker runs on this machine; the first %%firepool cell starts one, and so do the"
            " panel's Start button and `firepool up`"
        )

    async def start(self) -> Upstream:
        """Start the machine's own broker unless it runs; concurrent calls share one start."""
        if self._remote is not None:
            return self._remote
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start())
            self._starting.add_done_callback(self._started)
        return await asyncio.shield(self._starting)

    def forget(self, upstream: Upstream) -> None:
        """Drop an address that no longer works; the next `locate` looks for a new one."""
        if self._known == upstream and upstream.kind == "embedded":
            self._known = None

    def client(self, upstream: Upstream) -> httpx.AsyncClient:
        """Return the HTTP client for an address; answers are not decoded by it."""
        if upstream not in self._clients:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=16)
            # No read timeout: an output stream may be silent for as long as the job is.
            timeout = httpx.Timeout(_CONNECT_TIMEOUT_SECONDS, read=None, write=None, pool=None)
            if upstream.socket is not None:
                transport = httpx.AsyncHTTPTransport(
                    uds=upstream.socket, limits=limits, verify=False
                )
                client = httpx.AsyncClient(transport=transport, timeout=timeout, trust_env=False)
            else:
                client = httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False)
            # Only what the handler passes on: no defaults of the client's own
            client.headers = httpx.Headers({"Authorization": f"Bearer {upstream.token}"})
            self._clients[upstream] = client
        return self._clients[upstream]

    async def aclose(self) -> None:
        """Close every connection. The broker itself goes on."""
        clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            await client.aclose()

    async def _start(self) -> Upstream:
        try:
            connection = await _in_thread(
                lambda: self._embedded.ensure_running(timeout_seconds=_START_TIMEOUT_SECONDS)
            )
        except (BrokerError, OSError) as error:
            raise BrokerStartFailed(
                f"the broker could not be started: {error}; `firepool doctor` looks for the cause"
            ) from error
        self._known = _embedded(connection)
        return self._known

    def _started(self, future: asyncio.Future[Upstream]) -> None:
        self._starting = None
        if not future.cancelled():
            future.exception()  # looked at, also when every waiting request has gone


def _remote(environ: Mapping[str, str]) -> Upstream | None:
    url = environ.get("FIREPOOL_URL", "").strip().rstrip("/")
    if not url:
        return None
    return Upstream("remote", url, environ.get("FIREPOOL_TOKEN", "").strip())


def _embedded(found: Found) -> Upstream:
    socket, token, *_ = found
    return Upstream("embedded", "http://broker", token, socket)


async def _in_thread(call: Callable[[], T]) -> T:
    """Run a blocking call on a daemon thread, so that it can never keep the server from exiting."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # None only where T allows it

    def work() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = call()
        except Exception as caught:  # noqa: BLE001 - raised again where it is awaited
            error = caught
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            return  # the server has ended meanwhile: nobody waits any more

    threading.Thread(target=work, name="firepool-broker-start", daemon=True).start()
    return await future
