"""The pod: one attempt at a time, and the states between two.

States: ``idle`` (takes an attempt), ``running``, ``resetting``, ``unclean`` (could not be emptied,
or serves one job only: it takes nothing more and must go), ``draining`` (told to take nothing
more). `_EDGES` is the whole table.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from firepool_podagent import mounts, processes, reset, wire
from firepool_podagent.attempts import ROOM_SECONDS, Attempt
from firepool_podagent.children import ChildFailedError, Children
from firepool_podagent.delivery import Deliveries
from firepool_podagent.journal import AttemptLog, Journal
from firepool_podagent.provision import Provisioner, ProvisionFailedError
from firepool_podagent.templates import (
    Spare,
    TemplateFailedError,
    Templates,
    environment_paths,
)

_EDGES = frozenset(
    (
        ("idle", "running"),
        ("idle", "draining"),
        ("running", "resetting"),
        ("resetting", "idle"),
        ("resetting", "unclean"),
        ("resetting", "draining"),
    )
)
_SPARE_DELAY_SECONDS = 0.02
# Turns of the loop in which whoever follows the attempt wakes and sends the outcome.
_TURNS_TO_TELL = 4
_SMALL_BYTES = 1 << 20
_LINE_OFFSET_LIMIT = 1_000_000
_FULL_DISK_SECONDS = 3.0
"""How long an ended job's output waits for room on the disk before some of it is given up."""
_OWN_FOLDER_SUFFIXES = ("HOME", "_CACHE", "_CACHE_DIR", "_CONFIG_DIR")


class IllegalStateError(RuntimeError):
    """A step that the table of states does not have."""


