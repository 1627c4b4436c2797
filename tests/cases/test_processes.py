"""Processes: what ■ reaches, and what a job leaves behind."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kernels import Kernel, Ran

Jobs = Callable[[], list[dict[str, Any]]]
CHILD = "import subprocess, time\np = subprocess.Popen(['sleep', '{number}'])\n"
PLAIN = "print('up')\nwhile True:\n    time.sleep(1)"
SWALLOWS = (
    "print('up')\nwhile True:\n    try:\n        time.sleep(1)\n"
    "    except KeyboardInterrupt:\n        print('ignored')"
)
IN_C = "print('up')\nsum(range(10**12))"
DEAF = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('up')\ntime.sleep(600)"


def sleepers(number: str) -> int:
    count = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                count += (entry / "cmdline").read_bytes() == b"sleep\0%s\0" % number.encode()
            except OSError:
                continue
    return count


class Presses:
    """Presses ■ when the cell is up, and again once a second press counts."""

    def __init__(self, kernel: Kernel, times: int) -> None:
        self._kernel, self._times = kernel, times
        self.first = self.last = 0.0

    def __call__(self, _ran: Ran, message: dict[str, Any]) -> None:
        if "up" not in message["content"].get("text", "") or self.first:
            return
        self.first = time.monotonic()
        self._kernel.interrupt()
        for _ in range(self._times - 1):
            time.sleep(3)  # what the person waits; a press sooner than 2 s counts for nothing
            self._kernel.interrupt()
        self.last = time.monotonic()


@pytest.mark.parametrize(
    ("body", "presses"),
    [(PLAIN, 1), (SWALLOWS, 2), (IN_C, 2), (DEAF, 2)],
    ids=["plain", "swallows", "in-c", "deaf"],
)
def test_an_interrupt_ends_the_tree_and_nothing_else(
    kernel: Kernel, jobs: Jobs, body: str, presses: int
) -> None:
    """C20: one press for what hears it, a second one for what does not."""
    number = f"98765.{time.monotonic_ns() % 10**6}"
    kernel.remote("1")
    pod = jobs()[0]["pods"]
    press = Presses(kernel, presses)
    code = "%%firepool\n" + CHILD.format(number=number) + body
    failed = kernel.finish(kernel.start(code), watch=press)
    assert time.monotonic() - press.last < 3
    ended = time.monotonic()
    assert failed.status == "error"
    assert failed.error["ename"] in ("Interrupted", "KeyboardInterrupt")
    assert kernel.ok(
        "import firepool_nb; issubclass(firepool_nb.Interrupted, KeyboardInterrupt)"
    ).texts == ["True"]
    assert failed.stdout == ("up\nignored\n" if body == SWALLOWS else "up\n")
    job = jobs()[0]
    assert (job["state"], job["error"]["class"]) == ("CANCELLED", "Interrupted")
    if presses == 1:
        assert "time.sleep(1)" in failed.traceback
        assert press.last - press.first < 3
    else:
        assert "killed" in failed.error["evalue"]
        assert "lost" in failed.error["evalue"]
    while sleepers(number):
        assert time.monotonic() - ended < 2, "a child outlived the job"
        time.sleep(0.02)
    began = time.monotonic()
    assert kernel.remote("print('next')").stdout == "next\n"
    assert time.monotonic() - began < 5
    assert jobs()[0]["pods"] == pod
    assert jobs()[0]["acquisition"]["path"] == "warm"


def test_one_press_alone_never_kills_by_time(kernel: Kernel, jobs: Jobs) -> None:
    """C20: after one press, code that swallows it goes on however long it takes."""
    request = kernel.start("%%firepool\nimport time\n" + SWALLOWS)
    lines: list[float] = []

    def watch(_ran: Ran, message: dict[str, Any]) -> None:
        text = message["content"].get("text", "")
        if "up" in text:
            kernel.interrupt()
        if "ignored" in text:
            lines.append(time.monotonic())
            time.sleep(3)
            assert jobs()[0]["state"] == "RUNNING"
            kernel.interrupt()

    failed = kernel.finish(request, watch=watch)
    assert len(lines) == 1
    assert "killed" in failed.error["evalue"]


def test_a_late_interrupt_leaves_the_next_cell_alone(kernel: Kernel, jobs: Jobs) -> None:
    """C20: a press that comes as a cell ends does nothing to the next one on that pod."""
    for delay in (0.0, 0.002, 0.01):
        kernel.ok("%%firepool -a --job gone\nprint('short')")
        kernel.ok("gone.wait(30)")
        time.sleep(delay)
        kernel.ok("gone.interrupt(); gone.interrupt(kill=True)")
        ran = kernel.remote("import time; time.sleep(0.3); print('whole')")
        assert ran.stdout == "whole\n"
        assert jobs()[0]["state"] == "SUCCEEDED"
        assert jobs()[0]["pods"] == jobs()[1]["pods"]


# -- C22 -----------------------------------------------------------------------------------------

LEAVES = r"""
import ctypes, multiprocessing, os, socket, time
from multiprocessing import shared_memory
libc = ctypes.CDLL(None)
def serve(ready):
    s = socket.socket(); s.bind(("127.0.0.1", {port})); s.listen()
    ready.set()
    time.sleep(1000)
