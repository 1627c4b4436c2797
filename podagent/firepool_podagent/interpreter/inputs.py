"""Values that travel into a job."""

from __future__ import annotations

import base64
import io
import json
import pickle
from collections.abc import Callable
from contextlib import closing
from typing import Any, BinaryIO

from firepool_podagent.interpreter import pickling, plain

SOURCES = "__firepool_sources__"
"""A ``value`` input of this name is not bound: it is a dict of file name to source text, for the
tracebacks of functions that were defined in the notebook."""


class InputError(Exception):
    """A value could not be rebuilt here; names the input."""


def bind(inputs: list[dict[str, Any]], blobs: dict[str, str], namespace: dict[str, Any]) -> Any:
    """Put the inputs into ``namespace``; return the ``call`` input's value, or None.

    Parameters
    ----------
    inputs
        As in the attempt: kind, format, and data (base64) or a blob's digest.
    blobs
        Paths of the blobs by digest; they are read once, straight into the value.

    Raises
    ------
    InputError
        Names the input that could not be rebuilt and why.
    """
    call = None
    for each in inputs:
        label = each.get("name") or ", ".join(each.get("names") or ()) or each["kind"]
        try:
            with closing(_open(each, blobs)) as file:
                value = _LOADERS[each["format"]](file)
        except Exception as error:
            raise InputError(
                f"cannot rebuild {label} in the pod: {type(error).__name__}: {error}"
            ) from error
        if each["kind"] == "namespace":
            namespace.update(value)
        elif each.get("name") == SOURCES:
            plain.remember_sources(value)
        elif each["kind"] == "value":
            namespace[each["name"]] = value
        else:
            call = value
    pickling.remember_classes(namespace)
    return call


def _open(item: dict[str, Any], blobs: dict[str, str]) -> BinaryIO:
    if item.get("blob"):
        return open(blobs[item["blob"]], "rb")
    return io.BytesIO(base64.b64decode(item["data"]))


def _load_npy(file: BinaryIO) -> Any:
    import numpy

    return numpy.load(file, allow_pickle=False)


def _load_arrow(file: BinaryIO) -> Any:
    import pyarrow

    return pyarrow.ipc.open_stream(file).read_all()


_LOADERS: dict[str, Callable[[BinaryIO], Any]] = {
    "cloudpickle": pickle.load,
    "json": json.load,
    "npy": _load_npy,
    "arrow": _load_arrow,
}
