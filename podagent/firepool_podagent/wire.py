"""What the broker and a pod agent say to each other: names, limits, signatures.

This is the one module of the agent that the broker imports. It does no I/O and keeps no state, so
both sides can use it from any thread or loop. A request is signed over its method, its raw target,
the digest of its body, the leader's epoch and an expiry: a signature that was seen on the way is
worth nothing for another request, another body, a later minute or an older leader.

The streamed uploads (``PUT /v1/packages/{sha256}``, ``PUT /v1/blobs/{sha256}``) sign the digest
that stands in their path, since the body is verified against it anyway.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any, Final, Literal, TypedDict

WIRE_VERSION: Final = 1
"""Version of this protocol; broker and agent must agree on it."""

INTERPRETER_FLAGS: Final = ("-I", "-S")
"""Flags of the interpreter that runs the agent: it needs the standard library and nothing else."""

# --- headers -------------------------------------------------------------------------------------
HEADER_EPOCH: Final = "Firepool-Epoch"
HEADER_EXPIRES: Final = "Firepool-Expires"
HEADER_DIGEST: Final = "Firepool-Digest"
HEADER_SIGNATURE: Final = "Firepool-Signature"
HEADER_LINK: Final = "Firepool-Link"
"""Absolute path of a file on the same machine that stands in for the body of an upload."""

EMPTY_DIGEST: Final = hashlib.sha256(b"").hexdigest()

# --- limits --------------------------------------------------------------------------------------
SIGNATURE_LIFETIME_SECONDS: Final = 60
"""How far ahead a caller sets the expiry."""
SIGNATURE_LIFETIME_MAX_SECONDS: Final = 600
"""An expiry further ahead than this is refused."""
HEARTBEAT_SECONDS: Final = 5.0
"""An output stream with nothing to say sends an empty line this often."""
JSON_BODY_LIMIT_BYTES: Final = 64 * 1024 * 1024
PACKAGE_LIMIT_BYTES: Final = 512 * 1024 * 1024
BLOB_LIMIT_BYTES: Final = 64 * 1024 * 1024 * 1024
OUTPUT_LIMIT_BYTES: Final = 64 * 1024 * 1024
INLINE_RESULT_BYTES: Final = 64 * 1024
TERMINATE_GRACE_SECONDS: Final = 10.0
ORPHAN_EXIT_SECONDS: Final = 600.0

# --- words ---------------------------------------------------------------------------------------
Isolation = Literal["namespaces", "process", "none"]
PodState = Literal["idle", "running", "resetting", "unclean", "draining"]
AttemptPhase = Literal["running", "ended", "lost"]
"""``lost``: the agent that ran the attempt died before the outcome was written."""
Tier = Literal["parked", "fork", "fresh"]
SignalName = Literal["interrupt", "terminate", "kill"]

ERROR_CLASSES: Final = (
    "OOM",
    "NonZeroExit",
    "Signal",
    "Timeout",
    "Interrupted",
    "Cancelled",
    "RequirementsFailed",
    "PackageInvalid",
    "LaunchFailed",
    "PodLost",
)
"""Classes of an outcome's error."""

REFUSALS: Final = {
    "Unauthorized": 401,
    "BadRequest": 400,
    "NotFound": 404,
    "MethodNotAllowed": 405,
    "StaleEpoch": 409,
    "Busy": 409,
    "TooLarge": 413,
    "DigestMismatch": 422,
    "Missing": 424,
    "Internal": 500,
}
"""Classes of a refused request and their HTTP statuses."""

MESSAGE_TYPES: Final = (
    "stream",
    "display_data",
    "update_display_data",
    "execute_result",
    "clear_output",
    "error",
    "result",
    "note",
    "status",
    "divider",
)
"""Types of an attempt's numbered messages; ``outcome`` and ``reset`` follow, unnumbered."""


class Killed(TypedDict):
    """A process that outlived its job and was ended."""

    pid: int
    name: str


class Result(TypedDict):
    """A value that an attempt hands back; ``data`` is base64 when it is small enough."""

    name: str
    format: str
    size_bytes: int
    type: str
    data: str | None
    sha256: str | None
    error: str | None


class OutcomeError(TypedDict, total=False):
    """Why an attempt failed. ``class`` (one of `ERROR_CLASSES`) stands beside these keys."""

    message: str
    ename: str | None
    evalue: str | None
    traceback: list[str] | None


