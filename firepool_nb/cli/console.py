"""What the commands share: tables or JSON, errors, and help in two sections."""

from __future__ import annotations

import json as json_module
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.table import Table

__all__ = ["Sections", "fail", "json_option", "print_json", "print_table"]

Function = TypeVar("Function", bound=Callable[..., Any])

_OPERATORS = frozenset({"broker", "bench"})


class Sections(click.Group):
    """A group whose help lists the operators' commands under a heading of their own."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the two lists."""
        for heading, operators in (("Commands", False), ("For operators", True)):
            rows = []
            for name in self.list_commands(ctx):
                command = self.get_command(ctx, name)
                if command is not None and (name in _OPERATORS) is operators:
                    rows.append((name, command.get_short_help_str(limit=70)))
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)


def json_option(function: Function) -> Function:
    """Add ``--json``."""
    option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
    return option(function)


def print_json(document: Any) -> None:
    """Print a document as JSON."""
    click.echo(json_module.dumps(document, indent=2))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], empty: str) -> None:
    """Print rows under their columns, or one word when there are none."""
    if not rows:
        click.echo(empty)
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=1000)  # whole words for pipes
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def fail(message: str) -> None:
    """Say what went wrong."""
    click.secho(
        f"firepool: {message}", err=True, fg="red" if Console(stderr=True).is_terminal else None
    )
