"""Jobs that cannot run as asked fail once, with their class, and cost nobody else anything."""

from __future__ import annotations

import hashlib
import io
import signal
import zipfile
from pathlib import Path
from typing import Any

import pytest
from firepool_broker.testing import Api

SESSION = {"lease_tag": "kernel-1", "client_id": "client-1"}


@pytest.fixture
def session(api: Api) -> Any:
    return api.session("kernel-1")


def package(api: Api, content: bytes) -> str:
    digest = hashlib.sha256(content).hexdigest()
    answer = api.http.put(f"/v1/packages/{digest}", content=content)
    assert answer.is_success, answer.text
    return digest


def archive(*entries: tuple[str, str]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, text in entries:
            file.writestr(name, text)
    return buffer.getvalue()


def serves(api: Api, pods: list[str]) -> None:
    """The pod of a failed job serves the next one."""
    text, job = api.run("print('next')", **SESSION)
    assert (text, job["state"]) == ("next\n", "SUCCEEDED")
    assert job["pods"] == pods


def test_a_package_travels_to_the_job(api: Api, session: Any) -> None:
    digest = package(api, archive(("mine/__init__.py", "value = 42\n")))
    text, job = api.run("import mine; print(mine.value)", package=digest, **SESSION)
    assert (text, job["state"]) == ("42\n", "SUCCEEDED"), job["error"]
    text, _ = api.run("import importlib.util as u; print(u.find_spec('mine'))", **SESSION)
    assert text == "None\n"


@pytest.mark.parametrize(
    "content",
    [
        archive(("../outside.py", "x")),
        archive(("/absolute.py", "x")),
        archive(("a.py", "x"), ("A.py", "y")),
        archive(("a.py", "x" * 1000))[:-30],
    ],
    ids=["parent", "absolute", "case", "truncated"],
)
def test_a_bad_package_fails_the_job_once_and_not_the_pod(
    api: Api, session: Any, content: bytes
) -> None:
    _, before = api.run("print(1)", **SESSION)
    _, job = api.run("print('never')", package=package(api, content), **SESSION)
    assert job["state"] == "FAILED"
    assert job["error"]["class"] == "PackageInvalid"
    assert job["retries"] == {"user": 0, "infra": 0}
    serves(api, before["pods"])


def test_requirements_that_do_not_resolve_fail_the_job_once(api: Api, session: Any) -> None:
    _, before = api.run("print(1)", **SESSION)
    requirement = "firepool-there-is-no-such-thing @ file:///does/not/exist.whl"
    _, job = api.run("print('never')", requirements=[requirement], **SESSION)
    assert job["state"] == "FAILED"
    assert job["error"]["class"] == "RequirementsFailed"
    assert "exist" in job["error"]["message"]
    assert job["retries"] == {"user": 0, "infra": 0}
    serves(api, before["pods"])


def test_a_working_directory_that_is_gone_is_named(api: Api, session: Any, tmp_path: Path) -> None:
    """At submit; one that goes while the job waits, when it runs."""
    body = {"kind": "cell", "code": "print('never')", "cwd": "/does/not/exist", **SESSION}
    answer = api.http.post("/v1/jobs", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["field"] == "cwd"
    assert "/does/not/exist is not there" in answer.json()["error"]["message"]
    gone = tmp_path / "gone"
    gone.mkdir()
    first = api.submit("import time; time.sleep(1)", **SESSION)
    job = api.submit("print('never')", cwd=str(gone), **SESSION)
    gone.rmdir()
    api.wait(first["id"])
    _, job = api.wait(job["id"])
    assert job["state"] == "FAILED"
    assert str(gone) in job["error"]["message"]


def test_an_interpreter_that_is_gone_is_named(api: Api, session: Any) -> None:
    environment = {
        "executable": "/does/not/exist/python",
        "prefix": "/does/not/exist",
        "base_prefix": "/does/not/exist",
        "version": "3.11.0",
        "digest": "3" * 64,
    }
    _, job = api.run("print('never')", environment=environment, **SESSION)
    assert job["state"] == "FAILED"
    assert "/does/not/exist/python" in job["error"]["message"], job["error"]
    assert api.run("print(1)", **SESSION)[1]["state"] == "SUCCEEDED"


def test_exits_signals_and_timeouts_are_told_apart(api: Api, session: Any) -> None:
    _, job = api.run("import os; os._exit(7)", **SESSION)
    assert (job["error"]["class"], job["exit_code"]) == ("NonZeroExit", 7)
    _, job = api.run("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", **SESSION)
    assert job["error"]["class"] == "Signal"
    assert signal.Signals.SIGSEGV.name in job["error"]["message"] or "11" in job["error"]["message"]
    _, job = api.run("import time; time.sleep(600)", timeout_seconds=0.5, **SESSION)
    assert (job["state"], job["error"]["class"]) == ("FAILED", "Timeout")


def test_a_users_retries_are_the_users(api: Api, session: Any) -> None:
    code = (
        "import os\n"
        "path = os.path.join(os.environ['FIREPOOL_SESSION_DIR'], 'tries')\n"
        "tries = int(open(path).read()) if os.path.exists(path) else 0\n"
        "open(path, 'w').write(str(tries + 1))\n"
        "print('try', tries, flush=True)\n"
        "assert tries == 2\n"
    )
    text, job = api.run(code, max_retries=3, **SESSION)
    assert job["state"] == "SUCCEEDED", job["error"]
    assert job["retries"] == {"user": 2, "infra": 0}
    assert job["attempt"] == 3
    assert text == "try 0\ntry 1\ntry 2\n"
    assert len(job["notes"]) == 2


def test_a_background_process_is_ended_and_named(api: Api, session: Any) -> None:
    code = "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True)"
    _, job = api.run(code, **SESSION)
    assert job["state"] == "SUCCEEDED"
    assert [process["name"] for process in job["killed"]] == ["sleep"]


def test_a_command_runs_without_python(api: Api, session: Any) -> None:
    body = {"kind": "command", "shell": "echo one; echo two >&2; exit 3", **SESSION}
    events = list(api.events("POST", "/v1/jobs?follow=1", body))
    streams = {data["name"]: data["text"] for kind, data in events if kind == "stream"}
    assert streams == {"stdout": "one\n", "stderr": "two\n"}
    assert (events[-1][1]["state"], events[-1][1]["exit_code"]) == ("FAILED", 3)
