"""The broker's side of the pod agent's API: every request signed, every answer checked.

One client per pod. All requests may be repeated, so a client reconnects by itself where it can;
what it raises is `AgentUnreachable` (nobody knows what became of the request), `AgentRefused`
(the agent answered no, with its class) or `AgentLied` (an answer that cannot be true, which
costs the pod).
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import msgspec
from firepool_podagent import wire

from firepool_broker.backends.base import PodAddress
from firepool_broker.launch.connections import (
    AgentAbsent,
    AgentUnreachable,
    Response,
    Transport,
)
from firepool_broker.launch.messages import NotUnderstood, read_document, read_line

__all__ = [
    "AgentAbsent",
    "AgentClient",
    "AgentLied",
    "AgentRefused",
    "AgentUnreachable",
    "OutputCut",
]

_TIMEOUT_SECONDS = 10.0
_UPLOAD_TIMEOUT_SECONDS = 300.0
_SILENCE_SECONDS = 4 * wire.HEARTBEAT_SECONDS


class AgentRefused(Exception):
    """The agent refused a request.

    Parameters
    ----------
    status
        HTTP status.
    error_class, message, field
        As the agent gave them.
    """

    def __init__(self, status: int, error_class: str, message: str, field: str | None) -> None:
        super().__init__(message)
        self.status = status
        self.error_class = error_class
        self.message = message
        self.field = field


class AgentLied(Exception):
    """The agent's answer contradicts what was asked or what it said before."""


class OutputCut(AgentUnreachable):
    """The agent ended an output in good order and without the attempt's end."""


