"""The client of agents against servers that break off, stall, close and send in pieces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from firepool_broker.backends import PodAddress
from firepool_broker.launch.agent_client import (
    AgentClient,
    AgentLied,
    AgentRefused,
    AgentUnreachable,
)
from firepool_broker.launch.connections import Transport
from firepool_podagent import wire

KEY = b"k" * 32
Answer = Callable[[str, dict[str, str], bytes, asyncio.StreamWriter], Awaitable[None]]


class Server:
    """A socket that answers each request as a test says."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.connections = 0
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.answer: Answer = self.json

    async def start(self) -> None:
        self.server = await asyncio.start_unix_server(self._serve, self.path)

    async def stop(self) -> None:
        self.server.close()
        await self.server.wait_closed()

    async def json(
        self, line: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter
    ) -> None:
        self.send(writer, b'{"uid":"u"}')

    @staticmethod
    def send(writer: asyncio.StreamWriter, body: bytes, status: int = 200) -> None:
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = {
                    name.lower(): value.strip()
                    for name, _, value in (line.partition(":") for line in head[1:])
                }
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                self.requests.append((head[0], headers, body))
                await self.answer(head[0], headers, body, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@pytest.fixture
async def server(firepool_home: Path) -> AsyncIterator[Server]:
    made = Server(str(firepool_home / "s.sock"))
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def client(server: Server) -> AsyncIterator[AgentClient]:
    made = AgentClient(PodAddress(uid="u", key=KEY, unix=server.path), epoch=3, clock=lambda: 1000)
    yield made
    made.close()


async def test_every_request_is_signed_with_key_body_and_epoch(
    server: Server, client: AgentClient
) -> None:
    await client.signal("j:1", "interrupt", 10.0)
    line, headers, body = server.requests[0]
    method, target, _ = line.split(" ")
    assert wire.verify(KEY, method, target, headers, now=1000, highest_epoch=3) == 3
    assert headers[wire.HEADER_DIGEST.lower()] == wire.digest(body)
    assert body == b'{"signal":"interrupt","grace_seconds":10.0}'


async def test_a_connection_is_kept_for_the_next_request(
    server: Server, client: AgentClient
) -> None:
    for _ in range(5):
        await client.health()
    assert server.connections == 1


async def test_a_kept_connection_that_was_closed_is_replaced_without_a_word(
    server: Server, client: AgentClient
) -> None:
    await client.health()

    async def closes(*arguments: object) -> None:
        writer = arguments[-1]
        assert isinstance(writer, asyncio.StreamWriter)
        server.answer = server.json
        writer.close()

    server.answer = closes
    await client.health()
    assert server.connections == 2


async def test_a_fresh_connection_that_is_closed_is_an_error(
    server: Server, client: AgentClient
) -> None:
    async def closes(*arguments: object) -> None:
        writer = arguments[-1]
        assert isinstance(writer, asyncio.StreamWriter)
        writer.close()

    server.answer = closes
    with pytest.raises(AgentUnreachable):
        await client.health()


async def test_an_agent_that_does_not_answer_in_time_is_unreachable(
    server: Server, client: AgentClient
) -> None:
    async def silent(*_: object) -> None:
        await asyncio.sleep(30)

    server.answer = silent
    began = asyncio.get_running_loop().time()
    with pytest.raises(AgentUnreachable, match=r"within 0\.2 s"):
        await client.health(0.2)
    assert asyncio.get_running_loop().time() - began < 5
    server.server.close()


async def test_nobody_there_is_unreachable(firepool_home: Path) -> None:
    transport = Transport(str(firepool_home / "none.sock"), None)
    with pytest.raises(AgentUnreachable, match="cannot be reached"):
        await transport.request("GET", "/", {}, b"", 1)


async def test_a_refusal_keeps_its_class_message_and_field(
    server: Server, client: AgentClient
) -> None:
    async def refuses(*arguments: object) -> None:
        writer = arguments[-1]
        assert isinstance(writer, asyncio.StreamWriter)
        body = b'{"error":{"class":"Busy","message":"it is draining","field":"x"}}'
        server.send(writer, body, 409)

    server.answer = refuses
    with pytest.raises(AgentRefused) as caught:
        await client.drain()
    error = caught.value
    assert (error.status, error.error_class, error.field) == (409, "Busy", "x")
    assert str(error) == "it is draining"


@pytest.mark.parametrize("body", [b"not json", b"[1]", b'{"uid":"another"}'])
async def test_an_answer_that_cannot_be_true_is_a_lie(
    server: Server, client: AgentClient, body: bytes
) -> None:
    async def lies(*arguments: object) -> None:
        writer = arguments[-1]
        assert isinstance(writer, asyncio.StreamWriter)
        server.send(writer, body)

    server.answer = lies
    with pytest.raises(AgentLied):
        await client.health()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def collect(client: AgentClient) -> list[list[dict[str, object]]]:
    return [batch async for batch in client.output("j:1", 0)]


async def test_messages_are_put_together_from_pieces(server: Server, client: AgentClient) -> None:
    async def streams(*arguments: object) -> None:
        writer = arguments[-1]
        assert isinstance(writer, asyncio.StreamWriter)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for piece in (
            b'{"n":0,"ty',
            b'pe":"status"}\n\n',
            b'{"n":1,"type":"status"}\n{"type":"reset"}\n',
        ):
            writer.write(chunk(piece))
            await writer.drain()
            await asyncio.sleep(0.02)
        writer.write(chunk(b""))

    server.answer = streams
    assert await collect(client) == [
        [],  # half a message: a sign of life
        [{"n": 0, "type": "status"}],
        [{"n": 1, "type": "status"}, {"type": "reset"}],
    ]
    server.answer = server.json
    await client.health()
    assert server.connections == 1  # a stream that was read to its end gives its connection back


async def test_a_stream_that_breaks_off_is_no_end(server: Server, client: AgentClient) -> None:
    async def breaks(*arguments: object) -> None:
        writer = arguments[-1]
        assert isinstance(writer, asyncio.StreamWriter)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(chunk(b'{"n":0,"type":"status"}\n') + b"ff\r\n{")
        await writer.drain()
        writer.close()

    server.answer = breaks
    seen: list[dict[str, object]] = []

    async def read() -> None:
        async for batch in client.output("j:1", 0):
            seen.extend(batch)

    with pytest.raises(AgentUnreachable):
        await read()
    assert seen == [{"n": 0, "type": "status"}]


async def test_a_stream_that_ends_without_its_reset_is_no_end(
    server: Server, client: AgentClient
) -> None:
    async def short(*arguments: object) -> None:
        writer = arguments[-1]
        assert isinstance(writer, asyncio.StreamWriter)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(chunk(b'{"type":"outcome","attempt":"j:1","next":0}\n') + chunk(b""))

    server.answer = short
    with pytest.raises(AgentUnreachable, match="before its end"):
        await collect(client)
