"""A Jupyter server that ends leaves the broker alone, and nothing of ours holds it up."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from firepool_broker import embedded

TOKEN = "stop-test"


@pytest.fixture
def home(monkeypatch) -> Iterator[Path]:
    # A short path: sockets below it have 108 bytes at most
    folder = Path(tempfile.mkdtemp(prefix="fpsrv-"))
    monkeypatch.setenv("FIREPOOL_HOME", str(folder / "fp"))
    yield folder
    embedded.stop()
    shutil.rmtree(folder)


def test_the_broker_outlives_the_server_that_started_it(home):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}/odd%40base/"
    command = [sys.executable, "-m", "jupyter", "server", "--no-browser", "--allow-root"]
    command += [f"--ServerApp.port={port}", "--ServerApp.ip=127.0.0.1"]
    command += ["--ServerApp.port_retries=0", "--ServerApp.base_url=/odd%40base/"]
    command += [f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={home}"]
    command += ["--ServerApp.jpserver_extensions={'firepool_nb.server': True}"]
    folders = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
    environment = {**os.environ, **{name: str(home / name) for name in folders}}
    with open(home / "server.log", "wb") as log:
        server = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        with httpx.Client(headers={"Authorization": f"token {TOKEN}"}, timeout=30) as client:
            _wait_until_up(client, url, server)
            about = client.get(f"{url}firepool/about").json()
            assert about["broker"] == {"kind": "embedded", "state": "none"}
            assert client.post(f"{url}firepool/start").json() == {"started": True}
            about = client.get(f"{url}firepool/about").json()
            assert about["broker"]["state"] == "running"
            assert about["broker"]["isolation"] in {"auto", "namespaces", "process", "none"}
            with client.stream("GET", f"{url}firepool/v1/events") as events:
                assert events.status_code == 200
                client.post(f"{url}api/shutdown")
                assert server.wait(timeout=20) == 0, (home / "server.log").read_text()
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()
    found = embedded.find()
    assert found is not None
    transport = httpx.HTTPTransport(uds=found.socket)
    with httpx.Client(transport=transport) as client:
        headers = {"Authorization": f"Bearer {found.token}"}
        assert client.get("http://broker/v1/pools", headers=headers).status_code == 200


def _wait_until_up(client: httpx.Client, url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            if client.get(f"{url}api/status").status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert server.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)  # another program's start has no event that we could wait for
