"""Sessions: a caller's named stretch of work, kept alive by its client's open stream.

``OPEN`` (its client is connected, or was heard from so recently that it counts as connected),
``WAITING`` (contact lost less than one period ago), ``LAPSED`` (a period has passed; whole again
when its client returns). A goodbye removes the session. A tag nobody registered is only a tag.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

SessionKey = tuple[str, str]
"""``(caller, lease_tag)``."""


class SessionState(str, Enum):
    """States of a stored session."""

    OPEN = "OPEN"
    WAITING = "WAITING"
    LAPSED = "LAPSED"


@dataclass(slots=True, eq=False)
class Session:
    """What decisions need to know about one session.

    Parameters
    ----------
    caller, tag
        Its key.
    client_id
        The client process that speaks for it; another one under the same tag takes it over.
    environment
        Digest of its interpreter's environment.
    pool
        The pool that its first job is expected in; None means the default pool.
    connected
        The client's stream is open.
    open_until
        Unix seconds until which it counts as open without a stream (just registered, or the
        broker has just started).
    expires_at
        Unix seconds at which it lapses unless its client is back.
    lapsed
        It has lapsed.
    """

    caller: str
    tag: str
    client_id: str
    environment: str | None = None
    pool: str | None = None
    connected: bool = False
    open_until: float = 0.0
    expires_at: float = 0.0
    lapsed: bool = False

    @property
    def key(self) -> SessionKey:
        """``(caller, tag)``."""
        return (self.caller, self.tag)

    def state(self, now: float) -> SessionState:
        """Return the state at ``now``."""
        if self.lapsed:
            return SessionState.LAPSED
        if self.connected or now < self.open_until:
            return SessionState.OPEN
        return SessionState.WAITING
