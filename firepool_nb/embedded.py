"""The machine's own broker: the one place where this package imports the broker's."""

from __future__ import annotations

import os

from .errors import BrokerError, BrokerStartFailed, WireMismatch

__all__ = ["Found", "ensure_running", "find", "serve", "spool_folder", "stop"]

Found = tuple[str, str, int, int, int]
"""Socket, token, wire version, process id and start time of a running broker."""


def find() -> Found | None:
    """Return the running broker, or None.

    Raises
    ------
    BrokerError
        When the broker's folders cannot be used.
    """
    from firepool_broker import embedded

    try:
        connection = embedded.find()
    except embedded.EmbeddedError as error:
        raise BrokerError(str(error)) from error
    return None if connection is None else _found(connection)


def ensure_running(timeout_seconds: float = 10.0) -> Found:
    """Return the running broker, starting it when there is none.

    Raises
    ------
    BrokerStartFailed
        When it could not be started; the message ends with the broker's own words.
    WireMismatch
        When one of another version runs and cannot hand over now.
    """
    from firepool_broker import embedded

    try:
        return _found(embedded.ensure_running(timeout_seconds))
    except embedded.WireMismatch as error:
        raise WireMismatch(str(error)) from error
    except embedded.EmbeddedError as error:
        raise BrokerStartFailed(str(error)) from error


def stop(drain: bool = True, cancel: bool = False, timeout_seconds: float = 30.0) -> bool:
    """Stop the running broker; False when none ran.

    Parameters
    ----------
    drain
        End its pods too.
    cancel
        Cancel what runs, instead of waiting for it.
    timeout_seconds
        How long to wait for its end.

    Raises
    ------
    BrokerError
        When it refused or did not end in time.
    """
    from firepool_broker import embedded

    try:
        return embedded.stop(timeout_seconds, drain=drain, cancel=cancel)
    except embedded.EmbeddedError as error:
        raise BrokerError(str(error)) from error


def serve(arguments: list[str]) -> int:
    """Run the broker's own command line in this process and return its exit code."""
    from firepool_broker import __main__ as program

    return int(program.main(arguments) or 0)


def spool_folder() -> str:
    """Name the folder for large values: on the broker's file system, so that links work."""
    from firepool_broker import embedded

    return os.path.join(embedded.home().state_dir, "spool")


def log_path() -> str:
    """Name the broker's log."""
    from firepool_broker import embedded

    return os.path.join(embedded.home().state_dir, "broker.log")


def connection_path() -> str:
    """Name the file that says where this machine's broker is."""
    from firepool_broker import embedded

    return embedded.connection_path()


def _found(connection: object) -> Found:
    return (
        str(getattr(connection, "socket")),  # noqa: B009 - a NamedTuple of the other package
        str(getattr(connection, "token")),  # noqa: B009
        int(getattr(connection, "wire")),  # noqa: B009
        int(getattr(connection, "pid")),  # noqa: B009
        int(getattr(connection, "start_time")),  # noqa: B009
    )
