"""``firepool up``, ``stop``, ``doctor``: this machine's own broker."""

from __future__ import annotations

import sys
import threading

import click

from .. import embedded, reports
from ..client import Client
from ..doctor import examine
from .console import json_option, print_json

__all__ = ["doctor", "stop", "up"]

_REFRESH_SECONDS = 1.0


@click.command()
@click.option("--once", is_flag=True, help="Show the pools once and return.")
@json_option
def up(once: bool, as_json: bool) -> None:
    """Start this machine's broker and watch its pools; Ctrl-C leaves it running."""
    with Client() as client:
        if as_json:
            print_json({"broker": client.check_broker()["broker"], **client.pools()})
            return
        if once or not sys.stdout.isatty():
            click.echo(_picture(client))
            return
        _watch(client)


def _picture(client: Client) -> str:
    broker = client.check_broker()["broker"]
    head = f"broker {broker['version']}, pid {broker['pid']}, isolation: {broker['isolation']}"
    views = client.jobs(limit=10)
    return f"{head}\n\n{reports.pools(client.pools())}\n\n{reports.jobs(views)}"


def _watch(client: Client) -> None:
    from rich.live import Live
    from rich.text import Text

    pause = threading.Event()
    try:
        with Live(Text(_picture(client)), refresh_per_second=4) as live:
            while not pause.wait(_REFRESH_SECONDS):
                live.update(Text(_picture(client)))
    except KeyboardInterrupt:
        click.echo("the broker goes on; `firepool stop` ends it", err=True)


@click.command()
@click.option("--keep-pods", is_flag=True, help="Leave its pods for the next broker.")
@json_option
def stop(keep_pods: bool, as_json: bool) -> None:
    """Stop this machine's broker and its pods."""
    stopped = embedded.stop(drain=not keep_pods)
    if as_json:
        print_json({"stopped": stopped})
    else:
        click.echo("stopped" if stopped else "no broker ran")


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Examine what has to work, and say how to put it right."""
    found = examine(start=True)
    if as_json:
        print_json({"findings": [finding._asdict() for finding in found]})
    else:
        click.echo(reports.findings(found))
    if not all(finding.ok for finding in found):
        sys.exit(1)
