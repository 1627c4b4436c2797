"""Where the broker is: a remote one when ``FIREPOOL_URL`` says so, else this machine's own.

A connection is found again for every attempt to reach the broker, so a broker that died is
replaced by the next call. Only the wire version is compared; releases may differ.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from urllib.parse import urlsplit

from . import embedded
from .errors import BrokerUnreachable, WireMismatch

__all__ = ["WIRE_VERSION", "Endpoint", "check_wire", "locate", "own"]

WIRE_VERSION = 1
"""Version of the broker's HTTP API that this client speaks."""


@dataclass(frozen=True)
class Endpoint:
    """How to reach a broker.

    Attributes
    ----------
    token
        Bearer token of the caller.
    socket
        Path of the Unix socket of this machine's broker; None for a remote one.
    host, port, secure, prefix
        Address of a remote broker, and the path below which it lives.
    identity
        Tells one life of a broker from the next: what was uploaded to one is not in another.
    wire
        Its wire version when the connection file names it.
    """

    token: str
    socket: str | None = None
    host: str = "firepool"
    port: int = 80
    secure: bool = False
    prefix: str = ""
    identity: str = ""
    wire: int | None = None

    @property
    def is_local(self) -> bool:
        """Whether the broker is on this machine and takes files by their path."""
        return self.socket is not None

    def describe(self) -> str:
        """Name the address for people."""
        if self.socket is not None:
            return self.socket
        scheme = "https" if self.secure else "http"
        return f"{scheme}://{self.host}:{self.port}{self.prefix}"


def locate(start: bool = True) -> Endpoint | None:
    """Find the broker.

    Parameters
    ----------
    start
        Start this machine's broker when none runs.

    Returns
    -------
    Endpoint or None
        None when none runs and none was to be started.

    Raises
    ------
    BrokerUnreachable
        When ``FIREPOOL_URL`` cannot be used, or the broker does not start.
    WireMismatch
        When the running broker speaks another version.
    """
    url = os.environ.get("FIREPOOL_URL")
    if url:
        return _remote(url, os.environ.get("FIREPOOL_TOKEN", ""))
    return _endpoint(embedded.ensure_running() if start else embedded.find())


def own() -> Endpoint | None:
    """Find this machine's own broker, whatever ``FIREPOOL_URL`` says; None when none runs."""
    return _endpoint(embedded.find())


def _endpoint(found: embedded.Found | None) -> Endpoint | None:
    if found is None:
        return None
    socket, token, wire, pid, start_time = found
    check_wire(wire, f"this machine's broker (pid {pid})", "firepool stop")
    return Endpoint(token=token, socket=socket, identity=f"{pid}-{start_time}", wire=wire)


def check_wire(wire: int, who: str, way_out: str) -> None:
    """Compare the broker's wire version with ours.

    Raises
    ------
    WireMismatch
        When they differ; the message names both and what to do.
    """
    if wire == WIRE_VERSION:
        return
    older = "broker" if wire < WIRE_VERSION else "client"
    raise WireMismatch(
        f"{who} speaks wire version {wire}, this client {WIRE_VERSION}: the {older} is the older "
        + (f"one; run `{way_out}` and try again" if older == "broker" else "one; upgrade it")
    )


def _remote(url: str, token: str) -> Endpoint:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BrokerUnreachable(
            f"FIREPOOL_URL is {url!r}, not the http:// or https:// address of a broker"
        )
    if not token:
        raise BrokerUnreachable(
            f"FIREPOOL_URL names the broker {url} but FIREPOOL_TOKEN is not set; "
            "unset FIREPOOL_URL to use this machine's own broker"
        )
    secure = parts.scheme == "https"
    return Endpoint(
        token=token,
        host=parts.hostname,
        port=parts.port or (443 if secure else 80),
        secure=secure,
        prefix=parts.path.rstrip("/"),
        identity=url,
    )
