"""What the API's handlers call: the port behind which the broker's loop stands.

The contract: handlers decode, authenticate and validate; everything here decides and acts.
Each method takes the verified ``Identity`` and confines itself to that caller's own jobs and
sessions: what belongs to another caller is ``NotFound``, never ``Forbidden``, so that its
existence does not leak. Refusals are raised as the errors of ``api.errors`` (or the store's).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Literal, Protocol

from firepool_broker.api import types
from firepool_broker.identity.identities import Identity

Goodbye = Literal["shutdown", "restart"]


class BrokerService(Protocol):
    """The broker's actions, as the HTTP API needs them."""

    # -- jobs ----------------------------------------------------------------------------------

    async def submit(
        self,
        identity: Identity,
        request: types.JobRequest,
        idempotency_key: str | None,
    ) -> tuple[types.JobView, bool]:
        """Accept a job durably and wake the dispatcher.

        ``request`` has passed ``api.validation.check_job``; ``request.lease_tag`` is the token's
        own session when the client left it out.

        Returns
        -------
        tuple
            The job, and whether this call created it (``False``: the same request was seen).

        Raises
        ------
        IdempotencyConflict
            The id or key was used for a different request.
        Refused
            The job can never run (``ShapeImpossible``, ``QuotaImpossible``) or not now
            (``Overloaded``, with ``retry_after``).
        """
        ...

    async def job(self, identity: Identity, job_id: str) -> types.JobView:
        """Return one job; raises ``NotFound``."""
        ...

    async def jobs(
        self,
        identity: Identity,
        *,
        state: types.JobState | None,
        lease_tag: str | None,
        limit: int,
        before: str | None,
    ) -> list[types.JobView]:
        """List the caller's jobs, newest first; ``before`` is the id of the last job seen."""
        ...

    async def cancel(self, identity: Identity, job_id: str) -> types.JobView:
        """Cancel a job: a queued one at once, a running one by terminating its attempt."""
        ...

    async def interrupt(self, identity: Identity, job_id: str, *, kill: bool) -> types.JobView:
        """Interrupt a running job; a job that does not run yet is cancelled."""
        ...

    def output(
        self, identity: Identity, job_id: str, start: int
    ) -> AsyncIterator[types.StreamEvent]:
        """Stream a job: ``job`` first, its messages from number ``start``, ``end`` last.

        Un-numbered ``status`` events come in between as the job moves. ``NotFound`` is raised
        by the first step of the iteration, before anything was yielded.
        """
        ...

    # -- sessions ------------------------------------------------------------------------------

    async def open_session(
        self, identity: Identity, request: types.SessionRequest
    ) -> types.SessionOpened:
        """Register or update a session; the handler fills in ``token`` (leave it empty)."""
        ...

    async def sessions(self, identity: Identity) -> list[types.SessionView]:
        """List the caller's sessions."""
        ...

    async def session(self, identity: Identity, lease_tag: str) -> types.SessionView:
        """Return one session; raises ``NotFound``."""
        ...

    async def session_connected(self, identity: Identity, lease_tag: str, client_id: str) -> None:
        """Count a client's stream as open; ``NotFound`` or ``Conflict`` (another client's)."""
        ...

    async def session_disconnected(
        self, identity: Identity, lease_tag: str, client_id: str
    ) -> None:
        """Count a client's stream as closed: the session lapses after its time to live."""
        ...

    async def close_session(
        self, identity: Identity, lease_tag: str, client_id: str | None, how: Goodbye
    ) -> None:
        """Take a goodbye; one from a client that was taken over does nothing."""
        ...

    async def release_session(self, identity: Identity, lease_tag: str) -> list[str]:
        """Give the session's held pods back; returns their names."""
        ...

    # -- pools, pods, events -------------------------------------------------------------------

    async def pools(self, identity: Identity) -> types.PoolList:
        """List pools with their counts."""
        ...

    async def pods(self, identity: Identity) -> list[types.PodView]:
        """List pods; of another caller's pods only pool and state are told."""
        ...

    async def retire_pod(self, identity: Identity, name: str) -> None:
        """Drain one of the caller's own pods (any pod for an operator)."""
        ...

    def events(self, identity: Identity) -> AsyncIterator[types.StreamEvent]:
        """Stream ``job``, ``pod``, ``pool`` and ``session`` changes, for panels."""
        ...

    # -- the broker itself ---------------------------------------------------------------------

    def info(self) -> types.BrokerInfo:
        """Return what ``whoami`` says about the broker."""
        ...

    def ready(self) -> bool:
        """Tell whether jobs are accepted: the store is open and the tracker rebuilt."""
        ...

    async def shutdown(self, identity: Identity, *, drain: bool, cancel: bool) -> None:
        """Begin to end the broker; returns at once."""
        ...
