"""Interrupt, terminate, kill and time limits, and what they are called afterwards."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from firepool_podagent.testing import Agent, until


def wait_for_text(agent: Agent, attempt: str, text: str) -> None:
    for message in agent.output(attempt):
        if text in message.get("text", ""):
            return
    raise AssertionError(f"{text!r} never came")


def sleepers(agent: Agent, argument: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes() == b"sleep\0" + argument.encode() + b"\0":
                found.append(path.parent.name)
        except OSError:
            continue
    return found


SLEEP = "import subprocess, time\np = subprocess.Popen(['sleep', '{}'])\nprint('up', flush=True)\n"


def test_interrupt_reaches_the_tree(agent: Agent) -> None:
    argument = f"987{time.monotonic_ns() % 10**9}"
    attempt = agent.start_attempt(SLEEP.format(argument) + "time.sleep(1000)")
    wait_for_text(agent, attempt, "up")
    assert sleepers(agent, argument)
    started = time.monotonic()
    agent.signal(attempt, "interrupt")
    done = agent.finish(attempt)
    assert time.monotonic() - started < 3
    assert done.error_class == "Interrupted"
    assert done.outcome["error"]["ename"] == "KeyboardInterrupt"
    assert [m["ename"] for m in done.messages if m["type"] == "error"] == ["KeyboardInterrupt"]
    assert not sleepers(agent, argument)
    assert done.reset["clean"]
    assert agent.run("print('warm')").text() == "warm\n"


def test_swallowed_interrupts_never_kill_and_a_kill_says_what_was_wanted(agent: Agent) -> None:
    argument = f"986{time.monotonic_ns() % 10**9}"
    code = SLEEP.format(argument).replace("print('up', flush=True)\n", "first = True\n") + (
        "while True:\n    try:\n        if first: first = False; print('up')\n"
        "        time.sleep(1)\n    except KeyboardInterrupt: print('ignored')"
    )
    attempt = agent.start_attempt(code)
    wait_for_text(agent, attempt, "up")
    agent.signal(attempt, "interrupt", grace_seconds=0.1)
    wait_for_text(agent, attempt, "ignored")
    time.sleep(0.5)
    assert agent.call("GET", f"/v1/attempts/{attempt}")["state"] == "running"
    agent.signal(attempt, "kill", **{"class": "Interrupted"})
    done = agent.finish(attempt)
    assert done.text() == "up\nignored\n"
    assert done.error_class == "Interrupted"
    assert done.outcome["signal"] == 9
    assert not sleepers(agent, argument)
    assert done.reset["clean"]


@pytest.mark.parametrize(
    "code",
    [
        "print('up', flush=True); sum(range(10**12))",
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "print('up', flush=True)\nimport time; time.sleep(1000)",
    ],
)
def test_code_that_hears_no_interrupt_can_be_killed(agent: Agent, code: str) -> None:
    attempt = agent.start_attempt(code)
    wait_for_text(agent, attempt, "up")
    time.sleep(0.3)  # by now it is past its print, in what hears nothing
    agent.signal(attempt, "interrupt")
    time.sleep(0.2)
    assert agent.call("GET", f"/v1/attempts/{attempt}")["state"] == "running"
    started = time.monotonic()
    agent.signal(attempt, "kill", **{"class": "Interrupted"})
    done = agent.finish(attempt)
    assert time.monotonic() - started < 2
    assert done.error_class == "Interrupted"
    assert done.reset["clean"]


def test_terminate_waits_for_the_grace_and_no_longer(agent: Agent) -> None:
    tidy = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('tidy'), sys.exit(7)))\n"
        "print('up', flush=True)\ntime.sleep(1000)"
    )
    attempt = agent.start_attempt(tidy)
    wait_for_text(agent, attempt, "up")
    agent.signal(attempt, "terminate", grace_seconds=10)
    done = agent.finish(attempt)
    assert done.text() == "up\ntidy\n"
    assert (done.error_class, done.outcome["exit_code"]) == ("Cancelled", 7)
    deaf = tidy.replace("(print('tidy'), sys.exit(7))", "None")
    attempt = agent.start_attempt(deaf + "\ntime.sleep(1000)")
    wait_for_text(agent, attempt, "up")
    started = time.monotonic()
    agent.signal(attempt, "terminate", grace_seconds=0.3)
    done = agent.finish(attempt)
    assert 0.3 <= time.monotonic() - started < 3
    assert (done.error_class, done.outcome["signal"]) == ("Cancelled", 9)


def test_time_limit(agent: Agent) -> None:
    done = agent.run("import time; time.sleep(1000)", timeout_seconds=0.3)
    assert done.error_class == "Timeout"
    assert "0.3 s" in done.outcome["error"]["message"]
    assert agent.run("print(1)", timeout_seconds=60).text() == "1\n"


def test_a_signal_from_elsewhere_is_named_and_not_taken_for_memory(agent: Agent) -> None:
    done = agent.run("import os; os.kill(os.getpid(), 9)", memory_mib=2000)
    assert done.error_class == "Signal"
    assert "SIGKILL" in done.outcome["error"]["message"]
    done = agent.run("import os; os.abort()")
    assert done.error_class == "Signal"
    assert "SIGABRT" in done.outcome["error"]["message"]


def test_signals_for_an_ended_attempt_do_nothing_to_the_next(agent: Agent) -> None:
    first = agent.run("1").outcome["attempt"]
    second = agent.start_attempt("import time; time.sleep(0.5); print('whole')")
    assert agent.signal(first, "kill")["ignored"]
    assert agent.signal(first, "interrupt")["ignored"]
    done = agent.finish(second)
    assert done.text() == "whole\n"
    assert done.error_class is None


def test_a_job_can_be_stopped_before_it_begins(agent: Agent) -> None:
    environment = agent.spec("")["environment"]
    attempt = agent.start_attempt("print('ran')", environment={**environment, "digest": "new"})
    agent.signal(attempt, "interrupt")
    done = agent.finish(attempt)
    assert done.text() == ""
    assert done.error_class == "Interrupted"
    until(lambda: agent.health()["state"] == "idle", 5, "not idle")
    assert agent.run("print(1)").text() == "1\n"


def test_an_interpreter_that_does_not_start_is_a_failed_launch(agent: Agent) -> None:
    environment = agent.spec("")["environment"]
    for executable in ("/bin/false", "/does/not/exist", "/etc/passwd"):
        done = agent.run(
            "1", environment={**environment, "executable": executable, "digest": executable}
        )
        assert done.error_class == "LaunchFailed", done
        assert done.reset["clean"], done.reset
    assert agent.run("print(1)").text() == "1\n"
