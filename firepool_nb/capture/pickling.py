"""Pickle what a cell reads, by value, within a limit and without a second copy.

`NotebookPickler` is cloudpickle with three differences:

* functions and classes of the notebook get the *pod's* ``__main__`` as their globals, so that they
  see what the remote cell binds, exactly as they would here;
* the notebook's own machinery (``In``, ``Out``, ``get_ipython``, history) never travels with them;
* locks, open files, generators, sockets, threads and the like are refused with the object itself
  in the error, whatever reduction somebody registered for them: a copy of them would not be them.

It notes every module that the pickle refers to by name, so that the person's own ones can be sent
along. `LimitedBuffer` and `LimitedFile` abort at a limit while they are being written, so that a
huge value is found out after the limit's worth of bytes and not after a copy of all of it.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import multiprocessing.connection
import queue
import socket
import sqlite3
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import IO, Any

import cloudpickle
from cloudpickle import cloudpickle as _cloudpickle

__all__ = [
    "LimitExceeded",
    "LimitedBuffer",
    "LimitedFile",
    "NotebookPickler",
    "RefusedObject",
    "refusal",
]

_REFUSED: tuple[tuple[Any, str], ...] = (
    ((type(threading.Lock()), type(threading.RLock())), "a lock lives in one process"),
    (
        (threading.Condition, threading.Event, threading.Semaphore, threading.Barrier),
        "a lock lives in one process",
    ),
    (threading.Thread, "a thread lives in one process"),
    (
        (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType),
        "what it has left to do cannot be copied; turn it into a list first",
    ),
    (io.IOBase, "an open file belongs to this process; open it in the cell instead"),
    (socket.socket, "a socket belongs to this process; connect in the cell instead"),
    (multiprocessing.connection.Connection, "a connection belongs to this process"),
    (subprocess.Popen, "a child process belongs to this process"),
    (sqlite3.Connection, "a database connection belongs to this process; connect in the cell"),
    ((asyncio.Future, asyncio.AbstractEventLoop), "an event loop lives in one thread"),
    ((queue.Queue, queue.SimpleQueue), "a queue between threads lives in one process"),
    (types.FrameType, "a frame belongs to the code that runs in it"),
    (types.TracebackType, "a traceback holds the frames of this process"),
    (weakref.ref, "a weak reference means an object of this process"),
)
_COPYABLE_FILES = (io.BytesIO, io.StringIO)


class LimitExceeded(Exception):
    """More bytes than the limit were written."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"more than {limit_bytes} bytes")
        self.limit_bytes = limit_bytes


class RefusedObject(TypeError):
    """An object that cannot travel.

    Attributes
    ----------
    value
        The object.
    reason
        Why, for people.
    """

    def __init__(self, value: object, reason: str) -> None:
        super().__init__(f"{type(value).__name__}: {reason}")
        self.value = value
        self.reason = reason


def refusal(value: object) -> str | None:
    """Say why an object cannot travel, or None when nothing is known against it."""
    if isinstance(value, type):
        return None
    for kinds, reason in _REFUSED:
        if isinstance(value, kinds):
            return None if isinstance(value, _COPYABLE_FILES) else reason
    return None


class LimitedBuffer(io.RawIOBase):
    """Collects bytes in memory up to a limit; with ``keep=False`` it only counts them."""

    def __init__(self, limit_bytes: int, keep: bool = True) -> None:
        super().__init__()
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self._parts: list[bytes] | None = [] if keep else None

    def writable(self) -> bool:
        """Pickles are written here."""
        return True

    def write(self, data: Any) -> int:
        """Take some bytes.

        Raises
        ------
        LimitExceeded
            When they would be more than the limit; nothing of them is copied then.
        """
        size: int = data.nbytes if isinstance(data, memoryview) else len(data)
        self.size_bytes += size
        if self.size_bytes > self.limit_bytes:
            raise LimitExceeded(self.limit_bytes)
        if self._parts is not None:
            self._parts.append(bytes(data))
        return size

    def value(self) -> bytes:
        """Return everything written."""
        return b"".join(self._parts or [])


