"""Interpreters kept ready: one template per environment, and one parked spare.

A *template* is a process of the session's interpreter that has imported what jobs are likely to
need and runs no user code. It forks a *spare*: a supervisor and a job that waits on its channel.
Three tiers, best first: ``parked`` (a spare was waiting), ``fork`` (a template was there),
``fresh`` (the template had to start). The next spare is forked while the present job runs, so
back-to-back jobs find one.

What this environment's jobs imported before is preloaded; a module that cannot be (it starts
threads, opens a device, fails) is dropped and remembered.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from firepool_podagent import processes
from firepool_podagent.children import Children
from firepool_podagent.interpreter import template_command

READY_SECONDS = 60.0
FORK_SECONDS = 20.0
PRELOAD_SECONDS = 60.0
LEARNED_LIMIT = 64
PIPE_BYTES = 1 << 20
JOB_OOM_SCORE = 800
_PACKET_BYTES = 1 << 20
_F_SETPIPE_SZ = 1031

_KEPT_VARIABLES = frozenset(
    ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TERM", "VIRTUAL_ENV")
)
_KEPT_PREFIXES = ("LC_", "LD_", "DYLD_", "PYTHON", "CONDA_", "CUDA_", "NVIDIA_", "MPL")


class TemplateFailedError(RuntimeError):
    """The session's interpreter did not come up."""


def plain_environment(environment: dict[str, str]) -> dict[str, str]:
    """Return what of a session's environment a template may see: a spare holds no secret."""
    return {
        name: value
        for name, value in environment.items()
        if name in _KEPT_VARIABLES or name.startswith(_KEPT_PREFIXES)
    }


