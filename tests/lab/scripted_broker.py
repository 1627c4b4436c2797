"""A broker that shows every state a panel must draw, and does what the panel asks.

Run as ``python scripted_broker.py``; it publishes a connection file under ``FIREPOOL_HOME`` as the
real one does, so that the Jupyter server finds it the same way.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from typing import Any

from firepool_broker import embedded, processes
from tornado import httpserver, netutil, web

TOKEN = "scripted"
NOW = time.time()


def _pool(name: str, shape: dict[str, Any], counts: tuple[int, ...], **other: Any) -> dict:
    words = ("warm_ready", "warming", "busy", "draining", "unhealthy")
    return {
        "name": name,
        "shape": shape,
        "description": name,
        "policy": {},
        "counts": dict(zip(words, counts, strict=True)),
        "queue_length": 0,
        "estimated_wait_seconds": None,
        "isolation": "namespaces",
        **other,
    }


def _job(key: str, state: str, **other: Any) -> dict:
    return {
        "id": f"job-{key}",
        "name": None,
        "kind": "cell",
        "state": state,
        "lease_tag": "kernel-a",
        "sku": "cpu-small",
        "times": {"submitted": NOW - 60, "first_instruction": NOW - 59.991, "ended": NOW - 50},
        "acquisition": {"path": "warm", "reason": "held by this session"},
        "waiting": None,
        "error": None,
        "cell": {"notebook": "work/analysis.ipynb", "cell_id": "c1"},
        **other,
    }


class State:
    def __init__(self) -> None:
        self.changed = asyncio.Event()
        gpu = {"gpu": "h200:2", "cpu": 16, "memory_gib": 128.0}
        waiting = {"reason": "no_capacity", "message": "2 jobs before this one", "position": 3}
        self.pools = [
            _pool("cpu-small", {"gpu": None, "cpu": 2.0, "memory_gib": 4.0}, (2, 1, 1, 0, 0)),
            _pool(
                "h200-pair",
                gpu,
                (0, 2, 3, 1, 1),
                queue_length=3,
                estimated_wait_seconds=42.0,
            ),
        ]
        self.pods = [
            {
                "name": "cpu-small-x1",
                "pool": "cpu-small",
                "state": "HELD",
                "session": "kernel-a",
                "job": None,
                "hold_expires_at": NOW + 540,
            }
        ]
        self.sessions = [
            _session("kernel-a", "/home/ada/work/analysis.ipynb", jobs_running=1),
            _session("kernel-b", "/home/ada/a-notebook-with-a-rather-long-name-for-a-panel.ipynb"),
        ]
        not_yet = {"submitted": NOW - 5, "first_instruction": None, "ended": None}
        running = {"submitted": NOW - 9, "first_instruction": NOW - 8.988, "ended": None}
        self.jobs = [
            _job("waits", "QUEUED", times=not_yet, acquisition=None, waiting=waiting),
            _job("waits-too", "QUEUED", times=dict(not_yet), acquisition=None, waiting=waiting),
            _job("runs", "RUNNING", times=running, name="train-small"),
            _job(
                "failed",
                "FAILED",
                acquisition={"path": "new", "reason": "no pod was warm"},
                error={"class": "NonZeroExit", "message": "ValueError: no such column"},
            ),
            _job(
                "done",
                "SUCCEEDED",
                name="table = build(frame).sort_values('loss')[:20].reset_index",
            ),
            _job("gone", "CANCELLED", acquisition=None, cell=None),
        ]


def _session(tag: str, notebook: str, **other: Any) -> dict:
    return {
        "lease_tag": tag,
        "connected": True,
        "notebook": notebook,
        "kernel_id": None,
        "pods": [],
        "jobs_running": 0,
        "jobs_queued": 0,
        **other,
    }


class Handler(web.RequestHandler):
    def initialize(self, state: State) -> None:
        self.state = state

    def prepare(self) -> None:
        if self.request.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise web.HTTPError(401)

    async def get(self, path: str) -> None:
        state = self.state
        about = {"version": "0.1.0", "wire": 1, "backend": "local", "isolation": "namespaces"}
        answers: dict[str, Any] = {
            "whoami": {"caller": "ada", "session": None, "broker": {**about, "network": "host"}},
            "pools": {"pools": state.pools, "default": "cpu-small"},
            "pods": {"pods": state.pods},
            "sessions": {"sessions": state.sessions},
            "jobs": {"jobs": state.jobs},
        }
        if path in answers:
            self.finish(answers[path])
        elif path == "events":
            self.set_header("Content-Type", "text/event-stream")
            await self.flush()
            while True:
                await state.changed.wait()
                state.changed.clear()
                await self._event("job", {})
        else:
            await self._output(path.split("/")[1])

    async def post(self, path: str) -> None:
        if path.endswith("/cancel"):
            for job in self.state.jobs:
                if job["id"] == path.split("/")[1]:
                    job.update(state="CANCELLED", error={"class": "Cancelled", "message": "asked"})
                    job["times"]["ended"] = time.time()
        else:
            self.state.pods.clear()
        self.state.changed.set()
        self.finish({})

    async def _output(self, job_id: str) -> None:
        (job,) = (job for job in self.state.jobs if job["id"] == job_id)
        self.set_header("Content-Type", "text/event-stream")
        await self._event("job", job)
        table = "<table><tr><th>step</th><th>loss</th></tr><tr><td>1</td><td>0.25</td></tr></table>"
        messages: list[tuple[str, dict[str, Any]]] = [
            ("stream", {"name": "stdout", "text": "epoch 1\n"}),
            ("stream", {"name": "stderr", "text": "\r 50%|█████     | 1/2"}),
            ("stream", {"name": "stderr", "text": "\r100%|██████████| 2/2\n"}),
            ("display_data", {"data": {"text/html": table}, "transient": {"display_id": "t"}}),
            ("stream", {"name": "stdout", "text": "done\n"}),
        ]
        for number, (kind, body) in enumerate(messages):
            await self._event(kind, body, number)
        await self._event("end", job)

    async def _event(self, kind: str, body: Any, number: int | None = None) -> None:
        identity = "" if number is None else f"id: {number}\n"
        self.write(f"event: {kind}\n{identity}data: {json.dumps(body)}\n\n")
        await self.flush()


async def main() -> None:
    paths = embedded.home()
    socket = os.path.join(paths.runtime_dir, "scripted.sock")
    server = httpserver.HTTPServer(web.Application([(r"/v1/(.*)", Handler, {"state": State()})]))
    server.add_socket(netutil.bind_unix_socket(socket))
    start_time = processes.start_time(os.getpid())
    assert start_time is not None
    connection = embedded.Connection(socket, TOKEN, 1, os.getpid(), start_time, "0.1.0", NOW)
    embedded.write_connection(embedded.connection_path(paths), connection)
    print("ready", flush=True)
    end = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end.set)
    await end.wait()
    os.unlink(embedded.connection_path(paths))


asyncio.run(main())
