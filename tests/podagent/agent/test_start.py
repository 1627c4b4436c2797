"""Starting, isolation, being an orphan, and the single-file form."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from firepool_podagent import build, processes, wire
from firepool_podagent.testing import PACKAGE, Agent, RefusedError, environment, until


def test_facts_tell_who_serves(start_agent: Callable[..., Agent]) -> None:
    agent = start_agent()
    found = processes.process(agent.facts["pid"])
    assert found is not None
    assert found.start_ticks == agent.facts["start_time"]
    assert found.session == agent.facts["pid"]
    assert agent.facts["uid"] == agent.health()["uid"] == agent.config["uid"]
    assert agent.facts["isolation"] == agent.health()["isolation"]
    assert "key" not in agent.facts
    for name in ("environ", "cmdline"):
        content = Path(f"/proc/{agent.facts['pid']}/{name}").read_bytes()
        assert agent.key.hex().encode() not in content


def test_the_agent_stays_light(start_agent: Callable[..., Agent]) -> None:
    agent = start_agent()
    status = Path(f"/proc/{agent.facts['pid']}/status").read_text()
    assert int(status.split("VmRSS:")[1].split()[0]) < 20 * 1024
    assert status.split("Threads:")[1].split()[0] == "1"
    # 128 kernel ticks are a second: an idle agent does not wake up at all
    stat = f"/proc/{agent.facts['pid']}/stat"
    before = Path(stat).read_text().split()[13:15]
    time.sleep(1)
    assert Path(stat).read_text().split()[13:15] == before


def test_killing_a_namespaced_agent_ends_the_pod(start_agent: Callable[..., Agent]) -> None:
    agent = start_agent()
    if agent.facts["isolation"] != "namespaces":
        pytest.skip("needs namespaces")
    tag = f"4243{os.getpid()}"
    agent.run("1")
    agent.start_attempt(
        f"import subprocess, time; subprocess.Popen(['sleep', '{tag}'], start_new_session=True)\n"
        "time.sleep(1000)"
    )

    def there() -> bool:
        return any(processes.command_line(pid)[1:] == [tag] for pid in processes.all_pids())

    until(there, 10, "the job does not start")
    agent.kill()
    assert not there()


def test_without_isolation_a_pod_serves_one_job(start_agent: Callable[..., Agent]) -> None:
    agent = start_agent(isolation="none")
    assert agent.health()["isolation"] == "none"
    done = agent.run("print('one')")
    assert done.text() == "one\n"
    assert not done.reset["clean"]
    assert agent.health()["state"] == "unclean"
    with pytest.raises(RefusedError) as refused:
        agent.run("print('two')")
    assert refused.value.error["class"] == "Busy"
    assert list(agent.output("job1:1"))


def test_an_unknown_isolation_is_refused(short_dir: Path) -> None:
    with pytest.raises(RuntimeError, match="none of auto, namespaces, process, none"):
        Agent(short_dir / "pod", isolation="vm").start()


def _give_up_mounting() -> None:
    pr_capbset_drop, cap_sys_admin = 24, 21
    ctypes.CDLL(None).prctl(pr_capbset_drop, cap_sys_admin, 0, 0, 0)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give up a capability")
def test_a_machine_without_namespaces_gives_the_next_best(short_dir: Path) -> None:
    agent = Agent(short_dir / "pod")
    agent.start(before=_give_up_mounting)
    try:
        assert agent.facts["isolation"] == agent.health()["isolation"] == "process"
        assert agent.run("print(1)").reset["clean"]
    finally:
        agent.stop()
    strict = Agent(short_dir / "strict", isolation="namespaces")
    with pytest.raises(RuntimeError, match="no namespaces of its own"):
        strict.start(before=_give_up_mounting)


def test_an_orphan_goes_after_its_attempt(start_agent: Callable[..., Agent]) -> None:
    agent = start_agent(orphan_exit_seconds=0.6)
    agent.start_attempt("import time; time.sleep(1.5); open('done', 'w').close()")
    time.sleep(1.2)
    assert agent.alive
    agent.wait_gone(10)
    assert (agent.session_dir / "done").exists()
    journal = next((agent.directory / "journal").glob("job1*/*.ndjson")).read_text().splitlines()
    assert [json.loads(line)["type"] for line in journal][-2:] == ["outcome", "reset"]


def test_a_fenced_attempt_is_killed(start_agent: Callable[..., Agent]) -> None:
    agent = start_agent(fence_seconds=0.6)
    attempt = agent.start_attempt("import time; time.sleep(1000)")
    time.sleep(2.5)
    state = agent.call("GET", f"/v1/attempts/{attempt}")
    assert state["state"] == "ended"
    assert state["outcome"]["error"]["class"] == "Cancelled"


def test_shutdown_leaves_no_work_behind(start_agent: Callable[..., Agent]) -> None:
    agent = start_agent()
    agent.run("open('/tmp/x', 'w').close()")
    agent.put("blobs", b"input")
    attempt = agent.start_attempt("import time; time.sleep(1000)")
    agent.call("POST", "/v1/shutdown", {})
    agent.wait_gone()
    left = {path.name for path in agent.directory.iterdir()}
    assert left == {"agent.log", "epoch", "journal"}
    assert attempt


def test_health_is_said_before_anything_ran(start_agent: Callable[..., Agent]) -> None:
    health = start_agent(default_environment=environment()).health()
    assert health["state"] == "idle"
    assert health["versions"]["wire"] == wire.WIRE_VERSION


def test_a_prepared_pod_starts_its_first_job_parked(start_agent: Callable[..., Agent]) -> None:
    agent = start_agent()
    agent.call("POST", "/v1/prepare", {"environment": environment(), "env": {}, "preload": ["csv"]})
    until(lambda: agent.health()["spare"]["ready"], 20, "no spare")
    time.sleep(0.3)
    until(lambda: agent.health()["spare"]["ready"], 20, "no spare")
    done = agent.run("import sys; print('csv' in sys.modules)")
    assert done.outcome["tier"] == "parked"
    assert done.text() == "True\n"


def test_tiers_and_learned_modules(start_agent: Callable[..., Agent]) -> None:
    agent = start_agent()
    first = agent.run("import yaml, sys; print('yaml' in sys.modules)")
    assert first.outcome["tier"] == "fresh"

    def learned() -> bool:
        done = agent.run("import sys; print('yaml' in sys.modules)")
        return (done.outcome["tier"], done.text()) == ("parked", "True\n")

    until(learned, 30, "the pod does not learn what its jobs import")
    other = agent.run("print(1)", environment=environment(digest="e2"))
    assert other.outcome["tier"] == "fresh"


def test_packages_are_unpacked_and_refused(start_agent: Callable[..., Agent]) -> None:
    agent = start_agent()
    archive = agent.directory.parent / "package.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("mine/__init__.py", "value = 41")
    good = agent.put("packages", archive.read_bytes())
    for _ in range(2):
        done = agent.run("import mine; print(mine.value + 1)", package=good)
        assert done.text() == "42\n", done
        assert done.reset["clean"]
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("../escaped", "x")
    bad = agent.put("packages", archive.read_bytes())
    done = agent.run("print('ran')", package=bad)
    assert (done.error_class, done.text()) == ("PackageInvalid", "")
    assert "../escaped" in done.outcome["error"]["message"]
    assert done.reset["clean"]
    with pytest.raises(RefusedError) as refused:
        agent.run("1", package="c" * 64)
    assert refused.value.error["class"] == "Missing"
    # another caller's job finds no package of this one
    agent.run("1", protected_env={"FIREPOOL_CALLER": "someone else"})
    assert not list((agent.directory / "packages").iterdir())


def test_requirements_that_do_not_resolve_fail_once(start_agent: Callable[..., Agent]) -> None:
    agent = start_agent()
    options = {"index_url": "http://127.0.0.1:9/simple", "overlay_root": str(agent.session_dir)}
    done = agent.run(
        "print('ran')", requirements=["fp-no-such-dist-14792==9.9"], requirements_options=options
    )
    assert (done.error_class, done.text()) == ("RequirementsFailed", "")
    assert "fp-no-such-dist-14792" in done.outcome["error"]["message"]
    assert [m["phase"] for m in done.messages if m["type"] == "status"] == ["installing"]
    assert done.reset["clean"], done.reset
    assert agent.run("print('next')").text() == "next\n"


def test_an_installation_can_be_stopped(start_agent: Callable[..., Agent]) -> None:
    agent = start_agent()
    tools = agent.session_dir / "bin"
    tools.mkdir()
    tag = f"4244{os.getpid()}"
    uv = tools / "uv"
    uv.write_text(f"#!/bin/sh\nsetsid sleep {tag} &\nsleep {tag}\n")
    uv.chmod(0o755)
    environ = {"PATH": f"{tools}:/usr/bin:/bin", "HOME": str(agent.session_dir)}
    python = environment(prefix=str(agent.session_dir), digest="with-tools")
    attempt = agent.start_attempt(
        "1",
        env=environ,
        environment=python,
        requirements=["x"],
        requirements_options={"overlay_root": str(agent.session_dir / "overlays")},
    )

    def sleeping() -> bool:
        return any(processes.command_line(pid)[1:] == [tag] for pid in processes.all_pids())

    until(sleeping, 10, "the installation does not start")
    agent.signal(attempt, "kill")
    done = agent.finish(attempt)
    assert done.error_class == "Cancelled"
    assert not sleeping()
    assert done.reset["clean"], done.reset
    left = list((agent.session_dir / "overlays").rglob("*partial*"))
    assert left == []


def test_the_single_file_serves(start_agent: Callable[..., Agent], short_dir: Path) -> None:
    target = short_dir / "podagent.pyz"
    build.build(target)
    again = short_dir / "again.pyz"
    build.build(again)
    assert target.read_bytes() == again.read_bytes()
    agent = Agent(short_dir / "pod")
    agent.start(target)
    try:
        assert agent.run("print(6 * 7)").text() == "42\n"
        assert agent.run("print(6 * 7)").text() == "42\n"
    finally:
        agent.stop()
    log = (agent.directory / "agent.log").read_text()
    assert "Traceback" not in log, log


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become someone else")
@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="needs a system Python")
@pytest.mark.parametrize("isolation", ["auto", "process"])
def test_a_user_who_is_not_root(short_dir: Path, isolation: str) -> None:
    """The whole of it as an ordinary user, in a user namespace where the machine has them."""
    program = short_dir / "source"
    shutil.copytree(PACKAGE, program / "firepool_podagent")
    home = short_dir / "home"
    home.mkdir()
    for path in (short_dir, home, *program.rglob("*")):
        os.chmod(path, 0o755)
    os.chown(home, 65534, 65534)
    script = f"""
