"""Fixtures of every room: a home of one's own, a real broker in it, a small client."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from firepool_broker import embedded
from firepool_broker.testing import Api, assert_nothing_left, processes_of


@pytest.fixture
def firepool_home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A private ``FIREPOOL_HOME`` with a short path, gone with every process of it afterwards."""
    home = Path(tempfile.mkdtemp(prefix="fp-", dir="/tmp"))
    monkeypatch.setenv("FIREPOOL_HOME", str(home))
    # PYTHONDONTWRITEBYTECODE would have every broker compile its own modules anew
    for name in ("FIREPOOL_URL", "FIREPOOL_TOKEN", "FIREPOOL_CONFIG", "PYTHONDONTWRITEBYTECODE"):
        monkeypatch.delenv(name, raising=False)
    try:
        yield home
    finally:
        left = processes_of(home)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=15)
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def configure(firepool_home: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Write the broker's configuration: ``configure(idle_exit_seconds=2, pools={...})``."""

    def write(**knobs: Any) -> Path:
        path = firepool_home / "config.yaml"
        path.write_text(json.dumps(knobs))  # JSON is YAML
        monkeypatch.setenv("FIREPOOL_CONFIG", str(path))
        return path

    return write


@pytest.fixture
def broker(firepool_home: Path) -> Iterator[embedded.Connection]:
    """A running embedded broker; afterwards nothing of it may be left."""
    yield embedded.ensure_running()
    running = embedded.find()
    if running is not None:
        with Api(running) as api:
            for job in api.get("/v1/jobs?state=RUNNING")["jobs"]:
                api.post(f"/v1/jobs/{job['id']}/interrupt", {"kill": True})
        embedded.stop()
    assert_nothing_left(firepool_home)


@pytest.fixture
def api(broker: embedded.Connection) -> Iterator[Api]:
    """A client with the owner's token."""
    with Api(broker) as client:
        yield client
