"""A new broker over the same store, pods and agents."""

from typing import Any

import pytest
from firepool_broker.core import events as e
from firepool_broker.core.jobs import JobState
from firepool_broker.core.pods import Binding, ObservedPod, PodState
from world import World, failure, pool


def test_running_jobs_stay_on_their_pods_and_holds_stay() -> None:
    world = World(pool(min_count=1))
    world.tick(1)
    world.tick(3)
    world.open(tag="a")
    held = world.run(tag="a").bound[0][0]
    running = world.submit("bob")
    world.tick(3)
    on = world.on(running)
    world.restart()
    assert world.machine.tracker.pods[on].state is PodState.RUNNING
    assert world.machine.tracker.pods[held].state is PodState.HELD
    world.end(running)
    assert world.rows[running].state is JobState.SUCCEEDED
    world.open(tag="a")
    row = world.run(tag="a")
    assert (row.path, row.bound[0][0]) == ("warm", held)


def test_a_hold_goes_on_where_it_was() -> None:
    world = World(pool(caller_hold_seconds=100))
    used = world.run().bound[0][0]
    world.tick(60)
    world.restart()
    world.tick(39)
    assert used in world.pods
    world.tick(2)
    assert used not in world.pods


def test_a_job_that_ended_in_the_gap_is_settled_once_and_leaves_its_pod_owned() -> None:
    world = World(pool())
    job = world.submit()
    world.tick(3)
    on = world.on(job)
    world.restart()
    world.end(job)
    world.send(e.AttemptEnded(job, 1, failure("OOM")))
    assert world.rows[job].state is JobState.SUCCEEDED
    assert world.machine.tracker.pods[on].owner == "ann"
    assert world.run().bound[0][0] == on


def test_a_pod_gone_in_the_gap_is_lost_at_once() -> None:
    world = World(pool())
    cell, batch = world.submit(), world.submit(on_lost="requeue")
    world.tick(3)
    for job in (cell, batch):
        world.pods.pop(world.on(job))
    world.running.clear()
    world.restart()
    assert world.rows[cell].error == "PodLost"
    assert world.rows[batch].infra_retries == 1
    world.tick(3)
    assert world.rows[batch].runs == [1, 2]


def test_committed_but_never_handed_over_is_launched_again_without_a_loss() -> None:
    world = World(pool(), auto=False)
    job = world.submit()
    (name,) = world.pods
    world.pod_ready(name)
    launch = world.commits[0]
    row = world.rows[job]
    row.state, row.version, row.attempt, row.bound = JobState.RUNNING, 2, 1, launch.pods
    world.pods[name].binding = Binding(job, 1, "ann")
    world.restart()
    assert row.state is JobState.QUEUED
    assert [(one.attempt, one.pods[0][0]) for one in world.commits] == [(2, name)]
    world.commit(world.commits[0])
    assert row.runs == [2]


def test_a_claim_that_was_not_committed_is_forgotten() -> None:
    world = World(pool(), auto=False)
    job = world.submit()
    world.pod_ready(next(iter(world.pods)))
    assert world.commits
    world.restart()
    assert [one.job_id for one in world.commits] == [job]
    world.commit(world.commits[0])
    assert world.rows[job].runs == [1]


def test_a_recycled_pod_retires_although_the_broker_died_meanwhile() -> None:
    world = World(pool())
    world.run(tag="x")
    job = world.submit(tag="y")
    on = world.on(job)
    assert world.rows[job].path == "recycled"
    world.restart()
    world.tick(3)
    world.end(job)
    assert on not in world.pods


def test_sessions_count_as_open_for_one_period() -> None:
    world = World(pool())
    world.open(tag="a", client="ka")
    world.run(tag="a")
    world.restart()
    job = world.submit(tag="b")
    assert job not in world.running  # a's pod is not taken while its client may be coming back
    world.tick(3)
    assert world.rows[job].path == "new"
    world.tick(30)
    recycled = world.submit(tag="c", parallel=True)
    assert world.rows[recycled].path == "recycled"


def test_order_within_a_session_survives() -> None:
    world = World(pool())
    world.open(tag="a")
    first, second, third = (world.submit(tag="a") for _ in range(3))
    world.tick(3)
    world.restart()
    assert list(world.running) == [first]
    world.end(first)
    assert list(world.running) == [second]
    world.end(second)
    assert list(world.running) == [third]


