"""Every request that the broker's API knows, as a `Call`: the one list both clients use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO, Any, Literal

from .exchange import Call, segment

__all__ = [
    "cancel",
    "end_session",
    "fetch_blob",
    "has_content",
    "interrupt",
    "job",
    "jobs",
    "open_session",
    "output",
    "pods",
    "pools",
    "put_content",
    "release",
    "session",
    "session_stream",
    "sessions",
    "shutdown",
    "submit",
    "whoami",
]

Content = Literal["packages", "blobs"]


def whoami() -> Call:
    """Ask who the broker takes us for, and what it is."""
    return Call("GET", "/v1/whoami")


def open_session(body: Mapping[str, Any]) -> Call:
    """Register a session, or update what was registered."""
    return Call("POST", "/v1/sessions", body=dict(body))


def sessions() -> Call:
    """List the caller's sessions."""
    return Call("GET", "/v1/sessions")


def session(tag: str) -> Call:
    """Describe one session."""
    return Call("GET", f"/v1/sessions/{segment(tag)}")


def session_stream(tag: str, client_id: str) -> Call:
    """Hold a session's stream open: as long as it is, the session is connected."""
    return Call(
        "GET", f"/v1/sessions/{segment(tag)}/stream", {"client_id": client_id}, timeout_seconds=40.0
    )


def end_session(tag: str, client_id: str, how: Literal["shutdown", "restart"]) -> Call:
    """Say goodbye."""
    return Call(
        "DELETE",
        f"/v1/sessions/{segment(tag)}",
        {"client_id": client_id, "how": how},
        repeatable=False,
        timeout_seconds=2.0,
    )


def release(tag: str) -> Call:
    """Give back the pods that a session holds."""
    return Call("POST", f"/v1/sessions/{segment(tag)}/release", body={})


def submit(request: Mapping[str, Any], follow: bool = False) -> Call:
    """Submit a job; with ``follow`` the response is its output stream.

    The request must carry a client-chosen id, which is what makes repeating it safe.
    """
    query = {"follow": "1"} if follow else {}
    return Call("POST", "/v1/jobs", query, body=dict(request))


def jobs(
    state: str | None = None,
    lease_tag: str | None = None,
    limit: int | None = None,
    before: str | None = None,
) -> Call:
    """List jobs, newest first."""
    query = {"state": state, "lease_tag": lease_tag, "limit": limit, "before": before}
    return Call("GET", "/v1/jobs", query)


def job(job_id: str) -> Call:
    """Describe one job."""
    return Call("GET", f"/v1/jobs/{segment(job_id)}")


def cancel(job_id: str) -> Call:
    """Cancel a job, waiting or running."""
    return Call("POST", f"/v1/jobs/{segment(job_id)}/cancel", body={}, timeout_seconds=5.0)


def interrupt(job_id: str, kill: bool = False) -> Call:
    """Interrupt a running job, or kill its attempt."""
    return Call(
        "POST", f"/v1/jobs/{segment(job_id)}/interrupt", body={"kill": kill}, timeout_seconds=5.0
    )


def output(job_id: str, start: int = 0) -> Call:
    """Stream a job's output from a number on, to its end."""
    path = f"/v1/jobs/{segment(job_id)}/output"
    return Call("GET", path, {"from": start}, timeout_seconds=None)


def has_content(kind: Content, sha256: str) -> Call:
    """Ask whether a package or blob is there."""
    return Call("HEAD", f"/v1/{kind}/{sha256}")


def put_content(
    kind: Content, sha256: str, content: bytes | IO[bytes] | None, path: str | None = None
) -> Call:
    """Upload a package or blob: its bytes, or the path of a file on the broker's machine."""
    headers = {"Firepool-File": path} if path is not None else {}
    return Call(
        "PUT",
        f"/v1/{kind}/{sha256}",
        content=None if path is not None else content,
        headers=headers,
        timeout_seconds=300.0,
    )


def fetch_blob(sha256: str, by_path: bool) -> Call:
    """Download a blob, or ask for the path of the file that holds it."""
    headers = {"Firepool-Accept-File": "1"} if by_path else {}
    return Call("GET", f"/v1/blobs/{sha256}", headers=headers, timeout_seconds=300.0)


def pools() -> Call:
    """List the pools."""
    return Call("GET", "/v1/pools")


def pods() -> Call:
    """List the pods."""
    return Call("GET", "/v1/pods")


def shutdown(drain: bool = True) -> Call:
    """Ask the broker to end."""
    return Call("POST", "/v1/shutdown", body={"drain": drain}, repeatable=False)
