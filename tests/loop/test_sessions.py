"""Sessions against a real broker: connected, away, lapsed, taken over, said goodbye to."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from firepool_broker import embedded
from firepool_broker.testing import Api, kill_hard, this_environment

LONG = "import time; time.sleep(600)"


@contextmanager
def connected(api: Api, tag: str, client_id: str = "client-1") -> Iterator[Any]:
    """Hold a session's stream open, as a kernel does."""
    path = f"/v1/sessions/{tag}/stream?client_id={client_id}"
    with Api(api.connection) as other, other.http.stream("GET", path, timeout=None) as stream:
        assert stream.is_success, stream.read()
        yield stream


def eventually(check: Callable[[], Any], within_seconds: float = 15) -> Any:
    deadline = time.monotonic() + within_seconds
    while True:
        found = check()
        if found:
            return found
        assert time.monotonic() < deadline, "it did not become so"
        threading.Event().wait(0.02)


def pods_of(api: Api, tag: str) -> list[dict[str, Any]]:
    return [pod for pod in api.get("/v1/pods")["pods"] if pod["session"] == tag]


def where(tag: str, client_id: str = "client-1") -> dict[str, str]:
    return {"lease_tag": tag, "client_id": client_id}


def test_a_session_is_described_and_knows_whether_it_is_connected(
    api: Api, firepool_home: Path
) -> None:
    opened = api.session("k", notebook="eval.ipynb", cwd=str(firepool_home))
    assert opened["resumed"] is False
    assert opened["ttl_seconds"] == 30
    assert os.stat(opened["session_dir"]).st_mode & 0o777 == 0o700
    with connected(api, "k"):
        view = eventually(lambda: (v := api.get("/v1/sessions/k"))["connected"] and v)
        assert view["expires_at"] is None
        assert view["notebook"] == "eval.ipynb"
    view = eventually(lambda: not (v := api.get("/v1/sessions/k"))["connected"] and v)
    assert view["expires_at"] == pytest.approx(time.time() + 30, abs=5)
    assert api.session("k")["resumed"] is True


def test_a_token_of_a_session_names_it(api: Api, broker: embedded.Connection) -> None:
    token = api.session("k")["token"]
    with Api(broker, token) as mine:
        assert mine.get("/v1/whoami")["session"] == "k"
        job = mine.submit("print(1)")
        assert job["lease_tag"] == "k"
        mine.wait(job["id"])


def test_two_sessions_in_turn_each_keep_their_own_pod(api: Api) -> None:
    api.session("a", client_id="1")
    api.session("b", client_id="2")
    with connected(api, "a", "1"), connected(api, "b", "2"):
        pods: dict[str, set[str]] = {"a": set(), "b": set()}
        paths = []
        for _ in range(10):
            for tag, client in (("a", "1"), ("b", "2")):
                _, job = api.run("print(1)", **where(tag, client))
                pods[tag].update(job["pods"])
                paths.append(job["acquisition"]["path"])
        assert len(pods["a"]) == len(pods["b"]) == 1
        assert pods["a"].isdisjoint(pods["b"])
        assert "recycled" not in paths
        assert paths[2:] == ["warm"] * 18


def test_a_goodbye_gives_the_pods_up_at_once_and_wipes_the_folder(api: Api) -> None:
    opened = api.session("k")
    _, job = api.run("print(1)", **where("k"))
    (Path(opened["session_dir"]) / "kept").write_text("x")
    assert api.run("print(1)", **where("k"))[1]["session_files"] == "kept"
    assert api.http.delete("/v1/sessions/k?client_id=client-1&how=shutdown").is_success
    eventually(lambda: job["pods"][0] not in {pod["name"] for pod in api.get("/v1/pods")["pods"]})
    eventually(lambda: not os.path.exists(opened["session_dir"]))
    assert api.http.get("/v1/sessions/k").status_code == 404
    again = api.session("k")
    assert again["resumed"] is False
    assert os.listdir(again["session_dir"]) == []


