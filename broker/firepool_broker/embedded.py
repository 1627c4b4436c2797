"""The embedded broker: where it lives, how it is found, started once and stopped.

One broker per user and machine. Whoever needs it first starts it, detached from themselves; a
file lock makes a race of starters start one; "ready" is an event on a pipe. It is found through
a *connection file* (socket, token, wire version, process) named by the machine's boot, because a
home folder may be shared between machines, and a machine may change its name. Nothing of this
needs more than the standard library, and importing it costs a kernel a few milliseconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
import time
from typing import IO, Any, NamedTuple

from firepool_broker import processes
from firepool_broker.durable import write_durably

__all__ = [
    "WIRE_VERSION",
    "BrokerStartFailed",
    "Connection",
    "EmbeddedError",
    "Paths",
    "WireMismatch",
    "connection_path",
    "ensure_running",
    "find",
    "home",
    "stop",
]

#: Version of the HTTP API that client and broker must share; their releases may differ.
WIRE_VERSION = 1

_LOCK_PAUSE_SECONDS = 0.01
_DYING_SECONDS = 1.0
_ASK_AGAIN_SECONDS = 4.0
_ANSWER_SECONDS = 10.0
_LOG_TAIL_BYTES = 4096
_LOG_LIMIT_BYTES = 4 * 1024 * 1024
_NETWORK_FILE_SYSTEMS = {
    *("9p", "afs", "beegfs", "ceph", "cifs", "coda", "fhgfs", "gpfs", "lustre", "ncpfs", "nfs"),
    *("nfs4", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "virtiofs"),
}
_START_UP_HOOKS = ("PYTHONSTARTUP", "PYTHONINSPECT", "PYTHONBREAKPOINT", "PYTHONPROFILEIMPORTTIME")


class EmbeddedError(RuntimeError):
    """Something about this machine's own broker; the message names the fix."""


class BrokerStartFailed(EmbeddedError):
    """The broker was started and did not become ready; the message ends with its own words."""


class WireMismatch(EmbeddedError):
    """A broker of another wire version runs and is busy; the message names both versions."""


class Paths(NamedTuple):
    """The two folders of a user's broker, both private (0700) and on a local disk."""

    runtime_dir: str
    state_dir: str


class Connection(NamedTuple):
    """What a client needs to talk to the running broker.

    Attributes
    ----------
    socket
        Path of its Unix socket.
    token
        The owner's token (``Authorization: Bearer``).
    wire
        Wire version of its API, compared with `WIRE_VERSION`.
    pid, start_time
        Its process; the start time is that of `processes.start_time`.
    version
        Its release, for people to read.
    started_at
        Unix seconds.
    """

    socket: str
    token: str
    wire: int
    pid: int
    start_time: int
    version: str
    started_at: float

    def is_alive(self) -> bool:
        """Tell whether that very process still runs."""
        return processes.is_alive(self.pid, self.start_time)


def home() -> Paths:
    """Name the broker's folders and create them.

    ``FIREPOOL_HOME`` overrides both (``run`` and ``state`` below it). Otherwise the runtime
    folder is the system's own for this user, the state folder ``XDG_STATE_HOME`` or
    ``~/.local/state``; what is missing or lies on a network file system is replaced by a private
    folder under the temporary one, since a socket, a lock and a write-ahead log need a local
    disk.

    Raises
    ------
    EmbeddedError
        When a folder belongs to somebody else or cannot be made.
    """
    override = os.environ.get("FIREPOOL_HOME")
    if override:
        root = os.path.abspath(os.path.expanduser(override))
        return Paths(_private(os.path.join(root, "run")), _private(os.path.join(root, "state")))
    return Paths(_private(_runtime_base()), _private(_state_base()))


def connection_path(paths: Paths | None = None) -> str:
    """Name the connection file of this boot of this machine.

    No two boots of any two machines share their id. The host's name is left out: a laptop gets
    another one with each network, and its broker is the same.
    """
    return os.path.join((paths or home()).runtime_dir, f"broker-{_boot_id()[:16]}.json")


