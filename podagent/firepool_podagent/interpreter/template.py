"""The template process: preloads, forks, and never runs user code.

Messages on its control socket (``SOCK_SEQPACKET``, one JSON object per packet):

* it sends ``ready`` once, when it can fork;
* ``fork`` (with the job's channel, its stdout and stderr pipes and the supervisor's control socket)
  is answered with ``forked``: the supervisor's pid;
* ``preload`` is answered with ``preloaded``, or with ``tainted`` and the end of the process when a
  module left something behind that a fork would copy into every job (threads, an open device).

End of file means that the agent is gone: the template exits.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import traceback
from typing import Any, NoReturn

from firepool_podagent.interpreter import preload, process, surroundings

_PACKET_BYTES = 1 << 20
_FORK_DESCRIPTORS = 4


def serve(control_fd: int) -> NoReturn:
    """Serve the agent on ``control_fd`` until it goes away."""
    control = socket.socket(fileno=control_fd)
    control.set_inheritable(False)
    Template(control).run()


class Template:
    """The template's state: its control socket, what it preloaded, and the forks not yet reaped."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._preload = preload.Preloader()
        self._children: set[int] = set()

    def run(self) -> NoReturn:
        """Announce readiness and answer requests until end of file."""
        # Imported before the first fork, so that supervisor and job find everything in place.
        from firepool_podagent import supervisor  # noqa: F401
        from firepool_podagent.interpreter import job, shell  # noqa: F401

        self._shell, reason = shell.make_shell()
        self._shell.warm_up()
        if reason is not None:
            self._preload.dropped["IPython"] = reason
        self._settle()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's ^C is meant for someone else
        signal.signal(signal.SIGCHLD, self._reap)
        self._refuse_threads(None)
        self._send({"type": "ready", "pid": os.getpid(), **self._preload.report()})
        while True:
            request, fds = self._receive()
            if request["type"] == "fork":
                self._fork(request["id"], fds)
            elif request["type"] == "preload":
                self._preload_more(request)
            else:
                raise SystemExit(f"unknown request: {request['type']}")

    def _receive(self) -> tuple[dict[str, Any], list[int]]:
        space = socket.CMSG_SPACE(_FORK_DESCRIPTORS * 4)
        data, ancillary, _, _ = self._control.recvmsg(_PACKET_BYTES, space, socket.MSG_CMSG_CLOEXEC)
        if not data:
            os._exit(0)
        fds = [
            int.from_bytes(payload[index : index + 4], sys.byteorder)
            for level, kind, payload in ancillary
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS
            for index in range(0, len(payload) - 3, 4)
        ]
        return json.loads(data), fds

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._control.send(json.dumps(message).encode())
        except OSError:  # the agent is gone
            os._exit(0)

    def _preload_more(self, request: dict[str, Any]) -> None:
        try:
            self._preload.load(
                request["modules"],
                seconds=request.get("seconds", preload.SECONDS),
                memory_mib=request.get("memory_mib", preload.MEMORY_MIB),
            )
        except preload.TaintedError as error:
            self._taint(error.module, error.reason)
        self._settle()
        self._send({"type": "preloaded", **self._preload.report()})

    def _refuse_threads(self, module: str | None) -> None:
        threads = process.thread_count()
        if threads != 1:
            self._taint(module, f"runs {threads - 1} more thread(s)")

    def _taint(self, module: str | None, reason: str) -> NoReturn:
        self._send({"type": "tainted", "module": module, "reason": reason})
        os._exit(0)

    def _settle(self) -> None:
        # What is here now lives as long as the process: jobs never scan it again, and the pages
        # stay shared between them.
        surroundings.prepare_template()
        gc.collect()
        gc.freeze()

    def _reap(self, _signal: int, _frame: object) -> None:
        # Only our own forks: an import that runs a subprocess waits for it by itself.
        for pid in tuple(self._children):
            try:
                reaped, _ = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                reaped = pid
            if reaped:
                self._children.discard(pid)

    def _fork(self, fork_id: int, fds: list[int]) -> None:
        if len(fds) != _FORK_DESCRIPTORS:
            raise SystemExit(f"a fork needs {_FORK_DESCRIPTORS} descriptors, {len(fds)} came")
        self._refuse_threads(None)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCHLD,))
        pid = os.fork()
        if pid == 0:
            self._become_supervisor(fds)
        self._children.add(pid)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for fd in fds:
            os.close(fd)
        self._send({"type": "forked", "id": fork_id, "pid": pid})

    def _become_supervisor(self, fds: list[int]) -> NoReturn:
        """Fork the job and watch over it; runs in the first child."""
        try:
            from firepool_podagent.supervisor import supervise

            channel, stdout, stderr, control = fds
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            # The job is born with interrupts blocked: one that comes early waits for it.
            signal.pthread_sigmask(signal.SIG_SETMASK, (signal.SIGINT,))
            self._control.close()
            os.setsid()
            process.become_subreaper()  # before there is anything to orphan
            supervisor_pid = os.getpid()
            job_pid = os.fork()
            if job_pid == 0:
                self._become_job(channel, stdout, stderr, control, supervisor_pid)
            # The pipes must reach their end when the job's tree does.
            for fd in (channel, stdout, stderr):
                os.close(fd)
            supervise(socket.socket(fileno=control), job_pid)
        except BaseException:  # noqa: BLE001 - the last frame before _exit must say what happened
            traceback.print_exc()
        os._exit(70)

    def _become_job(
        self, channel: int, stdout: int, stderr: int, control: int, supervisor_pid: int
    ) -> NoReturn:
        try:
            os.setsid()
            process.die_with_parent(supervisor_pid)
            os.close(control)
            from firepool_podagent.interpreter import job

            job.run_parked(channel, stdout, stderr, self._shell)
        except BaseException:  # noqa: BLE001 - as above
            traceback.print_exc()
        os._exit(70)
