"""Which names a cell reads, binds and changes.

`analyse` takes the source of a cell as the person wrote it (magics and ``!commands`` included)
and answers from the syntax tree alone; nothing is run. The contract:

* a name that the cell may read before it has bound it itself is in `CellNames.reads`; a name that
  is surely bound first is not;
* names are spelled as Python spells them (NFKC, private names mangled in classes);
* bodies of functions count at the first use of the function, because that is when they run, so
  ``def f(): return x`` followed by ``x = 1; f()`` does not read a notebook's ``x``;
* `Use.certain` is only true when the read happens whenever the cell runs to its end. Names in a
  branch, behind ``try: … except NameError`` or after something that may define anything
  (``exec``, ``from m import *``, an unknown magic) are read *perhaps*: they travel when they are
  there, and their absence is not an error.

Names that occur only inside strings given to ``eval`` or ``exec`` are invisible here.
"""

from __future__ import annotations

import ast

from .found import CellNames, Use
from .magictext import transform
from .walker import walk

__all__ = ["CellNames", "Use", "analyse"]


def analyse(source: str) -> CellNames:
    """Find the names that a cell reads, binds and changes.

    Raises
    ------
    SyntaxError
        When the cell is not valid Python after IPython's own transformations.
    """
    return walk(ast.parse(transform(source)))
