"""``firepool run``: a script, a line of code or a command on a warm pod."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import click

from .. import calls
from ..errors import Interrupted, RemoteError
from ..job import Job
from ..outputs import CollectedOutput, Output, TextOutput
from ..session import Session
from .console import json_option, print_json

__all__ = ["run"]

_SILENT_SECONDS = 3.0


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("words", nargs=-1, metavar="[SCRIPT.py | COMMAND] [ARGUMENTS]...")
@click.option("-c", "code", metavar="CODE", help="Python code, instead of a script.")
@click.option("-m", "module", is_flag=True, help="The first word is a module, as of `python -m`.")
@click.option("--sku", metavar="NAME", help="Pool to run on.")
@click.option("--with", "requirements", multiple=True, metavar="REQ", help="A requirement.")
@click.option("--env", multiple=True, metavar="K[=V]", help="A variable.")
@click.option("--timeout", metavar="TIME", help="End the job after this time (90, 10m).")
@click.option("--queue", metavar="Q", help="A stream of work.")
@click.option("--priority", type=int, metavar="N", help="Higher goes first.")
@click.option("--session", "tag", metavar="TAG", help="Session to run in; a new one without it.")
@click.option("-d", "--detach", is_flag=True, help="Print the job's id and return at once.")
@json_option
def run(
    words: Sequence[str],
    code: str | None,
    module: bool,
    tag: str | None,
    detach: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Run a script, a command or code on a warm pod.

    A first word that ends in .py is a script of this interpreter; anything else is a command.
    The exit status is the job's, 130 after Ctrl-C, 2 for wrong use.
    """
    asked = {**_work(words, code, module), **_fields(**options)}  # wrong use starts no broker
    session = Session(tag or f"cli-{os.getpid()}-{os.urandom(3).hex()}")
    session.open()
    try:
        request = session.request(attached=not detach, on_lost="fail", **asked)
        if detach:
            view = session.client.submit(request)
            print_json(view) if as_json else click.echo(view["id"])
            return
        _wait(session, request, as_json)
    finally:
        if not detach:
            session.end()


def _wait(session: Session, request: dict[str, Any], as_json: bool) -> None:
    job = Job(session.client, {"id": request["id"], "state": "PENDING"})
    output: Output = (
        CollectedOutput() if as_json else TextOutput(sys.stdout, sys.stderr, show_errors=True)
    )
    output.hidden_topics = frozenset({"pool"})
    try:
        _follow(job, output, request)
    except KeyboardInterrupt:
        _interrupt(job, output)
    if isinstance(output, CollectedOutput):
        document = {**job.view, "stdout": output.stdout, "stderr": output.stderr}
        print_json(document)
    if job._state == "SUCCEEDED":
        return
    error = job._error(output.raised)
    told = isinstance(error, RemoteError) and error.ename and not as_json
    if not (told or as_json):
        click.echo(f"firepool: {type(error).__name__}: {error}", err=True)
    code = job.view.get("exit_code")
    sys.exit(130 if isinstance(error, Interrupted) else code if code else 1)


def _follow(job: Job, output: Output, request: dict[str, Any]) -> None:
    """Show a job to its end; one that does not start for a while is worth a line."""
    submission = calls.submit(request, follow=True)
    if job._follow(output, submission, timeout_seconds=_SILENT_SECONDS):
        return
    if job._state in ("PENDING", "QUEUED"):
        waiting = (job.view.get("waiting") or {}).get("message") or "waiting for a pod"
        click.echo(f"{job.id} on {job.view.get('sku') or 'a pod'}: {waiting}", err=True)
    is_known = "times" in job.view
    job._follow(output, None if is_known else submission, job._next_number)


def _interrupt(job: Job, output: Output) -> None:
    job.interrupt()
    click.echo("interrupting; Ctrl-C again leaves it", err=True)
    try:
        job._follow(output, start=job._next_number)
    except KeyboardInterrupt:
        raise Interrupted(f"left job {job.id}; `firepool logs {job.id}` shows its output") from None


def _work(words: Sequence[str], code: str | None, module: bool) -> dict[str, Any]:
    if (code is None) == (not words) or (module and code is not None):
        raise click.UsageError("give either a script or command, or -c CODE, or -m MODULE")
    if module:
        argv = [sys.executable, "-u", "-m", *words]
        return {"kind": "command", "argv": argv, "name": f"-m {words[0]}"[:100]}
    if code is not None:
        return {"kind": "cell", "code": code, "filename": "<string>"}
    if words[0].endswith(".py"):
        if not os.path.isfile(words[0]):
            raise click.UsageError(f"{words[0]} is no file")
        script = os.path.abspath(words[0])
        return {
            "kind": "command",
            "argv": [sys.executable, "-u", script, *words[1:]],
            "name": os.path.basename(script),
        }
    return {"kind": "command", "argv": list(words), "name": shlex.join(words)[:100]}


def _fields(
    sku: str | None,
    requirements: Sequence[str],
    env: Sequence[str],
    timeout: str | None,
    queue: str | None,
    priority: int | None,
) -> dict[str, Any]:
    import argparse

    from ..durations import seconds

    variables = {}
    for pair in env:
        name, equals, value = pair.partition("=")
        if not equals and name not in os.environ:
            raise click.UsageError(f"--env {name}: there is no such variable here")
        variables[name] = value if equals else os.environ[name]
    try:
        limit = seconds(timeout) if timeout is not None else None
    except argparse.ArgumentTypeError as error:
        raise click.UsageError(f"--timeout: {error}") from None
    return {
        "sku": sku,
        "requirements": list(requirements) or None,
        "env": variables or None,
        "timeout_seconds": limit,
        "queue": queue,
        "priority": priority,
    }