class Times(TypedDict):
    """Unix seconds; ``None`` where the attempt did not get that far."""

    received: float
    handed_off: float | None
    first_instruction: float | None
    ended: float


class Outcome(TypedDict):
    """How an attempt ended. It is on the pod's disk before anyone is told."""

    attempt: str
    exit_code: int | None
    signal: int | None
    error: dict[str, Any] | None
    times: Times
    tier: Tier
    imports_seconds: float | None
    peak_memory_mib: int | None
    killed: list[Killed]
    results: list[Result]
    next: int


class ResetReport(TypedDict):
    """What the reset after an attempt found. A pod whose report is not ``clean`` must go."""

    attempt: str
    clean: bool
    reason: str | None
    left: list[str]
    seconds: float
    escapees: int


class Refused(Exception):
    """A request that the agent does not serve.

    Parameters
    ----------
    error_class : str
        One of the keys of `REFUSALS`.
    message : str
        Plain words, with what to do about it.
    field : str, optional
        The part of the request that is at fault.
    """

    def __init__(self, error_class: str, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.error_class = error_class
        self.message = message
        self.field = field

    @property
    def status(self) -> int:
        """HTTP status of the refusal."""
        return REFUSALS[self.error_class]

    def to_json(self) -> dict[str, Any]:
        """Body of the response."""
        error: dict[str, Any] = {"class": self.error_class, "message": self.message}
        if self.field is not None:
            error["field"] = self.field
        return {"error": error}


def digest(body: bytes) -> str:
    """Hex SHA-256 of a request's body."""
    return hashlib.sha256(body).hexdigest()


def sign(
    key: bytes, method: str, target: str, body_digest: str, epoch: int, expires: int
) -> dict[str, str]:
    """Headers that authenticate one request.

    Parameters
    ----------
    key : bytes
        The pod's key, 32 bytes.
    method, target : str
        As they stand in the request line; the target is the raw path with its query.
    body_digest : str
        Hex SHA-256 of the body, or the digest in the path of an upload.
    epoch : int
        Epoch of the leading broker.
    expires : int
        Unix seconds after which the agent refuses the request.

    Returns
    -------
    dict of str
        The four headers.
    """
    return {
        HEADER_EPOCH: str(epoch),
        HEADER_EXPIRES: str(expires),
        HEADER_DIGEST: body_digest,
        HEADER_SIGNATURE: _signature(key, method, target, body_digest, epoch, expires),
    }


def verify(
    key: bytes,
    method: str,
    target: str,
    headers: dict[str, str],
    now: float,
    highest_epoch: int,
) -> int:
    """Check the signature of a request before its body is read.

    The caller still has to compare the body with the digest header.

    Parameters
    ----------
    key : bytes
        The pod's key.
    method, target : str
        From the request line.
    headers : dict of str
        Names in lower case.
    now : float
        Unix seconds.
    highest_epoch : int
        The highest epoch seen so far.

    Returns
    -------
    int
        The epoch of the request.

    Raises
    ------
    Refused
        ``Unauthorized``: a missing, wrong or expired signature; ``StaleEpoch``: an old leader.
    """
    try:
        epoch = int(headers[HEADER_EPOCH.lower()])
        expires = int(headers[HEADER_EXPIRES.lower()])
        body_digest = headers[HEADER_DIGEST.lower()]
        signature = headers[HEADER_SIGNATURE.lower()]
    except (KeyError, ValueError):
        raise Refused("Unauthorized", "the request carries no complete signature") from None
    expected = _signature(key, method, target, body_digest, epoch, expires)
    if not hmac.compare_digest(expected.encode(), signature.encode("utf-8", "replace")):
        raise Refused("Unauthorized", "the signature does not match the request and the pod's key")
    if now > expires:
        raise Refused("Unauthorized", "the signature has expired; compare the two clocks")
    if expires > now + SIGNATURE_LIFETIME_MAX_SECONDS:
        raise Refused(
            "Unauthorized",
            f"the signature is valid for more than {SIGNATURE_LIFETIME_MAX_SECONDS} s",
        )
    if epoch < highest_epoch:
        raise Refused(
            "StaleEpoch",
            f"epoch {epoch} is older than {highest_epoch}: another broker leads now",
        )
    return epoch


def _signature(
    key: bytes, method: str, target: str, body_digest: str, epoch: int, expires: int
) -> str:
    message = f"{method}\n{target}\n{body_digest}\n{epoch}\n{expires}"
    return hmac.digest(key, message.encode("utf-8", "surrogateescape"), "sha256").hex()
