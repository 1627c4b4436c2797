"""Fixtures of the cases: a kernel that a module's tests share, and kernels of one test alone."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from firepool_broker import embedded
from firepool_broker.testing import Api, assert_nothing_left

sys.path.insert(0, str(Path(__file__).parents[1] / "notebook"))
from kernels import Kernel

_NOTEBOOK = Path(sys.path.pop(0))


def _fixtures_of_the_notebook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("notebook_fixtures", _NOTEBOOK / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_shared = _fixtures_of_the_notebook()
shared_home = _shared.shared_home
shared_folder = _shared.shared_folder
kernel = _shared.kernel
jobs = _shared.jobs


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
