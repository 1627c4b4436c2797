"""Blobs and packages over HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

DATA = os.urandom(2_500_000)
DIGEST = hashlib.sha256(DATA).hexdigest()
PATH = f"/v1/blobs/{DIGEST}"


def stored(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "blobs").rglob("*") if path.is_file())


async def pieces(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 100_000):
        yield data[start : start + 100_000]


async def test_there_and_back(client: httpx.AsyncClient, tmp_path: Path) -> None:
    assert (await client.head(PATH)).status_code == 404
    answer = await client.put(PATH, content=DATA)
    assert answer.status_code == 201
    assert answer.json() == {"sha256": DIGEST, "size_bytes": len(DATA)}
    assert (await client.put(PATH, content=DATA)).status_code == 200
    head = await client.head(PATH)
    assert (head.status_code, head.headers["Content-Length"]) == (200, str(len(DATA)))
    assert (await client.get(PATH)).content == DATA
    assert stored(tmp_path) == [DIGEST]


async def test_without_a_length(client: httpx.AsyncClient) -> None:
    assert (await client.put(PATH, content=pieces(DATA))).status_code == 201
    assert (await client.get(PATH)).content == DATA


async def test_by_file(client: httpx.AsyncClient, tmp_path: Path) -> None:
    source = tmp_path / "array"
    source.write_bytes(DATA)
    answer = await client.put(PATH, headers={"Firepool-File": str(source)})
    assert answer.status_code == 201
    back = await client.get(PATH, headers={"Firepool-Accept-File": "1"})
    assert back.content == b""
    assert Path(back.headers["Firepool-File"]).read_bytes() == DATA


@pytest.mark.parametrize(
    ("source", "status", "word"),
    [
        ("/nonexistent", 400, "FileRefused"),
        ("relative", 400, "InvalidRequest"),
        ("/", 400, "FileRefused"),
        ("/dev/zero", 400, "FileRefused"),
        ("/etc/hostname", 400, "DigestMismatch"),
    ],
)
async def test_files_that_are_not_taken(
    client: httpx.AsyncClient, tmp_path: Path, source: str, status: int, word: str
) -> None:
    answer = await client.put(PATH, headers={"Firepool-File": source})
    assert (answer.status_code, answer.json()["error"]["class"]) == (status, word)
    assert stored(tmp_path) == []


async def test_another_digest(client: httpx.AsyncClient, tmp_path: Path) -> None:
    answer = await client.put(PATH, content=DATA[:-1])
    assert (answer.status_code, answer.json()["error"]["class"]) == (400, "DigestMismatch")
    assert stored(tmp_path) == []


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(("kind", "size"), [("blobs", 5_000_000), ("packages", 1_500_000)])
async def test_too_large(broker: Any, tmp_path: Path, chunked: bool, kind: str, size: int) -> None:
    data = os.urandom(size)
    digest = hashlib.sha256(data).hexdigest()
    reader, writer = await asyncio.open_unix_connection(str(broker.socket))
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {size}"
    writer.write(
        f"PUT /v1/{kind}/{digest} HTTP/1.1\r\nHost: b\r\nAuthorization: Bearer owner-token\r\n"
        f"{length}\r\n\r\n".encode()
    )

    async def send() -> None:
        # the refusal may come, and the connection close, before all of it was sent
        try:
            async for piece in pieces(data):
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece)
                await writer.drain()
            if chunked:
                writer.write(b"0\r\n\r\n")
        except ConnectionError:
            return

    sending = asyncio.ensure_future(send())
    head = await asyncio.wait_for(reader.readuntil(b"\r\n"), timeout=10)
    assert head.split()[1] == b"413"
    sending.cancel()
    await asyncio.wait([sending])
    writer.close()
    await asyncio.wait([asyncio.ensure_future(_closed(writer))])
    assert stored(tmp_path) == []


async def _closed(writer: asyncio.StreamWriter) -> None:
    try:
        await writer.wait_closed()
    except ConnectionError:
        return


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_client_that_dies_in_the_middle(
    broker: Any, client: httpx.AsyncClient, tmp_path: Path, chunked: bool
) -> None:
    _, writer = await asyncio.open_unix_connection(str(broker.socket))
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(DATA)}"
    piece = DATA[:300_000]
    writer.write(
        f"PUT {PATH} HTTP/1.1\r\nHost: b\r\nAuthorization: Bearer owner-token\r\n"
        f"{length}\r\n\r\n".encode()
        + (b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece)
    )
    await writer.drain()
    for _ in range(500):
        if stored(tmp_path):
            break
        await asyncio.sleep(0.01)
    writer.transport.abort()
    for _ in range(500):
        if not stored(tmp_path):
            break
        await asyncio.sleep(0.01)
    assert stored(tmp_path) == []
    assert (await client.put(PATH, content=DATA)).status_code == 201


async def test_packages_are_written_never_read(client: httpx.AsyncClient) -> None:
    data = b"zip"
    path = f"/v1/packages/{hashlib.sha256(data).hexdigest()}"
    assert (await client.put(path, content=data)).status_code == 201
    assert (await client.head(path)).status_code == 200
    assert (await client.get(path)).status_code == 405
