"""Fixtures of the notebook's tests: a broker and a kernel that many tests share."""

from __future__ import annotations

import contextlib
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

sys.path.insert(0, str(Path(__file__).parent))
from kernels import Kernel

sys.path.pop(0)


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
