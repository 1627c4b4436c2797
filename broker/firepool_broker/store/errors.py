"""What can go wrong with the store, as errors that name the fix.

None of them loses anything: a write that raised was not committed.
"""

from __future__ import annotations


class StoreError(Exception):
    """Base of the store's errors."""


class StoreCorrupt(StoreError):
    """The database file is damaged; it is left as it is."""


class StoreFull(StoreError):
    """No space (or quota) is left for the database, outputs or blobs."""


class StoreBusy(StoreError):
    """Another process holds the database; the write may be tried again."""


class StoreUnavailable(StoreError):
    """The database cannot be opened or written (permissions, missing folder, I/O error)."""


class StoreClosed(StoreError):
    """The store was closed before the write was taken."""


class SchemaTooNew(StoreError):
    """The database was written by a newer version of this program."""


class WriteRefused(StoreError):
    """Base of what refuses one write and leaves those that share its transaction alone."""


class LeadershipLost(WriteRefused):
    """Another broker leads now: nothing of this write was committed."""


class LeadershipHeld(WriteRefused):
    """Another broker leads and its lease has not run out.

    Parameters
    ----------
    holder
        Who leads.
    expires_at
        When its lease runs out, in Unix seconds.
    """

    def __init__(self, holder: str, expires_at: float) -> None:
        super().__init__(
            f"{holder} leads this store until {expires_at:.0f}; wait for its lease to run out "
            "or stop it"
        )
        self.holder = holder
        self.expires_at = expires_at


class IdempotencyConflict(WriteRefused):
    """A job id or idempotency key was used before for a different request.

    Parameters
    ----------
    message
        A sentence for people.
    job_id
        The job that the first request made; ``None`` when it belongs to another caller.
    """

    def __init__(self, message: str, job_id: str | None) -> None:
        super().__init__(message)
        self.job_id = job_id


class OutputGap(StoreError):
    """Messages of an attempt arrived with a number missing.

    Parameters
    ----------
    job_id
        The job.
    expected
        The agent's number that should have come.
    got
        The number that came.
    """

    def __init__(self, job_id: str, expected: int, got: int) -> None:
        super().__init__(f"output of {job_id}: expected message {expected}, got {got}")
        self.expected = expected
        self.got = got


class OutputMissing(StoreError):
    """There is no output of this job: it wrote none yet, or its retention is over."""


class BlobMissing(StoreError):
    """There is no such blob or package."""


class DigestMismatch(StoreError):
    """The bytes of an upload do not have the digest that it was named by."""


class BlobTooLarge(StoreError):
    """An upload is larger than its limit."""


class BlobRefused(StoreError):
    """A file that was named cannot be taken (not a regular file, not readable)."""
