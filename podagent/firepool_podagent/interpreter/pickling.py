"""Pickling of what comes back from a job.

cloudpickle where the environment has it, plain pickle otherwise, protocol 5, with three additions:

* **Classes of the notebook.** A class defined in the notebook arrives by value and lives here as a
  copy. Sent back by value it would arrive as another copy, or rewrite the methods of the original.
  So a class that came with the inputs goes back *by reference* to the notebook's own
  ``__main__.<qualified name>``: instances, Enum members and exceptions arrive there as instances of
  the notebook's class, ``isinstance`` and ``is`` hold. A class that the cell itself defines (or
  defines anew) goes back by value.
* **Exceptions** are rebuilt without calling their ``__init__`` (whose arguments need not be
  ``args``), and without attributes that cannot be pickled.
* **Tensors on an accelerator** go back as CPU tensors; `Pickled.moved` says so.
"""

from __future__ import annotations

import copyreg
import functools
import io
import operator
import pickle
import sys
import types
from typing import Any, Protocol

PROTOCOL = 5
_OS_ERROR_FIELDS = ("errno", "strerror", "filename", "filename2")


class _Writable(Protocol):
    def write(self, data: Any, /) -> Any: ...


_from_notebook: dict[type, str] = {}
"""Classes that came with the inputs, and where the notebook's ``__main__`` has them."""


def prepare() -> None:
    """Import cloudpickle ahead of its use, where the environment has it."""
    _pickler_class()


def remember_classes(namespace: dict[str, Any]) -> None:
    """Note the notebook's classes among the inputs just bound: those and no others go back by name.

    A class that is bound to no name (it came with an instance only) goes back by value; cloudpickle
    gives it the tracker id that it came with, by which the notebook knows its own.
    """
    # cloudpickle registers every class that it rebuilds; nothing of the job's own is there yet.
    module = sys.modules.get("cloudpickle.cloudpickle")
    tracked = getattr(module, "_DYNAMIC_CLASS_TRACKER_BY_CLASS", None)
    if not tracked:
        return
    pending = list(namespace.items())
    while pending:
        path, value = pending.pop()
        if not isinstance(value, type) or value not in tracked or value in _from_notebook:
            continue
        if value.__module__ == "__main__" and value.__name__ == path.rpartition(".")[2]:
            _from_notebook[value] = path
            pending += [(f"{path}.{name}", inner) for name, inner in vars(value).items()]


def dump(value: Any, file: _Writable) -> bool:
    """Pickle ``value`` into ``file``; return whether accelerator tensors became CPU tensors."""
    pickler = _pickler_class()(file, protocol=PROTOCOL)
    pickler.dump(value)
    return bool(pickler.moved)


def dumps(value: Any) -> bytes:
    """Return ``value`` pickled."""
    buffer = io.BytesIO()
    dump(value, buffer)
    return buffer.getvalue()


@functools.cache
def _pickler_class() -> Any:
    try:
        from cloudpickle import Pickler as Base
    except ImportError:
        Base = pickle.Pickler  # noqa: N806 - it is a class

    class Pickler(Base):  # type: ignore[misc]
        def __init__(self, file: Any, protocol: int) -> None:
            super().__init__(file, protocol)
            self.moved = False

        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, type):
                if value in _from_notebook:
                    return operator.attrgetter(_from_notebook[value]), (_MAIN,)
            elif isinstance(value, BaseException):
                reduced = _reduce_exception(value)
                if reduced is not None:
                    return reduced
            elif isinstance(value, _MainReference):
                return __import__, ("__main__",)
            elif (tensor := _on_cpu(value)) is not None:
                self.moved = True
                return tensor.__reduce_ex__(PROTOCOL)
            inherited = getattr(super(), "reducer_override", None)
            return inherited(value) if inherited is not None else NotImplemented

    return Pickler


class _MainReference:
    """Stands for the module ``__main__`` of whoever unpickles."""


_MAIN = _MainReference()


def _on_cpu(value: Any) -> Any:
    torch = sys.modules.get("torch")
    tensor_class = getattr(torch, "Tensor", None)
    if tensor_class is None or not isinstance(value, tensor_class):
        return None
    if value.device.type in ("cpu", "meta"):
        return None
    moved = value.detach().cpu()
    if isinstance(value, torch.nn.Parameter):  # type: ignore[union-attr]
        return torch.nn.Parameter(moved, requires_grad=value.requires_grad)  # type: ignore[union-attr]
    return moved.requires_grad_(value.requires_grad)


def _reduce_exception(error: BaseException) -> tuple[Any, ...] | None:
    kind = type(error)
    reducer = getattr(kind.__reduce__, "__objclass__", None)
    if not (isinstance(reducer, type) and reducer.__module__ == "builtins"):
        return None  # it says itself how it is pickled
    if "__reduce_ex__" in _python_members(kind):
        return None
    state = {name: each for name, each in vars(error).items() if _can_pickle(each)}
    if error.__cause__ is not None and _can_pickle(error.__cause__):
        state["__cause__"] = error.__cause__
    if not {"__init__", "__new__"} & _python_members(kind):
        reduced: Any = error.__reduce__()
        return reduced[0], reduced[1], state or None
    state["args"] = error.args
    if isinstance(error, OSError):
        state.update(
            (name, each)
            for name in _OS_ERROR_FIELDS
            if (each := getattr(error, name, None)) is not None and name not in state
        )
    return copyreg.__newobj__, (kind, *error.args), state  # type: ignore[attr-defined]


def _python_members(kind: type) -> set[str]:
    """Names that the class or a base of it defines in Python rather than in C."""
    return {
        name
        for base in kind.__mro__
        for name, member in vars(base).items()
        if isinstance(member, (types.FunctionType, staticmethod, classmethod))
    }


def _can_pickle(value: Any) -> bool:
    try:
        dumps(value)
    except BaseException:  # noqa: BLE001 - whatever user code's reduction raises
        return False
    return True
