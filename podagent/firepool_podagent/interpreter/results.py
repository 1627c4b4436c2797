"""Values that a job hands back, each on its own: one that cannot travel never costs the others.

The format is the plainest one that gives back exactly what was there:

* ``json``: None, booleans, 64-bit integers, finite floats, strings, and lists and dicts of these;
* ``npy``: plain numpy arrays of plain types;
* ``arrow``: pyarrow tables (an IPC stream);
* ``cloudpickle`` (protocol 5): everything else.

What is larger than the inline limit is written to ``<results>/<sha256>``.

A value's own code runs while it is encoded, and may raise anything, ``SystemExit`` and
``KeyboardInterrupt`` included: that costs this value and no other. Only an interrupt that was sent
ends the collecting.
"""

from __future__ import annotations

import io
import math
import os
import sys
from base64 import b64encode
from collections.abc import Callable
from hashlib import sha256
from typing import Any

from firepool_podagent.interpreter import pickling
from firepool_podagent.interpreter.errors import text_of
from firepool_podagent.interpreter.streams import write_all
from firepool_podagent.strictjson import ascii_bytes

# Bound here, like the functions of `frames`: a cell may patch the modules that they come from.
_open, _close, _rename, _unlink, _getpid = os.open, os.close, os.rename, os.unlink, os.getpid
_join = os.path.join
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_isfinite = math.isfinite
_BaseException, _type, _length, _view, _bool = BaseException, type, len, memoryview, bool
_bytearray, _any, _all, _int, _float, _str, _list, _dict = (
    *(bytearray, any, all, int, float, str, list, dict),
)

_JSON_NODES = 10_000
_JSON_DEPTH = 50
_NPY_KINDS = "biufcSUMm"
_ERROR_LIMIT = 500


class Collector:
    """Encodes results.

    Parameters
    ----------
    directory
        Where results go that are too large to be inline.
    inline_bytes
        Size up to which a result is inline.
    interrupted
        Whether somebody sent an interrupt.
    """

    def __init__(
        self, directory: str, inline_bytes: int, interrupted: Callable[[], bool] = lambda: False
    ) -> None:
        self._interrupted = interrupted
        self._directory = directory
        self._inline_bytes = inline_bytes
        self.moved: list[str] = []
        """Names whose tensors were moved from an accelerator to the CPU."""

    def collect(self, names: list[str], namespace: dict[str, Any]) -> list[dict[str, Any]]:
        """Return a result for each of ``names``."""
        return [
            self.encode(name, namespace[name])
            if name in namespace
            else failed(name, "", f"the cell did not define {name!r}")
            for name in names
        ]

    def small(self, name: str, value: Any) -> list[dict[str, Any]]:
        """Return a value that nobody asked for by name: only if it is small and can travel."""
        result = self.encode(name, value)
        return [result] if result["data"] is not None else []

    def encode(self, name: str, value: Any) -> dict[str, Any]:
        """Return one value as a result; a value that cannot travel gives a result with an error.

        Raises
        ------
        KeyboardInterrupt
            An interrupt was sent.
        """
        kind = ""
        sink = _Sink(self._directory, self._inline_bytes)
        try:
            kind = type_name(value)
            form = self._write(name, value, sink)
            found = {"name": name, "format": form, "type": kind, "error": None, **sink.finish()}
        except _BaseException as error:
            text = f"{_type(error).__name__}: {text_of(error)}"[:_ERROR_LIMIT]
            found = failed(name, kind, text)
        finally:
            sink.close()
        if self._interrupted():
            raise KeyboardInterrupt
        return found

    def _write(self, name: str, value: Any, sink: _Sink) -> str:
        if is_plain(value):
            sink.write(ascii_bytes(value))
            return "json"
        if _is_plain_array(value):
            import numpy

            numpy.lib.format.write_array(sink, value, allow_pickle=False)
            return "npy"
        if type(value).__module__.startswith("pyarrow") and type(value).__name__ == "Table":
            import pyarrow

            with pyarrow.ipc.new_stream(sink, value.schema) as writer:
                writer.write_table(value)
            return "arrow"
        if pickling.dump(value, sink):
            self.moved.append(name)
        return "cloudpickle"


def failed(name: str, kind: str, error: str) -> dict[str, Any]:
    """Return the result that stands for a value that did not come back."""
    return {
        "name": name,
        "format": "cloudpickle",
        "size_bytes": 0,
        "type": kind,
        "data": None,
        "sha256": None,
        "error": error,
    }


def type_name(value: Any) -> str:
    """Return a value's type as a person would write it."""
    kind = type(value)
    module = kind.__module__
    return (
        kind.__qualname__ if module in ("builtins", "__main__") else f"{module}.{kind.__qualname__}"
    )


def is_plain(value: Any) -> bool:
    """Return whether JSON gives back exactly this value."""
    budget = [_JSON_NODES]
    return _is_plain(value, budget, 0)


def _is_plain(value: Any, budget: list[int], depth: int) -> bool:
    budget[0] -= 1
    if budget[0] < 0 or depth > _JSON_DEPTH:
        return False
    kind = _type(value)
    if value is None or kind is _bool:
        return True
    if kind is _int:
        return _bool(-(2**63) <= value < 2**63)
    if kind is _float:
        return _isfinite(value)
    if kind is _str:
        return _bool(value.isascii()) or not _any("\ud800" <= each <= "\udfff" for each in value)
    if kind is _list:
        return _all(_is_plain(each, budget, depth + 1) for each in value)
    if kind is _dict:
        return _all(
            _type(key) is _str
            and _is_plain(key, budget, depth + 1)
            and _is_plain(each, budget, depth + 1)
            for key, each in value.items()
        )
    return False


def _is_plain_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    if numpy is None or type(value) is not getattr(numpy, "ndarray", None):
        return False
    dtype = value.dtype
    return bool(dtype.kind in _NPY_KINDS and dtype.fields is None and dtype.metadata is None)


class _Sink(io.RawIOBase):
    """A file that stays in memory while it is small, and knows its digest."""

    def __init__(self, directory: str, inline_bytes: int) -> None:
        self._directory = directory
        self._inline_bytes = inline_bytes
        self._digest = sha256()
        self._buffer = _bytearray()
        self._size = 0
        self._fd = -1
        self._path = ""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = _view(data).cast("B")
        self._digest.update(view)
        self._size += view.nbytes
        if self._fd < 0 and self._size > self._inline_bytes:
            path = _join(self._directory, f".result-{_getpid()}")  # one at a time
            self._fd = _open(path, _NEW_FILE, 0o600)
            self._path = path
            write_all(self._fd, self._buffer)
            self._buffer.clear()
        if self._fd < 0:
            self._buffer += view
        else:
            write_all(self._fd, view)
        return view.nbytes

    def finish(self) -> dict[str, Any]:
        """Return the result's size and its data or digest; the file has its final name then."""
        if self._fd < 0:
            data = b64encode(self._buffer).decode("ascii")
            return {"size_bytes": self._size, "data": data, "sha256": None}
        digest = self._digest.hexdigest()
        _rename(self._path, _join(self._directory, digest))
        self._path = ""
        return {"size_bytes": self._size, "data": None, "sha256": digest}

    def close(self) -> None:
        if self._fd >= 0:
            _close(self._fd)
            self._fd = -1
        if self._path:
            _unlink(self._path)
            self._path = ""
        super().close()
