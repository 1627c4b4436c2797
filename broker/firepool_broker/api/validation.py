"""What a well-formed request may still not say: names, ranges, options that nothing serves.

The contract: every refusal names the field. A request that passes can be stored, put on a command
line and used in file names as it is.
"""

from __future__ import annotations

import base64
import math
import os
import re
import stat
from collections.abc import Iterable

from firepool_broker.api import variables
from firepool_broker.api.errors import Invalid, NotAvailable
from firepool_broker.api.types import Environment, Input, JobRequest, SessionRequest

_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME_CHARACTERS = 255
_PRIORITY = 100
_RETRIES = 100
_PODS = 4096
_LINES = 1_000_000


def check_job(request: JobRequest) -> None:
    """Check a job; raises ``Invalid`` or ``NotAvailable`` naming the field."""
    _check_what_runs(request)
    if request.id is not None and _JOB_ID.fullmatch(request.id) is None:
        raise Invalid(
            f"job id {request.id!r}: use 1 to 64 letters, digits, '.', '_' and '-', a letter or "
            "digit first",
            field="id",
        )
    for field in ("queue", "lease_tag", "client_id", "sku", "name"):
        check_name(getattr(request, field), field)
    if request.sku is not None and request.shape is not None:
        raise Invalid("give either sku or shape, not both", field="shape")
    _check_numbers(request)
    _check_variables(request.env, "env")
    _check_digest(request.package, "package")
    for index, item in enumerate(request.inputs):
        _check_input(item, f"inputs[{index}]")
    _check_texts(request.outputs, "outputs")
    _check_texts(request.requirements, "requirements")
    if request.environment is not None:
        _check_environment(request.environment)
    if request.cwd is not None:
        _check_path(request.cwd, "cwd")
        _check_folder(request.cwd)
    _check_available(request)


def check_session(request: SessionRequest) -> None:
    """Check a registration; raises ``Invalid`` naming the field."""
    check_name(request.lease_tag, "lease_tag")
    check_name(request.client_id, "client_id")
    check_name(request.kernel_id, "kernel_id")
    if request.environment is not None:
        _check_environment(request.environment)
    if request.cwd is not None:
        _check_path(request.cwd, "cwd")
    for name, value in request.env.items():
        # start-up hooks are not refused here: the client captured them, nobody chose them
        reason = None if variables.is_protected(name) else variables.fault(name, value)
        if reason is not None:
            raise Invalid(reason, field="env")


def check_name(value: str | None, field: str) -> None:
    """Check a name that people and logs see; raises ``Invalid``."""
    if value is None:
        return
    if not value or len(value) > _NAME_CHARACTERS or not value.isprintable():
        raise Invalid(f"{field} must be 1 to {_NAME_CHARACTERS} printable characters", field=field)


def _check_what_runs(request: JobRequest) -> None:
    calls = [item for item in request.inputs if item.kind == "call"]
    if request.kind == "cell":
        if request.code is None:
            raise Invalid("a cell needs code", field="code")
    elif request.kind == "call":
        if len(calls) != 1:
            raise Invalid("a call needs exactly one input of kind 'call'", field="inputs")
    elif (request.argv is None) == (request.shell is None):
        raise Invalid("a command needs either argv or shell", field="argv")
    if request.kind != "cell" and request.code is not None:
        raise Invalid(f"code belongs to a cell, not to a {request.kind}", field="code")
    if request.kind != "call" and calls:
        raise Invalid(
            f"an input of kind 'call' belongs to a call, not to a {request.kind}", field="inputs"
        )
    for field, given in (("argv", request.argv), ("shell", request.shell)):
        if given is None:
            continue
        if request.kind != "command":
            raise Invalid(f"{field} belongs to a command, not to a {request.kind}", field=field)
        if not given:
            raise Invalid(f"{field} is empty", field=field)
        _check_texts([given] if isinstance(given, str) else given, field)


