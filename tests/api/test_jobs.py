"""Submitting, following and listing, through the real API over a real store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx

MakeCell = Callable[..., dict[str, Any]]


class Event:
    def __init__(self, lines: list[str]) -> None:
        fields = dict(line.split(": ", 1) for line in lines if not line.startswith(":"))
        self.kind = fields.get("event")
        self.number = int(fields["id"]) if "id" in fields else None
        self.data = json.loads(fields["data"]) if "data" in fields else None


async def events(answer: httpx.Response) -> AsyncIterator[Event]:
    lines: list[str] = []
    async for line in answer.aiter_lines():
        if line:
            lines.append(line)
        elif lines:
            yield Event(lines)
            lines = []


def stream(number: int, text: str = "x") -> dict[str, Any]:
    return {"n": number, "type": "stream", "name": "stdout", "text": text}


async def end(broker: Any, job_id: str) -> None:
    row = await broker.service.store.get_job(job_id)
    await broker.service.end(row, "SUCCEEDED")


# -- idempotency -------------------------------------------------------------------------------


async def test_the_same_key_twice_gives_one_job(client: httpx.AsyncClient, cell: MakeCell) -> None:
    headers = {"Idempotency-Key": "k1"}
    first = await client.post("/v1/jobs", json=cell(), headers=headers)
    again = await client.post("/v1/jobs", json=cell(), headers=headers)
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["id"] == again.json()["id"]
    other = await client.post("/v1/jobs", json=cell(code="2"), headers=headers)
    error = other.json()["error"]
    assert (other.status_code, error["class"]) == (409, "IdempotencyConflict")
    assert error["job"] == first.json()["id"]
    assert len((await client.get("/v1/jobs")).json()["jobs"]) == 1


async def test_the_same_id_twice_gives_one_job(client: httpx.AsyncClient, cell: MakeCell) -> None:
    answers = await asyncio.gather(
        *(client.post("/v1/jobs", json=cell(id="mine", env={"A": "1"})) for _ in range(10))
    )
    assert sorted(answer.status_code for answer in answers) == [*[200] * 9, 201]
    other = await client.post("/v1/jobs", json=cell(id="mine"))
    assert other.status_code == 409


async def test_ten_thousand_submits_in_a_burst_lose_none(broker: Any, cell: MakeCell) -> None:
    """Through the socket, many connections at once, each with requests one after another."""
    accepted: set[str] = set()

    async def submit(worker: int, count: int) -> None:
        async with broker.connection() as connection:
            for number in range(count):
                key = f"{worker}-{number}"
                status, job = await connection.post(
                    "/v1/jobs", cell(lease_tag="nb"), Idempotency_Key=key
                )
                assert status == 201
                accepted.add(job["id"])

    await asyncio.gather(*(submit(worker, 100) for worker in range(100)))
    assert len(accepted) == 10_000
    assert {row.id for row in await broker.service.store.unfinished_jobs()} == accepted


# -- output ------------------------------------------------------------------------------------


async def test_output_is_followed_live_and_ends(
    broker: Any, client: httpx.AsyncClient, cell: MakeCell
) -> None:
    outputs = broker.service.outputs
    async with client.stream("POST", "/v1/jobs?follow=1", json=cell()) as answer:
        assert answer.status_code == 201
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        following = events(answer)
        job = (await anext(following)).data
        assert job["state"] == "QUEUED"
        await outputs.append(job["id"], [stream(0, "a\nb\r\n\u2028\x85")], attempt=1)
        message = await anext(following)
        assert (message.kind, message.number) == ("stream", 0)
        assert message.data["text"] == "a\nb\r\n\u2028\x85"
        outputs.publish(job["id"], "status", b'{"state":"RUNNING"}')
        status = await anext(following)
        assert (status.kind, status.number) == ("status", None)
        await end(broker, job["id"])
        last = await anext(following)
        assert (last.kind, last.data["state"]) == ("end", "SUCCEEDED")
        assert [event async for event in following] == []


async def test_output_resumes_by_number_and_by_last_event_id(
    broker: Any, client: httpx.AsyncClient, cell: MakeCell
) -> None:
    await client.post("/v1/jobs", json=cell(id="j"))
    await broker.service.outputs.append("j", [stream(i) for i in range(20)], attempt=1)
    await end(broker, "j")

    async def numbers(path: str, **headers: str) -> list[int]:
        async with client.stream("GET", f"/v1/jobs/j/output{path}", headers=headers) as answer:
            assert answer.status_code == 200
            return [e.number async for e in events(answer) if e.number is not None]

    assert await numbers("") == list(range(20))
    assert await numbers("?from=17") == [17, 18, 19]
    assert await numbers("", **{"Last-Event-ID": "17"}) == [18, 19]
    assert await numbers("?from=0", **{"Last-Event-ID": "17"}) == list(range(20))
    assert await numbers("?from=99") == []


async def test_a_silent_stream_is_kept_alive(client: httpx.AsyncClient, cell: MakeCell) -> None:
    async with client.stream("POST", "/v1/jobs?follow=1", json=cell()) as answer:
        seen = ""
        async for text in answer.aiter_text():
            seen += text
            if seen.count(": heartbeat") == 2:
                break


async def test_a_reader_that_does_not_read_blocks_nobody(
    broker: Any, client: httpx.AsyncClient, cell: MakeCell
) -> None:
    await client.post("/v1/jobs", json=cell(id="j"))
    reader, writer = await asyncio.open_unix_connection(str(broker.socket), limit=2**10)
    writer.write(
        b"GET /v1/jobs/j/output HTTP/1.1\r\nHost: b\r\nAuthorization: Bearer owner-token\r\n\r\n"
    )
    await reader.readuntil(b"\r\n\r\n")

    async def read_all() -> int:
        async with client.stream("GET", "/v1/jobs/j/output") as answer:
            return sum([1 async for event in events(answer) if event.number is not None])

    reading = asyncio.ensure_future(read_all())
    for batch in range(40):
        messages = [stream(batch * 10 + i, "z" * 20_000) for i in range(10)]
        await broker.service.outputs.append("j", messages, attempt=1)
    await end(broker, "j")
    assert await asyncio.wait_for(reading, timeout=20) == 400
    # the one that slept sees all of it all the same
    rest = await asyncio.wait_for(_drain(reader), timeout=20)
    assert rest.count(b"event: stream") == 400
    assert b"event: end" in rest
    writer.close()
    await writer.wait_closed()


async def _drain(reader: asyncio.StreamReader) -> bytes:
    pieces = []
    while piece := await reader.read(2**20):
        pieces.append(piece)
        if b"event: end" in piece:
            break
    return b"".join(pieces)


async def test_a_reader_that_goes_leaves_nothing_behind(
    broker: Any, client: httpx.AsyncClient, cell: MakeCell
) -> None:
    await client.post("/v1/jobs", json=cell(id="j"))
    async with client.stream("GET", "/v1/jobs/j/output") as answer:
        await anext(events(answer))
    log = broker.service.outputs._logs["j"]
    for _ in range(500):
        if not log._followers:
            break
        await asyncio.sleep(0.01)
    assert not log._followers


# -- sessions, events, lists -------------------------------------------------------------------


async def test_a_sessions_stream_counts_once_in_and_once_out(
    broker: Any, client: httpx.AsyncClient
) -> None:
    await client.post("/v1/sessions", json={"lease_tag": "nb", "client_id": "c"})
    async with client.stream("GET", "/v1/sessions/nb/stream?client_id=c") as answer:
        assert (await anext(events(answer))).kind == "open"
        assert broker.service.connected == [("nb", "c")]
        assert broker.service.disconnected == []
    for _ in range(500):
        if broker.service.disconnected:
            break
        await asyncio.sleep(0.01)
    assert broker.service.disconnected == [("nb", "c")], "told at once, not at the next heartbeat"


async def test_events_are_streamed(client: httpx.AsyncClient) -> None:
    async with client.stream("GET", "/v1/events") as answer:
        assert (await anext(events(answer))).kind == "pool"


async def test_jobs_are_listed_by_page_and_filter(
    client: httpx.AsyncClient, cell: MakeCell
) -> None:
    for number in range(5):
        await client.post("/v1/jobs", json=cell(id=f"j{number}", lease_tag=f"t{number % 2}"))
    await client.post("/v1/jobs/j3/cancel")

    async def ids(query: str) -> list[str]:
        answer = await client.get(f"/v1/jobs{query}")
        return [job["id"] for job in answer.json()["jobs"]]

    assert await ids("") == ["j4", "j3", "j2", "j1", "j0"]
    assert await ids("?limit=2") == ["j4", "j3"]
    assert await ids("?limit=2&before=j3") == ["j2", "j1"]
    assert await ids("?state=CANCELLED") == ["j3"]
    assert await ids("?lease_tag=t1") == ["j3", "j1"]


async def test_a_store_that_fails_is_a_503_that_says_why(
    broker: Any, client: httpx.AsyncClient, cell: MakeCell
) -> None:
    await broker.service.store.close()
    answer = await client.post("/v1/jobs", json=cell())
    assert (answer.status_code, answer.json()["error"]["class"]) == (503, "StoreUnavailable")
    assert "Retry-After" in answer.headers
