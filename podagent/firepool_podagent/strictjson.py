"""JSON that every reader accepts: what Python's own encoder writes is not always that.

``json.dumps`` writes ``NaN`` and ``Infinity``, lone surrogates and numbers without end, which
strict readers refuse. Here non-finite floats become null, lone surrogates U+FFFD, keys strings, and
what JSON has no form for its own text.

Everything is bound when the module is imported: a cell may patch ``json`` or the built-in functions
and is heard all the same.
"""

from __future__ import annotations

import json
import math
from typing import Any

DEPTH_LIMIT = 200
"""Nesting that readers of any kind bear; anything deeper is replaced by a note of it."""

_INTEGER_BITS = 1024
_TOO_DEEP = "<nested too deeply>"

_ascii = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
_plain = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode
_isfinite = math.isfinite
_bool, _dict, _float, _int, _list, _str, _type = bool, dict, float, int, list, str, type
_isinstance, _tuple, _repr, _id = isinstance, tuple, repr, id


def ascii_bytes(value: Any) -> bytes:
    """Return a value as JSON in ASCII; lone surrogates stay, as escapes."""
    try:
        return _ascii(value).encode("ascii")
    except (TypeError, ValueError, RecursionError):
        return _ascii(portable(value)).encode("ascii")


def utf8_bytes(value: Any) -> bytes:
    """Return a value as JSON in UTF-8, without anything that a strict reader refuses."""
    try:
        text = _plain(value)
    except (TypeError, ValueError, RecursionError):
        text = _plain(portable(value))
    try:
        return text.encode()
    except UnicodeEncodeError:  # a lone surrogate is no character
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()


def portable(value: Any, depth: int = 0) -> Any:
    """Return a copy of a value that has an exact form in JSON."""
    if value is None or value is True or value is False:
        return value
    if _isinstance(value, _str):
        return _str.__str__(value)
    if _isinstance(value, _float):
        return _float(value) if _isfinite(value) else None
    if _isinstance(value, _int):
        return int.__int__(value) if value.bit_length() <= _INTEGER_BITS else None
    if depth >= DEPTH_LIMIT:
        return _TOO_DEEP
    if _isinstance(value, _dict):
        return {_key(name): portable(each, depth + 1) for name, each in value.items()}
    if _isinstance(value, (_list, _tuple)):
        return [portable(each, depth + 1) for each in value]
    try:
        return _repr(value)
    except Exception:  # noqa: BLE001 - an object decides itself what its text does
        return f"<{_type(value).__name__}>"


def _key(name: Any) -> str:
    if _isinstance(name, _str):
        return _str.__str__(name)
    found = portable(name)
    return found if _type(found) is _str else _plain(found)


def is_shallow(value: Any) -> bool:
    """Tell whether a decoded value is nested no deeper than `DEPTH_LIMIT`."""
    level = [value]
    for _ in range(DEPTH_LIMIT):
        inner: list[Any] = []
        for each in level:
            if type(each) is dict:
                inner.extend(found for found in each.values() if type(found) in (dict, list))
            elif type(each) is list:
                inner.extend(found for found in each if type(found) in (dict, list))
        if not inner:
            return True
        level = inner
    return False
