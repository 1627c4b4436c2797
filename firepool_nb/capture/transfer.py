"""How single values travel: inputs asked for by ``-i`` and results asked for by ``-o``.

Plain numpy arrays go as ``npy``, Arrow tables as ``arrow``, everything else as cloudpickle. A
large value is written once, into a spool file from which the broker takes it by hard link when it
is on this machine; its digest is computed while it is written. Nothing is held in memory twice.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import IO, Any

from . import returning
from .pickling import LimitedFile

__all__ = ["Spool", "Spooled", "decode", "encode"]

INLINE_BYTES = 64 * 1024
_CHUNK_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class Spooled:
    """An encoded value: small ones as bytes, large ones in a file.

    Attributes
    ----------
    name, format
        The variable and how it is encoded.
    size_bytes, sha256
        Of the encoded value.
    data
        The bytes when they travel inline.
    path
        The file otherwise; whoever uploads it removes it.
    """

    name: str
    format: str
    size_bytes: int
    sha256: str
    data: bytes | None
    path: str | None

    def request_input(self) -> dict[str, Any]:
        """Describe it as an input of a job."""
        body: dict[str, Any] = {"kind": "value", "name": self.name, "format": self.format}
        if self.data is not None:
            body["data"] = base64.b64encode(self.data).decode()
        else:
            body["blob"] = self.sha256
        return body


class Spool:
    """Where large values are written before they are uploaded.

    Parameters
    ----------
    folder
        A private folder, best on the broker's own file system; None uses the temporary one.
    """

    def __init__(self, folder: str | None = None) -> None:
        self._folder = folder

    @contextlib.contextmanager
    def file(self) -> Iterator[tuple[IO[bytes], str]]:
        """Open a new file for writing; it is removed again when something fails."""
        if self._folder is not None:
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
        descriptor, path = tempfile.mkstemp(prefix="value-", dir=self._folder)
        try:
            with open(descriptor, "wb") as file:
                yield file, path
                os.fchmod(file.fileno(), 0o400)  # what nobody may change is linked, not copied
        except BaseException:
            os.unlink(path)
            raise


def encode(
    name: str,
    value: object,
    *,
    limit_bytes: int,
    spool: Spool,
    pickle_to: Callable[[Any, object], None],
) -> Spooled:
    """Encode one value.

    Parameters
    ----------
    name
        The variable.
    limit_bytes
        At most this many bytes are written.
    pickle_to
        Writes the cloudpickle of a value to a file.

    Raises
    ------
    LimitExceeded
        When the encoded value is larger than the limit; the spool file is gone again.
    """
    kind, write = _writer(value, pickle_to)
    with spool.file() as (file, path):
        target = LimitedFile(file, limit_bytes)
        write(target, value)
    if target.size_bytes <= INLINE_BYTES:
        with open(path, "rb") as written:
            data = written.read()
        os.unlink(path)
        return Spooled(name, kind, target.size_bytes, target.sha256(), data, None)
    return Spooled(name, kind, target.size_bytes, target.sha256(), None, path)


def _writer(
    value: Any, pickle_to: Callable[[Any, object], None]
) -> tuple[str, Callable[[Any, Any], None]]:
    numpy = sys.modules.get("numpy")
    if numpy is not None and type(value) is numpy.ndarray and not value.dtype.hasobject:
        return "npy", _write_npy
    arrow = sys.modules.get("pyarrow")
    if arrow is not None and type(value) is arrow.Table:
        return "arrow", _write_arrow
    return "cloudpickle", pickle_to


def _write_npy(file: LimitedFile, array: Any) -> None:
    import numpy

    contiguous = array.flags.c_contiguous or array.flags.f_contiguous
    plain = contiguous and array.dtype.kind not in "mMV"  # those have no buffer of their own
    header: Any = io.BytesIO()
    description = numpy.lib.format.header_data_from_array_1_0(array)
    try:
        numpy.lib.format.write_array_header_1_0(header, description)
    except ValueError:  # a description of more than 64 KiB
        numpy.lib.format.write_array_header_2_0(header, description)
    if not plain:
        numpy.lib.format.write_array(file, array, allow_pickle=False)
        return
    file.write(header.getvalue())
    flat = array if array.flags.c_contiguous else array.T
    if not flat.size:
        return
    view = memoryview(flat).cast("B")
    for start in range(0, len(view), _CHUNK_BYTES):
        file.write(view[start : start + _CHUNK_BYTES])


def _write_arrow(file: LimitedFile, table: Any) -> None:
    import pyarrow

    with pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)


def decode(
    result: dict[str, Any],
    source: bytes | str,
    namespace: MutableMapping[str, Any] | None = None,
) -> Any:
    """Turn a result back into a value.

    Parameters
    ----------
    result
        The result as the broker described it.
    source
        Its bytes, or the path of a file that holds them.
    namespace
        The notebook's namespace, for functions and classes that come home.

    Raises
    ------
    ValueError
        When the format is not known here.
    """
    kind = result["format"]
    with contextlib.ExitStack() as stack:
        file: IO[bytes]
        if isinstance(source, str):
            file = stack.enter_context(open(source, "rb"))
        else:
            file = io.BytesIO(source)
        if kind == "cloudpickle":
            return returning.load(file, namespace)
        if kind == "json":
            return json.load(file)
        if kind == "npy":
            import numpy

            return numpy.load(file, allow_pickle=False)
        if kind == "arrow":
            import pyarrow

            return pyarrow.ipc.open_stream(file).read_all()
    raise ValueError(f"result {result['name']!r} has the unknown format {kind!r}")


def digest(data: bytes) -> str:
    """Return the SHA-256 of some bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()
