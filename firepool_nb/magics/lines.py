"""``%firepool COMMAND``: what the panel does, from a cell."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from IPython.core.error import UsageError

from .. import reports
from ..errors import job_error
from ..job import ENDED, Job
from ..outputs import ShellOutput
from . import options

if TYPE_CHECKING:
    from . import FirepoolMagics

__all__ = ["described", "run_line"]

_LATER = {
    "extend": "live sessions are",
    "put": "file transfer is",
    "get": "file transfer is",
    "ls": "file transfer is",
    "usage": "usage accounting is",
}


def run_line(magics: FirepoolMagics, line: str) -> None:
    """Run one command of the line magic.

    Raises
    ------
    UsageError
        When the command is unknown or its arguments are wrong.
    """
    command, _, rest = line.strip().partition(" ")
    if not command:
        command = "status"
    if command in ("-h", "--help"):
        command = "help"
    if command in _LATER:
        raise UsageError(
            f"%firepool {command}: {_LATER[command]} not available with this broker yet"
        )
    handler = _COMMANDS.get(command)
    if handler is None:
        near = difflib.get_close_matches(command, [*_COMMANDS, *_LATER], n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(_COMMANDS)}"
        raise UsageError(f"%firepool: unknown command {command!r}{hint}")
    handler.run(magics, rest.strip())


def _status(magics: FirepoolMagics, rest: str) -> None:
    _no_arguments("status", rest)
    session = magics.session
    session.open()
    client = session.client
    mine = [each for each in client.sessions() if each["lease_tag"] == session.tag]
    broker = client.check_broker()["broker"]
    print(reports.status(broker, mine, client.pods(), magics.state.last_view))
    if magics.switch.is_on:
        print("mode     unmarked cells run on a pod; %firepool off ends that")


def _pools(magics: FirepoolMagics, rest: str) -> None:
    _no_arguments("pools", rest)
    print(reports.pools(magics.session.client.pools()))


def _jobs(magics: FirepoolMagics, rest: str) -> None:
    everyone = rest in ("-a", "--all")
    if rest and not everyone:
        raise UsageError("%firepool jobs [-a]: -a lists the jobs of all sessions")
    tag = None if everyone else magics.session.tag
    print(reports.jobs(magics.session.client.jobs(lease_tag=tag, limit=30)))


def _logs(magics: FirepoolMagics, rest: str) -> None:
    job = _job(magics, "logs", rest)
    text = job.logs()
    print(text, end="" if text.endswith("\n") else "\n")


def _result(magics: FirepoolMagics, rest: str) -> None:
    job = _job(magics, "result", rest)
    output = ShellOutput(magics.shell, job.id)
    output.hidden_topics = frozenset({"pool"})
    job._replay(output, follow=True)
    if job._state not in ENDED:
        return
    if job._state != "SUCCEEDED":
        error = job_error(job.view, output.raised)
        raise error from None
    names = []
    for result in job.view.get("results") or []:
        if result.get("error") or result["name"] in ("_", "return"):
            continue
        magics.namespace[result["name"]] = job._load(result)
        names.append(result["name"])
    if names:
        output.note(f"bound: {', '.join(names)}")


def _cancel(magics: FirepoolMagics, rest: str) -> None:
    words = rest.split()
    force = "-f" in words
    words = [word for word in words if word != "-f"]
    job = _job(magics, "cancel", " ".join(words))
    if job.view.get("lease_tag") != magics.session.tag and not force:
        raise UsageError(
            f"%firepool cancel: {job.id} belongs to session {job.view.get('lease_tag')}; "
            f"add -f to cancel it"
        )
    if job._state in ENDED:
        print(f"{job.id} has ended: {job.summary()}")
        return
    job.cancel()
    print(f"cancelling {job.id}")


def _release(magics: FirepoolMagics, rest: str) -> None:
    from .. import calls

    words = rest.split()
    force = "-f" in words
    words = [word for word in words if word != "-f"]
    if len(words) > 1:
        raise UsageError("%firepool release [SESSION] [-f]")
    tag = words[0] if words else magics.session.tag
    if tag != magics.session.tag and not force:
        raise UsageError(f"%firepool release: {tag} is another session; add -f to release its pods")
    magics.session.open()
    released = magics.session.client.call(calls.release(tag)).json()["released"]
    print(f"released {', '.join(released)}" if released else "no pod was held")


def _doctor(magics: FirepoolMagics, rest: str) -> None:
    _no_arguments("doctor", rest)
    from ..doctor import examine

    print(reports.findings(examine(start=True)))


def _on(magics: FirepoolMagics, rest: str) -> None:
    from .help import asks_for_help

    if asks_for_help(rest):
        _help(magics, "cell")
        return
    parsed = options.parse(rest, magics.default_sku)  # wrong ones are told now, not by a cell
    document = magics.session.client.pools()
    names = [pool["name"] for pool in document["pools"]]
    sku = parsed.fields.get("sku")
    if sku is not None and sku not in names:
        raise UsageError(f"%firepool on: no pool is called {sku!r} (pools: {', '.join(names)})")
    if sku is None and "shape" not in parsed.fields:
        sku = document.get("default")
    magics.switch.on(rest)
    print(f"unmarked cells run on {sku or 'a pod'} until %firepool off")


def _off(magics: FirepoolMagics, rest: str) -> None:
    _no_arguments("off", rest)
    magics.switch.off()
    print("cells run here again")


def _job(magics: FirepoolMagics, command: str, rest: str) -> Job:
    if not rest or " " in rest:
        raise UsageError(f"%firepool {command} JOB: name one job; %firepool jobs lists them")
    bound = magics.namespace.get(rest)
    if isinstance(bound, Job):
        return bound.refresh()
    client = magics.session.client
    return Job(client, client.job(rest), magics.namespace)


def _no_arguments(command: str, rest: str) -> None:
    if rest:
        raise UsageError(f"%firepool {command} takes no arguments")


def _help(magics: FirepoolMagics, rest: str) -> None:
    from . import help as help_module

    if rest not in ("", "cell"):
        raise UsageError("%firepool help [cell]")
    print(help_module.cell_help() if rest else help_module.line_help())
    if not rest:
        print("\n%%firepool --help lists the options of cells.")


class _Command(NamedTuple):
    run: Callable[[Any, str], None]
    usage: str
    text: str


_COMMANDS = {
    "status": _Command(_status, "status", "show the broker, this session, its pod, the last cell"),
    "pools": _Command(_pools, "pools", "list the pools and what is warm in them"),
    "jobs": _Command(_jobs, "jobs [-a]", "list this session's jobs; with -a those of all sessions"),
    "logs": _Command(_logs, "logs JOB", "show what a job printed so far"),
    "result": _Command(_result, "result JOB", "wait for a job, show its output, bind its names"),
    "cancel": _Command(_cancel, "cancel JOB [-f]", "end a job; -f for one of another session"),
    "release": _Command(
        _release, "release [SESSION] [-f]", "give the held pod back; -f for another session"
    ),
    "doctor": _Command(_doctor, "doctor", "examine what has to work, and say how to put it right"),
    "on": _Command(_on, "on [OPTIONS]", "run unmarked cells on a pod, with options of %%firepool"),
    "off": _Command(_off, "off", "run unmarked cells here again"),
    "help": _Command(_help, "help [cell]", "show this; with cell the options of %%firepool"),
}


def described() -> list[tuple[str, str]]:
    """List the commands of ``%firepool`` as they are written, with what they do."""
    return [(command.usage, command.text) for command in _COMMANDS.values()]
