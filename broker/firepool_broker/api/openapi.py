"""The OpenAPI document, made from the route table and the types that decode the requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import structs

from firepool_broker.api import types
from firepool_broker.api.application import ROUTES, Route
from firepool_broker.api.handlers import Handler
from firepool_broker.api.operations import Operation, Parameter
from firepool_broker.docstrings import field_texts

_JSON = "application/json"
_REFERENCE = "#/components/schemas/{name}"


def document() -> dict[str, Any]:
    """Return the OpenAPI document as plain objects."""
    kinds = [types.ErrorView, *_kinds()]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    references = dict(zip(kinds, schemas, strict=True))
    _describe(components)
    paths: dict[str, Any] = {}
    for route in ROUTES:
        methods = {
            method.lower(): _operation(route, operation, references)
            for method, operation in route.handler.OPERATIONS.items()
        }
        parameters = [
            {"name": part[1:-1], "in": "path", "required": True, "schema": {"type": "string"}}
            for part in route.path.split("/")
            if part.startswith("{")
        ]
        paths[route.path] = {**methods, "parameters": parameters} if parameters else methods
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Firepool-nb broker",
            "description": "Warm pods for notebooks and agents.",
            "version": "v1",
        },
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": components,
        },
    }


def _kinds() -> Iterator[Any]:
    seen: set[Any] = set()
    for route in ROUTES:
        for operation in route.handler.OPERATIONS.values():
            for kind in (operation.request, operation.answer):
                if kind is not None and kind not in seen:
                    seen.add(kind)
                    yield kind


def _describe(components: dict[str, Any]) -> None:
    """Add the text under each field's declaration to its schema."""
    for name, schema in components.items():
        kind = getattr(types, name)
        texts = field_texts(kind)
        for field in structs.fields(kind):
            if field.name in texts:
                schema["properties"][field.encode_name]["description"] = texts[field.name]


def _operation(route: Route, operation: Operation, schemas: dict[Any, Any]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": operation.summary,
        "tags": [_tag(route)],
        "responses": _responses(operation, schemas),
    }
    if _open(route.handler):
        described["security"] = []
    if operation.parameters:
        described["parameters"] = [_parameter(each) for each in operation.parameters]
    if operation.request is not None:
        described["requestBody"] = {"content": {_JSON: {"schema": schemas[operation.request]}}}
    elif operation.upload:
        described["requestBody"] = {
            "content": {"application/octet-stream": {"schema": {"type": "string"}}}
        }
    return described


def _open(handler: type[Handler]) -> bool:
    return handler.OPEN


def _responses(operation: Operation, schemas: dict[Any, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if operation.answer is not None:
        content = {operation.content_type: {"schema": schemas[operation.answer]}}
    elif operation.content_type:
        content = {operation.content_type: {}}
    success: dict[str, Any] = {"description": operation.summary}
    if content:
        success["content"] = content
    responses = {str(operation.status): success}
    for status, meaning in operation.also:
        also: dict[str, Any] = {"description": meaning}
        if content and status < 400:
            also["content"] = content
        responses[str(status)] = also
    responses["default"] = {
        "description": "Refused.",
        "content": {_JSON: {"schema": schemas[types.ErrorView]}},
    }
    return responses


def _parameter(parameter: Parameter) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "in": parameter.place,
        "description": parameter.description,
        "required": parameter.required,
        "schema": {"type": parameter.kind},
    }


def _tag(route: Route) -> str:
    parts = route.path.strip("/").split("/")
    return parts[1] if parts[0] == "v1" else "broker"
