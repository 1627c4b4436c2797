"""Lines of an agent: what can be read is read, and one that cannot costs itself alone."""

from __future__ import annotations

import pytest
from firepool_broker.launch.messages import NotUnderstood, read_document, read_line

OUTCOME = b'{"type":"outcome","attempt":"j:1","exit_code":0,"next":3,"results":[]}'


@pytest.mark.parametrize(
    ("sent", "data"),
    [
        (b'{"y":[1.0,NaN,-Infinity,1e999]}', {"y": [1.0, None, None, None]}),
        (b'{"text/plain":"half \\ud83d"}', {"text/plain": "half ?"}),
        (b'{"text/plain":"whole \\ud83d\\ude00"}', {"text/plain": "whole \U0001f600"}),
        (b'{"text/plain":"\xff"}', {"text/plain": "\ufffd"}),
    ],
    ids=["nan", "half-pair", "pair", "bytes"],
)
def test_values_that_json_does_not_have_are_repaired(sent: bytes, data: object) -> None:
    message = read_line(b'{"n":7,"type":"display_data","data":' + sent + b',"metadata":{}}')
    assert message == {"n": 7, "type": "display_data", "data": data, "metadata": {}}


@pytest.mark.parametrize(
    "rest",
    [
        b'"type":5,"data":{}}',
        b'"type":"end\\nevent: end","data":{}}',
        b'"type":"stream","name":5,"text":[1]}',
        b'"type":"display_data","data":"zzz"}',
        b'"type":"error","traceback":"no list"}',
        b'"type":"stream","text":',
        b'"type":"note","text":' + b"[" * 100_000,
    ],
    ids=["type", "event", "stream", "display", "traceback", "torn", "deep"],
)
def test_a_message_without_sense_becomes_a_note_under_its_number(rest: bytes) -> None:
    message = read_line(b'{"n":12,' + rest)
    assert (message["n"], message["type"], message["level"]) == (12, "note", "warning")
    assert "left out" in message["text"]


@pytest.mark.parametrize(
    "line",
    [
        b"not json",
        b"[1]",
        b'{"type":"stream","name":"stdout","text":"x"}',
        b'{"n":-1,"type":"note","text":"x"}',
        OUTCOME.replace(b'"results":[]', b'"results":5'),
        OUTCOME.replace(b'"exit_code":0', b'"exit_code":"0"'),
    ],
    ids=["json", "list", "unnumbered", "negative", "results", "exit-code"],
)
def test_what_stands_outside_every_message_is_the_agents_fault(line: bytes) -> None:
    with pytest.raises(NotUnderstood):
        read_line(line)


def test_what_makes_sense_is_left_as_it_is() -> None:
    assert read_line(OUTCOME)["next"] == 3
    assert read_line(b'{"type":"reset","clean":true}') == {"type": "reset", "clean": True}
    assert read_document(b'{"a":NaN}') == {"a": None}
