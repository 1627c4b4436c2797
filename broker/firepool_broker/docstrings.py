"""The texts under the fields of a class, for references that are generated from the code."""

from __future__ import annotations

import ast
import inspect
import textwrap


def field_texts(kind: type) -> dict[str, str]:
    """Return the text that stands under each field's declaration, its own class's and bases'."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        if each.__module__ != kind.__module__:
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(each))).body[0]
        assert isinstance(body, ast.ClassDef)
        for declared, text in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(declared, ast.AnnAssign)
                and isinstance(declared.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
                and isinstance(text.value.value, str)
            ):
                found[declared.target.id] = " ".join(text.value.value.split())
    return found
