"""``firepool``: the command line, a client of the broker's API like every other.

One small module for each kind of command; every command takes ``--json``.
"""

from __future__ import annotations

import sys

import click

from ..errors import FirepoolError, Interrupted, Refused
from . import around, jobs, operators, run
from .console import Sections, fail

__all__ = ["main"]

_WRONG_USE = (400, 404, 422)


@click.group(cls=Sections, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="firepool-nb")
def firepool() -> None:
    """Run code on warm pods, and see what runs.

    Exit status: 0 when all is well, 1 when something failed, 2 for wrong use (a pool or job that
    does not exist included), 130 after Ctrl-C. `firepool run` ends with the status of its job.
    """


for command in (run.run, jobs.status, jobs.jobs, jobs.logs, jobs.cancel):
    firepool.add_command(command)
for command in (jobs.pools, jobs.sessions):
    firepool.add_command(command)
for command in (around.up, around.stop, around.doctor):
    firepool.add_command(command)
for command in (operators.broker, operators.bench):
    firepool.add_command(command)


def main() -> None:
    """Run the command line; errors of ours are one line and exit status 1, wrong use is 2."""
    try:
        firepool(prog_name="firepool")
    except Interrupted as error:
        fail(str(error))
        sys.exit(130)
    except Refused as error:
        fail(str(error))
        sys.exit(2 if error.status in _WRONG_USE else 1)
    except FirepoolError as error:
        fail(str(error))
        sys.exit(1)
