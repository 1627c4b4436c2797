"""``/v1/sessions``: register, keep open, release, say goodbye."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import ClassVar, cast

from firepool_broker.api import errors, types
from firepool_broker.api.handlers import Handler
from firepool_broker.api.operations import CLIENT_ID, EVENTS, Operation, Parameter
from firepool_broker.api.service import Goodbye
from firepool_broker.api.validation import check_session
from firepool_broker.api.variables import strip_protected


class Sessions(Handler):
    """All sessions of the caller."""

    OPERATIONS: ClassVar = {
        "POST": Operation(
            summary="Register a client under a tag, or update what it registered.",
            request=types.SessionRequest,
            answer=types.SessionOpened,
        ),
        "GET": Operation(summary="List sessions.", answer=types.SessionList),
    }

    async def post(self) -> None:
        """Register a client."""
        request = self.body(types.SessionRequest)
        check_session(request)
        request.env = strip_protected(request.env)
        opened = await self.parts.service.open_session(self.identity, request)
        opened.token = await self.parts.authenticator.session_token(
            self.identity.caller, request.lease_tag
        )
        self.answer(opened)

    async def get(self) -> None:
        """List sessions."""
        self.answer(types.SessionList(sessions=await self.parts.service.sessions(self.identity)))


class Session(Handler):
    """One session."""

    OPERATIONS: ClassVar = {
        "GET": Operation(summary="Look a session up.", answer=types.SessionView),
        "DELETE": Operation(
            summary="Say goodbye: the session ends, or its kernel restarts.",
            answer=types.Accepted,
            parameters=(
                CLIENT_ID,
                Parameter("how", "string", "`shutdown` (when left out) or `restart`."),
            ),
        ),
    }

    async def get(self, lease_tag: str) -> None:
        """Look a session up."""
        self.answer(await self.parts.service.session(self.identity, lease_tag))

    async def delete(self, lease_tag: str) -> None:
        """Say goodbye."""
        how = self.query("how") or "shutdown"
        if how not in ("shutdown", "restart"):
            raise errors.Invalid("how must be 'shutdown' or 'restart'", field="how")
        await self.parts.service.close_session(
            self.identity, lease_tag, self.query("client_id"), cast("Goodbye", how)
        )
        if how == "shutdown":
            # a goodbye that came too late ended nothing: the store knows, the cache need not
            self.parts.authenticator.forget(self.identity.caller, lease_tag)
        self.answer(types.Accepted())


class Stream(Handler):
    """The stream that says a session's client is there."""

    OPERATIONS: ClassVar = {
        "GET": Operation(
            summary="Hold open while the client lives; the session lapses after it closed.",
            content_type=EVENTS,
            parameters=(Parameter("client_id", "string", "The client process.", required=True),),
        )
    }

    async def get(self, lease_tag: str) -> None:
        """Count the client as connected until the stream closes."""
        client_id = self.query("client_id")
        if client_id is None:
            raise errors.Invalid("client_id is missing", field="client_id")
        service = self.parts.service
        await service.session_connected(self.identity, lease_tag, client_id)
        try:
            await self.send_events(_open())
        finally:
            await service.session_disconnected(self.identity, lease_tag, client_id)


async def _open() -> AsyncIterator[types.StreamEvent]:
    yield types.StreamEvent("open", b"{}")
    await asyncio.Event().wait()  # until the reader goes


class Release(Handler):
    """Give a session's pods back."""

    OPERATIONS: ClassVar = {
        "POST": Operation(
            summary="Give the session's held pods back at once.",
            request=types.Empty,
            answer=types.ReleaseView,
        )
    }

    async def post(self, lease_tag: str) -> None:
        """Give pods back."""
        self.body(types.Empty)
        released = await self.parts.service.release_session(self.identity, lease_tag)
        self.answer(types.ReleaseView(released=released))
