"""Real kernels for tests: start one, run cells in it as a front end does, press ■."""

from __future__ import annotations

import os
import queue
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jupyter_client.manager import KernelManager

ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Ran:
    """What a cell showed, as a front end keeps it."""

    status: str = ""
    outputs: list[dict[str, Any]] = field(default_factory=list)
    reply: dict[str, Any] = field(default_factory=dict)
    clear_pending: bool = False
    displays: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    arrived: list[tuple[float, str]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def stdout(self) -> str:
        return self._stream("stdout")

    @property
    def stderr(self) -> str:
        return self._stream("stderr")

    def _stream(self, name: str) -> str:
        return "".join(
            o["text"] for o in self.outputs if o["output_type"] == "stream" and o["name"] == name
        )

    @property
    def texts(self) -> list[str]:
        """Plain texts of displays and results."""
        return [
            o["data"].get("text/plain", "")
            for o in self.outputs
            if o["output_type"] in ("display_data", "execute_result")
        ]

    @property
    def error(self) -> dict[str, Any]:
        errors = [o for o in self.outputs if o["output_type"] == "error"]
        assert len(errors) == 1, self.outputs
        return errors[0]

    @property
    def traceback(self) -> str:
        return ANSI.sub("", "\n".join(self.error["traceback"]))

    def take(self, message: dict[str, Any]) -> None:
        """Apply one IOPub message with a front end's rules."""
        kind, content = message["msg_type"], message["content"]
        if kind == "clear_output":
            if content["wait"]:
                self.clear_pending = True
            else:
                self.outputs.clear()
            return
        transient = content.get("transient") or {}
        if kind == "update_display_data":
            for output in self.displays.get(transient["display_id"], []):
                output.update(data=content["data"], metadata=content["metadata"])
            return
        if kind not in ("stream", "display_data", "execute_result", "error"):
            return
        if self.clear_pending:
            self.outputs.clear()
            self.clear_pending = False
        output = {"output_type": kind, **content}
        last = self.outputs[-1] if self.outputs else {}
        if kind == "stream" == last.get("output_type") and last["name"] == content["name"]:
            last["text"] += content["text"]
            return
        self.outputs.append(output)
        if "display_id" in transient:
            self.displays.setdefault(transient["display_id"], []).append(output)


class Kernel:
    """A kernel with a person in front of it (``allow_stdin``), unless told otherwise."""

    def __init__(
        self,
        folder: Path,
        *,
        person: bool = True,
        python: str = sys.executable,
        env: dict[str, str] | None = None,
        wait: bool = True,
    ) -> None:
        self.person = person
        self.manager = KernelManager(kernel_name="python3")
        self.manager.kernel_spec.argv[0] = python  # the environment under test, not any kernelspec
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **(env or {})}
        self.manager.start_kernel(cwd=str(folder), env=environment)
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        if wait:
            self.client.wait_for_ready(timeout=60)
        self.ended = False

    def load(self) -> Kernel:
        """Load the extension."""
        self.ok("%load_ext firepool_nb")
        return self

    def start(self, code: str) -> str:
        """Send a cell and return the id of its request."""
        return self.client.execute(code, allow_stdin=self.person, stop_on_error=False)

    def finish(
        self,
        request: str,
        timeout: float = 60.0,
        watch: Callable[[Ran, dict[str, Any]], None] | None = None,
    ) -> Ran:
        """Collect what a cell shows until it is idle."""
        ran = Ran()
        began = time.monotonic()
        deadline = began + timeout
        while True:
            left = deadline - time.monotonic()
            assert left > 0, f"the cell did not end within {timeout} s: {ran.outputs}"
            try:
                message = self.client.get_iopub_msg(timeout=left)
            except queue.Empty:
                continue
            if message["parent_header"].get("msg_id") != request:
                continue
            ran.arrived.append((time.monotonic() - began, message["msg_type"]))
            if watch is not None:
                watch(ran, message)
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                break
            ran.take(message)
        ran.seconds = time.monotonic() - began
        while True:
            reply = self.client.get_shell_msg(timeout=10)
            if reply["parent_header"].get("msg_id") == request:
                break
        ran.reply = reply["content"]
        ran.status = ran.reply["status"]
        return ran

    def run(self, code: str, timeout: float = 60.0, **watching: Any) -> Ran:
        """Run a cell to its end, however it ends."""
        return self.finish(self.start(code), timeout, **watching)

    def ok(self, code: str, timeout: float = 60.0) -> Ran:
        """Run a cell that must succeed."""
        ran = self.run(code, timeout)
        assert ran.status == "ok", ANSI.sub("", "\n".join(ran.reply.get("traceback", [])))
        return ran

    def remote(self, code: str, options: str = "", timeout: float = 60.0) -> Ran:
        """Run a cell on a pod; it must succeed."""
        return self.ok(f"%%firepool {options}\n{code}", timeout)

    def interrupt(self) -> None:
        """Press ■."""
        self.manager.interrupt_kernel()

    def restart(self) -> None:
        """Restart as a front end does, with a goodbye."""
        self.manager.restart_kernel(now=False)
        self.client.wait_for_ready(timeout=60)

    def shut_down(self) -> None:
        """Shut down as a front end does; does nothing to a kernel that has ended."""
        if self.ended:
            return
        self.ended = True
        self.client.stop_channels()
        self.manager.shutdown_kernel()

    def kill(self) -> None:
        """Kill the process without a word, as a machine out of memory does."""
        self.ended = True
        process = self.manager.provisioner.process
        process.kill()
        process.wait()
        self.client.stop_channels()
        self.manager.cleanup_resources()