class Pod:
    """What the agent serves.

    Parameters
    ----------
    config : dict
        The document that the agent was started with.
    isolation : str
        What the machine allows, see `firepool_podagent.isolation`.
    view : View or None
        The private view, with namespaces.
    package : Path
        Folder of this package, readable for other interpreters.
    """

    def __init__(
        self, config: dict[str, Any], isolation: str, view: mounts.View | None, package: Path
    ) -> None:
        self._config = config
        self.isolation = isolation
        self._view = view
        self._told_private: set[tuple[str, str]] = set()
        directory = Path(config["directory"])
        listen = config.get("listen", {}).get("unix")
        kept = {os.path.basename(listen)} if listen else set()
        self._places = reset.Places(directory, view, kept=frozenset(kept))
        self.journal = Journal(directory / "journal")
        self.deliveries = Deliveries(directory)
        self._children = Children()
        self._provisioner = Provisioner(self._children, self.deliveries)
        self._templates = Templates(
            self._children,
            directory,
            package,
            self._show_for_good,
            publish_supervisors=view is None,
        )
        self._state = "idle"
        self._story: list[str] = []
        self._drain = False
        self._attempt: Attempt | None = None
        self._active: str | None = None
        self._running: asyncio.Task[None] | None = None
        self._started = 0
        self._later: asyncio.TimerHandle | None = None
        if config.get("default_environment"):
            self._templates.prepare(config["default_environment"], None, config.get("preload", ()))

    # --- state -----------------------------------------------------------------------------------

    def _move(self, state: str) -> None:
        if (self._state, state) not in _EDGES:
            raise IllegalStateError(f"{self._state} -> {state}; story: {self._story}")
        self._story = [*self._story[-20:], f"{self._state} -> {state}"]
        self._state = state

    @property
    def busy(self) -> bool:
        """Whether an attempt is not yet journalled to its end."""
        return self._state in ("running", "resetting")

    def health(self) -> dict[str, Any]:
        """Return what the broker reads when it looks after its pods."""
        return {
            "name": self._config["name"],
            "uid": self._config["uid"],
            "revision": self._config.get("revision"),
            "isolation": self.isolation,
            "attempts_started": self._started,
            "state": self._state,
            "active": self._active,
            "spare": self._templates.state(),
            "dropped": self._templates.dropped(),
            "attempts": list(self.journal.attempts),
            "versions": {
                "python": ".".join(str(part) for part in sys.version_info[:3]),
                "wire": wire.WIRE_VERSION,
            },
            "gpus": [],
        }

    # --- requests --------------------------------------------------------------------------------

    def prepare(self, request: dict[str, Any]) -> None:
        """Have an environment's interpreter ready."""
        preload = [*self._config.get("preload", ()), *request.get("preload", ())]
        self._templates.prepare(request.get("environment"), request.get("env"), preload)

    def start(self, attempt: str, spec: dict[str, Any]) -> tuple[bool, AttemptLog]:
        """Start an attempt, or find that it was started before.

        Returns
        -------
        bool
            Whether it is new.
        AttemptLog
            Its record.

        Raises
        ------
        Refused
            ``Busy`` or ``Missing``.
        """
        known = self.journal.attempts.get(attempt)
        if known is not None:
            return False, known
        if self._state != "idle":
            raise wire.Refused("Busy", f"the pod is {self._state}: {self._active or 'no attempt'}")
        _check_spec(attempt, spec)
        blobs = [item["blob"] for item in spec.get("inputs") or () if item.get("blob")]
        self.deliveries.require(blobs, spec.get("package"))
        has_results = bool(spec.get("outputs")) or spec["kind"] != "cell"
        try:
            log = self.journal.begin(attempt, has_results)
        except OSError as error:
            raise wire.Refused(
                "Internal",
                f"the pod's disk takes no attempt ({error.strerror}): free some of it, or give the "
                "broker another home",
            ) from None
        self._move("running")
        self._started += 1
        self._active = attempt
        self._attempt = Attempt(spec, log, time.time())
        self._running = asyncio.ensure_future(self._run(self._attempt, blobs))
        return True, log

    def signal(self, attempt: str, request: dict[str, Any]) -> bool:
        """Pass a signal to an attempt; False when it has ended."""
        log = self.find(attempt)
        name = request.get("signal")
        if name not in ("interrupt", "terminate", "kill"):
            raise wire.Refused(
                "BadRequest", "signal is one of interrupt, terminate, kill", "signal"
            )
        if log.outcome is not None or self._attempt is None or self._attempt.log is not log:
            return False
        grace = request.get("grace_seconds")
        self._attempt.signal(
            name,
            wire.TERMINATE_GRACE_SECONDS if grace is None else float(grace),
            request.get("class"),
        )
        return True

    def find(self, attempt: str) -> AttemptLog:
        """Return the record of an attempt, or refuse one that is not known."""
        log = self.journal.attempts.get(attempt)
        if log is None:
            raise wire.Refused("NotFound", f"no attempt {attempt} was started on this pod")
        return log

    async def link(self, kind: str, sha256: str, source: str) -> bool:
        """Take a delivery from a file of the same machine; True when it is new."""
        work = self.deliveries.linking(kind, sha256, source)
        try:
            if os.path.getsize(source) < _SMALL_BYTES:
                return work()
            return bool(await self._children.work(work))
        except ChildFailedError as error:
            if error.kind == "Refused":
                raise wire.Refused("DigestMismatch", str(error)) from None
            raise wire.Refused("BadRequest", f"{source}: {error}", wire.HEADER_LINK) from None
        except OSError as error:
            raise wire.Refused(
                "BadRequest", f"{source}: {error.strerror}", wire.HEADER_LINK
            ) from None

    def drain(self) -> None:
        """Take no more attempts."""
        self._drain = True
        if self._state == "idle":
            self._move("draining")

    async def fence(self, message: str) -> None:
        """End the present attempt since no broker looks after it any more."""
        if self._attempt is not None and self._state == "running":
            self._attempt.signal("kill", 0, None)
            self._attempt.say("warning", message)

    async def shutdown(self) -> None:
        """End everything; the folders of the pod that hold work are emptied."""
        self.drain()
        self._templates.closed = True
        if self._later is not None:
            self._later.cancel()
        if self._attempt is not None and self._state == "running":
            self._attempt.signal("kill", 0, None)
        if self._running is not None:
            await asyncio.wait([self._running], timeout=2 * processes.KILL_DEADLINE_SECONDS)
        self._templates.forget()
        await self._end_everything()

    # --- one attempt -----------------------------------------------------------------------------

    async def _run(self, attempt: Attempt, blobs: list[str]) -> None:
        findings = reset.Findings()
        log = attempt.log
        before: reset.Before | None = None
        try:
            try:
                before = reset.Before.look(self._places)
                self._places.begin()
                outcome = await self._serve(attempt, blobs)
            except TemplateFailedError as error:
                outcome = attempt.outcome_without_job("LaunchFailed", str(error))
            except ProvisionFailedError as error:
                outcome = attempt.outcome_without_job(error.error_class, str(error))
            except Exception as error:  # noqa: BLE001 - whatever it is, the attempt has an end
                outcome = await self._give_up(attempt, error, findings)
            await self._finish(log, outcome)
            self._move("resetting")
            for _ in range(_TURNS_TO_TELL):  # the outcome first: a person waits for it
                await asyncio.sleep(0)
            self._templates.wake()
            self._templates.refill()  # forks while the pod is being emptied
            began = time.monotonic()
            try:
                if before is None:
                    raise OSError("what the pod held before is not known")
                await self._reset(attempt, before, findings)
            except Exception as error:  # noqa: BLE001 - fail closed: a pod in doubt takes nothing
                findings.problems.append(f"the reset failed: {type(error).__name__}: {error}")
            log.report_reset(findings.report(log.attempt, time.monotonic() - began))
        finally:
            self._attempt = self._active = None
            if self._state == "running":  # something of ours is wrong: fail closed
                self._move("resetting")
                findings.problems.append("the agent could not bring the attempt to its end")
            self._move("unclean" if findings.problems else "draining" if self._drain else "idle")
        if attempt.job_pid and self._state in ("idle", "draining"):
            self._templates.prepare(attempt.spec.get("environment"), None, attempt.imported)

    async def _give_up(
        self, attempt: Attempt, error: Exception, findings: reset.Findings
    ) -> dict[str, Any]:
        """End an attempt after an error that nothing foresaw; the pod takes no other one."""
        if not isinstance(error, OSError):
            traceback.print_exception(error, file=sys.stderr)
        if attempt.job_pid:
            findings.problems.append(f"the agent failed: {type(error).__name__}: {error}")
            await self._end_in_place(attempt)
            try:
                attempt.drain()
            except Exception:  # noqa: BLE001 - the error that is told is the first one
                traceback.print_exc(file=sys.stderr)
                attempt.abandon()
        return attempt.outcome_broken(error)

    async def _finish(self, log: AttemptLog, outcome: dict[str, Any]) -> None:
        """Write the outcome, on a full disk into the room that was set apart for it."""
        deadline = time.monotonic() + _FULL_DISK_SECONDS
        while log.outcome is None:
            outcome["next"] = log.next
            try:
                log.finish(outcome)
            except OSError:
                with contextlib.suppress(OSError):
                    if log.finish_in_reserve(outcome, cut=time.monotonic() > deadline):
                        return
                await asyncio.sleep(ROOM_SECONDS)

    async def _serve(self, attempt: Attempt, blobs: list[str]) -> dict[str, Any]:
        preparing = asyncio.ensure_future(self._prepare(attempt, blobs))
        try:
            await asyncio.wait((preparing, attempt.stopped), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if attempt.stopped.done() or not preparing.done():
                preparing.cancel()
                await asyncio.wait((preparing,))
        if attempt.stopped.done():
            if not preparing.cancelled() and preparing.exception() is None:
                preparing.result()[0].close()
            return attempt.outcome_without_job("Cancelled", "the job was stopped before it began")
        spare, tier, package, overlays = preparing.result()
        spec = attempt.spec
        paths: dict[str, Any] = {
            "package": package,
            "blobs": {sha256: str(self.deliveries.blob(sha256)) for sha256 in blobs},
            "overlays": overlays,
            "scratch": str(self._places.temporary),
            "results": str(attempt.log.results),
        }
        temporary = str(self._places.temporary)
        spec["env"] = {**spec.get("env", {}), "TMPDIR": temporary}
        for name in ("TMP", "TEMP"):
            spec["env"].pop(name, None)
        attempt.on_started = self._refill_soon
        attempt.on_exited = self._refill_not_now
        await attempt.run(spare, tier, paths, self._places.run)
        if attempt.tree.supervisor_lost or not attempt.tree.clean:
            await self._end_in_place(attempt)
        attempt.drain()
        self._tell_of_killed(attempt)
        return attempt.outcome()

    async def _prepare(
        self, attempt: Attempt, blobs: list[str]
    ) -> tuple[Spare, str, str | None, list[str]]:
        """Get a spare and what the job needs; may be cancelled at any time."""
        spec = attempt.spec
        self.deliveries.belong_to(spec)
        self._show_for_attempt(attempt)
        package = await self._provisioner.package(attempt, self._places.run / "package")
        overlays = await self._provisioner.overlays(attempt, package)
        preload = [*self._config.get("preload", ()), *spec.get("preload", ())]
        if preload:
            self._templates.learn(spec.get("environment"), preload)
        spare, tier = await self._templates.take(spec.get("environment"), spec.get("env"))
        return spare, tier, package, overlays

    def _refill_soon(self) -> None:
        # While the job runs, unless it is short: then a fork would only delay its end.
        loop = asyncio.get_running_loop()
        self._later = loop.call_later(_SPARE_DELAY_SECONDS, self._templates.refill)

    def _refill_not_now(self) -> None:
        if self._later is not None:
            self._later.cancel()

    def _show_for_attempt(self, attempt: Attempt) -> None:
        if self._view is None:
            return
        spec = attempt.spec
        environment = spec.get("environment")
        options = spec.get("requirements_options") or {}
        wanted = [spec.get("cwd"), spec.get("session_dir"), options.get("overlay_root")]
        if environment:
            wanted += environment_paths(environment)
        variables = spec.get("env", {})
        wanted += [value for name, value in variables.items() if _names_own_folder(name)]
        wanted += _sockets(variables, self._view)
        covered = self._view.show([str(path) for path in wanted if path])
        for path in covered:
            if (spec["session_dir"], path) in self._told_private:
                continue  # each session hears it once
            self._told_private.add((spec["session_dir"], path))
            attempt.say(
                "warning",
                f"{path} is private in a pod: files of the machine's own {path} are not seen "
                "there; keep the notebook and its data in a folder below it",
            )

    def _show_for_good(self, paths: Iterable[str]) -> None:
        if self._view is not None:
            self._view.show(paths, keep=True)

    def _tell_of_killed(self, attempt: Attempt) -> None:
        killed = [found["name"] for found in attempt.tree.killed]
        if killed:
            names = ", ".join(dict.fromkeys(killed))
            count = f"{len(killed)} background process" + ("es" if len(killed) > 1 else "")
            attempt.say(
                "warning",
                f"ended {count}: {names} (a job's processes end with it; to keep one running, let "
                "the cell wait for it, in a cell with -a if it takes long)",
            )

    async def _reset(
        self, attempt: Attempt, before: reset.Before, findings: reset.Findings
    ) -> None:
        tree = attempt.tree
        if tree.survivors:
            findings.problems.extend(f"process {name} does not end" for name in tree.survivors)
            findings.escapees += len(tree.survivors)
        self._children.reap()
        await reset.reset(self._places, before, tree.pids, self._templates.process_ids, findings)
        findings.problems.extend(self.deliveries.forget_blobs())
        if self.isolation == "none":
            findings.problems.append("a pod without isolation serves one job")

    async def _end_in_place(self, attempt: Attempt) -> None:
        """Do the supervisor's work after the job has killed or stopped it.

        Whatever descended from the supervisor is a descendant of this process, which is the next
        subreaper (or PID 1): everything below it is ended, the template included.
        """
        tree = attempt.tree
        self._templates.forget()
        killer = await self._end_everything()
        tree.clean = killer.clean
        tree.survivors = killer.survivors
        if tree.status is None:
            tree.status = killer.reaped.get(attempt.job_pid)

    async def _end_everything(self) -> processes.TreeKiller:
        """Kill every descendant of the agent, and in its own PID namespace everything there is."""
        killer = processes.TreeKiller()
        if self.isolation == "none":
            killer.deadline_seconds = 1.0
        while not killer.done:
            if os.getpid() == 1:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)
            killer.step()
            if not killer.done:
                await asyncio.sleep(0.001)
        for pid, status in killer.reaped.items():
            self._children.report(pid, status)
        return killer


