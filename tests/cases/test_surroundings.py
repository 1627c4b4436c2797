"""What one job changes and the next one must not see: files, environment, limits."""

from __future__ import annotations

import ast
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from firepool_broker import embedded
from firepool_broker.testing import Api, broker_log

SESSION = {"lease_tag": "kernel-1", "client_id": "client-1"}

# -- C24 -----------------------------------------------------------------------------------------

ODD_TREE = r"""
import os
os.chdir(os.environ["TMPDIR"])
os.makedirs("ro/a/b"); open("ro/a/b/f", "w").write("x")
os.chmod("ro/a/b", 0o555); os.chmod("ro/a", 0)
os.symlink("/etc", "etc_link"); os.symlink("loop", "loop"); os.mkfifo("pipe")
open(b"bad\xff name\n", "w").close()
d = "."
for n in range(300):
    d += "/" + "d" * 50
    if len(d) < 4000: os.mkdir(d)
os.chdir("ro")
print(os.getcwd())
"""


@pytest.fixture
def session(api: Api, firepool_home: Path) -> dict[str, Any]:
    opened: dict[str, Any] = api.session("kernel-1", cwd=str(firepool_home))
    return opened


@contextmanager
def connected(api: Api, tag: str, client_id: str) -> Any:
    path = f"/v1/sessions/{tag}/stream?client_id={client_id}"
    with Api(api.connection) as other, other.http.stream("GET", path, timeout=None) as stream:
        assert stream.is_success, stream.read()
        yield


def until(check: Callable[[], Any], within_seconds: float = 15) -> Any:
    deadline = time.monotonic() + within_seconds
    while not (found := check()):
        assert time.monotonic() < deadline, "it did not become so"
        threading.Event().wait(0.02)
    return found


def test_an_odd_tree_is_gone_for_the_next_session(
    api: Api, session: dict[str, Any], firepool_home: Path
) -> None:
    """C24: an odd tree in the scratch; the next session's job on that pod sees nothing of it."""
    stat = os.stat("/etc").st_mode
    names = sorted(os.listdir("/etc"))
    with connected(api, "kernel-1", "client-1"):
        text, job = api.run(ODD_TREE, **SESSION)
        assert job["state"] == "SUCCEEDED", job["error"]
        began = time.monotonic()
        pod = job["pods"][0]
        held = until(lambda: [p for p in api.get("/v1/pods")["pods"] if p["state"] == "HELD"])
        assert time.monotonic() - began < 5, "the reset of this tree takes at most 5 s"
        assert pod in [each["name"] for each in held]
    until(lambda: not api.get("/v1/sessions/kernel-1")["connected"])
    api.session("kernel-2", client_id="client-2", cwd=str(firepool_home))
    # the notebook's folder and the environment show through when they lie below /tmp
    shown = {Path(path).parts[2] for path in (firepool_home, sys.prefix, __file__)}
    look = (
        "import os\nfound = set(os.listdir(os.environ['TMPDIR']))\n"
        f"print(sorted(found - {shown!r}))\nprint(os.getcwd())"
    )
    text, after = api.run(look, lease_tag="kernel-2", client_id="client-2")
    assert after["acquisition"]["path"] == "recycled"
    assert after["pods"] == [pod]
    assert text.splitlines() == ["[]", str(firepool_home)]
    assert os.stat("/etc").st_mode == stat
    assert sorted(os.listdir("/etc")) == names


# -- C26 -----------------------------------------------------------------------------------------

CANARY = r"""
import locale, os, resource, signal, sys, time
env = {k: v for k, v in sorted(os.environ.items()) if k not in ("FIREPOOL_JOB", "FIREPOOL_ATTEMPT")}
mask = os.umask(0); os.umask(mask)
print(ascii(env)); print(os.getcwd(), oct(mask))
print([resource.getrlimit(getattr(resource, "RLIMIT_" + n)) for n in ("NOFILE", "CORE", "STACK")])
print(time.tzname, locale.getlocale(), sys.path, sys.flags)
print([str(signal.getsignal(getattr(signal, "SIG" + n))) for n in ("INT", "TERM", "CHLD", "PIPE")])
print(sorted(map(int, os.listdir("/proc/self/fd")))[:-1], os.nice(0), "\u4e16\u754c")
"""
POISON = r"""
import os, resource, signal, time
os.environ.update(LD_PRELOAD="/nowhere.so", PYTHONPATH="/poison", TZ="Asia/Tokyo", POISON="1")
time.tzset(); os.umask(0o077); os.nice(10)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, 1 << 20))
signal.signal(signal.SIGPIPE, signal.SIG_IGN); signal.signal(signal.SIGCHLD, signal.SIG_IGN)
home = os.environ["HOME"]
open(home + "/.gitconfig", "w").write("[user]\n name = poison\n")
os.makedirs(home + "/.config/pip"); open(home + "/.config/pip/pip.conf", "w").write("[global]\n")
import sys; sys.path.insert(0, "/poison"); os.chdir("/")
print("poisoned")
"""


