"""The broker as a process of its own: its lock, its log, its signals, its end."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from firepool_broker import embedded
from firepool_broker.application import Broker
from firepool_broker.config import BrokerConfig, load
from firepool_broker.store.errors import StoreError

__all__ = ["main", "run"]

log = logging.getLogger(__name__)

_PREDECESSOR_SECONDS = 30.0
_PAUSE_SECONDS = 0.01


def main(arguments: list[str]) -> int:
    """Serve as the command line says; returns the process's exit status."""
    parser = argparse.ArgumentParser(prog="firepool broker", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="run a broker until it is told to end")
    which = serve.add_mutually_exclusive_group()
    which.add_argument("--embedded", action="store_true", help="this user's own, on this machine")
    which.add_argument("--config", metavar="FILE", help="the configuration file")
    serve.add_argument("--ready-fd", type=int, metavar="N", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    logging.basicConfig(
        level=os.environ.get("FIREPOOL_LOG_LEVEL", "INFO").upper(),
        format="%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s",
    )
    try:
        path = options.config or os.environ.get("FIREPOOL_CONFIG")
        config = load(Path(path) if path else None, os.environ)
        return run(config, options.ready_fd)
    except (ValueError, OSError, RuntimeError, StoreError) as error:
        # the log may be what is broken (a full disk): the starter hears the reason all the same
        if options.ready_fd is not None:
            _tell(options.ready_fd, {"error": str(error)})
        with contextlib.suppress(OSError):
            print(f"firepool broker: {error}", file=sys.stderr, flush=True)
        return 2


def run(config: BrokerConfig, ready_fd: int | None = None) -> int:
    """Serve until the end; returns the process's exit status.

    Parameters
    ----------
    config
        What the operator set.
    ready_fd
        Where to say that the broker is ready, as one JSON line of its connection.

    Raises
    ------
    EmbeddedError
        When another broker of this user still runs.
    """
    # the store's thread takes the interpreter back after every statement: with the usual 5 ms a
    # busy event loop would make each commit wait for several times that
    sys.setswitchinterval(0.001)
    paths = embedded.home()
    with open(os.path.join(paths.state_dir, "broker.lock"), "a") as lock:
        sibling = _wait_for_predecessor(lock, paths)
        if sibling is not None:
            log.info("broker %s serves already, pid %d", sibling.version, sibling.pid)
            if ready_fd is not None:
                _tell_ready(ready_fd, sibling)
            return 0
        return asyncio.run(_serve(config, paths, ready_fd))


async def _serve(config: BrokerConfig, paths: embedded.Paths, ready_fd: int | None) -> int:
    broker = Broker(config, paths)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, broker.end, False)
    try:
        connection = await broker.start()
    except BaseException:
        await broker.abandon()
        raise
    log.info("broker %s is ready, pid %d", connection.version, connection.pid)
    if ready_fd is not None:
        _tell_ready(ready_fd, connection)
    await broker.run()
    return 3 if broker.deposed else 0


def _tell_ready(ready_fd: int, connection: embedded.Connection) -> None:
    _tell(ready_fd, connection._asdict())


def _tell(ready_fd: int, document: Mapping[str, object]) -> None:
    # who started this broker may be gone by now; whoever needs it next finds it all the same
    with contextlib.suppress(OSError):
        os.write(ready_fd, (json.dumps(document) + "\n").encode())
    with contextlib.suppress(OSError):
        os.close(ready_fd)


def _wait_for_predecessor(lock: IO[str], paths: embedded.Paths) -> embedded.Connection | None:
    """Hold the lock that says "this user's broker": the last one may still be ending.

    The one that holds it may also be starting, when whoever started it died over it. Then it is
    the broker, and its connection is returned; one that ends is not to be found any more.
    """
    deadline = time.monotonic() + _PREDECESSOR_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return None
        except BlockingIOError:
            pass
        sibling = embedded.find(paths)
        if sibling is not None and sibling.wire == embedded.WIRE_VERSION:
            return sibling
        if time.monotonic() > deadline:
            raise embedded.EmbeddedError(
                f"another broker of yours holds {lock.name}; `firepool stop` ends it"
            )
        time.sleep(_PAUSE_SECONDS)  # a file lock cannot be waited for with a limit
