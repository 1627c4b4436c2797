"""What a job's frames may say, checked before any of it is believed.

User code shares a process with whoever writes the frames, so a frame is an outsider's word: it has
a known type and, for each field, the shape that readers rely on, or it is not passed on. Fields
that nobody knows are left out, so none can stand in for one of the pod's own (a number, for
instance).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

from firepool_podagent import strictjson, wire

_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_NAMES_LIMIT = 1024
_SEQUENCE_LIMIT = 1 << 53


class BadFrameError(ValueError):
    """A frame that is not passed on; the text says why."""


def decode(text: bytes) -> tuple[int, dict[str, Any]]:
    """Return a frame's sequence number (0: not ordered) and its message.

    Raises
    ------
    BadFrameError
        It is none, or its type or a field of it is not what it should be.
    """
    try:
        frame = json.loads(text)
    except (ValueError, RecursionError):
        raise BadFrameError("what it holds is no JSON") from None
    if not isinstance(frame, dict):
        raise BadFrameError("it is no object")
    kind = frame.get("type")
    check = _CHECKS.get(kind) if isinstance(kind, str) else None
    if check is None:
        raise BadFrameError(f"its type is {_short(kind)}")
    if not strictjson.is_shallow(frame):
        raise BadFrameError(f"it is nested deeper than {strictjson.DEPTH_LIMIT} levels")
    sequence = frame.get("seq", 0)
    if type(sequence) is not int or not 0 <= sequence < _SEQUENCE_LIMIT:
        raise BadFrameError(f"its number is {_short(sequence)}")
    return sequence, {"type": kind, **check(frame)}


def _short(value: Any) -> str:
    return repr(value)[:60]


def _field(frame: dict[str, Any], name: str, kind: type, default: Any = None) -> Any:
    value = frame.get(name, default)
    if not isinstance(value, kind):
        raise BadFrameError(f"{name} of {frame['type']} is {_short(value)}")
    return value


def _stream(frame: dict[str, Any]) -> dict[str, Any]:
    if frame.get("name") not in ("stdout", "stderr"):
        raise BadFrameError(f"name of stream is {_short(frame.get('name'))}")
    return {"name": frame["name"], "text": _field(frame, "text", str)}


def _bundle(frame: dict[str, Any]) -> dict[str, Any]:
    return {
        "data": _field(frame, "data", dict),
        "metadata": _field(frame, "metadata", dict, {}),
    }


def _display(frame: dict[str, Any]) -> dict[str, Any]:
    return {**_bundle(frame), "transient": _field(frame, "transient", dict, {})}


def _clear(frame: dict[str, Any]) -> dict[str, Any]:
    return {"wait": bool(frame.get("wait"))}


def _error(frame: dict[str, Any]) -> dict[str, Any]:
    exception = frame.get("exception")
    return {
        "ename": _field(frame, "ename", str),
        "evalue": _field(frame, "evalue", str, ""),
        "traceback": [str(line) for line in _field(frame, "traceback", list, [])],
        "exception": exception if isinstance(exception, str) else None,
    }


def _note(frame: dict[str, Any]) -> dict[str, Any]:
    level = frame.get("level")
    return {
        "level": level if level in ("info", "warning") else "info",
        "text": _field(frame, "text", str),
    }


def _status(frame: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"phase": _field(frame, "phase", str)}
    moment, reason = _number(frame.get("time")), frame.get("reason")
    if moment is not None:
        found["time"] = moment
    if isinstance(reason, str):
        found["reason"] = reason
    return found


def _fence(frame: dict[str, Any]) -> dict[str, Any]:
    return {}


def _end(frame: dict[str, Any]) -> dict[str, Any]:
    told = frame.get("error")
    results = frame.get("results")
    imported = frame.get("imported")
    return {
        "error": _told(told) if isinstance(told, dict) else None,
        "results": [
            found
            for each in (results if isinstance(results, list) else ())
            if (found := _result(each)) is not None
        ],
        "imports_seconds": _number(frame.get("imports_seconds")),
        "imported": [
            name
            for name in (imported if isinstance(imported, list) else ())[:_NAMES_LIMIT]
            if isinstance(name, str) and name.replace(".", "_").isidentifier()
        ],
    }


def _told(error: dict[str, Any]) -> dict[str, Any]:
    texts = ("message", "ename", "evalue")
    lines = error.get("traceback")
    return {
        "class": found if (found := error.get("class")) in wire.ERROR_CLASSES else None,
        **{name: v if isinstance(v := error.get(name), str) else None for name in texts},
        "traceback": [str(line) for line in lines] if isinstance(lines, list) else None,
    }


def _result(result: Any) -> dict[str, Any] | None:
    if not isinstance(result, dict) or not isinstance(result.get("name"), str):
        return None
    sha256, data, size = result.get("sha256"), result.get("data"), result.get("size_bytes")
    known = isinstance(sha256, str) and _DIGEST.match(sha256)
    texts = {name: str(result.get(name) or "") for name in ("format", "type")}
    error = result.get("error")
    found = {
        "name": result["name"],
        "format": texts["format"] or "cloudpickle",
        "size_bytes": size if type(size) is int and size >= 0 else 0,
        "type": texts["type"],
        "data": data if isinstance(data, str) and data.isascii() else None,
        "sha256": sha256 if known else None,
        "error": error if isinstance(error, str) else None,
    }
    if found["error"] is None and found["data"] is None and found["sha256"] is None:
        found["error"] = "the job handed back nothing that can be read"
    return found


def _number(value: Any) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            found = float(value)
        except OverflowError:
            return None
        return found if math.isfinite(found) else None
    return None


_CHECKS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "stream": _stream,
    "display_data": _display,
    "update_display_data": _display,
    "execute_result": _bundle,
    "clear_output": _clear,
    "error": _error,
    "note": _note,
    "status": _status,
    "fence": _fence,
    "end": _end,
}