def find(paths: Paths | None = None) -> Connection | None:
    """Return the connection of the running broker, or None when none runs."""
    connection = read_connection(connection_path(paths))
    return connection if connection is not None and connection.is_alive() else None


def short_socket_path(path: str) -> str:
    """Name a socket that stands in for one whose path is too long for the system."""
    import hashlib

    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
    return os.path.join(_temporary_base(), f"{digest}.sock")


def read_connection(path: str) -> Connection | None:
    """Read a connection file; None when there is none of ours or it cannot be understood."""
    try:
        with open(path, encoding="utf-8") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.getuid():
                return None  # somebody else's file must never get our requests
            document = json.load(file)
        return _connection(document)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_connection(path: str, connection: Connection) -> None:
    """Publish a connection atomically, readable by its owner only."""
    write_durably(path, json.dumps(connection._asdict()).encode())


def _connection(document: Any) -> Connection:
    """Check a connection that was written as JSON; raises what reading it raises."""
    found = Connection(**{name: document[name] for name in Connection._fields})
    texts = (found.socket, found.token, found.version)
    numbers = (found.wire, found.pid, found.start_time)
    if not all(type(text) is str for text in texts):
        raise TypeError("a text is none")
    if not all(type(number) is int for number in numbers):
        raise TypeError("a number is none")
    if type(found.started_at) not in (int, float):
        raise TypeError("started_at is no time")
    if found.pid <= 0 or not found.socket.startswith("/") or not found.token.isascii():
        raise ValueError("it names no process or no socket")
    return found


def ensure_running(timeout_seconds: float = 10.0) -> Connection:
    """Return the running broker's connection, starting the broker when there is none.

    Parameters
    ----------
    timeout_seconds
        Longest wait, for other starters and for the broker's own start together.

    Raises
    ------
    BrokerStartFailed
        When it ended before it was ready, or was not ready in time.
    WireMismatch
        When one of another wire version runs and has work to do.
    """
    paths = home()
    connection = find(paths)
    if connection is not None and connection.wire == WIRE_VERSION:
        return connection
    deadline = time.monotonic() + timeout_seconds
    with _opened(f"{connection_path(paths)[: -len('.json')]}.lock") as lock:
        _lock(lock, deadline, timeout_seconds)
        connection = find(paths)  # another starter may have been faster
        if connection is not None and connection.wire != WIRE_VERSION:
            _hand_over(connection, deadline)
            connection = None
        return connection or _start(paths, deadline, timeout_seconds)


def stop(
    timeout_seconds: float = 30.0,
    *,
    drain: bool = True,
    cancel: bool = False,
    connection: Connection | None = None,
) -> bool:
    """Stop the running broker and wait until it is gone.

    Parameters
    ----------
    timeout_seconds
        How long to wait for the process to end.
    drain
        End its pods too. Without it they stay for the next broker to adopt.
    cancel
        Cancel what runs, instead of waiting for it.
    connection
        Which broker; the one of `find` when not given.

    Returns
    -------
    bool
        False when none ran. Pods that a broker which is gone had left are ended all the same, and
        count as one that ran.

    Raises
    ------
    EmbeddedError
        When it refused or did not end in time; the message names its pid.
    """
    connection = connection or find()
    if connection is None:
        return drain and _end_leftovers(home(), timeout_seconds) > 0
    body = {"drain": drain, "cancel": True} if cancel else {"drain": drain}
    deadline = time.monotonic() + timeout_seconds
    _shutdown(connection, body)
    left = timeout_seconds
    while not processes.wait_for_exit(
        connection.pid, connection.start_time, min(left, _ASK_AGAIN_SECONDS) if cancel else left
    ):
        left = deadline - time.monotonic()
        if left <= 0:
            raise EmbeddedError(
                f"the broker (pid {connection.pid}) has not ended within {timeout_seconds:g} s;"
                f" `kill {connection.pid}` ends it and leaves its pods for the next one"
            )
        if cancel:  # asked again, it also cancels what was being launched when asked first
            with contextlib.suppress(EmbeddedError):
                _request(connection, "POST", "/v1/shutdown", body)
    return True


