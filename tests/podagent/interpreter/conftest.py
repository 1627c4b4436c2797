"""Plays the agent's part towards the interpreter side: sockets, pipes, fences."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from firepool_podagent.interpreter import template_command
from firepool_podagent.interpreter.frames import Channel, ChannelClosedError

PATIENCE_SECONDS = 60.0


def job_environment() -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "LANG": "C.UTF-8"}


class PacketSocket:
    """JSON packets over a SOCK_SEQPACKET socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(PATIENCE_SECONDS)

    def send(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
        socket.send_fds(self.sock, [json.dumps(message).encode()], fds or [])

    def receive(self) -> dict[str, Any] | None:
        try:
            data = self.sock.recv(1 << 20)
        except ConnectionResetError:
            return None
        return json.loads(data) if data else None

    def close(self) -> None:
        self.sock.close()


@dataclass
class Finished:
    """A job that ended, with its messages in the order in which the agent would tell them."""

    messages: list[dict[str, Any]]
    unordered: list[dict[str, Any]]
    end: dict[str, Any] | None
    status: int
    dead: dict[str, Any]
    rest: str = ""

    def text(self, name: str) -> str:
        return "".join(
            each["text"] for each in self.messages if each.get("name") == name and "text" in each
        )

    @property
    def stdout(self) -> str:
        return self.text("stdout")

    @property
    def stderr(self) -> str:
        return self.text("stderr")

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [each for each in self.messages if each["type"] == kind]

    @property
    def exit_code(self) -> int:
        assert self.end is not None, (self.status, self.stderr)
        return self.end["exit_code"]

    @property
    def error(self) -> dict[str, Any]:
        assert self.end is not None
        assert self.end["error"] is not None, (self.stdout, self.stderr)
        return self.end["error"]

    @property
    def traceback(self) -> str:
        return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(self.of("error")[0]["traceback"]))

    def exception(self) -> BaseException | None:
        data = self.of("error")[0]["exception"]
        return pickle.loads(base64.b64decode(data)) if data else None