context = multiprocessing.get_context("fork")
ready = context.Event()
context.Process(target=serve, args=(ready,), daemon=False).start()
assert ready.wait(10)
memory = shared_memory.SharedMemory(create=True, name="{name}", size=64 << 20)
memory.buf[:8] = b"leftover"
print(libc.shmget({key}, 4096, 0o1600) >= 0, libc.semget({key}, 1, 0o1600) >= 0, flush=True)
semaphore = multiprocessing.Semaphore()
os.kill(os.getpid(), 9)
"""
USES = r"""
import os, socket
from multiprocessing import shared_memory
s = socket.socket(); s.bind(("127.0.0.1", {port})); s.listen()
print("bound")
try:
    memory = shared_memory.SharedMemory(create=True, name="{name}", size=1 << 20)
    print("created", sorted(os.listdir("/dev/shm")))
    memory.close(); memory.unlink()
except FileExistsError:
    print("exists")
rows = [open(f"/proc/sysvipc/{{kind}}").read().splitlines()[1:] for kind in ("shm", "sem")]
print([sum(str({key}) in row.split()[0] for row in each) for each in rows])
"""


@pytest.mark.parametrize("isolation", ["auto", "process"])
def test_what_a_killed_job_leaves_is_gone_or_named(
    configure: Callable[..., Path], kernels: Callable[[], Kernel], isolation: str, request: Any
) -> None:
    """C22: port, child, shared memory and IPC of a job that died by SIGKILL."""
    configure(isolation=isolation)
    kernel = kernels()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    values = {"port": port, "name": f"fp_leak_{port}", "key": 0x46500000 + port}
    try:
        died = kernel.run("%%firepool\n" + LEAVES.format(**values))
        assert died.stdout == "True True\n"
        assert "SIGKILL" in died.error["evalue"]
        after = kernel.remote(USES.format(**values))
        assert after.stderr == "", "nothing of the first job's tracker is heard here"
        lines = after.stdout.splitlines()
        assert lines[0] == "bound"
        if "namespaces" in kernel.ok("%firepool status").stdout:
            assert lines[1:] == [f"created ['{values['name']}']", "[0, 0]"]
        else:
            assert lines[1].startswith(("exists", "created"))
            assert lines[2].startswith("[0,"), "the segment is the job's beyond doubt"
            told = kernel.ok("%firepool pools").stdout  # the isolation is said everywhere
            assert "process" in told
    finally:
        _remove(values["key"], str(values["name"]))


def _remove(key: int, name: str) -> None:
    from firepool_podagent import ipc

    for found in ipc.objects():
        if found.key == key:
            ipc.remove(found)
    Path(f"/dev/shm/{name}").unlink(missing_ok=True)


def test_what_cannot_be_attributed_is_named(
    configure: Callable[..., Path], request: pytest.FixtureRequest
) -> None:
    """C22: without namespaces what cannot be attributed is named instead of removed."""
    configure(isolation="process")
    api = request.getfixturevalue("api")
    api.session("k")
    path = Path("/dev/shm") / f"fp-left-{time.time_ns()}"
    try:
        _, job = api.run(f"open({str(path)!r}, 'w').close()", lease_tag="k", client_id="client-1")
        deadline = time.monotonic() + 10
        while True:
            (pod,) = [p for p in api.get("/v1/pods")["pods"] if p["name"] == job["pods"][0]]
            if any(str(path) in str(line) for line in pod["story"]):
                break
            assert time.monotonic() < deadline, pod["story"]
            time.sleep(0.05)
    finally:
        path.unlink(missing_ok=True)
