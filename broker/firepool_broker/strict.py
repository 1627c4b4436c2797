"""Strict decoding: unknown fields are refused by name, with the nearest known one.

The contract: whatever does not decode raises ``NotStrict`` with the path of the field at fault.
The API and the configuration decode through here, so both say the same words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
Hook = Callable[[type, Any], Any]

_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`", re.DOTALL)
_NOT_AMONG = re.compile(r"Invalid enum value '?(?P<value>.*?)'?", re.DOTALL)
_PLACE = re.compile(r" - at `(?:key in )?\$(?P<path>.*)`$", re.DOTALL)


class NotStrict(ValueError):
    """A document that does not decode.

    Parameters
    ----------
    message
        What is wrong and, for an unknown field, the nearest known one.
    field
        Path of the field at fault; ``None`` for the document as a whole.
    unknown
        The field does not exist.
    """

    def __init__(self, message: str, field: str | None, *, unknown: bool = False) -> None:
        super().__init__(message)
        self.field = field
        self.unknown = unknown


def decode(data: bytes, kind: type[T]) -> T:
    """Decode JSON; raises ``NotStrict``."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _explained(str(error), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotStrict(f"the body is not JSON: {error}", None) from None


def convert(value: object, kind: type[T], hook: Hook | None = None) -> T:
    """Convert plain objects (from YAML); raises ``NotStrict``."""
    try:
        return msgspec.convert(value, type=kind, dec_hook=hook)
    except msgspec.ValidationError as error:
        raise _explained(str(error), kind) from None


def unknown_name(name: str, known: Iterable[str], what: str, path: str = "") -> NotStrict:
    """Return the refusal of a name that does not exist."""
    message = f"unknown {what} {name!r}{_hint(name, known)}"
    return NotStrict(message, _joined(path, name), unknown=True)


def _hint(word: str, known: Iterable[str]) -> str:
    """Return a question after the nearest known word, nothing when none is near."""
    import difflib  # only refusals need it

    nearest = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def _explained(message: str, kind: type) -> NotStrict:
    place = _PLACE.search(message)
    path = place.group("path").lstrip(".") if place else ""
    reason = message[: place.start()] if place else message
    if unknown := _UNKNOWN.fullmatch(reason):
        known = _fields_at(kind, path)
        where = unknown_name(unknown.group("name"), known, "field", path)
        suffix = f" (in {path})" if path else ""
        return NotStrict(f"{where}{suffix}", where.field, unknown=True)
    if missing := _MISSING.fullmatch(reason):
        name = _joined(path, missing.group("name"))
        return NotStrict(f"field {name!r} is missing", name)
    if value := _NOT_AMONG.fullmatch(reason):
        words = _words_at(kind, path)
        word = value.group("value")
        hint = _hint(word, words)
        return NotStrict(f"field {path!r}: {word!r} is none of {', '.join(words)}{hint}", path)
    reason = reason[:1].lower() + reason[1:]
    return NotStrict(f"field {path!r}: {reason}" if path else f"the body: {reason}", path or None)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _fields_at(kind: type, path: str) -> list[str]:
    """Return the names of the fields that exist where ``path`` leads."""
    from msgspec import inspect  # only refusals need it

    return [
        field.encode_name
        for each in _types_at(kind, path)
        if isinstance(each, inspect.StructType)
        for field in each.fields
    ]


def _words_at(kind: type, path: str) -> list[str]:
    """Return the words that may stand where ``path`` leads."""
    from msgspec import inspect

    return [
        str(value)
        for each in _types_at(kind, path)
        if isinstance(each, inspect.LiteralType)
        for value in each.values
    ]


def _types_at(kind: type, path: str) -> list[Any]:
    """Return the types of what stands where ``path`` leads."""
    from msgspec import inspect

    current: list[Any] = [inspect.type_info(kind)]
    for step in re.findall(r"\[[^\]]*\]|[^.\[\]]+", path):
        following: list[Any] = []
        for each in _alternatives(current):
            if isinstance(each, inspect.StructType) and not step.startswith("["):
                following += [field.type for field in each.fields if field.encode_name == step]
            elif isinstance(each, inspect.DictType):
                following.append(each.value_type)
            elif isinstance(each, inspect.ListType):
                following.append(each.item_type)
        current = following
    return _alternatives(current)


def _alternatives(types: Iterable[Any]) -> list[Any]:
    """Return the types with unions taken apart."""
    from msgspec import inspect

    flat: list[Any] = []
    for each in types:
        flat += _alternatives(each.types) if isinstance(each, inspect.UnionType) else [each]
    return flat
