"""Local pods with real agents: started, watched, adopted, ended, and nothing left of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from firepool_broker import processes
from firepool_broker.backends import (
    BackendUnavailable,
    PodExited,
    PodFailed,
    PodServing,
    PodSpec,
    WatchEvent,
)
from firepool_broker.backends import (
    annotations as annotation_files,
)
from firepool_broker.backends.agents import marked_processes
from firepool_broker.backends.annotations import AnnotationFile
from firepool_broker.backends.local import LocalBackend
from firepool_broker.launch.agent_client import AgentClient
from firepool_broker.testing import PodNeverReady

KEY = b"k" * 32


class Watched:
    """A backend and what it has reported."""

    def __init__(self, backend: LocalBackend) -> None:
        self.backend = backend
        self.events: asyncio.Queue[WatchEvent] = asyncio.Queue()

    async def start(self) -> Watched:
        await self.backend.start(self.events.put_nowait)
        return self

    async def next(self) -> WatchEvent:
        return await asyncio.wait_for(self.events.get(), 30)

    async def serving(self, name: str = "pod-1") -> PodServing:
        await self.backend.create(PodSpec(name, f"uid-{name}", "cpu-small"))
        event = await self.next()
        assert isinstance(event, PodServing), event
        return event


Make = Callable[..., Watched]


@pytest.fixture
async def make(firepool_home: Path) -> AsyncIterator[Make]:
    made: list[Watched] = []

    def build(kind: type[LocalBackend] = LocalBackend, **options: object) -> Watched:
        run = firepool_home / "run"
        run.mkdir(exist_ok=True)
        backend = kind(
            str(firepool_home / "state" / "pods"),
            str(run),
            lambda uid: KEY,
            **options,  # type: ignore[arg-type]
        )
        os.makedirs(firepool_home / "state", exist_ok=True)
        made.append(Watched(backend))
        return made[-1]

    yield build
    for watched in made:
        for record in await watched.backend.list_pods():
            await watched.backend.delete(record.name)
        await watched.backend.stop()


async def test_a_pod_serves_answers_and_is_deleted_without_a_trace(
    make: Make, firepool_home: Path
) -> None:
    watched = await make().start()
    event = await watched.serving()
    assert (event.name, event.uid) == ("pod-1", "uid-pod-1")
    assert event.isolation in ("namespaces", "process")
    client = AgentClient(watched.backend.address("pod-1"), 1)
    health = await client.health()
    client.close()
    assert health["revision"] == watched.backend.revision == event.revision
    agent = watched.backend.agent("pod-1")
    assert agent is not None
    assert processes.is_alive(*agent)
    await watched.backend.delete("pod-1")
    assert not processes.is_alive(*agent)
    assert os.listdir(firepool_home / "state" / "pods") == []
    assert watched.events.empty()  # it was asked for: nobody is told of a death


async def test_the_name_is_written_before_the_process_is_started(make: Make) -> None:
    seen = []

    class Looks(LocalBackend):
        def _spawn_agent(self, pod, spec):  # type: ignore[no-untyped-def]
            seen.append(json.loads((Path(pod.directory) / "state.json").read_text()))
            return super()._spawn_agent(pod, spec)

    await (await make(Looks).start()).serving()
    assert seen[0]["name"] == "pod-1"
    assert seen[0]["uid"] == "uid-pod-1"


async def test_the_key_is_neither_in_the_environment_nor_on_the_command_line(make: Make) -> None:
    watched = await make().start()
    await watched.serving()
    agent = watched.backend.agent("pod-1")
    assert agent is not None
    for name in ("environ", "cmdline"):
        content = Path(f"/proc/{agent[0]}/{name}").read_bytes()
        assert KEY.hex().encode() not in content
        assert KEY not in content


async def test_a_killed_agent_is_reported_at_once_with_its_signal(make: Make) -> None:
    watched = await make().start()
    await watched.serving()
    agent = watched.backend.agent("pod-1")
    assert agent is not None
    began = asyncio.get_running_loop().time()
    os.kill(agent[0], signal.SIGKILL)
    event = await watched.next()
    assert isinstance(event, PodExited)
    assert event.name == "pod-1"
    assert asyncio.get_running_loop().time() - began < 3
    assert await watched.backend.list_pods() == []


async def test_a_pod_that_never_serves_fails_with_its_own_words(make: Make) -> None:
    watched = await make(PodNeverReady, start_timeout_seconds=1.0).start()
    await watched.backend.create(PodSpec("pod-1", "uid-1", "cpu-small"))
    event = await watched.next()
    assert isinstance(event, PodFailed)
    assert "did not serve within 1 s" in event.reason
    await watched.serving("pod-2")  # only the first one was faulty


async def test_an_agent_that_exits_at_once_fails_with_its_last_words(make: Make) -> None:
    class Crashes(LocalBackend):
        def _command(self, pod):  # type: ignore[no-untyped-def]
            command = super()._command(pod)
            return [*command[: command.index("-X") + 2], "-c", "raise SystemExit('no disk')"]

    watched = await make(Crashes).start()
    await watched.backend.create(PodSpec("pod-1", "uid-1", "cpu-small"))
    event = await watched.next()
    assert isinstance(event, PodFailed)
    assert event.reason == "its agent exited with 1 before it served: no disk"
    assert await watched.backend.list_pods() == []


async def test_a_pod_that_cannot_even_be_begun_leaves_nothing(
    make: Make, firepool_home: Path
) -> None:
    class NoPython(LocalBackend):
        def _command(self, pod):  # type: ignore[no-untyped-def]
            return ["/does/not/exist"]

    watched = await make(NoPython).start()
    with pytest.raises(FileNotFoundError):
        await watched.backend.create(PodSpec("pod-1", "uid-1", "cpu-small"))
    assert os.listdir(firepool_home / "state" / "pods") == []


async def test_the_next_broker_adopts_pods_with_their_annotations(make: Make) -> None:
    first = await make().start()
    await first.serving()
    await first.backend.annotate("pod-1", {"owner": "ada", "tag": "k1", "gone": "x"})
    await first.backend.annotate("pod-1", {"gone": None})
    agent = first.backend.agent("pod-1")
    await first.backend.stop()
    second = await make().start()
    (record,) = await second.backend.list_pods()
    assert record.serving
    assert record.uid == "uid-pod-1"
    assert record.annotations == {"owner": "ada", "tag": "k1"}
    assert second.backend.agent("pod-1") == agent
    assert agent is not None
    os.kill(agent[0], signal.SIGKILL)  # it is watched again, though it is nobody's child
    assert isinstance(await second.next(), PodExited)


async def test_a_pod_that_was_starting_when_its_broker_died_is_waited_for(make: Make) -> None:
    first = await make().start()
    await first.backend.create(PodSpec("pod-1", "uid-1", "cpu-small"))
    await first.backend.stop()
    second = await make().start()
    await second.backend.list_pods()
    if second.events.empty():
        records = await second.backend.list_pods()
        if not records[0].serving:
            assert isinstance(await second.next(), PodServing)
    assert (await second.backend.list_pods())[0].serving


async def test_what_died_with_its_broker_is_cleared_away(make: Make, firepool_home: Path) -> None:
    first = await make().start()
    await first.serving()
    agent = first.backend.agent("pod-1")
    await first.backend.stop()
    assert agent is not None
    os.kill(agent[0], signal.SIGKILL)
    assert processes.wait_for_exit(*agent, timeout_seconds=10)
    (firepool_home / "state" / "pods" / "half-made").mkdir()
    second = await make().start()
    assert await second.backend.list_pods() == []
    assert os.listdir(firepool_home / "state" / "pods") == []


async def test_a_pid_that_was_given_to_somebody_else_is_left_alone(
    make: Make, firepool_home: Path
) -> None:
    first = await make().start()
    await first.serving()
    folder = Path(first.backend.shared_folder("pod-1"))
    agent = first.backend.agent("pod-1")
    await first.backend.stop()
    assert agent is not None
    bystander = await asyncio.create_subprocess_exec("sleep", "60")
    document = json.loads((folder / "agent.json").read_text())
    (folder / "agent.json").write_text(json.dumps({**document, "pid": bystander.pid}))
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "launched": None}))
    second = await make().start()
    assert await second.backend.list_pods() == []
    assert bystander.returncode is None
    # the real agent has lost its folder: the next look finds and ends it
    await second.backend.list_pods()
    assert processes.wait_for_exit(*agent, timeout_seconds=10)
    bystander.kill()
    await bystander.wait()


async def test_a_list_that_cannot_be_read_is_no_empty_fleet(
    make: Make, firepool_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = await make().start()

    def fails(path: str) -> list[str]:
        raise PermissionError(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", fails)
        with pytest.raises(BackendUnavailable):
            await watched.backend.list_pods()


async def test_a_long_home_still_has_a_socket_that_fits(make: Make, firepool_home: Path) -> None:
    run = firepool_home / "run"
    run.mkdir(exist_ok=True)
    deep = firepool_home / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    backend = LocalBackend(str(deep / "pods"), str(run), lambda uid: KEY)
    watched = await Watched(backend).start()
    try:
        await watched.serving()
        client = AgentClient(backend.address("pod-1"), 1)
        assert (await client.health())["uid"] == "uid-pod-1"
        client.close()
    finally:
        await backend.delete("pod-1")
        await backend.stop()
    assert os.listdir(run) == []


async def test_a_folder_that_cannot_be_removed_does_not_stop_anything(
    make: Make, firepool_home: Path
) -> None:
    watched = await make().start()
    await watched.serving()
    locked = Path(watched.backend.shared_folder("pod-1")) / "locked"
    locked.mkdir()
    (locked / "file").write_text("x")
    locked.chmod(0)
    await watched.backend.delete("pod-1")
    assert os.listdir(firepool_home / "state" / "pods") == []
    with contextlib.suppress(KeyError):
        watched.backend.address("pod-1")
        raise AssertionError("a deleted pod has no address")


def test_annotations_survive_a_torn_line_and_are_compacted(
    firepool_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(firepool_home / "annotations")
    first = AnnotationFile(path)
    first.load()
    assert first.current == {}
    first.merge({"owner": "ada", "job": "j1"})
    first.merge({"job": None, "tag": "k"})
    with open(path, "ab") as file:
        file.write(b'{"owner": "bo')
    second = AnnotationFile(path)
    second.load()
    assert second.current == {"owner": "ada", "tag": "k"}
    monkeypatch.setattr(annotation_files, "_COMPACT_BYTES", 200)
    for number in range(50):
        second.merge({"job": str(number)})
    assert os.path.getsize(path) < 400
    third = AnnotationFile(path)
    third.load()
    assert third.current == {"owner": "ada", "tag": "k", "job": "49"}


async def test_a_pod_is_ended_completely_at_any_moment_of_its_start(
    make: Make, firepool_home: Path
) -> None:
    watched = await make().start()
    for step in range(20):
        name = f"pod-{step}"
        await watched.backend.create(PodSpec(name, f"uid-{step}", "cpu-small"))
        await asyncio.sleep(step * 0.012)
        await asyncio.wait_for(watched.backend.delete(name), 15)
        left = [folder for _, folder in marked_processes() if str(firepool_home) in folder]
        assert left == [], f"after {step * 12} ms"
    assert os.listdir(firepool_home / "state" / "pods") == []
