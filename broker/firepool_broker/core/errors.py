"""Typed refusals of the decision core.

Every class carries the word a program acts on (``error_class``, the word of the API) and a message
that names what to change. None of them is raised for what a pod or a machine did: those become
events and, in the end, a job's error class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class CoreError(Exception):
    """Base of everything the core raises on purpose."""

    error_class: ClassVar[str] = "CoreError"


class PolicyError(CoreError, ValueError):
    """A configured value is unsafe or unknown.

    Parameters
    ----------
    setting
        The setting's full name, for example ``pools.cpu-small.max_count``.
    message
        What is wrong and which values are right.
    """

    error_class: ClassVar[str] = "ConfigurationInvalid"

    def __init__(self, setting: str, message: str) -> None:
        super().__init__(f"{setting}: {message}")
        self.setting = setting


class SubmitRefused(CoreError):
    """A job that can never run as asked; refused at submit.

    Parameters
    ----------
    message
        One line that names the fix.
    field
        The request's field at fault.
    """

    error_class: ClassVar[str] = "SubmitRefused"

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class UnknownSku(SubmitRefused):
    """The request names a pool that is not configured."""

    error_class: ClassVar[str] = "UnknownSku"

    def __init__(self, sku: str, known: Sequence[str], nearest: str | None = None) -> None:
        listed = ", ".join(known) or "none are configured"
        if sku:
            hint = f"; did you mean {nearest!r}?" if nearest else ""
            message = f"no pool is called {sku!r}{hint} (pools: {listed})"
        else:
            message = f"no pool was named and none is the default; name one (pools: {listed})"
        super().__init__(message, field="sku")
        self.nearest = nearest


class NoGpuPool(SubmitRefused):
    """The request asks for a GPU and no pool has one."""

    error_class: ClassVar[str] = "ShapeImpossible"

    def __init__(self, known: Sequence[str], field: str) -> None:
        listed = ", ".join(known) or "none"
        super().__init__(f"this machine has no GPU pool; pools: {listed}", field=field)


class ShapeImpossible(SubmitRefused):
    """No configured pool is large enough for the request."""

    error_class: ClassVar[str] = "ShapeImpossible"


class QuotaImpossible(SubmitRefused):
    """The request needs more than its caller, or its pool, may ever have."""

    error_class: ClassVar[str] = "QuotaImpossible"


class NotAvailable(SubmitRefused):
    """The request asks for something that its pool does not offer."""

    error_class: ClassVar[str] = "NotAvailable"


class Draining(SubmitRefused):
    """The broker is shutting down and takes no new work."""

    error_class: ClassVar[str] = "Draining"


class IllegalTransition(CoreError):
    """An edge that the entity's transition table does not have; a defect of the broker.

    Parameters
    ----------
    entity
        What was about to move, for example ``pod cpu-small-1f``.
    start, finish
        The states.
    story
        The entity's last transitions, oldest first.
    """

    error_class: ClassVar[str] = "IllegalTransition"

    def __init__(self, entity: str, start: str, finish: str, story: Sequence[str]) -> None:
        history = "; ".join(story) or "no earlier transition"
        super().__init__(f"{entity} cannot go from {start} to {finish} (story: {history})")
        self.entity = entity
        self.start = start
        self.finish = finish
        self.story = tuple(story)


class InvariantBroken(CoreError, AssertionError):
    """``validate_state`` found an index that differs from its recomputation."""

    error_class: ClassVar[str] = "InvariantBroken"