@dataclass
class Spare:
    """A supervisor with a job that waits.

    Attributes
    ----------
    channel : socket.socket
        Frames to and from the job.
    pipes : tuple of int
        Reading ends of the job's stdout and stderr.
    control : socket.socket
        Packets to and from the supervisor.
    supervisor, job : int
        Process numbers, 0 until known.
    """

    channel: socket.socket
    pipes: tuple[int, int]
    control: socket.socket
    parked: asyncio.Future[None]
    supervisor: int = 0
    job: int = 0
    on_packet: Callable[[dict[str, Any] | None], None] | None = None
    closed: bool = False

    def receive(self) -> None:
        """Read what the supervisor says; for the loop."""
        while not self.closed:
            try:
                packet = self.control.recv(_PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            try:
                message = json.loads(packet) if packet else None
                if message is not None:
                    message["type"]
            except (ValueError, TypeError, KeyError):  # not its supervisor's words: as if it died
                message = None
            if message is not None and message["type"] == "parked":
                self.job = int(message["pid"])
                with contextlib.suppress(OSError):  # an attempt's memory watch works without it
                    Path(f"/proc/{self.job}/oom_score_adj").write_text(str(JOB_OOM_SCORE))
                if not self.parked.done():
                    self.parked.set_result(None)
                continue
            if message is None:
                asyncio.get_running_loop().remove_reader(self.control)
                if not self.parked.done():
                    self.parked.set_exception(TemplateFailedError("a spare died"))
                    self.parked.exception()  # the waiter, if any, sees it all the same
            if self.on_packet is not None:
                self.on_packet(message)
            if message is None:
                return

    def tell(self, message: dict[str, Any]) -> None:
        """Send a packet to the supervisor; one that is gone is noticed elsewhere."""
        with contextlib.suppress(OSError):
            self.control.send(json.dumps(message).encode())

    def close(self) -> None:
        """Let go of it: its supervisor ends whatever is left of the job."""
        if not self.closed:
            self.closed = True
            asyncio.get_running_loop().remove_reader(self.control)
            self.control.close()
            self.channel.close()
            for descriptor in self.pipes:
                os.close(descriptor)

    @property
    def alive(self) -> bool:
        """Whether it can still serve a job."""
        return not self.closed and self.parked.done() and self.parked.exception() is None


@dataclass
class Template:
    """One template process."""

    environment: dict[str, Any]
    control: socket.socket
    log: Path
    pid: int = 0
    preloaded: set[str] = field(default_factory=set)
    busy: bool = False
    gone: bool = False
    ready: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    _forks: dict[int, Spare] = field(default_factory=dict)
    _next_fork: int = 0

    @property
    def digest(self) -> str:
        """Digest of its environment."""
        return str(self.environment.get("digest") or "")

    @property
    def usable(self) -> bool:
        """Whether it is up and can fork."""
        return not self.gone and self.ready.done() and self.ready.exception() is None

    def fork(self) -> Spare:
        """Ask for a spare; ``parked`` of the answer says when it waits."""
        loop = asyncio.get_running_loop()
        ours, channel = socket.socketpair()
        control, supervisor_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        readers, writers = zip(os.pipe(), os.pipe(), strict=True)
        for descriptor in readers:
            os.set_blocking(descriptor, False)
            with contextlib.suppress(OSError):  # above the user's quota: it stays small
                fcntl.fcntl(descriptor, _F_SETPIPE_SZ, PIPE_BYTES)
        ours.setblocking(False)
        control.setblocking(False)
        spare = Spare(ours, (readers[0], readers[1]), control, loop.create_future())
        loop.add_reader(control, spare.receive)
        self._next_fork += 1
        self._forks[self._next_fork] = spare
        passed = array.array("i", [channel.fileno(), *writers, supervisor_control.fileno()])
        try:
            self.control.sendmsg(
                [json.dumps({"type": "fork", "id": self._next_fork}).encode()],
                [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)],
            )
        except OSError:
            self.gone = True
        finally:
            channel.close()
            supervisor_control.close()
            for descriptor in writers:
                os.close(descriptor)
        return spare

    def preload(self, modules: list[str]) -> None:
        """Ask for imports; the answer sets ``busy`` back."""
        self.busy = True
        with contextlib.suppress(OSError):
            self.control.send(json.dumps({"type": "preload", "modules": modules}).encode())

    def forked(self, number: int, pid: int) -> None:
        """Take the answer to a fork."""
        spare = self._forks.pop(number, None)
        if spare is not None:
            spare.supervisor = pid

    def log_tail(self) -> str:
        """Return what the interpreter said last."""
        try:
            return self.log.read_bytes()[-2000:].decode("utf-8", "replace").strip()
        except OSError:
            return ""

    def retire(self) -> None:
        """End it, and whatever it started for its own use; its spares are in sessions of theirs."""
        if not self.gone:
            self.gone = True
            asyncio.get_running_loop().remove_reader(self.control)
        self.control.close()
        if self.pid:  # closing is not enough for an interpreter that never came to listen
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        for spare in self._forks.values():
            spare.close()
        self._forks.clear()


