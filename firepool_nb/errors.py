"""Every error of the notebook side, as types that a program can act on.

Three families, all below `FirepoolError`:

* `BrokerError`: the broker refused or cannot be reached;
* `CaptureError`: a cell cannot be sent, found out before anything is;
* `RemoteError`: a job ended without success. What user code raised arrives as a class that is both
  `RemoteError` and the original one (``except ValueError`` works); every other end has a class of
  its own (`PodLost`, `OutOfMemory`, …).

`Interrupted` stands apart: it is a `KeyboardInterrupt`, so that ``except Exception`` lets it pass.
All of them render as one short message, a remote exception as its remote traceback.
"""

from __future__ import annotations

import base64
import builtins
from collections.abc import Sequence
from typing import Any

__all__ = [
    "BrokerError",
    "BrokerStartFailed",
    "BrokerUnreachable",
    "CaptureError",
    "CodeExpected",
    "FirepoolError",
    "ImageRejected",
    "Interrupted",
    "InvalidCode",
    "JobCancelled",
    "JobTimeout",
    "LaunchFailed",
    "MissingName",
    "NoBroker",
    "NotAvailable",
    "NotPicklable",
    "OutOfMemory",
    "PackageInvalid",
    "PodLost",
    "Preempted",
    "ProcessFailed",
    "ProcessKilled",
    "QueueTimeout",
    "Refused",
    "RemoteError",
    "RequirementsFailed",
    "SessionClosed",
    "ValueTooLarge",
    "WireMismatch",
    "WorkingFolderGone",
    "job_error",
]


class _Short:
    """Renders as one line in notebooks and terminals: where it was raised here says nothing."""

    def _render_traceback_(self) -> list[str]:
        name = type(self).__name__
        return [f"\x1b[31m{name}\x1b[39m: {self}"]


class FirepoolError(_Short, Exception):
    """Base of everything this package raises on purpose."""


# -- the broker ----------------------------------------------------------------------------------


class BrokerError(FirepoolError):
    """The broker refused something or cannot be reached."""


class BrokerUnreachable(BrokerError, ConnectionError):
    """No broker answers; the message says what was tried."""


class BrokerStartFailed(BrokerUnreachable):
    """The machine's own broker could not be started; the message ends with its own words."""


class NoBroker(BrokerUnreachable):
    """No broker runs, and none was to be started."""


class WireMismatch(BrokerError):
    """Client and broker speak different versions; the message names both and the way out."""


class Refused(BrokerError):
    """The broker refused a request.

    Attributes
    ----------
    status
        HTTP status.
    error_class
        The broker's word for the reason.
    field
        The field of the request that is wrong, if one is.
    retry_after
        Seconds after which to try again, if that helps.
    job
        Id of the job that is concerned, if one is.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 0,
        error_class: str = "",
        field: str | None = None,
        retry_after: float | None = None,
        job: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.error_class = error_class
        self.field = field
        self.retry_after = retry_after
        self.job = job


class NotAvailable(Refused):
    """The pool or broker at hand does not offer what was asked for."""


def refused(status: int, body: Any) -> Refused:
    """Make the error for a refusal as the broker sent it."""
    detail = body.get("error") if isinstance(body, dict) else None
    if not isinstance(detail, dict):
        return Refused(f"the broker answered with status {status}", status=status)
    error_class = str(detail.get("class", ""))
    kind = NotAvailable if error_class == "NotAvailable" else Refused
    return kind(
        str(detail.get("message", "")),
        status=status,
        error_class=error_class,
        field=detail.get("field"),
        retry_after=detail.get("retry_after"),
        job=detail.get("job"),
    )


# -- capture -------------------------------------------------------------------------------------


class WorkingFolderGone(FirepoolError, FileNotFoundError):
    """The folder that this process works in does not exist any more."""


class CaptureError(FirepoolError):
    """A cell cannot be sent as it is; nothing was sent."""


class InvalidCode(CaptureError):
    """The cell is not valid Python; shown as IPython shows it, with the notebook's own lines.

    What is raised is also the `SyntaxError` that Python found, under that name.
    """

    _lines: tuple[str, ...] = ()

    def _render_traceback_(self) -> list[str]:
        return list(self._lines) or super()._render_traceback_()


def invalid_code(found: SyntaxError, lines: Sequence[str]) -> InvalidCode:
    """Make the error for code that cannot be compiled.

    Parameters
    ----------
    found
        What Python says.
    lines
        How the shell shows it.
    """
    kind: Any = type(type(found).__name__, (InvalidCode, type(found)), {"__module__": __name__})
    error: InvalidCode = kind(*found.args)
    error._lines = tuple(lines)
    return error


class CodeExpected(CaptureError, TypeError):
    """Something else was submitted where the text of a cell is expected."""


class MissingName(CaptureError, NameError):
    """The cell reads a name that exists neither here nor in the cell."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name


