"""The clients against a real server on a Unix socket that answers by script.

The server does what brokers do badly: it drops connections before, within and after answers,
refuses, forgets a session, and goes away altogether.
"""

from __future__ import annotations

import asyncio
import json
import os
import socketserver
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from firepool_nb import calls
from firepool_nb import client as client_module
from firepool_nb.client import AsyncClient, Client
from firepool_nb.connection import Endpoint, check_wire, locate
from firepool_nb.errors import BrokerUnreachable, Refused, WireMismatch
from firepool_nb.exchange import Call, ConnectionLost
from firepool_nb.magics.interrupts import InterruptListener

Step = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Scripted

    def handle_any(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length)
        self.server.requests.append((self.command, self.path, self.headers["Authorization"]))
        self.server.steps.pop(0)(self)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = handle_any  # noqa: N815

    def log_message(self, *args: object) -> None:
        """Say nothing."""

    def address_string(self) -> str:
        return "unix"

    def answer(self, status: int, document: Any) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def event(self, kind: str, data: Any, number: int | None = None) -> None:
        text = f"event: {kind}\ndata: {json.dumps(data)}\n\n"
        if number is not None:
            text = f"id: {number}\n{text}"
        piece = text.encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        self.wfile.flush()

    def end_stream(self) -> None:
        self.wfile.write(b"0\r\n\r\n")

    def drop(self) -> None:
        self.close_connection = True
        self.connection.shutdown(2)


class Scripted(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, path: str) -> None:
        self.steps: list[Step] = []
        self.requests: list[tuple[str, str, str]] = []
        super().__init__(path, Handler)

    def handle_error(self, request: Any, address: Any) -> None:
        """Broken connections are the point of the script."""


@pytest.fixture
def server() -> Iterator[Scripted]:
    with tempfile.TemporaryDirectory(prefix="fp-", dir="/tmp") as folder:
        running = Scripted(f"{folder}/socket")
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()
        running.server_close()


@pytest.fixture
def client(server: Scripted) -> Iterator[Client]:
    with Client(lambda: endpoint(server)) as made:
        yield made


def endpoint(server: Scripted) -> Endpoint:
    return Endpoint(token="owner", socket=str(server.server_address), identity="1", wire=1)


def answer(status: int, document: Any) -> Step:
    return lambda handler: handler.answer(status, document)


def drop(handler: Handler) -> None:
    handler.drop()


def stream(*events: tuple[str, Any, int | None], then: Step | None = None) -> Step:
    def play(handler: Handler) -> None:
        handler.begin_stream()
        for kind, data, number in events:
            handler.event(kind, data, number)
        (then or Handler.end_stream)(handler)

    return play


VIEW = {"id": "j-1", "state": "QUEUED"}
ENDED = {"id": "j-1", "state": "SUCCEEDED"}


def text(number: int) -> tuple[str, Any, int]:
    return "stream", {"name": "stdout", "text": str(number)}, number


def test_connections_are_kept(server: Scripted, client: Client) -> None:
    server.steps = [answer(200, {"pools": []}), answer(200, {"pools": []})]
    client.pools()
    kept = client._idle[0]
    client.pools()
    assert client._idle == [kept]


def test_what_may_be_repeated_is_repeated(server: Scripted, client: Client) -> None:
    server.steps = [drop, drop, answer(201, VIEW)]
    assert client.submit({"id": "j-1", "kind": "cell"}) == VIEW
    assert [path for _, path, _ in server.requests] == ["/v1/jobs"] * 3


def test_what_may_not_be_repeated_is_not(server: Scripted, client: Client) -> None:
    server.steps = [drop]
    with pytest.raises(ConnectionLost):
        client.call(Call("POST", "/v1/shutdown", body={}, repeatable=False))
    assert len(server.requests) == 1


def test_refusals_are_not_repeated(server: Scripted, client: Client) -> None:
    server.steps = [answer(404, {"error": {"class": "NotFound", "message": "no job j-2"}})]
    with pytest.raises(Refused, match="no job j-2"):
        client.job("j-2")


def test_a_stream_resumes_after_the_last_message(server: Scripted, client: Client) -> None:
    server.steps = [
        drop,
        stream(("job", VIEW, None), text(0), text(1), then=drop),
        stream(("job", VIEW, None), text(2), then=Handler.end_stream),
        stream(("job", VIEW, None), text(2), text(3), ("end", ENDED, None)),
    ]
    first = calls.submit({"id": "j-1", "kind": "cell"}, follow=True)
    events = [event for event in client.follow("j-1", first) if event is not None]
    assert [event.number for event in events if event.number is not None] == [0, 1, 2, 3]
    assert events[-1].type == "end"
    assert [(method, path) for method, path, _ in server.requests] == [
        ("POST", "/v1/jobs?follow=1"),
        ("POST", "/v1/jobs?follow=1"),
        ("GET", "/v1/jobs/j-1/output?from=2"),
        ("GET", "/v1/jobs/j-1/output?from=3"),
    ]


def test_a_refused_submission_is_raised_from_the_stream(server: Scripted, client: Client) -> None:
    refusal = {"error": {"class": "Invalid", "message": "no pool x", "field": "sku"}}
    server.steps = [answer(422, refusal)]
    with pytest.raises(Refused, match="no pool x") as caught:
        list(client.follow("j-1", calls.submit({"id": "j-1"}, follow=True)))
    assert caught.value.field == "sku"