import os, sys
sys.path[:0] = [{str(program)!r}]
from pathlib import Path
from firepool_podagent.testing import Agent
agent = Agent(Path({str(home / "pod")!r}), {isolation!r})
agent.start(Path({str(program / "firepool_podagent")!r}))
try:
    print(agent.facts["isolation"])
    left = agent.run(
        "import os, subprocess as s; s.Popen(['sleep', '1000'], start_new_session=True, env={{}});"
        "os.makedirs(os.environ['TMPDIR'] + '/a/b'); os.chmod(os.environ['TMPDIR'] + '/a', 0);"
        "print(os.getuid())")
    print(left.text().strip(), left.error_class, left.reset["clean"], len(left.outcome["killed"]))
    print(agent.run("print(1)").text().strip())
finally:
    agent.stop()
print((agent.directory / "agent.log").read_text())
"""
    done = subprocess.run(
        ["/usr/bin/python3", "-I", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        user=65534,
        group=65534,
        extra_groups=[],
        env={"PATH": "/usr/bin:/bin"},
        timeout=60,
        check=False,
    )
    lines = done.stdout.split()
    expected = "process" if isolation == "process" else "namespaces"
    assert lines == [expected, "65534", "None", "True", "1", "1"], done.stdout


def test_interpreters_need_not_know_the_package(
    start_agent: Callable[..., Agent], short_dir: Path
) -> None:
    """A session's interpreter is not the agent's."""
    other = shutil.which("python3", path="/usr/bin")
    if other is None or Path(other).resolve() == Path(sys.executable).resolve():
        pytest.skip("needs a second interpreter")
    agent = start_agent()
    version = subprocess.run(
        [other, "-I", "-c", "import platform; print(platform.python_version())"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.strip()
    outside = environment(executable=other, prefix="/usr", base_prefix="/usr", version=version)
    done = agent.run("import sys; print(sys.version.split()[0], sys.prefix)", environment=outside)
    assert done.text() == f"{version} /usr\n", done
    with contextlib.suppress(RefusedError):
        agent.call("POST", "/v1/drain", {})