def _end_leftovers(paths: Paths, timeout_seconds: float) -> int:
    """End the pods of a broker that does not run, and perhaps cannot."""
    import fcntl

    with _opened(os.path.join(paths.state_dir, "broker.lock")) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return 0  # one is starting, or ending: they are its own
        from firepool_broker.backends.leftovers import end_pods

        try:
            return end_pods(os.path.join(paths.state_dir, "pods"), timeout_seconds)
        except TimeoutError as error:
            raise EmbeddedError(f"a pod could not be ended: {error}") from error


def _opened(path: str) -> IO[str]:
    try:
        return open(path, "a", encoding="utf-8")
    except OSError as error:
        raise BrokerStartFailed(f"{path} cannot be written: {error.strerror}") from error


def _start(paths: Paths, deadline: float, timeout_seconds: float) -> Connection:
    import select
    import subprocess

    command = [sys.executable, "-m", "firepool_broker", "serve", "--embedded", "--detach"]
    log_path = _log_path(paths)
    environment = {k: v for k, v in os.environ.items() if k not in _START_UP_HOOKS}
    reader, writer = os.pipe()
    try:
        try:
            with open(log_path, "ab") as log, open(os.devnull, "rb") as nothing:
                log_start = log.tell()
                process = subprocess.Popen(
                    [*command, "--ready-fd", str(writer)],
                    stdin=nothing,
                    stdout=log,
                    stderr=log,
                    cwd="/",  # `-m` puts the working folder first on the path: not the notebook's
                    env=environment,
                    pass_fds=[writer],
                    start_new_session=True,
                )
        except OSError as error:
            raise BrokerStartFailed(f"{sys.executable} cannot be started: {error}") from error
        os.close(writer)
        writer = -1
        heard = b""
        while not heard.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([reader], [], [], left)[0]:
                _end_starting(process.pid, reader)
                process.wait()
                raise BrokerStartFailed(
                    f"the broker was not ready within {timeout_seconds:g} s (its log: {log_path})"
                    + _tail(log_path, log_start)
                )
            piece = os.read(reader, 4096)
            if not piece:
                process.wait()
                raise BrokerStartFailed(
                    f"the broker ended before it was ready (its log: {log_path})"
                    + _tail(log_path, log_start)
                )
            heard += piece
        process.wait()  # only the detaching parent: the broker itself is nobody's child by now
        document = json.loads(heard)
        if "error" in document:
            raise BrokerStartFailed(f"the broker could not start: {document['error']}")
        started = _connection(document)
        if started.wire != WIRE_VERSION:
            raise BrokerStartFailed(
                f"the broker that {sys.executable} starts is of another wire version"
                f" ({started.wire}, this client {WIRE_VERSION}); restart this process"
            )
        return started
    finally:
        os.close(reader)
        if writer >= 0:
            os.close(writer)


def _end_starting(group: int, reader: int) -> None:
    """End a broker that does not become ready: nobody would wait for it, and all for its lock.

    It is nobody's child any more, but still of the session that was made for it. Its end of the
    pipe tells when it is gone.
    """
    import select
    import signal

    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(group, number)
        except ProcessLookupError:
            return
        if select.select([reader], [], [], _DYING_SECONDS)[0]:
            return


def _hand_over(connection: Connection, deadline: float) -> None:
    """Ask a broker of another wire version to go, unless it has work to do."""
    try:
        for state in ("RUNNING", "QUEUED", "PENDING"):
            if _request(connection, "GET", f"/v1/jobs?state={state}&limit=1")["jobs"]:
                raise EmbeddedError("it has jobs to finish first")
        _shutdown(connection, {"drain": True})
    except (EmbeddedError, KeyError) as error:
        raise WireMismatch(
            f"the running broker (pid {connection.pid}, {connection.version}) speaks wire version"
            f" {connection.wire}, this client {WIRE_VERSION}, and it did not hand over: {error};"
            " `firepool stop` ends it"
        ) from error
    processes.wait_for_exit(
        connection.pid, connection.start_time, max(0.0, deadline - time.monotonic())
    )


def _shutdown(connection: Connection, body: dict[str, Any]) -> None:
    try:
        _request(connection, "POST", "/v1/shutdown", body)
    except _Broken as error:
        # one that was dying already breaks the connection and is gone in a moment
        if not processes.wait_for_exit(connection.pid, connection.start_time, _DYING_SECONDS):
            raise EmbeddedError(str(error)) from error