def observed(**more: Any) -> ObservedPod:
    values: dict[str, Any] = {
        "name": "p",
        "uid": "u",
        "pool": "cpu-small",
        "created_at": 999_990.0,
        "ready": True,
        "agent_state": "idle",
        "attempts_started": 0,
    }
    return ObservedPod(**{**values, **more})


ANN = Binding("j", 1, "ann", "default", "a")
OWNED = {"owner": "ann", "tag": "a", "queue": "default"}
RELEASED = {**OWNED, "released_at": "999995", "hold_seconds": "100"}

WITNESSES = [
    ("never used", observed(), None, "IDLE"),
    (
        "not up yet",
        observed(ready=False, agent_state=None, attempts_started=None),
        None,
        "STARTING",
    ),
    ("held", observed(attempts_started=3, annotations=RELEASED), ANN, "HELD"),
    ("annotations lag behind the commit", observed(attempts_started=1), ANN, "HELD"),
    (
        "released without a note of when",
        observed(attempts_started=1, annotations=OWNED),
        ANN,
        "HELD",
    ),
    ("resetting", observed(attempts_started=1, agent_state="resetting"), ANN, "RESETTING"),
    ("annotated, never committed", observed(annotations=OWNED), None, "RETIRING"),
    ("ran, never committed", observed(attempts_started=1), None, "RETIRING"),
    ("two owners", observed(attempts_started=1, annotations={"owner": "bob"}), ANN, "RETIRING"),
    ("released, never ran", observed(annotations=RELEASED), ANN, "RETIRING"),
    ("unclean", observed(attempts_started=1, agent_state="unclean"), ANN, "RETIRING"),
    ("draining", observed(agent_state="draining"), None, "RETIRING"),
    ("runs what is over", observed(attempts_started=1, agent_state="running"), ANN, "RETIRING"),
    ("used and silent", observed(ready=False, annotations=RELEASED), ANN, "RETIRING"),
    ("its counter is unknown", observed(attempts_started=None), None, "RETIRING"),
    (
        "served its last",
        observed(attempts_started=1, annotations={**OWNED, "retire_after": "true"}),
        ANN,
        "RETIRING",
    ),
    (
        "portable and used",
        observed(attempts_started=1, annotations=OWNED, isolation="none"),
        ANN,
        "RETIRING",
    ),
    (
        "its hold ran out",
        observed(attempts_started=1, annotations={**RELEASED, "hold_seconds": "1"}),
        ANN,
        "RETIRING",
    ),
    (
        "garbled notes",
        observed(attempts_started=1, annotations={**OWNED, "released_at": "soon"}),
        ANN,
        "HELD",
    ),
]


@pytest.mark.parametrize(
    ("pod", "binding", "state"), [w[1:] for w in WITNESSES], ids=[w[0] for w in WITNESSES]
)
def test_three_witnesses(pod: ObservedPod, binding: Binding | None, state: str) -> None:
    world = World(pool(), auto=False)
    bindings = {} if binding is None else {"u": binding}
    world.machine.restore([pod], [], [], bindings, world.now)
    world.machine.validate_state(world.now)
    world.machine.handle(e.Tick(), world.now)
    found = world.machine.tracker.pods["p"]
    assert found.state.value == state
    if state in ("HELD", "RESETTING"):
        assert (found.owner, found.tag) == ("ann", "a")


def test_a_pod_of_a_pool_that_is_gone_is_removed() -> None:
    world = World(pool(), auto=False)
    out = world.machine.restore([observed(pool="old")], [], [], {}, world.now)
    assert [one.name for one in out if type(one).__name__ == "RetirePod"] == ["p"]


def test_a_job_of_a_pool_that_is_gone_fails() -> None:
    from firepool_broker.core.jobs import Job

    world = World(pool(), auto=False)
    out = world.machine.restore([], [Job("j", "ann", "old", 0.0)], [], {}, world.now)
    finished = [one for one in out if type(one).__name__ == "FinishJob"]
    assert finished[0].error.error_class == "ShapeImpossible"
    assert not world.machine.jobs
