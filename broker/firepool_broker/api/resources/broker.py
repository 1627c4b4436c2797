"""The broker itself: health, metrics, the API's description, who is asking, shutdown."""

from __future__ import annotations

from typing import ClassVar

from firepool_broker.api import errors, types
from firepool_broker.api.handlers import Handler
from firepool_broker.api.operations import Operation

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Alive(Handler):
    """Whether the process answers."""

    OPEN = True
    OPERATIONS: ClassVar = {
        "GET": Operation(summary="Tell whether the broker is alive.", answer=types.Health)
    }

    async def get(self) -> None:
        """Say so."""
        self.answer(types.Health(status="ok"))


class Ready(Handler):
    """Whether jobs are accepted."""

    OPEN = True
    OPERATIONS: ClassVar = {
        "GET": Operation(
            summary="Tell whether jobs are accepted.",
            answer=types.Health,
            also=((503, "Not yet, or not any more."),),
        )
    }

    async def get(self) -> None:
        """Say so, or not."""
        if not self.parts.service.ready():
            raise errors.Unavailable("the broker is not ready", retry_after=1.0)
        self.answer(types.Health(status="ready"))


class MetricsPage(Handler):
    """What was counted."""

    OPERATIONS: ClassVar = {
        "GET": Operation(summary="Metrics for Prometheus.", content_type="text/plain")
    }

    async def get(self) -> None:
        """Render the metrics."""
        self.set_header("Content-Type", _METRICS_TYPE)
        self.finish(self.parts.metrics.render())


class Description(Handler):
    """The API's own description."""

    OPERATIONS: ClassVar = {"GET": Operation(summary="This document.")}

    async def get(self) -> None:
        """Generate the document."""
        from firepool_broker.api.openapi import document  # only its readers pay for the import

        self.answer(document())


class WhoamiPage(Handler):
    """Who is asking."""

    OPERATIONS: ClassVar = {
        "GET": Operation(summary="Tell whom the broker takes the client for.", answer=types.Whoami)
    }

    async def get(self) -> None:
        """Answer with the verified identity."""
        self.answer(
            types.Whoami(
                caller=self.identity.caller,
                session=self.identity.session,
                broker=self.parts.service.info(),
            )
        )


class Shutdown(Handler):
    """End the broker."""

    OPERATIONS: ClassVar = {
        "POST": Operation(
            summary="End the broker (its owner only).",
            request=types.ShutdownRequest,
            answer=types.Accepted,
            status=202,
        )
    }

    async def post(self) -> None:
        """Begin to end the broker."""
        request = self.body(types.ShutdownRequest)
        if not self.identity.operator:
            raise errors.Forbidden("only the broker's owner may end it")
        await self.parts.service.shutdown(self.identity, drain=request.drain, cancel=request.cancel)
        self.answer(types.Accepted())


class Nothing(Handler):
    """Every other path."""

    async def prepare(self) -> None:
        """Refuse after authentication: an unknown path tells strangers nothing."""
        identity = await self.parts.authenticator.authenticate(
            self.request.headers.get("Authorization")
        )
        if identity is None:
            self.refuse(errors.Unauthorized("send 'Authorization: Bearer' with a valid token"))
        else:
            self.refuse(errors.NotFound(f"there is no {self.request.path}"))
