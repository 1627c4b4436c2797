"""Asynchronous cells; kernels restarted, killed or closed while their cells wait or run."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from firepool_broker import embedded
from firepool_broker.testing import Api
from kernels import Kernel

Jobs = Callable[[], list[dict[str, Any]]]

# -- C32 -----------------------------------------------------------------------------------------

SEVEN = "import asyncio\nasync def f():\n    await asyncio.sleep(0.01); return 7\n"


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        (SEVEN + "print(await f())", "7\n"),
        (SEVEN + "print(asyncio.run(f()))", "7\n"),
        (
            SEVEN + "import signal\nsignal.signal(signal.SIGUSR1, lambda *_: print('heard'))\n"
            "signal.raise_signal(signal.SIGUSR1)\nprint(asyncio.run(f()))",
            "heard\n7\n",
        ),
        (
            "import asyncio\nawait asyncio.sleep(0)\n"
            "asyncio.create_task(asyncio.sleep(3600)); print('left')",
            "left\n",
        ),
        (
            "import contextlib\nasync def numbers():\n    yield 1\n    yield 2\n"
            "@contextlib.asynccontextmanager\nasync def held():\n    yield 'held'\n"
            "async for n in numbers():\n    print(n)\n"
            "async with held() as h:\n    print(h)\n"
            f"{SEVEN}print([await f() for _ in range(2)], [n async for n in numbers()])",
            "1\n2\nheld\n[7, 7] [1, 2]\n",
        ),
    ],
    ids=["await", "run", "run-with-signals", "left-behind", "for-with-comprehension"],
)
def test_asynchronous_cells(kernel: Kernel, jobs: Jobs, code: str, shown: str) -> None:
    """C32 (1)-(4): as in IPython, scripts unchanged, and nothing said that the cell did not."""
    kernel.remote("1")
    began = time.monotonic()
    ran = kernel.remote(code)
    assert time.monotonic() - began < 3
    assert (ran.stdout, ran.stderr) == (shown, "")


@pytest.mark.parametrize("how", ["await f()", "asyncio.run(f())"])
def test_an_awaiting_cell_is_interrupted(kernel: Kernel, how: str) -> None:
    """C32: ■ while the cell awaits."""
    pressed: list[float] = []

    def press(_ran: Any, message: dict[str, Any]) -> None:
        if "up" in message["content"].get("text", ""):
            pressed.append(time.monotonic())
            kernel.interrupt()

    code = "import asyncio\nasync def f():\n    print('up')\n    await asyncio.sleep(600)\n"
    failed = kernel.finish(kernel.start(f"%%firepool\n{code}print({how})"), watch=press)
    assert time.monotonic() - pressed[0] < 3
    assert failed.error["ename"] in ("Interrupted", "KeyboardInterrupt", "CancelledError")


# -- C34 -----------------------------------------------------------------------------------------

ONE_SLOT = {"min_count": 0, "max_idle_count": 1, "max_count": 1}
APPENDS = (
    "import time\nhalf = 'set'\nfor n in range({seconds}):\n"
    "    with open('lines', 'a') as file: file.write(f'{{n}}\\n')\n"
    "    print(n)\n    time.sleep(1)\nhalf = 'whole'"
)
MOMENTS = ("queued", "starting", "running")


def broker() -> Api:
    connection = embedded.find()
    assert connection is not None
    return Api(connection)


def until(check: Callable[[], Any], within_seconds: float = 20) -> Any:
    deadline = time.monotonic() + within_seconds
    while not (found := check()):
        assert time.monotonic() < deadline, "it did not become so"
        threading.Event().wait(0.02)
    return found


def in_state(api: Api, *states: str) -> Callable[[], Any]:
    return lambda: [j for s in states for j in api.get(f"/v1/jobs?state={s}")["jobs"]]


def agents(home: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if any(f"firepool-pod={home}" in word for word in process.cmdline()):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def lines(home: Path) -> str:
    path = home / "notebooks" / "lines"
    return path.read_text() if path.exists() else ""


def goodbye(kernel: Kernel) -> None:
    """Ask for a restart as a front end does that does not interrupt first."""
    kernel.client.shutdown(restart=True)
    kernel.manager.provisioner.process.wait(20)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_restart_ends_what_the_cell_waits_for(
    configure: Callable[..., Path],
    kernels: Callable[[], Kernel],
    firepool_home: Path,
    moment: str,
) -> None:
    """C34: a restart while queued, while its pod starts, and while it runs."""
    configure(pools={"one": ONE_SLOT}, default_pool="one")
    kernel = kernels()
    stopped: list[psutil.Process] = []
    if moment == "queued":
        kernel.ok("%%firepool -a --job busy\nprint('up')\nimport time\ntime.sleep(600)")
        kernel.ok("import time\nwhile not busy.logs(): time.sleep(0.02)")
    if moment == "running":
        kernel.remote("1")
    kernel.start("%%firepool -o half\n" + APPENDS.format(seconds=120))
    until(embedded.find)
    with broker() as api:
        if moment == "starting":
            stopped = until(lambda: agents(firepool_home))
            for process in stopped:
                process.send_signal(signal.SIGSTOP)
        if moment == "running":
            (job,) = until(in_state(api, "RUNNING"))
            until(lambda: lines(firepool_home).count("\n") >= 2)
        else:
            (job,) = until(in_state(api, "QUEUED"))
        began = time.monotonic()
        goodbye(kernel)
        _, ended = api.wait(job["id"])
        assert time.monotonic() - began < 5
        assert (ended["state"], ended["error"]["class"]) == ("CANCELLED", "SessionClosed")
        for process in stopped:
            process.send_signal(signal.SIGCONT)
        before = lines(firepool_home)
        assert before == "" or moment == "running"
        kernel.manager.restart_kernel(now=True)
        kernel.client.wait_for_ready(timeout=60)
        kernel.load()
        assert lines(firepool_home) == before, "the file stops growing"
        if moment == "queued":
            (busy,) = until(in_state(api, "RUNNING"))
            api.post(f"/v1/jobs/{busy['id']}/interrupt", {"kill": True})
            api.wait(busy["id"])
        assert in_state(api, "PENDING", "QUEUED", "RUNNING")() == []
        assert [pod["job"] for pod in api.get("/v1/pods")["pods"] if pod["job"]] == []
        assert kernel.remote("print('half' in globals())").stdout == "False\n"
        assert kernel.ok("'half' in globals()").texts == ["False"]
        newest = api.get("/v1/jobs?limit=1")["jobs"][0]
        if moment == "running":
            assert newest["acquisition"]["path"] == "warm"
            assert newest["pods"] == ended["pods"]
        assert lines(firepool_home) == before


def test_a_front_ends_restart_interrupts_and_ends(
    kernels: Callable[[], Kernel], firepool_home: Path
) -> None:
    """C34: the restart of Jupyter's own manager, which interrupts before it says goodbye."""
    kernel = kernels()
    kernel.remote("1")
    kernel.start("%%firepool -o half\n" + APPENDS.format(seconds=120))
    until(lambda: lines(firepool_home).count("\n") >= 2)
    with broker() as api:
        (job,) = in_state(api, "RUNNING")()
        began = time.time()
        kernel.restart()
        _, ended = api.wait(job["id"])
        assert ended["times"]["ended"] - began < 5
        assert ended["state"] == "CANCELLED"
        assert ended["error"]["class"] in ("Interrupted", "SessionClosed")
        before = lines(firepool_home)
        kernel.load()
        assert kernel.remote("print('next')").stdout == "next\n"
        newest = api.get("/v1/jobs?limit=1")["jobs"][0]
        assert (newest["acquisition"]["path"], newest["pods"]) == ("warm", ended["pods"])
        assert lines(firepool_home) == before


