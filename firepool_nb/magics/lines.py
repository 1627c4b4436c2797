"""``%firepool COMMAND``: what the panel does, from a cell."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError

from .. import reports
from ..errors import job_error
from ..job import ENDED, Job
from ..outputs import ShellOutput
from . import options

if TYPE_CHECKING:
    from . import FirepoolMagics

__all__ = ["run_line"]

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
    if command in _LATER:
        raise UsageError(
            f"%firepool {command}: {_LATER[command]} not available with this broker yet"
        )
    handler = _COMMANDS.get(command)
    if handler is None:
        near = difflib.get_close_matches(command, [*_COMMANDS, *_LATER], n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(_COMMANDS)}"
        raise UsageError(f"%firepool: unknown command {command!r}{hint}")
    handler(magics, rest.strip())


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
    options.parse(rest, magics.default_sku)  # wrong options are told now, not by the next cell
    magics.switch.on(rest)
    print("unmarked cells run on a pod until %firepool off")


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


_COMMANDS: dict[str, Callable[[Any, str], None]] = {
    "status": _status,
    "pools": _pools,
    "jobs": _jobs,
    "logs": _logs,
    "result": _result,
    "cancel": _cancel,
    "release": _release,
    "doctor": _doctor,
    "on": _on,
    "off": _off,
}
