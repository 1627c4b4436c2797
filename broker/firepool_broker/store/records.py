"""Rows of the store, as the rest of the broker sees them.

``request`` and ``outcome`` are JSON documents (bytes): the store keeps them and does not look
inside. Times are Unix seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, Struct, UnsetType


class JobRow(Struct, kw_only=True):
    """A job as it is stored."""

    id: str
    caller: str
    request: bytes
    """The ``JobRequest``, JSON."""
    request_digest: str
    """SHA-256 of the canonical request, by which a repeated submit is recognised."""
    kind: str
    queue: str
    submitted_at: float
    state: str = "QUEUED"
    version: int = 1
    """Rises with every committed change; every conditional write names it."""
    attempt: int = 0
    name: str | None = None
    lease_tag: str | None = None
    client_id: str | None = None
    sku: str | None = None
    attached: bool = True
    priority: int = 0
    user_retries: int = 0
    infra_retries: int = 0
    acquisition_path: str | None = None
    acquisition_reason: str | None = None
    error: bytes | None = None
    """The ``JobError``, JSON."""
    outcome: bytes | None = None
    """What the last attempt's agent reported, JSON."""
    exit_code: int | None = None
    queued_at: float | None = None
    claimed_at: float | None = None
    committed_at: float | None = None
    handed_off_at: float | None = None
    first_instruction_at: float | None = None
    ended_at: float | None = None


class JobChange(Struct, kw_only=True):
    """Columns that a transition changes; what is unset stays as it is."""

    attempt: int | UnsetType = UNSET
    sku: str | UnsetType | None = UNSET
    user_retries: int | UnsetType = UNSET
    infra_retries: int | UnsetType = UNSET
    acquisition_path: str | UnsetType | None = UNSET
    acquisition_reason: str | UnsetType | None = UNSET
    error: bytes | UnsetType | None = UNSET
    outcome: bytes | UnsetType | None = UNSET
    exit_code: int | UnsetType | None = UNSET
    queued_at: float | UnsetType | None = UNSET
    claimed_at: float | UnsetType | None = UNSET
    committed_at: float | UnsetType | None = UNSET
    handed_off_at: float | UnsetType | None = UNSET
    first_instruction_at: float | UnsetType | None = UNSET
    ended_at: float | UnsetType | None = UNSET


class Launch(Struct, frozen=True, kw_only=True):
    """One ``QUEUED -> RUNNING`` transition with the pods that it binds.

    Parameters
    ----------
    job_id, version
        The row and the version it must still have.
    attempt
        Number of the attempt that starts.
    pods
        ``(name, uid)`` of each pod.
    path, reason
        Acquisition path, and why no warmer one was used.
    claimed_at, committed_at
        Unix seconds.
    """

    job_id: str
    version: int
    attempt: int
    pods: Sequence[tuple[str, str]]
    path: str
    reason: str
    claimed_at: float
    committed_at: float


class BindingRow(Struct, frozen=True, kw_only=True):
    """A committed binding of a pod to an attempt, with the owner that it makes."""

    job_id: str
    attempt: int
    pod_name: str
    pod_uid: str
    caller: str
    lease_tag: str | None
    queue: str
    committed_at: float


class SessionRow(Struct, kw_only=True):
    """A stored session."""

    caller: str
    lease_tag: str
    client_id: str
    request: bytes
    """The ``SessionRequest``, JSON."""
    session_dir: str
    created_at: float
    expires_at: float
    ended_at: float | None = None
    """When a goodbye ended it; such a row is kept until its folder is wiped."""
