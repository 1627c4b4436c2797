"""Plain text about pools, jobs and sessions, for line magics and terminals."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .job import start_latency_seconds

if TYPE_CHECKING:
    from .doctor import Finding

__all__ = [
    "duration",
    "error_text",
    "findings",
    "job_rows",
    "jobs",
    "pool_rows",
    "pools",
    "status",
    "table",
]

POOL_COLUMNS = ("pool", "shape", "warm", "warming", "busy", "queue", "isolation")
JOB_COLUMNS = ("job", "state", "session", "pool", "path", "start", "took", "error")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out rows under their columns."""
    widths = [
        max(len(column), *(len(row[index]) for row in rows)) if rows else len(column)
        for index, column in enumerate(columns)
    ]
    lines = [columns, *rows]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def duration(seconds: float | None) -> str:
    """Write a duration for people."""
    if seconds is None:
        return ""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min"


def shape_text(shape: dict[str, Any]) -> str:
    """Write a hardware shape for people."""
    parts = []
    if shape.get("gpu"):
        parts.append(str(shape["gpu"]))
    if shape.get("cpu") is not None:
        parts.append(f"{shape['cpu']:g} cores")
    if shape.get("memory_gib") is not None:
        parts.append(f"{shape['memory_gib']:.3g} GiB")
    return ", ".join(parts)


def pool_rows(document: dict[str, Any]) -> list[list[str]]:
    """Make one row for each pool."""
    rows = []
    for pool in document["pools"]:
        counts = pool["counts"]
        mark = " *" if pool["name"] == document.get("default") else ""
        rows.append(
            [
                pool["name"] + mark,
                shape_text(pool.get("shape") or {}),
                str(counts["warm_ready"]),
                str(counts["warming"]),
                str(counts["busy"]),
                str(pool["queue_length"]),
                str(pool.get("isolation") or ""),
            ]
        )
    return rows


def pools(document: dict[str, Any]) -> str:
    """List the pools; ``*`` marks the default one."""
    return table(POOL_COLUMNS, pool_rows(document))


def job_rows(views: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Make one row for each job."""
    rows = []
    for view in views:
        times = view.get("times") or {}
        first = times.get("first_instruction")
        until = times.get("ended") or (time.time() if first is not None else None)
        took = until - first if first is not None and until is not None else None
        rows.append(
            [
                view["id"],
                view["state"].lower(),
                str(view.get("lease_tag") or ""),
                str(view.get("sku") or ""),
                str((view.get("acquisition") or {}).get("path") or ""),
                duration(start_latency_seconds(view)),
                duration(took),
                error_text(view),
            ]
        )
    return rows


def jobs(views: Sequence[dict[str, Any]]) -> str:
    """List jobs, newest first."""
    return table(JOB_COLUMNS, job_rows(views)) if views else "no jobs"


def status(
    broker: dict[str, Any],
    sessions: Sequence[dict[str, Any]],
    pods: Sequence[dict[str, Any]],
    last: dict[str, Any] | None,
) -> str:
    """Describe a broker, sessions with their pods, and the last job."""
    lines = [
        f"broker   {broker['version']}, {broker['backend']} pods, isolation: "
        f"{broker['isolation']}, network: {broker['network']} (pid {broker['pid']})"
    ]
    for session in sessions:
        notebook = f" ({session['notebook']})" if session.get("notebook") else ""
        lines.append(
            f"session  {session['lease_tag']}{notebook}, files in {session['session_dir']}"
        )
        lines += [_pod(pod) for pod in pods if pod.get("session") == session["lease_tag"]]
    if not sessions:
        lines.append("session  none")
    if last is not None:
        lines.append(_last(last))
    return "\n".join(lines)


def _pod(pod: dict[str, Any]) -> str:
    text = f"pod      {pod['name']}: {pod['state'].lower()} in {pod['pool']}"
    held = pod.get("hold_expires_at")
    if held and pod["state"] == "HELD":
        text += f", held for {duration(max(0.0, held - time.time()))}"
    return text


def _last(view: dict[str, Any]) -> str:
    latency = start_latency_seconds(view)
    acquisition = view.get("acquisition") or {}
    text = f"last     {view['id']}: {view['state'].lower()}"
    if acquisition:
        text += f", {acquisition.get('path')} ({acquisition.get('reason')})"
    if latency is not None:
        text += f", first instruction after {duration(latency)}"
    imports = view.get("imports_seconds")
    if imports:
        text += f", imports {duration(imports)}"
    return text


def error_text(view: dict[str, Any]) -> str:
    """Name how a job failed: what its code raised, else the broker's word."""
    error = view.get("error") or {}
    kind = str(error.get("class") or "")
    return str(error["ename"]) if kind == "NonZeroExit" and error.get("ename") else kind


def findings(found: Sequence[Finding]) -> str:
    """List what was examined, with the fix for what is wrong."""
    lines = []
    for finding in found:
        lines.append(f"{'ok  ' if finding.ok else 'FAIL'}  {finding.what}: {finding.detail}")
        if finding.fix:
            lines.append(f"      {finding.fix}")
    return "\n".join(lines)