class Templates:
    """Keeps the template and the parked spare of the environment in use.

    Parameters
    ----------
    children : Children
        Where processes are started and reaped.
    directory : Path
        The pod's own directory.
    package : Path
        Folder of this package as other interpreters can read it.
    show : callable
        Makes paths visible in the pod for good.
    publish_supervisors : bool
        Write which supervisors there are into ``supervisors.json``: without a PID namespace they
        outlive the agent by the time they need to kill, and the pod is not gone before they are.
    """

    def __init__(
        self,
        children: Children,
        directory: Path,
        package: Path,
        show: Callable[[Iterable[str]], None],
        publish_supervisors: bool = False,
    ) -> None:
        self._children = children
        self._directory = directory
        self._package = package
        self._show = show
        self._template: Template | None = None
        self._spare: Spare | None = None
        self._learned: dict[str, list[str]] = {}
        self._dropped: dict[str, dict[str, str]] = {}
        self._environment_variables: dict[str, str] = {}
        self._publish = publish_supervisors
        self._supervisors: dict[int, int] = {}
        self.closed = False

    # --- for the pod -----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return what health says of it."""
        template = self._template
        return {
            "environment": template.digest if template is not None else None,
            "ready": self._spare is not None and self._spare.alive,
        }

    def dropped(self) -> dict[str, str]:
        """Modules that the present environment does not preload, and why."""
        template = self._template
        return dict(self._dropped.get(template.digest, {})) if template is not None else {}

    def process_ids(self) -> set[int]:
        """Return the template, its descendants, and whatever else belongs to no attempt."""
        found = self._children.known()
        if self._spare is not None and self._spare.supervisor:
            found.add(self._spare.supervisor)
        for pid in tuple(found):
            found.update(processes.descendants(pid))
        return found

    def prepare(
        self,
        environment: dict[str, Any] | None,
        variables: dict[str, str] | None = None,
        preload: Iterable[str] = (),
    ) -> None:
        """See to it that a template and a spare of an environment are there, in the background."""
        environment = environment or own_environment()
        if variables is not None:
            self._environment_variables = plain_environment(variables)
        self.learn(environment, preload)
        template = self._template
        if template is None or template.gone or template.digest != environment.get("digest"):
            self._replace(environment)
        else:
            self._improve()

    def learn(self, environment: dict[str, Any] | None, modules: Iterable[str]) -> None:
        """Remember what jobs of an environment import."""
        digest = str((environment or own_environment()).get("digest") or "")
        known = self._learned.setdefault(digest, [])
        for module in modules:
            if module not in known:
                known.append(module)
        del known[:-LEARNED_LIMIT]

    async def take(
        self, environment: dict[str, Any] | None, variables: dict[str, str] | None = None
    ) -> tuple[Spare, str]:
        """Return a spare for an attempt, and the tier it came from.

        Parameters
        ----------
        environment : dict or None
            The session's environment; the agent's own interpreter without one.
        variables : dict of str, optional
            The job's environment variables, of which a template that has to start sees a few.

        Raises
        ------
        TemplateFailedError
            The interpreter does not start.
        """
        environment = environment or own_environment()
        tier = "fork"
        for _ in range(3):
            template = self._template
            if template is None or template.gone or template.digest != environment.get("digest"):
                tier = "fresh"
                if variables is not None:
                    self._environment_variables = plain_environment(variables)
                template = self._replace(environment)
            if not template.ready.done():
                tier = "fresh"
            try:
                await _within(template.ready, READY_SECONDS, "the interpreter did not start")
            except (asyncio.CancelledError, TemplateFailedError):
                if template is self._template and not template.ready.done():
                    self.forget()  # nobody waits for it any more
                raise
            spare, self._spare = self._spare, None
            if spare is None:
                spare = template.fork()
            elif spare.alive and tier == "fork":
                tier = "parked"
            try:
                await _within(spare.parked, FORK_SECONDS, "the interpreter did not fork")
            except asyncio.CancelledError:
                spare.close()
                raise
            except TemplateFailedError:
                spare.close()
                tier = "fork"
                if not spare.parked.done() and template is self._template:
                    self.forget()  # it does not answer
                continue
            return spare, tier
        raise TemplateFailedError("the interpreter dies whenever it is asked for a job")

    def wake(self) -> None:
        """Let what waits go on, should a job have stopped it; harmless for what runs."""
        pids = [template.pid for template in (self._template,) if template is not None]
        if self._spare is not None and not self._spare.closed:
            pids += [self._spare.supervisor, self._spare.job]
        for pid in pids:
            if pid > 1:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGCONT)

    def refill(self) -> None:
        """Fork the next spare if none waits."""
        template = self._template
        if self.closed or template is None or not template.usable:
            return
        if self._spare is not None and not self._spare.closed:
            if not self._spare.parked.done() or self._spare.alive:
                return
            self._spare.close()
        self._spare = template.fork()
        self._spare.on_packet = self._spare_lost(self._spare)

    def forget(self) -> None:
        """Let everything go, for instance after it was killed."""
        if self._spare is not None:
            self._spare.close()
            self._spare = None
        if self._template is not None:
            self._template.retire()
            self._template = None

    # --- inside ----------------------------------------------------------------------------------

    def _spare_lost(self, spare: Spare) -> Callable[[dict[str, Any] | None], None]:
        def lost(message: dict[str, Any] | None) -> None:
            if message is None and self._spare is spare:
                self._spare = None
                spare.close()

        return lost

    def _replace(self, environment: dict[str, Any]) -> Template:
        self.forget()
        self._show(environment_paths(environment))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        log = self._directory / "template.log"
        template = Template(environment, ours, log)
        self._template = template
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        command = template_command(str(environment["executable"]), str(self._package))
        try:
            template.pid = self._children.spawn(
                command,
                self._environment_variables or plain_environment(dict(os.environ)),
                {0: nothing, 1: output, 2: output, 3: theirs.fileno()},
                lambda status: self._ended(template, status),
            )
        except OSError as error:
            self._fail(template, f"{command[0]}: {error.strerror}")
            return template
        finally:
            theirs.close()
            os.close(output)
            os.close(nothing)
        ours.setblocking(False)
        asyncio.get_running_loop().add_reader(ours, self._receive, template)
        return template

    def _receive(self, template: Template) -> None:
        while not template.gone:
            try:
                packet = template.control.recv(_PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self._fail(template, "the interpreter ended")
                return
            self._handle(template, json.loads(packet))

    def _handle(self, template: Template, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "forked":
            template.forked(int(message["id"]), int(message["pid"]))
            if self._publish:
                self._publish_supervisor(int(message["pid"]))
        elif kind in ("ready", "preloaded"):
            template.preloaded.update(message.get("preloaded", ()))
            self._dropped.setdefault(template.digest, {}).update(message.get("dropped", {}))
            template.busy = False
            if not template.ready.done():
                template.ready.set_result(None)
            elif kind == "preloaded" and self._spare is not None:
                self._spare.close()  # it was forked before these imports
                self._spare = None
            if template is self._template:
                self.refill()
                self._improve()
        elif kind == "tainted":
            module, reason = message.get("module"), str(message.get("reason"))
            dropped = self._dropped.setdefault(template.digest, {})
            suspects = [str(module)] if module else self._learned.get(template.digest, [])
            new = [name for name in suspects if name not in dropped]
            dropped.update(dict.fromkeys(new, reason))
            if not new:  # it is unfit as it is: a new one would be no better
                self._fail(template, f"the interpreter cannot be forked: {reason}")
            elif template is self._template and not self.closed:
                self._replace(template.environment)

    def _publish_supervisor(self, pid: int) -> None:
        self._supervisors[pid] = 0
        present = {p: processes.process(p) for p in self._supervisors}
        self._supervisors = {p: found.start_ticks for p, found in present.items() if found}
        temporary = self._directory / ".supervisors.json"
        temporary.write_text(json.dumps(self._supervisors))
        temporary.rename(self._directory / "supervisors.json")

    def _improve(self) -> None:
        template = self._template
        if template is None or not template.usable or template.busy:
            return
        dropped = self._dropped.get(template.digest, {})
        missing = [
            module
            for module in self._learned.get(template.digest, ())
            if module not in template.preloaded and module not in dropped
        ]
        if missing:
            template.preload(missing)
        else:
            self.refill()

    def _ended(self, template: Template, status: int) -> None:
        template.pid = 0
        if not template.gone:
            self._fail(template, f"the interpreter ended with wait status {status}")

    def _fail(self, template: Template, reason: str) -> None:
        tail = template.log_tail()
        if not template.ready.done():
            template.ready.set_exception(
                TemplateFailedError(f"{reason}: {tail}" if tail else reason)
            )
            template.ready.exception()  # nobody may be waiting
        template.retire()
        if self._template is template:
            self._template = None
            if self._spare is not None:
                self._spare.close()
                self._spare = None


async def _within(future: asyncio.Future[None], seconds: float, what: str) -> None:
    done, _ = await asyncio.wait([future], timeout=seconds)
    if not done:
        raise TemplateFailedError(f"{what} within {seconds:g} s")
    future.result()


def own_environment() -> dict[str, Any]:
    """Return the agent's own interpreter, for attempts that name none."""
    return {
        "executable": sys.executable,
        "prefix": sys.prefix,
        "base_prefix": sys.base_prefix,
        "version": ".".join(str(part) for part in sys.version_info[:3]),
        "digest": "",
        "path": [],
        "visible": [],
    }


def environment_paths(environment: dict[str, Any]) -> list[str]:
    """Paths that an environment needs to see."""
    single = [environment.get(key) for key in ("executable", "prefix", "base_prefix")]
    many = [*environment.get("path", ()), *environment.get("visible", ())]
    return [str(path) for path in (*single, *many) if path]


def signal_name(number: int) -> str:
    """``SIGKILL`` and the like."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
