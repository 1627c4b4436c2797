"""``firepool up``, ``stop``, ``doctor``: this machine's own broker."""

from __future__ import annotations

import sys
import threading
from typing import Any

import click

from .. import embedded, reports
from ..client import Client
from ..connection import own
from ..doctor import examine
from ..errors import Interrupted
from .console import json_option, print_json

__all__ = ["doctor", "stop", "up"]

_REFRESH_SECONDS = 1.0
_STOP_SECONDS = 30.0
_FOR_EVER_SECONDS = 30.0 * 86400


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
@click.option("--wait", is_flag=True, help="Let running jobs finish first, however long.")
@click.option("-y", "--yes", is_flag=True, help="Cancel running jobs without asking.")
@click.option("--keep-pods", is_flag=True, help="Leave jobs and pods to the next broker.")
@json_option
def stop(wait: bool, yes: bool, keep_pods: bool, as_json: bool) -> None:
    """Stop this machine's broker and its pods.

    Running jobs are cancelled: they get SIGTERM and two seconds. On a terminal you are asked
    first. With --wait they finish, and with --keep-pods they go on for the next broker. Waiting
    jobs that are detached are kept for the next broker in any case.
    """
    if wait and keep_pods:
        raise click.UsageError("give either --wait or --keep-pods")
    running = _unfinished() if embedded.find() is not None else []
    named = ", ".join(_named(view) for view in running)
    if running and not (wait or yes or keep_pods or as_json) and _is_terminal():
        click.echo(f"{_count(running)}: {named}")
        answer = click.prompt(
            "cancel, wait or leave", type=click.Choice(["cancel", "wait", "leave"]), default="leave"
        )
        if answer == "leave":
            click.echo("nothing was stopped")
            return
        wait = answer == "wait"
    if running and not keep_pods:
        verb = "waiting for" if wait else "cancelling"
        click.echo(f"{verb} {named}" + ("; Ctrl-C leaves the wait" if wait else ""), err=True)
    try:
        stopped = embedded.stop(
            drain=not keep_pods,
            cancel=not (wait or keep_pods),
            timeout_seconds=_FOR_EVER_SECONDS if wait else _STOP_SECONDS,
        )
    except KeyboardInterrupt:
        raise Interrupted(
            "the broker ends when these jobs have; `firepool stop` cancels them"
        ) from None
    ended = [view["id"] for view in running if not (wait or keep_pods)]
    if as_json:
        print_json({"stopped": stopped, "cancelled": ended})
    else:
        text = f"stopped; cancelled {', '.join(ended)}" if ended else "stopped"
        click.echo(text if stopped else "no broker ran")


def _unfinished() -> list[dict[str, Any]]:
    """List what a stop would end: jobs that run, or that somebody waits for."""
    with Client(own) as client:
        views = client.jobs(state="RUNNING")
        for state in ("QUEUED", "PENDING"):
            views += [view for view in client.jobs(state=state) if view["attached"]]
    return views


def _named(view: dict[str, Any]) -> str:
    name = f"{view['name']}, " if view.get("name") else ""
    attached = "" if view["attached"] else "detached, "
    return f"{view['id']} ({name}{attached}session {view['lease_tag'] or 'none'})"


def _count(views: list[dict[str, Any]]) -> str:
    return "1 job is not finished" if len(views) == 1 else f"{len(views)} jobs are not finished"


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


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
