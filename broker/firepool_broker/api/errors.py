"""Refusals of the API, and the one map from every typed error to its status.

The contract: whatever the caller did wrong is answered with a status below 500 and a body
``{"error": {"class", "message", "field"?, "retry_after"?, "job"?}}``. A part of the broker that
refuses something raises one of these (or one of the store's errors) and never picks a status.
"""

from __future__ import annotations

from firepool_broker.api.types import ErrorDetail, ErrorView


class Refused(Exception):
    """A request that is not carried out, with a class that a program can act on.

    Parameters
    ----------
    message
        A sentence that names the fix.
    error_class
        The word in the answer's ``class``; the exception's own by default.
    field
        The request's field that is wrong.
    retry_after
        Seconds after which the same request may succeed.
    job
        The job that is concerned.
    """

    status = 400
    error_class = "BadRequest"

    def __init__(
        self,
        message: str,
        *,
        error_class: str | None = None,
        field: str | None = None,
        retry_after: float | None = None,
        job: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.error_class = error_class or type(self).error_class
        self.field = field
        self.retry_after = retry_after
        self.job = job

    def view(self) -> ErrorView:
        """Return the body of the answer."""
        return ErrorView(
            error=ErrorDetail(
                error_class=self.error_class,
                message=self.message,
                field_name=self.field,
                retry_after=self.retry_after,
                job=self.job,
            )
        )


class Invalid(Refused):
    """The request does not decode, or a field holds what it must not."""

    status = 400
    error_class = "InvalidRequest"


class UnknownField(Invalid):
    """The request has a field that does not exist."""

    error_class = "UnknownField"


class Unauthorized(Refused):
    """No token, or one that is not known."""

    status = 401
    error_class = "Unauthorized"


class Forbidden(Refused):
    """The token is good but may not do this."""

    status = 403
    error_class = "Forbidden"


class NotFound(Refused):
    """There is no such thing, or it belongs to another caller."""

    status = 404
    error_class = "NotFound"


class MethodNotAllowed(Refused):
    """The resource exists but does not take this method."""

    status = 405
    error_class = "MethodNotAllowed"


class Conflict(Refused):
    """The request contradicts what is already there."""

    status = 409
    error_class = "Conflict"


class TooLarge(Refused):
    """The body is larger than what is taken."""

    status = 413
    error_class = "TooLarge"


class NotAvailable(Refused):
    """The option exists but nothing behind this broker serves it."""

    status = 422
    error_class = "NotAvailable"


class Impossible(Refused):
    """No pod could ever run this job (``ShapeImpossible``, ``QuotaImpossible``)."""

    status = 422
    error_class = "ShapeImpossible"


class Overloaded(Refused):
    """The queue is full; ``retry_after`` says when to come back."""

    status = 429
    error_class = "QueueFull"


class Unavailable(Refused):
    """The broker cannot serve this now: it starts, drains, or is no longer the leader."""

    status = 503
    error_class = "Unavailable"
