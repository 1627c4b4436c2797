"""What is killed hard, while jobs run and holds stand, loses nothing and runs nothing twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from firepool_broker import embedded, processes
from firepool_broker.testing import Api, assert_nothing_left, kill_hard, text_of

REPEATS = max(2, round(3 * float(os.environ.get("FIREPOOL_STRESS", "1"))))
SESSION = {"lease_tag": "kernel-1", "client_id": "client-1"}
COUNTS = """
import time, os
with open(os.path.join(os.environ["FIREPOOL_SESSION_DIR"], "runs"), "a") as runs:
    runs.write(os.environ["FIREPOOL_ATTEMPT"] + "\\n")
for i in range({steps}):
    print(i, flush=True)
    time.sleep(0.02)
"""


def counting(steps: int) -> str:
    return COUNTS.replace("{steps}", str(steps))


def counted(steps: int) -> str:
    return "".join(f"{i}\n" for i in range(steps))


def runs(session: Any) -> list[str]:
    return (Path(session["session_dir"]) / "runs").read_text().split()


@pytest.fixture
def started(broker: embedded.Connection, firepool_home: Path) -> Iterator[Any]:
    with Api(broker) as api:
        session = api.session("kernel-1", cwd=str(firepool_home))
        api.run("print('warm')", **SESSION)
        yield session


def agents(home: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if any(f"firepool-pod={home}" in word for word in process.cmdline()):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def wait_for_text(api: Api, job_id: str) -> None:
    for kind, _ in api.follow(job_id):
        if kind == "stream":
            return
    raise AssertionError(f"{job_id} ended without output")


def await_state(api: Api, name: str, *states: str) -> dict[str, Any]:
    """Wait until a pod has come to rest; the panel's stream says when to look again."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        found = [pod for pod in api.get("/v1/pods")["pods"] if pod["name"] == name]
        if found and found[0]["state"] in states:
            return dict(found[0])
        threading.Event().wait(0.02)
    raise AssertionError(f"{name} did not become {states}: {api.get('/v1/pods')}")


# -- the broker --------------------------------------------------------------------------------


@pytest.mark.stress
def test_a_broker_killed_under_a_running_job_loses_and_repeats_nothing(
    started: Any, firepool_home: Path
) -> None:
    expected = []
    for number in range(REPEATS):
        with Api(embedded.ensure_running()) as api:
            api.session("kernel-1", cwd=str(firepool_home))
            job = api.submit(counting(60), **SESSION)
            wait_for_text(api, job["id"])
            pid = api.connection.pid
            kill_hard(api.connection)
        again = embedded.ensure_running()
        assert again.pid != pid
        with Api(again) as api:
            text, ended = api.wait(job["id"])
            assert ended["state"] == "SUCCEEDED", ended
            assert text == counted(60), f"repeat {number}"
            expected.append(f"{job['id']}:1")
            assert ended["attempt"] == 1
            assert ended["retries"] == {"user": 0, "infra": 0}
    assert runs(started) == expected


@pytest.mark.stress
def test_a_job_that_finished_while_no_broker_lived_is_finalised_and_its_pod_held(
    started: Any, firepool_home: Path
) -> None:
    for _ in range(REPEATS):
        with Api(embedded.ensure_running()) as api:
            api.session("kernel-1", cwd=str(firepool_home))
            job = api.submit(counting(10) + "\nvalue = 7", outputs=["value"], **SESSION)
            wait_for_text(api, job["id"])
            pod = api.get(f"/v1/jobs/{job['id']}")["pods"][0]
            kill_hard(api.connection)
        done = Path(started["session_dir"]) / "runs"
        assert done.exists()
        threading.Event().wait(0.6)  # the job ends with nobody there
        with Api(embedded.ensure_running()) as api:
            text, ended = api.wait(job["id"])
            assert (ended["state"], ended["attempt"]) == ("SUCCEEDED", 1)
            assert text == counted(10)
            assert ended["results"][0]["data"] is not None
            held = await_state(api, pod, "HELD")
            assert held["session"] == "kernel-1"
            api.session("kernel-1", cwd=str(firepool_home))
            _, following = api.run("print('again')", **SESSION)
            assert following["pods"] == [pod]
            assert following["acquisition"]["path"] == "warm"


@pytest.mark.stress
def test_holds_outlive_their_broker(started: Any, firepool_home: Path) -> None:
    with Api(embedded.ensure_running()) as api:
        held = [p for p in api.get("/v1/pods")["pods"] if p["session"] == "kernel-1"]
        pod = await_state(api, held[0]["name"], "HELD")
    for _ in range(REPEATS):
        kill_hard(embedded.ensure_running())
        with Api(embedded.ensure_running()) as api:
            after = await_state(api, pod["name"], "HELD")
            assert (after["uid"], after["owner"], after["session"]) == (
                pod["uid"],
                pod["owner"],
                pod["session"],
            )
            assert after["hold_expires_at"] == pytest.approx(pod["hold_expires_at"], abs=1)
            api.session("kernel-1", cwd=str(firepool_home))
            _, job = api.run("print(1)", **SESSION)
            assert job["pods"] == [pod["name"]]
            pod = await_state(api, pod["name"], "HELD")


