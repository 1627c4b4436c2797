"""Rows ``cell``, ``load`` and ``interrupt``: what a person in front of a notebook waits for.

Everything is measured from outside, in a real ipykernel over its own sockets: a clock starts when
the request leaves the client and stops when the message arrives. A home of its own holds the
broker, so that nothing of the person's is touched.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.rows import Skipped, percentile, row

_WARM_UP_CELLS = 5
_CELLS = int(os.environ.get("FIREPOOL_BENCH_CELLS", "100"))
_FRESH_KERNELS = 8
_LOADS = 7
_INTERRUPTS = 20


@contextlib.contextmanager
def _home() -> Iterator[str]:
    """Make a private ``FIREPOOL_HOME``; its broker is stopped afterwards."""
    from firepool_broker import embedded

    folder = tempfile.mkdtemp(prefix="fpb-", dir="/tmp")
    before = os.environ.get("FIREPOOL_HOME")
    os.environ["FIREPOOL_HOME"] = folder
    os.mkdir(f"{folder}/notebooks")
    try:
        yield folder
    finally:
        with contextlib.suppress(embedded.EmbeddedError):
            embedded.stop()
        if before is None:
            del os.environ["FIREPOOL_HOME"]
        else:
            os.environ["FIREPOOL_HOME"] = before
        shutil.rmtree(folder, ignore_errors=True)


class _Kernel:
    """A kernel over its own sockets, and the times at which its messages arrive."""

    def __init__(self, folder: str) -> None:
        try:
            from jupyter_client.manager import KernelManager
        except ImportError:
            raise Skipped("jupyter_client and ipykernel are not installed") from None
        self.manager = KernelManager(kernel_name="python3")
        self.manager.kernel_spec.argv[0] = sys.executable
        self.manager.start_kernel(cwd=folder)
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def run(self, code: str) -> tuple[float | None, float]:
        """Run a cell; return milliseconds to its first output and to idle."""
        began = time.perf_counter()
        request = self.client.execute(code)
        first: float | None = None
        while True:
            message = self.client.get_iopub_msg(timeout=60)
            now = (time.perf_counter() - began) * 1000
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "error":
                raise RuntimeError(f"{content['ename']}: {content['evalue']}")
            if kind in ("stream", "execute_result", "display_data") and first is None:
                first = now
            if kind == "status" and content["execution_state"] == "idle":
                break
        self.client.get_shell_msg(timeout=60)
        return first, now

    def interrupt_after(self, code: str, text: str) -> float:
        """Interrupt a cell once it printed a text; return milliseconds from ■ to idle."""
        request = self.client.execute(code)
        pressed = 0.0
        while True:
            message = self.client.get_iopub_msg(timeout=60)
            if message["parent_header"].get("msg_id") != request:
                continue
            if text in message["content"].get("text", ""):
                pressed = time.perf_counter()
                self.manager.interrupt_kernel()
            if message["content"].get("execution_state") == "idle":
                break
        took = (time.perf_counter() - pressed) * 1000
        self.client.get_shell_msg(timeout=60)
        return took

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel()


def cell() -> dict[str, Any]:
    """``%%firepool`` with ``print(1)``: request to first output, and to idle.

    Against a fresh ipykernel for each cell, and ipyparallel's ``%%px`` where it is installed, in
    the same run, interleaved.
    """
    with _home() as home:
        folder = f"{home}/notebooks"
        kernel = _Kernel(folder)
        try:
            kernel.run("%load_ext firepool_nb")
            for _ in range(_WARM_UP_CELLS):
                kernel.run("%%firepool\nprint(1)")
            px = _start_px(kernel)
            first: list[float] = []
            idle: list[float] = []
            px_first: list[float] = []
            fresh: list[float] = []
            for index in range(_CELLS):
                output, done = kernel.run("%%firepool\nprint(1)")
                first.append(output or done)
                idle.append(done)
                if px:
                    output, done = kernel.run("%%px\nprint(1)")
                    px_first.append(output or done)
                if index % max(1, _CELLS // _FRESH_KERNELS) == 0:
                    fresh.append(_fresh_kernel_cell(folder))
        finally:
            kernel.close()
    more: dict[str, Any] = {
        "idle_p50": round(percentile(idle, 50), 3),
        "idle_p99": round(percentile(idle, 99), 3),
        "against": {"fresh ipykernel per cell": round(percentile(fresh, 50), 1)},
        "ratio": {
            "fresh ipykernel per cell": round(percentile(fresh, 50) / percentile(first, 50), 1)
        },
    }
    if px_first:
        more["against"]["%%px"] = round(percentile(px_first, 50), 3)
        more["ratio"]["%%px"] = round(percentile(px_first, 50) / percentile(first, 50), 2)
    return row(
        first,
        unit="ms",
        goal="p50 ≤ 15 ms, p99 ≤ 50 ms to the first output",
        p50_at_most=15,
        p99_at_most=50,
        **more,
    )


def _fresh_kernel_cell(folder: str) -> float:
    began = time.perf_counter()
    kernel = _Kernel(folder)
    try:
        kernel.run("print(1)")
        return (time.perf_counter() - began) * 1000
    finally:
        kernel.close()


def _start_px(kernel: _Kernel) -> bool:
    """Start an ipyparallel engine in the kernel; False where it is not installed."""
    if importlib.util.find_spec("ipyparallel") is None:
        return False
    kernel.run(
        "import ipyparallel\ncluster = ipyparallel.Cluster(n=1)\n"
        "view = cluster.start_and_connect_sync()[:]\nview.activate()"
    )
    kernel.run("%%px\nprint(1)")
    return True


def load() -> dict[str, Any]:
    """Import; ``%load_ext`` with a broker running; from no broker to a first cell's output."""
    imports = [_import_ms() for _ in range(_LOADS)]
    loads: list[float] = []
    firsts: list[float] = []
    for _ in range(_LOADS):
        with _home() as home:
            kernel = _Kernel(f"{home}/notebooks")
            try:
                _, loaded = kernel.run("%load_ext firepool_nb")
                output, done = kernel.run("%%firepool\nprint(1)")
                firsts.append(loaded + (output or done))
            finally:
                kernel.close()
            kernel = _Kernel(f"{home}/notebooks")  # the broker still runs
            try:
                loads.append(kernel.run("%load_ext firepool_nb")[1])
            finally:
                kernel.close()
    import_ms, first_ms = percentile(imports, 50), percentile(firsts, 50)
    figures = row(
        loads,
        unit="ms",
        goal="import ≤ 120; %load_ext ≤ 250; no broker to first output ≤ 1500",
        p50_at_most=250,
        import_p50=round(import_ms, 1),
        first_output_p50=round(first_ms, 1),
        first_output_p99=round(percentile(firsts, 99), 1),
    )
    figures["met"] = figures["met"] and import_ms <= 120 and first_ms <= 1500
    return figures