class ValueTooLarge(CaptureError, ValueError):
    """A value is larger than what may travel; the message names it, its size and the limit."""


class NotPicklable(CaptureError, TypeError):
    """A value cannot travel; the message names the variable, its type and the way to it."""


# -- how jobs end ------------------------------------------------------------------------------


class RemoteError(FirepoolError):
    """A job ended without success.

    Attributes
    ----------
    job
        Id of the job.
    error_class
        The broker's word for how it ended, for example ``NonZeroExit`` or ``PodLost``.
    ename, evalue
        Name and text of the exception that ended user code, if one did.
    remote_traceback
        Its traceback, as lines ready for a terminal or a notebook.
    exit_code
        Exit code of the job's process, if it exited.
    """

    job: str = ""
    error_class: str = ""
    ename: str | None = None
    evalue: str | None = None
    remote_traceback: tuple[str, ...] = ()
    exit_code: int | None = None
    hint: str | None = None
    _message: str = ""

    def __str__(self) -> str:
        return self._message

    def __reduce__(self) -> tuple[Any, ...]:
        # its class may be made for this one exception; what survives a pickle is what it says
        return _rebuilt, (self._message, dict(_plain_state(self)))

    def _render_traceback_(self) -> list[str]:
        if self.remote_traceback:
            lines = list(self.remote_traceback)
        else:
            lines = [f"\x1b[31m{self.ename or type(self).__name__}\x1b[39m: {self}"]
        return [*lines, self.hint] if self.hint else lines


class PodLost(RemoteError):
    """The pod died, or was taken away, while the job ran."""


class OutOfMemory(RemoteError, MemoryError):
    """The job used more memory than its pod has."""


class JobTimeout(RemoteError, TimeoutError):
    """The job ran longer than its timeout."""


class QueueTimeout(RemoteError, TimeoutError):
    """The job waited longer than the queue allows."""


class JobCancelled(RemoteError):
    """The job was cancelled."""


class SessionClosed(RemoteError):
    """The job's session ended before the job did."""


class RequirementsFailed(RemoteError):
    """The job's requirements could not be installed; the message is the resolver's own."""


class PackageInvalid(RemoteError):
    """The job's package was refused; the message names the entry."""


class ImageRejected(RemoteError):
    """The job's image was refused."""


class LaunchFailed(RemoteError):
    """The job could not be started."""


class Preempted(RemoteError):
    """The pod was borrowed capacity and its owner took it back."""


class ProcessKilled(RemoteError):
    """The job's process was ended by a signal."""


class ProcessFailed(RemoteError):
    """The job's process ended with another exit code than 0."""


class Interrupted(_Short, KeyboardInterrupt):
    """The person interrupted the job, or left the wait for it.

    Attributes
    ----------
    job
        Id of the job, if it was sent.
    remote_traceback
        Where the remote code stood, if it said so.
    """

    def __init__(
        self, message: str, job: str | None = None, remote_traceback: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.job = job
        self.remote_traceback = remote_traceback

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.job, self.remote_traceback)

    def _render_traceback_(self) -> list[str]:
        return [*self.remote_traceback, *super()._render_traceback_()]


_CLASSES: dict[str, type[RemoteError]] = {
    "OOM": OutOfMemory,
    "NonZeroExit": ProcessFailed,
    "Signal": ProcessKilled,
    "Timeout": JobTimeout,
    "Cancelled": JobCancelled,
    "SessionClosed": SessionClosed,
    "PodLost": PodLost,
    "LaunchFailed": LaunchFailed,
    "PackageInvalid": PackageInvalid,
    "RequirementsFailed": RequirementsFailed,
    "ImageRejected": ImageRejected,
    "QueueTimeout": QueueTimeout,
    "Preempted": Preempted,
}
_STATE = ("job", "error_class", "ename", "evalue", "remote_traceback", "exit_code", "hint")
# Attributes of built-in exceptions that live outside their __dict__.
_SLOTS = (
    *("errno", "strerror", "filename", "filename2", "name", "obj", "path", "msg", "lineno"),
    *("offset", "text", "end_lineno", "end_offset", "encoding", "object", "start", "end"),
    *("reason", "value", "name_from"),
)