class _Broken(EmbeddedError):
    """Nobody answered."""


def _request(
    connection: Connection, method: str, target: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    import http.client
    import socket

    client = http.client.HTTPConnection("localhost")
    client.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    headers = {"Authorization": f"Bearer {connection.token}", "Content-Type": "application/json"}
    try:
        client.sock.settimeout(_ANSWER_SECONDS)
        client.sock.connect(connection.socket)
        client.request(method, target, None if body is None else json.dumps(body), headers)
        response = client.getresponse()
        text = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise _Broken(f"the broker (pid {connection.pid}) does not answer: {error}") from error
    finally:
        client.close()
    if response.status >= 300:
        raise EmbeddedError(_message_of(text) or f"it answered {response.status}")
    found = json.loads(text or "{}")
    return found if isinstance(found, dict) else {}


def _message_of(body: bytes) -> str | None:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return None


def _lock(lock: IO[str], deadline: float, timeout_seconds: float) -> None:
    import fcntl

    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        if time.monotonic() > deadline:
            raise BrokerStartFailed(
                f"another process has been starting the broker for {timeout_seconds:g} s"
                f" (it holds {lock.name})"
            )
        time.sleep(_LOCK_PAUSE_SECONDS)  # a file lock cannot be waited for with a limit


def _log_path(paths: Paths) -> str:
    """Name the broker's log; one that has grown large is put aside."""
    path = os.path.join(paths.state_dir, "broker.log")
    try:
        if os.path.getsize(path) > _LOG_LIMIT_BYTES:
            os.replace(path, f"{path}.1")
    except FileNotFoundError:
        pass
    return path


def _tail(path: str, start: int) -> str:
    with open(path, "rb") as log:
        end = log.seek(0, os.SEEK_END)
        log.seek(max(start, end - _LOG_TAIL_BYTES))
        text = log.read().decode("utf-8", "replace").strip()
    return f":\n{text}" if text else ""


def _runtime_base() -> str:
    system = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    # asked of the disk, not of the variable: a shell by ssh or cron lacks it and must find the
    # same broker as the desktop's
    if _is_own_folder(system) and _is_local(system):
        return os.path.join(system, "firepool-nb")
    return os.path.join(_temporary_base(), "run")


def _state_base() -> str:
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    if os.path.isabs(base) and _is_local(base):
        try:
            os.makedirs(base, mode=0o700, exist_ok=True)
        except OSError:
            return os.path.join(_temporary_base(), "state")
        if os.access(base, os.W_OK | os.X_OK):
            return os.path.join(base, "firepool-nb")
    return os.path.join(_temporary_base(), "state")


def _temporary_base() -> str:
    return _private(f"/tmp/firepool-{os.getuid()}")


def _private(path: str) -> str:
    """Make a folder that is ours alone, or refuse the one that stands there."""
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        status = os.lstat(path)
    except OSError as error:
        raise EmbeddedError(
            f"{path} cannot be made: {error}; set FIREPOOL_HOME to a folder on a local disk"
        ) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise EmbeddedError(
            f"{path} is not a folder of yours; remove it, or set FIREPOOL_HOME to one that is"
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        os.chmod(path, 0o700)
    return path


def _is_own_folder(path: str) -> bool:
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _is_local(path: str) -> bool:
    """Tell whether a path lies on a disk of this machine, as far as the mount table says."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
            mounts = [line.split() for line in table]
    except OSError:
        return True
    path = os.path.realpath(path)
    best, kind = "", ""
    for fields in mounts:
        point = fields[4].replace("\\040", " ")
        inside = point == "/" or path == point or path.startswith(point + "/")
        if inside and len(point) >= len(best):  # of two on one point the later one is on top
            best, kind = point, fields[fields.index("-", 6) + 1]
    if kind.startswith("fuse.") or kind == "fuse":
        return False
    return kind not in _NETWORK_FILE_SYSTEMS


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip().replace("-", "")
    except OSError:
        return "00000000"
