"""Child processes of the agent: starting them, and hearing of their end.

The agent is a child subreaper (or PID 1 of its namespace): every orphan of the pod ends up as its
child. One SIGCHLD handler reaps them all, and tells whoever asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable
from typing import Any, NoReturn

from firepool_podagent import processes, supervisor

Ended = Callable[[int], None]

_OUTPUT_KEPT_BYTES = 1 << 20


class ChildFailedError(RuntimeError):
    """Work in a child process did not come to a result."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Children:
    """Reaps every child; known ones are reported with their raw wait status."""

    def __init__(self) -> None:
        self._known: dict[int, Ended] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_signal_handler(signal.SIGCHLD, self.reap)

    def known(self) -> set[int]:
        """Return the processes that the agent started and that have not been reaped."""
        return set(self._known)

    def expect(self, pid: int, ended: Ended) -> None:
        """Call ``ended`` with the wait status when a child is reaped."""
        self._known[pid] = ended

    def report(self, pid: int, status: int) -> None:
        """Tell of a child that was reaped elsewhere."""
        ended = self._known.pop(pid, None)
        if ended is not None:
            ended(status)

    def reap(self) -> None:
        """Reap whatever is dead."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | processes.WALL)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.report(pid, status)

    def spawn(
        self,
        command: list[str],
        environment: dict[str, str],
        descriptors: dict[int, int],
        ended: Ended,
    ) -> int:
        """Start a program in a session of its own, with nothing open but what is named.

        Parameters
        ----------
        command : list of str
            Program (an absolute path) and arguments.
        environment : dict of str
            All of its environment.
        descriptors : dict of int
            Number in the program to number here.
        ended : callable
            Called with the wait status.

        Raises
        ------
        OSError
            The program cannot be started.
        """
        actions: list[tuple[int, int, int]] = [
            (os.POSIX_SPAWN_DUP2, here, there) for there, here in descriptors.items()
        ]
        pid = os.posix_spawn(
            command[0],
            command,
            environment,
            file_actions=actions,
            setsid=True,
            setsigmask=(),
            setsigdef=signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP},
        )
        self.expect(pid, ended)
        return pid

    async def supervised(
        self,
        command: list[str],
        environment: dict[str, str],
        folder: str,
        stop: asyncio.Future[Any],
        timeout_seconds: float,
    ) -> tuple[int, str]:
        """Run a program to its end, and end whatever it leaves behind.

        Parameters
        ----------
        command : list of str
            Program and arguments.
        environment : dict of str
            All of its environment.
        folder : str
            Its working directory.
        stop : asyncio.Future
            When it is done, the program is killed.
        timeout_seconds : float
            How long it may run.

        Returns
        -------
        int
            Exit code; negative for a signal.
        str
            Its two outputs, joined; of much output the end.
        """
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            _supervise_program(command, environment, folder, theirs, writer)
        theirs.close()
        os.close(writer)
        ended = self._loop.create_future()
        self.expect(pid, lambda status: None if ended.done() else ended.set_result(status))
        output = bytearray()
        status = 1 << 8

        def read() -> None:
            with contextlib.suppress(BlockingIOError):
                while piece := os.read(reader, 1 << 16):
                    output.extend(piece)
                    del output[:-_OUTPUT_KEPT_BYTES]
                self._loop.remove_reader(reader)

        def listen() -> None:
            nonlocal status
            with contextlib.suppress(BlockingIOError):
                while packet := control.recv(1 << 16):
                    message = json.loads(packet)
                    if message["type"] == "exited":
                        status = int(message["status"])
                self._loop.remove_reader(control)

        os.set_blocking(reader, False)
        control.setblocking(False)
        self._loop.add_reader(reader, read)
        self._loop.add_reader(control, listen)
        try:
            await asyncio.wait(
                (ended, stop), timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if not ended.done():
                await self._end_program(control, ended)
            read()
            listen()
        except asyncio.CancelledError:
            await self._end_program(control, ended)
            raise
        finally:
            self._loop.remove_reader(reader)
            self._loop.remove_reader(control)
            os.close(reader)
            control.close()
        return os.waitstatus_to_exitcode(status), output.decode("utf-8", "replace")

    @staticmethod
    async def _end_program(control: socket.socket, ended: asyncio.Future[int]) -> None:
        with contextlib.suppress(OSError):
            control.send(b'{"type": "kill"}')
        await asyncio.wait((ended,), timeout=2 * processes.KILL_DEADLINE_SECONDS)

    async def work(self, function: Callable[[], Any]) -> Any:
        """Run a function that blocks in a forked child; returns its JSON-able result.

        Raises
        ------
        ChildFailedError
            The function raised, or the child died.
        """
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            _work_and_exit(function, writer)
        os.close(writer)
        status = self._loop.create_future()
        self.expect(pid, lambda found: None if status.done() else status.set_result(found))
        answer = bytearray()
        readable = asyncio.Event()
        os.set_blocking(reader, False)
        self._loop.add_reader(reader, readable.set)
        try:
            while True:
                await readable.wait()
                readable.clear()
                with contextlib.suppress(BlockingIOError):
                    chunk = os.read(reader, 1 << 16)
                    if not chunk:
                        break
                    answer += chunk
            await status
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            await asyncio.wait((status,), timeout=processes.KILL_DEADLINE_SECONDS)
            raise
        finally:
            self._loop.remove_reader(reader)
            os.close(reader)
        if not answer:
            raise ChildFailedError("Died", f"the helper process ended with status {status}")
        found = json.loads(answer)
        if "error" in found:
            raise ChildFailedError(found["kind"], found["error"])
        return found["result"]


def _supervise_program(
    command: list[str],
    environment: dict[str, str],
    folder: str,
    control: socket.socket,
    output: int,
) -> NoReturn:
    """Be the supervisor of a program; runs in a forked child of the agent."""
    try:
        signal.set_wakeup_fd(-1)
        os.setsid()
        job = os.fork()
        if job == 0:
            os.setsid()
            for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
                signal.signal(number, signal.SIG_DFL)
            nothing = os.open(os.devnull, os.O_RDONLY)
            for target, source in ((0, nothing), (1, output), (2, output)):
                os.dup2(source, target)
            try:
                os.chdir(folder)
                os.execvpe(command[0], command, environment)
            except OSError as error:
                os.write(2, f"{command[0]}: {error.strerror}\n".encode())
            os._exit(127)
        supervisor.supervise(control, job)
    finally:
        os._exit(70)


def _work_and_exit(function: Callable[[], Any], writer: int) -> None:
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        answer: dict[str, Any]
        try:
            answer = {"result": function()}
        except Exception as error:  # noqa: BLE001 - carried to the parent, which raises it
            answer = {"kind": type(error).__name__, "error": str(error)}
        with open(writer, "w") as file:
            json.dump(answer, file)
    finally:
        os._exit(0)
