"""What is known of an agent from the outside: its program, its command line, its death."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from firepool_podagent.wire import INTERPRETER_FLAGS

from firepool_broker import processes
from firepool_broker.backends.folders import read_json

__all__ = [
    "agent_command",
    "begun_attempts",
    "descendants",
    "describe_exit",
    "marked_processes",
    "supervisors",
    "template_revision",
]

_MARKER = "firepool-pod="


def agent_command(directory: str) -> list[str]:
    """Build an agent's command line.

    The pod's folder stands in it, as an option that Python ignores: that is how an orphan is
    recognised, since nothing else of an agent can be read from the outside.
    """
    marker = ["-X", _MARKER + directory]
    return [sys.executable, *INTERPRETER_FLAGS, *marker, _agent_path(), "--config-fd", "3"]


def descendants(pid: int, started: int) -> list[tuple[int, int]]:
    """Find what lives below a process, each with its start time; nothing when it is gone."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if fields[0] not in (b"Z", b"X"):
            children.setdefault(int(fields[1]), []).append(int(entry))
    if not processes.is_alive(pid, started):
        return []
    found: list[tuple[int, int]] = []
    waiting = [pid]
    while waiting:
        for child in children.get(waiting.pop(), ()):
            waiting.append(child)
            found.append((child, processes.start_time(child) or 0))
    return [(child, began) for child, began in found if began]


def describe_exit(exit_status: int | None) -> str:
    """Say how a process ended, None when nobody could ask."""
    if exit_status is None:
        return "is gone"
    if exit_status < 0:
        try:
            return f"was killed by {signal.Signals(-exit_status).name}"
        except ValueError:
            return f"was killed by signal {-exit_status}"
    return f"exited with {exit_status}"


def begun_attempts(directory: str) -> frozenset[str] | None:
    """Read from a dead pod's journal which attempts it began; None when it has none."""
    try:
        names = os.listdir(os.path.join(directory, "journal"))
    except OSError:
        return None
    return frozenset(unquote(name) for name in names)


def supervisors(directory: str) -> list[tuple[int, int]]:
    """Read which supervisors the agent had: they outlive it by the time they need to kill."""
    document: Mapping[str, Any] = read_json(os.path.join(directory, "supervisors.json")) or {}
    return [(int(pid), int(started)) for pid, started in document.items()]


def marked_processes() -> list[tuple[int, str]]:
    """Find agents by their command line, which names their folder."""
    found = []
    try:
        entries = [name for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []
    for entry in entries:
        try:
            with open(f"/proc/{entry}/cmdline", "rb") as file:
                words = file.read().split(b"\0")
        except OSError:
            continue
        marked = [word for word in words[1:6] if word.startswith(_MARKER.encode())]
        found += [(int(entry), os.fsdecode(word[len(_MARKER) :])) for word in marked]
    return found


def _agent_path() -> str:
    spec = importlib.util.find_spec("firepool_podagent")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("firepool_podagent is not installed beside firepool_broker")
    return str(next(iter(spec.submodule_search_locations)))


def template_revision(isolation: str) -> str:
    """Name the template of new pods: another agent or interpreter makes old pods stale."""
    digest = hashlib.sha256(f"{sys.executable}\n{sys.version}\n{isolation}\n".encode())
    for folder, folders, files in os.walk(_agent_path()):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(files):
            status = os.stat(os.path.join(folder, name))
            digest.update(f"{name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]
