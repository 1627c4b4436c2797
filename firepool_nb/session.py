"""Sessions: one reuse tag at the broker, held open for as long as its client lives.

A kernel is a session. It registers what its cells need to run as they would here (interpreter,
working folder, environment variables), keeps a stream open from a background thread, which is how
the broker knows that somebody is there, and says goodbye when the kernel is shut down or
restarted. A changed environment (``%pip install``, ``os.environ``, ``os.chdir``) is registered
again before the next job.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket as socket_module
import sys
import threading
import uuid
from collections.abc import Mapping
from typing import Any, Literal

from . import calls, embedded, environment
from .client import Client
from .connection import Endpoint, locate
from .errors import BrokerError, CodeExpected, Refused
from .exchange import ConnectionLost, Response
from .job import Job
from .outputs import Output, TextOutput
from .sse import EventParser
from .transport import BlockingConnection

__all__ = ["Session", "current", "new_job_id"]

_RECONNECT_SECONDS = 2.0
_GOODBYE_SECONDS = 1.0


def new_job_id() -> str:
    """Choose the id of a new job; choosing it here is what makes submitting repeatable."""
    return f"j-{uuid.uuid4().hex[:16]}"


class Session:
    """A session of this process at the broker.

    Parameters
    ----------
    tag
        Its name; a new one when left out. Two processes under one tag: the later takes it over.
    kernel_id, notebook
        What it belongs to, for people.

    Examples
    --------
    >>> with Session(tag="report") as session:  # doctest: +SKIP
    ...     session.run("print('on a warm pod')")
    """

    def __init__(
        self,
        tag: str | None = None,
        *,
        kernel_id: str | None = None,
        notebook: str | None = None,
    ) -> None:
        self.tag = tag or f"session-{uuid.uuid4().hex[:12]}"
        self.client_id = uuid.uuid4().hex
        self.client = Client()
        self.client.renew = self._register
        self.client.on_new_broker = self._new_broker
        self.session_dir: str | None = None
        self.resumed = False
        self._kernel_id = kernel_id
        self._notebook = notebook
        self._registered: dict[str, Any] | None = None
        self._registered_at = ""
        self._lock = threading.RLock()
        self._stopped = threading.Event()
        self._reconnect = threading.Event()
        self._keeper: threading.Thread | None = None
        self._stream: BlockingConnection | None = None
        self._said_goodbye = False
        self._uploaded: set[tuple[str, str]] = set()
        self._pid = os.getpid()

    # -- opening and closing ----------------------------------------------------------------------

    def open(self) -> Session:
        """Register at the broker, starting it when none runs, and hold the session open.

        Raises
        ------
        BrokerUnreachable, WireMismatch, Refused
        """
        with self._lock:
            self._stopped.clear()
            self._said_goodbye = False
            self._refresh()
            if self._keeper is None or not self._keeper.is_alive():
                self._keeper = threading.Thread(
                    target=self._keep, name="firepool-session", daemon=True
                )
                self._keeper.start()
                atexit.register(self.end)
        return self

    def __enter__(self) -> Session:
        return self.open()

    def __exit__(self, *exception: object) -> None:
        self.end()

    @property
    def is_open(self) -> bool:
        """Whether it is registered."""
        return self._registered is not None and not self._said_goodbye

    def release(self) -> list[str]:
        """Give back the pods that the session holds; return their names."""
        released: list[str] = self.client.call(calls.release(self.tag)).json()["released"]
        return released

    def end(self, how: Literal["shutdown", "restart"] = "shutdown") -> None:
        """Say goodbye: what the session waited for is cancelled, its pods are given up.

        Does nothing when the broker is gone or goodbye was said already. ``restart`` keeps the
        pods for the process that comes next under this tag.
        """
        if self._said_goodbye or self._pid != os.getpid():
            return
        self._said_goodbye = True
        registered, self._registered = self._registered, None
        if registered is not None:
            self._say_goodbye(how)
        self._stopped.set()
        self._reconnect.set()
        stream = self._stream
        if stream is not None:
            stream.abort()
        keeper = self._keeper
        if keeper is not None and keeper is not threading.current_thread():
            keeper.join(_GOODBYE_SECONDS)
        self.client.close()
        atexit.unregister(self.end)

    def _say_goodbye(self, how: Literal["shutdown", "restart"]) -> None:
        call = calls.end_session(self.tag, self.client_id, how)
        try:
            endpoint = locate(start=False)
            if endpoint is None:
                return
            connection = BlockingConnection(endpoint)
            try:
                connection.request(call, self.client.token or endpoint.token)
            finally:
                connection.close()
        except BrokerError:
            return  # nobody listens any more: the session lapses by itself

    # -- registration -----------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        return {
            "environment": environment.describe(),
            "cwd": environment.working_folder(),
            "env": environment.variables(),
        }

    def _refresh(self) -> None:
        """Register, or register again when something that jobs depend on has changed."""
        state = self._state()
        if state != self._registered:
            self._register(state)

    def _register(self, state: dict[str, Any] | None = None) -> None:
        with self._lock:
            state = state or self._state()
            body = {
                "lease_tag": self.tag,
                "client_id": self.client_id,
                **state,
                "notebook": self._notebook,
                "kernel_id": self._kernel_id,
                "versions": environment.versions(),
                "process": {"pid": os.getpid(), "host": socket_module.gethostname()},
            }
            token, self.client.token = self.client.token, None  # the owner's opens sessions
            renew, self.client.renew = self.client.renew, None
            try:
                if self.client.endpoint is None or self.client.endpoint.wire is None:
                    self.client.check_broker()
                opened = self.client.call(calls.open_session(body)).json()
            except BaseException:
                self.client.token = token
                raise
            finally:
                self.client.renew = renew
            self.client.token = opened["token"]
            self.session_dir = opened["session_dir"]
            self.resumed = bool(opened["resumed"])
            self._registered = state
            self._reconnect.set()

    def _new_broker(self) -> None:
        self._reconnect.set()

    # -- the stream that says that we are here ----------------------------------------------------

    def _keep(self) -> None:
        while not self._stopped.is_set():
            self._reconnect.clear()
            try:
                endpoint = locate(start=False)
                if endpoint is not None:
                    self._hold(endpoint)
            except Refused as error:
                if error.status in (401, 404) and not self._stopped.is_set():
                    with contextlib.suppress(BrokerError):
                        self._register()  # a broker that does not know us any more
            except BrokerError:
                pass  # gone; the next call starts another, which sets _reconnect
            self._reconnect.wait(_RECONNECT_SECONDS)

    def _hold(self, endpoint: Endpoint) -> None:
        call = calls.session_stream(self.tag, self.client_id)
        connection = BlockingConnection(endpoint)
        self._stream = connection
        try:
            if self._stopped.is_set():
                return
            exchange = connection.start(call, self.client.token or endpoint.token)
            parser, refusal = EventParser(), b""
            while not exchange.finished:
                for piece in connection.receive(exchange, call.timeout_seconds) or []:
                    if exchange.status >= 400:
                        refusal += piece
                    else:
                        parser.feed(piece)
            if exchange.status >= 400:
                Response(exchange.status, exchange.headers, refusal).check()
        except ConnectionLost:
            return
        finally:
            self._stream = None
            connection.close()

    # -- jobs -------------------------------------------------------------------------------------

    def request(self, **fields: Any) -> dict[str, Any]:
        """Make a job request of this session; fields are those of the API.

        Registers first when the session is not open or its environment has changed.
        """
        if not self.is_open or self._keeper is None:
            self.open()
        else:
            self._refresh()
        self._reconnect.set()
        request = {"id": new_job_id(), "lease_tag": self.tag, "client_id": self.client_id}
        request.update({name: value for name, value in fields.items() if value is not None})
        return request

    def submit(
        self, code: str, *, namespace: Mapping[str, Any] | None = None, **fields: Any
    ) -> Job:
        """Submit code and return its `Job` at once.

        Parameters
        ----------
        code
            The code of a cell.
        namespace
            Names that the code sees, by value.
        **fields
            Further fields of a job as the API names them, for example ``sku`` or ``outputs``.

        Raises
        ------
        CodeExpected
            When ``code`` is not text.
        Refused
            When the broker says no.
        """
        _check_code(code, "submit")
        fields.setdefault("attached", False)
        fields.setdefault("outputs", ["_"])
        fields.setdefault("parallel", False)
        request = self.request(kind="cell", code=code, inputs=_inputs(namespace), **fields)
        view = self.client.submit(request)
        return Job(self.client, view)

    def run(
        self,
        code: str,
        *,
        namespace: Mapping[str, Any] | None = None,
        output: Output | None = None,
        **fields: Any,
    ) -> Any:
        """Run code and wait for it.

        Output is written as it comes, to this process's streams unless ``output`` takes it.

        Returns
        -------
        object
            The values of ``outputs`` by name when some were asked for; else the value of the
            last expression when it travelled.

        Raises
        ------
        RemoteError
            When it fails: also an instance of what the code raised.
        """
        _check_code(code, "run")
        fields.setdefault("attached", True)
        fields.setdefault("outputs", ["_"])
        request = self.request(kind="cell", code=code, inputs=_inputs(namespace), **fields)
        job = Job(self.client, {"id": request["id"], "state": "PENDING"})
        sink = output or TextOutput(sys.stdout, sys.stderr)
        job._follow(sink, first=calls.submit(request, follow=True))
        return job._value(raised=sink.raised)

    # -- content ----------------------------------------------------------------------------------

    def upload(
        self,
        kind: Literal["packages", "blobs"],
        sha256: str,
        *,
        data: bytes | None = None,
        path: str | None = None,
    ) -> None:
        """Bring content to the broker unless it is there; by path when the broker is here.

        Raises
        ------
        Refused
            When the broker does not take it.
        """
        endpoint = self.client.endpoint
        identity = endpoint.identity if endpoint is not None else ""
        if (identity, sha256) in self._uploaded and kind == "packages":
            return
        if self._has(kind, sha256):
            self._uploaded.add((identity, sha256))
            return
        if path is not None and endpoint is not None and endpoint.is_local:
            self.client.call(calls.put_content(kind, sha256, None, path))
        elif path is not None:
            with open(path, "rb") as file:
                self.client.call(calls.put_content(kind, sha256, file))
        else:
            self.client.call(calls.put_content(kind, sha256, data))
        self._uploaded.add((identity, sha256))

    def _has(self, kind: Literal["packages", "blobs"], sha256: str) -> bool:
        try:
            self.client.call(calls.has_content(kind, sha256))
        except Refused as error:
            if error.status == 404:
                return False
            raise
        return True

    def forget_uploads(self) -> None:
        """Ask again what the broker has: it said that something is missing."""
        self._uploaded.clear()

    def spool_folder(self) -> str | None:
        """Name a folder from which the broker can take files; None uses the temporary one."""
        endpoint = self.client.endpoint
        return embedded.spool_folder() if endpoint is not None and endpoint.is_local else None

    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed"
        return f"<Session {self.tag!r}, {state}>"


def _check_code(code: object, method: str) -> None:
    if isinstance(code, str):
        return
    name = getattr(code, "__name__", None) if callable(code) else None
    text = f"{method}() takes the code of a cell as text, not a {type(code).__name__}"
    if name is not None and name.isidentifier():
        text += f'; to call {name}: {method}("{name}()", namespace={{"{name}": {name}}})'
    raise CodeExpected(text)


def _inputs(namespace: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    if not namespace:
        return []
    import base64

    from .capture.pickling import LimitedBuffer, NotebookPickler

    buffer = LimitedBuffer(16 * 2**20)
    NotebookPickler(buffer).dump(dict(namespace))
    return [
        {
            "kind": "namespace",
            "format": "cloudpickle",
            "names": list(namespace),
            "data": base64.b64encode(buffer.value()).decode(),
        }
    ]


_current: Session | None = None


def current() -> Session:
    """Return the session of this process: the kernel's when there is one."""
    global _current
    if _current is None or _current._pid != os.getpid():
        kernel_id = _kernel_id()
        if kernel_id is not None:
            tag = f"kernel-{kernel_id}"
        else:
            program = os.path.basename(sys.argv[0] or "python") or "python"
            tag = f"{program}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        _current = Session(tag, kernel_id=kernel_id, notebook=_notebook())
    return _current


def _kernel_id() -> str | None:
    """Return the kernel's id: the name of its connection file, stable over restarts."""
    application = sys.modules.get("ipykernel.kernelapp")
    if application is None or not application.IPKernelApp.initialized():
        return None
    path = application.IPKernelApp.instance().abs_connection_file
    name = os.path.basename(path).removesuffix(".json").removeprefix("kernel-")
    return name or None


def _notebook() -> str | None:
    """Return the notebook's path where the server or the editor tells it."""
    path = os.environ.get("JPY_SESSION_NAME")
    return path or None
