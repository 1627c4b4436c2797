"""`make demo`: run the first notebook through a real kernel and print what happened.

For each cell: its first line, its output, how its pod was found (the acquisition path) and how
long it took from the submission to the first instruction in the pod.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import firepool_nb

NOTEBOOK = Path(__file__).resolve().parent / "01-first-cell.ipynb"


def shown(outputs: list[Any]) -> str:
    """Return a cell's outputs as the text of a table's field."""
    lines: list[str] = []
    for output in outputs:
        if output.output_type == "stream":
            lines += output.text.rstrip().splitlines()
        elif output.output_type == "error":
            lines.append(f"{output.ename}: {output.evalue}")
        elif any(kind.startswith("image/") for kind in output.data):
            lines.append("[a picture]")
        else:
            lines += output.data.get("text/plain", "").splitlines()
    lines = [line for line in lines if line.strip()]  # a waiting line that went leaves an empty one
    return "\n".join(line if len(line) <= 60 else line[:59] + "…" for line in lines[:6])


def title(source: str) -> str:
    """Return the line of a cell that tells it from the others."""
    lines = [line for line in source.splitlines() if line.strip()]
    if lines[0].startswith("%%firepool") and len(lines) > 1:
        return f"{lines[0]}\n{lines[1][:36]}"
    return lines[0][:36]


def main() -> int:
    """Run the notebook cell by cell; the exit status is 1 when a cell failed."""
    console = Console(width=max(110, Console().width))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    kernel = NotebookClient(
        notebook,
        timeout=120,
        resources={"metadata": {"path": NOTEBOOK.parent}},
        extra_arguments=["--IPKernelApp.log_level=ERROR"],
    )
    table = Table(title=f"{NOTEBOOK.name}, through a real kernel", show_lines=True)
    for name, style in (("cell", "cyan"), ("output", ""), ("path", "green")):
        table.add_column(name, style=style, overflow="fold")
    table.add_column("start", justify="right")
    table.add_column("whole cell", justify="right")

    client = firepool_nb.Client()
    began = time.perf_counter()
    seen = {job["id"] for job in client.jobs()}
    starts: list[float] = []
    failed = False
    with kernel.setup_kernel():
        for index, cell in enumerate(notebook.cells):
            if cell.cell_type != "code":
                continue
            cell_began = time.perf_counter()
            try:
                kernel.execute_cell(cell, index)
            except CellExecutionError:
                failed = True
            took_ms = 1000 * (time.perf_counter() - cell_began)
            jobs = [
                firepool_nb.Job(client, view) for view in client.jobs() if view["id"] not in seen
            ]
            seen.update(job.id for job in jobs)
            latencies = [latency for job in jobs if (latency := job.start_latency_seconds)]
            starts += latencies
            table.add_row(
                escape(title(cell.source)),  # brackets are the cell's own, not markup
                escape(shown(cell.outputs)),
                ", ".join(job.path or "?" for job in jobs) or "[dim]here[/dim]",
                ", ".join(f"{1000 * latency:.1f} ms" for latency in latencies) or "",
                f"{took_ms:.0f} ms",
            )
            if failed:
                break
    console.print(table)
    fastest = f", the fastest start {1000 * min(starts):.1f} ms" if starts else ""
    console.print(
        f"{len(starts)} cells ran on pods in {time.perf_counter() - began:.1f} s{fastest}."
    )
    console.print(
        "The broker and its warm pods end by themselves when idle; `.venv/bin/firepool stop` ends "
        "them now."
    )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