@dataclass
class Job:
    """A parked job and this side's ends of its channel, pipes and supervisor."""

    channel: Channel
    raw: socket.socket
    pipes: tuple[int, int]
    supervisor: PacketSocket
    supervisor_pid: int
    folder: Path
    pid: int = 0
    nonce: str = ""
    frames: list[dict[str, Any]] = field(default_factory=list)
    data: dict[str, bytearray] = field(default_factory=dict)
    sent_at: float = 0.0
    _readers: list[threading.Thread] = field(default_factory=list)
    _seen: threading.Condition = field(default_factory=threading.Condition)

    def spec(self, **changes: Any) -> dict[str, Any]:
        self.nonce = os.urandom(16).hex()
        for name in ("cwd", "results", "scratch"):
            (self.folder / name).mkdir(exist_ok=True)
        paths = {
            "package": None,
            "blobs": {},
            "overlays": [],
            "scratch": str(self.folder / "scratch"),
            "results": str(self.folder / "results"),
        }
        paths.update(changes.pop("paths", {}))
        spec = {
            "attempt": "job:1",
            "job": "job",
            "kind": "cell",
            "code": None,
            "filename": "<cell In[3]>",
            "line_offset": 0,
            "argv": None,
            "shell": None,
            "environment": None,
            "cwd": str(self.folder / "cwd"),
            "session_dir": str(self.folder / "cwd"),
            "env": job_environment(),
            "protected_env": {"FIREPOOL_JOB": "job"},
            "inputs": [],
            "outputs": [],
            "inline_result_bytes": 65536,
            "nonce": self.nonce,
            "paths": paths,
        }
        spec.update(changes)
        return spec

    def start(self, code: str | None = None, **changes: Any) -> Job:
        spec = self.spec(code=code, **changes)
        for name, fd in zip(("stdout", "stderr"), self.pipes, strict=True):
            self.data[name] = bytearray()
            self._readers.append(threading.Thread(target=self._read_pipe, args=(fd, name)))
        self._readers.append(threading.Thread(target=self._read_frames))
        for reader in self._readers:
            reader.start()
        self.sent_at = time.time()
        self.channel.send(spec)
        return self

    def wait_for(self, predicate: Callable[[Job], bool]) -> None:
        """Wait until what came so far satisfies ``predicate``."""
        with self._seen:
            assert self._seen.wait_for(lambda: predicate(self), PATIENCE_SECONDS), self.data

    def wait_text(self, text: str) -> None:
        self.wait_for(lambda job: text.encode() in job.data["stdout"] + job.data["stderr"])

    def interrupt(self) -> None:
        self.supervisor.send({"type": "signal", "signal": int(signal.SIGINT), "group": False})

    def _read_pipe(self, fd: int, name: str) -> None:
        while chunk := os.read(fd, 1 << 16):
            with self._seen:
                self.data[name] += chunk
                self._seen.notify_all()

    def _read_frames(self) -> None:
        while True:
            try:
                message, _ = self.channel.receive()
            except (ChannelClosedError, ConnectionResetError):
                return
            with self._seen:
                self.frames.append(message)
                self._seen.notify_all()

    def finish(self) -> Finished:
        exited = self.supervisor.receive()
        assert exited is not None
        assert exited["type"] == "exited", exited
        dead = self.supervisor.receive()
        assert dead is not None
        assert dead["type"] == "dead", dead
        for reader in self._readers:
            reader.join(PATIENCE_SECONDS)
            assert not reader.is_alive()
        self.close()
        ordered = [each for each in self.frames if each["seq"]]
        end = ordered.pop() if ordered and ordered[-1]["type"] == "end" else None
        # an earlier one is a precaution against exit handlers that end the process
        ordered = [each for each in ordered if each["type"] != "end"]
        return Finished(
            messages=self._in_order(ordered),
            unordered=[each for each in self.frames if not each["seq"]],
            end=end,
            status=exited["status"],
            dead=dead,
        )

    def run(self, code: str | None = None, **changes: Any) -> Finished:
        return self.start(code, **changes).finish()

    def _in_order(self, frames: list[dict[str, Any]]) -> list[dict[str, Any]]:
        marker = re.compile(rb"\x00\x1bFP" + self.nonce.encode() + rb":(\d+)\x00")
        pieces: dict[str, dict[int, bytes]] = {}
        rest: dict[str, bytes] = {}
        for name, data in self.data.items():
            pieces[name] = {}
            parts = marker.split(bytes(data))
            for text, number in zip(parts[0:-1:2], parts[1::2], strict=True):
                pieces[name][int(number)] = text
            rest[name] = parts[-1]
        messages: list[dict[str, Any]] = []

        def add(name: str, text: bytes) -> None:
            if text:
                decoded = text.decode("utf-8", "replace").replace("\0", "\ufffd")
                messages.append({"type": "stream", "name": name, "text": decoded})

        last = max((number for each in pieces.values() for number in each), default=0)
        frame_of = {each["seq"]: each for each in frames}
        for number in range(1, last + 1):
            for name in ("stdout", "stderr"):
                add(name, pieces[name].get(number, b""))
            if number in frame_of and frame_of[number]["type"] != "fence":
                messages.append(frame_of[number])
        for name in ("stdout", "stderr"):
            add(name, rest.get(name, b""))
        return messages

    def close(self) -> None:
        self.channel.close()
        for fd in self.pipes:
            with contextlib.suppress(OSError):
                os.close(fd)
        self.supervisor.close()