def _plain_state(error: RemoteError) -> list[tuple[str, Any]]:
    return [(name, getattr(error, name)) for name in _STATE]


def _rebuilt(message: str, state: dict[str, Any]) -> RemoteError:
    kind = _CLASSES.get(state["error_class"], RemoteError)
    error = RemoteError(message) if state["ename"] else kind(message)
    error._message = message
    for name, value in state.items():
        setattr(error, name, value)
    return error


def job_error(
    view: dict[str, Any], raised: dict[str, Any] | None = None
) -> RemoteError | Interrupted:
    """Make the error that a job's end means.

    Parameters
    ----------
    view
        The job as the broker sees it, ended without success.
    raised
        The ``error`` message of its output, which may carry the exception itself.

    Returns
    -------
    RemoteError or Interrupted
        Not raised yet. Exceptions that cannot be rebuilt still have their name, text and
        traceback; nothing that goes wrong here replaces what the job said.
    """
    error = view.get("error") or {}
    error_class = str(error.get("class") or view.get("state", ""))
    raised = raised or {}
    ename = error.get("ename") or raised.get("ename")
    evalue = error.get("evalue") if error.get("evalue") is not None else raised.get("evalue")
    traceback = tuple(error.get("traceback") or raised.get("traceback") or ())
    message = str(error.get("message") or error_class)
    if error_class == "Interrupted":
        return Interrupted(message, view.get("id"), traceback)
    if ename and error_class in ("NonZeroExit", ""):
        result = _user_error(str(ename), raised.get("exception"))
        message = str(evalue) if evalue is not None else message
    else:
        result = _CLASSES.get(error_class, RemoteError)()
    result._message = message
    result.job = str(view.get("id", ""))
    result.error_class = error_class
    result.ename = str(ename) if ename else None
    result.evalue = str(evalue) if evalue is not None else None
    result.remote_traceback = traceback
    result.exit_code = view.get("exit_code")
    return result


def _user_error(ename: str, pickled: str | None) -> RemoteError:
    """Make an instance that is `RemoteError` and, where possible, the original class."""
    original = _unpickled(pickled)
    if original is not None and type(original).__name__ == ename:
        base: Any = type(original)
    else:
        original, base = None, getattr(builtins, ename, None)
    if not (isinstance(base, type) and issubclass(base, BaseException)):
        base = None
    try:
        result = _instance(ename, base, original)
        str(result)
    except Exception:  # noqa: BLE001 - exception classes are user code and may refuse anything
        result = _instance(ename, None, None)
    return result


def _instance(ename: str, base: Any, original: BaseException | None) -> RemoteError:
    if base is None or issubclass(base, (SystemExit, GeneratorExit, KeyboardInterrupt)):
        bases: tuple[type, ...] = (RemoteError,)
    elif issubclass(base, RemoteError):
        bases = (base,)
    else:
        bases = (RemoteError, base)
    module = base.__module__ if base is not None else RemoteError.__module__
    body = {"__module__": module, "__doc__": getattr(base, "__doc__", None)}
    kind: Any = type(ename, bases, body)
    if original is None:
        result: Any = kind.__new__(kind)
        return result  # type: ignore[no-any-return]
    try:
        result = kind.__new__(kind, *original.args)
    except TypeError:
        result = kind.__new__(kind)
    result.args = original.args
    for name in _SLOTS:
        if hasattr(original, name):
            try:
                setattr(result, name, getattr(original, name))
            except (AttributeError, TypeError):  # read-only on some classes
                continue
    for name, value in vars(original).items():
        if name not in _STATE:
            result.__dict__[name] = value
    return result  # type: ignore[no-any-return]


def _unpickled(pickled: str | None) -> BaseException | None:
    if not pickled:
        return None
    from .capture import returning

    try:
        value = returning.loads(base64.b64decode(pickled))
    except Exception:  # noqa: BLE001 - rebuilding runs user code; its name and text are enough
        return None
    return value if isinstance(value, BaseException) else None
