"""Unpickle what a pod sends back as objects of the notebook.

A class of the notebook travels by value, so what comes back is an instance of a copy, unless the
copy is recognised. Classes carry a tracker id with them (cloudpickle's); one that is known here is
replaced by the notebook's own class, which also keeps its own attributes: ``isinstance``, ``==``
and ``Color.RED is`` hold for what returns. Functions of the pod's ``__main__`` get the notebook's
globals again and never overwrite a name that exists here.
"""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Callable, MutableMapping
from typing import IO, Any

from cloudpickle import cloudpickle as _cloudpickle

__all__ = ["load", "loads"]


def loads(data: bytes, namespace: MutableMapping[str, Any] | None = None) -> Any:
    """Unpickle bytes that a pod sent; see `load`."""
    return load(io.BytesIO(data), namespace)


def load(file: IO[bytes], namespace: MutableMapping[str, Any] | None = None) -> Any:
    """Unpickle a value that a pod sent.

    Parameters
    ----------
    file
        The pickle.
    namespace
        The notebook's namespace, which functions of the pod's ``__main__`` are bound to.
    """
    return _Unpickler(file, namespace).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], namespace: MutableMapping[str, Any] | None) -> None:
        super().__init__(file)
        self._namespace = namespace
        self._known: set[type] = set()
        self._replacements: dict[str, Callable[..., Any]] = {
            "_make_skeleton_class": self._skeleton,
            "_make_skeleton_enum": self._skeleton_enum,
            "_class_setstate": self._class_setstate,
            "_make_function": self._make_function,
            "_function_setstate": self._function_setstate,
        }

    def find_class(self, module: str, name: str) -> Any:
        if module == "cloudpickle.cloudpickle" and name in self._replacements:
            return self._replacements[name]
        if self._namespace is not None and module == "builtins" and name == "vars":
            return self._vars
        return super().find_class(module, name)

    def _vars(self, obj: Any) -> Any:
        return self._namespace if getattr(obj, "__name__", None) == "__main__" else vars(obj)

    def _own_class(self, tracker_id: Any) -> type | None:
        known: type | None = None
        if tracker_id is not None:
            known = _cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker_id)
        if known is not None:
            self._known.add(known)
        return known

    def _skeleton(
        self,
        constructor: Any,
        name: str,
        bases: Any,
        type_kwargs: Any,
        tracker_id: Any,
        extra: Any,
    ) -> Any:
        own = self._own_class(tracker_id)
        if own is not None:
            return own
        return _cloudpickle._make_skeleton_class(
            constructor, name, bases, type_kwargs, tracker_id, extra
        )

    def _skeleton_enum(
        self,
        bases: Any,
        name: str,
        qualname: str,
        members: Any,
        module: str,
        tracker_id: Any,
        extra: Any,
    ) -> Any:
        own = self._own_class(tracker_id)
        if own is not None:
            return own
        return _cloudpickle._make_skeleton_enum(
            bases, name, qualname, members, module, tracker_id, extra
        )

    def _class_setstate(self, obj: Any, state: Any) -> Any:
        return obj if obj in self._known else _cloudpickle._class_setstate(obj, state)

    def _make_function(
        self, code: Any, globals_: dict[str, Any], name: Any, defaults: Any, closure: Any
    ) -> Any:
        if self._is_main(globals_):
            globals_ = self._namespace  # type: ignore[assignment]
            return types.FunctionType(code, globals_, name, defaults, closure)
        return _cloudpickle._make_function(code, globals_, name, defaults, closure)

    def _function_setstate(self, obj: Any, state: Any) -> None:
        here = self._namespace
        if here is not None and obj.__globals__ is here:
            attributes, slots = state
            travelled = slots["__globals__"]
            missing = {name: value for name, value in travelled.items() if name not in here}
            _cloudpickle._function_setstate(obj, (attributes, {**slots, "__globals__": missing}))
            return
        _cloudpickle._function_setstate(obj, state)

    def _is_main(self, globals_: dict[str, Any]) -> bool:
        if self._namespace is None:
            return False
        return globals_ is self._namespace or globals_.get("__name__") == "__main__"
