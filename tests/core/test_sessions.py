"""Sessions and the pods they keep: two kernels, a killed one, a restarted one, a closed lid."""

import pytest
from firepool_broker.core import instructions as i
from firepool_broker.core.jobs import JobState
from world import World, pool


def prepared(world: World) -> list[str]:
    return [one.lease_tag for one in world.log if isinstance(one, i.PreparePod)]


def warm_world(**knobs: object) -> World:
    world = World(pool(min_count=1, **knobs))
    world.tick(1)
    world.tick(3)
    assert world.states() == ["IDLE"]
    return world


def test_two_kernels_fifty_cells_each_in_turn() -> None:
    world = warm_world()
    world.open(tag="a", client="ka")
    world.open(tag="b", client="kb")
    pods: dict[str, set[str]] = {"a": set(), "b": set()}
    for cell in range(50):
        for tag in ("a", "b"):
            row = world.run(tag=tag)
            assert row.state is JobState.SUCCEEDED
            pods[tag].add(row.bound[0][0])
            assert row.path == "warm" if cell else row.path in ("warm", "new")
    assert len(pods["a"]) == len(pods["b"]) == 1
    assert not pods["a"] & pods["b"]
    assert not world.retired


def test_a_new_kernel_after_a_killed_one_takes_its_pod_once() -> None:
    world = warm_world()
    world.open(tag="old", client="k1")
    old = world.run(tag="old").bound[0][0]
    world.close(tag="old", client="k1")
    world.open(tag="new", client="k2")
    job = world.submit(tag="new")
    assert world.rows[job].path == "recycled"
    assert world.on(job) == old
    # The replacement is staged while the job still runs.
    assert world.states() == ["RUNNING", "STARTING"]
    world.tick(3)
    assert world.states() == ["IDLE", "RUNNING"]
    world.end(job)
    assert old not in world.pods
    row = world.run(tag="new")
    assert (row.path, row.bound[0][0] != old) == ("warm", True)
    assert "boundary" in world.retired[old]


def test_a_replacement_is_not_staged_above_the_ceiling() -> None:
    world = warm_world(max_count=1, max_idle_count=1)
    world.open(tag="old")
    world.run(tag="old")
    world.close(tag="old")
    world.open(tag="new", client="k2")
    job = world.submit(tag="new")
    assert world.rows[job].path == "recycled"
    assert world.states() == ["RUNNING"]
    world.end(job)
    assert world.states() == ["STARTING"]


def test_a_kernel_shut_down_gives_its_pods_up_at_once() -> None:
    world = warm_world()
    world.open(tag="a")
    used = world.run(tag="a").bound[0][0]
    world.goodbye(tag="a")
    assert used not in world.pods
    assert world.retired[used] == "its session ended"
    assert world.states() == ["STARTING"]


def test_a_goodbye_during_a_reset_or_a_detached_job_retires_afterwards() -> None:
    world = warm_world()
    world.open(tag="a")
    job = world.submit(tag="a", attached=False)
    on = world.on(job)
    world.goodbye(tag="a")
    assert world.rows[job].state is JobState.RUNNING
    world.tick(3)
    world.end(job)
    assert world.rows[job].state is JobState.SUCCEEDED
    assert on not in world.pods


def test_a_restart_cancels_cells_and_keeps_the_pod() -> None:
    world = warm_world()
    world.open(tag="a")
    running = world.submit(tag="a")
    queued = world.submit(tag="a")
    on = world.on(running)
    world.goodbye(tag="a", how="restart")
    assert (world.rows[queued].state, world.rows[queued].error) == (
        JobState.CANCELLED,
        "SessionClosed",
    )
    assert world.signals[-1].signal == "terminate"
    world.end(running, {"exit_code": None, "signal": 15, "error": None})
    assert (world.rows[running].state, world.rows[running].error) == (
        JobState.CANCELLED,
        "SessionClosed",
    )
    world.open(tag="a", client="k2")
    row = world.run(tag="a")
    assert (row.path, row.bound[0][0]) == ("warm", on)


def test_a_killed_kernel_loses_nothing_that_runs() -> None:
    world = warm_world()
    world.open(tag="a")
    running = world.submit(tag="a")
    queued = world.submit(tag="a")
    world.close(tag="a")
    assert world.machine.waiting(queued, world.now).reason == "withheld"
    world.tick(29)
    assert world.rows[queued].state is JobState.QUEUED
    world.tick(2)
    assert world.rows[queued].error == "SessionClosed"
    world.end(running)
    assert world.rows[running].state is JobState.SUCCEEDED
    assert "HELD" in world.states()


def test_a_returning_client_gets_its_withheld_jobs_run() -> None:
    world = warm_world()
    world.open(tag="a")
    first, second = world.submit(tag="a"), world.submit(tag="a")
    world.close(tag="a")
    world.end(first)
    assert second not in world.running
    world.tick(20)
    world.open(tag="a")
    assert second in world.running


