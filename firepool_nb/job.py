"""`Job`: a handle for work at the broker, from this kernel or any other.

It holds an id and what was last heard, and asks the broker for what may have changed since.
Leaving a wait (an interrupt, a timeout) leaves the job alone; `cancel` and `interrupt` do not.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Generator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from . import calls
from .errors import FirepoolError, Interrupted, RemoteError, job_error
from .exchange import Call
from .outputs import CollectedOutput, Output

if TYPE_CHECKING:
    from .client import Client

__all__ = ["ENDED", "Job", "start_latency_seconds"]

ENDED = frozenset({"SUCCEEDED", "FAILED", "CANCELLED"})
_MESSAGES_NOT_SHOWN = frozenset({"job", "status", "end"})
_LOOK_AFTER_SECONDS = 0.5


def start_latency_seconds(view: Mapping[str, Any]) -> float | None:
    """Return the time from submission to the first instruction of user code, in seconds."""
    times = view.get("times") or {}
    submitted, first = times.get("submitted"), times.get("first_instruction")
    if submitted is None or first is None:
        return None
    return float(first) - float(submitted)


class Job:
    """A job at the broker.

    Parameters
    ----------
    client
        Reaches the broker.
    view
        The job as the broker saw it last; its ``id`` is enough.
    namespace
        The notebook's namespace, for functions and classes that come home.

    Attributes
    ----------
    id
        Its id, which any kernel can use: ``%firepool result ID``.
    view
        What the broker said last, with the fields of the API's ``JobView``.
    """

    def __init__(
        self,
        client: Client,
        view: Mapping[str, Any],
        namespace: MutableMapping[str, Any] | None = None,
    ) -> None:
        self._client = client
        self._namespace = namespace
        self.id: str = view["id"]
        self.view: dict[str, Any] = dict(view)
        self._looked_at = time.monotonic()
        self._next_number = 0
        self._binds: tuple[str, ...] = ()
        self._bind: Callable[[dict[str, Any]], None] | None = None

    # -- state ------------------------------------------------------------------------------------

    def refresh(self) -> Job:
        """Ask the broker for the newest view."""
        if not self._is_over:
            self.view = self._client.job(self.id)
            self._looked_at = time.monotonic()
        return self

    @property
    def state(self) -> str:
        """State: PENDING, QUEUED, RUNNING, SUCCEEDED, FAILED or CANCELLED.

        Asks the broker at most twice a second. It is the state last heard while none answers.
        """
        self._look()
        return self._state

    def done(self) -> bool:
        """Ask whether it has ended."""
        return self.refresh()._state in ENDED

    def running(self) -> bool:
        """Ask whether it runs."""
        return self.refresh()._state == "RUNNING"

    def cancelled(self) -> bool:
        """Ask whether it was cancelled."""
        return self.refresh()._state == "CANCELLED"

    @property
    def _state(self) -> str:
        """State as last heard."""
        return str(self.view.get("state", "PENDING"))

    @property
    def _is_over(self) -> bool:
        """Whether it has ended and everything about that is known."""
        return self._state in ENDED and "times" in self.view

    def _look(self) -> None:
        """Take a newer view when one is to be had at once."""
        now = time.monotonic()
        if self._is_over or now - self._looked_at < _LOOK_AFTER_SECONDS:
            return
        response = self._client.glance(calls.job(self.id))
        self._looked_at = time.monotonic()
        if response is not None:
            self.view = response.json()

    @property
    def path(self) -> str | None:
        """How it came by its pod: ``warm``, ``recycled``, ``new`` or another path."""
        return (self.view.get("acquisition") or {}).get("path")

    @property
    def start_latency_seconds(self) -> float | None:
        """Seconds from submission to the first instruction of its code."""
        return start_latency_seconds(self.view)

    # -- waiting and results ----------------------------------------------------------------------

    def _follow(
        self,
        output: Output,
        first: Call | None = None,
        start: int = 0,
        timeout_seconds: float | None = None,
    ) -> bool:
        """Pass its output to a sink until it ends.

        Parameters
        ----------
        output
            Takes the messages.
        first
            The submission that answers with the stream.
        start
            Number of the first message wanted.
        timeout_seconds
            Longest wait; None waits for ever.

        Returns
        -------
        bool
            Whether it has ended.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds

        def patience() -> float | None:
            return None if deadline is None else max(0.0, deadline - time.monotonic())

        events = self._client.follow(self.id, first, start, patience=patience)
        for event in events:
            if event is not None:
                self._heard(event.type, event.data)
                if event.number is not None:
                    self._next_number = event.number + 1
                if event.type not in _MESSAGES_NOT_SHOWN:
                    output.message(event.type, event.data)
            if deadline is not None and time.monotonic() > deadline and self._state not in ENDED:
                events.close()  # type: ignore[attr-defined]
                return False
        return self._state in ENDED

    def _heard(self, kind: str, data: Any) -> None:
        """Take what an output stream says about the job itself."""
        if kind in ("job", "end"):
            self.view = dict(data)
        elif kind == "status" and "state" in data:  # a pod's own phases have no state
            self.view.update(data)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for its end; False when the timeout (seconds) is over first."""
        if self._is_over:
            return True
        next_number = int((self.view.get("output") or {}).get("next", 0))
        return self._follow(Output(), start=next_number, timeout_seconds=timeout)

    def result(self, timeout: float | None = None) -> Any:
        """Wait for its end and return what it brought back.

        The names that a cell asked for with ``-o`` are bound in the notebook as well.

        Returns
        -------
        object
            The values by name when names were asked for; else the value of its last expression
            when it travelled, or None.

        Raises
        ------
        RemoteError
            When it failed: also an instance of what its code raised.
        Interrupted
            When it was interrupted.
        TimeoutError
            When it has not ended within ``timeout`` seconds.
        """
        if not self.wait(timeout):
            raise TimeoutError(f"job {self.id} has not ended within {timeout:g} s")
        return self._value()

    def exception(self, timeout: float | None = None) -> RemoteError | Interrupted | None:
        """Wait for its end and return the error it ended with, or None."""
        if not self.wait(timeout):
            raise TimeoutError(f"job {self.id} has not ended within {timeout:g} s")
        return None if self._state == "SUCCEEDED" else self._error()

    def _value(self, raised: dict[str, Any] | None = None) -> Any:
        """Return what an ended job brought back, or raise its error."""
        if self._state != "SUCCEEDED":
            raise self._error(raised)
        values = self._values()
        named = {name: value for name, value in values.items() if name not in ("_", "return")}
        if named:
            if self._bind is not None:
                self._bind(named)
            return named
        return values.get("_", values.get("return"))

    def _bind_with(self, names: Sequence[str], bind: Callable[[dict[str, Any]], None]) -> None:
        """Have the values of names bound when the result is asked for."""
        self._binds, self._bind = tuple(names), bind

    def _error(self, raised: dict[str, Any] | None = None) -> RemoteError | Interrupted:
        """Make the error it ended with; its output is searched for the exception itself."""
        if raised is None and (self.view.get("error") or {}).get("ename"):
            output = Output()
            self._follow(output)
            raised = output.raised
        return job_error(self.view, raised)

    def _values(self) -> dict[str, Any]:
        """Return every value that came back; those that could not are left out."""
        found: dict[str, Any] = {}
        for result in self.view.get("results") or []:
            if not result.get("error"):
                found[result["name"]] = self._load(result)
        return found

    def _load(self, result: dict[str, Any]) -> Any:
        """Turn one result back into a value, fetching it when it is large."""
        from .capture.transfer import decode

        if result.get("data") is not None:
            return decode(result, base64.b64decode(result["data"]), self._namespace)
        endpoint = self._client.endpoint
        by_path = endpoint is not None and endpoint.is_local
        response = self._client.call(calls.fetch_blob(result["sha256"], by_path))
        source = response.headers.get("firepool-file") or response.content
        return decode(result, source, self._namespace)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._await().__await__()

    async def _await(self) -> Any:
        from .client import AsyncClient

        client = AsyncClient(token=self._client.token)
        output = Output()
        if not self._is_over:
            async for event in client.follow(self.id):
                self._heard(event.type, event.data)
                output.message(event.type, event.data)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, self._value, output.raised)

    # -- output -----------------------------------------------------------------------------------

    def logs(self) -> str:
        """Return what it printed so far, both streams in order."""
        collected = _Interleaved()
        self._replay(collected)
        return "".join(collected.pieces)

    def output(self) -> CollectedOutput:
        """Return what it printed and displayed so far, apart."""
        collected = CollectedOutput()
        self._replay(collected)
        return collected

    def _replay(self, output: Output, follow: bool = False) -> None:
        """Pass its output from the start to a sink; with ``follow`` until it ends."""
        self.refresh()
        stop = None if follow or self._state in ENDED else int(self.view["output"]["next"])
        if stop == 0:
            return
        events = self._client.follow(self.id)
        for event in events:
            if event is None:
                continue
            self._heard(event.type, event.data)
            if event.type not in _MESSAGES_NOT_SHOWN:
                output.message(event.type, event.data)
            if stop is not None and event.number is not None and event.number + 1 >= stop:
                events.close()  # type: ignore[attr-defined]
                return

    # -- ending it --------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Cancel it, waiting or running; a running one gets its grace first."""
        self._client.call(calls.cancel(self.id))

    def interrupt(self, kill: bool = False) -> None:
        """Interrupt its code (KeyboardInterrupt), or kill the attempt."""
        self._client.call(calls.interrupt(self.id, kill))

    # -- showing it -------------------------------------------------------------------------------

    def summary(self) -> str:
        """Say in one line how it is, or went."""
        parts = [self._state.lower()]
        if self.path:
            parts.append(str(self.path))
        latency = self.start_latency_seconds
        if latency is not None:
            parts.append(f"started in {latency * 1000:.0f} ms")
        error = self.view.get("error")
        if error:
            parts.append(str(error.get("class")))
        return ", ".join(parts)

    def __repr__(self) -> str:
        self._look()
        promise = f"; result() binds {', '.join(self._binds)}" if self._binds else ""
        return f"<Job {self.id}: {self.summary()}{promise}>"

    def _repr_html_(self) -> str:
        from html import escape

        self._look()
        promise = ""
        if self._binds:
            names = ", ".join(f"<code>{escape(name)}</code>" for name in self._binds)
            promise = f"; <code>result()</code> binds {names}"
        return (
            f"<span>Job <code>{escape(self.id)}</code>: {escape(self.summary())}{promise}; "
            f"<code>%firepool result {escape(self.id)}</code> shows its output</span>"
        )

    def __reduce__(self) -> Any:
        raise FirepoolError(f"a Job belongs to its kernel; send its id instead: {self.id!r}")


class _Interleaved(Output):
    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def on_stream(self, message: dict[str, Any]) -> None:
        self.pieces.append(message["text"])
