"""``firepool broker`` and ``firepool bench``: what operators and developers run."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from .. import embedded
from .console import print_json, print_table

__all__ = ["bench", "broker"]


@click.command(
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="serve [OPTIONS]...")
def broker(arguments: Sequence[str]) -> None:
    """Serve a broker in this process (`firepool broker serve --help`)."""
    sys.exit(embedded.serve(list(arguments) or ["--help"]))


@click.command()
@click.argument("rows", nargs=-1, metavar="[ROW]...")
@click.option("--json", "path", metavar="FILE", help="Write the figures there; '-' prints them.")
@click.option("--list", "only_list", is_flag=True, help="List the rows and what they measure.")
def bench(rows: Sequence[str], path: str | None, only_list: bool) -> None:
    """Measure rows of docs/performance.md on this machine."""
    registry = _registry()
    if only_list:
        listed = [[name, what] for name, (_, _, what) in registry.ROWS.items()]
        print_table(("row", "what"), listed, "no rows")
        return
    try:
        figures = registry.run(rows, started=_started)
    except registry.UnknownRow as error:
        raise click.UsageError(str(error)) from None
    if path == "-":
        print_json(figures)
        return
    if path is not None:
        Path(path).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print_table(("row", "unit", "n", "p50", "p99", "goal", "met"), _lines(figures), "no rows")
    machine = figures["machine"]
    click.echo(f"\n{machine} at {figures['commit']}")


def _started(name: str, what: str) -> None:
    click.echo(f"{name}: {what}", err=True)


def _lines(figures: dict[str, Any]) -> list[list[str]]:
    lines = []
    for name, row in figures.items():
        if name in ("machine", "commit"):
            continue
        if "skipped" in row:
            lines.append([name, "", "", "", "", f"skipped: {row['skipped']}", ""])
            continue
        met = {True: "yes", False: "no"}.get(row.get("met"), "")
        cells = [row.get(key, "") for key in ("unit", "n", "p50", "p99", "goal")]
        lines.append([name, *(str(cell) for cell in cells), met])
    return lines


def _registry() -> Any:
    """Import the benchmarks, which come with the source checkout and not with the wheel."""
    root = Path(__file__).resolve().parent.parent.parent
    if not (root / "benchmarks" / "registry.py").is_file():
        raise click.ClickException(
            "the benchmarks come with the source checkout; run this from an editable install"
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    from importlib import import_module

    return import_module("benchmarks.registry")
