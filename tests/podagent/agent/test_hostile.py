"""A job may do what it likes to itself and to what is near it; its attempt has an end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from firepool_podagent import messages, processes, strictjson
from firepool_podagent.pod import Pod
from firepool_podagent.testing import Agent, RefusedError, environment, until

FORGE = """
import os, stat, struct
frame = {frame!r}
for fd in range(200, 260):
    try:
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
            os.write(fd, struct.pack('>II', len(frame), 0) + frame)
    except OSError:
        pass
print('after')
"""


@pytest.fixture
def pod(start_agent: Callable[..., Agent]) -> Agent:
    return start_agent()


def strict(agent: Agent, attempt: str) -> list[dict[str, object]]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    response = agent.request("GET", f"/v1/attempts/{attempt}/output?from=0")
    with contextlib.closing(response.connection):  # type: ignore[attr-defined]
        return [json.loads(line, parse_constant=refuse) for line in response if line.strip()]


def test_displays_are_strict_json_whatever_they_hold(pod: Agent) -> None:
    done = pod.run(
        "from IPython.display import display\n"
        "display({'application/json': {'y': [1.0, float('nan')], 1: 10**5000, float('inf'): 3},"
        " 'text/plain': 'c\\ud800', 'text/x': {4}}, raw=True, metadata={'v': float('-inf')})"
    )
    assert done.error_class is None
    shown = [m for m in strict(pod, done.outcome["attempt"]) if m["type"] == "display_data"]
    assert shown[0]["data"] == {
        "application/json": {"y": [1.0, None], "1": None, "inf": 3},
        "text/plain": "c\ufffd",
        "text/x": [4],
    }
    assert shown[0]["metadata"] == {"v": None}


def test_strict_json_has_a_form_for_everything() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]

    class Odd:
        def __repr__(self) -> str:
            raise ValueError

    value = {
        "deep": deep,
        "odd": Odd(),
        "set": {1},
        (1, 2): float("nan"),
        "s": "\ud83d\ude00\udfff",
    }
    found = json.loads(strictjson.utf8_bytes(value))
    assert found["odd"] == "<Odd>"
    assert found["[1,2]"] is None
    assert found["s"] == "\U0001f600\ufffd"
    assert strictjson.is_shallow(found)
    assert not strictjson.is_shallow(deep)


@pytest.mark.parametrize(
    "frame",
    [
        b'{"type":"note","seq":"abc","text":"x"}',
        b'{"type":"note","seq":-1,"text":"x"}',
        b'{"type":"note","text":["x"]}',
        b'{"type":"stream","name":5,"text":"x"}',
        b'{"type":"stream","name":"stdout","text":[1]}',
        b'{"type":"display_data","data":"x"}',
        b'{"type":5}',
        b'{"type":"outcome"}',
        b"[" * 5000,
        b'{"type":"display_data","data":{"a":' + b"[" * 500 + b"]" * 500 + b"}}",
        b"5",
        b"\xff",
    ],
)
def test_bad_frames_are_refused(frame: bytes) -> None:
    with pytest.raises(messages.BadFrameError):
        messages.decode(frame)


def test_an_end_frame_is_taken_for_what_it_can_be() -> None:
    _, end = messages.decode(
        b'{"type":"end","n":7,"exit_code":0,"error":{"class":"Mine","message":5},"results":[5,'
        b'{"name":"x","sha256":"../../etc/passwd","size_bytes":-1}],"imported":[{},"a b","numpy"],'
        b'"imports_seconds":1e999}'
    )
    assert "n" not in end
    assert end["error"]["class"] is None
    assert end["imported"] == ["numpy"]
    assert end["imports_seconds"] is None
    assert [(r["name"], r["sha256"], r["size_bytes"]) for r in end["results"]] == [("x", None, 0)]


def test_a_forged_end_frame_leaves_no_job_without_an_end(pod: Agent) -> None:
    forged = b'{"type":"end","seq":1,"results":5,"imported":[{}],"error":5}'
    done = pod.run(FORGE.format(frame=forged) + "os._exit(1)")
    assert done.error_class == "NonZeroExit"
    done = pod.run(FORGE.format(frame=b'{"type":"end\\nevent: end","seq":0}') + "print('later')")
    assert done.error_class is None
    assert done.text() == "after\nlater\n"
    assert "left out" in done.notes[0]
    assert pod.run("print(1)").text() == "1\n"


class FailingPod(Pod):
    """A pod whose own work fails in a way that nothing foresees."""

    async def _prepare(self, *_: object) -> NoReturn:
        raise LookupError("a fault of the agent's own")

    async def _reset(self, *_: object) -> NoReturn:
        raise LookupError("another one")


async def test_an_error_of_the_agent_ends_the_attempt(
    short_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = {"name": "pod", "uid": "u", "directory": str(short_dir)}
    pod = FailingPod(config, "process", None, short_dir)
    _, log = pod.start("a:1", {"attempt": "a:1", "kind": "cell", "session_dir": str(short_dir)})
    while log.reset is None:
        change = log.change()
        await asyncio.wait_for(change, 5)
    await asyncio.sleep(0)
    assert log.outcome is not None
    assert log.outcome["error"]["class"] == "LaunchFailed"
    assert "a fault of the agent's own" in log.outcome["error"]["message"]
    assert not log.reset["clean"]
    assert pod.health()["state"] == "unclean"
    assert "LookupError" in capfd.readouterr().err
    asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)


@pytest.mark.parametrize("isolation", ["namespaces", "process"])
def test_a_stopped_supervisor_costs_no_time(
    start_agent: Callable[..., Agent], isolation: str
) -> None:
    pod = start_agent(isolation=isolation)
    pod.run("1")
    started = time.monotonic()
    done = pod.run("import os; os.kill(os.getppid(), 19); print('b')")
    assert time.monotonic() - started < 3
    assert (done.error_class, done.text()) == (None, "b\n")
    again = "import os\nwhile True: os.kill(os.getppid(), 19)"
    attempt = pod.start_attempt(again)
    time.sleep(0.3)
    started = time.monotonic()
    pod.signal(attempt, "kill")
    done = pod.finish(attempt)
    assert time.monotonic() - started < 4
    assert done.error_class == "Cancelled"
    assert pod.run("print(1)").text() == "1\n"


def test_a_stopped_template_goes_on(pod: Agent) -> None:
    pod.run("1")
    code = (
        "import os\nfor p in os.listdir('/proc'):\n"
        "    if p.isdigit() and int(p) != os.getpid():\n"
        "        try: os.kill(int(p), 19)\n        except OSError: pass\nprint('b')"
    )
    assert pod.run(code).text() == "b\n"
    started = time.monotonic()
    for _ in range(2):
        assert pod.run("print(1)").text() == "1\n"
    assert time.monotonic() - started < 10


def test_signals_of_a_job_do_not_reach_the_agent(agent: Agent) -> None:
    who = 1 if agent.facts["isolation"] == "namespaces" else agent.facts["pid"]
    numbers = [1, 2, 3, 10, 12, 13, 14, 15, 20, 40]
    done = agent.run(f"import os\nfor n in {numbers}: os.kill({who}, n)\nprint('b')")
    assert done.text() == "b\n"
    assert done.reset["clean"]
    assert agent.run("print(1)").text() == "1\n"


def test_a_draining_agent_takes_nothing(pod: Agent) -> None:
    pod.call("POST", "/v1/drain", {})
    with pytest.raises(RefusedError) as refused:
        pod.start_attempt("1")
    assert (refused.value.status, refused.value.error["class"]) == (409, "Busy")


def test_line_offsets_are_bounded(pod: Agent) -> None:
    for wrong in (1_000_001, 2**31, -1, "5", True):
        with pytest.raises(RefusedError) as refused:
            pod.start_attempt("1", line_offset=wrong)
        assert refused.value.error["class"] == "BadRequest"
        assert refused.value.error["field"] == "line_offset"
    assert pod.run("print(1)", line_offset=1_000_000).text() == "1\n"


@pytest.mark.parametrize("name", ["kill", "interrupt", "terminate"])
def test_a_start_that_hangs_can_be_stopped(
    start_agent: Callable[..., Agent], short_dir: Path, name: str
) -> None:
    pod = start_agent(isolation="process")
    program = short_dir / "hang"
    program.write_text(f"#!/bin/sh\necho $$ > {short_dir}/pid\nexec sleep 1000\n")
    program.chmod(0o755)
    attempt = pod.start_attempt("1", environment=environment(str(program), digest="hang"))
    until((short_dir / "pid").exists, 10, "it never started")
    until(lambda: (short_dir / "pid").read_text().strip(), 10, "it never started")
    pid = int((short_dir / "pid").read_text())
    started = time.monotonic()
    pod.signal(attempt, name)
    done = pod.finish(attempt)
    assert time.monotonic() - started < 1
    assert done.error_class == ("Interrupted" if name == "interrupt" else "Cancelled")
    until(lambda: processes.process(pid) is None, 1, "its process lives")
    assert pod.run("print(1)").text() == "1\n"


def test_what_was_asked_for_comes_back_or_is_missed(pod: Agent) -> None:
    done = pod.run("x = 1\nimport sys; sys.exit(0)", outputs=["x"])
    assert [(r["name"], r["error"]) for r in done.outcome["results"]] == [("x", None)]
    done = pod.run("x = 1\nimport atexit, os; atexit.register(os._exit, 0)", outputs=["x"])
    assert [(r["name"], r["error"]) for r in done.outcome["results"]] == [("x", None)]
    done = pod.run("x = 1\nimport os; os._exit(0)", outputs=["x"])
    assert done.error_class is None
    text = "the cell ended its process before x could be brought back"
    assert [(r["name"], r["error"]) for r in done.outcome["results"]] == [("x", text)]
    assert done.notes[0].startswith(text)


def test_a_value_that_raises_anything_costs_only_itself(pod: Agent) -> None:
    code = "y = 5\n" + "".join(
        f"class {name}:\n    def __reduce__(self): raise {name[1:]}\n{name.lower()} = {name}()\n"
        for name in ("XSystemExit", "XKeyboardInterrupt", "XGeneratorExit")
    )
    names = ["xsystemexit", "xkeyboardinterrupt", "xgeneratorexit", "y"]
    done = pod.run(code, outputs=names)
    assert done.error_class is None
    found = {r["name"]: r["error"] for r in done.outcome["results"]}
    assert list(found) == names
    assert found["y"] is None
    assert all(found[name].startswith(name[1].upper()) for name in names[:3])


def test_an_interrupt_ends_the_collecting(pod: Agent) -> None:
    code = (
        "import time\nclass H:\n    def __reduce__(self):\n        print('in', flush=True)\n"
        "        time.sleep(1000)\nh = H()"
    )
    attempt = pod.start_attempt(code, outputs=["h"])
    assert next(m for m in pod.output(attempt) if "in" in m.get("text", ""))
    pod.signal(attempt, "interrupt")
    assert pod.finish(attempt).error_class == "Interrupted"


@pytest.mark.parametrize(
    "wait",
    [
        "import atexit; atexit.register(time.sleep, 1000)",
        "import threading; threading.Thread(target=time.sleep, args=(1000,)).start()",
        "import signal, threading; signal.signal(2, signal.SIG_IGN)\n"
        "threading.Thread(target=time.sleep, args=(1000,)).start()",
        "class H:\n    def __del__(self, sleep=time.sleep): sleep(1000)\nh = H()",
    ],
)
def test_an_interrupt_ends_what_is_waited_for_after_the_code(pod: Agent, wait: str) -> None:
    attempt = pod.start_attempt(f"import time\n{wait}\nprint('up', flush=True)")
    assert next(m for m in pod.output(attempt) if "up" in m.get("text", ""))
    time.sleep(0.3)
    started = time.monotonic()
    pod.signal(attempt, "interrupt")
    done = pod.finish(attempt)
    assert time.monotonic() - started < 2
    assert done.error_class == "Interrupted"


@pytest.mark.parametrize(
    "patch",
    [
        "import json; json.dumps = json.JSONEncoder = None",
        "import os; os._exit = os.write = os.open = os.close = os.getpid = None",
        "import builtins; builtins.print = builtins.open = builtins.input = None",
        "import socket, struct, signal, select, time, gc, atexit\n"
        "socket.socket.sendall = None; socket.socket = struct.Struct = None\n"
        "signal.signal = signal.pthread_sigmask = gc.collect = atexit._run_exitfuncs = None",
        "import base64, hashlib, tempfile\n"
        "base64.b64encode = hashlib.sha256 = tempfile.mkstemp = None",
    ],
)
def test_a_cell_that_patches_everything_is_heard(pod: Agent, patch: str) -> None:
    code = (
        f"import sys\nfrom IPython.display import display\n{patch}\nx = 1\nlarge = 'x' * 100_000\n"
    )
    code += "sys.stdout.write('a\\n'); sys.stderr.write('e\\n'); display(5)"
    done = pod.run(code, outputs=["x", "large"])
    assert done.error_class is None, done
    assert (done.text(), done.text("stderr")) == ("a\n", "e\n")
    assert [r["error"] for r in done.outcome["results"]] == [None, None]
    assert [m["data"]["text/plain"] for m in done.messages if m["type"] == "display_data"] == ["5"]


def test_a_cell_that_patches_built_in_functions_brings_its_values_back(pod: Agent) -> None:
    done = pod.run("import builtins\nbuiltins.len = lambda *a: 0\nx = 1", outputs=["x"])
    assert [r["error"] for r in done.outcome["results"]] == [None]


def test_a_cell_that_breaks_its_interpreter_says_so(pod: Agent) -> None:
    done = pod.run("import builtins; builtins.isinstance = builtins.len = None; print('x')")
    assert done.error_class == "NonZeroExit"
    assert done.outcome["error"]["ename"] == "TypeError"
    assert done.text() == "x\n"


def test_a_pod_has_a_host_name_of_its_own_and_no_hand_on_the_clock(pod: Agent) -> None:
    if pod.facts["isolation"] != "namespaces":
        pytest.fail("this machine allows no namespaces")
    # The present time is set to itself: were it allowed, nothing would change.
    done = pod.run(
        "import ctypes, os, sys, time\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "now = (ctypes.c_long * 2)(*divmod(time.time_ns(), 10**9))\n"
        "print(libc.clock_settime(0, now), ctypes.get_errno())\n"
        "program = 'import ctypes, time; l = ctypes.CDLL(None, use_errno=True);'"
        "'t = (ctypes.c_long * 2)(*divmod(time.time_ns(), 10**9));'"
        "'print(l.clock_settime(0, t), ctypes.get_errno())'\n"
        "import subprocess; subprocess.run([sys.executable, '-c', program])\n"
        "print(os.readlink('/proc/self/ns/uts'))"
    )
    first, second, namespace = done.text().splitlines()
    assert (first, second) == ("-1 1", "-1 1")  # EPERM
    assert namespace != Path("/proc/self/ns/uts").readlink().name
