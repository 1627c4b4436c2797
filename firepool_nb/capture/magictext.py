"""IPython's own syntax: magics, ``!commands``, and the names that stand in their text."""

from __future__ import annotations

import ast
import re
import string
from typing import Any

__all__ = [
    "CODE_CELL_MAGICS",
    "CODE_LINE_MAGICS",
    "HARMLESS_MAGICS",
    "code_in",
    "expanded_names",
    "magic_call",
    "transform",
]

# Magics whose text is Python that runs in the notebook's namespace.
CODE_LINE_MAGICS = frozenset({"time", "timeit", "prun", "memit", "mprun", "lprun"})
CODE_CELL_MAGICS = frozenset({"time", "timeit", "prun", "capture", "memit"})
# Magics that define no Python names.
HARMLESS_MAGICS = frozenset(
    {"alias_magic", "autoawait", "bash", "cd", "colors", "conda", "config", "dirs", "env", "html"}
    | {"javascript", "js", "latex", "ls", "lsmagic", "markdown", "matplotlib", "mkdir", "pip"}
    | {"pwd", "set_env", "sh", "svg", "sx", "system", "uv", "writefile", "xmode"}
)
_SHELL_VARIABLE = re.compile(r"(?<!\$)\$(?:\{)?([^\W\d]\w*)")
_OPTION = re.compile(r"^\s*-\w+(\s+|$)")


def transform(source: str) -> str:
    """Turn IPython's syntax into plain Python, as the shell will do it in the pod."""
    if not any(mark in source for mark in "%!?"):
        return source if source.endswith("\n") else source + "\n"
    from IPython.core.inputtransformer2 import TransformerManager

    manager: Any = TransformerManager  # it has no types of its own
    return str(manager().transform_cell(source))


def magic_call(node: ast.Call) -> tuple[str, list[str], int] | None:
    """Recognise ``get_ipython().run_line_magic('name', 'text')`` and its relatives."""
    function = node.func
    if not (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Call)
        and isinstance(function.value.func, ast.Name)
        and function.value.func.id == "get_ipython"
    ):
        return None
    if function.attr not in (
        "run_line_magic",
        "run_cell_magic",
        "system",
        "getoutput",
        "getoutput_split",
    ):
        return None
    texts = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    if not texts or len(texts) != len(node.args):
        return None
    return function.attr, texts, node.lineno


def code_in(text: str) -> ast.Module | None:
    """Find the Python code that stands in the text of a magic, after its options."""
    words = text
    while words.strip():
        try:
            tree = ast.parse(transform(words))
        except SyntaxError:
            _, _, words = words.strip().partition(" ")
            continue
        # `-n 10 f(x)` does not parse, but `-n` alone does: it is an option and no expression
        stripped = _OPTION.sub("", words)
        if stripped != words and isinstance(tree.body[0], ast.Expr):
            words = stripped
            continue
        return tree
    return None


def expanded_names(text: str) -> list[str]:
    """List the names that IPython expands in commands: ``{expression}`` and ``$name``."""
    names = list(_SHELL_VARIABLE.findall(text))
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(text) if field]
    except ValueError:
        return names  # braces that are the command's own
    for expression in fields:
        try:
            tree = ast.parse(expression.strip(), mode="eval")
        except SyntaxError:
            continue
        names += [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    return names
