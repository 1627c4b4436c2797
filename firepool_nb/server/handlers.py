"""The routes under ``<base URL>firepool/``.

======================  ============================================================
``about``               versions, and what is known of the broker (never starts one)
``start``               start the machine's own broker (POST)
``v1/...``              forwarded to the broker, see `firepool_nb.server.forwarding`
``healthz, metrics``    forwarded
======================  ============================================================

Every method is for authenticated and authorized users only; the resource is ``firepool``.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
from typing import Any

import httpx
from jupyter_server.auth.decorator import authorized
from tornado import web

from firepool_nb.server.forwarding import FirepoolHandler, ForwardHandler
from firepool_nb.server.upstream import BrokerNotRunning, Upstream, UpstreamError

__all__ = ["ROUTES", "WIRE_VERSION", "AboutHandler", "StartHandler"]

#: Version of the broker's HTTP API that this release speaks.
WIRE_VERSION = 1

_PROBE_TIMEOUT_SECONDS = 3.0


class AboutHandler(FirepoolHandler):
    """``GET about``: {"version", "wire", "broker": {"state", "kind", ...}}.

    The broker's ``state`` is ``running`` (then with ``version``, ``wire``, ``backend``,
    ``isolation``, ``network``), ``none`` (nothing runs; something may be started),
    ``unreachable`` or ``incompatible`` (then with a ``message`` that says what to do).
    """

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """Answer with the versions."""
        self.reply(
            {
                "version": importlib.metadata.version("firepool-nb"),
                "wire": WIRE_VERSION,
                "broker": await self._broker_state(),
            }
        )

    async def _broker_state(self) -> dict[str, Any]:
        kind = self.broker.kind
        try:
            upstream = await self.broker.locate()
            about = await self._probe(upstream)
        except BrokerNotRunning:
            return {"kind": kind, "state": "none"}
        except UpstreamError as error:
            return {"kind": kind, "state": "unreachable", "message": str(error)}
        known = {name: about.get(name) for name in ("version", "backend", "isolation", "network")}
        known = {"kind": kind, "state": "running", "wire": about.get("wire"), **known}
        if about.get("wire") != WIRE_VERSION:
            known["state"] = "incompatible"
            known["message"] = (
                f"the broker speaks wire version {about.get('wire')}, this server"
                f" {WIRE_VERSION}; update the older of the two, then restart Jupyter"
                + ("" if kind == "remote" else " and run `firepool stop`")
            )
        return known

    async def _probe(self, upstream: Upstream) -> dict[str, Any]:
        client = self.broker.client(upstream)
        try:
            response = await asyncio.wait_for(
                client.get(f"{upstream.url}/v1/whoami"), _PROBE_TIMEOUT_SECONDS
            )
        except (httpx.HTTPError, asyncio.TimeoutError) as error:
            raise self.explain(upstream, error) from error
        if response.status_code == 401:
            self.broker.forget(upstream)
            raise self.refused(upstream)
        try:
            document = response.json()
            return dict(document["broker"])
        except (ValueError, KeyError, TypeError) as error:
            raise self.explain(upstream, error) from error


class StartHandler(FirepoolHandler):
    """``POST start``: start the machine's own broker; answers when it is ready."""

    @web.authenticated
    @authorized
    async def post(self) -> None:
        """Start it, unless it runs."""
        try:
            await self.broker.start()
        except UpstreamError as error:
            self.reply_error(error)
            return
        self.reply({"started": True})


#: A pattern that names the paths of the broker that are reachable, and no others.
_FORWARDED = r"/firepool/(v1/.+|healthz|metrics)"

ROUTES: list[tuple[Any, ...]] = [
    (r"/firepool/about", AboutHandler),
    (r"/firepool/start", StartHandler),
    (_FORWARDED, ForwardHandler),
]
