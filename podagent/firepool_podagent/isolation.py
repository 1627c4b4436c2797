"""Start of an agent: what this machine lets a pod have of its own, and getting there.

The starting process stays what it is and only forks; each mode is tried in a fresh child, so that a
machine that refuses half-way (a container that masks ``/proc``, a policy against user namespaces)
leaves nothing behind and the next weaker mode starts from a clean state:

``namespaces``
    private mount, IPC, UTS and PID namespaces (inside a user namespace unless root). The agent is
    PID 1 of the pod: whoever kills it ends every process of the pod.
``process``
    Linux without namespaces. The agent is a child subreaper.
``none``
    anything else: one pod serves one job.

The helper that forked the agent learns the agent's process number as the rest of the machine sees
it, writes it into ``agent.json`` once the agent serves, and exits. So the exit of the started
command is the signal that the agent is ready (status 0) or could not start (the reason on stderr).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from firepool_podagent import mounts, processes

READY = b"ready"

AgentMain = Callable[[str, "mounts.View | None", Callable[[], None]], None]
"""``main(isolation, view, ready)``: serves until the agent's end; calls ``ready`` when it does."""


class NotAllowedError(RuntimeError):
    """The machine does not allow a mode of isolation."""


def start(
    wish: str, directory: Path, always_visible: list[str], facts: dict[str, Any], main: AgentMain
) -> NoReturn:
    """Start the agent in the best mode that works and exit when it serves.

    Parameters
    ----------
    wish : {"auto", "namespaces", "process", "none"}
        ``auto`` takes what works, best first.
    directory : Path
        The pod's own directory.
    always_visible : list of str
        Paths that must stay visible in the pod.
    facts : dict
        What ``agent.json`` says besides the process.
    main : callable
        The agent itself.
    """
    reasons = []
    for mode in _modes(wish):
        reader, writer = os.pipe()
        helper = os.fork()
        if helper == 0:
            os.close(reader)
            _help(mode, directory, always_visible, facts, main, writer)
        os.close(writer)
        with open(reader, "rb") as file:
            reason = file.read().decode("utf-8", "replace")
        _, status = os.waitpid(helper, 0)
        if status == 0:
            os._exit(0)
        reasons.append(f"{mode}: {reason or 'the agent ended before it was ready'}")
    print("the pod agent could not start; " + "; ".join(reasons), file=sys.stderr, flush=True)
    os._exit(1)


def _modes(wish: str) -> list[str]:
    if not sys.platform.startswith("linux"):
        return ["none"]
    if wish == "auto":
        return ["namespaces", "process"]
    if wish not in ("namespaces", "process", "none"):
        print(f"isolation: {wish!r} is none of auto, namespaces, process, none", file=sys.stderr)
        os._exit(2)
    return [wish]


def _help(
    mode: str,
    directory: Path,
    always_visible: list[str],
    facts: dict[str, Any],
    main: AgentMain,
    reason: int,
) -> NoReturn:
    """Fork the agent, wait until it serves, write down who it is; runs in a child of its own."""
    status = 3
    try:
        place = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if mode == "namespaces":
            _leave_namespaces()
        go_reader, go_writer = os.pipe()
        ready_reader, ready_writer = os.pipe()
        agent = os.fork()
        if agent == 0:
            for descriptor in (place, go_writer, ready_reader, reason):
                os.close(descriptor)
            _be_agent(mode, directory, always_visible, main, go_reader, ready_writer)
        os.close(go_reader)
        os.close(ready_writer)
        # Read before the agent goes on: it mounts the /proc of its own PID namespace over this one.
        found = processes.process(agent)  # None where there is no /proc
        os.write(go_writer, b"g")
        with open(ready_reader, "rb") as file:
            answer = file.read()
        if answer == READY:
            facts = {
                "pid": agent,
                "start_time": found.start_ticks if found else None,
                "isolation": mode,
                **facts,
            }
            _write_facts(place, facts)
            status = 0
        else:
            os.write(reason, answer)
            os.kill(agent, signal.SIGKILL)
            os.waitpid(agent, 0)
    except (OSError, NotAllowedError) as error:
        os.write(reason, str(error).encode())
    os._exit(status)


def _write_facts(place: int, facts: dict[str, Any]) -> None:
    descriptor = os.open(
        ".agent.json", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600, dir_fd=place
    )
    with open(descriptor, "w") as file:
        json.dump(facts, file)
        file.flush()
        os.fsync(descriptor)
    os.rename(".agent.json", "agent.json", src_dir_fd=place, dst_dir_fd=place)


def _leave_namespaces() -> None:
    flags = mounts.CLONE_NEWNS | mounts.CLONE_NEWIPC | mounts.CLONE_NEWPID | mounts.CLONE_NEWUTS
    uid, gid = os.geteuid(), os.getegid()
    try:
        if uid == 0:
            mounts.unshare(flags)
            return
        mounts.unshare(flags | mounts.CLONE_NEWUSER)
        for name, line in (
            ("setgroups", "deny"),
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            Path(f"/proc/self/{name}").write_text(line)
    except OSError as error:
        raise NotAllowedError(f"no namespaces of its own ({error})") from error


def _be_agent(
    mode: str, directory: Path, always_visible: list[str], main: AgentMain, go: int, ready: int
) -> NoReturn:
    status = 1
    try:
        os.read(go, 1)
        os.close(go)
        os.setsid()
        view = None
        if mode == "namespaces":
            view = mounts.View(directory)
            view.install(always_visible)
        if mode != "none":
            mounts.drop_outside_capabilities()
            mounts.forbid_inspection()

        def announce() -> None:
            os.write(ready, READY)  # a helper that is gone raises here: nobody wants this agent
            os.close(ready)

        main(mode, view, announce)
        status = 0
    except OSError as error:
        message = f"{type(error).__name__}: {error}"
        print(message, file=sys.stderr, flush=True)
        try:
            os.write(ready, message.encode())
        except OSError:
            status = 1
    os._exit(status)