def _check_spec(attempt: str, spec: dict[str, Any]) -> None:
    if spec.get("attempt") != attempt:
        raise wire.Refused("BadRequest", "the attempt in the path is another one", "attempt")
    if attempt in _NO_NAMES or len(attempt) > _ID_LIMIT or not attempt.isprintable():
        raise wire.Refused("BadRequest", "this is no attempt's name", "attempt")
    for name in ("kind", "session_dir"):
        if not isinstance(spec.get(name), str):
            raise wire.Refused("BadRequest", f"{name} is missing", name)
    offset = spec.get("line_offset")
    if offset is not None and not (type(offset) is int and 0 <= offset <= _LINE_OFFSET_LIMIT):
        raise wire.Refused(
            "BadRequest",
            f"line_offset is a number of lines, at most {_LINE_OFFSET_LIMIT}",
            "line_offset",
        )
    for name, kind in _KINDS.items():
        value = spec.get(name)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise wire.Refused("BadRequest", f"{name} has the wrong type", name)
    if not all(isinstance(item, dict) for item in spec.get("inputs") or ()):
        raise wire.Refused("BadRequest", "an input is no object", "inputs")


_NO_NAMES = frozenset(("", ".", "..", ".reserve", ".reserve.new"))
_ID_LIMIT = 200
_KINDS: dict[str, Any] = {
    "inputs": list,
    "outputs": list,
    "env": dict,
    "protected_env": dict,
    "environment": dict,
    "requirements": list,
    "requirements_options": dict,
    "preload": list,
    "package": str,
    "timeout_seconds": (int, float),
    "terminate_grace_seconds": (int, float),
    "memory_mib": (int, float),
    "output_limit_bytes": int,
    "inline_result_bytes": int,
}


def _names_own_folder(name: str) -> bool:
    """Whether a variable names a folder of the person's own: the home, caches, configuration."""
    return name.endswith(_OWN_FOLDER_SUFFIXES) and not name.startswith("FIREPOOL_")


def _sockets(variables: dict[str, str], view: mounts.View) -> list[str]:
    """Folders of sockets that the environment names, such as ``SSH_AUTH_SOCK``."""
    return [
        place for value in variables.values() if (place := view.socket_place(value)) is not None
    ]
