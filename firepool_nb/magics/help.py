"""The help of the magics: ``%%firepool --help``, ``%firepool help``, ``%%firepool?``.

One list of options and commands feeds the help, the docstring that ``?`` shows and the reference
in the documentation, so that none of them can be wrong alone.
"""

from __future__ import annotations

import re
import textwrap

from . import lines, options

__all__ = ["asks_for_help", "cell_help", "docstring", "line_help", "rewrite_bare_help"]

_WORDS = frozenset({"-h", "--help"})
_WIDTH = 78
_BARE = re.compile(r"\s*%%firepool\s+(?:\S+\s+)*?(?:-h|--help)\s*\Z")


def asks_for_help(line: str) -> bool:
    """Tell whether a line of options asks for help."""
    return not _WORDS.isdisjoint(line.split())


def rewrite_bare_help(cell: list[str]) -> list[str]:
    """Let ``%%firepool --help`` stand alone: IPython refuses a cell magic without a body."""
    return ["%firepool help cell\n"] if _BARE.match("".join(cell)) else cell


def cell_help() -> str:
    """Describe ``%%firepool`` and its options."""
    rows = [(option.usage, option.text) for option in options.described() if option.available]
    later = ", ".join(option.usage for option in options.described() if not option.available)
    return (
        "%%firepool [OPTIONS]: run the code below on a warm pod.\n\n"
        f"{_table(rows)}\n\n"
        f"{textwrap.fill(f'Refused by the pods of this version: {later}.', _WIDTH)}"
    )


def line_help() -> str:
    """Describe ``%firepool`` and its commands."""
    rows = [(f"%firepool {usage}", text) for usage, text in lines.described()]
    return f"%firepool COMMAND: ask and steer.\n\n{_table(rows)}"


def docstring() -> str:
    """Return what ``?`` shows for both magics."""
    return f"{cell_help()}\n\n{line_help()}\n"


def _table(rows: list[tuple[str, str]]) -> str:
    width = max(len(left) for left, _ in rows) + 4
    wrapped = []
    for left, text in rows:
        pieces = textwrap.wrap(text, _WIDTH - width) or [""]
        wrapped.append(f"  {left}".ljust(width) + pieces[0])
        wrapped += [" " * width + piece for piece in pieces[1:]]
    return "\n".join(wrapped)
