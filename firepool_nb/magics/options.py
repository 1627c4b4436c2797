"""The options of ``%%firepool``, parsed strictly.

A wrong option raises `UsageError` with the nearest right one; it never runs anything, here or
there.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import os
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from IPython.core.error import UsageError
from IPython.utils._process_common import arg_split

from ..durations import seconds

__all__ = ["CellOptions", "Described", "described", "parse"]


@dataclass
class CellOptions:
    """What was asked for with a cell.

    Attributes
    ----------
    fields
        Fields of the job request that are given as they are.
    push, pull
        Names in and out.
    capture
        Whether the names the cell reads travel by themselves.
    block
        Whether to wait.
    job_name
        Name to bind the `Job` to.
    package_folder
        A folder that travels as a package.
    quiet
        Whether to show no waiting line.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    push: list[str] = field(default_factory=list)
    pull: list[str] = field(default_factory=list)
    capture: bool = True
    block: bool = True
    job_name: str | None = None
    package_folder: str | None = None
    quiet: bool = False


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"%%firepool: {message}")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _parser() -> _Parser:
    parser = _Parser(prog="%%firepool", add_help=False, allow_abbrev=False)
    add = parser.add_argument
    add(
        "-i",
        "--push",
        action="append",
        type=_names,
        default=[],
        metavar="A,B",
        help="send names in, however large; small ones that the cell reads travel by themselves",
    )
    add(
        "-o",
        "--pull",
        action="append",
        type=_names,
        default=[],
        metavar="X,Y",
        help="bring names back into the notebook",
    )
    add("--no-capture", action="store_true", help="send no names but those of -i")
    add(
        "-a",
        "--no-block",
        "--noblock",
        action="store_true",
        help="return a Job at once; its result() waits, and binds the names of -o",
    )
    add("--job", metavar="NAME", help="bind the Job to a name")
    add("--sku", metavar="NAME", help="pool to run on; without it the default pool")
    add("--gpu", metavar="KIND[:N]", help="kind of GPU and how many, instead of --sku")
    add("--cpu", type=float, metavar="CORES", help="cores, instead of --sku")
    add("--memory", type=float, metavar="GIB", help="memory in GiB, instead of --sku")
    add(
        "-r",
        action="append",
        default=[],
        metavar="FILE",
        help="install what a requirements file names, for this cell only",
    )
    add(
        "--with",
        dest="requirements",
        action="append",
        default=[],
        metavar="REQ",
        help="install a requirement, for this cell only",
    )
    add("--package", metavar="DIR", help="send a folder of your own modules")
    add(
        "--env",
        action="append",
        default=[],
        metavar="K[=V]",
        help="set a variable; without a value it is the notebook's",
    )
    add("--timeout", type=seconds, metavar="TIME", help="end the job after this time (90, 10m)")
    add("--max-retries", type=int, metavar="N", help="run again up to N times when it failed")
    add("--queue", metavar="Q", help="a stream of work; the jobs of one run in their order")
    add("--priority", type=int, metavar="N", help="higher goes first")
    add("--single-use", action="store_true", help="use a pod that nobody used, and nobody will")
    add("-q", "--quiet", action="store_true", help="show no waiting line")
    add("-h", "--help", action="store_true", help="show this and run nothing")
    add("--live", action="store_true", help="run in the session's living interpreter")
    add("--pods", type=int, metavar="N", help="run on several pods")
    add("--launcher", choices=["python", "torchrun", "ray", "shell"], help="what starts the code")
    add("--image", metavar="DIGEST", help="run in another image")
    add("--secret", action="append", default=[], metavar="NAME", help="hand in a secret by name")
    return parser


_PARSER = _parser()
_KNOWN = sorted(option for action in _PARSER._actions for option in action.option_strings)
_NAMING = frozenset({"-i", "--push", "-o", "--pull"})
_REFUSED_LOCALLY = frozenset({"live", "pods", "launcher", "image", "secret"})


class Described(NamedTuple):
    """One option as help and reference show it.

    Attributes
    ----------
    usage
        How it is written: ``-o, --pull X,Y``.
    text
        What it does.
    available
        Whether the pods of this version take it.
    """

    usage: str
    text: str
    available: bool


