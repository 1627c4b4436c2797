"""The pods that there are: made, checked, annotated and removed as the core says.

What the backend reports is passed on as the core's events, but never before it is true: a pod is
ready when its agent has answered with the right name, revision and count of attempts, and it is
gone when everything that was read from it has been dealt with.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from firepool_broker.backends import (
    Backend,
    PodExited,
    PodFailed,
    PodServing,
    PodSpec,
    WatchEvent,
)
from firepool_broker.core import events
from firepool_broker.core.instructions import AnnotatePod, CreatePod, PreparePod, RetirePod
from firepool_broker.launch.agent_client import (
    AgentClient,
    AgentLied,
    AgentRefused,
    AgentUnreachable,
)
from firepool_broker.metrics import Metrics

__all__ = ["Fleet", "PodShape"]

log = logging.getLogger(__name__)

_GRACE_SECONDS = 3.0
_SHUTDOWN_SECONDS = 3.0
_READY_TIMEOUT_SECONDS = 10.0
_RESET_POLL_SECONDS = 0.1

PrepareRequest = Callable[[str, str, str], dict[str, Any] | None]


class PodShape:
    """What a pool's pods are made with.

    Parameters
    ----------
    memory_mib
        Memory of a pod; None for no limit.
    cores
        Cores of a pod.
    preload
        Modules that its spares import ahead.
    """

    __slots__ = ("cores", "memory_mib", "preload")

    def __init__(
        self, memory_mib: int | None, cores: float | None, preload: tuple[str, ...] = ()
    ) -> None:
        self.memory_mib = memory_mib
        self.cores = cores
        self.preload = preload


class Fleet:
    """Executes what the core wants of pods, and reports what becomes of them.

    Parameters
    ----------
    backend
        Where pods come from.
    post
        Takes the core's events.
    shapes
        How the pods of each pool are made.
    epoch
        Epoch of this broker's leadership.
    prepare_request
        Builds what an agent is told to prepare, from a pool, a caller and a tag.
    metrics
        Counts retirements.
    """

    def __init__(
        self,
        backend: Backend,
        post: Callable[[events.Event], None],
        shapes: Mapping[str, PodShape],
        epoch: int,
        prepare_request: PrepareRequest,
        metrics: Metrics,
    ) -> None:
        self.backend = backend
        self._post = post
        self._shapes = shapes
        self._epoch = epoch
        self._prepare_request = prepare_request
        self._metrics = metrics
        self._clients: dict[str, AgentClient] = {}
        self._pools: dict[str, str] = {}
        self._retiring: set[str] = set()
        self._begun: dict[str, frozenset[str]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._before_gone: list[Callable[[str], Awaitable[None]]] = []

    # -- what others ask -------------------------------------------------------------------

    def client(self, name: str) -> AgentClient:
        """Return the client of a pod's agent.

        Raises
        ------
        KeyError
            When there is no such pod.
        """
        client = self._clients.get(name)
        if client is None:
            client = AgentClient(self.backend.address(name), self._epoch)
            self._clients[name] = client
        return client

    def adopt(self, name: str, pool: str) -> None:
        """Take over a pod of an earlier broker."""
        self._pools[name] = pool

    def before_gone(self, listener: Callable[[str], Awaitable[None]]) -> None:
        """Have something finished before a pod that died is said to be gone."""
        self._before_gone.append(listener)

    def is_leaving(self, name: str) -> bool:
        """Tell whether the pod is being removed, or is gone."""
        return name in self._retiring or name not in self._pools

    def await_reset(self, name: str) -> None:
        """Report how a reset ends whose report nobody has read."""
        self._spawn(self._await_reset(name))

    def condemn(self, name: str, reason: str, *, at_once: bool = False) -> None:
        """Remove a pod that is not trusted any more, together with what runs on it.

        Parameters
        ----------
        at_once
            Kill it without asking its agent, which would not answer.
        """
        log.warning("pod %s is removed: %s", name, reason)
        if at_once:
            self._begin_to_retire(name, reason, at_once=True)
        self._post(events.PodUnhealthy(name, reason))
        self._begin_to_retire(name, reason)

    def end_all(self, reason: str) -> None:
        """Kill every pod that there still is."""
        for name in list(self._pools):
            if name in self._retiring:  # being asked, which takes too long
                self._spawn(self._kill(name, reason))
            else:
                self.condemn(name, reason, at_once=True)

    def never_began(self, name: str, attempt: str) -> bool:
        """Tell whether a pod that has died certainly never began an attempt."""
        begun = self._begun.pop(name, None)
        return begun is not None and attempt not in begun

    def observe(self, event: WatchEvent) -> None:
        """Take what the backend reports."""
        if isinstance(event, PodServing):
            self._spawn(self._check_readiness(event))
        elif isinstance(event, PodFailed):
            self._forget(event.name)
            self._post(events.PodStartFailed(event.name, event.reason))
        elif isinstance(event, PodExited):
            if event.begun is not None:
                self._begun[event.name] = event.begun
            self._spawn(self._report_gone(event.name, event.reason))

    async def stop(self) -> None:
        """Close every connection and leave the pods as they are."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    # -- the core's instructions -----------------------------------------------------------

    def create(self, instruction: CreatePod) -> None:
        """Make a pod."""
        shape = self._shapes[instruction.pool]
        self._pools[instruction.name] = instruction.pool
        spec = PodSpec(
            name=instruction.name,
            uid=uuid.uuid4().hex,
            pool=instruction.pool,
            memory_mib=shape.memory_mib,
            cores=shape.cores,
            preload=shape.preload,
        )
        self._spawn(self._create(spec))

    def retire(self, instruction: RetirePod) -> None:
        """Remove a pod; asked again while it is being removed, go on."""
        self._begin_to_retire(instruction.name, instruction.reason)

    def annotate(self, instruction: AnnotatePod) -> None:
        """Persist annotations on a pod."""
        self._spawn(self._annotate(instruction))

    def prepare(self, instruction: PreparePod) -> None:
        """Have a spare of a session's environment parked."""
        self._spawn(self._prepare(instruction))

    # -- how it is done --------------------------------------------------------------------

    def _begin_to_retire(self, name: str, reason: str, *, at_once: bool = False) -> None:
        if name in self._retiring:
            return
        self._retiring.add(name)
        self._metrics.retired(reason)
        self._spawn(self._kill(name, reason) if at_once else self._retire(name, reason))

    async def _create(self, spec: PodSpec) -> None:
        try:
            await self.backend.create(spec)
        except OSError as error:
            self._forget(spec.name)
            self._post(events.PodStartFailed(spec.name, f"it could not be started: {error}"))

    async def _check_readiness(self, pod: PodServing) -> None:
        try:
            health = await self.client(pod.name).health(_READY_TIMEOUT_SECONDS)
            if health["revision"] != pod.revision:
                raise AgentLied(f"it is of revision {health['revision']}, not {pod.revision}")
            started = int(health["attempts_started"])
            ready = events.PodReady(pod.name, pod.uid, str(health["isolation"]), started)
        except KeyError as error:
            if self.is_leaving(pod.name):
                return
            await self._fail_start(pod.name, f"its agent's health lacks {error}")
        except (AgentUnreachable, AgentRefused, AgentLied) as error:
            await self._fail_start(pod.name, f"its agent is not ready: {error}")
        else:
            self._post(ready)

    async def _fail_start(self, name: str, reason: str) -> None:
        if name in self._retiring:
            return
        self._retiring.add(name)
        if await self._delete(name, 0.0):
            self._post(events.PodStartFailed(name, reason))

    async def _kill(self, name: str, reason: str) -> None:
        if await self._delete(name, 0.0):
            self._post(events.PodGone(name, reason))

    async def _retire(self, name: str, reason: str) -> None:
        grace_seconds = _GRACE_SECONDS
        try:
            await self.client(name).shutdown(_SHUTDOWN_SECONDS)
        except (AgentUnreachable, AgentRefused, AgentLied):
            grace_seconds = 0.0  # it will not end by itself
        except KeyError:
            pass  # it has gone meanwhile, or was never made
        if await self._delete(name, grace_seconds):
            self._post(events.PodGone(name, reason))

    async def _delete(self, name: str, grace_seconds: float) -> bool:
        try:
            await self.backend.delete(name, grace_seconds=grace_seconds)
        except (TimeoutError, OSError) as error:
            log.warning("pod %s cannot be removed yet: %s", name, error)
            self._retiring.discard(name)  # the core asks again
            return False
        await self._finish_reading(name)
        self._forget(name)
        return True

    async def _report_gone(self, name: str, reason: str) -> None:
        await self._finish_reading(name)
        self._forget(name)
        self._post(events.PodGone(name, reason))

    async def _finish_reading(self, name: str) -> None:
        for listener in self._before_gone:
            await listener(name)

    async def _await_reset(self, name: str) -> None:
        # only after a broker's death in the middle of a reset: the agent has nobody to tell, so
        # it is asked
        while not self.is_leaving(name):
            try:
                health = await self.client(name).health()
            except (AgentUnreachable, AgentRefused, AgentLied, KeyError) as error:
                self._post(events.ResetFinished(name, False, f"nobody knows how it ended: {error}"))
                return
            if health["state"] != "resetting":
                clean = health["state"] == "idle"
                reason = None if clean else f"the pod is {health['state']}"
                self._post(events.ResetFinished(name, clean, reason))
                return
            await asyncio.sleep(_RESET_POLL_SECONDS)

    async def _annotate(self, instruction: AnnotatePod) -> None:
        try:
            await self.backend.annotate(instruction.name, instruction.annotations)
        except OSError as error:
            # the store's bindings say the same; the pod is retired at the next start for lack of it
            log.warning("pod %s could not be annotated: %s", instruction.name, error)

    async def _prepare(self, instruction: PreparePod) -> None:
        pool = self._pools.get(instruction.name)
        if pool is None:
            return
        request = self._prepare_request(pool, instruction.caller, instruction.lease_tag)
        if request is None:
            return
        try:
            await self.client(instruction.name).prepare(request)
        except (AgentUnreachable, AgentRefused, AgentLied, KeyError) as error:
            log.info("pod %s prepares no spare: %s", instruction.name, error)

    def _forget(self, name: str) -> None:
        self._pools.pop(name, None)
        self._begun.pop(name, None)
        self._retiring.discard(name)
        client = self._clients.pop(name, None)
        if client is not None:
            client.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("work on the fleet failed", exc_info=task.exception())
