"""Verified identities: who a request acts for and what it may do."""

from __future__ import annotations

from msgspec import Struct


class Identity(Struct, frozen=True, kw_only=True):
    """Who a request acts for.

    Parameters
    ----------
    caller
        The person or service that submits.
    session
        Tag of the session whose token was used; ``None`` for the owner's token.
    operator
        May act on the broker itself (shutdown, any pod).
    """

    caller: str
    session: str | None = None
    operator: bool = False
