"""Floors, ceilings, keep-alives, holds and who gets the next slot."""

from firepool_broker.core import events as e
from firepool_broker.core.jobs import JobState
from world import World, pool


def test_the_floor_is_kept_and_restored() -> None:
    world = World(pool(min_count=2))
    world.tick(1)
    world.tick(3)
    assert world.states() == ["IDLE", "IDLE"]
    world.pod_gone(next(iter(world.pods)))
    assert world.states() == ["IDLE", "STARTING"]


def test_idle_pods_beyond_the_cap_go_after_their_keep_alive() -> None:
    world = World(pool(min_count=1, max_idle_count=2))
    jobs = [world.submit(f"c{n}") for n in range(5)]
    world.tick(1)
    for job in jobs:
        world.send(e.CancelRequested(job))
    world.tick(3)
    assert world.states() == ["IDLE"] * 5
    world.tick(595)
    assert world.states() == ["IDLE"] * 5
    world.tick(10)
    assert world.states() == ["IDLE"] * 2


def test_a_hold_that_runs_out_retires_its_pod() -> None:
    world = World(pool(caller_hold_seconds=100))
    used = world.run().bound[0][0]
    world.tick(99)
    assert world.states() == ["HELD"]
    world.tick(2)
    assert used not in world.pods
    assert world.retired[used] == "its hold ran out"


def test_no_second_wave_while_starts_are_pending() -> None:
    world = World(pool(), auto=False)
    for number in range(4):
        world.submit(f"c{number}")
    assert world.created == 4
    world.tick(200)
    assert world.created == 4


def test_step_bounds_creations_of_one_interval() -> None:
    world = World(pool(step=2), auto=False)
    for number in range(5):
        world.submit(f"c{number}")
    assert world.created == 2
    world.tick(31)
    assert world.created == 4
    world.tick(31)
    assert world.created == 5


def fill(world: World, callers: list[str]) -> dict[str, str]:
    """Run one job of each caller, so that each holds a pod."""
    jobs = {caller: world.submit(caller) for caller in callers}
    world.tick(3)
    for job in jobs.values():
        world.end(job)
    return {caller: world.rows[job].bound[0][0] for caller, job in jobs.items()}


def test_holds_are_broken_at_the_ceiling_only_after_their_tenure() -> None:
    world = World(pool(max_count=2))
    held = fill(world, ["ann", "bob"])
    job = world.submit("cat")
    world.tick(50)
    assert world.states() == ["HELD", "HELD"]
    world.tick(12)
    assert len(world.retired) == 1
    assert set(world.retired) <= set(held.values())
    world.tick(3)
    assert job in world.running
    assert world.rows[job].path == "new"


def test_a_pod_held_for_a_moment_is_not_broken() -> None:
    world = World(pool(max_count=1, max_idle_count=1))
    job = world.submit("ann")
    world.tick(100)
    world.end(job)
    world.submit("cat")
    world.tick(9)
    assert world.states() == ["HELD"]
    world.tick(2)
    assert world.states() == ["STARTING"]


def test_the_oldest_hold_goes_first_and_idle_owners_before_busy_ones() -> None:
    world = World(pool(max_count=3))
    held = fill(world, ["ann", "bob"])
    world.tick(60)
    again = world.submit("ann")
    world.tick(1)
    world.end(again)
    world.tick(20)
    assert world.run("dan").path == "new"
    world.submit("cat")
    world.tick(1)
    assert list(world.retired) == [held["bob"]]


def test_holds_beyond_their_owners_peak_go_before_older_ones() -> None:
    world = World(pool(max_count=3, caller_hold_seconds=300))
    one = world.submit("bob")
    world.tick(3)
    world.end(one)
    bobs = world.rows[one].bound[0][0]
    first, second = world.submit("ann"), world.submit("ann")
    world.tick(3)
    world.end(first)
    world.end(second)
    # For a whole hold period ann uses one pod at a time, and keeps the other's hold young.
    for _ in range(40):
        job = world.submit("ann")
        world.tick(1)
        world.end(job)
        job = world.submit("bob")
        world.tick(1)
        world.end(job)
        world.tick(6)
    assert world.machine.tracker.pods[bobs].state.value == "HELD"


