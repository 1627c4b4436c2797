"""Pods as processes of this machine.

Every pod has a folder of its own below the broker's state folder. It is written *before* the
process is started, so a broker that dies in between leaves a name that the next one finds:

``state.json``
    the pod's record (name, uid, pool, revision), owned by the broker;
``annotations``
    whose the pod is and was, owned by the broker;
``agent.json``
    pid, start time and isolation, written by the agent when it serves;
``agent.log``
    what the agent said on its standard error.

A pod is a session of its own and outlives its broker; the next one adopts it from the folder. A
process is always meant by pid *and* start time, its death is an event (a pidfd), and a pod is
called gone only when its agent and every supervisor below it are.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct, field

from firepool_broker import processes
from firepool_broker.backends.agents import (
    agent_command,
    begun_attempts,
    describe_exit,
    marked_processes,
    supervisors,
    template_revision,
)
from firepool_broker.backends.annotations import AnnotationFile
from firepool_broker.backends.base import (
    Annotations,
    BackendUnavailable,
    PodAddress,
    PodExited,
    PodFailed,
    PodRecord,
    PodServing,
    PodSpec,
    WatchEvent,
)
from firepool_broker.backends.deaths import end_supervisor, wait_gone
from firepool_broker.backends.folders import clear_trash, discard, read_json, write_json
from firepool_broker.backends.inotify import FolderWatch

__all__ = ["LocalBackend"]

log = logging.getLogger(__name__)

_SOCKET_PATH_LIMIT = 100  # of the system's 108 bytes, the rest being room for its terminator
_LOG_TAIL_BYTES = 2000
_FALLBACK_POLL_SECONDS = 0.02
_DEATH_TIMEOUT_SECONDS = 10.0
_STOP_SECONDS = 2.0


class _Pod(Struct, eq=False):
    name: str
    uid: str
    directory: str
    socket: str
    document: dict[str, Any]
    annotations: AnnotationFile
    launched: tuple[int, int] | None = None  # pid and start time of what we started
    agent: tuple[int, int] | None = None  # and of the agent itself
    isolation: str = ""
    leaving: bool = False
    starting: asyncio.Task[None] | None = None
    deletion: asyncio.Task[None] | None = None
    watched: list[int] = field(default_factory=list)  # pidfds with a reader
    exit_status: int | None = None


class LocalBackend:
    """Starts, watches, adopts and deletes local pods.

    Parameters
    ----------
    directory
        Folder that holds the pods' folders.
    runtime_dir
        Folder for sockets whose path would otherwise be too long.
    key_of
        The key of a pod by its uid.
    isolation
        ``auto``, ``process`` or ``none``.
    orphan_exit_seconds
        After how long without a broker an idle agent ends by itself; None for never.
    start_timeout_seconds
        How long a pod may take until it serves.
    """

    name = "local"

    def __init__(
        self,
        directory: str,
        runtime_dir: str,
        key_of: Callable[[str], bytes],
        *,
        isolation: str = "auto",
        orphan_exit_seconds: float | None = 600.0,
        start_timeout_seconds: float = 30.0,
    ) -> None:
        self.directory = directory
        self.revision = template_revision(isolation)
        self._runtime_dir = runtime_dir
        self._key_of = key_of
        self._isolation = isolation
        self._orphan_exit_seconds = orphan_exit_seconds
        self._start_timeout_seconds = start_timeout_seconds
        self._pods: dict[str, _Pod] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._watch: Callable[[WatchEvent], None] | None = None

    # -- the interface ---------------------------------------------------------------------

    async def start(self, watch: Callable[[WatchEvent], None]) -> None:
        """Begin to watch; what an earlier broker could not remove is tried again."""
        self._watch = watch
        os.makedirs(self.directory, mode=0o700, exist_ok=True)
        self._spawn(asyncio.to_thread(clear_trash, self.directory))

    async def stop(self) -> None:
        """Stop watching and leave every pod as it is."""
        self._watch = None
        for pod in self._pods.values():
            if pod.starting is not None:
                pod.starting.cancel()
            self._unwatch(pod)
        pending = [p.starting for p in self._pods.values() if p.starting is not None]
        left = {*pending, *self._background}
        if left:
            _, late = await asyncio.wait(left, timeout=_STOP_SECONDS)
            for task in late:  # a process that does not die keeps nobody here
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        self._pods.clear()

    async def list_pods(self) -> list[PodRecord]:
        """List every pod and adopt those of earlier brokers.

        Raises
        ------
        BackendUnavailable
            When the folder could not be read completely.
        """
        try:
            names = sorted(os.listdir(self.directory))
            for name in names:
                if not name.startswith(".") and name not in self._pods:
                    await self._adopt(name)
        except OSError as error:
            raise BackendUnavailable(f"the pods' folder cannot be read: {error}") from error
        self._sweep_orphans()
        return [self._record(pod) for pod in self._pods.values() if not pod.leaving]

    async def create(self, spec: PodSpec) -> None:
        """Write the pod's name down, then start its agent.

        Raises
        ------
        OSError
            When the folder or the process could not be made; nothing is left of it then.
        """
        directory = os.path.join(self.directory, spec.name)
        os.mkdir(directory, 0o700)
        pod = _Pod(
            name=spec.name,
            uid=spec.uid,
            directory=directory,
            socket=self._socket_path(directory, spec.uid),
            annotations=AnnotationFile(os.path.join(directory, "annotations")),
            document={
                "name": spec.name,
                "uid": spec.uid,
                "pool": spec.pool,
                "revision": self.revision,
                "created_at": time.time(),
                "socket": self._socket_path(directory, spec.uid),
            },
        )
        try:
            self._save(pod)
            if spec.annotations:
                pod.annotations.merge(spec.annotations)
            pid = self._spawn_agent(pod, spec)
            pod.launched = (pid, processes.start_time(pid) or 0)
            pod.document["launched"] = pod.launched
            self._save(pod)
        except OSError:
            await asyncio.to_thread(discard, directory)
            raise
        self._pods[spec.name] = pod
        self._await_serving(pod)

    async def delete(self, name: str, *, grace_seconds: float = 0.0) -> None:
        """End a pod, verify that it is gone, and remove its folder.

        Raises
        ------
        TimeoutError
            When one of its processes is still there after ten seconds.
        """
        pod = self._pods.get(name)
        if pod is None:
            return
        if pod.deletion is None or pod.deletion.done():
            pod.deletion = asyncio.create_task(self._delete(pod, grace_seconds))
        await asyncio.shield(pod.deletion)

    async def annotate(self, name: str, annotations: Annotations) -> None:
        """Merge annotations into the pod's own; a pod that is gone is no error."""
        pod = self._pods.get(name)
        if pod is None:
            return
        if not pod.leaving:
            pod.annotations.merge(annotations)

    def address(self, name: str) -> PodAddress:
        """Say where the pod's agent is reached."""
        pod = self._pods[name]
        return PodAddress(uid=pod.uid, key=self._key_of(pod.uid), unix=pod.socket)

    def agent(self, name: str) -> tuple[int, int] | None:
        """Return pid and start time of the pod's agent; None while it does not serve."""
        return self._pods[name].agent

    def shared_folder(self, name: str) -> str:
        """Name the pod's own folder: its agent sees it under the same path."""
        return self._pods[name].directory

    # -- starting --------------------------------------------------------------------------

    def _command(self, pod: _Pod) -> list[str]:
        return agent_command(pod.directory)

    def _configuration(self, pod: _Pod, spec: PodSpec) -> dict[str, Any]:
        return {
            "name": pod.name,
            "uid": pod.uid,
            "directory": pod.directory,
            "key": self._key_of(pod.uid).hex(),
            "listen": {"unix": pod.socket},
            "isolation": self._isolation,
            "memory_mib": spec.memory_mib,
            "cores": spec.cores,
            "preload": list(spec.preload),
            "revision": self.revision,
            "orphan_exit_seconds": self._orphan_exit_seconds,
            "fence_seconds": None,
            "default_environment": None,
        }

    def _environment(self) -> dict[str, str]:
        # never the notebook's: jobs bring their own. The home names whose pod this is.
        names = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "FIREPOOL_HOME")
        return {name: os.environ[name] for name in names if name in os.environ}

    def _spawn_agent(self, pod: _Pod, spec: PodSpec) -> int:
        configuration = json.dumps(self._configuration(pod, spec)).encode()
        reader, writer = os.pipe()
        try:
            command = self._command(pod)
            errors = os.path.join(pod.directory, "agent.log")
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            # posix_spawn neither copies the broker's page tables nor runs Python in the child
            pid = os.posix_spawn(
                command[0],
                command,
                self._environment(),
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, errors, flags, 0o600),
                    (os.POSIX_SPAWN_DUP2, 1, 2),
                    (os.POSIX_SPAWN_DUP2, reader, 3),
                ],
                setpgroup=0,
            )
            os.write(writer, configuration)
        finally:
            os.close(reader)
            os.close(writer)
        return pid

    def _await_serving(self, pod: _Pod) -> None:
        pod.starting = asyncio.create_task(self._start_up(pod))

    async def _start_up(self, pod: _Pod) -> None:
        loop = asyncio.get_running_loop()
        age = max(0.0, time.time() - float(pod.document["created_at"]))
        deadline = loop.time() + max(1.0, self._start_timeout_seconds - age)
        something = asyncio.Event()
        folder = FolderWatch.open(pod.directory)
        exited = None if pod.launched is None else processes.exit_descriptor(pod.launched[0])
        reason = None
        try:
            if folder is not None:
                loop.add_reader(folder, something.set)
            if exited is not None:
                loop.add_reader(exited, something.set)
            while not pod.leaving and not self._read_agent(pod):
                if exited is not None and self._reap(pod):
                    loop.remove_reader(exited)
                    os.close(exited)
                    exited = None
                    # one that ended well has handed over to the process it forked
                    if pod.exit_status != 0 and not self._read_agent(pod):
                        reason = f"its agent {describe_exit(pod.exit_status)} before it served"
                        break
                    continue
                left = deadline - loop.time()
                if left <= 0:
                    reason = f"its agent did not serve within {self._start_timeout_seconds:g} s"
                    break
                something.clear()
                pause = left if folder is not None else min(left, _FALLBACK_POLL_SECONDS)
                try:
                    await asyncio.wait_for(something.wait(), pause)
                except asyncio.TimeoutError:
                    continue
                if folder is not None:
                    folder.clear()
        finally:
            if folder is not None:
                loop.remove_reader(folder)
                folder.close()
            if exited is not None:
                loop.remove_reader(exited)
                os.close(exited)
        pod.starting = None
        if pod.leaving:
            return  # being deleted; `wait_for` may have swallowed the cancellation
        if reason is None and self._watch_exit(pod):
            self._emit(PodServing(pod.name, pod.uid, pod.isolation, pod.document["revision"]))
            return
        reason = reason or "its agent died as soon as it served"
        reason += self._last_words(pod)
        await self.delete(pod.name)
        self._emit(PodFailed(pod.name, reason))

    def _read_agent(self, pod: _Pod) -> bool:
        document = read_json(os.path.join(pod.directory, "agent.json"))
        if document is None or document.get("uid") != pod.uid:
            return False
        try:
            pod.agent = (int(document["pid"]), int(document["start_time"]))
            pod.isolation = str(document["isolation"])
        except (KeyError, TypeError, ValueError):
            return False
        return True

    # -- watching --------------------------------------------------------------------------

    def _watch_exit(self, pod: _Pod) -> bool:
        """Report the agent's death as it happens; False when it is dead already."""
        assert pod.agent is not None
        loop = asyncio.get_running_loop()
        descriptor = processes.exit_descriptor(pod.agent[0])
        if not processes.is_alive(*pod.agent):
            if descriptor is not None:
                os.close(descriptor)
            return False
        if descriptor is None:
            self._spawn(self._poll_exit(pod))
        else:
            pod.watched.append(descriptor)
            loop.add_reader(descriptor, self._on_exit, pod)
        if pod.launched is not None and pod.launched[0] != pod.agent[0]:
            other = processes.exit_descriptor(pod.launched[0])
            if other is not None:
                pod.watched.append(other)
                loop.add_reader(other, self._on_launcher_exit, pod, other)
        return True

    async def _poll_exit(self, pod: _Pod) -> None:
        while self._watch is not None and pod.agent is not None and processes.is_alive(*pod.agent):
            await asyncio.sleep(1.0)
        if self._watch is not None:
            self._on_exit(pod)

    def _on_launcher_exit(self, pod: _Pod, descriptor: int) -> None:
        asyncio.get_running_loop().remove_reader(descriptor)
        pod.watched.remove(descriptor)
        os.close(descriptor)
        self._reap(pod)

    def _on_exit(self, pod: _Pod) -> None:
        self._unwatch(pod)
        self._reap(pod)
        if not pod.leaving:
            self._spawn(self._bury(pod))

    async def _bury(self, pod: _Pod) -> None:
        """Make sure that all of a pod that died by itself is gone, say so, and clean up."""
        assert pod.agent is not None
        reason = f"its agent (pid {pod.agent[0]}) {describe_exit(pod.exit_status)}"
        reason += self._last_words(pod)
        begun = begun_attempts(pod.directory)
        try:
            await self.delete(pod.name)
        except TimeoutError as error:
            reason += f"; {error}"
        self._emit(PodExited(pod.name, reason, begun))

    def _reap(self, pod: _Pod) -> bool:
        """Collect what we started, when it has exited; True then."""
        if pod.launched is None:
            return False
        try:
            pid, status = os.waitpid(pod.launched[0], os.WNOHANG)
        except ChildProcessError:  # started by an earlier broker
            return not processes.is_alive(*pod.launched)
        if pid == 0:
            return False
        pod.exit_status = os.waitstatus_to_exitcode(status)
        return True

    def _unwatch(self, pod: _Pod) -> None:
        loop = asyncio.get_running_loop()
        for descriptor in pod.watched:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        pod.watched.clear()

    # -- ending ----------------------------------------------------------------------------

    async def _delete(self, pod: _Pod, grace_seconds: float) -> None:
        pod.leaving = True
        if pod.starting is not None and pod.starting is not asyncio.current_task():
            pod.starting.cancel()
            await asyncio.gather(pod.starting, return_exceptions=True)
        self._read_agent(pod)
        targets = {target for target in (pod.agent, pod.launched) if target is not None}
        now = asyncio.get_running_loop().time
        for target in targets:
            with contextlib.suppress(TimeoutError):
                await wait_gone(target, now() + grace_seconds)
        for target in targets:
            processes.kill(*target)
        deadline = now() + _DEATH_TIMEOUT_SECONDS
        for target in targets:
            await wait_gone(target, deadline)
        if pod.agent is None:
            await self._end_start(pod, deadline)
        for target in supervisors(pod.directory):
            # they kill their trees when their agent's end closes; only then is the pod gone
            await end_supervisor(target, deadline)
        self._reap(pod)
        self._unwatch(pod)
        self._pods.pop(pod.name, None)
        await asyncio.to_thread(discard, pod.directory)
        if not pod.socket.startswith(pod.directory):
            await asyncio.to_thread(_unlink, pod.socket)

    async def _end_start(self, pod: _Pod, deadline: float) -> None:
        """End what a pod that never served had forked on its way there."""
        while True:
            found = [pid for pid, folder in marked_processes() if folder == pod.directory]
            # what is dead forks no more: once a look finds none, there is none
            targets = [(pid, processes.start_time(pid) or 0) for pid in found]
            if not targets:
                return
            for target in targets:
                processes.kill(*target)
            for target in targets:
                await wait_gone(target, deadline)

    # -- adoption --------------------------------------------------------------------------

    async def _adopt(self, name: str) -> None:
        directory = os.path.join(self.directory, name)
        document = read_json(os.path.join(directory, "state.json"))
        launched = None if document is None else _launched(document)
        if document is None or document.get("name") != name or not _is_record(document):
            # a folder without a record belongs to nobody, and nobody may be given its pod
            log.warning("removing %s: it has no readable state.json", directory)
            await asyncio.to_thread(_remove_unknown, directory)
            return
        pod = _Pod(
            name=name,
            uid=document["uid"],
            directory=directory,
            socket=document["socket"],
            annotations=AnnotationFile(os.path.join(directory, "annotations")),
            document=document,
            launched=launched,
        )
        pod.annotations.load()
        self._pods[name] = pod
        if self._read_agent(pod):
            if not self._watch_exit(pod):
                await self.delete(name)
        elif pod.launched is not None and processes.is_alive(*pod.launched):
            self._await_serving(pod)
        else:
            found = [pid for pid, folder in marked_processes() if folder == directory]
            if not found:
                await self.delete(name)
                return
            pod.launched = (found[0], processes.start_time(found[0]) or 0)
            self._await_serving(pod)

    def _sweep_orphans(self) -> None:
        """Kill agents whose folder is gone: nothing can ever reach them again."""
        for pid, folder in marked_processes():
            mine = os.path.dirname(folder) == self.directory
            if mine and os.path.basename(folder) not in self._pods and not os.path.exists(folder):
                started = processes.start_time(pid)
                if started is not None and processes.kill(pid, started):
                    log.warning("killed pid %d: the pod %s that it served is gone", pid, folder)

    # -- small parts -----------------------------------------------------------------------

    def _record(self, pod: _Pod) -> PodRecord:
        document = pod.document
        return PodRecord(
            name=pod.name,
            uid=pod.uid,
            pool=document["pool"],
            revision=document["revision"],
            serving=pod.agent is not None,
            isolation=pod.isolation,
            created_at=float(document["created_at"]),
            annotations=pod.annotations.current,
        )

    def _socket_path(self, directory: str, uid: str) -> str:
        path = os.path.join(directory, "agent.sock")
        if len(os.fsencode(path)) <= _SOCKET_PATH_LIMIT:
            return path
        return os.path.join(self._runtime_dir, f"{uid[:16]}.sock")

    def _save(self, pod: _Pod) -> None:
        write_json(os.path.join(pod.directory, "state.json"), pod.document)

    def _last_words(self, pod: _Pod) -> str:
        try:
            with open(os.path.join(pod.directory, "agent.log"), "rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(0, end - _LOG_TAIL_BYTES))
                text = file.read().decode("utf-8", "replace").strip()
        except OSError:
            return ""
        return f": {text}" if text else ""

    def _emit(self, event: WatchEvent) -> None:
        if self._watch is not None:
            self._watch(event)

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _is_record(document: Mapping[str, Any]) -> bool:
    texts = all(isinstance(document.get(key), str) for key in ("uid", "socket", "pool", "revision"))
    return texts and isinstance(document.get("created_at"), int | float)


def _launched(document: Mapping[str, Any]) -> tuple[int, int] | None:
    match document.get("launched"):
        case [int(pid), int(started)]:
            return pid, started
    return None


def _remove_unknown(directory: str) -> None:
    """End whatever serves a folder that has no record, and remove it."""
    for pid, folder in marked_processes():
        started = processes.start_time(pid) if folder == directory else None
        if started is not None:
            processes.kill(pid, started)
            processes.wait_for_exit(pid, started, _STOP_SECONDS)
    discard(directory)


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
