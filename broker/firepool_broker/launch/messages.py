"""What an agent's lines say, read so that one bad line costs one line.

Much of a message was put together by the code of a job, and neither its output nor the job may
be lost over a value that JSON does not have. What can be repaired is repaired (NaN and Infinity
become null, half a surrogate pair a question mark); a message that makes no sense all the same is
replaced by a note under its number. Only what stands outside every message (a line without a
number, an outcome of another form) is a fault of the agent.
"""

from __future__ import annotations

import json
import logging
import math
import re
from typing import Any, Literal

import msgspec
from firepool_podagent import wire
from msgspec import Struct

from firepool_broker.api.types import Result

__all__ = ["NotUnderstood", "read_document", "read_line"]

log = logging.getLogger(__name__)

_NUMBER = re.compile(rb'\s*\{\s*"n"\s*:\s*(\d{1,15})\s*[,}]')
_SHOWN_CHARACTERS = 200


class NotUnderstood(ValueError):
    """An answer of the agent itself that cannot be read."""


class _Stream(Struct):
    text: str
    name: Literal["stdout", "stderr"]


class _Display(Struct):
    data: dict[str, Any]
    metadata: dict[str, Any] | None = None
    transient: dict[str, Any] | None = None


class _Error(Struct):
    ename: str | None = None
    evalue: str | None = None
    traceback: list[str] | None = None
    exception: str | None = None


class _Named(Struct):
    name: str


class _Note(Struct):
    text: str
    level: str = "info"


class _Text(Struct):
    text: str


class _Anything(Struct):
    pass


class _OutcomeError(_Error):
    # the agent's word is ``class``, which Python keeps for itself
    error_class: str = msgspec.field(name="class", default="")
    message: str | None = None


class _Killed(Struct):
    pid: int
    name: str


class _Outcome(Struct):
    attempt: str
    next: int
    exit_code: int | None = None
    signal: int | None = None
    error: _OutcomeError | None = None
    times: dict[str, float | None] | None = None
    tier: str | None = None
    imports_seconds: float | None = None
    peak_memory_mib: int | None = None
    killed: list[_Killed] | None = None
    results: list[Result] | None = None


_FORMS: dict[str, type[Struct]] = {
    **dict.fromkeys(wire.MESSAGE_TYPES, _Anything),
    "stream": _Stream,
    "display_data": _Display,
    "update_display_data": _Display,
    "execute_result": _Display,
    "error": _Error,
    "result": _Named,
    "note": _Note,
    "divider": _Text,
}


def read_line(line: bytes) -> dict[str, Any]:
    """Read one line of an attempt's output.

    Returns
    -------
    dict
        A message with its number ``n``, or the ``outcome`` or ``reset`` without one.

    Raises
    ------
    NotUnderstood
        When it is neither.
    """
    try:
        document = read_document(line)
        number = document.get("n")
        if number is None:
            return _ending(document)
        if type(number) is not int or number < 0:
            raise NotUnderstood(f"a message's number is {number!r}")
    except NotUnderstood as error:
        found = _NUMBER.match(line)
        if found is None:
            raise
        return _substitute(int(found[1]), str(error))
    fault = _fault(document)
    return document if fault is None else _substitute(number, fault)


def read_document(text: bytes) -> dict[str, Any]:
    """Read an object, repairing what JSON cannot say; raises `NotUnderstood`."""
    try:
        document = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        document = _repaired(text)
    if not isinstance(document, dict):
        raise NotUnderstood("it is not an object")
    return document


def _repaired(text: bytes) -> Any:
    try:
        document = json.loads(
            text.decode("utf-8", "replace"),
            parse_constant=lambda _: None,
            parse_float=_finite,
        )
        # "replace" takes the lone surrogates, which no encoder of UTF-8 lets pass
        return msgspec.json.decode(
            json.dumps(document, ensure_ascii=False).encode("utf-8", "replace")
        )
    except (ValueError, RecursionError) as error:
        raise NotUnderstood(f"it is not JSON: {error}"[:_SHOWN_CHARACTERS]) from error


def _finite(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None


def _ending(document: dict[str, Any]) -> dict[str, Any]:
    kind = document.get("type")
    if kind == "outcome":
        try:
            msgspec.convert(document, _Outcome)
        except msgspec.ValidationError as error:
            raise NotUnderstood(f"its outcome cannot be understood: {error}") from error
    elif kind != "reset":
        raise NotUnderstood(f"it sent {str(kind)[:_SHOWN_CHARACTERS]!r} without a number")
    return document


def _fault(message: dict[str, Any]) -> str | None:
    """Say why nobody could show a message; None when one can."""
    kind = message.get("type")
    form = _FORMS.get(kind) if isinstance(kind, str) else None
    if form is None:
        return f"there is no type {str(kind)[:_SHOWN_CHARACTERS]!r}"
    try:
        msgspec.convert(message, form)
    except msgspec.ValidationError as error:
        return str(error)
    return None


def _substitute(number: int, reason: str) -> dict[str, Any]:
    log.warning("message %d of an attempt was replaced: %s", number, reason)
    text = f"one message of this job could not be understood and is left out ({reason})"
    return {"n": number, "type": "note", "level": "warning", "text": text}