class AgentClient:
    """Talks to one pod's agent.

    Parameters
    ----------
    address
        Where it listens, and its key.
    epoch
        Epoch of this broker's leadership.
    clock
        Unix seconds, for the expiry of signatures.
    """

    def __init__(
        self, address: PodAddress, epoch: int, clock: Callable[[], float] = time.time
    ) -> None:
        self._key = address.key
        self._uid = address.uid
        self._epoch = epoch
        self._clock = clock
        self._transport = Transport(address.unix, address.tcp)

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()

    async def health(self, timeout_seconds: float = _TIMEOUT_SECONDS) -> dict[str, Any]:
        """Return the agent's own description; raises `AgentLied` when it is another pod's."""
        health = await self._json("GET", "/v1/health", timeout_seconds=timeout_seconds)
        if health.get("uid") != self._uid:
            raise AgentLied(f"the agent says that its uid is {health.get('uid')!r}")
        return health

    async def prepare(self, request: Mapping[str, Any]) -> None:
        """Let the agent park a spare for an environment, in the background."""
        await self._json("POST", "/v1/prepare", request)

    async def deliver(self, kind: str, digest: str, path: str) -> None:
        """Hand over a blob or package by the name of its file on this machine.

        Parameters
        ----------
        kind
            ``blobs`` or ``packages``.
        digest
            SHA-256, hex; the agent verifies it.
        path
            Absolute path.
        """
        await self._json(
            "PUT",
            f"/v1/{kind}/{digest}",
            headers={wire.HEADER_LINK: path},
            digest=digest,
            timeout_seconds=_UPLOAD_TIMEOUT_SECONDS,
        )

    async def start_attempt(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        """Start an attempt, or learn the state of the one that was started before."""
        attempt = str(spec["attempt"])
        state = await self._json("POST", f"/v1/attempts/{attempt}", spec)
        return self._checked(attempt, state)

    async def attempt(
        self, attempt: str, timeout_seconds: float = _TIMEOUT_SECONDS
    ) -> dict[str, Any] | None:
        """Return an attempt's state; None when the agent does not know it."""
        try:
            state = await self._json(
                "GET", f"/v1/attempts/{attempt}", timeout_seconds=timeout_seconds
            )
            return self._checked(attempt, state)
        except AgentRefused as error:
            if error.status == 404:
                return None
            raise

    async def output(self, attempt: str, start: int) -> AsyncIterator[list[dict[str, Any]]]:
        """Yield an attempt's messages from a number on, as many at once as have come.

        The last ones carry no number: ``outcome`` and then ``reset``. A sign of life without a
        message is an empty list.

        Raises
        ------
        AgentUnreachable
            When the stream broke off before its end, or not even a heartbeat came;
            `OutputCut` when the agent itself left it at that.
        """
        response = await self._request(
            "GET", f"/v1/attempts/{attempt}/output?from={start}", timeout_seconds=_TIMEOUT_SECONDS
        )
        rest = b""
        ended = False
        async for piece in response.pieces(_SILENCE_SECONDS):
            *lines, rest = (rest + piece).split(b"\n")
            messages = [_understood(read_line, line) for line in lines if line]
            if messages:
                ended = messages[-1].get("type") == "reset"
            yield messages  # none: the agent is there and has nothing to say
        if not ended:
            raise OutputCut("the agent ended the output before its end")

    async def signal(
        self,
        attempt: str,
        name: str,
        grace_seconds: float,
        timeout_seconds: float = _TIMEOUT_SECONDS,
    ) -> bool:
        """Interrupt, terminate or kill an attempt; False when it has ended for the agent."""
        body = {"signal": name, "grace_seconds": grace_seconds}
        target = f"/v1/attempts/{attempt}/signal"
        answer = await self._json("POST", target, body, timeout_seconds=timeout_seconds)
        return not answer.get("ignored")

    async def acknowledge(self, attempt: str, following: int, *, settled: bool = False) -> None:
        """Tell the agent that the messages below a number are stored.

        With ``settled`` the outcome and its results are stored too, and the journal may go.
        """
        body = {"next": following, "outcome": settled}
        await self._json("POST", f"/v1/attempts/{attempt}/ack", body)

    async def result(self, attempt: str, name: str) -> AsyncIterator[bytes]:
        """Yield the bytes of a result that was too large to stand in the outcome."""
        response = await self._request("GET", f"/v1/attempts/{attempt}/results/{_quoted(name)}")
        async for piece in response.pieces(_SILENCE_SECONDS):
            yield piece

    async def drain(self) -> None:
        """Let the agent refuse new attempts."""
        await self._json("POST", "/v1/drain", {})

    async def shutdown(self, timeout_seconds: float = 5.0) -> None:
        """Let the agent kill everything, clean up and exit."""
        await self._json("POST", "/v1/shutdown", {}, timeout_seconds=timeout_seconds)

    def _checked(self, attempt: str, state: dict[str, Any]) -> dict[str, Any]:
        if state.get("attempt") != attempt:
            raise AgentLied(f"asked for attempt {attempt}, it answered {state.get('attempt')!r}")
        return state

    async def _json(
        self,
        method: str,
        target: str,
        body: Mapping[str, Any] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        digest: str | None = None,
        timeout_seconds: float = _TIMEOUT_SECONDS,
    ) -> dict[str, Any]:
        content = b"" if body is None else msgspec.json.encode(body)
        response = await self._request(
            method, target, content, headers or {}, digest, timeout_seconds
        )
        answer = await response.read()
        return _understood(read_document, answer) if answer else {}

    async def _request(
        self,
        method: str,
        target: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        digest: str | None = None,
        timeout_seconds: float = _TIMEOUT_SECONDS,
    ) -> Response:
        signed: Sequence[tuple[str, str]] = tuple(
            wire.sign(
                self._key,
                method,
                target,
                digest or wire.digest(body),
                self._epoch,
                int(self._clock()) + wire.SIGNATURE_LIFETIME_SECONDS,
            ).items()
        )
        response = await self._transport.request(
            method, target, {**dict(signed), **(headers or {})}, body, timeout_seconds
        )
        if response.status >= 300:
            raise _refusal(response.status, await response.read())
        return response


def _refusal(status: int, body: bytes) -> Exception:
    try:
        error = msgspec.json.decode(body)["error"]
        return AgentRefused(status, str(error["class"]), str(error["message"]), error.get("field"))
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return AgentRefused(status, "Internal", f"the agent answered {status}", None)


def _understood(read: Callable[[bytes], dict[str, Any]], text: bytes) -> dict[str, Any]:
    try:
        return read(text)
    except NotUnderstood as error:
        raise AgentLied(f"the agent's answer is not understood: {error}") from error


def _quoted(name: str) -> str:
    from urllib.parse import quote

    return quote(name, safe="")