def test_another_client_under_the_tag_cancels_the_queued_jobs_of_the_old_one() -> None:
    world = warm_world()
    world.open(tag="a")
    first, second = world.submit(tag="a"), world.submit(tag="a")
    detached = world.submit(tag="a", attached=False, parallel=True)
    world.open(tag="a", client="k2")
    assert world.rows[second].error == "SessionClosed"
    assert world.rows[first].state is JobState.RUNNING
    assert not world.rows[detached].state.terminal
    # What the replaced client says afterwards is not heard.
    world.close(tag="a", client="k1")
    assert world.machine.sessions.is_open(("ann", "a"))


def test_a_lapsed_session_is_whole_again_when_its_client_returns() -> None:
    world = warm_world()
    world.open(tag="a")
    on = world.run(tag="a").bound[0][0]
    world.close(tag="a")
    world.tick(60)
    world.open(tag="a")
    row = world.run(tag="a")
    assert (row.path, row.bound[0][0]) == ("warm", on)


def test_open_sessions_of_one_caller_never_cross() -> None:
    world = warm_world()
    world.open(tag="a", client="ka")
    world.run(tag="a")
    world.open(tag="b", client="kb")
    job = world.submit(tag="b")
    assert job not in world.running
    world.tick(3)
    assert world.rows[job].path == "new"


def test_a_tag_nobody_registered_is_only_a_tag() -> None:
    world = warm_world()
    used = world.run(tag="x").bound[0][0]
    job = world.submit(tag="y")
    assert (world.rows[job].path, world.on(job)) == ("recycled", used)


def test_attached_jobs_of_a_session_run_in_order_on_one_pod() -> None:
    world = warm_world()
    world.open(tag="a")
    jobs = [world.submit(tag="a") for _ in range(4)]
    world.tick(10)
    assert list(world.running) == jobs[:1]
    waiting = world.machine.waiting(jobs[2], world.now)
    assert (waiting.reason, waiting.message) == (
        "session_order",
        "waiting for the 2 jobs before it in this session",
    )
    on = set()
    for job in jobs:
        assert list(world.running) == [job]
        on.add(world.on(job))
        world.end(job)
    assert len(on) == 1
    assert world.created == 1


def test_parallel_and_detached_jobs_overtake() -> None:
    world = warm_world()
    world.open(tag="a")
    world.submit(tag="a")
    world.submit(tag="a")
    parallel = world.submit(tag="a", parallel=True)
    detached = world.submit(tag="a", attached=False)
    world.tick(3)
    assert parallel in world.running
    assert detached in world.running


def test_a_spare_is_prepared_for_the_first_cell() -> None:
    world = warm_world()
    world.open(tag="a", environment="e1")
    assert prepared(world) == ["a"]
    world.open(tag="a", environment="e2")
    assert prepared(world) == ["a", "a"]
    idle = next(iter(world.pods))
    assert world.run(tag="a").bound[0][0] == idle
    world.open(tag="a", environment="e3")
    assert prepared(world) == ["a", "a", "a"]


def test_a_spare_is_prepared_when_a_pod_becomes_ready() -> None:
    world = World(pool(min_count=1))
    world.open(tag="a", environment="e1")
    assert prepared(world) == []
    world.tick(3)
    assert prepared(world) == ["a"]


def test_the_pod_prepared_for_a_session_is_left_to_it() -> None:
    world = World(pool(min_count=2))
    world.tick(1)
    world.tick(3)
    world.open(tag="a", client="ka", environment="e1")
    mine = next(one.name for one in world.log if isinstance(one, i.PreparePod))
    assert world.run("bob", tag="b").bound[0][0] != mine
    assert world.run(tag="a").bound[0][0] == mine


def test_another_environment_costs_no_pod() -> None:
    world = warm_world()
    used = world.run(tag="x", environment="e1").bound[0][0]
    row = world.run(tag="x", environment="e2")
    assert (row.path, row.bound[0][0]) == ("warm", used)


def test_release_gives_held_pods_back() -> None:
    from firepool_broker.core import events as e

    world = warm_world()
    world.open(tag="a")
    used = world.run(tag="a").bound[0][0]
    world.send(e.ReleaseRequested("ann", "a"))
    assert used not in world.pods
    assert world.machine.sessions.is_open(("ann", "a"))


@pytest.mark.parametrize("how", ["shutdown", "restart"])
def test_a_goodbye_while_the_commit_is_under_way(how: str) -> None:
    world = World(pool(min_count=1), auto=False)
    world.tick(1)
    world.pod_ready(next(iter(world.pods)))
    world.open(tag="a")
    job = world.submit(tag="a")
    world.goodbye(tag="a", how=how)
    assert world.rows[job].state is JobState.QUEUED
    world.commit(world.commits[0])
    assert (world.rows[job].state, world.rows[job].error) == (JobState.CANCELLED, "SessionClosed")
    assert not world.rows[job].runs


def test_idle_since() -> None:
    world = warm_world()
    assert world.machine.idle_since is not None
    world.open(tag="a")
    assert world.machine.idle_since is None
    world.close(tag="a")
    world.tick(29)
    assert world.machine.idle_since is None
    world.tick(2)
    assert world.machine.idle_since is not None
    job = world.submit()
    assert world.machine.idle_since is None
    world.end(job)
    assert world.machine.idle_since == world.now
