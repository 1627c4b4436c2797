"""Fixtures of every room: a home of one's own, a real broker and kernels in it, a small client."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from firepool_broker import embedded
from firepool_broker.testing import Api, assert_nothing_left, processes_of

sys.path.insert(0, str(Path(__file__).parent / "notebook"))
from kernels import Kernel

sys.path.pop(0)


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


# -- kernels ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared_home() -> Iterator[Path]:
    """A home with a broker of its own for the tests of one module; nothing of it is left."""
    home = Path(tempfile.mkdtemp(prefix="fp-", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FIREPOOL_HOME", str(home))
        for name in ("FIREPOOL_URL", "FIREPOOL_TOKEN", "FIREPOOL_CONFIG"):
            patch.delenv(name, raising=False)
        try:
            yield home
            if embedded.find() is not None:
                embedded.stop()
            assert_nothing_left(home)
        finally:
            for process in processes_of(home):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="module")
def shared_folder(shared_home: Path) -> Path:
    """The notebook's folder."""
    folder = shared_home / "notebooks"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def kernel(shared_home: Path, shared_folder: Path) -> Iterator[Kernel]:
    """A kernel with the extension loaded, shared by the tests of one module."""
    started = Kernel(shared_folder).load()
    try:
        yield started
    finally:
        started.shut_down()


@pytest.fixture
def jobs(shared_home: Path) -> Callable[[], list[dict[str, Any]]]:
    """List the broker's jobs, newest first."""

    def listed() -> list[dict[str, Any]]:
        connection = embedded.find()
        assert connection is not None
        with Api(connection) as api:
            found: list[dict[str, Any]] = api.get("/v1/jobs?limit=200")["jobs"]
        return found

    return listed


@pytest.fixture
def kernels(firepool_home: Path) -> Iterator[Callable[..., Kernel]]:
    """Start kernels with a broker of their own, of which nothing may be left."""
    folder = firepool_home / "notebooks"
    folder.mkdir(exist_ok=True)
    started: list[Kernel] = []

    def start(**options: Any) -> Kernel:
        each = Kernel(folder, **options)
        started.append(each)
        return each.load()

    yield start
    for each in started:
        each.shut_down()
    running = embedded.find()
    if running is not None:
        with Api(running) as api:
            for job in api.get("/v1/jobs?state=RUNNING")["jobs"]:
                api.post(f"/v1/jobs/{job['id']}/interrupt", {"kill": True})
        embedded.stop()
    assert_nothing_left(firepool_home)