def test_killed_and_closed_kernels_lose_nothing(
    configure: Callable[..., Path], kernels: Callable[[], Kernel], firepool_home: Path
) -> None:
    """C34: SIGKILL of two kernels, everything closed for longer than every limit, a new kernel."""
    slots = {**ONE_SLOT, "idle_timeout_seconds": "1s"}
    configure(
        pools={"one": slots, "silent": slots},
        default_pool="one",
        sessions={"ttl_seconds": 10.5},
        idle_exit_seconds=2,
    )
    first, second, third = kernels(), kernels(), kernels()
    first.start("%%firepool\n" + APPENDS.format(seconds=14))
    with broker() as api:
        (running,) = until(in_state(api, "RUNNING"))
        second.start("%%firepool\nopen('never', 'w')\nprint('never')")
        (queued,) = until(in_state(api, "QUEUED"))
        third.ok(
            "%%firepool -a --sku silent --job quiet\n"
            "import time\nprint('first')\ntime.sleep(14)\nprint('last')"
        )
        until(lambda: len(in_state(api, "RUNNING")()) == 2)
        (quiet,) = [job for job in in_state(api, "RUNNING")() if job["id"] != running["id"]]
        first.kill()
        second.kill()
        third.shut_down()
        until(lambda: (api.get(f"/v1/jobs/{queued['id']}")["waiting"] or {}).get("reason")
              == "withheld")  # fmt: skip
        began = time.monotonic()
        _, lapsed = api.wait(queued["id"])
        assert time.monotonic() - began < 15
        assert (lapsed["state"], lapsed["error"]["class"]) == ("CANCELLED", "SessionClosed")
        assert lapsed["times"]["first_instruction"] is None
        for job in (running, quiet):
            assert api.get(f"/v1/jobs/{job['id']}")["state"] == "RUNNING"
        _, ended = api.wait(running["id"])
        _, silent = api.wait(quiet["id"])
        for job in (ended, silent):
            assert (job["state"], job["attempt"]) == ("SUCCEEDED", 1)
    whole = "".join(f"{n}\n" for n in range(14))
    assert lines(firepool_home) == whole, "it ran once"
    assert not (firepool_home / "notebooks" / "never").exists()
    again = kernels()
    assert again.ok(f"%firepool result {running['id']}").stdout == whole
    assert again.ok(f"%firepool result {quiet['id']}").stdout == "first\nlast\n"
    assert "half" not in again.ok("print(list(globals()))").stdout
    with broker() as api:
        assert in_state(api, "PENDING", "QUEUED", "RUNNING")() == []
        assert api.get(f"/v1/jobs/{quiet['id']}")["state"] == "SUCCEEDED"
    assert os.path.exists(firepool_home / "notebooks")
