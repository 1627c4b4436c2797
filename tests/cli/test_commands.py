"""The command line against a real broker."""

from __future__ import annotations

import getpass
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest
from firepool_broker import embedded
from firepool_broker.testing import Api

SLEEPING = "import time\nprint('go', flush=True)\ntime.sleep(600)"
STUBBORN = f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{SLEEPING}"


def firepool(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "firepool_nb.cli", *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, **options
    )


def document(*words: str) -> Any:
    done = firepool(*words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def running(broker: embedded.Connection) -> Iterator[embedded.Connection]:
    return broker


def test_help_has_a_heading_for_operators() -> None:
    text = firepool("--help").stdout
    assert text.index("Commands:") < text.index("doctor") < text.index("For operators:")
    assert text.index("For operators:") < text.index("bench")


def test_looking_starts_nothing(firepool_home: Path) -> None:
    for command in ("pools", "jobs", "sessions", "status"):
        done = firepool(command)
        assert done.returncode == 1
        assert "no broker runs" in done.stderr
        assert "Traceback" not in done.stderr
    assert embedded.find() is None
    assert document("stop", "--json") == {"stopped": False, "cancelled": []}


def test_running_code_scripts_and_commands(running: embedded.Connection, tmp_path: Path) -> None:
    done = firepool("run", "-c", "print('hello'); import sys; print('oops', file=sys.stderr)")
    assert (done.returncode, done.stdout) == (0, "hello\n")
    assert "oops\n" in done.stderr
    script = tmp_path / "work.py"
    script.write_text("import sys\nprint(sys.argv[1:])\nsys.exit(3)\n")
    done = firepool("run", "work.py", "--sku", "x", "-c", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (3, "['--sku', 'x', '-c']\n")
    done = firepool("run", "--sku", "cpu-small", "--env", "A=1", "sh", "-c", "echo $A; pwd",
                    cwd=tmp_path)  # fmt: skip
    assert done.stdout == f"1\n{tmp_path}\n"
    failed = firepool("run", "-c", "print(1)\n1/0")
    assert failed.returncode == 1
    assert failed.stdout == "1\n"
    assert failed.stderr.count("ZeroDivisionError: division by zero") == 1
    assert "\x1b[" not in failed.stderr
    as_json = firepool("run", "--json", "-c", "print(2)")
    assert json.loads(as_json.stdout)["stdout"] == "2\n"
    assert json.loads(as_json.stdout)["state"] == "SUCCEEDED"


def test_a_detached_job_is_found_again(running: embedded.Connection) -> None:
    job = firepool("run", "-d", "-c", "print('later')").stdout.strip()
    assert firepool("logs", "-f", job).stdout == "later\n"
    listed = document("jobs", "--json")["jobs"]
    assert listed[0]["id"] == job
    assert job in firepool("jobs").stdout
    assert document("logs", job, "--json") == {
        "stdout": "later\n", "stderr": "", "job": job, "state": "SUCCEEDED",
    }  # fmt: skip
    assert "no job" in firepool("logs", "j-none").stderr.lower()


def test_pools_sessions_up_and_doctor(running: embedded.Connection) -> None:
    assert "cpu-small *" in firepool("pools").stdout
    assert document("pools", "--json")["default"] == "cpu-small"
    with Api(running) as api:
        api.session("notebook")
    assert "notebook" in firepool("sessions").stdout
    assert document("sessions", "--json")["sessions"][0]["lease_tag"] == "notebook"
    assert "isolation:" in firepool("up", "--once").stdout
    assert document("up", "--json")["broker"]["pid"] == running.pid
    for finding in document("doctor", "--json")["findings"]:
        assert (finding["ok"], finding["fix"]) == (True, None)
    assert "FAIL" not in firepool("doctor").stdout


def test_status_is_about_the_whole_machine(running: embedded.Connection) -> None:
    with Api(running) as api:
        api.session("notebook")
    text = firepool("status").stdout
    assert f"pid {running.pid}" in text
    assert "session  notebook" in text
    found = document("status", "--json")
    assert (found["broker"]["pid"], found["last"]) == (running.pid, None)


def test_jobs_are_cancelled_by_their_ids(running: embedded.Connection) -> None:
    job = firepool("run", "-d", "-c", SLEEPING).stdout.strip()
    unknown = firepool("cancel", job, "j-none")
    assert (unknown.returncode, "j-none" in unknown.stderr) == (2, True)
    assert firepool("cancel", job).stdout == f"cancelling {job}\n"
    firepool("logs", "-f", job)
    (view,) = document("jobs", "--json", "-n", "1")["jobs"]
    assert view["state"] == "CANCELLED"
    assert view["error"]["message"].startswith(f"cancelled by {getpass.getuser()} (command line")
    assert firepool("cancel", job).stdout.startswith(f"{job} has ended: cancelled")


def test_a_failed_job_is_listed_by_what_it_raised(running: embedded.Connection) -> None:
    firepool("run", "-c", "{}['k']")
    assert "KeyError" in firepool("jobs").stdout


def test_a_module_runs_as_with_python(running: embedded.Connection, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import sys\nprint(__name__, sys.argv[1:], sys.path[0])\n")
    done = firepool("run", "-m", "mine", "--help", "-c", cwd=tmp_path)
    assert done.stdout == f"__main__ ['--help', '-c'] {tmp_path}\n"
    assert done.stderr == ""  # not a word about the default pool


def test_what_the_broker_refuses_is_wrong_use(running: embedded.Connection) -> None:
    done = firepool("run", "--sku", "gpu", "-c", "1")
    assert done.returncode == 2
    assert "this machine has no GPU pool; pools: cpu-small, cpu" in done.stderr


# -- stopping ----------------------------------------------------------------------------------


def started(code: str, **options: Any) -> str:
    """Start a detached job and return its id once it printed something."""
    job = firepool("run", "-d", "-c", code, **options).stdout.strip()
    connection = embedded.find()
    assert connection is not None
    with Api(connection) as api:
        for kind, _ in api.follow(job):
            if kind == "stream":
                return job
    raise AssertionError("the job printed nothing")


def test_stop_ends_the_broker(running: embedded.Connection) -> None:
    assert firepool("stop").stdout == "stopped\n"
    assert embedded.find() is None


@pytest.mark.parametrize("code", [SLEEPING, STUBBORN], ids=["sleeping", "ignores SIGTERM"])
def test_stop_cancels_what_runs_and_says_so(running: embedded.Connection, code: str) -> None:
    job = started(code)
    began = time.monotonic()
    done = firepool("stop")
    assert time.monotonic() - began < 10
    assert done.returncode == 0
    assert done.stderr.startswith(f"cancelling {job} (detached, session cli-")
    assert done.stdout == f"stopped; cancelled {job}\n"
    assert embedded.find() is None
    with Api(embedded.ensure_running()) as api:
        view = api.get(f"/v1/jobs/{job}")
    assert (view["state"], view["error"]["class"]) == ("CANCELLED", "Cancelled")
    assert view["error"]["message"] == "the broker was stopped"


def test_stop_as_json_names_what_it_ended(running: embedded.Connection) -> None:
    job = started(SLEEPING)
    assert document("stop", "--json") == {"stopped": True, "cancelled": [job]}


def test_stop_can_wait_and_takes_nothing_new(running: embedded.Connection, tmp_path: Path) -> None:
    until = (
        "import os, time\nprint(1, flush=True)\nwhile not os.path.exists('go'): time.sleep(0.05)"
    )
    job = started(until, cwd=tmp_path)
    command = [sys.executable, "-m", "firepool_nb.cli", "stop", "--wait"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as stopping:
        assert stopping.stderr is not None
        assert stopping.stderr.readline().startswith(f"waiting for {job} (")
        refused = firepool("run", "-c", "1")
        assert refused.returncode == 1
        (tmp_path / "go").touch()
        out, _ = stopping.communicate(timeout=60)
    assert (stopping.returncode, out) == (0, "stopped\n")
    with Api(embedded.ensure_running()) as api:
        assert api.get(f"/v1/jobs/{job}")["state"] == "SUCCEEDED"
    assert f"the broker is ending, waits for {job}" in refused.stderr


@pytest.mark.parametrize("answer", ["cancel", "leave"])
def test_on_a_terminal_stop_asks(running: embedded.Connection, answer: str) -> None:
    job = started(SLEEPING)
    terminal = pexpect.spawn(
        sys.executable, ["-m", "firepool_nb.cli", "stop"], encoding="utf-8", timeout=60
    )
    terminal.expect_exact(f"1 job is not finished: {job}")
    terminal.expect_exact("cancel, wait or leave")
    terminal.sendline(answer)
    terminal.expect_exact(f"cancelled {job}" if answer == "cancel" else "nothing was stopped")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 0
    assert (embedded.find() is None) is (answer == "cancel")
    if answer == "leave":
        assert firepool("stop").returncode == 0


def test_an_interrupt_ends_the_job(running: embedded.Connection) -> None:
    command = [sys.executable, "-m", "firepool_nb.cli", "run", "-c",
               "print('go', flush=True)\nimport time\ntime.sleep(600)"]  # fmt: skip
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "go\n"
        os.kill(process.pid, signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupting" in errors
    assert "go" not in rest  # what was printed before is not printed again


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run"], "give either a script or command, or -c CODE, or -m MODULE"),
        (["run", "nowhere.py"], "nowhere.py is no file"),
        (["run", "--timeout", "soon", "-c", "1"], "not a duration"),
        (["run", "--env", "FP_NO_SUCH_VARIABLE", "-c", "1"], "no such variable"),
        (["bench", "no_such_row"], "no_such_row"),
    ],
)
def test_wrong_use_is_told(words: list[str], message: str, firepool_home: Path) -> None:
    done = firepool(*words)
    assert done.returncode == 2
    assert message in done.stderr
    assert embedded.find() is None


def test_rows_are_listed() -> None:
    assert "warm_start" in firepool("bench", "--list").stdout


def test_the_brokers_own_help() -> None:
    assert "--embedded" in firepool("broker", "serve", "--help").stdout
