"""A real agent process and a synchronous client of it, for tests and benchmarks."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import firepool_podagent
from firepool_podagent import processes, wire

PACKAGE = Path(firepool_podagent.__file__).parent
VENV = Path(sys.prefix)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class RefusedError(RuntimeError):
    """The agent refused a request; ``error`` is what it answered."""

    def __init__(self, status: int, error: dict[str, Any]) -> None:
        super().__init__(f"{status} {error}")
        self.status = status
        self.error = error


def environment(
    executable: str = sys.executable, digest: str = "e1", **extra: Any
) -> dict[str, Any]:
    """Describe an interpreter as a session does."""
    return {
        "executable": executable,
        "prefix": sys.prefix,
        "base_prefix": sys.base_prefix,
        "version": ".".join(map(str, sys.version_info[:3])),
        "digest": digest,
        "path": [],
        "visible": [],
        **extra,
    }


class Agent:
    """A real agent process, and a synchronous client that signs its requests."""

    def __init__(self, directory: Path, isolation: str = "auto", **config: Any) -> None:
        self.directory = directory
        self.key = secrets.token_bytes(32)
        self.epoch = 1
        self.session_dir = directory.parent / f"{directory.name}-session"
        self.session_dir.mkdir(exist_ok=True)
        self.socket = str(directory / "agent.sock")
        self._count = 0
        self.facts: dict[str, Any] = {}
        directory.mkdir(mode=0o700, exist_ok=True)
        self.config: dict[str, Any] = {
            "name": directory.name,
            "uid": secrets.token_hex(8),
            "directory": str(directory),
            "key": self.key.hex(),
            "listen": {"unix": self.socket},
            "isolation": isolation,
            "revision": "r1",
            "preload": [],
            "orphan_exit_seconds": 600,
            **config,
        }

    def start(
        self,
        target: Path = PACKAGE,
        python: str = sys.executable,
        before: Callable[[], None] | None = None,
    ) -> Agent:
        """Start the process and wait until it serves."""
        reader, writer = os.pipe()
        with open(self.directory / "agent.log", "ab") as log:
            process = subprocess.Popen(
                [python, *wire.INTERPRETER_FLAGS, str(target), "--config-fd", str(reader)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[reader],
                preexec_fn=before,
            )
        os.close(reader)
        with open(writer, "w") as file:
            json.dump(self.config, file)
        if process.wait(timeout=30) != 0:
            raise RuntimeError((self.directory / "agent.log").read_text())
        self.facts = json.loads((self.directory / "agent.json").read_text())
        return self

    @property
    def alive(self) -> bool:
        """Whether the agent's process lives."""
        found = processes.process(self.facts["pid"]) if self.facts else None
        return (
            found is not None
            and found.start_ticks == self.facts["start_time"]
            and found.state not in "ZX"
        )

    def kill(self) -> None:
        """Kill the agent and wait until it is gone."""
        os.kill(self.facts["pid"], signal.SIGKILL)
        self.wait_gone()

    def stop(self) -> None:
        """Ask the agent to end; kill it when it does not."""
        if self.alive:
            with contextlib.suppress(OSError, RefusedError, http.client.HTTPException):
                self.call("POST", "/v1/shutdown", {})
            with contextlib.suppress(TimeoutError):
                self.wait_gone(10)
                return
            self.kill()

    def wait_gone(self, seconds: float = 10) -> None:
        """Wait until the agent's process is gone."""
        until(lambda: not self.alive, seconds, "the agent does not end")

    # --- requests ------------------------------------------------------------------------------

    def request(
        self,
        method: str,
        target: str,
        body: bytes = b"",
        digest: str | None = None,
        headers: dict[str, str] | None = None,
        timeout: float = 60,
    ) -> http.client.HTTPResponse:
        """Send a signed request; the answer's ``connection`` is the caller's to close."""
        connection = _UnixConnection(self.socket, timeout)
        signed = wire.sign(
            self.key,
            method,
            target,
            digest or wire.digest(body),
            self.epoch,
            int(time.time()) + wire.SIGNATURE_LIFETIME_SECONDS,
        )
        connection.request(method, target, body, {**signed, **(headers or {})})
        response = connection.getresponse()
        response.connection = connection  # type: ignore[attr-defined]
        return response

    def call(self, method: str, target: str, value: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send a request with a JSON body and return the JSON answer."""
        body = b"" if value is None else json.dumps(value).encode()
        response = self.request(method, target, body)
        with contextlib.closing(response.connection):  # type: ignore[attr-defined]
            answer = json.loads(response.read() or b"{}")
        if response.status >= 400:
            raise RefusedError(response.status, answer["error"])
        return {**answer, "_status": response.status}

    def health(self) -> dict[str, Any]:
        """Ask what the agent says of itself."""
        return self.call("GET", "/v1/health")

    def put(self, kind: str, content: bytes) -> str:
        """Bring content; returns its SHA-256."""
        sha256 = wire.digest(content)
        response = self.request("PUT", f"/v1/{kind}/{sha256}", content, sha256)
        with contextlib.closing(response.connection):  # type: ignore[attr-defined]
            response.read()
        assert response.status in (200, 201)
        return sha256

    def spec(self, code: str, **extra: Any) -> dict[str, Any]:
        """Make the specification of the next attempt."""
        self._count += 1
        spec: dict[str, Any] = {
            "attempt": f"job{self._count}:1",
            "job": f"job{self._count}",
            "kind": "cell",
            "code": code,
            "filename": "<cell>",
            "line_offset": 0,
            "argv": None,
            "shell": None,
            "environment": environment(),
            "cwd": None,
            "session_dir": str(self.session_dir),
            "env": {"PATH": os.environ["PATH"], "HOME": str(self.session_dir), "LANG": "C.UTF-8"},
            "protected_env": {"FIREPOOL_CALLER": "tester"},
            "package": None,
            "requirements": None,
            "requirements_options": None,
            "inputs": [],
            "outputs": [],
            "timeout_seconds": None,
            "terminate_grace_seconds": 10,
            "memory_mib": None,
            "preload": [],
            "output_limit_bytes": wire.OUTPUT_LIMIT_BYTES,
            "inline_result_bytes": wire.INLINE_RESULT_BYTES,
        }
        return {**spec, **extra}

    def start_attempt(self, code: str, **extra: Any) -> str:
        """Start a cell; returns the attempt's id."""
        spec = self.spec(code, **extra)
        self.call("POST", f"/v1/attempts/{spec['attempt']}", spec)
        return str(spec["attempt"])

    def output(self, attempt: str, start: int = 0) -> Iterator[dict[str, Any]]:
        """Follow an attempt's output from a number on."""
        response = self.request("GET", f"/v1/attempts/{attempt}/output?from={start}")
        with contextlib.closing(response.connection):  # type: ignore[attr-defined]
            if response.status >= 400:
                raise RefusedError(response.status, json.loads(response.read())["error"])
            for line in response:
                if line.strip():
                    yield json.loads(line)

    def signal(self, attempt: str, name: str, **extra: Any) -> dict[str, Any]:
        """Interrupt, terminate or kill an attempt."""
        return self.call("POST", f"/v1/attempts/{attempt}/signal", {"signal": name, **extra})

    def run(self, code: str, **extra: Any) -> Finished:
        """Run a cell to its end, the reset included."""
        return Finished(list(self.output(self.start_attempt(code, **extra))))

    def finish(self, attempt: str) -> Finished:
        """Follow an attempt to its end."""
        return Finished(list(self.output(attempt)))


class Finished:
    """All that an attempt said."""

    def __init__(self, lines: list[dict[str, Any]]) -> None:
        self.messages = [line for line in lines if line["type"] not in ("outcome", "reset")]
        ends = {line["type"]: line for line in lines}
        self.outcome = ends["outcome"]
        self.reset = ends["reset"]
        assert [m["n"] for m in self.messages] == list(range(len(self.messages)))
        assert self.outcome["next"] == len(self.messages)

    def text(self, name: str = "stdout") -> str:
        """Return what was written to a stream."""
        return "".join(
            m["text"] for m in self.messages if m["type"] == "stream" and m["name"] == name
        )

    @property
    def notes(self) -> list[str]:
        """Return the lines meant for a person."""
        return [m["text"] for m in self.messages if m["type"] == "note"]

    @property
    def error_class(self) -> str | None:
        """Return the class of the outcome's error."""
        error = self.outcome["error"]
        return None if error is None else error["class"]

    def __repr__(self) -> str:
        return f"{self.messages!r} {self.outcome!r} {self.reset!r}"


def until(condition: Any, seconds: float, what: str) -> None:
    """Wait for a condition; TimeoutError says ``what`` when it does not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.005)
