"""Nothing outlives a job: not in 200 runs of everything that tries, while naive killers fail."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zoo
from firepool_podagent import processes
from firepool_podagent.testing import Agent, until

HERE = Path(__file__).parent


class Watched:
    """A FIFO that tells whether any holder of its writing end is left."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = str(path)
        self._reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def held(self) -> bool:
        try:
            return os.read(self._reader, 1) != b""
        except BlockingIOError:
            return True

    def close(self) -> None:
        os.close(self._reader)


@pytest.fixture
def fifo(short_dir: Path) -> Iterator[Watched]:
    shutil.copy(HERE / "zoo.py", short_dir)  # the checkout may lie where a pod does not see it
    watched = Watched(short_dir / "zoo.fifo")
    yield watched
    watched.close()


def _cell(fifo: Watched, *animals: str, then: str = "") -> str:
    return (
        f"import sys; sys.path.insert(0, {str(Path(fifo.path).parent)!r}); import zoo\n"
        f"print(*zoo.release({fifo.path!r}, {animals!r}))\n{then}"
    )


@pytest.mark.stress
@pytest.mark.timeout(1800)
def test_no_process_outlives_its_job(agent: Agent, fifo: Watched, stress: int) -> None:
    visible = {"cwd": str(Path(fifo.path).parent)}
    for _ in range(stress):
        done = agent.run(_cell(fifo), **visible)
        assert sorted(done.text().split()) == sorted(a.__name__ for a in zoo.ANIMALS), done
        assert not fifo.held(), done
        assert done.error_class is None
        assert done.reset["clean"], done.reset
        assert done.reset["escapees"] == 0
        assert any("background processes" in note and "sleep" in note for note in done.notes)


@pytest.mark.parametrize("animal", sorted({a.__name__ for a in zoo.ANIMALS}))
def test_each_kind_is_seen_and_ended(agent: Agent, fifo: Watched, animal: str) -> None:
    done = agent.run(_cell(fifo, animal), cwd=str(Path(fifo.path).parent))
    assert animal in done.text()
    assert not fifo.held()
    assert done.reset["clean"]


@pytest.mark.parametrize("how", ["os.kill(os.getpid(), 9)", "os._exit(3)", "raise SystemExit(4)"])
def test_however_the_job_itself_ends(agent: Agent, fifo: Watched, how: str) -> None:
    done = agent.run(_cell(fifo, then=f"import os; {how}"), cwd=str(Path(fifo.path).parent))
    assert not fifo.held()
    assert done.reset["clean"]
    assert done.error_class == ("Signal" if "kill" in how else "NonZeroExit")


def test_a_kill_takes_the_whole_tree(agent: Agent, fifo: Watched) -> None:
    attempt = agent.start_attempt(
        _cell(fifo, then="import time; time.sleep(1000)"), cwd=str(Path(fifo.path).parent)
    )
    for message in agent.output(attempt):
        if message["type"] == "stream":
            break
    agent.signal(attempt, "kill")
    done = agent.finish(attempt)
    assert not fifo.held()
    assert done.error_class == "Cancelled"
    assert done.reset["clean"]
    assert agent.run("print(1)").text() == "1\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_job_that_attacks_its_supervisor(agent: Agent, fifo: Watched, number: int) -> None:
    attack = f"import os; os.kill(os.getppid(), {int(number)})\nimport time; time.sleep(1000)"
    started = time.monotonic()
    attempt = agent.start_attempt(_cell(fifo, then=attack), cwd=str(Path(fifo.path).parent))
    if number == signal.SIGSTOP:
        time.sleep(0.5)
        agent.signal(attempt, "kill")
    done = agent.finish(attempt)
    assert time.monotonic() - started < 20
    assert not fifo.held()
    assert done.outcome["error"] is not None
    assert done.reset["clean"], done.reset
    assert agent.run("print(1)").text() == "1\n"


