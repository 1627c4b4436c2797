"""Plain text about pools, jobs and sessions, for line magics and terminals."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .job import start_latency_seconds

if TYPE_CHECKING:
    from .doctor import Finding
    from .session import Session

__all__ = ["duration", "findings", "job_rows", "jobs", "pool_rows", "pools", "status", "table"]

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
                str((view.get("error") or {}).get("class") or ""),
            ]
        )
    return rows


def jobs(views: Sequence[dict[str, Any]]) -> str:
    """List jobs, newest first."""
    return table(JOB_COLUMNS, job_rows(views)) if views else "no jobs"


def status(session: Session, last: dict[str, Any] | None, remote_mode: bool) -> str:
    """Describe the broker, this session, its pods and its last cell."""
    broker = session.client.check_broker()["broker"]
    lines = [
        f"broker   {broker['version']}, {broker['backend']} pods, isolation: "
        f"{broker['isolation']}, network: {broker['network']} (pid {broker['pid']})",
        f"session  {session.tag}, files in {session.session_dir}",
    ]
    for pod in session.client.pods():
        if pod.get("session") == session.tag:
            held = pod.get("hold_expires_at")
            left = f", held for {duration(max(0.0, held - time.time()))}" if held else ""
            lines.append(f"pod      {pod['name']}: {pod['state'].lower()} in {pod['pool']}{left}")
    if last is not None:
        latency = start_latency_seconds(last)
        acquisition = last.get("acquisition") or {}
        text = f"last     {last['id']}: {last['state'].lower()}"
        if acquisition:
            text += f", {acquisition.get('path')} ({acquisition.get('reason')})"
        if latency is not None:
            text += f", first instruction after {duration(latency)}"
        imports = last.get("imports_seconds")
        if imports:
            text += f", imports {duration(imports)}"
        lines.append(text)
    if remote_mode:
        lines.append("mode     unmarked cells run on a pod; %firepool off ends that")
    return "\n".join(lines)


def findings(found: Sequence[Finding]) -> str:
    """List what was examined, with the fix for what is wrong."""
    lines = []
    for finding in found:
        lines.append(f"{'ok  ' if finding.ok else 'FAIL'}  {finding.what}: {finding.detail}")
        if finding.fix and not finding.ok:
            lines.append(f"      {finding.fix}")
    return "\n".join(lines)