def test_a_goodbye_cancels_what_is_attached_and_lets_the_rest_run(api: Api) -> None:
    opened = api.session("k")
    attached = api.submit(LONG, **where("k"))
    queued = api.submit("print('never')", **where("k"))
    code = (
        "import os, time\ntime.sleep(1.5)\n"
        "print(os.path.isdir(os.environ['FIREPOOL_SESSION_DIR']))\n"
    )
    detached = api.submit(code, attached=False, **where("k"))
    eventually(lambda: api.get(f"/v1/jobs/{detached['id']}")["state"] == "RUNNING")
    api.http.delete("/v1/sessions/k?client_id=client-1&how=shutdown")
    for job in (attached, queued):
        ended = api.wait(job["id"])[1]
        assert (ended["state"], ended["error"]["class"]) == ("CANCELLED", "SessionClosed")
    text, ended = api.wait(detached["id"])
    assert (ended["state"], text) == ("SUCCEEDED", "True\n")
    eventually(lambda: not os.path.exists(opened["session_dir"]))


def test_a_restart_keeps_the_pod_and_the_files(api: Api) -> None:
    opened = api.session("k")
    _, before = api.run("print(1)", **where("k"))
    (Path(opened["session_dir"]) / "kept").write_text("x")
    running = api.submit(LONG, **where("k"))
    eventually(lambda: api.get(f"/v1/jobs/{running['id']}")["state"] == "RUNNING")
    api.http.delete("/v1/sessions/k?client_id=client-1&how=restart")
    assert api.wait(running["id"])[1]["error"]["class"] == "SessionClosed"
    assert api.session("k", client_id="client-2")["resumed"] is True
    code = "import os; print(os.listdir(os.environ['FIREPOOL_SESSION_DIR']))"
    text, after = api.run(code, **where("k", "client-2"))
    assert text == "['kept']\n"
    assert after["pods"] == before["pods"]
    assert after["acquisition"]["path"] == "warm"


def test_another_client_under_the_tag_takes_it_over(api: Api) -> None:
    api.session("k")
    running = api.submit(LONG, **where("k"))
    queued = api.submit("print('old')", **where("k"))
    eventually(lambda: api.get(f"/v1/jobs/{running['id']}")["state"] == "RUNNING")
    api.session("k", client_id="client-2")
    ended = api.wait(queued["id"])[1]
    assert (ended["state"], ended["error"]["class"]) == ("CANCELLED", "SessionClosed")
    assert api.get(f"/v1/jobs/{running['id']}")["state"] == "RUNNING"
    stream = api.http.get("/v1/sessions/k/stream?client_id=client-1")
    assert stream.status_code == 409
    assert stream.json()["error"]["class"] == "SessionTakenOver"
    api.http.delete("/v1/sessions/k?client_id=client-1&how=shutdown")  # too late: ignored
    assert api.get("/v1/sessions/k")["client_id"] == "client-2"
    api.post(f"/v1/jobs/{running['id']}/cancel")


def test_lost_contact_withholds_what_is_queued_until_the_client_is_back(api: Api) -> None:
    api.session("k")
    with connected(api, "k"):
        eventually(lambda: api.get("/v1/sessions/k")["connected"])
        running = api.submit("import time; time.sleep(1.5); print('ran on')", **where("k"))
        queued = api.submit("print('later')", **where("k"))
        eventually(lambda: api.get(f"/v1/jobs/{running['id']}")["state"] == "RUNNING")
    text, ended = api.wait(running["id"])
    assert (ended["state"], text) == ("SUCCEEDED", "ran on\n")
    assert api.get(f"/v1/jobs/{queued['id']}")["waiting"]["reason"] == "withheld"
    assert api.get(f"/v1/jobs/{queued['id']}")["state"] == "QUEUED"
    with connected(api, "k"):
        assert api.wait(queued["id"])[0] == "later\n"


