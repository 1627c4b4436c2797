"""Floods, odd bytes, caps: the text arrives whole, in order, and nobody waits for anybody."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from firepool_podagent.testing import Agent


@pytest.fixture
def agent(start_agent: Callable[..., Agent]) -> Agent:
    return start_agent()


def resident_mib(agent: Agent) -> float:
    status = Path(f"/proc/{agent.facts['pid']}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


FLOOD = """
import subprocess
subprocess.run(["sh", "-c",
    "i=0; while [ $i -lt 20000 ]; do echo o$i; echo e$i >&2; i=$((i+1)); done"], check=True)
import ctypes
ctypes.CDLL(None).puts(b"from C")
ctypes.CDLL(None).fflush(None)
print("done")
"""


def test_a_flood_on_both_streams(agent: Agent) -> None:
    agent.run("1")
    before = resident_mib(agent)
    started = time.monotonic()
    done = agent.run(FLOOD)
    assert time.monotonic() - started < 30
    assert done.error_class is None
    numbers = range(20000)
    assert done.text() == "".join(f"o{n}\n" for n in numbers) + "from C\ndone\n"
    assert done.text("stderr") == "".join(f"e{n}\n" for n in numbers)
    assert resident_mib(agent) - before < 50


def test_a_flood_above_the_cap_keeps_head_and_tail(agent: Agent) -> None:
    agent.run("1")
    before = resident_mib(agent)
    code = "for n in range(400_000): print(n, 'x' * 90)\nprint('done')"
    done = agent.run(code, output_limit_bytes=1 << 20)
    text = done.text()
    assert text.startswith("0 x")
    assert text.endswith("done\n")
    assert 0.8 * (1 << 20) < len(text) < 1.2 * (1 << 20)
    dropped = [note for note in done.notes if "dropped" in note]
    assert len(dropped) == 1
    total = sum(len(f"{n} ") + 91 for n in range(400_000)) + 5
    assert str(total - len(text)) in dropped[0]
    assert resident_mib(agent) - before < 50
    assert done.reset["clean"]


ODD_BYTES = r"""
import os, time
os.write(1, b"\xff\xfeok\n")
e = "\u00e9".encode()
os.write(1, e[:1]); time.sleep(0.5); os.write(1, e[1:] + b"\n")
os.write(1, bytes(range(256)) * 4096)
print("\nend")
"""


def test_bytes_that_are_no_text(agent: Agent) -> None:
    done = agent.run(ODD_BYTES)
    assert done.error_class is None
    text = done.text()
    assert text.startswith("\ufffd\ufffdok\n\u00e9\n")
    assert text.endswith("\nend\n")
    assert "\0" not in text
    text.encode("utf-8")


def test_streams_and_displays_keep_their_order(agent: Agent) -> None:
    code = """
import sys, os
from IPython.display import display
for n in range(200):
    print("out", n)
    os.system(f"echo shell {n}")
    print("err", n, file=sys.stderr)
    display(n)
"""
    done = agent.run(code)
    seen = []
    for message in done.messages:
        if message["type"] == "stream":
            seen += message["text"].splitlines()
        elif message["type"] == "display_data":
            seen.append("display " + message["data"]["text/plain"])
    expected = [f"{w} {n}" for n in range(200) for w in ("out", "shell", "err", "display")]
    assert seen == expected


def test_a_line_is_sent_when_it_is_printed(agent: Agent) -> None:
    agent.run("1")
    attempt = agent.start_attempt(
        "import time\nfor n in range(3): print(n, time.time()); time.sleep(0.3)"
    )
    delays = [
        time.time() - float(message["text"].split()[1])
        for message in agent.output(attempt)
        if message["type"] == "stream"
    ]
    assert len(delays) == 3
    assert min(delays) < 0.1


def test_closed_descriptors_do_not_stop_the_rest(agent: Agent) -> None:
    code = (
        "import os\nprint('a')\nos.close(2)\nprint('b')\nos.closerange(5, 1000)\n"
        "_ = os.write(1, b'c')"
    )
    done = agent.run(code)
    assert done.text() == "a\nb\nc"
    assert done.reset["clean"]


def test_a_reader_who_does_not_read_holds_nobody_up(agent: Agent) -> None:
    attempt = agent.start_attempt("for n in range(100_000): print('x' * 90)\nprint('done')")
    response = agent.request("GET", f"/v1/attempts/{attempt}/output?from=0")
    done = agent.finish(attempt)  # another reader gets all of it meanwhile
    assert done.text().endswith("done\n")
    response.connection.close()  # type: ignore[attr-defined]
