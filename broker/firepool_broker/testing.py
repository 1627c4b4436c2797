"""For tests: a small client, who belongs to a home, and real parts that fail in one way each.

The faults are subclasses of the parts that run in production, so that everything around them is
the real thing. `psutil` and `httpx` come with the test extra.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from firepool_broker import embedded, processes
from firepool_broker.backends.local import LocalBackend
from firepool_broker.store.errors import StoreBusy
from firepool_broker.store.records import Launch
from firepool_broker.store.store import Store

__all__ = [
    "AgentLies",
    "Api",
    "CommitFails",
    "PodDiesBetweenReadyAndClaim",
    "PodNeverReady",
    "assert_nothing_left",
    "broker_log",
    "kill_hard",
    "processes_of",
    "text_of",
    "this_environment",
]

_NOTHING_LEFT_SECONDS = 15.0


# -- faults ------------------------------------------------------------------------------------


class PodNeverReady(LocalBackend):
    """The first `failing` pods are started and never serve."""

    failing = 1

    def _command(self, pod: Any) -> list[str]:
        command = super()._command(pod)
        if self.failing <= 0:
            return command
        self.failing -= 1
        # keeps the marker, so that it is found and ended like any other
        return [*command[: command.index("-X") + 2], "-c", "import signal; signal.pause()"]


class PodDiesBetweenReadyAndClaim(LocalBackend):
    """The first `failing` pods are killed in the moment in which they are written as claimed."""

    failing = 1

    async def annotate(self, name: str, annotations: Any) -> None:
        """Kill the agent instead of writing its owner down."""
        if self.failing > 0 and annotations.get("job"):
            self.failing -= 1
            agent = self.agent(name)
            assert agent is not None
            processes.kill(*agent)
            return
        await super().annotate(name, annotations)


class AgentLies(LocalBackend):
    """The first `failing` agents attest another revision than the one they were made from."""

    failing = 1

    def _configuration(self, pod: Any, spec: Any) -> dict[str, Any]:
        configuration = super()._configuration(pod, spec)
        if self.failing > 0:
            self.failing -= 1
            configuration["revision"] = "another"
        return configuration


class CommitFails(Store):
    """The first `failing` launches are not committed."""

    failing = 1

    async def commit_launch(self, launch: Launch) -> bool:
        """Raise, as a database does that is locked by somebody else."""
        if self.failing > 0:
            self.failing -= 1
            raise StoreBusy("the database is locked")
        return await super().commit_launch(launch)


# -- processes ---------------------------------------------------------------------------------


def processes_of(home: Path) -> list[Any]:
    """Find the processes of a home: the broker by its variable, agents by their command line."""
    import psutil

    found = []
    me = psutil.Process()
    for process in psutil.process_iter():
        if process.pid == me.pid:
            continue
        try:
            named = any(str(home) in word for word in process.cmdline())
            named = named or process.environ().get("FIREPOOL_HOME") == str(home)
            # a test's own helpers carry the variable too, and end with the test
            if named and process.ppid() != me.pid:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def assert_nothing_left(home: Path, within_seconds: float = _NOTHING_LEFT_SECONDS) -> None:
    """Assert that every process of a home ends in time."""
    import psutil

    psutil.wait_procs(processes_of(home), timeout=within_seconds)
    left = processes_of(home)
    described = [f"{process.pid} {' '.join(process.cmdline())[:200]}" for process in left]
    assert not left, f"left behind: {described}\n{broker_log(home)}"


def kill_hard(connection: embedded.Connection) -> None:
    """Kill a broker as a machine would, and wait until it is gone."""
    assert processes.kill(connection.pid, connection.start_time)
    assert processes.wait_for_exit(connection.pid, connection.start_time, 10)


def broker_log(home: Path) -> str:
    """Return the end of the broker's log, for the messages of failed tests."""
    log = home / "state" / "broker.log"
    return log.read_text()[-8000:] if log.exists() else ""


# -- a client ----------------------------------------------------------------------------------


class Api:
    """A small synchronous client of the broker's API.

    Parameters
    ----------
    connection
        The broker.
    token
        Another token than the owner's.
    """

    def __init__(self, connection: embedded.Connection, token: str | None = None) -> None:
        import httpx

        self.connection = connection
        self.http = httpx.Client(
            transport=httpx.HTTPTransport(uds=connection.socket),
            base_url="http://firepool",
            headers={"Authorization": f"Bearer {token or connection.token}"},
            timeout=60,
        )

    def __enter__(self) -> Api:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self.http.close()

    def get(self, path: str) -> Any:
        """Return the answer to a GET."""
        answer = self.http.get(path)
        assert answer.is_success, f"{path}: {answer.status_code} {answer.text}"
        return answer.json()

    def post(self, path: str, body: Any = None, **headers: str) -> Any:
        """Return the answer to a POST."""
        answer = self.http.post(path, json=body if body is not None else {}, headers=headers)
        assert answer.is_success, f"{path}: {answer.status_code} {answer.text}"
        return answer.json()

    def session(self, tag: str, *, client_id: str = "client-1", **fields: Any) -> Any:
        """Register a session whose jobs run in this interpreter."""
        variables = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTEST", "FIREPOOL"))
        }
        request = {"lease_tag": tag, "client_id": client_id, "env": variables, **fields}
        request.setdefault("environment", this_environment())
        return self.post("/v1/sessions", request)

    def submit(self, code: str, **fields: Any) -> Any:
        """Submit a cell; returns the job."""
        return self.post("/v1/jobs", {"kind": "cell", "code": code, **fields})

    def run(self, code: str, **fields: Any) -> tuple[str, Any]:
        """Submit a cell and wait; returns its text and the ended job."""
        body = {"kind": "cell", "code": code, **fields}
        return _ended(list(self.events("POST", "/v1/jobs?follow=1", body)))

    def wait(self, job_id: str) -> tuple[str, Any]:
        """Wait for a job; returns its whole text and the ended job."""
        return _ended(list(self.follow(job_id)))

    def follow(self, job_id: str, start: int = 0) -> Iterator[tuple[str, Any]]:
        """Yield a job's events until its stream ends."""
        yield from self.events("GET", f"/v1/jobs/{job_id}/output?from={start}")

    def events(self, method: str, path: str, body: Any = None) -> Iterator[tuple[str, Any]]:
        """Yield the server-sent events of a request."""
        with self.http.stream(method, path, json=body, timeout=None) as answer:
            if not answer.is_success:
                raise AssertionError(f"{path}: {answer.status_code} {answer.read().decode()}")
            kind, data = "", ""
            for line in answer.iter_lines():
                if line.startswith("event:"):
                    kind = line[6:].strip()
                elif line.startswith("data:"):
                    data += line[5:].strip()
                elif not line and data:
                    yield kind, json.loads(data)
                    kind, data = "", ""


def text_of(events: list[tuple[str, Any]]) -> str:
    """Join the text of a job's stream messages."""
    return "".join(data["text"] for kind, data in events if kind == "stream")


def this_environment(digest: str = "0" * 64) -> dict[str, Any]:
    """Describe the interpreter that runs the tests, as a kernel in it would."""
    return {
        "executable": sys.executable,
        "prefix": sys.prefix,
        "base_prefix": sys.base_prefix,
        "version": ".".join(map(str, sys.version_info[:3])),
        "digest": digest,
        "path": [],
        "visible": [],
    }


def _ended(events: list[tuple[str, Any]]) -> tuple[str, Any]:
    assert events, "the stream was empty"
    assert events[-1][0] == "end", f"the stream broke off after {events[-1]}"
    return text_of(events), events[-1][1]
