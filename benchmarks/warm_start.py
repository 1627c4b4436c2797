"""Rows of a real broker process with real local pods: warm starts, starts from nothing, idling.

Every row runs in a home of its own below the temporary folder and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
from firepool_broker import embedded
from firepool_broker.testing import Api, kill_hard, processes_of

from benchmarks.rows import percentile, row

_SESSION = {"lease_tag": "bench", "client_id": "bench"}
_WARM_UP = 5
_PAUSE_SECONDS = 0.15  # a person's next cell finds the pod reset and a spare parked
_MIB = 2**20


@contextlib.contextmanager
def _home(**knobs: Any) -> Iterator[Path]:
    """Point this process at a home of its own, and leave nothing of it."""
    home = Path(tempfile.mkdtemp(prefix="fp-bench-", dir="/tmp"))
    names = ("FIREPOOL_HOME", "FIREPOOL_CONFIG", "PYTHONDONTWRITEBYTECODE")
    before = {name: os.environ.pop(name, None) for name in names}
    os.environ["FIREPOOL_HOME"] = str(home)
    if knobs:
        (home / "config.yaml").write_text(json.dumps(knobs))
        os.environ["FIREPOOL_CONFIG"] = str(home / "config.yaml")
    try:
        yield home
        embedded.stop()
    finally:
        for process in processes_of(home):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        shutil.rmtree(home, ignore_errors=True)


@contextlib.contextmanager
def _session(home: Path) -> Iterator[Api]:
    with Api(embedded.ensure_running(30)) as api:
        api.session(_SESSION["lease_tag"], client_id=_SESSION["client_id"], cwd=str(home))
        yield api


def _run(api: Api, code: str) -> tuple[float, float, float, Mapping[str, Any]]:
    """Run a cell; returns when it was sent, its first output and its end came, and the job."""
    sent = time.time()
    first = 0.0
    job: dict[str, Any] = {}
    body = {"kind": "cell", "code": code, "sku": "cpu-small", **_SESSION}
    for kind, data in api.events("POST", "/v1/jobs?follow=1", body):
        if kind == "stream" and not first:
            first = time.time()
        job = data
    ended = time.time()
    if job["state"] != "SUCCEEDED":
        raise RuntimeError(f"a benchmark's cell ended {job['state']}: {job['error']}")
    return sent, first, ended, job


def warm_start(samples: int = 200) -> dict[str, Any]:
    """Submit to first instruction of user code on one idle pod, everything durable."""
    totals, outputs = [], []
    phases: dict[str, list[float]] = {
        "accept": [],
        "dispatch": [],
        "hand_off": [],
        "first_instruction": [],
    }
    with _home() as home, _session(home) as api:
        for number in range(samples + _WARM_UP):
            sent, first, _, job = _run(api, "print(1)")
            time.sleep(_PAUSE_SECONDS)
            if number < _WARM_UP:
                continue
            times = job["times"]
            moments = [sent, times["claimed"], times["committed"], times["handed_off"]]
            moments.append(times["first_instruction"])
            for phase, begin, end in zip(phases, moments, moments[1:], strict=False):
                phases[phase].append(1000 * (end - begin))
            totals.append(1000 * (times["first_instruction"] - sent))
            outputs.append(1000 * (first - sent))
    return row(
        totals,
        unit="ms",
        goal="p50 at most 12 ms, p99 at most 50 ms",
        p50_at_most=12,
        p99_at_most=50,
        phases_p50={name: round(percentile(found, 50), 2) for name, found in phases.items()},
        first_output_p50=round(percentile(outputs, 50), 2),
        first_output_p99=round(percentile(outputs, 99), 2),
    )


def back_to_back(samples: int = 200) -> dict[str, Any]:
    """Run ``print(1)`` again and again on one pod: request to end, resets included."""
    figures = _back_to_back("print(1)", samples)
    more: dict[str, Any] = {}
    if importlib.util.find_spec("torch") is not None:
        torch = _back_to_back("import torch; print(1)", samples)
        more = {"torch_p50": percentile(torch, 50), "torch_p99": percentile(torch, 99)}
    else:
        more = {"torch": "not installed here"}
    return row(figures, unit="ms", goal="p50 at most 25 ms", p50_at_most=25, **more)


def _back_to_back(code: str, samples: int) -> list[float]:
    figures = []
    with _home() as home, _session(home) as api:
        for _ in range(_WARM_UP):
            _run(api, code)
        last = time.time()
        for _ in range(samples):
            ended = _run(api, code)[2]
            figures.append(1000 * (ended - last))
            last = ended
    return figures


def pool_start(samples: int = 10) -> dict[str, Any]:
    """Start a broker with two pods from nothing; time until both are warm-ready, and memory."""
    pools = {"cpu-small": {"min_count": 2, "shape": {"cpu": 2, "memory_gib": 4}}}
    figures, memories = [], []
    for _ in range(samples):
        with _home(pools=pools) as home:
            began = time.perf_counter()
            with Api(embedded.ensure_running(30)) as api:
                while api.get("/v1/pools")["pools"][0]["counts"]["warm_ready"] < 2:
                    time.sleep(0.002)
                figures.append(1000 * (time.perf_counter() - began))
            memories.append(_memory_mib(processes_of(home)))
    return row(
        figures,
        unit="ms",
        goal="p50 at most 600 ms; broker and two pods at most 150 MiB",
        p50_at_most=600,
        memory_mib=round(percentile(memories, 50), 1),
        memory_met=percentile(memories, 50) <= 150,
    )


def restart(samples: int = 20) -> dict[str, Any]:
    """Kill the broker hard and start the next one: process start to dispatching."""
    figures, claims, held = [], [], 0
    with _home() as home:
        with _session(home) as api:
            pods = set(_run(api, "print(1)")[3]["pods"])
        for _ in range(samples):
            kill_hard(embedded.ensure_running(30))
            began = time.perf_counter()
            embedded.ensure_running(30)
            figures.append(1000 * (time.perf_counter() - began))
            with _session(home) as api:
                _, _, _, job = _run(api, "print(1)")
                claims.append(1000 * (job["times"]["claimed"] - job["times"]["submitted"]))
                held += set(job["pods"]) == pods
                time.sleep(_PAUSE_SECONDS)
    return row(
        figures,
        unit="ms",
        goal="at most 300 ms with imports; first claim at most 1 s; every hold kept",
        p50_at_most=300,
        first_claim_p50=round(percentile(claims, 50), 2),
        holds_kept=held,
        kills=samples,
    )


def idle(seconds: float = 20.0) -> dict[str, Any]:
    """Leave a broker with one warm pod alone: share of a core, memory."""
    with _home() as home:
        with _session(home) as api:
            _run(api, "print(1)")
            stream = f"/v1/sessions/bench/stream?client_id={_SESSION['client_id']}"
            with api.http.stream("GET", stream):
                time.sleep(2)
                found = processes_of(home)
                pid = api.connection.pid
                before = {process.pid: _cpu_seconds(process) for process in found}
                time.sleep(seconds)
                found = [process for process in found if process.is_running()]
                used = {process.pid: _cpu_seconds(process) for process in found}
                broker = psutil.Process(pid)
                memory_mib = broker.memory_info().rss / _MIB
                agents = [process for process in found if process.pid != pid]
                agent_mib = max(process.memory_full_info().pss / _MIB for process in agents)
    percent = {key: 100 * (used[key] - before[key]) / seconds for key in used}
    agent_percent = max(value for key, value in percent.items() if key != pid)
    figures = row(
        [percent[pid]],
        unit="% of a core",
        goal="broker under 1 % and 120 MiB resident; agent under 0.2 % and 20 MiB",
        p50_at_most=1,
        resident_mib=round(memory_mib, 1),
        agent_percent=round(agent_percent, 3),
        agent_mib=round(agent_mib, 1),
    )
    met = figures["met"] and memory_mib < 120 and agent_percent < 0.2 and agent_mib < 20
    return {**figures, "met": met}


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _memory_mib(processes: list[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_full_info().pss / _MIB
    return total
