"""What an attempt is told: its code, interpreter, folders and complete environment.

Built from the stored request and the stored session alone, so that the same attempt is told the
same by the broker that accepted its job and by the one that runs it after a restart. A job's
environment is its session's with its own variables on top, never the broker's.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from firepool_broker.api.types import Environment, JobRequest, SessionRequest

__all__ = ["LaunchSettings", "Setting", "attempt_spec", "prepare_request", "references"]

_FALLBACK_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class LaunchSettings(Struct, frozen=True):
    """What holds for every attempt of a pool.

    Attributes
    ----------
    overlay_root
        Folder in which requirements are installed.
    index_url
        Package index of the pool; None for the installer's own.
    memory_mib
        Memory that an attempt may use; None for no limit.
    preload
        Modules that spares import ahead.
    output_limit_bytes
        Output kept of a job.
    inline_result_bytes
        Results up to this size stand in the outcome.
    timeout_seconds
        Timeout of a job that names none.
    terminate_grace_seconds
        Between asking a job to end and killing it.
    """

    overlay_root: str
    index_url: str | None = None
    memory_mib: int | None = None
    preload: tuple[str, ...] = ()
    output_limit_bytes: int = 64 * 1024 * 1024
    inline_result_bytes: int = 64 * 1024
    timeout_seconds: float | None = None
    terminate_grace_seconds: float = 10.0


class Setting(Struct, frozen=True):
    """Where a job runs: its session as registered, or nothing, and the session's folder."""

    session: SessionRequest | None
    session_dir: str

    @property
    def environment(self) -> Environment | None:
        """The session's interpreter."""
        return self.session.environment if self.session is not None else None


def attempt_spec(
    job_id: str,
    attempt: int,
    caller: str,
    request: JobRequest,
    setting: Setting,
    settings: LaunchSettings,
) -> dict[str, Any]:
    """Build the document that starts an attempt."""
    environment = request.environment or setting.environment
    cwd = request.cwd or (setting.session.cwd if setting.session is not None else None)
    variables = {**_session_variables(setting.session), **request.env}
    overlays = {"index_url": settings.index_url, "overlay_root": settings.overlay_root}
    return {
        "attempt": f"{job_id}:{attempt}",
        "job": job_id,
        "kind": request.kind,
        "code": request.code,
        "filename": request.filename,
        "line_offset": request.line_offset,
        "argv": request.argv,
        "shell": request.shell,
        "environment": _with_visible(environment, cwd, setting, variables),
        "cwd": cwd,
        "session_dir": setting.session_dir,
        "env": variables,
        "protected_env": {
            "FIREPOOL_JOB": job_id,
            "FIREPOOL_ATTEMPT": f"{job_id}:{attempt}",
            "FIREPOOL_CALLER": caller,
            "FIREPOOL_SESSION_DIR": setting.session_dir,
            "FIREPOOL_TERMINATE_GRACE_SECONDS": f"{settings.terminate_grace_seconds:g}",
        },
        "package": request.package,
        "requirements": request.requirements or None,
        "requirements_options": overlays,
        "inputs": [msgspec.to_builtins(item) for item in request.inputs],
        "outputs": request.outputs,
        "timeout_seconds": request.timeout_seconds or settings.timeout_seconds,
        "terminate_grace_seconds": settings.terminate_grace_seconds,
        "memory_mib": settings.memory_mib,
        "preload": list(settings.preload),
        "output_limit_bytes": settings.output_limit_bytes,
        "inline_result_bytes": settings.inline_result_bytes,
    }


def prepare_request(setting: Setting, settings: LaunchSettings) -> dict[str, Any] | None:
    """Build the document that has a spare parked; None when the session names no interpreter."""
    if setting.session is None or setting.session.environment is None:
        return None
    variables = _session_variables(setting.session)
    cwd = setting.session.cwd
    return {
        "environment": _with_visible(setting.session.environment, cwd, setting, variables),
        "env": variables,
        "cwd": cwd,
        "preload": list(settings.preload),
    }


def references(request: JobRequest) -> list[tuple[str, str]]:
    """List what must be delivered to the pod first, as ``(kind, sha256)``."""
    found = [("blobs", item.blob) for item in request.inputs if item.blob is not None]
    if request.package is not None:
        found.append(("packages", request.package))
    return found


def _session_variables(session: SessionRequest | None) -> dict[str, str]:
    if session is not None and session.env:
        return dict(session.env)
    # a job without a session still belongs to a person: their account, nothing of the broker's
    import pwd

    account = pwd.getpwuid(os.getuid())
    return {
        "PATH": _FALLBACK_PATH,
        "HOME": account.pw_dir,
        "USER": account.pw_name,
        "LOGNAME": account.pw_name,
        "LANG": "C.UTF-8",
    }


def _with_visible(
    environment: Environment | None,
    cwd: str | None,
    setting: Setting,
    variables: Mapping[str, str],
) -> dict[str, Any] | None:
    """Add what the job must see beyond its interpreter: its folders, and named sockets."""
    if environment is None:
        return None
    document: dict[str, Any] = msgspec.to_builtins(environment)
    extra = [setting.session_dir, *([cwd] if cwd else []), *_sockets(variables)]
    document["visible"] = list(dict.fromkeys([*environment.visible, *extra]))
    return document


def _sockets(variables: Mapping[str, str]) -> list[str]:
    """Find the sockets that the environment names, ``SSH_AUTH_SOCK`` above all."""
    found = []
    for name, value in variables.items():
        path = (
            value.partition("unix:path=")[2].partition(",")[0] if "unix:path=" in value else value
        )
        if not path.startswith("/") or ":" in path or len(path) > 107:
            continue
        if name.endswith(("SOCK", "SOCKET", "ADDRESS", "_HOST")) and _is_socket(path):
            found.append(path)
    return found


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return False