def _check_numbers(request: JobRequest) -> None:
    timeout = request.timeout_seconds
    if timeout is not None and not (math.isfinite(timeout) and timeout > 0):
        raise Invalid(
            "timeout_seconds must be above 0; leave it out for none", field="timeout_seconds"
        )
    for field, low, high in (
        ("priority", -_PRIORITY, _PRIORITY),
        ("max_retries", 0, _RETRIES),
        ("pods", 1, _PODS),
        ("line_offset", 0, _LINES),
    ):
        if not low <= getattr(request, field) <= high:
            raise Invalid(f"{field} must be within {low} and {high}", field=field)
    shape = request.shape
    if shape is not None:
        for field, value in (("cpu", shape.cpu), ("memory_gib", shape.memory_gib)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise Invalid(f"shape.{field} must be above 0", field=f"shape.{field}")


def _check_variables(env: dict[str, str], field: str) -> None:
    for name, value in env.items():
        reason = variables.fault(name, value)
        if reason is not None:
            raise Invalid(reason, field=f"{field}.{name}" if name.isprintable() else field)


def _check_input(item: Input, field: str) -> None:
    if (item.data is None) == (item.blob is None):
        raise Invalid(f"{field} needs either data or blob", field=field)
    _check_digest(item.blob, f"{field}.blob")
    if item.data is not None:
        try:
            base64.b64decode(item.data, validate=True)
        except ValueError as error:
            raise Invalid(f"{field}.data is not base64: {error}", field=f"{field}.data") from None
    if item.kind == "value" and not (item.name or "").isidentifier():
        raise Invalid(f"{field} needs a name that Python accepts", field=f"{field}.name")


def _check_digest(value: str | None, field: str) -> None:
    if value is not None and _DIGEST.fullmatch(value) is None:
        raise Invalid(f"{field} must be a SHA-256 in lower-case hexadecimal digits", field=field)


def _check_texts(texts: Iterable[str], field: str) -> None:
    if any("\0" in text for text in texts):
        raise Invalid(f"{field} cannot hold NUL", field=field)


def _check_environment(environment: Environment) -> None:
    for field in ("executable", "prefix", "base_prefix"):
        _check_path(getattr(environment, field), f"environment.{field}")
    for field in ("path", "visible"):
        for path in getattr(environment, field):
            _check_path(path, f"environment.{field}")
    if re.fullmatch(r"[0-9a-f]{1,128}", environment.digest) is None:
        raise Invalid(
            "environment.digest must be 1 to 128 lower-case hexadecimal digits",
            field="environment.digest",
        )


def _check_path(path: str, field: str) -> None:
    if not path.startswith("/") or "\0" in path:
        raise Invalid(f"{field} must be an absolute path", field=field)


def _check_folder(path: str) -> None:
    """Refuse a working directory that pods of this machine would not find."""
    try:
        status = os.stat(path)
    except PermissionError:
        return  # the pod may be allowed what the broker is not
    except OSError as error:
        raise Invalid(
            f"cwd {_shortened(path)} is not there: {error.strerror}", field="cwd"
        ) from None
    if not stat.S_ISDIR(status.st_mode):
        raise Invalid(f"cwd {_shortened(path)} is not a folder", field="cwd")


def _shortened(path: str) -> str:
    return path if len(path) <= _NAME_CHARACTERS else f"{path[:_NAME_CHARACTERS]}…"


def _check_available(request: JobRequest) -> None:
    """Refuse what exists as an option but has nothing behind it on local pods."""
    for field, wanted, what in (
        ("live", request.live, "a live session"),
        ("pods", request.pods > 1, "a job of several pods"),
        ("launcher", request.launcher != "python", f"launcher {request.launcher!r}"),
        ("image", request.image is not None, "an image of its own"),
        ("secrets", bool(request.secrets), "secrets"),
    ):
        if wanted:
            raise NotAvailable(
                f"{what} is not available on this pool; leave out {field!r}", field=field
            )
