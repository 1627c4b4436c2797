"""What the end of a job means: the class of its error, and what became of its results."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any

from firepool_podagent.memory import MemoryWatch
from firepool_podagent.templates import signal_name


@dataclass(frozen=True)
class End:
    """How a job's first process ended.

    Attributes
    ----------
    exit_code, signal : int or None
        Both ``None`` when nobody could learn it.
    frame : dict or None
        What the job said last of itself, if it came to that.
    """

    exit_code: int | None
    signal: int | None
    frame: dict[str, Any] | None


def error_of(
    end: End,
    forced: tuple[str, str] | None,
    interrupted: bool,
    watch: MemoryWatch | None,
    memory_mib: int | None,
) -> dict[str, Any] | None:
    """Return the error of an outcome, ``None`` for a job that did what it should.

    Parameters
    ----------
    end : End
    forced : (str, str) or None
        Class and message of the reason for which it was ended.
    interrupted : bool
        Whether it was sent an interrupt.
    watch : MemoryWatch or None
    memory_mib : int or None
        Its limit.
    """
    told = (end.frame or {}).get("error")
    if end.exit_code == 0 and forced is None:
        return None
    if watch is not None and watch.job_killed:
        return error(
            "OOM",
            f"the job needed more than its {memory_mib} MiB of memory and was ended; ask for a "
            "larger size or use less",
        )
    if forced is not None and (end.exit_code != 0 or end.frame is None):
        return error(*forced, told)
    if end.exit_code == 0:
        return None  # it ended by itself before the signal reached it
    if end.signal == signal.SIGKILL and watch is not None and watch.kernel_killed():
        return error("OOM", "the kernel ended the job because its memory limit was reached")
    if interrupted and (
        end.signal == signal.SIGINT or (told or {}).get("ename") == "KeyboardInterrupt"
    ):
        return error("Interrupted", "the job was interrupted", told)
    if end.signal is not None:
        name = signal_name(end.signal)
        return error(
            "Signal", f"the job was ended by {name}, which neither broker nor pod sent", told
        )
    if end.exit_code is None:
        return error("Signal", "the job's end could not be observed: its supervisor was killed")
    if told and told.get("class"):
        return {**error(str(told["class"]), str(told.get("message") or "")), **told}
    return error("NonZeroExit", f"the job ended with exit code {end.exit_code}", told)


def error(error_class: str, message: str, told: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return an outcome's error, with what the job told of the exception."""
    told = told or {}
    return {
        "class": error_class,
        "message": message,
        "ename": told.get("ename"),
        "evalue": told.get("evalue"),
        "traceback": told.get("traceback"),
    }


def not_brought_back(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the results of a job that ended well and took what was asked for with it."""
    names = [str(name) for name in spec.get("outputs") or () if name != "_"]
    if spec["kind"] == "call":
        names = ["return"]
    empty = {"format": "cloudpickle", "size_bytes": 0, "type": "", "data": None, "sha256": None}
    text = "the cell ended its process before {} could be brought back"
    return [{"name": name, **empty, "error": text.format(name)} for name in names]