def test_a_new_kernel_after_a_killed_one_takes_its_pod_once(api: Api) -> None:
    api.session("old")
    with connected(api, "old"):
        eventually(lambda: api.get("/v1/sessions/old")["connected"])
        _, job = api.run("print(1)", **where("old"))
    eventually(lambda: not api.get("/v1/sessions/old")["connected"])
    eventually(lambda: pods_of(api, "old")[0]["state"] == "HELD")
    api.session("new", client_id="client-2")
    with connected(api, "new", "client-2"):
        _, crossing = api.run("print(1)", **where("new", "client-2"))
        assert crossing["pods"] == job["pods"]
        assert crossing["acquisition"]["path"] == "recycled"
        gone = job["pods"][0]
        eventually(lambda: gone not in {pod["name"] for pod in api.get("/v1/pods")["pods"]})
        _, own = api.run("print(1)", **where("new", "client-2"))
        assert own["pods"] != job["pods"]
        assert own["acquisition"]["path"] in ("warm", "new")


def test_a_session_that_lapses_cancels_what_is_queued(
    configure: Callable[..., Path], request: pytest.FixtureRequest
) -> None:
    configure(sessions={"ttl_seconds": 10.5})
    api: Api = request.getfixturevalue("api")
    api.session("k")
    with connected(api, "k"):
        running = api.submit(LONG, **where("k"))
        queued = api.submit("print('never')", **where("k"))
        eventually(lambda: api.get(f"/v1/jobs/{running['id']}")["state"] == "RUNNING")
    ended = api.wait(queued["id"])[1]
    assert (ended["state"], ended["error"]["class"]) == ("CANCELLED", "SessionClosed")
    assert api.get(f"/v1/jobs/{running['id']}")["state"] == "RUNNING"  # a closed lid stops nothing
    api.post(f"/v1/jobs/{running['id']}/cancel")


def test_sessions_outlive_their_broker(api: Api, broker: embedded.Connection) -> None:
    opened = api.session("k", notebook="eval.ipynb")
    token = opened["token"]
    kill_hard(broker)
    with Api(embedded.ensure_running(), token) as mine:
        view = mine.get("/v1/sessions/k")
        assert view["notebook"] == "eval.ipynb"
        assert view["session_dir"] == opened["session_dir"]
        text, _ = mine.run("print(2)", client_id="client-1")
        assert text == "2\n"
        assert mine.session("k")["resumed"] is True


def test_a_new_environment_is_used_from_the_next_cell_on(api: Api) -> None:
    api.session("k")
    _, before = api.run("print(1)", **where("k"))
    api.session("k", environment=this_environment("2" * 64))
    _, after = api.run("print(1)", **where("k"))
    assert after["state"] == "SUCCEEDED"
    assert after["pods"] == before["pods"]  # another environment costs a process, not a pod


def test_a_sessions_start_up_hooks_do_not_reach_its_jobs(api: Api) -> None:
    variables = {
        "PATH": os.environ["PATH"],
        "HOME": "/tmp",
        "PYTHONSTARTUP": "/x",
        "LD_PRELOAD": "/x.so",
        "MINE": "1",
    }
    api.session("k", env=variables)
    code = (
        "import os\n"
        "print(os.environ.get('MINE'), 'PYTHONSTARTUP' in os.environ,"
        " 'LD_PRELOAD' in os.environ, 'FIREPOOL_HOME' in os.environ, os.environ['FIREPOOL_JOB'])\n"
    )
    text, job = api.run(code, **where("k"))
    assert text == f"1 False False False {job['id']}\n"
    text, _ = api.run("import os; print(os.environ['MINE'])", env={"MINE": "2"}, **where("k"))
    assert text == "2\n"


def test_a_job_without_a_session_runs_in_the_agents_own_interpreter(api: Api) -> None:
    text, job = api.run("import os; print(os.environ.get('HOME') is not None)", attached=False)
    assert (job["state"], text) == ("SUCCEEDED", "True\n"), job
    eventually(lambda: not os.path.exists(job["session_dir"]))
