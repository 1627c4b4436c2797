"""``kill -9`` of a kernel and of the Jupyter server while their cells run; ten kernels at once."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from firepool_broker import embedded, processes
from firepool_broker.testing import Api, assert_nothing_left
from jupyter_client.blocking.client import BlockingKernelClient
from kernels import Kernel

STRESS = float(os.environ.get("FIREPOOL_STRESS", "1"))
TOKEN = "deaths-test"
COUNTS = (
    "import os, time\n"
    "with open(os.environ['FIREPOOL_SESSION_DIR'] + '/runs', 'a') as file:\n"
    "    file.write(os.environ['FIREPOOL_ATTEMPT'] + '\\n')\n"
    "for n in range(60):\n    print(n)\n    time.sleep(0.03)\n"
)
COUNTED = "".join(f"{n}\n" for n in range(60))


def broker() -> Api:
    """The broker, as soon as a kernel has started it."""
    return Api(until(embedded.find))


def until(check: Callable[[], Any], within_seconds: float = 30) -> Any:
    deadline = time.monotonic() + within_seconds
    while not (found := check()):
        assert time.monotonic() < deadline, "it did not become so"
        threading.Event().wait(0.02)
    return found


def running(api: Api) -> dict[str, Any]:
    job: dict[str, Any] = until(lambda: api.get("/v1/jobs?state=RUNNING")["jobs"])[0]
    return job


def ran_once(job: dict[str, Any]) -> None:
    assert (job["state"], job["attempt"]) == ("SUCCEEDED", 1), job
    assert job["retries"] == {"user": 0, "infra": 0}
    runs = (Path(job["session_dir"]) / "runs").read_text().split()
    assert runs.count(f"{job['id']}:1") == 1
    assert len(set(runs)) == len(runs)


@pytest.mark.stress
@pytest.mark.timeout(1800)
def test_a_killed_kernel_loses_and_repeats_nothing(kernels: Callable[[], Kernel]) -> None:
    """Its running cell goes on, the output is whole, and a new kernel reads it."""
    for _ in range(max(2, round(3 * STRESS))):
        kernel = kernels()
        kernel.start(f"%%firepool\n{COUNTS}")
        with broker() as api:
            job = running(api)
            until(lambda api=api, job=job: api.get(f"/v1/jobs/{job['id']}")["output"]["next"])
            kernel.kill()
            text, ended = api.wait(job["id"])
            assert text == COUNTED
            ran_once(ended)
        reader = kernels()
        assert reader.ok(f"%firepool result {job['id']}").stdout == COUNTED
        reader.shut_down()


class JupyterServer:
    """A real Jupyter server that has our extension, and the kernels that it starts."""

    def __init__(self, home: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/"
        self.runtime = home / "jupyter"
        (home / "notebooks").mkdir(exist_ok=True)
        command = [sys.executable, "-m", "jupyter", "server", "--no-browser", "--allow-root"]
        command += [f"--ServerApp.port={port}", "--ServerApp.ip=127.0.0.1"]
        command += ["--ServerApp.port_retries=0", f"--IdentityProvider.token={TOKEN}"]
        command += [f"--ServerApp.root_dir={home / 'notebooks'}"]
        command += ["--ServerApp.jpserver_extensions={'firepool_nb.server': True}"]
        folders = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
        environment = {**os.environ, **{name: str(self.runtime) for name in folders}}
        with open(home / "server.log", "wb") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.http = httpx.Client(headers={"Authorization": f"token {TOKEN}"}, timeout=60)

    def is_up(self) -> bool:
        assert self.process.poll() is None
        try:
            return self.http.get(f"{self.url}api/status").status_code == 200
        except httpx.TransportError:
            return False

    def start_kernel(self) -> tuple[BlockingKernelClient, int]:
        """Start a kernel as the notebook page does; its client and its process."""
        answer = self.http.post(f"{self.url}api/kernels", json={"name": "python3"})
        assert answer.status_code == 201, answer.text
        file = self.runtime / f"kernel-{answer.json()['id']}.json"
        client = BlockingKernelClient(connection_file=str(file))
        client.load_connection_file()
        client.start_channels()
        client.wait_for_ready(timeout=60)
        children = psutil.Process(self.process.pid).children()
        return client, next(c.pid for c in children if str(file) in " ".join(c.cmdline()))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.http.close()


@pytest.fixture
def servers(firepool_home: Path) -> Iterator[Callable[[], JupyterServer]]:
    started: list[JupyterServer] = []

    def start() -> JupyterServer:
        server = JupyterServer(firepool_home)
        started.append(server)
        until(server.is_up, 60)
        return server

    yield start
    for server in started:
        if server.process.poll() is None:
            server.kill()


@pytest.mark.stress
@pytest.mark.timeout(1800)
# httpcore leaves the socket of a server that is not up yet to the collector
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_a_killed_jupyter_server_loses_and_repeats_nothing(
    servers: Callable[[], JupyterServer], kernels: Callable[[], Kernel]
) -> None:
    """Its kernels die with it; what ran goes on, and a kernel of the next server reads it."""
    for _ in range(1 if STRESS <= 1 else round(3 * STRESS)):
        server = servers()
        assert server.http.post(f"{server.url}firepool/start").json() == {"started": True}
        client, pid = server.start_kernel()
        client.execute("%load_ext firepool_nb")
        client.execute(f"%%firepool\n{COUNTS}")
        with broker() as api:
            job = running(api)
            kernel = psutil.Process(pid)
            server.kill()
            client.stop_channels()
            psutil.wait_procs([kernel], timeout=15)
            text, ended = api.wait(job["id"])
            assert text == COUNTED
            ran_once(ended)
            assert embedded.find() is not None, "the broker outlives the server that started it"
        reader = kernels()
        assert reader.ok(f"%firepool result {job['id']}").stdout == COUNTED
        reader.shut_down()


def test_ten_kernels_at_once_get_one_broker(firepool_home: Path) -> None:
    """Ten kernels load the extension at the same moment."""
    folder = firepool_home / "notebooks"
    folder.mkdir()
    ten = [Kernel(folder, wait=False) for _ in range(10)]
    try:
        for each in ten:
            each.client.wait_for_ready(timeout=120)
        code = "%load_ext firepool_nb\n%firepool pools\nfrom firepool_broker import embedded\n"
        requests = [each.start(code + "print(embedded.find().pid)") for each in ten]
        shown = [each.finish(request) for each, request in zip(ten, requests, strict=True)]
        assert [ran.status for ran in shown] == ["ok"] * 10
        pids = {ran.stdout.splitlines()[-1] for ran in shown}
        assert len(pids) == 1
        serving = [p for p in psutil.process_iter() if _serves(p, firepool_home)]
        assert [str(process.pid) for process in serving] == list(pids)
    finally:
        for each in ten:
            each.shut_down()
    embedded.stop()
    assert_nothing_left(firepool_home)


def _serves(process: psutil.Process, home: Path) -> bool:
    try:
        line = process.cmdline()
        return (
            "firepool_broker" in line
            and "serve" in line
            and process.environ().get("FIREPOOL_HOME") == str(home)
        )
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def test_a_starter_that_dies_leaves_a_broker_that_serves(firepool_home: Path) -> None:
    """Killed while it waits for the broker that it has just started: the next one finds it."""
    code = "from firepool_broker import embedded; embedded.ensure_running(30)"
    starter = subprocess.Popen([sys.executable, "-c", code])
    until(lambda: [p for p in psutil.process_iter() if _serves(p, firepool_home)])
    starter.kill()
    starter.wait()
    connection = embedded.ensure_running()
    with Api(connection) as api:
        assert api.run("print('served')", attached=False)[0] == "served\n"
    (serving,) = [p for p in psutil.process_iter() if _serves(p, firepool_home)]
    assert serving.pid == connection.pid
    embedded.stop()
    assert_nothing_left(firepool_home)


def test_nothing_is_left_when_nobody_needs_it(
    configure: Callable[..., Path], kernels: Callable[[], Kernel], firepool_home: Path
) -> None:
    """After the last kernel and ``idle_exit`` no process of ours is left, nor a pod's folder."""
    configure(idle_exit_seconds=1)
    kernel = kernels()
    kernel.remote("import subprocess\nsubprocess.Popen(['sleep', '1000'], start_new_session=True)")
    connection = embedded.find()
    assert connection is not None
    kernel.shut_down()
    assert processes.wait_for_exit(connection.pid, connection.start_time, 30)
    assert_nothing_left(firepool_home)
    assert embedded.find() is None
    assert os.listdir(firepool_home / "state" / "pods") == []
