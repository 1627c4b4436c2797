"""`firepool doctor`: examine what has to work, in the order in which it has to."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from . import embedded, environment
from .client import Client
from .connection import WIRE_VERSION, locate
from .errors import FirepoolError

__all__ = ["Finding", "examine"]


class Finding(NamedTuple):
    """One thing that was examined.

    Attributes
    ----------
    what
        The thing.
    ok
        Whether it is as it should be.
    detail
        What was found.
    fix
        The line that puts it right; None for what is as it should be.
    """

    what: str
    ok: bool
    detail: str
    fix: str | None = None


def examine(start: bool) -> list[Finding]:
    """Examine this interpreter, the broker and its pools.

    Parameters
    ----------
    start
        Whether to start this machine's broker when none runs.
    """
    found = [_interpreter(), _place()]
    client = Client(lambda: locate(start))
    try:
        for step in (_broker, _pools, _server):
            finding = _guarded(step, client)
            found.append(finding)
            if not finding.ok:
                break
    finally:
        client.close()
    return found


def _guarded(step: Callable[[Client], Finding], client: Client) -> Finding:
    try:
        return step(client)
    except FirepoolError as error:
        name = step.__name__.strip("_")
        return Finding(name, False, str(error), f"the broker's log: {embedded.log_path()}")


def _interpreter() -> Finding:
    version = "{}.{}.{}".format(*sys.version_info[:3])
    detail = f"Python {version} at {sys.executable}, environment {environment.digest()[:12]}"
    ok = sys.version_info >= (3, 10)
    return Finding("interpreter", ok, detail, None if ok else "use Python 3.10 or newer")


def _place() -> Finding:
    url = os.environ.get("FIREPOOL_URL")
    if url:
        return Finding("address", True, f"the broker at {url} (FIREPOOL_URL)")
    try:
        path = embedded.connection_path()
    except Exception as error:  # noqa: BLE001 - whatever keeps the folder from being made
        return Finding(
            "address", False, str(error), "set FIREPOOL_HOME to a folder on a local disk"
        )
    return Finding("address", True, f"this machine's own broker ({path})")


def _broker(client: Client) -> Finding:
    document = client.check_broker()
    broker: dict[str, Any] = document["broker"]
    detail = (
        f"{broker['version']}, wire {broker['wire']} (ours {WIRE_VERSION}), "
        f"{broker['backend']} pods, isolation: {broker['isolation']}, "
        f"network: {broker['network']}, pid {broker['pid']}, caller {document['caller']}"
    )
    return Finding("broker", True, detail)


def _pools(client: Client) -> Finding:
    document = client.pools()
    names = [f"{pool['name']} ({pool['counts']['warm_ready']} warm)" for pool in document["pools"]]
    unhealthy = sum(pool["counts"]["unhealthy"] for pool in document["pools"])
    detail = f"{', '.join(names) or 'none'}; default {document.get('default') or 'none'}"
    if unhealthy:
        log = f"the broker's log says why: {embedded.log_path()}"
        return Finding("pools", False, f"{detail}; {unhealthy} unhealthy pods", log)
    fix = None if names else "name pools in the broker's configuration"
    return Finding("pools", bool(names), detail, fix)


def _server(client: Client) -> Finding:
    from importlib import metadata

    try:
        version = metadata.version("jupyter-server")
    except metadata.PackageNotFoundError:
        return Finding("jupyter", True, "no Jupyter server in this environment: magics only")
    return Finding("jupyter", True, f"jupyter-server {version} in this environment")
