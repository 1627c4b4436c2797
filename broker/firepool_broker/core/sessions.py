"""Sessions: a caller's named stretch of work, kept alive by its client's open stream.

``OPEN`` (its client is connected, or was heard from so recently that it counts as connected),
``WAITING`` (contact lost less than one period ago), ``LAPSED`` (a period has passed; whole again
when its client returns). A goodbye removes the session. A tag nobody registered is only a tag.
"""

from __future__ import annotations

from collections.abc import Iterator
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


class SessionBook:
    """Every stored session, and which of them are open.

    Parameters
    ----------
    ttl_seconds
        How long a session without its client stays whole.
    open_sessions
        The set of open sessions' keys; shared with the tracker's predicate, changed here alone.
    """

    def __init__(self, ttl_seconds: float, open_sessions: set[SessionKey]) -> None:
        self.ttl_seconds = ttl_seconds
        self.open_sessions = open_sessions
        self._sessions: dict[SessionKey, Session] = {}

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def get(self, key: SessionKey | None) -> Session | None:
        """Return a session; None when nobody registered it."""
        return None if key is None else self._sessions.get(key)

    def is_open(self, key: SessionKey) -> bool:
        """Whether the session's client counts as connected."""
        return key in self.open_sessions

    def is_away(self, key: SessionKey | None) -> bool:
        """Whether it is a stored session whose client is not there."""
        return key is not None and key in self._sessions and key not in self.open_sessions

    def has_lapsed(self, key: SessionKey | None) -> bool:
        """Whether it is a stored session that has lapsed."""
        return key is not None and key in self._sessions and self._sessions[key].lapsed

    def any_live(self) -> bool:
        """Whether any session has not lapsed."""
        return any(not session.lapsed for session in self._sessions.values())

    def put(self, session: Session, now: float) -> Session | None:
        """Register or update a session: it counts as open for one period.

        Returns
        -------
        Session or None
            What was registered under its key before (another object, unchanged).
        """
        before = self._sessions.get(session.key)
        session.connected = (
            before is not None and before.connected and before.client_id == session.client_id
        )
        session.lapsed = False
        self._sessions[session.key] = session
        self._renew(session, now)
        return before

    def connect(self, key: SessionKey, client_id: str, now: float) -> Session | None:
        """Note that the client's stream opened; None for an unknown or replaced client."""
        session = self._sessions.get(key)
        if session is None or session.client_id != client_id:
            return None
        session.connected = True
        session.lapsed = False
        self._renew(session, now)
        return session

    def disconnect(self, key: SessionKey, client_id: str, now: float) -> Session | None:
        """Note that the client's stream closed; None for an unknown or replaced client."""
        session = self._sessions.get(key)
        if session is None or session.client_id != client_id or not session.connected:
            return None
        session.connected = False
        session.open_until = 0.0
        session.expires_at = now + self.ttl_seconds
        self.open_sessions.discard(key)
        return session

    def restart(self, key: SessionKey, now: float) -> None:
        """Await the successor of a client that said goodbye; the session counts as open."""
        session = self._sessions[key]
        session.connected = False
        session.lapsed = False
        self._renew(session, now)

    def heard(self, key: SessionKey, client_id: str | None, now: float) -> Session | None:
        """Note a sign of life of a client that counted as away; None when it changes nothing."""
        session = self._sessions.get(key)
        if session is None or key in self.open_sessions or client_id != session.client_id:
            return None
        session.lapsed = False
        self._renew(session, now)
        return session

    def lapse_if_due(self, key: SessionKey, now: float) -> Session | None:
        """Let a session lapse whose client has been away for a period; None when it is not due."""
        session = self._sessions.get(key)
        if session is None or session.connected or session.lapsed or now < session.expires_at:
            return None
        session.lapsed = True
        session.open_until = 0.0
        self.open_sessions.discard(key)
        return session

    def remove(self, key: SessionKey) -> Session | None:
        """Forget a session."""
        self.open_sessions.discard(key)
        return self._sessions.pop(key, None)

    def _renew(self, session: Session, now: float) -> None:
        session.open_until = session.expires_at = now + self.ttl_seconds
        self.open_sessions.add(session.key)
