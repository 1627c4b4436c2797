"""Tokens: the owner's, from the connection file, and one for each session.

The contract: a token is compared by its SHA-256 only, so that how long a comparison takes says
nothing about it; a session's token is derived from the broker's secret, so that registering again
gives the same one; the store keeps digests, never tokens.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from firepool_broker.identity.identities import Identity

_SESSION_PREFIX = "fps_"
_CACHED = 10_000


class TokenStore(Protocol):
    """Where digests of session tokens are kept."""

    async def put_token(self, digest: str, caller: str, lease_tag: str, now: float) -> None:
        """Remember a digest."""
        ...

    async def token(self, digest: str) -> tuple[str, str] | None:
        """Return (caller, tag) of a digest."""
        ...


class Authenticator:
    """Tells whose token a request carries.

    Parameters
    ----------
    store
        Keeps the digests of session tokens.
    secret
        The broker's secret; session tokens are derived from it.
    owner_token, owner_caller
        The connection file's token and the account's name.
    clock
        Unix seconds.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        secret: bytes,
        owner_token: str,
        owner_caller: str,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._secret = secret
        self._clock = clock
        self._owner_digest = _digest(owner_token)
        self._owner = Identity(caller=owner_caller, operator=True)
        self._known: OrderedDict[str, Identity] = OrderedDict()

    def cached(self, authorization: str | None) -> Identity | None:
        """Return the identity when it is known without asking the store."""
        token = _bearer(authorization)
        if token is None:
            return None
        digest = _digest(token)
        if hmac.compare_digest(digest, self._owner_digest):
            return self._owner
        return self._known.get(digest)

    async def authenticate(self, authorization: str | None) -> Identity | None:
        """Return who an ``Authorization`` header proves; ``None`` when it proves nobody."""
        identity = self.cached(authorization)
        if identity is not None:
            return identity
        token = _bearer(authorization)
        if token is None or not token.startswith(_SESSION_PREFIX):
            return None
        digest = _digest(token)
        found = await self._store.token(digest)
        if found is None:
            return None
        caller, lease_tag = found
        return self._remember(digest, Identity(caller=caller, session=lease_tag))

    async def session_token(self, caller: str, lease_tag: str) -> str:
        """Return the token of a session, durable before it is handed out."""
        message = "\0".join(("session", caller, lease_tag)).encode()
        token = _SESSION_PREFIX + hmac.new(self._secret, message, hashlib.sha256).hexdigest()
        digest = _digest(token)
        # always, and not only when it is new here: a goodbye may have revoked it since
        await self._store.put_token(digest, caller, lease_tag, self._clock())
        self._remember(digest, Identity(caller=caller, session=lease_tag))
        return token

    def forget(self, caller: str, lease_tag: str) -> None:
        """Drop a session's token after its goodbye revoked it in the store."""
        gone = Identity(caller=caller, session=lease_tag)
        for digest in [digest for digest, known in self._known.items() if known == gone]:
            del self._known[digest]

    def _remember(self, digest: str, identity: Identity) -> Identity:
        self._known[digest] = identity
        if len(self._known) > _CACHED:
            self._known.popitem(last=False)
        return identity


def _bearer(authorization: str | None) -> str | None:
    if authorization is None:
        return None
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()
