"""The supervisor of one job: passes signals on, ends the whole tree, proves it, and says so.

A supervisor S is the parent of one job J. It runs no user code and holds nothing but its control
socket. It is a child subreaper, so every orphan among J's descendants becomes S's own child.

Completeness. Let D be the set of all descendants of J, alive or zombie, at any time after J was
forked.

1. Every process enters D by ``fork``/``clone`` from a member of D, so with a parent in D (or, with
   ``CLONE_PARENT``, with S itself as the parent).
2. The parent of a member changes only when that parent dies. The kernel then chooses the nearest
   living child subreaper among the ancestors, or the first process of the member's own PID
   namespace. The former is S or a member of D that made itself a subreaper; the latter is in D
   when the namespace was made inside the tree. Hence every member of D is at all times a descendant
   of S. Changing group, session, user, name, environment, working directory, tracing, or entering
   other namespaces leaves the parent alone.
3. S kills with SIGKILL, which cannot be handled, and reaps with ``__WALL`` until ``waitpid``
   reports ``ECHILD``. Then S has no child, so it has no descendant, so D is empty.
4. A zombie whose other threads live is not reported by ``waitpid`` until the last thread is gone,
   so step 3 does not mistake it for dead; ``kill`` reaches its threads through its process number.
5. Forkers that outrun a listing: a signal to a process group is delivered under the lock that
   ``fork`` takes, and a ``fork`` with a pending signal fails, so no member of a signalled group
   gets away. One that makes a new session on each hop is a direct child of S after each hop, and
   S does nothing else than list its children and kill them.
6. Whatever is not gone at the deadline (uninterruptible sleep, a process of another user, one held
   by a tracer outside the tree) is reported by name: the pod is not clean and must go.

What if S itself is killed or stopped by the job: its control socket closes (or stays silent beyond
the deadline), and the agent, which is the next subreaper or PID 1 of the pod's namespace, runs the
same procedure over all of its own descendants (`firepool_podagent.processes.TreeKiller`). What if
the agent dies: S reads the end of its control socket, ends the tree and exits; in a PID namespace
the kernel does so at once.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
from typing import Any, NoReturn

from firepool_podagent import processes

_IGNORED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGPIPE,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
)
_PACKET_BYTES = 1 << 16
_PIDS_LIMIT = 2048


def supervise(control: socket.socket, job_pid: int) -> NoReturn:
    """Watch over a job until its whole tree is gone; never returns.

    Packets to the agent: ``parked`` at once, ``exited`` when the job's first process has ended,
    ``dead`` when the tree is gone or the deadline has passed. From the agent: ``signal`` and
    ``kill``; the end of the socket means kill.

    Parameters
    ----------
    control : socket.socket
        A ``SOCK_SEQPACKET`` socket to the agent.
    job_pid : int
        The job, a child of this process and leader of its own session, which does nothing before
        it is handed its work.
    """
    try:
        _Supervisor(control, job_pid).run()
    finally:
        os._exit(0)


class _Supervisor:
    def __init__(self, control: socket.socket, job_pid: int) -> None:
        gc.disable()  # a collection would copy the pages shared with the template
        self._control = control
        self._job = job_pid
        self._connected = True
        self._status: int | None = None
        processes.become_subreaper()
        self._keep_only(control.fileno())
        self._woken, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        self._killer = processes.TreeKiller(unnamed={job_pid})

    @staticmethod
    def _keep_only(descriptor: int) -> None:
        # An inherited end of the job's pipes would keep the agent from seeing their end.
        os.closerange(3, descriptor)
        os.closerange(descriptor + 1, os.sysconf("SC_OPEN_MAX"))

    def run(self) -> None:
        self._send({"type": "parked", "pid": self._job})
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        killing = False
        while not killing:
            self._reap()
            if self._status is not None:
                break
            for descriptor, _ in poll.poll():
                if descriptor == self._woken:
                    self._drain_wakeups()
                else:
                    killing = self._receive()
        self._end_tree(poll)

    def _reap(self) -> None:
        self._killer.reap()
        if self._status is None and self._job in self._killer.reaped:
            self._status = self._killer.reaped[self._job]
            self._send(
                {
                    "type": "exited",
                    "status": self._status,
                    "maxrss_kib": self._killer.largest_kib[self._job],
                }
            )

    def _end_tree(self, poll: select.poll) -> None:
        killer = processes.TreeKiller(
            unnamed={self._job},
            reaped=self._killer.reaped,
            largest_kib=self._killer.largest_kib,
        )
        self._killer = killer
        poll.unregister(self._control)
        while True:
            killer.step()
            self._reap()
            if killer.done:
                break
            poll.poll(2)
            self._drain_wakeups()
        self._send(
            {
                "type": "dead",
                "clean": killer.clean,
                "killed": [{"pid": pid, "name": name} for pid, name in killer.killed.items()],
                "survivors": killer.survivors[:64],
                "pids": list(killer.reaped)[:_PIDS_LIMIT],
                "seconds": killer.seconds,
            }
        )

    def _receive(self) -> bool:
        """Handle one packet; True when the tree has to end now."""
        try:
            packet = self._control.recv(_PACKET_BYTES)
        except OSError:
            packet = b""
        if not packet:
            self._connected = False
            return True
        message: dict[str, Any] = json.loads(packet)
        if message["type"] == "kill":
            return True
        if message["type"] == "signal":
            self._signal(int(message["signal"]), bool(message.get("group")))
        return False

    def _signal(self, number: int, group: bool) -> None:
        with contextlib.suppress(ProcessLookupError):
            # Not yet reaped, so the number cannot belong to anyone else.
            if group and os.getpgid(self._job) == self._job:
                os.killpg(self._job, number)
            else:
                os.kill(self._job, number)

    def _drain_wakeups(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._woken, 4096):
                pass

    def _send(self, message: dict[str, Any]) -> None:
        if self._connected:
            try:
                self._control.send(json.dumps(message).encode())
            except OSError:
                self._connected = False
