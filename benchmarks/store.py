"""The rows ``dispatch``, ``submit`` and ``auth``: what the store and the API cost.

``dispatch`` commits launches to a real SQLite file with ``synchronous=FULL``: grouped as the broker
does it, and one commit each, in turns. SQLite has one writer, so that one commit after another is
the fastest that 64 committers of their own could be. ``submit`` talks to the API in a process of
its own over a loopback address; its service keeps jobs in memory and answers with one message.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from firepool_broker.api import types
from firepool_broker.api.application import make_application
from firepool_broker.api.handlers import Parts
from firepool_broker.api.server import make_server, tcp_sockets
from firepool_broker.identity.identities import Identity
from firepool_broker.identity.tokens import Authenticator
from firepool_broker.metrics import Metrics
from firepool_broker.store.blobs import BlobStore
from firepool_broker.store.database import Database
from firepool_broker.store.records import JobRow, Launch
from firepool_broker.store.store import Store

from benchmarks.rows import percentile, row

_ROUNDS = 12
_WRITERS = 64
_SUBMITS = 1500
_TOKEN = "benchmark"


# -- dispatch ----------------------------------------------------------------------------------


class _SlowSync(Database):
    """A database on a disk that takes 10 ms to sync."""

    @contextmanager
    def transaction(self) -> Iterator[None]:
        with super().transaction():
            yield
            time.sleep(0.010)


def dispatch() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="fp-bench-") as folder:
        fast = asyncio.run(_dispatch(Path(folder) / "fast.db", Database, _ROUNDS))
        slow = asyncio.run(_dispatch(Path(folder) / "slow.db", _SlowSync, 3))
    single = percentile(fast["single"], 50)
    ratio = percentile(fast["grouped"], 50) / single
    slow_ratio = percentile(slow["grouped"], 50) / percentile(slow["single"], 50)
    found = row(
        fast["grouped"],
        unit="jobs/s",
        goal="grouped ≥ 4× one commit each; ≥ 3× with a 10 ms sync",
        ratio=round(ratio, 2),
        against="one commit each, same run",
        against_p50=round(single, 1),
        ratio_with_10_ms_sync=round(slow_ratio, 2),
        cpu_us_per_job=round(percentile(fast["cpu_us"], 50), 1),
        store="sqlite, synchronous=FULL",
    )
    found["met"] = ratio >= 4 and slow_ratio >= 3
    return found


async def _dispatch(path: Path, kind: type[Database], rounds: int) -> dict[str, list[float]]:
    Database(path).close()
    writer = kind(path)
    writer.ensure_schema()
    store = Store(writer, Database(path, read_only=True))
    await store.acquire_leadership("benchmark", 3600.0, time.time())
    found: dict[str, list[float]] = {"single": [], "grouped": [], "cpu_us": []}
    for turn in range(rounds):
        for side in ("single", "grouped"):
            # fewer where each waits for a sync of its own
            count = _WRITERS if side == "single" else _WRITERS * 8
            names = [f"{side}-{turn}-{number}" for number in range(count)]
            await asyncio.gather(*(store.insert_job(_row(name)) for name in names))
            launches = [_launch(name) for name in names]
            started, cpu = time.perf_counter(), time.process_time()
            if side == "single":
                for launch in launches:
                    assert await store.commit_launch(launch)
            else:
                for batch in range(0, count, _WRITERS):
                    group = launches[batch : batch + _WRITERS]
                    assert all(await asyncio.gather(*map(store.commit_launch, group)))
                found["cpu_us"].append((time.process_time() - cpu) / count * 1e6)
            found[side].append(count / (time.perf_counter() - started))
    await store.close()
    return found


def _row(job_id: str) -> JobRow:
    return JobRow(
        id=job_id,
        caller="ada",
        request=b'{"kind":"cell","code":"print(1)"}' * 10,
        request_digest="d" * 64,
        kind="cell",
        queue="default",
        submitted_at=time.time(),
    )


def _launch(job_id: str) -> Launch:
    now = time.time()
    return Launch(
        job_id=job_id,
        version=1,
        attempt=1,
        pods=[(f"cpu-{job_id}", job_id)],
        path="warm",
        reason="",
        claimed_at=now,
        committed_at=now,
    )


# -- submit ------------------------------------------------------------------------------------


def submit() -> dict[str, Any]:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.store"],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        cwd=Path(__file__).resolve().parent.parent,
    )
    assert process.stdout is not None
    try:
        port = int(process.stdout.readline())
        samples, cpu_ms = asyncio.run(_submits(port, process.pid))
    finally:
        process.terminate()
        process.communicate()
    return row(
        samples,
        unit="ms",
        goal="p99 ≤ 2 ms on loopback",
        p99_at_most=2.0,
        broker_cpu_ms_per_submit=round(cpu_ms, 3),
    )


async def _submits(port: int, pid: int) -> tuple[list[float], float]:
    body = json.dumps({"kind": "cell", "code": "print(1)", "lease_tag": "nb"}).encode()
    request = (
        f"POST /v1/jobs?follow=1 HTTP/1.1\r\nHost: b\r\nAuthorization: Bearer {_TOKEN}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    samples: list[float] = []
    cpu = 0.0
    for number in range(_SUBMITS + 100):
        if number == 100:  # warm by now
            samples.clear()
            cpu = _cpu_seconds(pid)
        started = time.perf_counter()
        writer.write(request)
        await reader.readuntil(b"event: stream")
        samples.append((time.perf_counter() - started) * 1e3)
        await reader.readuntil(b"\r\n0\r\n\r\n")
    spent = _cpu_seconds(pid) - cpu
    writer.close()
    await writer.wait_closed()
    return samples, spent / _SUBMITS * 1e3


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class _Memory:
    """A broker's service that keeps nothing and runs nothing."""

    def __init__(self) -> None:
        self._numbers = 0

    async def submit(
        self, identity: Identity, request: types.JobRequest, key: str | None
    ) -> tuple[types.JobView, bool]:
        self._numbers += 1
        return self._view(f"j{self._numbers}", request), True

    async def output(
        self, identity: Identity, job_id: str, start: int
    ) -> AsyncIterator[types.StreamEvent]:
        yield types.StreamEvent("job", b'{"id":"%s"}' % job_id.encode())
        yield types.StreamEvent("stream", b'{"n":0,"type":"stream","text":"1"}', 0)
        yield types.StreamEvent("end", b"{}")

    def _view(self, job_id: str, request: types.JobRequest) -> types.JobView:
        return types.JobView(
            id=job_id,
            name=None,
            kind=request.kind,
            state="QUEUED",
            lease_tag=request.lease_tag,
            queue=request.queue,
            sku=None,
            priority=0,
            attached=True,
            attempt=0,
            times=types.JobTimes(),
        )


