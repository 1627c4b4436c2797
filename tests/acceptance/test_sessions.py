"""Kernels and their pods: each its own, kept over a restart, crossing once, given up at goodbye."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from firepool_broker import embedded
from firepool_broker.testing import Api
from kernels import Kernel

CELLS = 50


def broker() -> Api:
    connection = embedded.find()
    assert connection is not None
    return Api(connection)


def until(check: Callable[[], Any], within_seconds: float = 20) -> Any:
    deadline = time.monotonic() + within_seconds
    while not (found := check()):
        assert time.monotonic() < deadline, "it did not become so"
        threading.Event().wait(0.01)
    return found


def pods(api: Api) -> dict[str, dict[str, Any]]:
    return {pod["name"]: pod for pod in api.get("/v1/pods")["pods"]}


def test_two_kernels_fifty_cells_each_in_turn(kernels: Callable[[], Kernel]) -> None:
    """Each keeps its own warm pod; none is recycled or taken by the other."""
    both = [kernels(), kernels()]
    for number in range(CELLS):
        for each in both:
            assert each.remote(f"print({number})").stdout == f"{number}\n"
    with broker() as api:
        found = api.get("/v1/jobs?limit=200")["jobs"]
    assert len(found) == 2 * CELLS
    by_session: dict[str, set[str]] = {}
    for job in found:
        by_session.setdefault(job["lease_tag"], set()).update(job["pods"])
    first, second = by_session.values()
    assert len(first) == len(second) == 1
    assert first.isdisjoint(second)
    paths = [job["acquisition"]["path"] for job in reversed(found)]
    assert set(paths[:2]) <= {"warm", "new"}
    assert paths[2:] == ["warm"] * (2 * CELLS - 2)
    assert {job["session_files"] for job in found[:-2]} == {"kept"}


NOTEBOOK = (
    "import os\nfolder = os.environ['FIREPOOL_SESSION_DIR']\n"
    "before = sorted(os.listdir(folder)) if os.path.exists(folder) else []\n"
    "print([n for n in before if n[0] != '.'], 'defined' in globals())\n"
    "open(folder + '/model', 'w').write('trained')\ndefined = 1",
    "import os\nprint(open(os.environ['FIREPOOL_SESSION_DIR'] + '/model').read(), "
    "'defined' in globals())",
    "import os\nprint(os.getpid() > 0)",
)


def test_restart_and_run_all(kernels: Callable[[], Kernel]) -> None:
    """Every cell warm on the pod of before, the variables gone, the session's files there."""
    kernel = kernels()
    shown = [kernel.remote(cell).stdout for cell in NOTEBOOK]
    assert shown == ["[] False\n", "trained False\n", "True\n"]
    with broker() as api:
        before = api.get("/v1/jobs?limit=1")["jobs"][0]
        kernel.restart()
        kernel.load()
        again = [kernel.remote(cell).stdout for cell in NOTEBOOK]
        assert again == ["['model'] False\n", "trained False\n", "True\n"]
        jobs = api.get("/v1/jobs?limit=3")["jobs"]
        assert [job["acquisition"]["path"] for job in jobs] == ["warm"] * 3
        assert {tuple(job["pods"]) for job in jobs} == {tuple(before["pods"])}
        assert {job["lease_tag"] for job in jobs} == {before["lease_tag"]}


def test_a_new_kernel_takes_the_pod_of_a_killed_one_once(kernels: Callable[[], Kernel]) -> None:
    """It crosses over once, retires afterwards, and its replacement is staged by then."""
    old = kernels()
    old.remote("1")
    with broker() as api:
        (pod,) = api.get("/v1/jobs?limit=1")["jobs"][0]["pods"]
        old.kill()
        until(lambda: not any(s["connected"] for s in api.get("/v1/sessions")["sessions"]))
        new = kernels()
        request = new.start("%%firepool\nimport time\nprint('crossed')\ntime.sleep(1.5)")
        job = until(lambda: api.get("/v1/jobs?state=RUNNING")["jobs"])[0]
        assert (job["acquisition"]["path"], job["pods"]) == ("recycled", [pod])
        others = until(lambda: [n for n, p in pods(api).items() if n != pod and p["state"] in
                                ("STARTING", "IDLE")])  # fmt: skip
        assert pods(api)[pod]["retire_after"]
        assert api.get(f"/v1/jobs/{job['id']}")["state"] == "RUNNING", "staged before it retires"
        assert new.finish(request).stdout == "crossed\n"
        until(lambda: pod not in pods(api))
        began = time.monotonic()
        new.remote("1")
        assert time.monotonic() - began < 5
        following = api.get("/v1/jobs?limit=1")["jobs"][0]
        assert following["pods"][0] != pod
        assert following["acquisition"]["path"] in ("warm", "new")
        assert others


def test_a_goodbye_gives_the_pod_up_at_once(
    kernels: Callable[[], Kernel], firepool_home: Path
) -> None:
    """A kernel that is shut down holds nothing a moment later, and its folder is wiped."""
    kernel = kernels()
    kernel.remote("import os\nopen(os.environ['FIREPOOL_SESSION_DIR'] + '/x', 'w').write('x')")
    with broker() as api:
        job = api.get("/v1/jobs?limit=1")["jobs"][0]
        kernel.shut_down()
        until(lambda: job["pods"][0] not in pods(api), 5)
        assert not [p for p in pods(api).values() if p["session"]]
        until(lambda: not Path(job["session_dir"]).exists(), 5)
        assert [s for s in api.get("/v1/sessions")["sessions"] if s["connected"]] == []
    assert firepool_home.exists()
