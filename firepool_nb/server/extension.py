"""The server extension: routes, what they share, and a clean stop."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from jupyter_server.extension.application import ExtensionApp

from firepool_nb.server.handlers import ROUTES
from firepool_nb.server.upstream import Broker

__all__ = ["FirepoolServer"]


class FirepoolServer(ExtensionApp):
    """Forwards ``firepool/`` to the broker; kernels find the same broker by themselves.

    They need nothing from here: ``FIREPOOL_URL``, ``FIREPOOL_TOKEN``, ``FIREPOOL_HOME`` and the
    rest are in the server's environment, which a kernel inherits.
    """

    name = "firepool"

    def initialize_settings(self) -> None:
        """Make what the handlers share."""
        self.broker = Broker(os.environ)
        self.exchanges: set[asyncio.Task[Any]] = set()
        self.settings.update(firepool_broker=self.broker, firepool_exchanges=self.exchanges)

    def initialize_handlers(self) -> None:
        """Add the routes; Jupyter puts its base URL before each."""
        self.handlers.extend(ROUTES)

    async def stop_extension(self) -> None:
        """End what is being forwarded, so that an open stream never keeps the server alive."""
        exchanges = list(self.exchanges)
        for exchange in exchanges:
            exchange.cancel()
        await asyncio.gather(*exchanges, return_exceptions=True)
        await self.broker.aclose()