class LimitedFile(io.RawIOBase):
    """Writes to a file up to a limit and knows the SHA-256 of what was written."""

    def __init__(self, file: IO[bytes], limit_bytes: int) -> None:
        super().__init__()
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self._file = file
        self._hash = hashlib.sha256()

    def writable(self) -> bool:
        """Pickles are written here."""
        return True

    def write(self, data: Any) -> int:
        """Take some bytes.

        Raises
        ------
        LimitExceeded
            When they would be more than the limit.
        """
        view = memoryview(data).cast("B") if not isinstance(data, bytes) else data
        size = len(view)
        self.size_bytes += size
        if self.size_bytes > self.limit_bytes:
            raise LimitExceeded(self.limit_bytes)
        self._hash.update(view)
        self._file.write(view)
        return size

    def sha256(self) -> str:
        """Return the digest of everything written, in hexadecimal."""
        return self._hash.hexdigest()


class _PodMain:
    """Stands for the globals of the pod's ``__main__`` in a pickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        # two plain builtins, so that a pod needs nothing of this package to load it
        return vars, (sys.modules["__main__"],)


class NotebookPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickle values of one namespace for the ``__main__`` of another process.

    Parameters
    ----------
    file
        Where to write; anything with ``write``.
    namespace
        The notebook's namespace. Functions whose globals are this very dict are rebound.
    hidden
        Names of the namespace that never travel with a function.
    label
        Names a file of code as tracebacks in the pod should show it.

    Attributes
    ----------
    modules
        Names of the modules that the pickle refers to.
    files
        Files that the code in the pickle came from, with their labels.
    """

    def __init__(
        self,
        file: Any,
        namespace: Mapping[str, Any] | None = None,
        hidden: Collection[str] = (),
        label: Callable[[str], str] = str,
    ) -> None:
        super().__init__(file, protocol=5)
        self.modules: set[str] = set()
        self.files: dict[str, str] = {}
        self._label = label
        self._namespace = namespace
        self._hidden = hidden
        self._pod_main = _PodMain()

    def reducer_override(self, obj: Any) -> Any:
        """Refuse what cannot travel and note what is referred to by name."""
        kind = type(obj)
        if kind is types.CodeType:
            return self._reduce_code(obj)
        if kind is types.ModuleType:
            self.modules.add(obj.__name__)
        elif kind is types.FunctionType or issubclass(kind, type):
            module = getattr(obj, "__module__", None)
            if isinstance(module, str) and module != "__main__":
                self.modules.add(module)
        else:
            reason = refusal(obj)
            if reason is not None:
                raise RefusedObject(obj, reason)
        return super().reducer_override(obj)

    def _reduce_code(self, code: types.CodeType) -> tuple[Any, ...]:
        """Keep the file name, which cloudpickle replaces and tracebacks need."""
        label = self.files.get(code.co_filename)
        if label is None:
            label = self.files[code.co_filename] = self._label(code.co_filename)
        constructor, arguments, *rest = _cloudpickle._code_reduce(code)
        replaced = ("<dynamic-code>", code.co_filename)
        arguments = tuple(
            label if isinstance(each, str) and each in replaced else each for each in arguments
        )
        return (constructor, arguments, *rest)

    def _function_getnewargs(self, func: Any) -> Any:
        arguments = super()._function_getnewargs(func)
        if self._namespace is None or func.__globals__ is not self._namespace:
            return arguments
        code, _, *rest = arguments
        return (code, self._pod_main, *rest)

    def _dynamic_function_reduce(self, func: Any) -> Any:
        reduced = super()._dynamic_function_reduce(func)
        if self._hidden and func.__globals__ is self._namespace:
            globals_ = reduced[2][1]["__globals__"]
            for name in self._hidden:
                globals_.pop(name, None)
        return reduced
