"""When a job cannot use its template's process, and how it gets one of its own.

A fork has what its template imported and how its interpreter was started. A job whose overlay or
package holds another version of a loaded module, or whose environment sets variables that are read
at start-up only, replaces its process by a new interpreter: same pid, same pipes, no template.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from firepool_podagent.interpreter import STARTUP_VARIABLES, preload, template_command

_AT_START = {name: os.environ.get(name) for name in STARTUP_VARIABLES}


def reason(spec: dict[str, Any]) -> str | None:
    """Return why the attempt needs a new interpreter, None when this process will do."""
    variables = {**spec["env"], **spec.get("protected_env", {})}
    for name, value in _AT_START.items():
        if variables.get(name) != value:
            return f"{name} is read when an interpreter starts"
    paths = spec["paths"]
    folders = [*paths.get("overlays", ())]
    if paths.get("package"):
        folders.append(paths["package"])
    for folder in folders:
        for name in _top_level_modules(folder):
            module = sys.modules.get(name)
            if module is None or name in sys.stdlib_module_names:
                continue
            location = preload.origin(module)
            if location is None or not location.startswith(os.path.join(folder, "")):
                return f"{name} is loaded in another version"
    return None


def _top_level_modules(folder: str) -> Iterator[str]:
    try:
        entries = os.listdir(folder)
    except OSError:
        return
    for entry in entries:
        name = entry.partition(".")[0]
        if name.isidentifier() and (entry == name or entry.endswith((".py", ".so"))):
            yield name


def replace_process(channel_fd: int, spec: dict[str, Any]) -> NoReturn:
    """Become a new interpreter that runs the attempt."""
    frame = os.memfd_create("start-frame", 0)
    with open(frame, "w", closefd=False) as file:
        json.dump(spec, file)
    os.lseek(frame, 0, os.SEEK_SET)
    os.set_inheritable(channel_fd, True)
    command = [*template_command(sys.executable), "--job", str(channel_fd), str(frame)]
    os.execve(command[0], command, {**spec["env"], **spec.get("protected_env", {})})
