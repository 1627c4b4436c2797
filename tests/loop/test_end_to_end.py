"""A real broker process with real agents: what a client of its API sees."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from firepool_broker import embedded
from firepool_broker.testing import Api, text_of, this_environment

SESSION = {"lease_tag": "kernel-1", "client_id": "client-1"}


@pytest.fixture
def session(api: Api, firepool_home: Path) -> Any:
    return api.session("kernel-1", cwd=str(firepool_home))


def test_a_cell_runs_and_its_output_comes_back(api: Api, session: Any) -> None:
    text, job = api.run("print('hello'); 6 * 7", **SESSION)
    assert text == "hello\n"
    assert job["state"] == "SUCCEEDED"
    assert job["exit_code"] == 0
    assert job["acquisition"]["path"] in ("warm", "new")
    times = job["times"]
    order = ["submitted", "queued", "claimed", "committed", "handed_off", "first_instruction"]
    moments = [times[name] for name in [*order, "ended"]]
    assert moments == sorted(moments), times
    assert job["session_files"] == "fresh"
    assert api.run("print(1)", **SESSION)[1]["session_files"] == "kept"


def test_the_stream_begins_with_the_job_and_ends_with_its_end(api: Api, session: Any) -> None:
    body = {"kind": "cell", "code": "for i in range(3): print(i)", **SESSION}
    events = list(api.events("POST", "/v1/jobs?follow=1", body))
    kinds = [kind for kind, _ in events]
    assert kinds[0] == "job"
    assert kinds[-1] == "end"
    assert events[0][1]["state"] in ("QUEUED", "RUNNING")
    assert "status" in kinds
    numbered = [data["n"] for kind, data in events if "n" in data]
    assert numbered == list(range(len(numbered)))
    replay = list(api.follow(events[0][1]["id"]))
    assert [data for _, data in replay if "n" in data] == [d for _, d in events if "n" in d]
    behind = list(api.follow(events[0][1]["id"], start=len(numbered) - 1))
    assert sum("n" in data for _, data in behind) == 1


def test_the_second_cell_runs_warm_on_the_same_pod_in_a_pristine_process(
    api: Api, session: Any
) -> None:
    _, first = api.run("x = 1; import os; print(os.getpid())", **SESSION)
    text, second = api.run("print('x' in globals())", **SESSION)
    assert text == "False\n"
    assert second["pods"] == first["pods"]
    assert second["acquisition"]["path"] == "warm"


def test_a_failing_cell_says_how_it_failed(api: Api, session: Any) -> None:
    _, job = api.run("def f():\n    raise ValueError('no')\nf()", **SESSION)
    assert job["state"] == "FAILED"
    assert job["error"]["class"] == "NonZeroExit"
    assert job["error"]["ename"] == "ValueError"
    assert job["error"]["evalue"] == "no"
    assert "ValueError" in "".join(job["error"]["traceback"])


def test_without_a_named_sku_the_first_output_says_once_where_it_runs(
    api: Api, session: Any
) -> None:
    def notes() -> list[str]:
        body = {"kind": "cell", "code": "1", **SESSION}
        events = api.events("POST", "/v1/jobs?follow=1", body)
        return [data["text"] for kind, data in events if kind == "note"]

    assert any("cpu-small" in line and "default" in line for line in notes())
    assert not any("cpu-small" in line for line in notes())


def test_one_idempotency_key_is_one_job(api: Api, session: Any) -> None:
    body = {"kind": "cell", "code": "print(1)", **SESSION}
    jobs = [api.post("/v1/jobs", body, **{"Idempotency-Key": "k"}) for _ in range(3)]
    assert len({job["id"] for job in jobs}) == 1
    other = api.http.post(
        "/v1/jobs", json={**body, "code": "print(2)"}, headers={"Idempotency-Key": "k"}
    )
    assert other.status_code == 409
    api.wait(jobs[0]["id"])


def test_an_unknown_field_is_refused_with_the_likely_one(api: Api, session: Any) -> None:
    answer = api.http.post("/v1/jobs", json={"kind": "cell", "code": "1", "lease_tga": "x"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["field"] == "lease_tga"
    assert "lease_tag" in error["message"]


def test_a_queued_job_is_cancelled_at_once(api: Api, session: Any) -> None:
    running = api.submit("import time; time.sleep(60)", **SESSION)
    queued = api.submit("print('never')", **SESSION)
    view = api.post(f"/v1/jobs/{queued['id']}/cancel")
    assert view["state"] == "CANCELLED"
    assert view["error"]["class"] == "Cancelled"
    assert api.wait(queued["id"])[0] == ""
    api.post(f"/v1/jobs/{running['id']}/cancel")
    _, job = api.wait(running["id"])
    assert job["state"] == "CANCELLED"


def test_an_interrupt_leaves_the_pod_warm(api: Api, session: Any) -> None:
    _, before = api.run("print(1)", **SESSION)
    job = api.submit("import time\nprint('up', flush=True)\ntime.sleep(60)", **SESSION)
    for kind, data in api.follow(job["id"]):
        if kind == "stream":
            assert data["text"] == "up\n"
            api.post(f"/v1/jobs/{job['id']}/interrupt")
    _, ended = api.wait(job["id"])
    assert ended["state"] == "CANCELLED"
    assert ended["error"]["class"] == "Interrupted"
    _, after = api.run("print(2)", **SESSION)
    assert after["pods"] == before["pods"]
    assert after["acquisition"]["path"] == "warm"


def test_code_that_swallows_the_interrupt_is_killed_when_asked(api: Api, session: Any) -> None:
    code = (
        "import time\n"
        "while True:\n"
        "    try:\n"
        "        print('going on', flush=True); time.sleep(60)\n"
        "    except KeyboardInterrupt:\n"
        "        pass\n"
    )
    job = api.submit(code, **SESSION)
    seen = 0
    for kind, _ in api.follow(job["id"]):
        if kind == "stream":
            seen += 1
            api.post(f"/v1/jobs/{job['id']}/interrupt", {"kill": seen > 1})
    _, ended = api.wait(job["id"])
    assert (ended["state"], ended["error"]["class"]) == ("CANCELLED", "Interrupted"), ended


def test_jobs_of_one_session_run_in_order_and_parallel_ones_do_not_wait(
    api: Api, session: Any
) -> None:
    first = api.submit("import time; time.sleep(0.5); print('first')", **SESSION)
    second = api.submit("print('second')", **SESSION)
    _, beside = api.run("print('beside')", parallel=True, **SESSION)
    first_job, second_job = api.wait(first["id"])[1], api.wait(second["id"])[1]
    assert first_job["times"]["ended"] <= second_job["times"]["committed"]
    assert beside["pods"] != first_job["pods"]


def test_two_environments_never_share_a_process(api: Api, session: Any) -> None:
    api.session("kernel-2", client_id="client-2", environment=this_environment("1" * 64))
    other = {"lease_tag": "kernel-2", "client_id": "client-2"}
    code = "import os; print(os.getpid())"
    seen = []
    for _ in range(2):
        for where in (SESSION, other):
            text, job = api.run(code, **where)
            seen.append((where["lease_tag"], job["pods"][0], text))
    pods = {tag: {pod for name, pod, _ in seen if name == tag} for tag, *_ in seen}
    assert pods["kernel-1"].isdisjoint(pods["kernel-2"])


def test_a_job_that_waits_says_why(api: Api, session: Any) -> None:
    running = api.submit("import time; time.sleep(1)", **SESSION)
    waiting = api.submit("print(2)", **SESSION)
    view = api.get(f"/v1/jobs/{waiting['id']}")
    assert view["state"] == "QUEUED"
    assert view["waiting"]["reason"] == "session_order"
    assert not view["waiting"]["message"].endswith(".")
    api.wait(running["id"])
    api.wait(waiting["id"])


def test_a_blob_travels_by_file_and_a_large_result_comes_back_as_one(
    api: Api, session: Any, firepool_home: Path
) -> None:
    import base64
    import hashlib
    import pickle

    content = pickle.dumps({"data": list(range(50_000))})
    path = firepool_home / "value"
    path.write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    sent = api.http.put(f"/v1/blobs/{digest}", headers={"Firepool-File": str(path)})
    assert sent.is_success, sent.text
    inputs = [{"kind": "namespace", "format": "cloudpickle", "blob": digest, "names": ["data"]}]
    code = "twice = data * 2; small = sum(data)"
    _, job = api.run(code, inputs=inputs, outputs=["twice", "small"], **SESSION)
    assert job["state"] == "SUCCEEDED", job["error"]
    results = {result["name"]: result for result in job["results"]}
    assert results["small"]["data"] is not None
    assert base64.b64decode(results["small"]["data"])
    assert results["twice"]["data"] is None
    fetched = api.http.get(f"/v1/blobs/{results['twice']['sha256']}")
    assert fetched.is_success
    assert len(fetched.content) == results["twice"]["size_bytes"]


def test_a_job_whose_input_comes_later_waits_for_it(api: Api, session: Any) -> None:
    import hashlib
    import pickle

    content = pickle.dumps({"late": "here"})
    digest = hashlib.sha256(content).hexdigest()
    inputs = [{"kind": "namespace", "format": "cloudpickle", "blob": digest, "names": ["late"]}]
    job = api.submit("print(late)", inputs=inputs, **SESSION)
    assert job["state"] == "PENDING"
    assert api.http.put(f"/v1/blobs/{digest}", content=content).is_success
    text, ended = api.wait(job["id"])
    assert text == "here\n"
    assert ended["state"] == "SUCCEEDED"


def test_two_followers_see_the_same(api: Api, session: Any, broker: embedded.Connection) -> None:
    job = api.submit("import time\nfor i in range(20): print(i); time.sleep(0.02)", **SESSION)
    seen: list[str] = []

    def follow() -> None:
        with Api(broker) as another:
            seen.append(text_of(list(another.follow(job["id"]))))

    followers = [threading.Thread(target=follow) for _ in range(3)]
    for follower in followers:
        follower.start()
    for follower in followers:
        follower.join()
    assert seen == ["".join(f"{i}\n" for i in range(20))] * 3


def test_a_pool_is_described_with_its_counts(api: Api, session: Any) -> None:
    api.run("1", **SESSION)
    pools = {pool["name"]: pool for pool in api.get("/v1/pools")["pools"]}
    counts = pools["cpu-small"]["counts"]
    assert counts["warm_ready"] + counts["busy"] >= 1  # its reset may not be over yet
    assert counts["routable"] == counts["warm_ready"] + counts["busy"]
    assert pools["cpu-small"]["isolation"] in ("namespaces", "process")
    pods = api.get("/v1/pods")["pods"]
    mine = [pod["state"] for pod in pods if pod["session"] == "kernel-1"]
    assert mine in (["HELD"], ["RESETTING"])
    assert all(pod["story"] for pod in pods)


def test_release_gives_the_pods_back(api: Api, session: Any) -> None:
    _, job = api.run("1", **SESSION)
    released = api.post("/v1/sessions/kernel-1/release")["released"]
    assert released == job["pods"]
    _, after = api.run("1", **SESSION)
    assert after["pods"] != job["pods"]


@pytest.mark.parametrize("isolation", ["process", "none"])
def test_with_isolation_forced_down_cells_still_run_and_it_is_said(
    isolation: str,
    configure: Callable[..., Path],
    request: pytest.FixtureRequest,
) -> None:
    configure(isolation=isolation)
    api: Api = request.getfixturevalue("api")
    api.session("kernel-1")
    jobs = []
    for number in range(3):
        text, job = api.run(f"print({number})", **SESSION)
        assert (text, job["state"]) == (f"{number}\n", "SUCCEEDED"), job["error"]
        jobs.append(job)
    assert api.get("/v1/whoami")["broker"]["isolation"] == isolation
    assert {pool["isolation"] for pool in api.get("/v1/pools")["pools"]} == {isolation}
    pods = {job["pods"][0] for job in jobs}
    assert len(pods) == (3 if isolation == "none" else 1)  # portable pods are never used again
