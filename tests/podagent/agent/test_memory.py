"""Running out of memory is told apart from other ends, and costs neither the agent nor others."""

from __future__ import annotations

import time
from pathlib import Path

from firepool_podagent.testing import Agent

LOOP = "b = []\nwhile True: b.append(bytearray(16 << 20))"


def test_the_job_itself(agent: Agent) -> None:
    started = time.monotonic()
    done = agent.run(f"print('start', flush=True)\n{LOOP}", memory_mib=512)
    assert time.monotonic() - started < 30
    assert done.text() == "start\n"
    assert done.error_class == "OOM"
    assert "512 MiB" in done.outcome["error"]["message"]
    assert 256 < done.outcome["peak_memory_mib"] < 2048
    assert agent.run("print('ok')").text() == "ok\n"


def test_a_child_of_it(agent: Agent) -> None:
    code = (
        "import subprocess, sys\n"
        f"try: subprocess.run([sys.executable, '-c', {LOOP!r}], check=True)\n"
        "except subprocess.CalledProcessError as error: print('child', error.returncode)"
    )
    done = agent.run(code, memory_mib=512)
    assert done.text() == "child -9\n"
    assert done.error_class is None
    assert any("memory limit of 512 MiB was hit" in note for note in done.notes)


def test_pages_shared_by_forks_count_once(agent: Agent) -> None:
    code = (
        "import os, time\nb = bytearray(200 << 20)\n"
        "pids = [os.fork() for _ in range(1)]\n"
        "if 0 in pids: time.sleep(1.5); os._exit(0)\n"
        "a = os.fork()\nif a == 0: time.sleep(1.5); os._exit(0)\n"
        "time.sleep(1.5); print('fine')"
    )
    done = agent.run(code, memory_mib=400)
    assert done.text() == "fine\n", done
    assert done.error_class is None


def test_jobs_are_the_first_to_go_when_the_machine_runs_out(agent: Agent) -> None:
    done = agent.run("print(open('/proc/self/oom_score_adj').read())")
    assert int(done.text()) >= 800
    own = int(Path(f"/proc/{agent.facts['pid']}/oom_score_adj").read_text())
    assert own < 800


def test_memory_error_is_what_python_says(agent: Agent) -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30,) * 2)\n"
        "x = bytearray(4 << 30)"
    )
    done = agent.run(code)
    assert done.outcome["error"]["ename"] == "MemoryError"
