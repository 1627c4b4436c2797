"""How a job's end becomes an error here."""

from __future__ import annotations

import base64
import copy
import pickle
import sys
import urllib.error
from typing import Any

import pytest
from firepool_podagent.interpreter import errors as pod_errors

from firepool_nb import errors
from firepool_nb.errors import Interrupted, RemoteError, job_error


def view(error_class: str = "NonZeroExit", **error: Any) -> dict[str, Any]:
    detail = {"class": error_class, "message": "text", **error}
    return {"id": "j-1", "state": "FAILED", "error": detail, "exit_code": 1}


def end_with(raised: BaseException) -> RemoteError | Interrupted:
    """End a job with an exception as the pod describes and sends it."""
    lines = ["Traceback", f"{type(raised).__name__}: …"]
    described = pod_errors.describe(raised, lines)
    message = pod_errors.message(raised, lines)
    return job_error({"id": "j-1", "state": "FAILED", "error": described}, message)


GROUPS = (
    [ExceptionGroup("several", [ValueError(1)])]  # noqa: F821 - new in Python 3.11
    if sys.version_info >= (3, 11)
    else []
)


class ApiError(Exception):
    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code


class WithoutText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Refusing(Exception):
    def __new__(cls, *args: object) -> Refusing:
        if args != ("yes",):
            raise ValueError("only yes")
        return super().__new__(cls, *args)


@pytest.mark.parametrize(
    "raised",
    [
        ValueError("x"),
        KeyError("k"),
        ZeroDivisionError("division by zero"),
        FileNotFoundError(2, "No such file or directory", "a.csv"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        ImportError("no", name="m", path="/p"),
        StopIteration(3),
        AssertionError(),
        NotImplementedError("later"),
        urllib.error.HTTPError("u", 500, "boom", None, None),  # type: ignore[arg-type]
        ApiError(404, detail="no such run"),
        Refusing("yes"),
        *GROUPS,
    ],
    ids=lambda raised: type(raised).__name__,
)  # fmt: skip
def test_user_exceptions_keep_their_class(raised: Exception) -> None:
    error = end_with(raised)
    assert isinstance(error, RemoteError)
    assert isinstance(error, type(raised))
    assert type(error).__name__ == type(raised).__name__
    assert error.ename == type(raised).__name__
    assert str(error) == str(raised)
    assert [repr(each) for each in error.args] == [repr(each) for each in raised.args]
    assert error.remote_traceback[-1].startswith(type(raised).__name__)
    with pytest.raises(type(raised)):
        raise error


def test_attributes_come_along() -> None:
    missing = end_with(FileNotFoundError(2, "No such file or directory", "a.csv"))
    assert (missing.errno, missing.filename) == (2, "a.csv")  # type: ignore[union-attr]
    assert end_with(ApiError(404, detail="x")).code == 404  # type: ignore[union-attr]
    assert end_with(StopIteration(3)).value == 3  # type: ignore[union-attr]


def test_an_exception_without_text_keeps_its_name() -> None:
    error = end_with(WithoutText())
    assert isinstance(error, RemoteError)
    assert error.ename == "WithoutText"
    assert "no text" in str(error)


def test_exceptions_that_cannot_be_rebuilt_keep_name_and_traceback() -> None:
    told = view(ename="ApiError", evalue="404: gone", traceback=["line 1", "ApiError: 404: gone"])
    for exception in (None, "AAAA", base64.b64encode(pickle.dumps(3)).decode()):
        error = job_error(told, {"exception": exception})
        assert type(error).__name__ == "ApiError"
        assert isinstance(error, RemoteError)
        assert str(error) == "404: gone"
        assert error.remote_traceback == ("line 1", "ApiError: 404: gone")


def test_builtin_classes_are_known_by_name() -> None:
    error = job_error(view(ename="ValueError", evalue="x"))
    assert isinstance(error, ValueError)
    assert isinstance(error, RemoteError)


@pytest.mark.parametrize("ename", ["SystemExit", "GeneratorExit", "print", "__name__"])
def test_names_that_must_not_become_base_classes(ename: str) -> None:
    error = job_error(view(ename=ename, evalue="x"))
    assert isinstance(error, RemoteError)
    assert not isinstance(error, SystemExit | GeneratorExit)


@pytest.mark.parametrize(
    ("error_class", "expected", "also"),
    [
        ("OOM", errors.OutOfMemory, MemoryError),
        ("Signal", errors.ProcessKilled, RemoteError),
        ("Timeout", errors.JobTimeout, TimeoutError),
        ("QueueTimeout", errors.QueueTimeout, TimeoutError),
        ("Cancelled", errors.JobCancelled, RemoteError),
        ("SessionClosed", errors.SessionClosed, RemoteError),
        ("PodLost", errors.PodLost, RemoteError),
        ("LaunchFailed", errors.LaunchFailed, RemoteError),
        ("PackageInvalid", errors.PackageInvalid, RemoteError),
        ("RequirementsFailed", errors.RequirementsFailed, RemoteError),
        ("ImageRejected", errors.ImageRejected, RemoteError),
        ("Preempted", errors.Preempted, RemoteError),
        ("NonZeroExit", errors.ProcessFailed, RemoteError),
        ("SomethingNew", RemoteError, Exception),
    ],
)
def test_every_other_end_has_its_class(
    error_class: str, expected: type[RemoteError], also: type[BaseException]
) -> None:
    error = job_error(view(error_class))
    assert type(error) is expected
    assert isinstance(error, also)
    assert isinstance(error, RemoteError)
    assert str(error) == "text"
    assert error.job == "j-1"
    assert error._render_traceback_() == [f"\x1b[31m{expected.__name__}\x1b[39m: text"]


def test_interrupted_is_a_keyboard_interrupt_and_no_exception() -> None:
    error = job_error(view("Interrupted", ename="KeyboardInterrupt", traceback=["here"]))
    assert isinstance(error, KeyboardInterrupt)
    assert not isinstance(error, Exception)
    assert error._render_traceback_()[0] == "here"


def test_the_remote_traceback_is_rendered_once_with_its_hint() -> None:
    error = job_error(view(ename="NameError", evalue="x", traceback=["tb", "NameError: x"]))
    assert isinstance(error, RemoteError)
    assert error._render_traceback_() == ["tb", "NameError: x"]
    error.hint = "send it with -i x"
    assert error._render_traceback_()[-1] == "send it with -i x"


def test_errors_survive_pickling_and_copying() -> None:
    error = end_with(ValueError("x"))
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert isinstance(again, RemoteError)
        assert str(again) == "x"
        assert again.ename == "ValueError"
    lost = pickle.loads(pickle.dumps(job_error(view("PodLost"))))
    assert type(lost) is errors.PodLost
    left = pickle.loads(pickle.dumps(Interrupted("left", "j-1")))
    assert left.job == "j-1"
