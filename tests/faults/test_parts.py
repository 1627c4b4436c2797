"""Parts that fail in one way each, inside an otherwise real broker in the test's own loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from firepool_broker import embedded
from firepool_broker.api import types
from firepool_broker.application import Broker
from firepool_broker.backends.local import LocalBackend
from firepool_broker.config import BrokerConfig, load
from firepool_broker.identity.identities import Identity
from firepool_broker.store.errors import IdempotencyConflict, StoreFull
from firepool_broker.store.outputs import OutputStore
from firepool_broker.store.store import Store
from firepool_broker.testing import (
    AgentLies,
    CommitFails,
    PodDiesBetweenReadyAndClaim,
    PodNeverReady,
    this_environment,
)

ADA = Identity(caller="ada", operator=True)
BURST = 10_000 if float(os.environ.get("FIREPOOL_STRESS", "1")) >= 1 else 2_000


class Running:
    """A broker in this loop, and what a client would do."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.service = broker.service

    async def session(self, tag: str = "kernel-1") -> types.SessionOpened:
        return await self.service.open_session(
            ADA,
            types.SessionRequest(
                lease_tag=tag,
                client_id="client-1",
                environment=msgspec.convert(this_environment(), types.Environment),
                env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")},
            ),
        )

    async def submit(self, code: str = "print(1)", **fields: Any) -> types.JobView:
        request = types.JobRequest(
            kind="cell", code=code, lease_tag="kernel-1", client_id="client-1", **fields
        )
        return (await self.service.submit(ADA, request, None))[0]

    async def wait(self, job_id: str, timeout_seconds: float = 60) -> types.JobView:
        async def ended() -> types.JobView:
            last = None
            async for event in self.service.output(ADA, job_id, 0):
                last = event
            assert last is not None
            assert last.event == "end"
            return msgspec.json.decode(last.data, type=types.JobView)

        return await asyncio.wait_for(ended(), timeout_seconds)

    async def run(self, code: str = "print(1)", **fields: Any) -> types.JobView:
        return await self.wait((await self.submit(code, **fields)).id)


Start = Callable[..., Any]


@pytest.fixture
async def start(firepool_home: Path) -> AsyncIterator[Start]:
    running: list[Broker] = []

    async def begin(
        backend: type[LocalBackend] = LocalBackend,
        store: type[Store] = Store,
        config: BrokerConfig | None = None,
    ) -> Running:
        class Faulty(Broker):
            backend_class = backend
            store_class = store

        broker = Faulty(config or load(None), embedded.home())
        await broker.start()
        running.append(broker)
        return Running(broker)

    yield begin
    for broker in running:
        machine = broker.dispatcher.machine
        machine.validate_state(broker.dispatcher.now())
        broker.end(drain=True)
        await asyncio.wait_for(broker.run(), 60)


async def test_a_pod_that_never_serves_is_replaced_and_its_job_runs(start: Start) -> None:
    class Impatient(PodNeverReady):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "start_timeout_seconds": 1.0})

    running = await start(backend=Impatient)
    await running.session()
    job = await running.run()
    assert job.state == "SUCCEEDED"
    assert job.retries == types.Retries()


@pytest.mark.parametrize("on_lost", ["fail", "requeue"])
async def test_a_pod_that_dies_under_its_claim_costs_an_infrastructure_retry_at_most(
    start: Start, on_lost: str
) -> None:
    """Its journal says that the attempt never began, so that a cell may be launched again."""
    running = await start(backend=PodDiesBetweenReadyAndClaim)
    await running.session()
    job = await running.run(on_lost=on_lost)
    assert job.state == "SUCCEEDED"
    assert job.retries.user == 0
    assert job.retries.infra <= 1


async def test_an_agent_that_is_not_what_was_started_never_gets_a_job(start: Start) -> None:
    running = await start(backend=AgentLies)
    await running.session()
    job = await running.run()
    assert job.state == "SUCCEEDED"
    assert job.attempt == 1
    stories = running.broker.dispatcher.machine.tracker
    assert all(pod.jobs_run for pod in stories.pods.values() if pod.job)


async def test_a_launch_that_is_not_committed_runs_nothing_and_is_tried_again(
    start: Start,
) -> None:
    running = await start(store=CommitFails)
    opened = await running.session()
    code = (
        "import os\n"
        "with open(os.path.join(os.environ['FIREPOOL_SESSION_DIR'], 'runs'), 'a') as f:\n"
        "    f.write(os.environ['FIREPOOL_ATTEMPT'] + '\\n')\n"
    )
    job = await running.run(code)
    assert job.state == "SUCCEEDED"
    assert (job.attempt, job.retries.infra) == (1, 0)
    assert (Path(opened.session_dir) / "runs").read_text().split() == [f"{job.id}:1"]


async def test_output_that_the_disk_refuses_is_asked_for_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start()
    await running.session()
    await running.run()
    real = OutputStore.append
    refusals = iter([True, False, True])

    async def append(self: OutputStore, job_id: str, messages: Any, *, attempt: Any = None) -> int:
        if attempt is not None and next(refusals, False):
            raise StoreFull("no space left")
        return await real(self, job_id, messages, attempt=attempt)

    monkeypatch.setattr(OutputStore, "append", append)
    job = await running.submit("for i in range(200): print(i)")
    ended = await running.wait(job.id)
    assert ended.state == "SUCCEEDED"
    text = ""
    async for event in running.service.output(ADA, job.id, 0):
        if event.event == "stream":
            text += msgspec.json.decode(event.data)["text"]
    assert text == "".join(f"{i}\n" for i in range(200))


