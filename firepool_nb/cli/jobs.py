"""``firepool status``, ``jobs``, ``logs``, ``cancel``, ``pools``, ``sessions``: what there is."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from .. import reports
from ..client import Client
from ..connection import locate
from ..job import ENDED, Job
from ..outputs import CollectedOutput, TextOutput
from .console import json_option, print_json, print_table

__all__ = ["cancel", "jobs", "logs", "pools", "sessions", "status"]


def _client() -> Client:
    """Return a client that starts no broker: looking must not change what is looked at."""
    return Client(lambda: locate(start=False))


@click.command()
@json_option
def status(as_json: bool) -> None:
    """Show the broker, its sessions with their pods, and the last job."""
    with _client() as client:
        broker = client.check_broker()["broker"]
        found, pods = client.sessions(), client.pods()
        newest = next(iter(client.jobs(limit=1)), None)
    if as_json:
        print_json({"broker": broker, "sessions": found, "pods": pods, "last": newest})
    else:
        click.echo(reports.status(broker, found, pods, newest))


@click.command()
@click.argument("job_ids", metavar="JOB...", nargs=-1, required=True)
@json_option
def cancel(job_ids: Sequence[str], as_json: bool) -> None:
    """Cancel jobs, waiting or running; a running one gets its grace first."""
    with _client() as client:
        found = [Job(client, client.job(job_id)) for job_id in job_ids]  # all exist, or none ends
        ended = [job for job in found if job._state in ENDED]
        for job in found:
            job.cancel()
        if as_json:
            print_json({"jobs": [client.job(job.id) for job in found]})
            return
    for job in found:
        done = job in ended
        click.echo(f"{job.id} has ended: {job.summary()}" if done else f"cancelling {job.id}")


@click.command()
@click.option("--state", metavar="STATE", help="Only jobs in this state.")
@click.option("--session", "lease_tag", metavar="TAG", help="Only jobs of this session.")
@click.option("-n", "--limit", type=int, default=30, show_default=True, help="At most so many.")
@json_option
def jobs(state: str | None, lease_tag: str | None, limit: int, as_json: bool) -> None:
    """List jobs, newest first."""
    with _client() as client:
        state = state.upper() if state else None
        views = client.jobs(state=state, lease_tag=lease_tag, limit=limit)
    if as_json:
        print_json({"jobs": views})
    else:
        print_table(reports.JOB_COLUMNS, reports.job_rows(views), "no jobs")


@click.command()
@click.argument("job_id", metavar="JOB")
@click.option("-f", "--follow", is_flag=True, help="Go on until the job ends.")
@json_option
def logs(job_id: str, follow: bool, as_json: bool) -> None:
    """Print what a job printed."""
    with _client() as client:
        job = Job(client, client.job(job_id))
        if as_json:
            collected = CollectedOutput()
            job._replay(collected, follow)
            document = {"stdout": collected.stdout, "stderr": collected.stderr}
            print_json({"job": job.id, "state": job._state, **document})
        else:
            job._replay(TextOutput(sys.stdout, sys.stderr, show_errors=True), follow)


@click.command()
@json_option
def pools(as_json: bool) -> None:
    """List the pools and what is warm in them."""
    with _client() as client:
        document = client.pools()
    if as_json:
        print_json(document)
    else:
        print_table(reports.POOL_COLUMNS, reports.pool_rows(document), "no pools")


@click.command()
@json_option
def sessions(as_json: bool) -> None:
    """List sessions and the pods they hold."""
    with _client() as client:
        found = client.sessions()
    if as_json:
        print_json({"sessions": found})
        return
    rows = [
        [
            each["lease_tag"],
            "open" if each["connected"] else "away",
            str(each.get("notebook") or ""),
            ", ".join(each.get("pods") or []),
            str(each.get("jobs_running", 0)),
            str(each.get("jobs_queued", 0)),
        ]
        for each in found
    ]
    columns = ("session", "client", "notebook", "pods", "running", "queued")
    print_table(columns, rows, "no sessions")
