"""Rows of a real pod agent, asked directly: tiers of a start, learned preload, resets."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from firepool_podagent.testing import Agent, Finished

from benchmarks.rows import percentile, row

_PAUSE_SECONDS = 0.15
_SLOW_PACKAGES = ("torch", "pandas", "matplotlib.pyplot")
_LEFTOVERS = (
    "import subprocess\n"
    "for _ in range(3):\n"
    "    subprocess.Popen(['sleep', '1000'], start_new_session=True, env={})"
)
_FILES = (
    "import os, tempfile\n"
    "folder = tempfile.mkdtemp()\n"
    "for number in range(10_000):\n"
    "    os.close(os.open(f'{folder}/{number}', os.O_CREAT | os.O_WRONLY))"
)


@contextlib.contextmanager
def _agent(**config: Any) -> Iterator[Agent]:
    home = Path(tempfile.mkdtemp(prefix="fp-bench-", dir="/tmp"))
    agent = Agent(home / "pod", **config)
    try:
        yield agent.start()
    finally:
        agent.stop()
        shutil.rmtree(home, ignore_errors=True)


def _hand_off_ms(done: Finished) -> float:
    times = done.outcome["times"]
    return 1000 * float(times["first_instruction"] - times["handed_off"])


def first_instruction(samples: int = 100) -> dict[str, Any]:
    """Hand-off to first instruction from a parked spare, against a fresh interpreter.

    The slowest package that is installed here stands for torch: it is preloaded in the pod, and
    the fresh interpreter imports it. Both sides run interleaved in one run.
    """
    package = _slow_package()
    parked: list[float] = []
    fresh: list[float] = []
    with _agent(preload=[package]) as agent:
        agent.run(f"import {package}")
        while len(parked) < samples:
            time.sleep(_PAUSE_SECONDS)
            done = agent.run(f"import {package}")
            if done.outcome["tier"] == "parked":
                parked.append(_hand_off_ms(done))
            if len(parked) % 10 == 0 and len(fresh) < len(parked) // 10:
                began = time.perf_counter()
                subprocess.run([sys.executable, "-c", f"import {package}"], check=True)
                fresh.append(1000 * (time.perf_counter() - began))
    return row(
        parked,
        unit="ms",
        goal="p50 at most 3 ms, p99 at most 15 ms; 300 times faster than a fresh interpreter",
        p50_at_most=3,
        p99_at_most=15,
        ratio=round(percentile(fresh, 50) / percentile(parked, 50), 1),
        against=f"a fresh interpreter that imports {package}",
        fresh_p50=round(percentile(fresh, 50), 1),
    )


def imports(samples: int = 15) -> dict[str, Any]:
    """Second cell of a session that imports a slow package: hand-off to after the import."""
    package = _slow_package()
    first: list[float] = []
    second: list[float] = []
    code = f"import {package}, time; print(repr(time.time()))"
    for _ in range(samples):
        with _agent() as agent:
            for found in (first, second):
                done = agent.run(code)
                imported_at = float(done.text())
                found.append(1000 * (imported_at - done.outcome["times"]["handed_off"]))
                time.sleep(3)  # the pause between a person's cells, in which the pod learns
    return row(
        second,
        unit="ms",
        goal="p50 at most 20 ms",
        p50_at_most=20,
        ratio=round(percentile(first, 50) / percentile(second, 50), 1),
        against="the session's first cell",
        first_p50=round(percentile(first, 50), 1),
        package=package,
    )


def reset(samples: int = 100) -> dict[str, Any]:
    """Clean reset of a pod whose job left nothing."""
    with _agent() as agent:
        figures = [_reset_ms(agent, "pass") for _ in range(samples)]
    return row(figures, unit="ms", goal="p50 at most 5 ms", p50_at_most=5)


def reset_files(samples: int = 15) -> dict[str, Any]:
    """Reset after 10,000 scratch files, and the end of three leftover processes."""
    with _agent() as agent:
        figures = [_reset_ms(agent, _FILES) for _ in range(samples)]
        leftovers = []
        escapees = 0
        for _ in range(samples):
            done = agent.run(_LEFTOVERS)
            leftovers.append(1000 * (time.time() - done.outcome["times"]["ended"]))
            escapees += done.reset["escapees"]
            if len(done.outcome["killed"]) != 3:
                raise RuntimeError(f"three processes were left, killed: {done.outcome['killed']}")
    return row(
        figures,
        unit="ms",
        goal="p50 at most 150 ms; leftovers at most 10 ms, no escapees",
        p50_at_most=150,
        leftovers_p50=round(percentile(leftovers, 50), 2),  # the job's exit to the reset's report
        escapees=escapees,
    )


def _reset_ms(agent: Agent, code: str) -> float:
    done = agent.run(code)
    time.sleep(_PAUSE_SECONDS)
    if not done.reset["clean"]:
        raise RuntimeError(f"a benchmark's reset was not clean: {done.reset['reason']}")
    return 1000 * float(done.reset["seconds"])


def _slow_package() -> str:
    from importlib.util import find_spec

    return next(name for name in _SLOW_PACKAGES if find_spec(name.partition(".")[0]) is not None)