@pytest.mark.stress
def test_a_burst_survives_a_killed_broker(started: Any, firepool_home: Path) -> None:
    with Api(embedded.ensure_running()) as api:
        ids = [api.submit(counting(1), parallel=True, **SESSION)["id"] for _ in range(20)]
        kill_hard(api.connection)
    with Api(embedded.ensure_running()) as api:
        api.session("kernel-1", cwd=str(firepool_home))
        for job_id in ids:
            text, ended = api.wait(job_id)
            assert (ended["state"], text) == ("SUCCEEDED", counted(1)), ended
    assert sorted(run.split(":")[0] for run in runs(started)) == sorted(ids)


def test_a_broker_that_is_told_to_go_leaves_jobs_and_pods_to_the_next(
    started: Any, firepool_home: Path
) -> None:
    connection = embedded.ensure_running()
    with Api(connection) as api:
        api.session("kernel-1", cwd=str(firepool_home))
        job = api.submit(counting(40), **SESSION)
        wait_for_text(api, job["id"])
    os.kill(connection.pid, signal.SIGTERM)
    assert processes.wait_for_exit(connection.pid, connection.start_time, 10)
    assert embedded.find() is None
    with Api(embedded.ensure_running()) as api:
        text, ended = api.wait(job["id"])
        assert (ended["state"], text) == ("SUCCEEDED", counted(40))


def test_followers_resume_where_they_were(started: Any, firepool_home: Path) -> None:
    with Api(embedded.ensure_running()) as api:
        api.session("kernel-1", cwd=str(firepool_home))
        job = api.submit(counting(50), **SESSION)
        seen: list[Any] = []
        for kind, data in api.follow(job["id"]):
            if "n" in data:
                seen.append((kind, data))
            if len(seen) > 10:
                break
        kill_hard(api.connection)
    with Api(embedded.ensure_running()) as api:
        seen += [e for e in api.follow(job["id"], start=len(seen)) if "n" in e[1]]
    assert [data["n"] for _, data in seen] == list(range(len(seen)))
    assert text_of(seen) == counted(50)


# -- an agent ----------------------------------------------------------------------------------


@pytest.mark.stress
def test_a_killed_agent_ends_its_job_as_lost_within_seconds(
    started: Any, firepool_home: Path
) -> None:
    marker = f"fp-{os.getpid()}-{time.time_ns()}"
    for _ in range(REPEATS):
        with Api(embedded.ensure_running()) as api:
            api.session("kernel-1", cwd=str(firepool_home))
            code = (
                "import subprocess, sys\n"
                f"subprocess.Popen(['sleep', '1000', '{marker}'][:2], start_new_session=True)\n"
                + counting(2000)
            )
            job = api.submit(code, **SESSION)
            wait_for_text(api, job["id"])
            pod = api.get(f"/v1/jobs/{job['id']}")["pods"][0]
            (agent,) = [a for a in agents(firepool_home) if any(pod in w for w in a.cmdline())]
            inside = agent.children(recursive=True)
            began = time.monotonic()
            agent.kill()
            text, ended = api.wait(job["id"])
            assert time.monotonic() - began < 5
            assert ended["state"] == "FAILED"
            assert ended["error"]["class"] == "PodLost"
            assert counted(2000).startswith(text)
            assert ended["exit_code"] is None
            _, alive = psutil.wait_procs(inside, timeout=5)
            assert alive == []  # a dead agent takes its job with it
            _, following = api.run("print(1)", **SESSION)
            assert following["state"] == "SUCCEEDED"
            assert following["pods"] != [pod]
    assert len(set(runs(started))) == len(runs(started))


def test_a_lost_job_that_may_run_again_does_so_after_a_divider(
    started: Any, firepool_home: Path
) -> None:
    with Api(embedded.ensure_running()) as api:
        api.session("kernel-1", cwd=str(firepool_home))
        job = api.submit(counting(30), on_lost="requeue", **SESSION)
        wait_for_text(api, job["id"])
        pod = api.get(f"/v1/jobs/{job['id']}")["pods"][0]
        (agent,) = [a for a in agents(firepool_home) if any(pod in w for w in a.cmdline())]
        agent.kill()
        events = list(api.follow(job["id"]))
        ended = events[-1][1]
        assert ended["state"] == "SUCCEEDED"
        assert (ended["attempt"], ended["retries"]["infra"]) == (2, 1)
        kinds = [kind for kind, _ in events]
        divider = kinds.index("divider")
        assert text_of(events[divider:]) == counted(30)
        numbers = [data["n"] for _, data in events if "n" in data]
        assert numbers == list(range(len(numbers)))
    assert runs(started) == [f"{job['id']}:1", f"{job['id']}:2"]


