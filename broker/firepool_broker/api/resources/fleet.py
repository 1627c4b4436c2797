"""``/v1/pools``, ``/v1/pods`` and ``/v1/events``: what there is, and what changes."""

from __future__ import annotations

from typing import ClassVar

from firepool_broker.api import types
from firepool_broker.api.handlers import Handler
from firepool_broker.api.operations import EVENTS, Operation


class Pools(Handler):
    """All pools."""

    OPERATIONS: ClassVar = {
        "GET": Operation(summary="List pools with counts.", answer=types.PoolList)
    }

    async def get(self) -> None:
        """List pools."""
        self.answer(await self.parts.service.pools(self.identity))


class Pods(Handler):
    """All pods."""

    OPERATIONS: ClassVar = {"GET": Operation(summary="List pods.", answer=types.PodList)}

    async def get(self) -> None:
        """List pods."""
        self.answer(types.PodList(pods=await self.parts.service.pods(self.identity)))


class Retire(Handler):
    """Retire a pod."""

    OPERATIONS: ClassVar = {
        "POST": Operation(
            summary="Retire a pod once its running attempt has ended.",
            request=types.Empty,
            answer=types.Accepted,
            status=202,
        )
    }

    async def post(self, name: str) -> None:
        """Retire a pod."""
        self.body(types.Empty)
        await self.parts.service.retire_pod(self.identity, name)
        self.answer(types.Accepted())


class Events(Handler):
    """Changes of jobs, pods, pools and sessions."""

    OPERATIONS: ClassVar = {"GET": Operation(summary="Follow what changes.", content_type=EVENTS)}

    async def get(self) -> None:
        """Follow what changes."""
        await self.send_events(self.parts.service.events(self.identity), at_once=True)
