"""Write the references that are made from the code: API, configuration, magics, command line.

Run ``python docs/generate_reference.py`` after a change of the API's types, its routes, the
configuration or an option; a test fails while a file is out of date.
"""

from __future__ import annotations

import inspect
import json
import math
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click
from firepool_broker import config
from firepool_broker.api import errors
from firepool_broker.api.openapi import document
from firepool_broker.docstrings import field_texts
from msgspec import NODEFAULT, Struct, structs

from firepool_nb.cli import firepool
from firepool_nb.magics import options as magic_options
from firepool_nb.magics.lines import described as magic_lines

REFERENCE = Path(__file__).parent / "reference"

_INTRODUCTION = """\
# Configuration of the broker

Made from `firepool_broker/config.py` by `python docs/generate_reference.py`; not to be edited.

The broker needs no configuration. A file is named with `firepool broker serve --config FILE`, or
by `FIREPOOL_CONFIG`. It is YAML. A setting that does not exist is refused with the nearest one that
does; a combination that is not safe is refused naming both settings. Durations are seconds, or text
such as `10m` or `1h 30m`. What can be switched off takes the word `off`.
"""

_API_INTRODUCTION = """\
# HTTP API of the broker

Made from the route table and the types that decode requests by `python docs/generate_reference.py`;
not to be edited. Programs read the same in [openapi.json](openapi.json).

Every request carries `Authorization: Bearer TOKEN`: the token of the connection file, or a
session's token from `POST /v1/sessions`. An unknown field is refused with the nearest known one. A
refusal is `{"error": {"class", "message", "field"?, "retry_after"?, "job"?}}`; classes of jobs that
failed are not refusals, they stand in the job's own `error`. Answers of type `text/event-stream`
are server-sent events: an event with an `id` can be resumed after with `from=` or `Last-Event-ID`,
comments keep the connection alive.

## Events of a job's output

`GET /v1/jobs/{job_id}/output` begins with `job` (a JobView) and closes after `end` (the JobView of
the ended job); `status` comes in between whenever the job moves or waits for another reason. These
three have no `id`. Everything else is a message of the job: its event is the message's `type`, its
`id` the number `n`, which is contiguous over all attempts of the job. Each message also carries its
`attempt`.

| `type` | fields |
|---|---|
| `stream` | `name` (`stdout` or `stderr`), `text` |
| `display_data`, `update_display_data` | `data`, `metadata`, `transient` |
| `execute_result` | `data`, `metadata` |
| `clear_output` | `wait` |
| `error` | `ename`, `evalue`, `traceback`, `exception` |
| `result` | as Result |
| `note` | `level` (`info` or `warning`), `text`: for people; `topic`? is `pool` in the line about \
the default pool |
| `status` | `phase`: `installing`, `started` or `resetting` |
| `divider` | `text`: what follows comes from another attempt |

A message of type `status` has an `id`; the event `status` about the job's state has none.
"""


_MAGICS_INTRODUCTION = """\
# The magics

Made from `firepool_nb/magics/` by `python docs/generate_reference.py`; not to be edited.
`%%firepool --help`, `%firepool help` and `%%firepool?` show the same.
"""

_CELL_TEXT = """\
Runs the code below on a warm pod. Names that the code reads travel with it; the value of the last
expression is the cell's. `In`, `Out`, `_` and other history of the notebook stay there (`-i _`
sends a value).
"""

_COMMANDS_INTRODUCTION = """\
# The command line

Made from `firepool_nb/cli/` by `python docs/generate_reference.py`; not to be edited.

Every command explains itself with `--help`; most take `--json`. The exit status is 0 when all is
well, 1 when something failed, 2 for wrong use (a pool or job that does not exist included) and 130
after Ctrl-C; `firepool run` ends with the status of its job.
"""


def references() -> dict[Path, str]:
    """Return the text of each generated file."""
    return {
        REFERENCE / "openapi.json": json.dumps(document(), indent=1, ensure_ascii=False) + "\n",
        REFERENCE / "api.md": _api(document()),
        REFERENCE / "configuration.md": _configuration(),
        REFERENCE / "magics.md": _magics(),
        REFERENCE / "cli.md": _commands(),
    }


