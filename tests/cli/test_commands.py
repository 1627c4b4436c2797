"""The command line against a real broker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from firepool_broker import embedded
from firepool_broker.testing import Api


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
    for command in ("pools", "jobs", "sessions"):
        done = firepool(command)
        assert done.returncode == 1
        assert "no broker runs" in done.stderr
        assert "Traceback" not in done.stderr
    assert embedded.find() is None
    assert document("stop", "--json") == {"stopped": False}


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
    assert all(finding["ok"] for finding in document("doctor", "--json")["findings"])
    assert "FAIL" not in firepool("doctor").stdout


def test_stop_ends_the_broker(running: embedded.Connection) -> None:
    assert firepool("stop").stdout == "stopped\n"
    assert embedded.find() is None


def test_an_interrupt_ends_the_job(running: embedded.Connection) -> None:
    command = [sys.executable, "-m", "firepool_nb.cli", "run", "-c",
               "print('go', flush=True)\nimport time\ntime.sleep(600)"]  # fmt: skip
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "go\n"
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupting" in errors


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
