"""The broker, assembled: every part made once, started in order, and ended in the reverse one.

`Broker.start` returns when jobs can be accepted: the store is led, the machine rebuilt from pods
and store, what ran is followed again, and the API listens. The same assembly runs as a process
of its own (`firepool_broker.serve`) and inside a test's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import getpass
import logging
import os
import secrets
import time
from collections.abc import Coroutine
from pathlib import Path
from random import Random
from typing import Any

from firepool_broker import __version__, embedded, hardware, processes
from firepool_broker.api import types
from firepool_broker.api.application import make_application
from firepool_broker.api.handlers import Parts
from firepool_broker.api.server import make_server, tcp_sockets, unix_socket
from firepool_broker.backends.local import LocalBackend
from firepool_broker.config import BrokerConfig
from firepool_broker.core import instructions
from firepool_broker.core.machine import Machine
from firepool_broker.identity.keys import PodKeys, load_secret
from firepool_broker.identity.tokens import Authenticator
from firepool_broker.launch.delivery import Delivery
from firepool_broker.launch.specification import LaunchSettings
from firepool_broker.loop.attempts import Attempts
from firepool_broker.loop.dispatcher import Dispatcher
from firepool_broker.loop.fleet import Fleet, PodShape
from firepool_broker.loop.fleetviews import FleetViews
from firepool_broker.loop.hub import Hub
from firepool_broker.loop.jobs import Jobs
from firepool_broker.loop.lifetime import LEASE_SECONDS, Lifetime
from firepool_broker.loop.recovery import recover
from firepool_broker.loop.service import Service
from firepool_broker.loop.sessions import Sessions
from firepool_broker.loop.upkeep import Upkeep
from firepool_broker.metrics import Metrics
from firepool_broker.store.blobs import BlobStore
from firepool_broker.store.outputs import OutputStore
from firepool_broker.store.store import Store

__all__ = ["Broker"]

log = logging.getLogger(__name__)

_MIB = 1024 * 1024
_SOCKET_PATH_LIMIT = 100
_LISTENING_CHECK_SECONDS = 30.0


class Broker:
    """One broker.

    Parameters
    ----------
    config
        What the operator set.
    paths
        Its folders.

    Attributes
    ----------
    store_class, backend_class
        What it is made of; tests put parts there that fail.
    """

    store_class: type[Store] = Store
    backend_class: type[LocalBackend] = LocalBackend

    def __init__(self, config: BrokerConfig, paths: embedded.Paths) -> None:
        self.config = config
        self.paths = paths
        self.metrics = Metrics()
        self._state = Path(paths.state_dir)
        self._tasks: list[asyncio.Task[None]] = []
        self._started_at = time.time()
        self._token = secrets.token_urlsafe(32)
        self._connection: embedded.Connection | None = None

    # -- starting --------------------------------------------------------------------------

    async def start(self) -> embedded.Connection:
        """Take up what the last broker left, and listen.

        Raises
        ------
        StoreError, BackendUnavailable, OSError
            When state or pods cannot be read; nothing was changed then.
        """
        secret = load_secret(str(self._state / "secret"))
        self.store = await self.store_class.open(
            self._state / "firepool.db", on_commit=self.metrics.committed
        )
        epoch = await self.store.acquire_leadership(
            f"{os.uname().nodename}:{os.getpid()}",
            LEASE_SECONDS,
            time.time(),
            predecessor_is_dead=True,  # we hold its lock
        )
        self._assemble(secret, epoch)
        await self.backend.start(self.fleet.observe)
        recovered = await recover(
            self.dispatcher.machine,
            self.store,
            self.backend,
            self.fleet,
            self.jobs,
            self.attempts,
            self.sessions,
            time.time(),
        )
        gc.freeze()  # a full collection over everything restored would stall the loop
        self.dispatcher.execute(recovered.instructions)
        recovered.resuming()
        self.dispatcher.start()
        self.service.restore_pending()
        if recovered.jobs or recovered.pods:
            log.info("took up %d pods and %d jobs", recovered.pods, recovered.jobs)
        self._listen()
        self.service.accept(True)
        self._keep(self.lifetime.lead())
        self._keep(self.upkeep.run())
        self._keep(self.attempts.guard.run())
        self._keep(self._stay_reachable())
        assert self._connection is not None
        return self._connection

    def _assemble(self, secret: bytes, epoch: int) -> None:
        config, state, clock = self.config, self._state, time.time
        policies = config.policies(hardware.cores(), hardware.memory_gib(), hardware.gpus())
        shapes, settings = self._shapes(policies.pools)
        self.outputs = OutputStore(
            state / "outputs", limit_bytes=2 * config.output.limit_mib * _MIB
        )
        self.blobs = BlobStore(
            state / "blobs",
            limit_bytes=config.transfer.blob_limit_mib * _MIB,
            total_bytes=config.transfer.total_gib * 1024 * _MIB,
            retention_seconds=float(config.transfer.retention_seconds),
        )
        self.backend = self.backend_class(
            str(state / "pods"),
            self.paths.runtime_dir,
            PodKeys(secret),
            isolation=config.isolation,
        )
        self.dispatcher = Dispatcher(Machine(policies, Random()), clock)
        post = self.dispatcher.post
        self.lifetime = Lifetime(
            self.dispatcher,
            self.store,
            clock,
            config.idle_exit_seconds.or_none,
            watched=lambda: self.hub.watched,
            accept=lambda accepting: self.service.accept(accepting),
            hurry=lambda: self.attempts.guard.hurry(),
            kill_pods=lambda reason: self.fleet.end_all(reason),
        )
        depose = self.lifetime.depose
        self.hub = Hub()
        machine = self.dispatcher.machine
        self.jobs = Jobs(
            self.store,
            self.outputs,
            self.hub,
            post,
            clock,
            depose,
            self.metrics,
            lambda job_id: machine.waiting(job_id, clock()),
        )
        self.sessions = Sessions(
            self.store,
            str(state / "sessions"),
            self.jobs.live,
            self.hub,
            post,
            clock,
            policies.session_ttl_seconds,
            float(config.sessions.directory_retention_seconds),
        )
        delivery = Delivery(self.jobs.launched, self.sessions.setting, settings, self.blobs)
        self.fleet = Fleet(
            self.backend, post, shapes, epoch, delivery.prepare_request, self.metrics
        )
        self.attempts = Attempts(
            self.fleet,
            self.outputs,
            self.blobs,
            post,
            delivery,
            depose,
            self.metrics,
            self.jobs.tell_silence,
        )
        self.upkeep = Upkeep(
            self.store,
            self.outputs,
            self.blobs,
            self.sessions,
            self.jobs.live,
            clock,
            float(config.output.retention_seconds),
        )
        self.views = FleetViews(machine, self.hub, clock)
        self.service = Service(
            self.dispatcher,
            self.jobs,
            self.sessions,
            self.views,
            self.hub,
            self.blobs,
            clock,
            self.info,
            lambda drain, cancel: self.lifetime.end(drain, cancel=cancel),
            self.attempts.guard.hurry,
        )
        self.metrics.watch_fleet(self.views.snapshot)
        self.jobs.on_finished(self.attempts.settled)
        self.jobs.on_finished(self.sessions.job_finished)
        self._connect()
        self._api = Parts(
            service=self.service,
            authenticator=Authenticator(
                self.store,
                secret=secret,
                owner_token=self._token,
                owner_caller=getpass.getuser(),
                clock=clock,
            ),
            blobs=self.blobs,
            metrics=self.metrics,
            package_limit_bytes=config.transfer.package_limit_mib * _MIB,
        )

    def _shapes(self, pools: Any) -> tuple[dict[str, PodShape], dict[str, LaunchSettings]]:
        shapes, settings = {}, {}
        for pool in pools:
            memory_mib = int(pool.shape.memory_gib * 1024)
            preload = self.config.preload(pool.name)
            shapes[pool.name] = PodShape(memory_mib, pool.shape.cpu, preload)
            settings[pool.name] = LaunchSettings(
                overlay_root=str(self._state / "overlays"),
                index_url=self.config.requirements.index_url,
                memory_mib=memory_mib,
                preload=preload,
                output_limit_bytes=self.config.output.limit_mib * _MIB,
                inline_result_bytes=self.config.transfer.inline_result_kib * 1024,
                timeout_seconds=self.config.limits.job_timeout_seconds.or_none,
                terminate_grace_seconds=float(self.config.limits.terminate_grace_seconds),
            )
        return shapes, settings

    def _connect(self) -> None:
        executes = self.dispatcher.executes
        executes(instructions.CreatePod, self.fleet.create)
        executes(instructions.RetirePod, self.fleet.retire)
        executes(instructions.AnnotatePod, self.fleet.annotate)
        executes(instructions.PreparePod, self.fleet.prepare)
        executes(instructions.CommitQueued, self.jobs.commit_queued)
        executes(instructions.CommitLaunch, self.jobs.commit_launch)
        executes(instructions.CommitRequeue, self.jobs.commit_requeue)
        executes(instructions.FinishJob, self.jobs.finish)
        executes(instructions.NotifyJob, self.jobs.notify)
        executes(instructions.Launch, self.attempts.launch)
        executes(instructions.SignalAttempt, self.attempts.signal)
        executes(instructions.NotifyPod, self.views.notify)
        executes(instructions.NotifySession, self.sessions.notify)

    def _listen(self) -> None:
        path = embedded.connection_path(self.paths)[: -len(".json")] + ".sock"
        if len(os.fsencode(path)) > _SOCKET_PATH_LIMIT:
            path = embedded.short_socket_path(path)
        self._server = make_server(make_application(self._api))
        self._server.add_socket(unix_socket(Path(path)))
        listen = self.config.listen
        if listen.port != "off":
            self._server.add_sockets(tcp_sockets(listen.host, listen.port))
        pid = os.getpid()
        self._connection = embedded.Connection(
            socket=path,
            token=self._token,
            wire=embedded.WIRE_VERSION,
            pid=pid,
            start_time=processes.start_time(pid) or 0,
            version=__version__,
            started_at=self._started_at,
        )
        embedded.write_connection(embedded.connection_path(self.paths), self._connection)

    async def _stay_reachable(self) -> None:
        """Put socket and connection file back when something cleared the runtime folder."""
        connection_path = embedded.connection_path(self.paths)
        while True:
            await asyncio.sleep(_LISTENING_CHECK_SECONDS)
            assert self._connection is not None
            if self.lifetime.draining:
                return
            if not os.path.exists(self._connection.socket):
                log.warning("%s is gone: listening there again", self._connection.socket)
                os.makedirs(os.path.dirname(self._connection.socket), 0o700, exist_ok=True)
                self._server.add_socket(unix_socket(Path(self._connection.socket)))
            if embedded.read_connection(connection_path) != self._connection:
                embedded.write_connection(connection_path, self._connection)

    # -- running ---------------------------------------------------------------------------

    @property
    def deposed(self) -> bool:
        """Whether it ended because another broker leads."""
        return self.lifetime.deposed

    def end(self, drain: bool) -> None:
        """Begin to end."""
        self.lifetime.end(drain)

    def info(self) -> types.BrokerInfo:
        """Return what ``whoami`` says."""
        return types.BrokerInfo(
            version=__version__,
            wire=embedded.WIRE_VERSION,
            backend=self.backend.name,
            isolation=self.views.isolation or self.config.isolation,
            network="host",
            pid=os.getpid(),
            started_at=self._started_at,
        )

    async def run(self) -> None:
        """Serve until the end is asked for, and end."""
        try:
            await self.lifetime.ending()
            if len(self.jobs.live) == 0:
                self._unpublish()  # nobody needs to find us again
            await self.lifetime.drained()
        finally:
            await self.stop()

    async def abandon(self) -> None:
        """Let go what a start that failed had opened; pods stay as they are."""
        if hasattr(self, "_api"):
            self._unpublish()
            self.dispatcher.stop()
            if hasattr(self, "_server"):
                self._server.stop()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self.attempts.stop()
            await self.jobs.stop()
            await self.fleet.stop()
            await self.backend.stop()
        if hasattr(self, "store"):
            await self.store.close()

    async def stop(self) -> None:
        """End now; pods that are still there stay for the next broker."""
        self._unpublish()
        self.service.accept(False)
        self._server.stop()
        self.dispatcher.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.attempts.stop()
        await self.jobs.stop()
        self.outputs.close()
        self.hub.close()
        await self._server.close_all_connections()
        await self.fleet.stop()
        await self.backend.stop()
        await self.store.close()

    def _unpublish(self) -> None:
        path = embedded.connection_path(self.paths)
        if self._connection is not None and embedded.read_connection(path) == self._connection:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
                os.unlink(self._connection.socket)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work))
