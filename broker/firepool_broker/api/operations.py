"""What a handler declares about each of its methods: the source of checks and of OpenAPI."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct


class Parameter(Struct, frozen=True):
    """A query parameter or header that an operation takes.

    Parameters
    ----------
    name
        As it is sent.
    kind
        Type of its value.
    description
        For the API reference.
    place
        Where it is sent; unknown query parameters are refused, unknown headers are not.
    required
        Whether it must be sent.
    """

    name: str
    kind: Literal["string", "integer"]
    description: str
    place: Literal["query", "header"] = "query"
    required: bool = False


class Operation(Struct, frozen=True, kw_only=True):
    """One method of one resource.

    Parameters
    ----------
    summary
        One line for the API reference.
    request
        Type of the JSON body.
    upload
        The body is raw bytes.
    answer
        Type of the JSON answer; ``None`` for raw bytes, text or no body.
    content_type
        Media type of the answer.
    status
        Status of success.
    also
        Other statuses of success, with their meaning.
    parameters
        Query parameters and headers.
    """

    summary: str
    request: Any = None
    upload: bool = False
    answer: Any = None
    content_type: str = "application/json"
    status: int = 200
    also: tuple[tuple[int, str], ...] = ()
    parameters: tuple[Parameter, ...] = ()


EVENTS = "text/event-stream"
CLIENT_ID = Parameter("client_id", "string", "The client process.")
FROM = Parameter("from", "integer", "Number of the first message wanted.")
LAST_EVENT_ID = Parameter(
    "Last-Event-ID", "integer", "Number of the last message seen.", place="header"
)