def described() -> list[Described]:
    """List the options of ``%%firepool``."""
    found = []
    for action in _PARSER._actions:
        words = [option for option in action.option_strings if option != "--noblock"]
        metavar = "|".join(action.choices) if action.choices else action.metavar
        usage = ", ".join(words) + (f" {metavar}" if metavar else "")
        found.append(Described(usage, str(action.help), action.dest not in _REFUSED_LOCALLY))
    return found


def parse(line: str, default_sku: str = "") -> CellOptions:
    """Parse the text after ``%%firepool``.

    Parameters
    ----------
    line
        The text.
    default_sku
        SKU of a cell that names none; empty for the broker's own default.

    Raises
    ------
    UsageError
        When an option is unknown, incomplete or contradicts another.
    """
    try:
        words = arg_split(line, posix=True)
    except ValueError as error:
        raise UsageError(f"%%firepool: {error}") from None
    try:
        found, unknown = _PARSER.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise UsageError(f"%%firepool: {error}") from None
    if unknown:
        raise UsageError(f"%%firepool: {_unknown(unknown[0], words)}")
    return _options(found, default_sku)


def _unknown(word: str, words: list[str]) -> str:
    option = word.partition("=")[0]
    if not option.startswith("-"):
        before = words[: words.index(word)]
        if len(before) >= 2 and before[-2] in _NAMING and word.strip(",").isidentifier():
            after = itertools.takewhile(lambda each: each[:1] != "-", words[len(before) :])
            names = ",".join(each.strip(",") for each in (before[-1], *after))
            return f"names are separated by commas alone: {before[-2]} {names}"
        return f"unexpected word {word!r}; the code goes below this line"
    near = difflib.get_close_matches(option, _KNOWN, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(_KNOWN)}"
    return f"unknown option {option}{hint}"


def _options(found: argparse.Namespace, default_sku: str) -> CellOptions:
    shape = {"gpu": found.gpu, "cpu": found.cpu, "memory_gib": found.memory}
    shape = {name: value for name, value in shape.items() if value is not None}
    if found.sku and shape:
        raise UsageError("%%firepool: give --sku, or --gpu, --cpu and --memory, not both")
    fields: dict[str, Any] = {
        "sku": found.sku or (default_sku if not shape else None) or None,
        "shape": shape or None,
        "requirements": _requirements(found.r) + found.requirements or None,
        "env": _variables(found.env) or None,
        "secrets": found.secret or None,
        "timeout_seconds": found.timeout,
        "max_retries": found.max_retries,
        "queue": found.queue,
        "priority": found.priority,
        "single_use": found.single_use or None,
        "image": found.image,
        "pods": found.pods,
        "launcher": found.launcher,
        "live": found.live or None,
    }
    if found.package is not None and not os.path.isdir(found.package):
        raise UsageError(f"%%firepool: --package {found.package!r} is no folder")
    if found.job is not None and not found.job.isidentifier():
        raise UsageError(f"%%firepool: --job {found.job!r} is not the name of a variable")
    return CellOptions(
        fields={name: value for name, value in fields.items() if value is not None},
        push=[name for names in found.push for name in names],
        pull=[name for names in found.pull for name in names],
        capture=not found.no_capture,
        block=not found.no_block,
        job_name=found.job,
        package_folder=found.package,
        quiet=found.quiet,
    )


def _requirements(paths: list[str]) -> list[str]:
    lines: list[str] = []
    for path in paths:
        try:
            with open(path, encoding="utf-8") as file:
                text = file.read()
        except OSError as error:
            raise UsageError(f"%%firepool: -r {path}: {error.strerror}") from None
        for line in text.splitlines():
            line = re.sub(r"(^|\s)#.*", "", line).strip()
            if line:
                lines.append(line)
    return lines


def _variables(pairs: list[str]) -> dict[str, str]:
    result = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            if name not in os.environ:
                raise UsageError(f"%%firepool: --env {name}: this kernel has no such variable")
            value = os.environ[name]
        result[name] = value
    return result