def test_agent_and_broker_killed_together_lose_the_job_and_nothing_else(
    started: Any, firepool_home: Path
) -> None:
    with Api(embedded.ensure_running()) as api:
        api.session("kernel-1", cwd=str(firepool_home))
        job = api.submit(counting(2000), **SESSION)
        wait_for_text(api, job["id"])
        kill_hard(api.connection)
    for agent in agents(firepool_home):
        agent.kill()
    with Api(embedded.ensure_running()) as api:
        api.session("kernel-1", cwd=str(firepool_home))
        _, ended = api.wait(job["id"])
        assert (ended["state"], ended["error"]["class"]) == ("FAILED", "PodLost")
        assert api.run("print(1)", **SESSION)[1]["state"] == "SUCCEEDED"


# -- the client --------------------------------------------------------------------------------


def test_a_killed_client_loses_nothing_and_the_next_one_reads_it(
    started: Any, firepool_home: Path
) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from firepool_broker import embedded\n"
        "from firepool_broker.testing import Api\n"
        "api = Api(embedded.ensure_running())\n"
        "body = {'kind': 'cell', 'code': sys.argv[2], 'id': 'of-a-dead-kernel',"
        " 'lease_tag': 'kernel-1', 'client_id': 'client-1'}\n"
        "for kind, data in api.events('POST', '/v1/jobs?follow=1', body):\n"
        "    print(kind, flush=True)\n"
    )
    client = subprocess.Popen(
        [sys.executable, "-c", code, "", counting(60)], stdout=subprocess.PIPE, text=True
    )
    assert client.stdout is not None
    with client.stdout:
        for line in client.stdout:
            if line.strip() == "stream":
                break
        client.kill()
    client.wait()
    with Api(embedded.ensure_running()) as api:
        text, ended = api.wait("of-a-dead-kernel")
        assert (ended["state"], text) == ("SUCCEEDED", counted(60))


# -- starting and ending -----------------------------------------------------------------------


def test_ten_starters_get_one_broker(firepool_home: Path) -> None:
    code = "from firepool_broker import embedded; print(embedded.ensure_running(30).pid)"
    starters = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(10)
    ]
    pids = {starter.communicate()[0].strip() for starter in starters}
    assert [starter.returncode for starter in starters] == [0] * 10
    assert len(pids) == 1
    assert pids == {str(embedded.ensure_running().pid)}
    embedded.stop()
    assert_nothing_left(firepool_home)


def test_a_broker_that_nobody_needs_ends_with_everything(
    firepool_home: Path, configure: Callable[..., Path]
) -> None:
    configure(idle_exit_seconds=1)
    connection = embedded.ensure_running()
    with Api(connection) as api:
        text, job = api.run("print('once')", attached=False)
        assert (job["state"], text) == ("SUCCEEDED", "once\n"), job
    assert processes.wait_for_exit(connection.pid, connection.start_time, 30)
    assert_nothing_left(firepool_home)
    assert embedded.find() is None
    assert os.listdir(firepool_home / "state" / "pods") == []
    with Api(embedded.ensure_running()) as api:  # and it starts again where it stopped
        assert api.wait(job["id"])[0] == "once\n"
    embedded.stop()
    assert_nothing_left(firepool_home)


def test_an_open_session_keeps_the_broker(
    firepool_home: Path, configure: Callable[..., Path]
) -> None:
    configure(idle_exit_seconds=1)
    connection = embedded.ensure_running()
    with Api(connection) as api:
        api.session("kernel-1")
        stream = "/v1/sessions/kernel-1/stream?client_id=client-1"
        with api.http.stream("GET", stream) as open_stream:
            assert open_stream.is_success
            assert not processes.wait_for_exit(connection.pid, connection.start_time, 6)
        api.http.delete("/v1/sessions/kernel-1?client_id=client-1&how=shutdown")
    assert processes.wait_for_exit(connection.pid, connection.start_time, 30)
    assert_nothing_left(firepool_home)


def test_stop_drains_what_runs(started: Any, firepool_home: Path) -> None:
    with Api(embedded.ensure_running()) as api:
        job = api.submit(counting(20), **SESSION)
        wait_for_text(api, job["id"])
        assert embedded.stop()
    assert_nothing_left(firepool_home)
    with Api(embedded.ensure_running()) as api:
        text, ended = api.wait(job["id"])
        assert (ended["state"], text) == ("SUCCEEDED", counted(20))


def test_a_pod_whose_agent_is_stopped_is_not_kept_by_the_next_broker(
    started: Any, firepool_home: Path
) -> None:
    with Api(embedded.ensure_running()) as api:
        pod = next(p for p in api.get("/v1/pods")["pods"] if p["session"] == "kernel-1")
        await_state(api, pod["name"], "HELD")
        kill_hard(api.connection)
    (agent,) = [a for a in agents(firepool_home) if any(pod["name"] in w for w in a.cmdline())]
    agent.suspend()
    with Api(embedded.ensure_running()) as api:
        api.session("kernel-1", cwd=str(firepool_home))
        _, job = api.run("print(1)", **SESSION)
        assert job["state"] == "SUCCEEDED"
        assert job["pods"] != [pod["name"]]
    _, alive = psutil.wait_procs([agent], timeout=20)
    assert alive == []