def _magics() -> str:
    """Return the reference of both magics, from what their help is made of."""
    options = magic_options.described()
    lines = [_MAGICS_INTRODUCTION, "## `%%firepool [OPTIONS]`", "", _CELL_TEXT]
    lines += _rows("option", [(each.usage, each.text) for each in options if each.available])
    lines += ["These are known and refused with `NotAvailable` by the pods of this version:", ""]
    lines += _rows("option", [(each.usage, each.text) for each in options if not each.available])
    lines += ["## `%firepool COMMAND`", ""]
    lines += _rows("command", [(f"%firepool {usage}", text) for usage, text in magic_lines()])
    return "\n".join(lines)


def _commands() -> str:
    """Return the reference of the command line, from its own help."""
    lines = [_COMMANDS_INTRODUCTION]
    for name, command in sorted(firepool.commands.items()):
        context = click.Context(command, info_name=f"firepool {name}")
        usage = " ".join(command.collect_usage_pieces(context))
        lines += [f"## `firepool {name}`", "", f"`firepool {name} {usage}`", ""]
        lines += [inspect.cleandoc(command.help or ""), ""]
        records = [
            record
            for parameter in command.get_params(context)
            if isinstance(parameter, click.Option)
            and parameter.name != "help"
            and (record := parameter.get_help_record(context)) is not None
        ]
        if records:
            lines += _rows("option", records)
    return "\n".join(lines)


def _rows(title: str, rows: list[tuple[str, str]]) -> list[str]:
    lines = [f"| {title} | what it does |", "|---|---|"]
    for left, right in rows:
        escaped = left.replace("|", "\\|")
        lines.append(f"| `{escaped}` | {right} |")
    return [*lines, ""]


def _api(described: dict[str, Any]) -> str:
    """Return the API's reference for people, from the same document that programs read."""
    lines = [_API_INTRODUCTION, "## Operations", ""]
    lines += ["| operation | what it does | takes | answers |", "|---|---|---|---|"]
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            if method == "parameters":
                continue
            takes = [f"`{each['name']}`" for each in operation.get("parameters", ())]
            for content in operation.get("requestBody", {}).get("content", {}).values():
                takes.insert(0, _reference(content) or "bytes")
            answers = [
                f"{status} {_answer(answer)}".strip()
                for status, answer in operation["responses"].items()
                if status != "default"
            ]
            lines.append(
                f"| `{method.upper()} {path}` | {operation['summary']} | {', '.join(takes)} "
                f"| {'; '.join(answers)} |"
            )
    lines += ["", "## Refusals", "", "| status | class | when |", "|---|---|---|"]
    for kind in _refusals(errors.Refused):
        text = str(kind.__doc__).splitlines()[0]
        lines.append(f"| {kind.status} | `{kind.error_class}` | {text} |")
    lines += ["", "## Types", ""]
    for name, schema in described["components"]["schemas"].items():
        lines += [f"### {name}", "", schema.get("description", ""), ""]
        lines += ["| field | type | meaning |", "|---|---|---|"]
        required = schema.get("required", ())
        for field, inner in schema["properties"].items():
            must = " (required)" if field in required and "additionalProperties" in schema else ""
            text = inner.get("description", "").replace("|", "\\|")
            lines.append(f"| `{field}`{must} | {_schema(inner)} | {text} |")
        lines.append("")
    return "\n".join(lines)


def _answer(answer: dict[str, Any]) -> str:
    for media, content in answer.get("content", {}).items():
        return _reference(content) or f"`{media}`"
    return ""


def _reference(content: dict[str, Any]) -> str:
    return _schema(content["schema"]) if "$ref" in content.get("schema", {}) else ""


def _schema(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_schema(each) for each in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{word}`" for word in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_schema(schema['items'])}"
    if schema.get("type") == "object":
        inner = schema.get("additionalProperties")
        return f"object of {_schema(inner)}" if isinstance(inner, dict) and inner else "object"
    return str(schema.get("type", "anything"))


def _refusals(kind: type[errors.Refused]) -> list[type[errors.Refused]]:
    found = list(kind.__subclasses__())
    for each in kind.__subclasses__():
        found += _refusals(each)
    return sorted(found, key=lambda each: (each.status, each.error_class))


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
