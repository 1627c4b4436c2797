"""Write the references that are made from the code: the API's description and the configuration.

Run ``python docs/generate_reference.py`` after a change of the API's types, its routes or the
configuration; a test fails while a file is out of date.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from firepool_broker import config
from firepool_broker.api.openapi import document
from firepool_broker.docstrings import field_texts
from msgspec import NODEFAULT, Struct, structs

REFERENCE = Path(__file__).parent / "reference"

_INTRODUCTION = """\
# Configuration of the broker

Made from `firepool_broker/config.py` by `python docs/generate_reference.py`; not to be edited.

The broker needs no configuration. A file is named with `firepool broker serve --config FILE`, or
by `FIREPOOL_CONFIG`. It is YAML. A setting that does not exist is refused with the nearest one that
does; a combination that is not safe is refused naming both settings. Durations are seconds, or text
such as `10m` or `1h 30m`. What can be switched off takes the word `off`.
"""


def references() -> dict[Path, str]:
    """Return the text of each generated file."""
    return {
        REFERENCE / "openapi.json": json.dumps(document(), indent=1, ensure_ascii=False) + "\n",
        REFERENCE / "configuration.md": _configuration(),
    }


def _configuration() -> str:
    parts = [_INTRODUCTION, _section("", config.BrokerConfig, "The whole file")]
    return "\n".join(parts)


def _section(path: str, kind: type[Struct], title: str) -> str:
    hints = get_type_hints(kind)
    texts = field_texts(kind)
    lines = [f"## {title}", "", str(kind.__doc__), ""]
    lines += ["| setting | type | default | meaning |", "|---|---|---|---|"]
    nested: list[str] = []
    for field in structs.fields(kind):
        name = f"{path}{field.encode_name}"
        hint = hints[field.name]
        inner, inner_path = _inner(hint, name)
        if inner is not None:
            nested.append(_section(f"{inner_path}.", inner, f"`{inner_path}`"))
        text = texts[field.name].replace("|", "\\|")
        lines.append(f"| `{name}` | {_type(hint)} | {_default(field)} | {text} |")
    return "\n".join([*lines, "", *nested])


def _inner(hint: Any, name: str) -> tuple[type[Struct] | None, str]:
    if isinstance(hint, type) and issubclass(hint, Struct):
        return hint, name
    if get_origin(hint) is dict:
        return get_args(hint)[1], f"{name}.NAME"
    return None, name


def _type(hint: Any) -> str:
    if hint is config.Seconds:
        return "duration"
    if hint is config.SecondsOrOff:
        return "duration or `off`"
    if hint is type(None):
        return "nothing"
    if isinstance(hint, type) and issubclass(hint, Struct):
        return "section"
    origin = get_origin(hint)
    if origin is dict:
        return "sections by name"
    if origin is list:
        return f"list of {_type(get_args(hint)[0])}"
    if origin is Literal:
        return " or ".join(f"`{word}`" for word in get_args(hint))
    if origin is not None:
        return " or ".join(_type(each) for each in get_args(hint) if each is not type(None))
    return {"str": "text", "int": "whole number", "float": "number", "bool": "true or false"}[
        hint.__name__
    ]


def _default(field: structs.FieldInfo) -> str:
    default = field.default
    if default is NODEFAULT:
        return "none"
    if isinstance(default, Struct):
        return "see below"
    if default is None or default == "":
        return "–"
    if isinstance(default, (config.Seconds, config.SecondsOrOff)):
        return "`off`" if math.isinf(default) else f"`{_duration(float(default))}`"
    return f"`{default}`"


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("m", 60.0)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g}{unit}"
    return f"{seconds:g}s"


if __name__ == "__main__":
    REFERENCE.mkdir(exist_ok=True)
    for path, text in references().items():
        path.write_text(text, encoding="utf-8")
