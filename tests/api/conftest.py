"""A real API on a real socket over a real store; only pods are missing."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from firepool_broker.api import errors, types
from firepool_broker.api.application import make_application
from firepool_broker.api.handlers import Parts
from firepool_broker.api.server import make_server, unix_socket
from firepool_broker.identity.identities import Identity
from firepool_broker.identity.tokens import Authenticator
from firepool_broker.metrics import Metrics
from firepool_broker.store.blobs import BlobStore
from firepool_broker.store.outputs import OutputStore
from firepool_broker.store.records import JobChange, JobRow, SessionRow
from firepool_broker.store.store import Store

OWNER_TOKEN = "owner-token"


class StoringService:
    """Stores what it is told and runs nothing: a broker without pods."""

    def __init__(self, store: Store, outputs: OutputStore, folder: Path) -> None:
        self.store = store
        self.outputs = outputs
        self.folder = folder
        self.is_ready = True
        self.connected: list[tuple[str, str]] = []
        self.disconnected: list[tuple[str, str]] = []
        self.shutdowns: list[bool] = []
        self.requests: list[types.SessionRequest] = []

    async def submit(
        self, identity: Identity, request: types.JobRequest, idempotency_key: str | None
    ) -> tuple[types.JobView, bool]:
        document = msgspec.json.encode(request, order="deterministic")
        row, created = await self.store.insert_job(
            JobRow(
                id=request.id or secrets.token_hex(8),
                caller=identity.caller,
                request=document,
                request_digest=hashlib.sha256(document).hexdigest(),
                kind=request.kind,
                queue=request.queue,
                lease_tag=request.lease_tag,
                submitted_at=time.time(),
            ),
            idempotency_key=idempotency_key,
        )
        return self._view(row), created

    async def _row(self, identity: Identity, job_id: str) -> JobRow:
        row = await self.store.get_job(job_id)
        if row is None or row.caller != identity.caller:
            raise errors.NotFound(f"there is no job {job_id}", job=job_id)
        return row

    def _view(self, row: JobRow) -> types.JobView:
        return types.JobView(
            id=row.id,
            name=row.name,
            kind=row.kind,  # type: ignore[arg-type]
            state=row.state,  # type: ignore[arg-type]
            lease_tag=row.lease_tag,
            queue=row.queue,
            sku=row.sku,
            priority=row.priority,
            attached=row.attached,
            attempt=row.attempt,
            times=types.JobTimes(submitted=row.submitted_at, ended=row.ended_at),
            output=self.outputs.summary(row.id),
        )

    async def job(self, identity: Identity, job_id: str) -> types.JobView:
        return self._view(await self._row(identity, job_id))

    async def jobs(self, identity: Identity, **filters: Any) -> list[types.JobView]:
        rows = await self.store.list_jobs(caller=identity.caller, **filters)
        return [self._view(row) for row in rows]

    async def cancel(self, identity: Identity, job_id: str) -> types.JobView:
        await self.end(await self._row(identity, job_id), "CANCELLED")
        return await self.job(identity, job_id)

    async def end(self, row: JobRow, state: str) -> None:
        change = JobChange(ended_at=time.time())
        await self.store.commit_transition(row.id, row.version, state, change)
        self.outputs.finish(row.id)

    async def interrupt(self, identity: Identity, job_id: str, *, kill: bool) -> types.JobView:
        return await self.cancel(identity, job_id)

    async def output(
        self, identity: Identity, job_id: str, start: int
    ) -> AsyncIterator[types.StreamEvent]:
        row = await self._row(identity, job_id)
        yield types.StreamEvent("job", msgspec.json.encode(self._view(row)))
        stream = self.outputs.follow if row.state == "QUEUED" else self.outputs.read
        async for event in stream(job_id, start):
            yield event
        yield types.StreamEvent("end", msgspec.json.encode(await self.job(identity, job_id)))

    async def open_session(
        self, identity: Identity, request: types.SessionRequest
    ) -> types.SessionOpened:
        self.requests.append(request)
        now = time.time()
        await self.store.upsert_session(
            SessionRow(
                caller=identity.caller,
                lease_tag=request.lease_tag,
                client_id=request.client_id,
                request=msgspec.json.encode(request),
                session_dir=str(self.folder),
                created_at=now,
                expires_at=now + 30,
            )
        )
        return types.SessionOpened(
            lease_tag=request.lease_tag,
            token="",
            ttl_seconds=30.0,
            session_dir=str(self.folder),
            resumed=False,
        )

    async def sessions(self, identity: Identity) -> list[types.SessionView]:
        return [
            types.SessionView(
                lease_tag=row.lease_tag,
                client_id=row.client_id,
                connected=False,
                expires_at=row.expires_at,
                created_at=row.created_at,
            )
            for row in await self.store.sessions()
            if row.caller == identity.caller and row.ended_at is None
        ]

    async def session(self, identity: Identity, lease_tag: str) -> types.SessionView:
        for view in await self.sessions(identity):
            if view.lease_tag == lease_tag:
                return view
        raise errors.NotFound(f"there is no session {lease_tag}")

    async def session_connected(self, identity: Identity, lease_tag: str, client_id: str) -> None:
        await self.session(identity, lease_tag)
        self.connected.append((lease_tag, client_id))

    async def session_disconnected(
        self, identity: Identity, lease_tag: str, client_id: str
    ) -> None:
        self.disconnected.append((lease_tag, client_id))

    async def close_session(
        self, identity: Identity, lease_tag: str, client_id: str | None, how: str
    ) -> None:
        await self.session(identity, lease_tag)
        if how == "shutdown":
            await self.store.end_session(identity.caller, lease_tag, time.time())

    async def release_session(self, identity: Identity, lease_tag: str) -> list[str]:
        await self.session(identity, lease_tag)
        return []

    async def pools(self, identity: Identity) -> types.PoolList:
        return types.PoolList(pools=[], default=None)

    async def pods(self, identity: Identity) -> list[types.PodView]:
        return []

    async def retire_pod(self, identity: Identity, name: str) -> None:
        raise errors.NotFound(f"there is no pod {name}")

    async def events(self, identity: Identity) -> AsyncIterator[types.StreamEvent]:
        yield types.StreamEvent("pool", b"{}")
        await asyncio.Event().wait()

    def info(self) -> types.BrokerInfo:
        return types.BrokerInfo(
            version="0",
            wire=1,
            backend="none",
            isolation="none",
            network="host",
            pid=1,
            started_at=0.0,
        )

    def ready(self) -> bool:
        return self.is_ready

    async def shutdown(self, identity: Identity, *, drain: bool, cancel: bool) -> None:
        self.shutdowns.append(drain)


class Connection:
    """One kept-alive connection: as little as HTTP needs, for thousands of requests."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    async def __aenter__(self) -> Connection:
        self._reader, self._writer = await asyncio.open_unix_connection(str(self._socket))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        await self._writer.wait_closed()

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        data = msgspec.json.encode(body)
        lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        self._writer.write(
            f"POST {path} HTTP/1.1\r\nHost: b\r\nAuthorization: Bearer {OWNER_TOKEN}\r\n{lines}"
            f"Content-Length: {len(data)}\r\n\r\n".encode()
            + data
        )
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        return int(head.split()[1]), msgspec.json.decode(await self._reader.readexactly(length))


