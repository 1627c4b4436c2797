"""■, dead brokers, dead kernels: how cells stop and what stays."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from firepool_broker import embedded
from firepool_broker.testing import Api, assert_nothing_left, kill_hard
from kernels import Kernel, Ran

ONE_POD = {"min_count": 1, "max_idle_count": 1, "max_count": 1}
FOREVER = "import time\nprint('started')\ntime.sleep(600)"
STUBBORN = (
    "import subprocess, time\np = subprocess.Popen(['sleep', '98765'])\nprint('started')\n"
    "while True:\n    try:\n        time.sleep(1)\n"
    "    except KeyboardInterrupt:\n        print('ignored')"
)


class When:
    """Acts once, when a text has been printed."""

    def __init__(self, text: str, act: Callable[[], None]) -> None:
        self.text, self.act = text, act
        self.at: float | None = None

    def __call__(self, ran: Ran, message: dict[str, Any]) -> None:
        if self.at is None and self.text in message["content"].get("text", ""):
            self.at = time.monotonic()
            self.act()


@pytest.fixture
def own_folder(firepool_home: Path) -> Iterator[Path]:
    """A notebook's folder in a home of its own, of whose broker nothing is left."""
    folder = firepool_home / "notebooks"
    folder.mkdir()
    yield folder
    if embedded.find() is not None:
        embedded.stop()
    assert_nothing_left(firepool_home)


@pytest.fixture
def own(own_folder: Path) -> Iterator[Kernel]:
    """A kernel with a broker of its own."""
    kernel = Kernel(own_folder)
    kernel.load()
    try:
        yield kernel
    finally:
        kernel.shut_down()


def pods() -> list[dict[str, Any]]:
    connection = embedded.find()
    assert connection is not None
    with Api(connection) as api:
        found: list[dict[str, Any]] = api.get("/v1/pods")["pods"]
    return found


def pod_of(kernel: Kernel) -> str:
    return kernel.remote("import os\nprint(os.environ['FIREPOOL_ATTEMPT'])").stdout


def sleepers() -> int:
    count = 0
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                count += b"98765" in Path(f"/proc/{entry}/cmdline").read_bytes()
            except OSError:
                continue
    return count


def test_an_interrupt_stops_the_code_and_keeps_the_pod(kernel: Any, jobs: Any) -> None:
    kernel.remote("1")
    before = jobs()[0]["pods"]
    pressed = When("started", kernel.interrupt)
    failed = kernel.run("%%firepool\n" + FOREVER, watch=pressed)
    assert failed.status == "error"
    assert failed.error["ename"] == "Interrupted"
    assert "time.sleep(600)" in failed.traceback
    assert pressed.at is not None
    assert jobs()[0]["state"] == "CANCELLED"
    assert jobs()[0]["error"]["class"] == "Interrupted"
    kernel.remote("1")
    assert jobs()[0]["pods"] == before
    assert jobs()[0]["acquisition"]["path"] == "warm"


def test_a_later_press_kills_what_swallows_the_first(kernel: Any) -> None:
    request = kernel.start("%%firepool\n" + STUBBORN)
    seen = []

    def press(ran: Ran, message: dict[str, Any]) -> None:
        text = message["content"].get("text", "")
        if "started" in text:
            kernel.interrupt()
        if "ignored" in text:
            seen.append(time.monotonic())
            kernel.interrupt()  # too soon: ignored
            time.sleep(2.2)
            kernel.interrupt()

    failed = kernel.finish(request, watch=press)
    assert failed.stdout.count("ignored") == 1
    assert failed.error["ename"] == "Interrupted"
    assert "killed" in failed.error["evalue"]
    assert "lost" in failed.error["evalue"]
    deadline = time.monotonic() + 2
    while sleepers() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sleepers() == 0
    assert kernel.remote("print('next')").stdout == "next\n"


def test_the_first_press_cancels_what_does_not_run_yet(
    configure: Callable[..., Path], own_folder: Path
) -> None:
    configure(pools={"only": ONE_POD}, default_pool="only")
    kernel = Kernel(own_folder).load()
    try:
        kernel.ok("%%firepool -a --job busy\nimport time\ntime.sleep(600)")
        lines: list[str] = []

        def press(ran: Ran, message: dict[str, Any]) -> None:
            text = (message["content"].get("data") or {}).get("text/plain", "")
            if "waiting" in text and not lines:
                kernel.interrupt()
            if text:
                lines.append(text)

        cancelled = kernel.run("%%firepool\nprint('never')", watch=press)
        assert lines[0].startswith("waiting")
        assert "cancelling" in lines[1]
        assert cancelled.error["ename"] == "JobCancelled"
        assert [output["output_type"] for output in cancelled.outputs] == ["error"]
        kernel.ok("busy.cancel(); busy.wait(30)")
        assert kernel.remote("print('next')").stdout == "next\n"
    finally:
        kernel.shut_down()


def test_the_waiting_line_goes_with_the_first_output(
    configure: Callable[..., Path], own_folder: Path
) -> None:
    configure(pools={"only": ONE_POD}, default_pool="only")
    kernel = Kernel(own_folder).load()
    try:
        kernel.ok("%%firepool -q\n1")
        kernel.ok("%%firepool -a\nimport time\ntime.sleep(1.5)")
        seen: list[str] = []
        ran = kernel.finish(
            kernel.start("%%firepool\nprint('at last')"),
            watch=lambda ran, message: seen.append(
                (message["content"].get("data") or {}).get("text/plain", "")
            ),
        )
        assert any(text.startswith("waiting") for text in seen)
        assert [o["output_type"] for o in ran.outputs] == ["stream"]
        quiet = kernel.remote("print(1)", "-q")
        assert quiet.stdout == "1\n"
    finally:
        kernel.shut_down()