def test_an_owner_with_a_queued_job_is_spared() -> None:
    world = World(pool(max_count=2), max_pods_per_caller=1)
    held = fill(world, ["ann", "bob"])
    world.tick(80)
    running = world.submit("ann", "t1")
    world.submit("ann", "t2")
    world.submit("cat")
    world.tick(1)
    assert held["bob"] in world.retired
    assert world.rows[running].state is JobState.RUNNING


def test_a_broken_hold_never_passes_to_another_caller() -> None:
    world = World(pool(max_count=1, max_idle_count=1))
    held = fill(world, ["ann"])
    world.tick(80)
    row = world.run("cat")
    assert row.bound[0][0] != held["ann"]
    assert row.path == "new"


def test_callers_who_pipeline_do_not_starve_a_third() -> None:
    world = World(pool(max_count=2))
    jobs = {caller: world.submit(caller) for caller in ("ann", "bob")}
    world.tick(70)
    third = world.submit("cat")
    asked = world.now
    for _ in range(200):
        for caller, job in list(jobs.items()):
            if job in world.running:
                following = world.submit(caller)
                world.end(job)
                jobs[caller] = following
        world.tick(1)
        if third in world.running:
            break
    assert third in world.running
    assert 55 <= world.now - asked <= 66
    world.end(third)
    world.tick(20)
    assert all(not row.error for row in world.rows.values())


def test_an_entitled_job_that_finds_another_pod_gives_the_slot_up() -> None:
    world = World(pool(max_count=1, max_idle_count=1))
    job = world.submit("ann")
    world.tick(70)
    third = world.submit("cat")
    world.tick(61)
    assert third in world.machine.supply.pools["cpu-small"].entitled
    world.send(e.CancelRequested(third))
    assert not world.machine.supply.pools["cpu-small"].entitled
    world.end(job)
    assert world.states() == ["HELD"]


def test_priority_before_waiting_time() -> None:
    world = World(pool(max_count=1, max_idle_count=1))
    first = world.submit()
    world.tick(3)
    low, high = world.submit(), world.submit(priority=5)
    world.end(first)
    assert list(world.running) == [high]
    world.end(high)
    assert list(world.running) == [low]


def test_a_hint_prefers_the_tag_and_retires_nothing() -> None:
    world = World(pool(tag_policy="hint"))
    used = world.run(tag="x").bound[0][0]
    for tag in ("y", "z", "x"):
        row = world.run(tag=tag)
        assert (row.path, row.bound[0][0]) == ("warm", used)
    crossed = world.run(tag="x", queue="other")
    assert (crossed.path, used in world.pods) == ("recycled", False)


def test_reuse_caps_retire_with_the_replacement_staged() -> None:
    world = World(pool(max_jobs_per_pod=3, min_count=1))
    world.tick(1)
    world.tick(3)
    used = {world.run().bound[0][0] for _ in range(2)}
    assert len(used) == 1
    job = world.submit()
    assert "STARTING" in world.states()
    world.tick(3)
    world.end(job)
    assert used.isdisjoint(world.pods)
    assert world.states() == ["IDLE"]


def test_a_lifetime_cap_waits_for_the_replacement() -> None:
    world = World(pool(max_pod_lifetime_seconds=300, min_count=1))
    world.tick(1)
    world.tick(3)
    (old,) = world.pods
    world.tick(290)
    assert old in world.pods
    world.tick(40)
    assert old not in world.pods
    assert world.states() == ["IDLE"]


def test_pods_of_an_old_template_go_one_at_a_time() -> None:
    from firepool_broker.core.pods import ObservedPod

    world = World(pool(min_count=2))
    old = [
        ObservedPod(f"old-{n}", f"u{n}", "cpu-small", world.now, True, "idle", 0, stale=True)
        for n in range(3)
    ]
    out = world.machine.restore(old, [], [], {}, world.now)
    retired = [one.name for one in out if type(one).__name__ == "RetirePod"]
    assert len(retired) == 1
    world.machine.validate_state(world.now)


def test_the_story_of_a_pod() -> None:
    world = World(pool())
    name = world.run().bound[0][0]
    lines = world.machine.tracker.story(name)
    edges = [line.split(" at ")[0] for line in lines]
    assert edges == [
        "created → STARTING",
        "STARTING → IDLE",
        "IDLE → ASSIGNED",
        "ASSIGNED → RUNNING",
        "RUNNING → RESETTING",
        "RESETTING → HELD",
    ]
    assert world.machine.tracker.stories()[name] == lines