async def test_an_unclean_reset_costs_the_pod_and_no_job(start: Start) -> None:
    running = await start()
    await running.session()
    before = await running.run("print(1)")
    code = (
        "import os, subprocess\n"
        "path = os.path.join(os.environ['TMPDIR'], 'stays')\n"
        "open(path, 'w').close()\n"
        "print(path, subprocess.run(['chattr', '+i', path]).returncode)\n"
    )
    job = await running.submit(code)
    ended = await running.wait(job.id)
    text = ""
    async for event in running.service.output(ADA, job.id, 0):
        if event.event == "stream":
            text += msgspec.json.decode(event.data)["text"]
    assert ended.state == "SUCCEEDED"
    if not text.rstrip().endswith(" 0"):
        pytest.skip("root: this file system has no immutable files")
    after = await running.run("print(2)")
    assert after.state == "SUCCEEDED"
    assert after.pods != before.pods
    assert after.retries == types.Retries()


async def test_a_broker_that_another_one_replaced_ends_itself(start: Start) -> None:
    running = await start()
    await running.session()
    await running.run()
    other = await Store.open(Path(running.broker.paths.state_dir) / "firepool.db")
    await other.acquire_leadership("another", 60, 0.0, predecessor_is_dead=True)
    await other.close()
    job = running.submit()
    with contextlib.suppress(Exception):
        await job
    await asyncio.wait_for(running.broker.lifetime.ending(), 10)
    assert running.broker.deposed


async def test_ten_thousand_submits_in_a_burst_lose_none(start: Start) -> None:
    running = await start()
    await running.session()
    ids: set[str] = set()

    async def many(count: int) -> None:
        for _ in range(count):
            job = await running.submit("", attached=False)
            ids.add(job.id)

    await asyncio.gather(*(many(BURST // 100) for _ in range(100)))
    assert len(ids) == BURST
    for job_id in ids - set(running.broker.dispatcher.machine.jobs):
        row = await running.broker.store.get_job(job_id)
        assert row is not None
        if job_id not in running.broker.jobs.live.ids():
            assert row.state == "SUCCEEDED"
    await asyncio.gather(*(running.service.cancel(ADA, job_id) for job_id in ids))
    await asyncio.wait_for(_no_jobs(running), 60)
    assert len(await running.broker.store.unfinished_jobs()) == 0


async def _no_jobs(running: Running) -> None:
    while len(running.broker.jobs.live):
        await asyncio.sleep(0.05)


async def test_one_id_submitted_many_times_at_once_is_one_job_that_runs_once(
    start: Start,
) -> None:
    running = await start()
    opened = await running.session()
    code = (
        "import os\n"
        "with open(os.path.join(os.environ['FIREPOOL_SESSION_DIR'], 'runs'), 'a') as f:\n"
        "    f.write(os.environ['FIREPOOL_ATTEMPT'] + '\\n')\n"
    )
    fields: dict[str, Any] = {"id": "mine", "sku": "cpu-small"}
    views = await asyncio.gather(*(running.submit(code, **fields) for _ in range(20)))
    assert {view.id for view in views} == {"mine"}
    assert (await running.wait("mine")).state == "SUCCEEDED"
    again = await running.submit(code, **fields)  # finished long ago
    assert (again.state, again.attempt) == ("SUCCEEDED", 1)
    with pytest.raises(IdempotencyConflict):
        await running.submit("print(2)", **fields)
    assert (Path(opened.session_dir) / "runs").read_text().split() == ["mine:1"]
    machine = running.broker.dispatcher.machine
    assert not machine.jobs
    assert (await running.run(code, sku="cpu-small")).state == "SUCCEEDED"


async def test_a_job_whose_row_was_refused_never_runs(start: Start) -> None:
    class Full(Store):
        failing = False

        async def insert_job(self, row: Any, *, idempotency_key: Any = None) -> Any:
            if self.failing:
                raise StoreFull("no space left")
            return await super().insert_job(row, idempotency_key=idempotency_key)

    running = await start(store=Full)
    opened = await running.session()
    await running.run()
    running.broker.store.failing = True
    code = "import os; open(os.environ['FIREPOOL_SESSION_DIR'] + '/ran', 'w')"
    for _ in range(3):
        with pytest.raises(StoreFull):
            await running.submit(code, sku="cpu-small")
    running.broker.store.failing = False
    assert (await running.run(sku="cpu-small")).state == "SUCCEEDED"
    assert not (Path(opened.session_dir) / "ran").exists()
    assert not running.broker.dispatcher.machine.jobs


async def test_a_refused_row_is_submitted_again_under_its_id_and_runs(start: Start) -> None:
    class FullOnce(Store):
        failing = 0

        async def insert_job(self, row: Any, *, idempotency_key: Any = None) -> Any:
            if self.failing > 0:
                self.failing -= 1
                raise StoreFull("no space left")
            return await super().insert_job(row, idempotency_key=idempotency_key)

    running = await start(store=FullOnce)
    await running.session()
    await running.run()
    for number in range(5):
        running.broker.store.failing = 1
        fields: dict[str, Any] = {"id": f"again-{number}", "sku": "cpu-small"}
        tries = [running.submit("print(1)", **fields) for _ in range(3)]
        answers = await asyncio.gather(*tries, return_exceptions=True)
        assert sum(isinstance(answer, StoreFull) for answer in answers) == 1, answers
        assert (await running.wait(f"again-{number}")).state == "SUCCEEDED"
    assert not running.broker.dispatcher.machine.jobs
