"""Ends that are not the cell's own doing: memory, and signals from outside."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from firepool_broker import embedded
from firepool_broker.testing import Api
from kernels import Kernel

LOOP = "b = []\nwhile True: b.append(bytearray(16 << 20))"
CHILD = (
    "import subprocess, sys\n"
    f"subprocess.run([sys.executable, '-c', {LOOP!r}], check=True)\nprint('not reached')"
)


def newest() -> dict[str, Any]:
    connection = embedded.find()
    assert connection is not None
    with Api(connection) as api:
        job: dict[str, Any] = api.get("/v1/jobs?limit=1")["jobs"][0]
    return job


def process_of(marker: str) -> int:
    """The process of a job on this host, by a word of its environment that only it has."""
    word = f"FP_CASE={marker}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # the job sets the word itself, so that no process above it carries it
                if word in (entry / "environ").read_bytes() or marker in _name(entry):
                    found.append(int(entry.name))
            except OSError:
                continue
    assert len(found) == 1, found
    return found[0]


def _name(entry: Path) -> str:
    return (entry / "comm").read_text()


def agents() -> set[int]:
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if f"firepool-pod={os.environ['FIREPOOL_HOME']}".encode() in line:
                found.add(int(entry.name))
    return found


def test_out_of_memory_and_killed_from_outside(
    configure: Callable[..., Path], kernels: Callable[[], Kernel]
) -> None:
    """C12: four ends in a pool of 512 MiB; each prompt, each called what it was."""
    small = {"min_count": 1, "max_count": 3, "shape": {"cpu": 1, "memory_gib": 0.5}}
    configure(pools={"cpu-512m": small, "beside": {"min_count": 1}}, default_pool="cpu-512m")
    kernel = kernels()
    sku = "--sku cpu-512m"
    kernel.remote("1", sku)
    before = agents()
    assert before
    kernel.ok("%%firepool -a --sku beside --job other\nimport time; time.sleep(8); print('whole')")

    began = time.monotonic()
    first = kernel.run(f"%%firepool {sku}\nprint('start', flush=True)\n{LOOP}")
    assert time.monotonic() - began < 30
    assert first.stdout == "start\n"
    assert first.status == "error"
    assert "512 MiB" in first.traceback or first.error["ename"] == "MemoryError"
    if first.error["ename"] != "MemoryError":
        assert newest()["error"]["class"] == "OOM"

    second = kernel.run(f"%%firepool {sku}\n{CHILD}")
    assert second.error["ename"] == "CalledProcessError", second.outputs
    assert "SIGKILL" in second.traceback or "-9" in second.traceback
    assert newest()["error"]["class"] == "NonZeroExit"
    assert any("memory limit of 512 MiB was hit" in text for text in second.texts), second.texts

    request = kernel.start(
        f"%%firepool {sku}\nimport time\nopen('/proc/self/comm', 'w').write('fp-victim')\n"
        "print('up')\ntime.sleep(600)"
    )
    killed_at: list[float] = []

    def kill(_ran: Any, message: dict[str, Any]) -> None:
        if "up" in message["content"].get("text", ""):
            killed_at.append(time.monotonic())
            os.kill(process_of("fp-victim"), signal.SIGKILL)

    third = kernel.finish(request, watch=kill)
    assert time.monotonic() - killed_at[0] < 5
    assert third.status == "error"
    assert "SIGKILL" in third.error["evalue"]
    error = newest()["error"]
    assert error["class"] == "Signal"
    assert "memory" not in error["message"].lower()

    assert kernel.remote("print('ok')", sku).stdout == "ok\n"
    assert before <= agents(), "an agent was the victim"
    assert kernel.ok("other.wait(30), other.logs()").texts == ["(True, 'whole\\n')"]
