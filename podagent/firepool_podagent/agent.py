"""The agent: its routes, its memory of the leader's epoch, and when it goes.

It goes when it is told to, and when no broker has spoken to it for ``orphan_exit_seconds`` and its
attempt (if any) is journalled to its end. With ``fence_seconds`` an attempt that no broker has
looked after for that long is killed.

It takes orders from its socket alone. Signals are ignored, since whatever runs in the pod can send
them (to PID 1 of its own namespace, or as the same user): to end an agent ask it to, or kill it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from firepool_podagent import mounts, processes, wire
from firepool_podagent.journal import AttemptLog
from firepool_podagent.pod import Pod
from firepool_podagent.server import Reply, Request, Server

_HEARD = frozenset(
    (
        *(signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGCONT),
        *(signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT),
        *(signal.SIGTRAP, signal.SIGSYS),
    )
)
"""What can not be ignored, or tells of a fault of the agent's own."""


class Epoch:
    """The highest epoch of a leader that was seen; survives the agent."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "epoch"
        try:
            self.highest = int(self._path.read_text())
        except (FileNotFoundError, ValueError):
            self.highest = 0

    def raise_to(self, epoch: int) -> None:
        """Remember a newer leader, on the disk first."""
        if epoch > self.highest:
            temporary = self._path.with_name(".epoch")
            with open(temporary, "w") as file:
                file.write(str(epoch))
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(self._path)
            self.highest = epoch


class Agent:
    """Serves one pod."""

    def __init__(self, config: dict[str, Any], pod: Pod) -> None:
        self._config = config
        self._pod = pod
        self._key = bytes.fromhex(config["key"])
        self._epoch = Epoch(Path(config["directory"]))
        self._last_contact = time.monotonic()
        self.stopping = asyncio.Event()

    async def handle(self, request: Request, reply: Reply) -> None:
        """Serve one request."""
        epoch = wire.verify(
            self._key,
            request.method,
            request.target,
            request.headers,
            time.time(),
            self._epoch.highest,
        )
        self._epoch.raise_to(epoch)
        self._last_contact = time.monotonic()
        match request.method, request.parts:
            case "GET", ["v1", "health"]:
                await request.json()
                reply.json(200, self._pod.health())
            case (("PUT" | "HEAD"), ["v1", ("packages" | "blobs") as kind, sha256]):
                await self._deliver(request, reply, kind, sha256)
            case "POST", ["v1", "prepare"]:
                self._pod.prepare(await request.json())
                reply.json(202, {})
            case "POST", ["v1", "attempts", attempt]:
                new, log = self._pod.start(attempt, await request.json())
                reply.json(201 if new else 200, log.state())
            case "GET", ["v1", "attempts", attempt]:
                await request.json()
                reply.json(200, self._pod.find(attempt).state())
            case "GET", ["v1", "attempts", attempt, "output"]:
                await request.json()
                await self._stream(self._pod.find(attempt), _number(request, "from"), reply)
            case "GET", ["v1", "attempts", attempt, "results", name]:
                await request.json()
                await _send_result(self._pod.find(attempt), name, reply)
            case "POST", ["v1", "attempts", attempt, "signal"]:
                passed = self._pod.signal(attempt, await request.json())
                reply.json(202 if passed else 200, {} if passed else {"ignored": True})
            case "POST", ["v1", "attempts", attempt, "ack"]:
                _acknowledge(self._pod.find(attempt), await request.json())
                reply.json(200, {})
            case "POST", ["v1", "drain"]:
                await request.json()
                self._pod.drain()
                reply.json(200, {})
            case "POST", ["v1", "shutdown"]:
                await request.json()
                self._pod.drain()
                reply.json(202, {})
                self.stopping.set()
            case _:
                raise wire.Refused("NotFound", f"no {request.method} {request.target} here")

    async def _deliver(self, request: Request, reply: Reply, kind: str, sha256: str) -> None:
        deliveries = self._pod.deliveries
        if request.method == "HEAD":
            if not deliveries.place(kind, sha256).exists():
                raise wire.Refused("NotFound", f"{kind[:-1]} {sha256} was not delivered")
            reply.json(200, {})
            return
        if request.headers[wire.HEADER_DIGEST.lower()] != sha256:
            raise wire.Refused("Unauthorized", "the signed digest is not the one in the path")
        link = request.headers.get(wire.HEADER_LINK.lower())
        if link is None:
            new = await deliveries.receive(kind, sha256, request.length, request.chunks())
        else:
            source = os.fsdecode(link.encode("latin-1"))
            new = await self._pod.link(kind, sha256, source)
        reply.json(201 if new else 200, {})

    async def _stream(self, log: AttemptLog, number: int, reply: Reply) -> None:
        reply.begin("application/x-ndjson")
        reader = log.reader(number)
        for last in ("outcome", "reset"):
            while True:
                change = log.change()  # before looking, so that nothing is missed
                try:
                    while data := reader.read():
                        await reply.chunk(data)
                    found: dict[str, Any] | None = getattr(log, last)
                    if log.lost or (found is not None and reader.at_end):
                        break
                    done, _ = await asyncio.wait([change], timeout=wire.HEARTBEAT_SECONDS)
                finally:
                    log.forget(change)
                if not done:
                    await reply.chunk(b"\n")
                    self._last_contact = time.monotonic()  # someone is still listening
            if found is not None:
                line = json.dumps({"type": last, **found}, separators=(",", ":")) + "\n"
                await reply.chunk(line.encode())
        reply.end()

    async def watch_for_orphanage(self) -> None:
        """Go, or end the attempt, when no broker is there any more."""
        orphan = self._config.get("orphan_exit_seconds")
        fence = self._config.get("fence_seconds")
        limits = [float(limit) for limit in (orphan, fence) if limit is not None]
        if not limits:
            return
        while True:
            silence = time.monotonic() - self._last_contact
            if fence is not None and silence >= float(fence):
                await self._pod.fence(f"no broker spoke to the pod for {float(fence):g} s")
            if orphan is not None and silence >= float(orphan) and not self._pod.busy:
                self.stopping.set()
                return
            waits = [limit - silence for limit in limits if limit > silence]
            await asyncio.sleep(max(min(waits, default=1.0), 0.2))


def _number(request: Request, name: str) -> int:
    try:
        return max(0, int(request.query.get(name, ["0"])[0]))
    except ValueError:
        raise wire.Refused("BadRequest", f"{name} is no number", name) from None


def _acknowledge(log: AttemptLog, request: dict[str, Any]) -> None:
    number = request.get("next")
    if not isinstance(number, int):
        raise wire.Refused("BadRequest", "next is no number", "next")
    log.acknowledge(number, outcome=bool(request.get("outcome")))


async def _send_result(log: AttemptLog, name: str, reply: Reply) -> None:
    for result in (log.outcome or {}).get("results", ()):
        if name in (result["name"], result["sha256"]) and result["sha256"]:
            break
    else:
        raise wire.Refused("NotFound", f"the attempt has no separate result {name!r}")
    path = log.results / result["sha256"]
    try:
        # The job made it, so it may be anything: what is no plain file is not read.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        raise wire.Refused(
            "NotFound", f"the result {name!r} was acknowledged and is gone"
        ) from None
    with open(descriptor, "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise wire.Refused("NotFound", f"the result {name!r} is no file")
        reply.begin("application/octet-stream")
        while piece := file.read(1 << 20):
            await reply.chunk(piece)
    reply.end()


def listen(config: dict[str, Any]) -> socket.socket:
    """Open the socket that the configuration names; before anything is covered."""
    where = config["listen"]
    if "unix" in where:
        listening = socket.socket(socket.AF_UNIX)
        path = where["unix"]
        if os.path.exists(path):
            os.unlink(path)
        mask = os.umask(0o177)
        try:
            listening.bind(path)
        finally:
            os.umask(mask)
    else:
        host, port = where["tcp"]
        listening = socket.create_server((host, port))
    listening.listen(64)
    listening.setblocking(False)
    return listening


def serve(
    config: dict[str, Any],
    listening: socket.socket,
    package: Path,
    isolation: str,
    view: mounts.View | None,
    ready: Callable[[], None],
) -> None:
    """Be the agent until its end."""
    for number in signal.valid_signals() - _HEARD:
        signal.signal(number, signal.SIG_IGN)
    asyncio.run(_serve(config, listening, package, isolation, view, ready))


async def _serve(
    config: dict[str, Any],
    listening: socket.socket,
    package: Path,
    isolation: str,
    view: mounts.View | None,
    ready: Callable[[], None],
) -> None:
    if isolation == "process":
        processes.become_subreaper()
    pod = Pod(config, isolation, view, package)
    agent = Agent(config, pod)
    server = Server(agent.handle)
    if listening.family == socket.AF_UNIX:
        accepting: asyncio.AbstractServer = await asyncio.start_unix_server(
            server.connected, sock=listening
        )
    else:
        accepting = await asyncio.start_server(server.connected, sock=listening)
    ready()
    watching = asyncio.ensure_future(agent.watch_for_orphanage())
    await agent.stopping.wait()
    watching.cancel()
    await pod.shutdown()
    accepting.close()
    await server.close()
    if view is not None:
        view.uninstall()
    _tidy(config)
    sys.stderr.flush()


def _tidy(config: dict[str, Any]) -> None:
    """Leave nothing in the pod's directory but its journal and what tells of it."""
    from firepool_podagent.removal import Removal

    directory = Path(config["directory"])
    for name in (
        *("scratch", "trash", "blobs", "packages", "mqueue", "code"),
        *("template.log", "supervisors.json"),
    ):
        Removal(directory / name).run()
    (directory / "agent.json").unlink(missing_ok=True)
    if "unix" in config["listen"]:
        Path(config["listen"]["unix"]).unlink(missing_ok=True)
