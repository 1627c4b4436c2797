"""The one map from errors of every part to refusals of the API, and so to statuses."""

from __future__ import annotations

from firepool_broker.api import errors
from firepool_broker.core.errors import Draining, SubmitRefused
from firepool_broker.store import errors as store

_BY_TYPE: tuple[tuple[type[Exception], type[errors.Refused], str], ...] = (
    (store.IdempotencyConflict, errors.Conflict, "IdempotencyConflict"),
    (store.BlobMissing, errors.NotFound, "NotFound"),
    (store.OutputMissing, errors.NotFound, "NotFound"),
    (store.DigestMismatch, errors.Invalid, "DigestMismatch"),
    (store.BlobRefused, errors.Invalid, "FileRefused"),
    (store.BlobTooLarge, errors.TooLarge, "TooLarge"),
    (store.StoreFull, errors.Unavailable, "StoreFull"),
    (store.StoreBusy, errors.Unavailable, "StoreBusy"),
    (store.StoreCorrupt, errors.Unavailable, "StoreCorrupt"),
    (store.LeadershipLost, errors.Unavailable, "NotLeader"),
    (store.StoreError, errors.Unavailable, "StoreUnavailable"),
)
_RETRY_SECONDS = 5.0


def refusal_for(error: Exception) -> errors.Refused | None:
    """Return what an error is answered with; ``None`` for a defect of the broker."""
    if isinstance(error, errors.Refused):
        return error
    if isinstance(error, SubmitRefused):
        kind = errors.Unavailable if isinstance(error, Draining) else errors.Impossible
        return kind(str(error), error_class=error.error_class, field=error.field)
    for source, target, word in _BY_TYPE:
        if isinstance(error, source):
            retry = _RETRY_SECONDS if target is errors.Unavailable else None
            job = error.job_id if isinstance(error, store.IdempotencyConflict) else None
            return target(str(error), error_class=word, retry_after=retry, job=job)
    return None
