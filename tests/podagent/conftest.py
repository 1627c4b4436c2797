from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from firepool_podagent.testing import Agent

sys.path.insert(0, str(Path(__file__).parent / "agent"))  # for `zoo`

STRESS = int(os.environ.get("FIREPOOL_STRESS", "10"))


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A folder whose path is short enough for sockets."""
    path = Path(tempfile.mkdtemp(prefix="fpa-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def start_agent(short_dir: Path) -> Iterator[Callable[..., Agent]]:
    """Start real agents; they are stopped, and seen to be gone, at the end."""
    agents: list[Agent] = []

    def start(name: str = "pod", isolation: str = "auto", **config: object) -> Agent:
        agent = Agent(short_dir / name, isolation, **config)
        agents.append(agent)
        return agent.start()

    yield start
    for agent in agents:
        agent.stop()
        assert not agent.alive
        log = (agent.directory / "agent.log").read_text()
        assert "Traceback" not in log, log


@pytest.fixture(params=["namespaces", "process"])
def agent(request: pytest.FixtureRequest, start_agent: Callable[..., Agent]) -> Agent:
    """An agent, once with namespaces and once with them forced off."""
    return start_agent(isolation=request.param)


@pytest.fixture
def stress() -> int:
    """How often the long tests repeat themselves; FIREPOOL_STRESS, 200 for the full run."""
    return STRESS
