"""Requests, responses and event streams without any I/O."""

from __future__ import annotations

import io
import itertools
import json

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firepool_nb import calls
from firepool_nb.errors import NotAvailable, Refused
from firepool_nb.exchange import Call, ConnectionLost, Exchange, Response
from firepool_nb.sse import Event, EventParser

STREAM = (
    b": heartbeat\n\n"
    b'event: job\ndata: {"id": "j"}\n\n'
    b'id: 0\nevent: stream\ndata: {"text":\ndata:  "\xc3\xa9"}\n\n'
    b"retry: 5\n\n"
    b'id: 1\r\nevent: stream\r\ndata: {"text": "b"}\r\n\r\n'
    b"event: end\n\n"
)
EVENTS = [
    Event("job", {"id": "j"}, None),
    Event("stream", {"text": "é"}, 0),
    Event("stream", {"text": "b"}, 1),
    Event("end", None, None),
]


@given(st.lists(st.integers(0, len(STREAM)), max_size=30))
def test_events_do_not_depend_on_where_the_stream_is_cut(cuts: list[int]) -> None:
    parser, found = EventParser(), []
    borders = [0, *sorted(cuts), len(STREAM)]
    for start, end in itertools.pairwise(borders):
        found += parser.feed(STREAM[start:end])
    assert found == EVENTS


def exchange(call: Call) -> tuple[Exchange, bytes]:
    made = Exchange(h11.Connection(h11.CLIENT), call, "host", "/base", "secret")
    return made, b"".join(made.to_send())


def test_a_request_carries_token_and_body() -> None:
    _, sent = exchange(calls.submit({"id": "j-1", "kind": "cell"}, follow=True))
    head, _, body = sent.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /base/v1/jobs?follow=1 HTTP/1.1\r\n")
    assert b"Authorization: Bearer secret" in head
    assert json.loads(body) == {"id": "j-1", "kind": "cell"}


def test_segments_are_quoted() -> None:
    assert calls.session("a/b ?").path == "/v1/sessions/a%2Fb%20%3F"
    assert calls.jobs(state="RUNNING", limit=3).target() == "/v1/jobs?state=RUNNING&limit=3"


def test_files_are_sent_in_pieces() -> None:
    data = bytes(range(256)) * 4096
    made, sent = exchange(calls.put_content("blobs", "0" * 64, io.BytesIO(data)))
    assert sent.endswith(data)
    assert b"Content-Length: %d" % len(data) in sent
    assert not made.finished


@given(st.lists(st.integers(0, 200), max_size=10))
def test_responses_do_not_depend_on_where_they_are_cut(cuts: list[int]) -> None:
    raw = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n"
    )
    made, _ = exchange(calls.pools())
    borders = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    pieces = []
    for start, end in itertools.pairwise(borders):
        if start != end:
            pieces += made.received(raw[start:end])
    assert b"".join(pieces) == b"hello world"
    assert made.finished
    assert made.reusable()


@pytest.mark.parametrize(
    "raw",
    [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf", b"nonsense\r\n\r\n"],
)
def test_a_broken_answer_is_a_lost_connection(raw: bytes) -> None:
    made, _ = exchange(calls.pools())
    with pytest.raises(ConnectionLost):  # noqa: PT012 - either piece may be the one that tells
        if raw:
            made.received(raw)
        made.received(b"")


def test_refusals_are_typed() -> None:
    body = {"error": {"class": "UnknownField", "message": "did you mean lease_tag?", "field": "x"}}
    with pytest.raises(Refused, match="did you mean lease_tag") as caught:
        Response(422, {}, json.dumps(body).encode()).check()
    assert (caught.value.status, caught.value.error_class, caught.value.field) == (
        422, "UnknownField", "x",
    )  # fmt: skip
    body["error"]["class"] = "NotAvailable"
    with pytest.raises(NotAvailable):
        Response(409, {}, json.dumps(body).encode()).check()
    with pytest.raises(Refused, match="status 502"):
        Response(502, {}, b"<html>bad gateway").check()