def test_an_unknown_token_is_renewed_once(server: Scripted, client: Client) -> None:
    unauthorized = answer(401, {"error": {"class": "Unauthorized", "message": "who?"}})
    client.token = "old"

    def renew() -> None:
        client.token = "new"

    client.renew = renew
    server.steps = [unauthorized, answer(200, {"pools": []})]
    client.pools()
    server.steps = [unauthorized, stream(("end", ENDED, None))]
    list(client.follow("j-1"))
    server.steps = [unauthorized, unauthorized]
    with pytest.raises(Refused, match=r"who\?"):
        client.pools()
    assert [token for _, _, token in server.requests][:2] == ["Bearer old", "Bearer new"]


def test_a_wait_is_woken(server: Scripted, client: Client) -> None:
    go = threading.Event()

    def hold(handler: Handler) -> None:
        go.wait(10)
        handler.event("end", ENDED)
        handler.end_stream()

    server.steps = [stream(("job", VIEW, None), then=hold)]
    with InterruptListener() as listener:
        events = client.follow("j-1", wake=listener)
        first = next(events)
        assert first is not None
        assert first.type == "job"
        timer = threading.Timer(0.1, os.kill, (os.getpid(), 2))
        timer.start()
        began = time.monotonic()
        assert next(events) is None
        assert time.monotonic() - began < 5
        timer.join()
        assert len(listener.take()) == 1
        go.set()
        last = next(events)
        assert last is not None
        assert last.type == "end"


def test_patience_ends_a_wait(server: Scripted, client: Client) -> None:
    go = threading.Event()
    server.steps = [stream(("job", VIEW, None), then=lambda handler: go.wait(10) and None)]
    events = client.follow("j-1", patience=lambda: 0.05)
    assert next(events) is not None
    assert next(events) is None
    go.set()
    events.close()  # type: ignore[attr-defined]


def test_an_absent_broker_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_RETRY_SECONDS", 0.2)
    with Client(lambda: None) as absent, pytest.raises(BrokerUnreachable, match="no broker runs"):
        absent.pools()
    gone = Endpoint(token="t", socket="/tmp/fp-no-such-socket", identity="1")
    with Client(lambda: gone) as client, pytest.raises(BrokerUnreachable, match="no-such-socket"):
        client.pools()


async def test_the_asynchronous_client_reads_the_same_events(server: Scripted) -> None:
    client = AsyncClient(lambda: endpoint(server))
    server.steps = [
        drop,
        answer(201, VIEW),
        stream(("job", VIEW, None), text(0), then=drop),
        stream(("job", VIEW, None), text(1), ("end", ENDED, None)),
    ]
    assert await client.submit({"id": "j-1"}) == VIEW
    numbers = [event.number async for event in client.follow("j-1")]
    assert [number for number in numbers if number is not None] == [0, 1]
    server.steps = [answer(404, {"error": {"class": "NotFound", "message": "no job"}})]
    with pytest.raises(Refused, match="no job"):
        await client.job("j-2")
    server.steps = [answer(404, {"error": {"class": "NotFound", "message": "no job"}})]
    with pytest.raises(Refused, match="no job"):
        async for _ in client.follow("j-2"):
            pass


async def test_an_asynchronous_wait_can_be_cancelled(server: Scripted) -> None:
    go = threading.Event()
    server.steps = [stream(("job", VIEW, None), then=lambda handler: go.wait(10) and None)]
    client = AsyncClient(lambda: endpoint(server))

    async def consume() -> None:
        async for _ in client.follow("j-1"):
            pass

    task = asyncio.ensure_future(consume())
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go.set()


def test_versions_are_compared() -> None:
    check_wire(1, "the broker", "firepool stop")
    with pytest.raises(WireMismatch, match=r"wire version 0, this client 1.*`firepool stop`"):
        check_wire(0, "the broker", "firepool stop")
    with pytest.raises(WireMismatch, match=r"wire version 2.*upgrade"):
        check_wire(2, "the broker", "firepool stop")


def test_a_remote_broker_needs_address_and_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIREPOOL_URL", "https://pool.example:8443/base/")
    monkeypatch.setenv("FIREPOOL_TOKEN", "secret")
    found = locate()
    assert found is not None
    assert (found.host, found.port, found.secure, found.prefix, found.token) == (
        "pool.example", 8443, True, "/base", "secret",
    )  # fmt: skip
    assert not found.is_local
    monkeypatch.delenv("FIREPOOL_TOKEN")
    with pytest.raises(BrokerUnreachable, match="FIREPOOL_TOKEN is not set"):
        locate()
    monkeypatch.setenv("FIREPOOL_URL", "pool.example")
    with pytest.raises(BrokerUnreachable, match="not the http:// or https:// address"):
        locate()


def test_a_forked_child_opens_its_own_connections(server: Scripted, client: Client) -> None:
    server.steps = [answer(200, {"pools": []})] * 2
    client.pools()
    kept = client._idle[0]
    client._pid = -1  # as if this were a child of the process that made the client
    client.pools()
    assert kept not in client._idle
    kept.close()


def test_files_travel_in_the_body_when_the_broker_is_elsewhere(
    server: Scripted, client: Client, tmp_path: Path
) -> None:
    received: list[bytes] = []

    def take(handler: Handler) -> None:
        received.append(handler.body)
        handler.answer(201, {})

    path = tmp_path / "blob"
    path.write_bytes(b"x" * 1_000_000)
    server.steps = [drop, take]
    with path.open("rb") as file:
        client.call(calls.put_content("blobs", "0" * 64, file))
    assert received == [path.read_bytes()]