class Broker:
    """The running API, with clients for it."""

    def __init__(self, socket: Path, service: StoringService, parts: Parts) -> None:
        self.socket = socket
        self.service = service
        self.parts = parts
        self.clients: list[httpx.AsyncClient] = []

    def connection(self) -> Connection:
        return Connection(self.socket)

    def client(self, token: str | None = OWNER_TOKEN) -> httpx.AsyncClient:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(
                uds=str(self.socket),
                limits=httpx.Limits(max_connections=64),
                verify=False,  # loading certificates would take most of a test's time
            ),
            base_url="http://broker",
            headers=headers,
            timeout=60,
        )
        self.clients.append(client)
        return client


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    metrics = Metrics()
    store = await Store.open(tmp_path / "broker.db", on_commit=metrics.committed)
    await store.acquire_leadership("test", 30.0, time.time())
    outputs = OutputStore(tmp_path / "outputs")
    service = StoringService(store, outputs, tmp_path)
    authenticator = Authenticator(
        store, secret=b"s" * 32, owner_token=OWNER_TOKEN, owner_caller="ada", clock=time.time
    )
    parts = Parts(
        service=service,
        authenticator=authenticator,
        blobs=BlobStore(tmp_path / "blobs", limit_bytes=4 * 1024 * 1024),
        metrics=metrics,
        package_limit_bytes=1024 * 1024,
        heartbeat_seconds=0.2,
    )
    with tempfile.TemporaryDirectory(prefix="fp") as folder:  # a socket's path must be short
        socket = Path(folder) / "s"
        server = make_server(make_application(parts))
        server.add_sockets([unix_socket(socket)])
        running = Broker(socket, service, parts)
        yield running
        for client in running.clients:
            await client.aclose()
        outputs.close()
        server.stop()
        await server.close_all_connections()
        await store.close()


@pytest.fixture
def client(broker: Broker) -> httpx.AsyncClient:
    return broker.client()


@pytest.fixture
def cell() -> Callable[..., dict[str, Any]]:
    def make(**fields: Any) -> dict[str, Any]:
        return {"kind": "cell", "code": "1", **fields}

    return make
