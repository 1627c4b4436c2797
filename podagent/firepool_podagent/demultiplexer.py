r"""Puts the text of two pipes and the frames of the channel into the order in which they happened.

The job writes text to two pipes and frames to a channel. With each ordered frame ``k`` (after it
was sent) it writes a marker with that number into both pipes. What stood before marker ``k`` in a
pipe came before frame ``k``; what stands after it came after. So frame ``k`` goes out once both
pipes have passed marker ``k`` (or have ended), and text behind it waits until then. A marker that
never comes, since the job closed or replaced a descriptor, is made up for by a later one, by the
end of the pipe, or by time (`release`).

Text is decoded as UTF-8 across the borders of reads; what is not UTF-8, and NUL, which notebooks
cannot hold, become U+FFFD.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable
from typing import Any

STREAMS = ("stdout", "stderr")
RELEASE_SECONDS = 1.0
HELD_BYTES_LIMIT = 4 << 20


class _Pipe:
    """One pipe: undecided bytes, decoder, and what waits behind a marker."""

    def __init__(self, name: str, marker: bytes) -> None:
        self.name = name
        self.position = 0
        self.ended = False
        self.held: deque[tuple[int, str]] = deque()  # (last marker before it, text)
        self.held_size = 0
        self._marker = marker
        self._rest = b""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> None:
        data = self._rest + data
        self._rest = b""
        start = 0
        while True:
            found = data.find(self._marker, start)
            if found < 0:
                break
            end = data.find(b"\0", found + len(self._marker), found + len(self._marker) + 21)
            if end < 0:
                if len(data) - found > len(self._marker) + 20:  # the job's own bytes, oddly alike
                    self._text(data[start : found + len(self._marker)])
                    start = found + len(self._marker)
                    continue
                self._text(data[start:found])
                self._rest = data[found:]
                return
            digits = data[found + len(self._marker) : end]
            if digits.isdigit():
                self._text(data[start:found])
                self.position = max(self.position, int(digits))
            else:
                self._text(data[start : end + 1])
            start = end + 1
        border = self._border(data, start)
        self._text(data[start:border])
        self._rest = data[border:]

    def _border(self, data: bytes, start: int) -> int:
        """Where a marker may begin that has not wholly come."""
        length = len(data)
        place = data.find(b"\0", max(start, length - len(self._marker)))
        while place >= 0:
            if self._marker.startswith(data[place:]):
                return place
            place = data.find(b"\0", place + 1)
        return length

    def end(self) -> None:
        if not self.ended:
            self._text(self._rest)
            self._rest = b""
            self.ended = True
            self._hold(self._decoder.decode(b"", final=True))

    def _text(self, data: bytes) -> None:
        if data:
            self._hold(self._decoder.decode(data))

    def _hold(self, text: str) -> None:
        if text:
            self.held.append((self.position, text.replace("\0", "\ufffd")))
            self.held_size += len(text)


class Demultiplexer:
    """Feed it bytes and frames as they come; it calls ``text`` and ``message`` in order.

    Parameters
    ----------
    nonce : str
        The attempt's secret in the markers, 32 hex digits.
    text : callable
        Takes a stream's name and a piece of text.
    message : callable
        Takes a frame's message, without its sequence number.
    """

    def __init__(
        self,
        nonce: str,
        text: Callable[[str, str], None],
        message: Callable[[dict[str, Any]], None],
    ) -> None:
        marker = b"\x00\x1bFP" + nonce.encode() + b":"
        self._pipes = tuple(_Pipe(name, marker) for name in STREAMS)
        self._frames: dict[int, dict[str, Any]] = {}
        self._last_frame = 0
        self._done = 0
        self._text = text
        self._message = message

    @property
    def waiting(self) -> bool:
        """Whether a fence is incomplete."""
        return bool(self._frames) or any(pipe.held for pipe in self._pipes)

    def crowded(self, stream: int) -> bool:
        """Whether so much of a stream is held back that it should not be read for now."""
        return self._pipes[stream].held_size > HELD_BYTES_LIMIT

    def feed(self, stream: int, data: bytes) -> None:
        """Take bytes of a pipe (0: stdout, 1: stderr)."""
        self._pipes[stream].feed(data)
        self._advance()

    def end(self, stream: int) -> None:
        """Take the end of a pipe."""
        self._pipes[stream].end()
        self._advance()

    def frame(self, sequence: int, message: dict[str, Any]) -> None:
        """Take a frame of the channel; sequence 0 is not ordered."""
        if sequence <= self._done:
            if message.get("type") != "fence":
                self._message(message)
            return
        self._frames[sequence] = message
        self._last_frame = max(self._last_frame, sequence)
        self._advance()

    def release(self) -> None:
        """Stop waiting for markers of the frames that are here."""
        for sequence in sorted(self._frames):
            self._complete(sequence)
        self._advance()
        # A marker without its frame: the channel was closed by the job. Its text is still text.
        furthest = max(pipe.position for pipe in self._pipes)
        if any(pipe.held for pipe in self._pipes):
            self._complete(furthest)

    def close(self) -> None:
        """Take the end of everything."""
        for pipe in self._pipes:
            pipe.end()
        self.release()

    def _advance(self) -> None:
        self._emit_text()
        while True:
            passed = min(self._reached(pipe) for pipe in self._pipes)
            ready = [sequence for sequence in self._frames if sequence <= passed]
            if not ready:
                return
            self._complete(min(ready))

    def _reached(self, pipe: _Pipe) -> int:
        return max(pipe.position, self._last_frame) if pipe.ended else pipe.position

    def _complete(self, sequence: int) -> None:
        """Let everything up to and including a frame out."""
        while self._done < sequence:
            known = [s for s in self._frames if s <= sequence]
            held = [p.held[0][0] for p in self._pipes if p.held and p.held[0][0] <= sequence]
            self._done = min([*known, *(h for h in held if h > self._done), sequence])
            message = self._frames.pop(self._done, None)
            # Text that stood before this marker was let out when the one before was completed.
            if message is not None and message.get("type") != "fence":
                self._message(message)
            self._emit_text()

    def _emit_text(self) -> None:
        for pipe in self._pipes:
            while pipe.held and pipe.held[0][0] <= self._done:
                _, text = pipe.held.popleft()
                pipe.held_size -= len(text)
                self._text(pipe.name, text)
