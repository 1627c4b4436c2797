"""The channel between a job and its agent: length-prefixed JSON with an optional binary part.

A frame is ``u32be json_length, u32be binary_length, json, binary``. Sending is one system call that
is not interrupted half-way, so a frame is either wholly in the channel or not at all.

What it needs is bound when it is imported, so that a cell which patches a module or a built-in
function is heard like any other.
"""

from __future__ import annotations

import json
import select
import socket
import struct
from typing import Any

from firepool_podagent.strictjson import ascii_bytes

_HEADER = struct.Struct(">II")
_send_all = socket.socket.sendall
_length = len


class ChannelClosedError(ConnectionError):
    """The agent went away, or user code closed the channel."""


class Channel:
    """One end of the stream socket between job and agent."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def has_data(self) -> bool:
        """Return whether something can be received at once."""
        return bool(select.select((self._socket,), (), (), 0)[0])

    def receive(self) -> tuple[dict[str, Any], bytes]:
        """Wait for one frame.

        Raises
        ------
        ChannelClosedError
            The other end was closed before a whole frame came.
        """
        json_length, binary_length = _HEADER.unpack(self._exactly(_HEADER.size))
        message = json.loads(self._exactly(json_length))
        return message, bytes(self._exactly(binary_length)) if binary_length else b""

    def send(self, message: dict[str, Any], binary: bytes = b"") -> None:
        """Send one frame; signals that could break it in two must be blocked by the caller."""
        _send_all(self._socket, encode(message, binary))

    def _exactly(self, count: int) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        received = 0
        while received < count:
            chunk = self._socket.recv_into(view[received:])
            if not chunk:
                raise ChannelClosedError("the channel to the agent was closed")
            received += chunk
        return data


def encode(message: dict[str, Any], binary: bytes = b"") -> bytes:
    """Return the bytes of one frame."""
    # ASCII escapes keep lone surrogates (odd file names in user text) transportable.
    text = ascii_bytes(message)
    return b"".join((_HEADER.pack(_length(text), _length(binary)), text, binary))