def test_the_wait_can_be_left_when_the_broker_hangs(own: Kernel) -> None:
    connection = embedded.ensure_running()
    request = own.start("%%firepool\n" + FOREVER)

    def freeze() -> None:
        os.kill(connection.pid, signal.SIGSTOP)
        own.interrupt()

    def press(ran: Ran, message: dict[str, Any]) -> None:
        if "started" in message["content"].get("text", ""):
            freeze()
        text = (message["content"].get("data") or {}).get("text/plain", "")
        if "leaves the wait" in text:
            time.sleep(2.2)
            own.interrupt()

    try:
        began = time.monotonic()
        failed = own.finish(request, watch=press)
    finally:
        os.kill(connection.pid, signal.SIGCONT)
    assert failed.error["ename"] == "Interrupted"
    assert "left the wait" in failed.error["evalue"]
    assert time.monotonic() - began < 20


def test_a_running_cell_survives_its_brokers_death(own: Kernel) -> None:
    connection = embedded.ensure_running()
    request = own.start(
        "%%firepool\nimport time\nfor n in range(8):\n    print('line', n)\n    time.sleep(0.4)"
    )
    ran = own.finish(request, watch=When("line 1", lambda: kill_hard(connection)))
    assert ran.status == "ok", ran.reply
    assert ran.stdout == "".join(f"line {n}\n" for n in range(8))
    successor = embedded.find()
    assert successor is not None
    assert successor.pid != connection.pid
    assert own.remote("print('next')").stdout == "next\n"


def test_the_next_call_starts_a_broker(own: Kernel) -> None:
    own.remote("1")
    connection = embedded.find()
    assert connection is not None
    kill_hard(connection)
    assert own.remote("print('again')").stdout == "again\n"
    embedded.stop()
    assert own.remote("print('and again')").stdout == "and again\n"


def test_restart_keeps_the_pod_and_forgets_the_names(own: Kernel) -> None:
    note = "os.environ['FIREPOOL_SESSION_DIR'] + '/note'"
    own.remote(f"import os\nopen({note}, 'w').write('y')\nv = 1")
    before = [pod["name"] for pod in pods() if pod["state"] == "HELD"]
    own.restart()
    own.load()
    ran = own.remote(f"import os\nprint(open({note}).read(), 'v' in globals())")
    assert ran.stdout == "y False\n"
    assert [pod["name"] for pod in pods() if pod["state"] == "HELD"] == before
    assert "warm" in own.ok("%firepool status").stdout


def test_restart_cancels_what_its_cells_wait_for(own: Kernel) -> None:
    # a restart interrupts first: code that goes on all the same is ended by the goodbye
    goes_on = STUBBORN.replace("p = subprocess.Popen(['sleep', '98765'])\n", "")
    own.start("%%firepool\n" + goes_on)
    with Api(embedded.ensure_running()) as api:
        job: dict[str, Any] = {}
        deadline = time.monotonic() + 30
        while not job and time.monotonic() < deadline:
            running = api.get("/v1/jobs?state=RUNNING")["jobs"]
            job = running[0] if running else {}
        next(event for event, _ in api.follow(job["id"]) if event == "stream")
        time.sleep(0.5)  # the kernel has heard it too
        began = time.monotonic()
        own.manager.restart_kernel(now=False)
        _, ended = api.wait(job["id"])
    assert ended["state"] == "CANCELLED"
    assert ended["error"]["class"] == "SessionClosed"
    assert time.monotonic() - began < 20
    own.client.wait_for_ready(timeout=60)
    own.load()
    assert own.remote("print('next')").stdout == "next\n"


def test_shutting_down_gives_the_pods_up(own_folder: Path) -> None:
    folder = own_folder
    first = Kernel(folder).load()
    second = Kernel(folder).load()
    try:
        first.remote("1")
        second.remote("1")
        held = {pod["session"] for pod in pods() if pod["state"] == "HELD"}
        assert len(held) == 2, "each kernel keeps a pod of its own"
        first.shut_down()
        deadline = time.monotonic() + 10
        while len({p["session"] for p in pods() if p["state"] == "HELD"}) != 1:
            assert time.monotonic() < deadline, pods()
            time.sleep(0.05)
    finally:
        second.shut_down()


def test_a_killed_kernel_loses_nothing(own_folder: Path) -> None:
    folder = own_folder
    first = Kernel(folder).load()
    first.start("%%firepool\nimport time\nfor n in range(5):\n    print(n)\n    time.sleep(0.4)")
    with Api(embedded.ensure_running()) as api:
        running: list[dict[str, Any]] = []
        while not running:
            running = api.get("/v1/jobs?state=RUNNING")["jobs"]
        first.kill()
        second = Kernel(folder).load()
        try:
            ran = second.ok(f"%firepool result {running[0]['id']}")
            assert ran.stdout == "0\n1\n2\n3\n4\n"
        finally:
            second.shut_down()
