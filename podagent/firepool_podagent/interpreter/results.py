"""Values that a job hands back, each on its own: one that cannot travel never costs the others.

The format is the plainest one that gives back exactly what was there:

* ``json``: None, booleans, 64-bit integers, finite floats, strings, and lists and dicts of these;
* ``npy``: plain numpy arrays of plain types;
* ``arrow``: pyarrow tables (an IPC stream);
* ``cloudpickle`` (protocol 5): everything else.

What is larger than the inline limit is written to ``<results>/<sha256>``.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import os
import sys
import tempfile
from typing import Any

from firepool_podagent.interpreter import pickling
from firepool_podagent.interpreter.streams import write_all

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
    """

    def __init__(self, directory: str, inline_bytes: int) -> None:
        self._directory = directory
        self._inline_bytes = inline_bytes
        self.moved: list[str] = []
        """Names whose tensors were moved from an accelerator to the CPU."""

    def collect(self, names: list[str], namespace: dict[str, Any]) -> list[dict[str, Any]]:
        """Return a result for each of ``names``."""
        return [
            self.encode(name, namespace[name])
            if name in namespace
            else _failed(name, "", f"the cell did not define {name!r}")
            for name in names
        ]

    def small(self, name: str, value: Any) -> list[dict[str, Any]]:
        """Return a value that nobody asked for by name: only if it is small and can travel."""
        result = self.encode(name, value)
        return [result] if result["data"] is not None else []

    def encode(self, name: str, value: Any) -> dict[str, Any]:
        """Return one value as a result; a value that cannot travel gives a result with an error."""
        kind = type_name(value)
        sink = _Sink(self._directory, self._inline_bytes)
        try:
            form = self._write(name, value, sink)
            return {"name": name, "format": form, "type": kind, "error": None, **sink.finish()}
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 - a value's own reduction may raise anything
            return _failed(name, kind, f"{type(error).__name__}: {error}"[:_ERROR_LIMIT])
        finally:
            sink.close()

    def _write(self, name: str, value: Any, sink: _Sink) -> str:
        if is_plain(value):
            sink.write(json.dumps(value, ensure_ascii=True).encode("ascii"))
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


def _failed(name: str, kind: str, error: str) -> dict[str, Any]:
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
    kind = type(value)
    if value is None or kind is bool:
        return True
    if kind is int:
        return bool(-(2**63) <= value < 2**63)
    if kind is float:
        return math.isfinite(value)
    if kind is str:
        return bool(value.isascii()) or not any("\ud800" <= each <= "\udfff" for each in value)
    if kind is list:
        return all(_is_plain(each, budget, depth + 1) for each in value)
    if kind is dict:
        return all(
            type(key) is str
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
        self._digest = hashlib.sha256()
        self._buffer = bytearray()
        self._size = 0
        self._fd = -1
        self._path = ""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._digest.update(view)
        self._size += len(view)
        if self._fd < 0 and self._size > self._inline_bytes:
            self._fd, self._path = tempfile.mkstemp(dir=self._directory, prefix=".result-")
            write_all(self._fd, self._buffer)
            self._buffer.clear()
        if self._fd < 0:
            self._buffer += view
        else:
            write_all(self._fd, view)
        return len(view)

    def finish(self) -> dict[str, Any]:
        """Return the result's size and its data or digest; the file has its final name then."""
        if self._fd < 0:
            data = base64.b64encode(self._buffer).decode("ascii")
            return {"size_bytes": self._size, "data": data, "sha256": None}
        digest = self._digest.hexdigest()
        os.rename(self._path, os.path.join(self._directory, digest))
        self._path = ""
        return {"size_bytes": self._size, "data": None, "sha256": digest}

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._path:
            os.unlink(self._path)
            self._path = ""
        super().close()