def test_a_canary_sees_the_same_before_and_after(api: Api, firepool_home: Path) -> None:
    """C26: K, a job that changes everything it can, K again: not a byte differs."""
    home = firepool_home / "person"
    home.mkdir()
    variables = {"PATH": os.environ["PATH"], "HOME": str(home)}  # no LANG
    api.session("kernel-1", cwd=str(firepool_home), env=variables)
    first, job = api.run(CANARY, **SESSION)
    assert job["state"] == "SUCCEEDED", job["error"]
    assert first.endswith("\u4e16\u754c\n")
    text, job = api.run(POISON, **SESSION)
    assert text == "poisoned\n", job["error"]
    second, after = api.run(CANARY, **SESSION)
    assert after["pods"] == job["pods"]
    assert second == first
    third, _ = api.run(CANARY, **SESSION)
    assert third == first


KEY = "-----BEGIN\nline=2 'q' \"d\" $X\n\n-----END\n"


def test_values_arrive_byte_for_byte_and_stay_private(
    api: Api, session: dict[str, Any], firepool_home: Path
) -> None:
    """C26: newlines, quotes and ``$`` survive; the value is in no log, argv or later job."""
    secret = f"secret-{time.time_ns()}"
    value = KEY + secret + "\n"
    code = (
        "import os, subprocess, glob\n"
        "print(ascii(os.environ['KEY'])); print(repr(os.environ['EMPTY']))\n"
        "print(ascii(subprocess.check_output('printf %s \"$KEY\"', shell=True).decode()))\n"
        "print(subprocess.check_output('echo ${EMPTY+set}', shell=True).decode().strip())\n"
        "lines = [open(p, 'rb').read() for p in glob.glob('/proc/[0-9]*/cmdline')]\n"
        f"print(sum({secret[:3]!r}.encode() + {secret[3:]!r}.encode() in l for l in lines))\n"
    )
    text, job = api.run(code, env={"KEY": value, "EMPTY": ""}, **SESSION)
    lines = text.splitlines()
    assert ast.literal_eval(lines[0]) == value, job["error"]
    assert ast.literal_eval(lines[1]) == ""
    assert ast.literal_eval(lines[2]) == value
    assert lines[3:] == ["set", "0"]
    look = (
        "import glob, os\nfound = []\n"
        "for path in glob.glob('/proc/[0-9]*/environ'):\n"
        "    try:\n"
        f"        if ({secret[:3]!r} + {secret[3:]!r}).encode() in open(path, 'rb').read():\n"
        "            found.append(path)\n"
        "    except OSError: pass\n"
        "print(found, os.environ.get('KEY'), 'EMPTY' in os.environ)"
    )
    assert api.run(look, **SESSION)[0] == "[] None False\n"
    assert secret not in broker_log(firepool_home)
    for log in (firepool_home / "state").rglob("*.log"):
        assert secret not in log.read_text(errors="replace"), log
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                assert secret.encode() not in (entry / "cmdline").read_bytes()
            except OSError:
                continue


@pytest.mark.parametrize("name", ["A=B", "A\0B"])
def test_a_name_that_cannot_be_is_refused(api: Api, session: dict[str, Any], name: str) -> None:
    """C26: refused at submit, with the name."""
    body = {"kind": "cell", "code": "1", "env": {name: "x"}, **SESSION}
    answer = api.http.post("/v1/jobs", json=body)
    assert 400 <= answer.status_code < 500
    assert repr(name) in answer.json()["error"]["message"]


# -- a person's own home -------------------------------------------------------------------------


def test_a_job_without_its_own_home_uses_the_persons(
    api: Api, firepool_home: Path, broker: embedded.Connection
) -> None:
    """C24: locally HOME and the notebook's folder are the person's; a reset leaves them alone."""
    home = firepool_home / "person"
    home.mkdir()
    api.session("kernel-1", cwd=str(home), env={"PATH": os.environ["PATH"], "HOME": str(home)})
    code = (
        "import os\nopen(os.path.expanduser('~/.cache_marker'), 'w').write('A')\n"
        "open('result.csv', 'w').write('1')"
    )
    assert api.run(code, **SESSION)[1]["state"] == "SUCCEEDED"
    assert api.run("1", **SESSION)[1]["state"] == "SUCCEEDED"
    assert (home / ".cache_marker").read_text() == "A"
    assert (home / "result.csv").read_text() == "1"
