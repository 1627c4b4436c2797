"""Compile a cell before it is sent: what is no Python is shown as for any cell."""

from __future__ import annotations

import ast
import warnings
from typing import TYPE_CHECKING, Any

from ..capture.magictext import transform
from ..errors import invalid_code

if TYPE_CHECKING:
    from .place import CellPlace

__all__ = ["check_syntax"]


def check_syntax(shell: Any, source: str, place: CellPlace) -> None:
    """Compile a cell as the pod will.

    Raises
    ------
    InvalidCode
        Also a `SyntaxError`, with the line numbers of the notebook's cell.
    """
    try:
        transformed = transform(source)
    except SyntaxError:
        transformed = source
    numbered = "\n" * place.line_offset + transformed
    if _fault(numbered, "<cell>") is None:
        return
    # under a name that the shell knows it is shown as "Cell In[5], line 3"
    found = _fault(numbered, shell.compile.cache(numbered, place.number))
    if found is not None:
        lines = shell.SyntaxTB.structured_traceback(type(found), found, [])
        raise invalid_code(found, lines)


def _fault(source: str, name: str) -> SyntaxError | None:
    try:
        _compile(source, name)
    except SyntaxError as error:
        return error.with_traceback(None)
    except (ValueError, RecursionError, MemoryError):
        return None  # the pod's own message for it is the right one
    return None


def _compile(source: str, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the pod warns
        tree = ast.parse(source, name)
        for statement in tree.body:  # one by one, as the shell does
            compile(
                ast.Module([statement], []),
                name,
                "exec",
                ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
                dont_inherit=True,
            )
