"""A Jupyter server under an odd base URL with our extension, and a broker that does as told."""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, NamedTuple

import httpx
import pytest
from pytest_jupyter.jupyter_server import *  # noqa: F403 - its fixtures, for this folder only
from pytest_jupyter.pytest_tornasync import *  # noqa: F403
from tornado import httpserver, netutil, web

from firepool_nb.server.upstream import Broker


class Connection(NamedTuple):
    socket: str
    token: str
    wire: int = 1
    pid: int = 1
    start_time: int = 1


class ScriptedBroker:
    """Serves a Unix socket: records what arrives, answers as the path says."""

    def __init__(self, socket: str, token: str = "owner-token") -> None:
        self.socket = socket
        self.token = token
        self.requests: list[dict[str, Any]] = []
        self.release = asyncio.Event()
        self.stream_ended = asyncio.Event()
        self.wire = 1
        self._server: httpserver.HTTPServer | None = None

    def start(self) -> None:
        routes = [(r"(/.*)", _Scripted, {"broker": self})]
        self._server = httpserver.HTTPServer(web.Application(routes))
        self._server.add_socket(netutil.bind_unix_socket(self.socket))

    async def stop(self) -> None:
        assert self._server is not None
        self._server.stop()
        await self._server.close_all_connections()
        os.unlink(self.socket)


class _Scripted(web.RequestHandler):
    def initialize(self, broker: ScriptedBroker) -> None:
        self.broker = broker

    def on_connection_close(self) -> None:
        self.broker.stream_ended.set()

    async def _serve(self, path: str) -> None:
        self.broker.requests.append(
            {
                "method": self.request.method,
                "target": self.request.uri,
                "headers": dict(self.request.headers),
                "digest": hashlib.sha256(self.request.body).hexdigest(),
                "size": len(self.request.body),
            }
        )
        if self.request.headers.get("Authorization") != f"Bearer {self.broker.token}":
            self.set_status(401)
            self.finish({"error": {"class": "Unauthorized", "message": "no"}})
        elif path == "/v1/whoami":
            about = {"version": "0.1.0", "wire": self.broker.wire, "isolation": "process"}
            self.finish({"caller": "me", "session": None, "broker": about})
        elif path == "/v1/events":
            self.set_header("Content-Type", "text/event-stream")
            self.write("event: pool\ndata: 1\n\n")
            await self.flush()
            await self.broker.release.wait()
            self.finish("event: pool\ndata: 2\n\n")
        elif path == "/v1/hangs":
            await self.broker.release.wait()
        elif path == "/v1/refused":
            self.set_status(429)
            self.set_header("Retry-After", "7")
            self.finish({"error": {"class": "QueueFull", "message": "later", "retry_after": 7}})
        else:
            self.set_header("Set-Cookie", "mine=1")
            self.set_header("X-Internal", "secret")
            self.finish({"path": path})

    get = head = post = put = delete = _serve


class Embedded:
    """The machine's own broker, seen by the server: `running` says whether it is there."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.running = True
        self.starts = 0
        self.blocked: threading.Event | None = None
        self.failure: Exception | None = None

    def find(self) -> Connection | None:
        return self.connection if self.running else None

    def ensure_running(self, timeout_seconds: float) -> Connection:
        self.starts += 1
        if self.blocked is not None:
            assert self.blocked.wait(timeout_seconds)
        if self.failure is not None:
            raise self.failure
        self.running = True
        return self.connection


Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture
def run(jp_asyncio_loop) -> Run:
    """Run a coroutine on the Jupyter server's loop."""
    return lambda work: jp_asyncio_loop.run_until_complete(asyncio.wait_for(work, 30))


@pytest.fixture
def jp_server_config() -> dict[str, Any]:
    return {"ServerApp": {"jpserver_extensions": {"firepool_nb.server": True}}}


@pytest.fixture
def scripted(tmp_path, run) -> Iterator[ScriptedBroker]:
    async def make() -> ScriptedBroker:
        broker = ScriptedBroker(str(tmp_path / "broker.sock"))
        broker.start()
        return broker

    broker = run(make())
    yield broker
    broker.release.set()
    run(broker.stop())


@pytest.fixture
def embedded(scripted, jp_serverapp, run) -> Iterator[Embedded]:
    """The extension's view of the machine, replaced."""
    embedded = Embedded(Connection(scripted.socket, scripted.token))
    yield from _use(jp_serverapp, run, Broker({}, embedded), embedded)


@pytest.fixture
def use_broker(jp_serverapp, run) -> Iterator[Callable[[Broker], None]]:
    """Let the server use another broker object until the test ends."""
    used: list[Broker] = []

    def use(broker: Broker) -> None:
        used.append(broker)
        jp_serverapp.web_app.settings["firepool_broker"] = broker

    yield use
    for broker in used:
        run(broker.aclose())


def _use(jp_serverapp: Any, run: Run, broker: Broker, value: Any) -> Iterator[Any]:
    jp_serverapp.web_app.settings["firepool_broker"] = broker
    yield value
    run(broker.aclose())


@pytest.fixture
def url(http_server_client, jp_base_url) -> Callable[[str], str]:
    return lambda path: http_server_client.get_url(f"{jp_base_url}firepool/{path}")


@pytest.fixture
def http(jp_serverapp, http_server, run) -> Iterator[httpx.AsyncClient]:
    """A client without credentials."""

    async def make() -> httpx.AsyncClient:
        return httpx.AsyncClient(timeout=20, trust_env=False)

    client = run(make())
    yield client
    run(client.aclose())


@pytest.fixture
def token(jp_auth_header) -> dict[str, str]:
    return dict(jp_auth_header)
