"""``%pip install`` in a remote cell: fills the session's overlay, never the environment.

The overlay belongs to the session and the environment, so the session's next cells have it as well,
and nobody else has.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from firepool_podagent.interpreter import surroundings

attempt: dict[str, Any] = {}
"""The attempt that this process runs."""

_LOCK_WAIT_SECONDS = 0.1
_READING = frozenset(
    {"check", "debug", "freeze", "hash", "help", "index", "inspect", "list", "show"}
)
_OPTIONS = {"-q", "--quiet", "-U", "--upgrade", "--progress-bar=off", "--no-input", "-v"}


class PipError(Exception):
    """A ``%pip`` line asks for something that cannot be done here."""


class RequirementsFailed(PipError):
    """The resolver or an installation failed; ends the job as failing requirements do."""


def session_overlay(spec: dict[str, Any]) -> str:
    """Return the path of the session's own overlay for its environment."""
    digest = (spec.get("environment") or {}).get("digest") or "default"
    return os.path.join(spec["session_dir"], ".firepool", f"overlay-{digest}")


def run(line: str, tell: Callable[[str], None]) -> None:
    """Run one ``%pip`` line.

    Parameters
    ----------
    line
        What stands after ``%pip``.
    tell
        Shows a note to the person.

    Raises
    ------
    PipError
        Says what is wrong.
    RequirementsFailed
        Says what the resolver said.
    """
    words = shlex.split(line)
    command = next((word for word in words if not word.startswith("-")), "help")
    if command == "install":
        _install(words[words.index("install") + 1 :], tell)
    elif command in _READING:
        subprocess.run([sys.executable, "-m", "pip", *words], check=False)
    else:
        raise PipError(
            f"%pip {command} would change the environment, which a remote cell cannot;"
            " run it in the notebook itself"
        )


def _environment() -> dict[str, Any]:
    given = attempt.get("environment") or {}
    return {
        "executable": sys.executable,
        "prefix": sys.prefix,
        "base_prefix": sys.base_prefix,
        "version": ".".join(map(str, sys.version_info[:3])),
        "digest": "default",
        **given,
    }


def _install(arguments: list[str], tell: Callable[[str], None]) -> None:
    from firepool_podagent import overlays, requirements

    wanted = _requirements(arguments)
    before = set(sys.modules)
    options = attempt.get("requirements_options") or {}
    try:
        installation = requirements.Installation(
            _environment(),
            wanted,
            destination=session_overlay(attempt),
            package=os.getcwd(),
            index_url=options.get("index_url"),
            variables=dict(os.environ),
            keep=True,
        )
        while not installation.overlay.acquire():  # another cell of this session installs
            time.sleep(_LOCK_WAIT_SECONDS)
        try:
            command = installation.begin()
            while command is not None:
                code, output = _run(command, installation.masked)
                command = installation.advance(code, output)
        finally:
            installation.abandon()
    except requirements.RequirementsFailedError as error:
        raise RequirementsFailed(str(error)) from None
    folder = installation.overlay.path
    surroundings.add_overlay(str(folder))
    if not installation.installed:
        tell("everything that was asked for is installed already")
        return
    names = ", ".join(f"{name} {version}" for name, version in installation.installed.items())
    tell(f"installed for this session's remote cells only: {names}")
    present = overlays.distributions(folder)
    for name, version in installation.installed.items():
        loaded = [each for each in overlays.modules_of(present[name]) if each in before]
        if loaded:
            tell(
                f"restart needed: {', '.join(loaded)} was imported before {name} {version} was"
                " installed; the next cell has the new version"
            )


def _requirements(arguments: list[str]) -> list[str]:
    found: list[str] = []
    words = iter(arguments)
    for word in words:
        if word in ("-r", "--requirement"):
            path = Path(next(words, ""))
            try:
                lines = path.read_text("utf-8").splitlines()
            except OSError as error:
                raise PipError(f"cannot read {path}: {error.strerror}") from error
            found += [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
        elif word in _OPTIONS:
            continue
        elif word in ("-i", "--index-url", "--extra-index-url", "-f", "--find-links"):
            found.append(f"{word} {next(words, '')}")
        elif word == "--pre" or word.startswith(("--index-url=", "--extra-index-url=")):
            found.append(word)
        elif word.startswith("-") and word not in ("-e", "--editable"):
            raise PipError(f"%pip install {word} is not available in a remote cell")
        else:
            found.append(word)
    if not any(not line.startswith("-") for line in found):
        raise PipError("%pip install needs something to install")
    return found


def _run(command: Any, masked: Callable[[str], str]) -> tuple[int, str]:
    process = subprocess.Popen(
        command.argv,
        env=command.env,
        cwd=command.cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
    )
    try:
        output, _ = process.communicate(timeout=command.timeout_seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        return 1, f"{output}\nended after {command.timeout_seconds:.0f} s"
    except BaseException:
        process.kill()
        process.wait()
        raise
    if process.returncode == 0 and "--target" in command.argv:
        for line in masked(output).splitlines():  # what was installed is told in one line
            if line.lower().startswith("warning"):
                print(line)
    return process.returncode, output