def test_a_job_that_attacks_the_template(agent: Agent, fifo: Watched) -> None:
    attack = (
        "import os\nstat = open(f'/proc/{os.getppid()}/stat').read()\n"
        "os.kill(int(stat.rpartition(')')[2].split()[1]), 9)\nprint('done')"
    )
    done = agent.run(_cell(fifo, then=attack), cwd=str(Path(fifo.path).parent))
    assert done.text().endswith("done\n")
    assert not fifo.held()
    assert done.reset["clean"], done.reset
    assert agent.run("print(1)").text() == "1\n"


def test_the_death_of_the_agent_ends_its_job(agent: Agent, fifo: Watched) -> None:
    attempt = agent.start_attempt(
        _cell(fifo, then="import time; time.sleep(1000)"), cwd=str(Path(fifo.path).parent)
    )
    for message in agent.output(attempt):
        if message["type"] == "stream":
            break
    assert fifo.held()
    if agent.facts["isolation"] == "process":  # whoever waits for the end of the pod knows whom for
        known = json.loads((agent.directory / "supervisors.json").read_text())
        names = {processes.process(int(pid)).start_ticks for pid in known}  # type: ignore[union-attr]
        assert names == set(known.values())
    agent.kill()
    until(lambda: not fifo.held(), 5, "processes outlive the agent")


# --- the same zoo, and killers that everyone writes first --------------------------------------


def _kill_group(leader: int) -> None:
    os.killpg(leader, signal.SIGKILL)


def _walk_parents(leader: int) -> None:
    for _ in range(20):
        for pid in processes.descendants(leader):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    os.kill(leader, signal.SIGKILL)


def _search_environment(leader: int) -> None:
    os.kill(leader, signal.SIGKILL)
    for _ in range(20):
        for pid in processes.all_pids():
            try:
                environment = Path(f"/proc/{pid}/environ").read_bytes()
                if b"ZOO_JOB=1" in environment.split(b"\0"):
                    os.kill(pid, signal.SIGKILL)
            except OSError:
                continue


def _whole_procedure(leader: int) -> None:
    os.kill(leader, signal.SIGKILL)
    killer = processes.TreeKiller()
    while not killer.done:
        killer.step()
    assert killer.clean


_HARNESS = f"""
import os, subprocess, sys, time
sys.path[:0] = [{str(HERE)!r}]
from firepool_podagent import processes
import test_zoo
processes.become_subreaper()
killer, path = sys.argv[1:]
job = subprocess.Popen(
    [sys.executable, "-c", "import sys, time; sys.path.insert(0, sys.argv[1]); import zoo;"
     "print(len(zoo.release(sys.argv[2])), flush=True); time.sleep(1000)", {str(HERE)!r}, path],
    stdout=subprocess.PIPE, env={{**os.environ, "ZOO_JOB": "1"}}, start_new_session=True)
assert int(job.stdout.readline()) == len(test_zoo.zoo.ANIMALS)
getattr(test_zoo, killer)(job.pid)
time.sleep(0.1)
print("done", flush=True)
sys.stdin.read()
test_zoo._whole_procedure(job.pid) if processes.process(job.pid) else None
rest = processes.TreeKiller()
while not rest.done:
    rest.step()
assert rest.clean
"""


@pytest.mark.parametrize(
    ("killer", "leaks"),
    [
        (_kill_group, True),
        (_walk_parents, True),
        (_search_environment, True),
        (_whole_procedure, False),
    ],
)
def test_naive_killers_fail_where_the_procedure_does_not(
    fifo: Watched, killer: object, leaks: bool
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HARNESS, killer.__name__, fifo.path],  # type: ignore[attr-defined]
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as harness:
        assert harness.stdout is not None
        assert harness.stdin is not None
        assert harness.stdout.readline() == "done\n"
        assert fifo.held() == leaks
        harness.stdin.close()
        assert harness.wait(timeout=20) == 0
    assert not fifo.held()
