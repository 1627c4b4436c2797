"""One slot for a caller: what is evicted gives it up, and nothing runs twice."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from firepool_broker import embedded
from firepool_broker.testing import Api, kill_hard

# what a refused connection leaves to the collector is httpcore's
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
SESSION = {"lease_tag": "kernel-1", "client_id": "client-1", "attached": False}
A = (
    "import os, time\n"
    "with open(os.environ['FIREPOOL_SESSION_DIR'] + '/lines', 'a') as file:\n"
    "    file.write(os.environ['FIREPOOL_ATTEMPT'] + '\\n')\n"
    "for n in range({steps}):\n    print(n, flush=True)\n    time.sleep(0.1)\n"
)


class Samples:
    """Looks at what is booked, again and again, whenever a broker answers."""

    def __init__(self) -> None:
        self.wrong: list[Any] = []
        self.taken = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(0.05):
            connection = embedded.find()
            if connection is None:
                continue
            try:
                with Api(connection) as api:
                    pods = [pod for pod in api.get("/v1/pods")["pods"] if pod["job"]]
                    running = api.get("/v1/jobs?state=RUNNING")["jobs"]
            except Exception:  # noqa: BLE001 - a broker that was killed under the question
                continue
            self.taken += 1
            if len(pods) > 1 or len(running) > 1:
                self.wrong.append((pods, running))

    def end(self) -> None:
        self._over.set()
        self._thread.join()
        assert self.taken
        assert self.wrong == []


@pytest.fixture
def opened(
    configure: Callable[..., Path], request: pytest.FixtureRequest
) -> Iterator[dict[str, Any]]:
    """A caller with a limit of one pod, and somebody who watches it."""
    configure(limits={"max_pods_per_caller": 1})
    api: Api = request.getfixturevalue("api")
    session: dict[str, Any] = api.session("kernel-1")
    samples = Samples()
    yield session
    samples.end()


def written(opened: dict[str, Any]) -> list[str]:
    return (Path(opened["session_dir"]) / "lines").read_text().split()


def up(api: Api, job_id: str) -> None:
    for kind, _ in api.follow(job_id):
        if kind == "stream":
            return
    raise AssertionError("it ended without a word")


def kill_agent_of(home: Path, pod: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            line = process.cmdline()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if any(f"firepool-pod={home}" in word and pod in word for word in line):
            found.append(process)
    (agent,) = found
    inside = agent.children(recursive=True)
    agent.kill()
    return inside


def counted(steps: int) -> str:
    return "".join(f"{n}\n" for n in range(steps))


def submit(api: Api, steps: int, **fields: Any) -> tuple[Any, Any]:
    """A, which holds the only slot, and B, which waits for it."""
    a = api.submit(A.replace("{steps}", str(steps)), **fields, **SESSION)
    up(api, a["id"])
    b = api.submit("print('b')", **SESSION)
    waiting = api.get(f"/v1/jobs/{b['id']}")
    assert waiting["state"] == "QUEUED"
    assert waiting["waiting"]["reason"] == "quota"
    return a, b


def test_undisturbed_it_runs_once(opened: dict[str, Any], api: Api) -> None:
    """C40 (1): one line; B starts when A is done."""
    a, b = submit(api, 40)
    text, ended = api.wait(a["id"])
    assert (ended["state"], text) == ("SUCCEEDED", counted(40))
    assert api.wait(b["id"])[0] == "b\n"
    assert written(opened) == [f"{a['id']}:1"]


@pytest.mark.parametrize("retries", [False, True], ids=["fails", "again"])
def test_its_pod_is_deleted(
    opened: dict[str, Any], api: Api, firepool_home: Path, retries: bool
) -> None:
    """C40 (2): lost, confirmed gone, the slot free; run again only when that was asked for."""
    a, b = submit(api, 30, on_lost="requeue" if retries else "fail")
    pod = api.get(f"/v1/jobs/{a['id']}")["pods"][0]
    began = time.monotonic()
    inside = kill_agent_of(firepool_home, pod)
    text, ended = api.wait(a["id"])
    assert time.monotonic() - began < 60
    _, alive = psutil.wait_procs(inside, timeout=1)
    assert alive == []
    if retries:
        assert (ended["state"], ended["attempt"]) == ("SUCCEEDED", 2)
        assert text.endswith(counted(30))
        assert written(opened) == [f"{a['id']}:1", f"{a['id']}:2"]
    else:
        assert (ended["state"], ended["error"]["class"]) == ("FAILED", "PodLost")
        assert len(ended["error"]["message"]) > 10
        assert written(opened) == [f"{a['id']}:1"]
    text, ended = api.wait(b["id"])
    assert (ended["state"], text) == ("SUCCEEDED", "b\n")
    assert [p["job"] for p in api.get("/v1/pods")["pods"] if p["job"]] == []


def test_the_broker_is_killed(opened: dict[str, Any]) -> None:
    """C40 (4): A goes on and is told whole; B keeps its place before C."""
    with Api(embedded.ensure_running()) as api:
        a, b = submit(api, 30)
        c = api.submit("print('c')", **SESSION)
        kill_hard(api.connection)
    with Api(embedded.ensure_running()) as api:
        assert api.get(f"/v1/jobs/{b['id']}")["state"] == "QUEUED"
        text, ended = api.wait(a["id"])
        assert (ended["state"], ended["attempt"], text) == ("SUCCEEDED", 1, counted(30))
        assert api.wait(b["id"])[0] == "b\n"
        assert api.wait(c["id"])[0] == "c\n"
        after = [api.get(f"/v1/jobs/{job['id']}")["times"] for job in (a, b, c)]
        assert after[0]["ended"] <= after[1]["committed"] <= after[2]["committed"]
        assert after[1]["ended"] <= after[2]["committed"]
    assert written(opened) == [f"{a['id']}:1"]


def test_pod_and_broker_are_killed(opened: dict[str, Any], firepool_home: Path) -> None:
    """C40 (5): as (2), found out by the next broker."""
    with Api(embedded.ensure_running()) as api:
        a, b = submit(api, 300)
        pod = api.get(f"/v1/jobs/{a['id']}")["pods"][0]
        kill_hard(api.connection)
    kill_agent_of(firepool_home, pod)
    began = time.monotonic()
    with Api(embedded.ensure_running()) as api:
        _, ended = api.wait(a["id"])
        assert (ended["state"], ended["error"]["class"]) == ("FAILED", "PodLost")
        assert api.wait(b["id"])[0] == "b\n"
        assert time.monotonic() - began < 60
        assert [p["job"] for p in api.get("/v1/pods")["pods"] if p["job"]] == []
    assert written(opened) == [f"{a['id']}:1"]
