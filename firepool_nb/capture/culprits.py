"""Find out which object inside a value keeps it from travelling, and how large values are.

Both work from the outside in and touch nothing: no generator is advanced, no file is read, no
property is called.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .pickling import LimitedBuffer, LimitExceeded

__all__ = ["children", "describe_type", "find_culprit", "quick_size_bytes"]

_DEPTH = 12
_CHILDREN = 1000


def describe_type(value: object) -> str:
    """Name a type as people write it: without ``builtins``."""
    kind = type(value)
    if kind.__module__ in ("builtins", "__main__", "_thread", "_io"):
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def quick_size_bytes(value: object) -> int | None:
    """Tell the size of bytes, text, arrays, tensors and frames without copying them.

    Returns
    -------
    int or None
        Bytes of the data itself; None when the type does not say (then only pickling tells).
    """
    if isinstance(value, (bytes, bytearray)):
        return len(value)
    if isinstance(value, memoryview):
        return value.nbytes
    if isinstance(value, str):
        return len(value)
    for module in type(value).__mro__:
        reader = _SIZES.get(f"{module.__module__.partition('.')[0]}.{module.__name__}")
        if reader is not None:
            try:
                return int(reader(value))
            except (TypeError, ValueError, AttributeError, RuntimeError):
                return None
    return None


def _tensor_bytes(value: Any) -> int:
    return int(value.element_size()) * int(value.nelement())


_SIZES: dict[str, Callable[[Any], Any]] = {
    "numpy.ndarray": lambda v: v.nbytes,
    "pandas.DataFrame": lambda v: v.memory_usage(deep=False).sum(),
    "pandas.Series": lambda v: v.memory_usage(deep=False),
    "pyarrow.Table": lambda v: v.nbytes,
    "pyarrow.RecordBatch": lambda v: v.nbytes,
    "polars.DataFrame": lambda v: v.estimated_size(),
    "torch.Tensor": _tensor_bytes,
}


def children(value: object, globals_of_main: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """List what a value refers to, with a word for the way that leads there."""
    if isinstance(value, types.FunctionType):
        yield from _function_children(value, globals_of_main)
    elif isinstance(value, types.MethodType):
        yield value.__func__.__name__, value.__func__
        yield "self", value.__self__
    elif isinstance(value, dict):
        for key, item in list(value.items())[:_CHILDREN]:
            yield f"[{key!r}]"[:60], item
    elif isinstance(value, (list, tuple, set, frozenset)):
        for index, item in enumerate(value):
            if index == _CHILDREN:
                return
            yield f"[{index}]", item
    elif isinstance(value, type):
        for base in value.__bases__:
            if base is not object:
                yield base.__name__, base
        for name, item in list(vars(value).items()):
            yield name, item.__func__ if isinstance(item, (staticmethod, classmethod)) else item
    else:
        if type(value).__module__ == "__main__":
            yield type(value).__name__, type(value)
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            for name, item in list(attributes.items()):
                yield f".{name}", item


def _function_children(
    function: types.FunctionType, globals_of_main: Mapping[str, Any]
) -> Iterator[tuple[str, object]]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # a cell that is still empty
            continue
    if function.__globals__ is globals_of_main or function.__module__ == "__main__":
        for name in _global_names(code):
            if name in function.__globals__:
                yield name, function.__globals__[name]
    for index, default in enumerate(function.__defaults__ or ()):
        yield f"default {index}", default
    for name, default in (function.__kwdefaults__ or {}).items():
        yield f"default {name}", default


def _global_names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return names


def find_culprit(
    value: object,
    fails: Callable[[object], bool],
    globals_of_main: Mapping[str, Any],
) -> tuple[list[str], object]:
    """Follow a value that fails down to the innermost part that fails by itself.

    Parameters
    ----------
    value
        The value that failed.
    fails
        Tells whether a part fails by itself.
    globals_of_main
        The notebook's namespace: globals of its functions are looked up there.

    Returns
    -------
    path, culprit
        The words that lead from the value to the culprit, and the culprit.
    """
    path: list[str] = []
    seen = {id(value)}
    for _ in range(_DEPTH):
        for word, child in children(value, globals_of_main):
            if id(child) in seen:
                continue
            seen.add(id(child))
            if fails(child):
                path.append(word)
                value = child
                break
        else:
            break
    return path, value


def exceeds(write: Callable[[Any, object], None], value: object, limit_bytes: int) -> bool:
    """Tell whether the pickle of a value is larger than a limit, keeping none of it."""
    size = quick_size_bytes(value)
    if size is not None and size > limit_bytes:
        return True
    try:
        write(LimitedBuffer(limit_bytes, keep=False), value)
    except LimitExceeded:
        return True
    return False
