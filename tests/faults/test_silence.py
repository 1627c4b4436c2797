"""Agents that fall silent, lie still or vanish: everybody who wants them gone is obeyed in time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from firepool_broker import embedded
from firepool_broker.launch.agent_client import AgentAbsent, AgentUnreachable
from firepool_broker.loop import guard as guards
from firepool_broker.loop.guard import Attempt, Guard
from firepool_broker.testing import Api, assert_nothing_left, processes_of

FOREVER = "import time\nprint('on', flush=True)\ntime.sleep(1000)"
SESSION = {"lease_tag": "kernel-1", "client_id": "client-1"}


@pytest.fixture
def running(api: Api) -> Any:
    """A job that runs and would run on."""
    api.session("kernel-1")
    api.run("print(1)", **SESSION)
    job = api.submit(FOREVER, **SESSION)
    for kind, _ in api.follow(job["id"]):
        if kind == "stream":
            break
    return job


@pytest.fixture
def stopped(running: Any, firepool_home: Path) -> Iterator[list[psutil.Process]]:
    """Its agents, stopped."""
    agents = [
        process
        for process in processes_of(firepool_home)
        if any(word.startswith("firepool-pod=") for word in process.cmdline())
    ]
    assert agents
    for agent in agents:
        agent.suspend()
    yield agents
    for agent in agents:
        with contextlib.suppress(psutil.NoSuchProcess):
            agent.resume()


@pytest.mark.parametrize(
    ("path", "body", "error_class"),
    [("interrupt", {"kill": True}, "Interrupted"), ("cancel", {}, "Cancelled")],
)
def test_a_job_of_a_stopped_agent_is_ended_as_asked(
    api: Api,
    running: Any,
    stopped: list[psutil.Process],
    path: str,
    body: Any,
    error_class: str,
) -> None:
    began = time.monotonic()
    api.post(f"/v1/jobs/{running['id']}/{path}", body)
    _, ended = api.wait(running["id"])
    assert (ended["state"], ended["error"]["class"]) == ("CANCELLED", error_class)
    assert time.monotonic() - began < 10 + 8 * (path == "cancel")  # its grace is ten seconds
    _, after = api.run("print(2)", **SESSION)
    assert after["state"] == "SUCCEEDED"
    assert after["pods"] != running["pods"]
    psutil.wait_procs(stopped, timeout=5)
    assert not any(process.is_running() for process in stopped)


def test_a_stopped_agents_pod_can_be_retired(
    api: Api, running: Any, stopped: list[psutil.Process]
) -> None:
    (pod,) = [pod for pod in api.get("/v1/pods")["pods"] if pod["job"] == running["id"]]
    began = time.monotonic()
    answer = api.http.post(f"/v1/pods/{pod['name']}/retire", json={})
    assert answer.is_success
    _, ended = api.wait(running["id"])
    assert (ended["state"], ended["error"]["class"]) == ("FAILED", "PodLost")
    assert "silent" in ended["error"]["message"]
    assert time.monotonic() - began < 15


@pytest.mark.parametrize("cancel", [True, False], ids=["stop", "drain"])
def test_the_broker_stops_within_seconds_whatever_its_pods_do(
    api: Api,
    running: Any,
    stopped: list[psutil.Process],
    firepool_home: Path,
    cancel: bool,
) -> None:
    began = time.monotonic()
    assert embedded.stop(cancel=cancel)
    assert time.monotonic() - began < 12
    assert_nothing_left(firepool_home)


# -- the guard by itself -----------------------------------------------------------------------


class Fleet:
    """Takes what the guard decides; its agent answers as a test says."""

    def __init__(self) -> None:
        self.condemned: list[str] = []
        self.state: Any = {"attempt": "j:1", "state": "running", "outcome": None}
        self.active: str | None = "j:1"

    def is_leaving(self, name: str) -> bool:
        return bool(self.condemned)

    def condemn(self, name: str, reason: str, *, at_once: bool = False) -> None:
        assert at_once
        self.condemned.append(reason)

    def client(self, name: str) -> Fleet:
        return self

    async def attempt(self, attempt: str, timeout_seconds: float) -> Any:
        if isinstance(self.state, Exception):
            raise self.state
        return self.state

    async def health(self, timeout_seconds: float) -> Any:
        return {"active": self.active}


class Guarded:
    """A guard, one attempt, and what was told."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self.told: list[str | None] = []
        self.attempt = Attempt("j", 1, "pod-1", sent=True, accepted=True)
        attempts = {"pod-1": self.attempt}
        self.guard = Guard(self.fleet, attempts, self._tell)  # type: ignore[arg-type]

    async def _tell(self, job_id: str, text: str | None) -> None:
        self.told.append(text)

    async def silent_for(self, seconds: float) -> None:
        """Look as if nothing had come for so long."""
        for name in ("began", "heard", "probed", "told_at", "ends_by", "absent_since"):
            value = getattr(self.attempt, name)
            if value is not None:
                setattr(self.attempt, name, value - seconds)
        self.guard.look(self.attempt)
        for _ in range(5):
            await asyncio.sleep(0)


@pytest.fixture
async def guarded() -> Any:
    made = Guarded()
    yield made
    await made.guard.stop()


async def test_silence_alone_is_said_once_and_ends_nothing(guarded: Guarded) -> None:
    guarded.fleet.state = AgentUnreachable("slow")
    await guarded.silent_for(31)
    await guarded.silent_for(1000)
    assert guarded.fleet.condemned == []
    (text,) = guarded.told
    assert text is not None
    assert "has not answered for 31 s" in text
    guarded.fleet.state = {"attempt": "j:1", "state": "running", "outcome": None}
    await guarded.guard.probe(guarded.attempt)
    await asyncio.sleep(0)
    assert guarded.told[1:] == [None]


async def test_an_agent_that_nobody_can_ever_reach_again_is_given_up(guarded: Guarded) -> None:
    guarded.fleet.state = AgentAbsent("no socket")
    await guarded.silent_for(11)
    await guarded.silent_for(5)
    assert guarded.fleet.condemned == []
    await guarded.silent_for(21)
    assert "nobody listens" in guarded.fleet.condemned[0]


@pytest.mark.parametrize("state", ["running", "lost"])
async def test_an_agent_without_attempt_and_outcome_loses_its_pod(
    guarded: Guarded, state: str
) -> None:
    guarded.fleet.active = None
    guarded.fleet.state = {"attempt": "j:1", "state": state, "outcome": None}
    await guarded.silent_for(11)
    assert "has no outcome" in guarded.fleet.condemned[0]


async def test_an_outcome_is_waited_for_and_never_taken_for_a_loss(guarded: Guarded) -> None:
    guarded.fleet.active = None
    guarded.fleet.state = {"attempt": "j:1", "state": "ended", "outcome": {"attempt": "j:1"}}
    await guarded.silent_for(11)
    assert guarded.fleet.condemned == []
    assert await guarded.guard.probe(guarded.attempt) == {"attempt": "j:1"}


async def test_an_agent_that_answers_has_longer_to_end_its_attempt(guarded: Guarded) -> None:
    guarded.guard.told_to_end(guarded.attempt, 0.0)
    guarded.guard.heard(guarded.attempt)
    assert guards.END_SECONDS < guards.WORK_SECONDS
    guarded.attempt.heard += 1  # after it was told
    await guarded.silent_for(guards.END_SECONDS + 1)
    assert guarded.fleet.condemned == []
    await guarded.silent_for(guards.WORK_SECONDS)
    assert "did not end" in guarded.fleet.condemned[0]