class Template:
    """A template process."""

    def __init__(self, executable: str, folder: Path, env: dict[str, str] | None = None) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.folder = folder
        self.control = PacketSocket(ours)
        started = time.monotonic()
        with theirs, open(folder / "template.log", "wb") as log:
            self.process = subprocess.Popen(
                _with_control(template_command(executable), theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=env or {"PATH": os.environ["PATH"], "HOME": str(folder)},
            )
        ready = self.control.receive()
        self.start_seconds = time.monotonic() - started
        assert ready is not None, (folder / "template.log").read_text()
        self.ready = ready
        self._jobs: list[Job] = []
        self._forks = 0

    def request(self, message: dict[str, Any]) -> dict[str, Any] | None:
        self.control.send(message)
        return self.control.receive()

    def park(self) -> Job:
        """Fork a job and wait until it is parked."""
        self._forks += 1
        ours, theirs = socket.socketpair()
        out, out_w = os.pipe()
        err, err_w = os.pipe()
        supervisor, supervisor_theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds = [theirs.fileno(), out_w, err_w, supervisor_theirs.fileno()]
        self.control.send({"type": "fork", "id": self._forks}, fds)
        forked = self.control.receive()
        theirs.close()
        supervisor_theirs.close()
        os.close(out_w)
        os.close(err_w)
        assert forked is not None, self.log()
        folder = self.folder / f"job-{self._forks}"
        folder.mkdir()
        job = Job(Channel(ours), ours, (out, err), PacketSocket(supervisor), forked["pid"], folder)
        parked = job.supervisor.receive()
        assert parked is not None, self.log()
        job.pid = parked["pid"]
        self._jobs.append(job)
        return job

    def run(self, code: str | None = None, **changes: Any) -> Finished:
        return self.park().run(code, **changes)

    def park_env(self) -> dict[str, str]:
        """The environment that a job has when the test says nothing else."""
        return job_environment()

    def log(self) -> str:
        return (self.folder / "template.log").read_text()

    def close(self) -> None:
        for job in self._jobs:
            job.close()
        self.control.close()
        try:
            self.process.wait(PATIENCE_SECONDS)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()


def _with_control(command: list[str], fd: int) -> list[str]:
    # The agent hands its socket over as fd 3; here a shell puts it there before it becomes the
    # template (dash would not do: it knows descriptors of one digit only).
    move = f"exec 3<&{fd} {fd}<&-; " if fd != 3 else ""
    return ["bash", "-c", f'{move}exec "$@"', "bash", *command]


def value_input(name: str, value: Any) -> dict[str, Any]:
    data = base64.b64encode(cloudpickle.dumps(value)).decode()
    return {"name": name, "kind": "value", "format": "cloudpickle", "data": data, "blob": None}


def namespace_input(**values: Any) -> dict[str, Any]:
    data = base64.b64encode(cloudpickle.dumps(values)).decode()
    return {
        "names": sorted(values),
        "kind": "namespace",
        "format": "cloudpickle",
        "data": data,
        "blob": None,
    }


def call_input(function: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    data = base64.b64encode(cloudpickle.dumps((function, args, kwargs))).decode()
    return {"kind": "call", "format": "cloudpickle", "data": data, "blob": None}


def loaded(result: dict[str, Any], finished_in: Path | None = None) -> Any:
    """What a result gives back on the notebook's side."""
    assert result["error"] is None, result["error"]
    if result["data"] is not None:
        data = base64.b64decode(result["data"])
    else:
        assert finished_in is not None
        data = (finished_in / "results" / result["sha256"]).read_bytes()
        assert hashlib.sha256(data).hexdigest() == result["sha256"]
    assert len(data) == result["size_bytes"]
    if result["format"] == "json":
        return json.loads(data)
    if result["format"] == "npy":
        import io

        import numpy

        return numpy.load(io.BytesIO(data), allow_pickle=False)
    if result["format"] == "arrow":
        import pyarrow

        return pyarrow.ipc.open_stream(data).read_all()
    return pickle.loads(data)


@pytest.fixture(scope="session")
def harness() -> Any:
    """This module: functions that build inputs and read results."""
    return sys.modules[__name__]


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The notebook's ``__main__`` on this side."""
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module


@pytest.fixture
def make_template(tmp_path: Path) -> Iterator[Callable[..., Template]]:
    made: list[Template] = []

    def make(executable: str = sys.executable, **changes: Any) -> Template:
        folder = tmp_path / f"template-{len(made)}"
        folder.mkdir()
        made.append(Template(executable, folder, **changes))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Template]:
    """A template of the environment that the tests run in, with IPython."""
    each = Template(sys.executable, tmp_path_factory.mktemp("template"))
    yield each
    each.close()


@pytest.fixture(scope="session")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter whose environment has nothing installed at all."""
    folder = tmp_path_factory.mktemp("bare") / "venv"
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120
    )
    return str(folder / "bin" / "python")


@pytest.fixture(scope="session")
def bare_template(bare_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Template]:
    """A template without IPython, cloudpickle or numpy."""
    each = Template(bare_python, tmp_path_factory.mktemp("bare-template"))
    yield each
    each.close()
