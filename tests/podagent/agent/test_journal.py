"""What the journal has told survives; what was torn was never told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from firepool_podagent import journal
from firepool_podagent.journal import Journal
from firepool_podagent.output import CappedOutput, Coalescer


def read_all(log: journal.AttemptLog, start: int = 0) -> list[dict[str, Any]]:
    reader = log.reader(start)
    lines = []
    while data := reader.read():
        lines += [json.loads(line) for line in data.splitlines()]
    return lines


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 1000)
    monkeypatch.setattr(journal, "READ_BYTES", 300)


def outcome(log: journal.AttemptLog) -> dict[str, Any]:
    return {"attempt": log.attempt, "exit_code": 0, "next": log.next, "results": []}


@pytest.mark.usefixtures("small_segments")
def test_any_number_can_be_read_from(tmp_path: Path) -> None:
    log = Journal(tmp_path / "j").begin("a:1")
    for number in range(200):
        assert (
            log.append({"type": "stream", "name": "stdout", "text": "x" * (number % 50)}) == number
        )
    log.append({"type": "stream", "name": "stdout", "text": "long" * 1000})
    for start in (0, 1, 63, 64, 65, 137, 199, 200):
        assert [m["n"] for m in read_all(log, start)] == list(range(start, 201))
    assert read_all(log, 201) == []
    assert read_all(log, 500) == []
    log.finish(outcome(log))
    assert [m["n"] for m in read_all(log, 100)] == list(range(100, 201))


@pytest.mark.usefixtures("small_segments")
def test_acknowledged_messages_go_and_the_rest_stays(tmp_path: Path) -> None:
    log = Journal(tmp_path / "j").begin("a:1")
    for _ in range(100):
        log.append({"type": "stream", "name": "stdout", "text": "x" * 50})
    before = sum(path.stat().st_size for path in log.folder.glob("*.ndjson"))
    log.acknowledge(90)
    after = sum(path.stat().st_size for path in log.folder.glob("*.ndjson"))
    assert after < before / 3
    assert [m["n"] for m in read_all(log, 90)] == list(range(90, 100))


@pytest.mark.usefixtures("small_segments")
def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    first = Journal(tmp_path / "j")
    log = first.begin("job/with odd:name")
    for _ in range(50):
        log.append({"type": "stream", "name": "stdout", "text": "x" * 50})
    log.finish(outcome(log))
    log.report_reset({"attempt": log.attempt, "clean": True})
    torn = first.begin("b:1")
    torn.append({"type": "stream", "name": "stdout", "text": "told"})
    with open(next(torn.folder.glob("*.ndjson")), "ab") as file:
        file.write(b'{"n":1,"type":"stream","na')
    ended = first.begin("c:1")
    ended.finish(outcome(ended))

    again = Journal(tmp_path / "j")
    assert set(again.attempts) == {"job/with odd:name", "b:1", "c:1"}
    log = again.attempts["job/with odd:name"]
    assert log.state()["state"] == "ended"
    assert log.outcome == {"attempt": log.attempt, "exit_code": 0, "next": 50, "results": []}
    assert log.reset == {"attempt": log.attempt, "clean": True}
    assert len(read_all(log, 10)) == 40
    assert again.attempts["b:1"].state()["state"] == "lost"
    assert [m["text"] for m in read_all(again.attempts["b:1"])] == ["told"]
    reset = again.attempts["c:1"].reset
    assert reset is not None
    assert not reset["clean"]


def test_a_trimmed_attempt_is_still_known(tmp_path: Path) -> None:
    log = Journal(tmp_path / "j").begin("a:1")
    log.append({"type": "stream", "name": "stdout", "text": "x"})
    (log.results / "r").write_text("large")
    log.finish(outcome(log))
    log.acknowledge(1)
    assert log.results.exists()
    log.acknowledge(1, outcome=True)  # before the reset has ended
    assert [m["text"] for m in read_all(log)] == ["x"]
    log.report_reset({"attempt": log.attempt, "clean": True})
    assert not log.results.exists()
    again = Journal(tmp_path / "j").attempts["a:1"]
    assert again.state() == log.state()
    assert again.trimmed


def test_lines_are_valid_text_whatever_they_hold() -> None:
    line = journal.encode({"text": "a\ud800b\udfff \U0001f600"})
    assert json.loads(line.decode("utf-8")) == {"text": "a\ufffdb\ufffd \U0001f600"}


def texts(log: journal.AttemptLog) -> str:
    return "".join(m["text"] for m in read_all(log) if m["type"] == "stream")


def test_the_cap_keeps_head_and_tail(tmp_path: Path) -> None:
    log = Journal(tmp_path / "j").begin("a:1")
    output = CappedOutput(log, 20_000, tmp_path)
    written = ""
    for number in range(3000):
        text = f"line {number} \u00e9\n"
        written += text
        output.emit({"type": "stream", "name": "stdout", "text": text})
        if number == 1500:
            output.emit({"type": "error", "ename": "Told", "evalue": "", "traceback": []})
    live = texts(log)
    assert written.startswith(live)
    assert live
    dropped = output.close()
    messages = read_all(log)
    notes = [m["text"] for m in messages if m["type"] == "note"]
    assert len(notes) == 1
    assert str(dropped) in notes[0]
    shown = texts(log)
    tail = shown[len(live) :]
    assert written.endswith(tail)
    assert len(tail) > 2000
    assert len(shown.encode()) + dropped == len(written.encode())
    assert [m["ename"] for m in messages if m["type"] == "error"] == ["Told"]
    assert not list(tmp_path.glob("tail-*"))


def test_one_huge_piece_is_cut_at_the_cap(tmp_path: Path) -> None:
    log = Journal(tmp_path / "j").begin("a:1")
    output = CappedOutput(log, 10_000, tmp_path)
    output.emit({"type": "stream", "name": "stdout", "text": "\u20ac" * 2000})
    output.emit({"type": "stream", "name": "stdout", "text": "end"})
    assert output.close() == 0
    assert texts(log) == "\u20ac" * 2000 + "end"


def test_text_is_coalesced_and_the_first_piece_is_not() -> None:
    now = [0.0]
    sent: list[dict[str, Any]] = []
    coalescer = Coalescer(sent.append, lambda: now[0])
    coalescer.text("stdout", "a")
    assert sent == []
    due = coalescer.due_in()
    assert due is not None
    assert due < 0.005
    coalescer.text("stdout", "\n")
    assert [m["text"] for m in sent] == ["a\n"]
    for piece in "bcd":
        now[0] += 0.01
        coalescer.text("stdout", piece)
    coalescer.text("stderr", "e")
    assert len(sent) == 1
    due = coalescer.due_in()
    assert due is not None
    assert 0 < due <= 0.05
    coalescer.message({"type": "display_data"})
    assert [m.get("text") for m in sent] == ["a\n", "bcd", "e", None]
    assert coalescer.due_in() is None
