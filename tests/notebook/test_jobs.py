"""`Job` in a notebook: it knows how its work goes, and binds what was asked for."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kernels import Kernel

from firepool_nb import Session
from firepool_nb.client import Client
from firepool_nb.errors import CodeExpected
from firepool_nb.job import Job


class Answers(Client):
    """A client whose broker is away, or answers with the next view."""

    def __init__(self, *views: dict[str, Any] | None) -> None:
        super().__init__(lambda: None)
        self.views = list(views)

    def glance(self, call: Any) -> Any:
        view = self.views.pop(0)
        return None if view is None else _Response(view)


class _Response:
    def __init__(self, view: dict[str, Any]) -> None:
        self._view = view

    def json(self) -> dict[str, Any]:
        return json.loads(json.dumps(self._view))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("firepool_nb.job.time.monotonic", lambda: now[0])
    return now


def test_a_job_looks_at_most_twice_a_second(clock: list[float]) -> None:
    ended = {"id": "j", "state": "SUCCEEDED", "times": {}}
    client = Answers({"id": "j", "state": "RUNNING", "times": {}}, None, ended)
    job = Job(client, {"id": "j", "state": "QUEUED", "times": {}})
    assert job.state == "QUEUED"  # heard just now
    clock[0] += 0.6
    assert "running" in repr(job)
    assert (job.state, len(client.views)) == ("RUNNING", 2)
    clock[0] += 0.6
    assert "running" in job._repr_html_()  # the broker is away
    clock[0] += 0.6
    assert job.state == "SUCCEEDED"
    clock[0] += 60
    assert "succeeded" in repr(job)  # over: nobody is asked again


def test_showing_a_job_starts_no_broker_and_raises_nothing(
    firepool_home: Any, clock: list[float]
) -> None:
    job = Job(Client(), {"id": "j-1", "state": "RUNNING"})
    clock[0] += 1
    assert repr(job) == "<Job j-1: running>"
    assert not list(firepool_home.glob("run/*.json"))


def test_what_is_not_for_users_is_private() -> None:
    public = {name for name in dir(Job) if not name.startswith("_")}
    assert public == {
        *("cancel", "cancelled", "done", "exception", "interrupt", "logs", "output", "path"),
        *("refresh", "result", "running", "start_latency_seconds", "state", "summary", "wait"),
    }


def test_a_jobs_result_binds_the_names_of_pull(kernel: Kernel) -> None:
    kernel.ok("%%firepool -a -o res --job later\nres = 41 + 1")
    assert "result() binds res" in kernel.ok("later").texts[0]
    assert kernel.ok("later.result()\nres").texts == ["42"]
    kernel.ok("import time\nwhile later.state != 'SUCCEEDED': time.sleep(0.05)")


def test_a_job_that_is_shown_again_has_gone_on(kernel: Kernel) -> None:
    kernel.ok("%%firepool -a --job short\n1")
    kernel.ok("import time\nwhile 'succeeded' not in repr(short): time.sleep(0.05)", timeout=20)


def test_a_cancelled_job_says_who_did_it(kernel: Kernel) -> None:
    kernel.ok("%%firepool -a --job endless\nimport time\ntime.sleep(600)")
    kernel.ok("while not endless.running(): time.sleep(0.05)\nendless.cancel()")
    text = kernel.run("endless.result()").traceback
    assert "JobCancelled: cancelled by its own session" in text


@pytest.mark.parametrize("method", ["submit", "run"])
def test_a_function_is_no_code(method: str, firepool_home: Any) -> None:
    with pytest.raises(CodeExpected, match=r'submit|run.*namespace=\{"len": len\}') as caught:
        getattr(Session("t"), method)(len)
    assert isinstance(caught.value, TypeError)
