"""Run one ``%%firepool`` cell: collect what travels, submit, show output, deal with ■, end.

Everything up to the submission happens before anything is sent, so a cell that cannot run
remotely costs nothing and changes nothing. Whatever happens afterwards ends in exactly one of
three ways: the cell's values are bound, an error is raised here, or the person left the wait.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .. import calls
from ..errors import BrokerError, Interrupted, RemoteError, job_error
from ..job import ENDED, Job
from ..outputs import ShellOutput
from .backlog import Backlog
from .hints import hint_for, only_there
from .interrupts import Action, InterruptListener, Presses
from .options import CellOptions
from .place import CellPlace, cell_labels, first_line, hidden_names
from .waiting import WaitingLine

if TYPE_CHECKING:
    from ..capture.cell import Capture
    from ..session import Session

__all__ = ["CellRun", "KernelState"]

_LINE_AFTER_SECONDS = 0.3
_NOT_OUTPUT = frozenset({"job", "status", "end", "result"})


@dataclass
class KernelState:
    """What the cells of one kernel share.

    Attributes
    ----------
    remote_names
        Names that only remote cells defined, with how, and what to do about it.
    last_view
        The last job of a cell, for ``%firepool status``.
    told_pool
        Whether the line about the default pool was shown.
    project
        The person's own modules.
    """

    def __init__(self) -> None:
        from ..capture.project import ProjectModules

        self.remote_names: dict[str, str] = {}
        self.last_view: dict[str, Any] | None = None
        self.told_pool = False
        self.project = ProjectModules()


class CellRun:
    """One run of a cell.

    Parameters
    ----------
    shell
        The IPython shell.
    session
        The kernel's session.
    state
        What the kernel's cells share.
    options
        The cell's options.
    source
        Its code, without the magic's line.
    """

    def __init__(
        self,
        shell: Any,
        session: Session,
        state: KernelState,
        options: CellOptions,
        source: str,
    ) -> None:
        self._shell = shell
        self._session = session
        self._state = state
        self._options = options
        self._source = source
        self._place = CellPlace.of(shell, source)
        self._line = WaitingLine(shell, options.quiet)
        self._presses = Presses()
        self._backlog: Backlog | None = None
        self._listener = InterruptListener()
        self._began = time.monotonic()
        self._started = False

    @property
    def _namespace(self) -> MutableMapping[str, Any]:
        namespace: MutableMapping[str, Any] = self._shell.user_ns
        return namespace

    def run(self) -> Job | None:
        """Run the cell; return its `Job` only when it is not waited for.

        Raises
        ------
        CaptureError
            Before anything was sent, when something cannot travel.
        RemoteError
            When it ended without success.
        Interrupted
            When the person interrupted it or left the wait.
        """
        with self._listener:
            try:
                with self._listener.raising():
                    captured = self._capture()
                    request = self._request(captured)
                    if not self._options.block:
                        return self._detached(request)
            except KeyboardInterrupt:
                raise Interrupted("interrupted before anything was sent") from None
            finally:
                self._line.clear()
            view = {"id": request["id"], "state": "PENDING"}
            job = Job(self._session.client, view, self._namespace)
            output = ShellOutput(self._shell, job.id, before_first=self._line.clear)
            if self._state.told_pool:
                output.hidden_topics = frozenset({"pool"})
            self._show_notes(output, captured.notes)
            try:
                self._follow(job, calls.submit(request, follow=True), output)
            finally:
                self._line.clear()
                if "times" in job.view:
                    self._state.last_view = job.view
        self._end(job, output, captured)
        return None

    # -- before -----------------------------------------------------------------------------------

    def _capture(self) -> Capture:
        from ..capture.cell import capture
        from ..capture.transfer import Spool
        from .syntax import check_syntax

        check_syntax(self._shell, self._source, self._place)
        options = self._options
        spool = None
        if options.push:
            self._session.open()
            spool = Spool(self._session.spool_folder())
        return capture(
            self._source,
            self._shell.user_ns,
            hidden=hidden_names(self._shell),
            push=options.push,
            pull=options.pull,
            implicit=options.capture,
            remote_names=self._state.remote_names,
            project=self._state.project if options.capture or options.package_folder else None,
            folder=options.package_folder,
            spool=spool,
            first_line=self._place.line_offset + 1,
            label=cell_labels(self._shell),
        )

    def _request(self, captured: Capture) -> dict[str, Any]:
        from ..capture.cell import normalise

        session, place = self._session, self._place
        outputs = normalise(self._options.pull)
        if captured.ends_with_value and "_" not in outputs:
            outputs.append("_")
        package = captured.package
        request = session.request(
            kind="cell",
            code=self._source,
            filename=place.filename,
            line_offset=place.line_offset,
            attached=self._options.block,
            inputs=captured.inputs(),
            outputs=outputs,
            package=package.sha256 if package is not None else None,
            cell={"notebook": session._notebook, "cell_id": place.cell_id},
            name=first_line(self._source),
            **self._options.fields,
        )
        if package is not None:
            session.upload("packages", package.sha256, data=package.data)
        self._upload(captured)
        return request

    def _upload(self, captured: Capture) -> None:
        from ..capture.cell import mebibytes

        try:
            for value in captured.spooled:
                if value.path is not None:
                    self._line.show(f"sending {value.name} ({mebibytes(value.size_bytes)})")
                    self._session.upload("blobs", value.sha256, path=value.path)
        finally:
            for value in captured.spooled:
                if value.path is not None:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(value.path)

    def _detached(self, request: dict[str, Any]) -> Job:
        from ..capture.cell import normalise

        view = self._session.client.submit(request)
        job = Job(self._session.client, view, self._namespace)
        if self._options.pull:
            job._bind_with(normalise(self._options.pull), self._bind_values)
        if self._options.job_name is not None:
            self._namespace[self._options.job_name] = job
        self._state.last_view = view
        return job

    # -- while it waits and runs ------------------------------------------------------------------

    def _follow(self, job: Job, first: Any, output: ShellOutput) -> None:
        client = self._session.client
        events = client.follow(job.id, first, wake=self._listener, patience=self._patience)
        try:
            self._handle(events, job, output)
        except KeyboardInterrupt as error:
            if isinstance(error, Interrupted):
                raise
            raise self._left(job) from None
        finally:
            events.close()  # type: ignore[attr-defined]

    def _handle(self, events: Iterator[Any], job: Job, output: ShellOutput) -> None:
        for event in events:
            for pressed_at in self._listener.take():
                self._press(pressed_at, job)
            if event is None:
                self._explain(job)
                continue
            if event.type in _NOT_OUTPUT:
                job._heard(event.type, event.data)
                self._started = self._started or job._state == "RUNNING"
                self._explain(job, event.data)
            elif self._backlog is None or not self._backlog.passes_over(
                event.type, event.data, time.monotonic()
            ):
                self._started = True
                self._line.nothing_else_shown = False
                self._note_backlog(job, output)
                output.message(event.type, event.data)
                if event.data.get("topic") == "pool":
                    self._state.told_pool = True
                    output.hidden_topics = frozenset({"pool"})

    def _note_backlog(self, job: Job, output: ShellOutput) -> None:
        text = self._backlog.note(job.id) if self._backlog is not None else None
        if text is not None:
            output.note(text)

    def _patience(self) -> float | None:
        """How long to wait before the line must be looked at: only while there is none yet."""
        if self._started or not self._line.can_show:
            return None
        left = self._began + _LINE_AFTER_SECONDS - time.monotonic()
        return left if left > 0 else None

    def _explain(self, job: Job, data: Any = None) -> None:
        """Show why the cell waits, once it has waited long enough to be worth a line."""
        if self._presses.last is not Action.IGNORE:
            return
        if self._started or job._state in ENDED:
            phase = data.get("phase") if isinstance(data, dict) else None
            if phase == "installing":
                self._line.show("installing requirements")
            elif phase is not None or job._state != "QUEUED":
                self._line.clear()
            return
        if time.monotonic() - self._began < _LINE_AFTER_SECONDS:
            return
        waiting = job.view.get("waiting") or {}
        self._line.show(waiting_text(waiting))

    def _press(self, pressed_at: float, job: Job) -> None:
        action = self._presses.press(pressed_at, job._state == "RUNNING")
        if action is Action.IGNORE:
            return
        if action is Action.LEAVE:
            raise self._left(job)
        if self._backlog is None:
            self._backlog = Backlog(lambda: self._messages_of_ended(job))
        self._backlog.pressed(time.monotonic())
        call, text = {
            Action.CANCEL: (calls.cancel(job.id), "cancelling; ■ again leaves the wait"),
            Action.INTERRUPT: (calls.interrupt(job.id), "interrupting; ■ again kills"),
            Action.KILL: (calls.interrupt(job.id, kill=True), "killing; ■ again leaves the wait"),
        }[action]
        try:
            with self._listener.raising():
                self._session.client.call(replace(call, repeatable=False, timeout_seconds=3.0))
        except (BrokerError, KeyboardInterrupt):
            self._presses.undelivered()
            text = "the broker does not answer; ■ again leaves the wait"
        self._line.show(text)

    def _messages_of_ended(self, job: Job) -> int | None:
        """Ask whether the job has ended while its output is still being shown."""
        try:
            with self._listener.raising():
                view = self._session.client.job(job.id)
        except (BrokerError, KeyboardInterrupt):
            return None
        return int(view["output"]["next"]) if view["state"] in ENDED else None

    def _left(self, job: Job) -> Interrupted:
        return Interrupted(
            f"left the wait for job {job.id}, which goes on if it can; "
            f"%firepool result {job.id} shows its output",
            job.id,
        )

    # -- after ------------------------------------------------------------------------------------

    def _end(self, job: Job, output: ShellOutput, captured: Capture) -> None:
        if job._state != "SUCCEEDED":
            raise self._error(job, output) from None
        for name in captured.bound:
            statement = captured.imported.get(name)
            self._state.remote_names[name] = only_there(name, self._place.label, statement)
        self._bind(job, output)
        notes = []
        if captured.changed_only_there:
            names = captured.changed_only_there
            quoted = ", ".join(f"`{name}`" for name in names)
            notes.append(f"{quoted} changed in the pod only; add `-o {','.join(names)}`")
        self._show_notes(output, notes)

    def _show_notes(self, output: ShellOutput, notes: list[str]) -> None:
        for text in notes:
            self._line.nothing_else_shown = False
            output.note(text)

    def _error(self, job: Job, output: ShellOutput) -> RemoteError | Interrupted:
        error = job_error(job.view, output.raised)
        if isinstance(error, Interrupted):
            if self._presses.last is Action.KILL:
                names = ", ".join(self._options.pull)
                lost = f", {names} included" if names else ""
                return Interrupted(
                    f"killed: what the cell had computed is lost{lost}; the next cell gets a "
                    "fresh process",
                    job.id,
                    error.remote_traceback,
                )
            return error
        error.hint = hint_for(
            error.ename,
            error.evalue,
            self._namespace,
            self._state.remote_names,
            job.view.get("session_dir"),
        )
        return error

    def _bind(self, job: Job, output: ShellOutput) -> None:
        """Bind what came back; one name that cannot come costs the others nothing."""
        values: dict[str, Any] = {}
        notes: list[str] = []
        for result in job.view.get("results") or []:
            name = result["name"]
            if result.get("error"):
                if name != "_":
                    notes.append(self._missed(name, result["error"]))
                continue
            try:
                value = job._load(result)
            except Exception as error:  # noqa: BLE001 - rebuilding a value runs user code
                notes.append(self._missed(name, f"{type(error).__name__}: {error}"))
                continue
            if name == "_":
                if output.has_result:
                    self._shell.displayhook.update_user_ns(value)
                    self._shell.displayhook.fill_exec_result(value)
            else:
                values[name] = value
        self._bind_values(values)
        for text in notes:
            self._line.nothing_else_shown = False
            output.note(text, "warning")

    def _missed(self, name: str, reason: str) -> str:
        stays = (
            f"the value that {name} had in this notebook stays"
            if name in self._namespace
            else f"there is no {name} in this notebook"
        )
        return f"{name} did not come back ({reason}); {stays}"

    def _bind_values(self, values: dict[str, Any]) -> None:
        self._namespace.update(values)
        for name in values:
            self._state.remote_names.pop(name, None)


def waiting_text(waiting: dict[str, Any]) -> str:
    """Say in one line why a job waits."""
    message = str(waiting.get("message") or "waiting for a pod")
    if not message.startswith("waiting"):
        message = f"waiting: {message}"
    position = waiting.get("position") or 0
    if position > 1:
        message += f"; {position - 1} before this cell"
    estimate = waiting.get("estimate_seconds")
    if estimate is not None and "~" not in message:
        message += f", ~{estimate:.0f} s"
    return message
