"""The rows of `firepool bench`: what is measured, where, and in which unit.

A row is a function without arguments that returns one mapping, or several when one run serves
several rows: ``{"unit", "n", "p50", "p99", "goal", "met", ...}``, with ``"ratio"`` and
``"against"`` where two sides ran interleaved in one run. A row that cannot run here raises
:class:`Skipped` with the reason. Figures are never asserted in tests: machines are shared and
noisy (see ``docs/performance.md``).
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.rows import Skipped

Row = dict[str, Any]

#: row name -> (module below ``benchmarks``, function, what it measures)
ROWS: Mapping[str, tuple[str, str, str]] = {
    "warm_start": ("warm_start", "warm_start", "submit to first instruction, one idle pod"),
    "cell": ("cell", "cell", "%%firepool in a real kernel: request to first output, to idle"),
    "back_to_back": ("warm_start", "back_to_back", "print(1) again and again on one pod"),
    "load": ("cell", "load", "import, %load_ext, first cell from nothing"),
    "interrupt": ("cell", "interrupt", "■ to idle; a later ■ kills"),
    "pool_start": ("warm_start", "pool_start", "two pods from nothing; memory"),
    "imports": ("pod", "imports", "second cell that imports a slow package"),
    "first_instruction": ("pod", "first_instruction", "hand-off to first instruction by tier"),
    "reset": ("pod", "reset", "clean reset"),
    "reset_files": ("pod", "reset_files", "reset with 10,000 files; leftovers"),
    "tracker_single": ("tracker", "tracker_single", "claims with 100,000 pods, one claimer"),
    "tracker_threads": ("tracker", "tracker_threads", "claims from 32 threads"),
    "reconcile": ("tracker", "reconcile", "reconcile pass over 100,000 pods"),
    "dispatch": ("store", "dispatch", "durable dispatch, grouped against one commit each"),
    "submit": ("store", "submit", "HTTP submit and first output event, no store"),
    "auth": ("store", "auth", "authentication of one request"),
    "restart": ("warm_start", "restart", "broker start to dispatching; first claim"),
    "idle": ("warm_start", "idle", "idle broker and agent"),
}


class UnknownRow(ValueError):
    """A row was named that does not exist."""


def _function(name: str) -> Callable[[], Row]:
    module, function, _ = ROWS[name]
    found: Callable[[], Row] = getattr(importlib.import_module(f"benchmarks.{module}"), function)
    return found


def machine() -> dict[str, Any]:
    """Describe the machine that the figures were measured on."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cores": os.cpu_count(),
        "memory_gib": round(memory_gib, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
    }


def commit() -> str | None:
    """Return the checkout's commit, or None outside a git checkout."""
    root = Path(__file__).resolve().parent.parent
    found = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or None


def run(
    names: Iterable[str] = (), *, started: Callable[[str, str], None] = lambda name, what: None
) -> dict[str, Any]:
    """Run rows one after another.

    Parameters
    ----------
    names
        The rows to run; all of them when empty.
    started
        Called with a row's name and description before it runs, for progress.

    Returns
    -------
    dict
        Row name to figures, with ``"machine"`` and ``"commit"``.

    Raises
    ------
    UnknownRow
        If a name is not a row; nothing has run then.
    """
    wanted = list(names) or list(ROWS)
    unknown = [name for name in wanted if name not in ROWS]
    if unknown:
        raise UnknownRow(f"no row {', '.join(unknown)}; the rows are: {', '.join(ROWS)}")
    result: dict[str, Any] = {}
    for name in wanted:
        started(name, ROWS[name][2])
        try:
            result[name] = _function(name)()
        except Skipped as reason:
            result[name] = {"skipped": str(reason)}
    return {**result, "machine": machine(), "commit": commit()}


def main(arguments: list[str]) -> int:
    """Run the named rows and print JSON; `firepool bench` prints the table."""
    figures = run(arguments, started=lambda name, what: print(f"{name}: {what}", file=sys.stderr))
    print(json.dumps(figures, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