def _import_ms() -> float:
    """Import the package in an interpreter of its own; milliseconds of the import alone."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import time; began = time.perf_counter(); import firepool_nb; "
            "print((time.perf_counter() - began) * 1000)",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


def interrupt() -> dict[str, Any]:
    """■ to idle for code that stops; a later ■ kills code that does not."""
    with _home() as home:
        kernel = _Kernel(f"{home}/notebooks")
        try:
            kernel.run("%load_ext firepool_nb")
            for _ in range(_WARM_UP_CELLS):
                kernel.run("%%firepool\nprint(1)")
            stops = "%%firepool\nimport time\nprint('go')\ntime.sleep(600)"
            samples = [kernel.interrupt_after(stops, "go") for _ in range(_INTERRUPTS)]
            killed = _kill_ms(kernel)
        finally:
            kernel.close()
    figures = row(
        samples,
        unit="ms",
        goal="p99 ≤ 50 ms for code that stops; a later ■ kills within 2 s",
        p99_at_most=50,
        kill_ms=round(killed, 1),
    )
    figures["met"] = figures["met"] and killed <= 2000
    return figures


def _kill_ms(kernel: _Kernel) -> float:
    """Milliseconds from the second ■ to idle for code that swallows the first."""
    request = kernel.client.execute(
        "%%firepool\nimport time\nprint('go')\nwhile True:\n"
        "    try:\n        time.sleep(600)\n    except KeyboardInterrupt:\n        print('no')"
    )
    pressed = 0.0
    while True:
        message = kernel.client.get_iopub_msg(timeout=60)
        if message["parent_header"].get("msg_id") != request:
            continue
        text = message["content"].get("text", "")
        if "go" in text:
            kernel.manager.interrupt_kernel()
        if "no" in text:
            time.sleep(2.1)  # a press within two seconds of the first would be ignored
            pressed = time.perf_counter()
            kernel.manager.interrupt_kernel()
        if message["content"].get("execution_state") == "idle":
            break
    took = (time.perf_counter() - pressed) * 1000
    kernel.client.get_shell_msg(timeout=60)
    return took
