"""How a job's exception is told: to the agent as a class and texts, to the notebook as itself."""

from __future__ import annotations

import base64
import pickle
import sys
from typing import Any

from firepool_podagent.interpreter import pickling, sessionpip

INTERRUPTED_EXIT = 130
_PICKLE_LIMIT_BYTES = 1 << 20
_TEXT_LIMIT = 100_000


def text_of(error: BaseException) -> str:
    """Return ``str(error)``, or a placeholder when that fails."""
    try:
        return str(error)[:_TEXT_LIMIT]
    except BaseException as failure:  # noqa: BLE001 - user code
        return f"<no text: its __str__ raises {type(failure).__name__}>"


def exit_code_of(error: BaseException | None) -> int:
    """Return the exit code that a Python program ends with after ``error``."""
    if error is None:
        return 0
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED_EXIT
    if isinstance(error, SystemExit):
        if error.code is None:
            return 0
        return error.code & 0xFF if isinstance(error.code, int) else 1
    return 1


def class_of(error: BaseException) -> str:
    """Return the class of an outcome's error for an exception."""
    if isinstance(error, KeyboardInterrupt):
        return "Interrupted"
    if isinstance(error, MemoryError) or _is_cuda_oom(error):
        return "OOM"
    if isinstance(error, sessionpip.RequirementsFailed):
        return "RequirementsFailed"
    return "NonZeroExit"


def _is_cuda_oom(error: BaseException) -> bool:
    torch = sys.modules.get("torch")
    kind = getattr(getattr(torch, "cuda", None), "OutOfMemoryError", None)
    return isinstance(kind, type) and isinstance(error, kind)


def describe(error: BaseException, lines: list[str] | None) -> dict[str, Any]:
    """Return the ``error`` of an end frame."""
    name, text = type(error).__name__, text_of(error)
    if isinstance(error, sessionpip.RequirementsFailed):  # as when they came with the cell
        told = {"ename": None, "evalue": None, "traceback": None}
        return {"class": name, "message": text, **told}
    return {
        "class": class_of(error),
        "message": f"{name}: {text}" if text else name,
        "ename": name,
        "evalue": text,
        "traceback": lines,
    }


def message(error: BaseException, lines: list[str] | None) -> dict[str, Any]:
    """Return the ``error`` message that is shown, with the exception itself where it can travel."""
    return {
        "type": "error",
        "ename": type(error).__name__,
        "evalue": text_of(error),
        "traceback": lines or [],
        "exception": pickled(error),
    }


def pickled(error: BaseException) -> str | None:
    """Return the exception as base64 of a pickle that was seen to load again, else None."""
    try:
        data = pickling.dumps(error)
        if len(data) > _PICKLE_LIMIT_BYTES:
            return None
        loaded = pickle.loads(data)
        same = type(loaded) is type(error) and text_of(loaded) == text_of(error)
    except BaseException:  # noqa: BLE001 - user code decides how its exceptions are pickled
        return None
    return base64.b64encode(data).decode("ascii") if same else None