class _NoTokens:
    async def put_token(self, digest: str, caller: str, lease_tag: str, now: float) -> None:
        return

    async def token(self, digest: str) -> tuple[str, str] | None:
        return None


async def _serve() -> None:
    with tempfile.TemporaryDirectory(prefix="fp-bench-") as folder:
        parts = Parts(
            service=_Memory(),  # type: ignore[arg-type]  # only what is asked of it
            authenticator=_authenticator(_NoTokens()),
            blobs=BlobStore(Path(folder)),
            metrics=Metrics(),
        )
        server = make_server(make_application(parts))
        sockets = tcp_sockets("127.0.0.1", 0)
        server.add_sockets(sockets)
        print(sockets[0].getsockname()[1], flush=True)
        await asyncio.Event().wait()


# -- auth --------------------------------------------------------------------------------------


def _authenticator(store: Any) -> Authenticator:
    return Authenticator(
        store, secret=b"s" * 32, owner_token=_TOKEN, owner_caller="ada", clock=time.time
    )


def auth() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="fp-bench-") as folder:
        return asyncio.run(_auth(Path(folder)))


async def _auth(folder: Path) -> dict[str, Any]:
    store = await Store.open(folder / "b.db")
    await store.acquire_leadership("benchmark", 3600.0, time.time())
    authenticator = _authenticator(store)
    header = f"Bearer {await authenticator.session_token('ada', 'nb')}"
    samples: list[float] = []
    for _ in range(200):
        started = time.perf_counter()
        for _ in range(200):
            authenticator.cached(header)
        samples.append((time.perf_counter() - started) / 200 * 1e6)
    uncached: list[float] = []
    lookup: list[float] = []
    for _ in range(300):
        authenticator.forget("ada", "nb")
        started = time.perf_counter()
        assert await authenticator.authenticate(header) is not None
        uncached.append((time.perf_counter() - started) * 1e6)
        started = time.perf_counter()
        await store.token("0" * 64)
        lookup.append((time.perf_counter() - started) * 1e6)
    await store.close()
    ratio = percentile(uncached, 50) / percentile(lookup, 50)
    found = row(
        samples,
        unit="µs",
        goal="≤ 3 µs; uncached within 1.3× of the look-up alone",
        p50_at_most=3.0,
        uncached_p50=round(percentile(uncached, 50), 1),
        ratio=round(ratio, 2),
        against="the store's look-up alone",
    )
    found["met"] = found["met"] and ratio <= 1.3
    return found


if __name__ == "__main__":
    asyncio.run(_serve())
