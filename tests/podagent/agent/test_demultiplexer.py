"""Text and frames come out in the order in which they happened, however the reads are cut."""

from __future__ import annotations

from typing import Any

from firepool_podagent.demultiplexer import Demultiplexer
from hypothesis import given
from hypothesis import strategies as st

NONCE = "0123456789abcdef" * 2


def marker(number: int) -> bytes:
    return b"\x00\x1bFP" + NONCE.encode() + b":%d\x00" % number


class Collected:
    def __init__(self) -> None:
        self.items: list[Any] = []
        self.demultiplexer = Demultiplexer(NONCE, self._text, self._message)

    def _text(self, name: str, text: str) -> None:
        if self.items and isinstance(self.items[-1], tuple) and self.items[-1][0] == name:
            self.items[-1] = (name, self.items[-1][1] + text)
        else:
            self.items.append((name, text))

    def _message(self, message: dict[str, Any]) -> None:
        self.items.append(message["type"])


def test_a_frame_waits_for_both_pipes() -> None:
    got = Collected()
    d = got.demultiplexer
    d.feed(0, b"before" + marker(1) + b"after")
    assert got.items == [("stdout", "before")]
    d.frame(1, {"type": "display_data"})
    assert got.items == [("stdout", "before")]
    d.feed(1, b"err" + marker(1))
    assert got.items == [
        ("stdout", "before"),
        ("stderr", "err"),
        "display_data",
        ("stdout", "after"),
    ]
    assert not d.waiting


def test_a_switch_of_streams_is_ordered() -> None:
    got = Collected()
    d = got.demultiplexer
    # stdout a, stderr b, stdout c: all of stderr is read first
    d.feed(1, marker(1) + b"b" + marker(2))
    d.frame(1, {"type": "fence"})
    d.frame(2, {"type": "fence"})
    d.feed(0, b"a" + marker(1) + marker(2) + b"c")
    assert got.items == [("stdout", "a"), ("stderr", "b"), ("stdout", "c")]


def test_an_end_or_a_later_marker_makes_up_for_a_missing_one() -> None:
    got = Collected()
    d = got.demultiplexer
    d.feed(0, b"x" + marker(1))
    d.frame(1, {"type": "one"})
    d.end(1)
    assert got.items == [("stdout", "x"), "one"]
    got = Collected()
    d = got.demultiplexer
    d.frame(1, {"type": "one"})
    d.frame(2, {"type": "two"})
    d.feed(0, marker(1) + marker(2))
    d.feed(1, marker(2))
    assert got.items == ["one", "two"]


def test_time_releases_an_incomplete_fence() -> None:
    got = Collected()
    d = got.demultiplexer
    d.feed(0, b"a" + marker(1) + b"b")
    d.frame(1, {"type": "one"})
    assert d.waiting
    d.release()
    assert got.items == [("stdout", "a"), "one", ("stdout", "b")]
    assert not d.waiting


def test_markers_without_frames_lose_no_text() -> None:
    got = Collected()
    d = got.demultiplexer
    d.feed(0, b"a" + marker(1) + b"b" + marker(5) + b"c")
    d.close()
    assert got.items == [("stdout", "abc")]


def test_bytes_that_look_like_markers_are_text() -> None:
    got = Collected()
    d = got.demultiplexer
    almost = b"\x00\x1bFP" + NONCE.encode()[:-1] + b"0:1\x00" + marker(1)[:-1] + b"junk" * 20
    d.feed(0, almost)
    d.close()
    assert "".join(text for _, text in got.items) == almost.decode().replace("\0", "\ufffd")


def test_text_is_decoded_across_reads_and_markers() -> None:
    got = Collected()
    d = got.demultiplexer
    d.feed(0, b"\xff\xfeok\n\xc3")
    d.feed(0, b"\xa9\n")
    d.feed(0, b"\xe2\x82" + marker(1) + b"\xac")
    d.feed(1, marker(1))
    d.frame(1, {"type": "fence"})
    d.feed(0, b"\xf0\x9f")
    d.close()
    assert "".join(text for _, text in got.items) == "\ufffd\ufffdok\n\u00e9\n\u20ac\ufffd"


PIECES = st.lists(
    st.one_of(
        st.tuples(st.just("out"), st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)),
        st.tuples(st.just("err"), st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)),
        st.just(("show", "")),
    ),
    max_size=20,
)


@given(PIECES, st.data())
def test_any_cut_gives_the_same_order(pieces: list[tuple[str, str]], data: st.DataObject) -> None:
    pipes = [bytearray(), bytearray()]
    frames: list[tuple[int, dict[str, Any]]] = []
    expected: list[Any] = []
    last = ""
    for kind, text in pieces:
        if kind == "show" or (last and kind != last):
            number = len(frames) + 1
            frames.append((number, {"type": "show" if kind == "show" else "fence"}))
            for pipe in pipes:
                pipe += marker(number)
            last = ""
        if kind == "show":
            expected.append("show")
            continue
        last = kind
        stream = 0 if kind == "out" else 1
        pipes[stream] += text.encode()
        name = ("stdout", "stderr")[stream]
        text = text.replace("\0", "\ufffd")
        if expected and isinstance(expected[-1], tuple) and expected[-1][0] == name:
            expected[-1] = (name, expected[-1][1] + text)
        else:
            expected.append((name, text))
    got = Collected()
    sources: list[Any] = [pipes[0], pipes[1], frames]
    while any(sources):
        which = data.draw(st.sampled_from([i for i in range(3) if sources[i]]))
        count = data.draw(st.integers(1, len(sources[which])))
        head, sources[which] = sources[which][:count], sources[which][count:]
        if which == 2:
            for number, message in head:
                got.demultiplexer.frame(number, message)
        else:
            got.demultiplexer.feed(which, bytes(head))
    got.demultiplexer.close()
    assert got.items == expected
