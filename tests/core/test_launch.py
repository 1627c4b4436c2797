"""From submission to a terminal state: the launch order, retries, cancellation, timeouts."""

from itertools import pairwise
from typing import Any

import pytest
from firepool_broker.core import events as e
from firepool_broker.core import instructions as i
from firepool_broker.core.errors import (
    Draining,
    IllegalTransition,
    NotAvailable,
    QuotaImpossible,
    UnknownSku,
)
from firepool_broker.core.jobs import Job, JobState
from firepool_broker.core.pods import TRANSITIONS, PodState
from firepool_broker.core.policy import Shape
from world import SUCCESS, World, failure, pool


def one_idle_pod(**knobs: Any) -> World:
    world = World(
        pool(min_count=1, max_count=knobs.pop("max_count", 8), max_idle_count=1),
        auto=False,
        **knobs,
    )
    world.tick(1)
    world.pod_ready(next(iter(world.pods)))
    return world


def kinds(out: list[i.Instruction]) -> list[str]:
    noise = (i.NotifyJob, i.NotifyPod, i.NotifySession)
    return [type(one).__name__ for one in out if not isinstance(one, noise)]


def test_nothing_is_launched_before_its_commit() -> None:
    world = one_idle_pod()
    job = world.submit()
    assert [one.job_id for one in world.commits] == [job]
    assert not world.running
    assert world.states() == ["ASSIGNED"]
    out = world.machine.handle(e.LaunchCommitted(job, 1), world.now)
    assert kinds(out) == ["AnnotatePod", "Launch"]


def test_a_lost_commit_leaves_the_pod_untouched_and_the_job_queued() -> None:
    world = one_idle_pod()
    job = world.submit()
    world.commit(world.commits[0], lost=True)
    assert world.states() == ["IDLE"]
    assert not world.commits
    world.tick(1.1)
    assert [(one.job_id, one.attempt) for one in world.commits] == [(job, 1)]
    world.commit(world.commits[0])
    assert world.rows[job].runs == [1]


def test_a_lost_commit_does_not_mark_a_boundary() -> None:
    world = one_idle_pod()
    first = world.submit(tag="x")
    world.commit(world.commits[0])
    world.end(first)
    world.submit(tag="y")
    assert world.commits[0].path == "recycled"
    world.commit(world.commits[0], lost=True)
    assert world.states()[0] == "HELD"
    assert not next(iter(world.machine.tracker.pods.values())).retire_after


def test_a_failed_launch_is_an_infrastructure_retry_on_another_pod() -> None:
    world = World(pool(min_count=1))
    world.tick(3)
    job = world.submit()
    world.tick(3)
    names = []
    for attempt in (1, 2, 3, 4):
        names.append(world.on(job))
        assert world.rows[job].attempt == attempt
        world.pods[names[-1]].active = None
        world.send(e.LaunchFailed(job, attempt, "LaunchFailed", "refused"))
        world.tick(3)
    assert len(set(names)) == 4
    row = world.rows[job]
    assert (row.state, row.error, row.infra_retries, row.user_retries) == (
        JobState.FAILED,
        "LaunchFailed",
        3,
        0,
    )


@pytest.mark.parametrize("error_class", ["PackageInvalid", "RequirementsFailed"])
def test_package_and_requirement_errors_fail_once_and_keep_the_pod(error_class: str) -> None:
    world = World(pool(min_count=1))
    world.tick(3)
    world.tick(3)
    job = world.submit(max_retries=3)
    on = world.on(job)
    world.pods[on].active = None
    world.send(e.LaunchFailed(job, 1, error_class, "no"))
    assert (world.rows[job].error, world.rows[job].attempt) == (error_class, 1)
    assert world.machine.tracker.pods[on].state is PodState.HELD
    again = world.submit(max_retries=3)
    world.end(again, failure(error_class))
    assert (world.rows[again].error, world.rows[again].attempt) == (error_class, 1)
    assert on in world.pods


@pytest.mark.parametrize("error_class", ["OOM", "NonZeroExit", "Signal", "Timeout"])
def test_user_failures_use_the_users_budget(error_class: str) -> None:
    world = World(pool(min_count=1))
    world.tick(3)
    world.tick(3)
    job = world.submit(max_retries=1)
    world.end(job, failure(error_class))
    assert (world.rows[job].state, world.rows[job].user_retries) == (JobState.RUNNING, 1)
    world.end(job, failure(error_class))
    row = world.rows[job]
    assert (row.state, row.error, row.attempt, row.infra_retries) == (
        JobState.FAILED,
        error_class,
        2,
        0,
    )


@pytest.mark.parametrize(
    ("on_lost", "state", "error"),
    [("fail", JobState.FAILED, "PodLost"), ("requeue", JobState.QUEUED, None)],
)
def test_a_pod_gone_under_its_job(on_lost: Any, state: JobState, error: str | None) -> None:
    world = one_idle_pod()
    job = world.submit(on_lost=on_lost, max_retries=5)
    world.commit(world.commits[0])
    world.pod_gone(world.on(job))
    row = world.rows[job]
    assert (row.state, row.error, row.user_retries) == (state, error, 0)
    assert row.infra_retries == (1 if on_lost == "requeue" else 0)


def test_a_pod_gone_between_claim_and_commit_runs_nothing() -> None:
    world = one_idle_pod()
    job = world.submit()
    world.pod_gone(next(iter(world.pods)))
    world.commit(world.commits[0])
    row = world.rows[job]
    assert (row.state, row.infra_retries, row.runs) == (JobState.QUEUED, 1, [])
    world.pod_ready(next(iter(world.pods)))
    world.commit(world.commits[0])
    assert row.runs == [2]


def test_replayed_and_outdated_events_change_nothing() -> None:
    world = one_idle_pod()
    job = world.submit(max_retries=1)
    world.commit(world.commits[0])
    world.end(job, failure("NonZeroExit"))
    for event in (
        e.AttemptEnded(job, 1, SUCCESS),
        e.LaunchCommitted(job, 1),
        e.LaunchLost(job, 1),
        e.LaunchFailed(job, 1),
        e.AttemptEnded("nobody", 1, SUCCESS),
        e.PodGone("nobody"),
        e.PodUnhealthy("nobody", ""),
        e.ResetFinished("nobody", True),
        e.RetireRequested("nobody"),
        e.CancelRequested("nobody"),
        e.InterruptRequested("nobody"),
        e.JobReady(job),
        e.SessionEnded("ann", "nobody"),
        e.SessionConnected("ann", "nobody", "k"),
        e.SessionDisconnected("ann", "nobody", "k"),
        e.JobSubmitted(world.machine.jobs[job]),
    ):
        assert kinds(world.send(event)) == [], event


@pytest.mark.parametrize("clean", [True, False])
def test_a_reset_decides_about_the_pod_never_about_the_job(clean: bool) -> None:
    world = World(pool(min_count=1))
    world.tick(3)
    world.tick(3)
    job = world.submit()
    on = world.on(job)
    world.end(job, clean=clean)
    assert world.rows[job].state is JobState.SUCCEEDED
    assert (on in world.pods) is clean
    world.tick(3)
    row = world.run()
    assert row.state is JobState.SUCCEEDED
    if not clean:
        assert "unclean" in world.retired[on]


def test_a_reset_that_never_ends_costs_the_pod() -> None:
    world = one_idle_pod()
    job = world.submit()
    world.commit(world.commits[0])
    on = world.on(job)
    world.running.pop(job)
    world.send(e.AttemptEnded(job, 1, SUCCESS))
    world.tick(119)
    assert on not in world.retired
    world.tick(2)
    assert "reset did not end" in world.retired[on]


def test_cancelling_in_each_state() -> None:
    world = one_idle_pod(max_count=1)
    pending = world.submit(state=JobState.PENDING)
    assigned = world.submit()
    queued = world.submit()
    for job in (pending, queued):
        world.send(e.CancelRequested(job))
        assert (world.rows[job].state, world.rows[job].error) == (JobState.CANCELLED, "Cancelled")
    world.send(e.CancelRequested(assigned))
    assert world.rows[assigned].state is JobState.QUEUED
    world.commit(world.commits[0])
    assert (world.rows[assigned].state, world.rows[assigned].runs) == (JobState.CANCELLED, [])
    assert world.states() == ["HELD"]
    running = world.submit()
    world.commit(world.commits[0])
    world.send(e.CancelRequested(running))
    world.send(e.CancelRequested(running))
    assert [(one.job_id, one.signal) for one in world.signals] == [(running, "terminate")]
    world.end(running, failure("NonZeroExit"))
    assert (world.rows[running].state, world.rows[running].error) == (
        JobState.CANCELLED,
        "Cancelled",
    )


def test_cancelling_while_the_commit_is_lost() -> None:
    world = one_idle_pod()
    job = world.submit()
    world.send(e.CancelRequested(job))
    world.commit(world.commits[0], lost=True)
    assert world.rows[job].state is JobState.CANCELLED
    assert world.states() == ["IDLE"]


def test_a_job_that_succeeded_before_its_cancellation_has_succeeded() -> None:
    world = one_idle_pod()
    job = world.submit()
    world.commit(world.commits[0])
    world.send(e.CancelRequested(job))
    world.end(job)
    assert world.rows[job].state is JobState.SUCCEEDED


def test_a_cancelled_job_is_not_retried_when_its_pod_dies() -> None:
    world = one_idle_pod()
    job = world.submit(on_lost="requeue", max_retries=3)
    world.commit(world.commits[0])
    world.send(e.CancelRequested(job))
    world.pod_gone(world.on(job))
    assert world.rows[job].state.terminal


@pytest.mark.parametrize(
    ("kill", "outcome", "error"),
    [
        (False, failure("Interrupted"), "Interrupted"),
        (False, failure("NonZeroExit", ename="KeyboardInterrupt"), "Interrupted"),
        (True, {"exit_code": None, "signal": 9, "error": None}, "Interrupted"),
        (True, failure("Signal"), "Interrupted"),
        (False, failure("NonZeroExit", ename="ValueError"), "NonZeroExit"),
        (False, failure("OOM"), "OOM"),
        (False, SUCCESS, None),
    ],
)
def test_interrupts(kill: bool, outcome: dict[str, Any], error: str | None) -> None:
    world = one_idle_pod()
    job = world.submit()
    world.commit(world.commits[0])
    world.send(e.InterruptRequested(job, kill))
    assert world.signals[-1].signal == ("kill" if kill else "interrupt")
    world.end(job, outcome)
    assert world.rows[job].error == error
    if error == "Interrupted":
        assert world.rows[job].state is JobState.CANCELLED
    assert "HELD" in world.states()


def test_interrupting_a_job_that_does_not_run_cancels_it() -> None:
    world = World(pool(), auto=False)
    job = world.submit()
    world.send(e.InterruptRequested(job))
    assert (world.rows[job].state, world.rows[job].error) == (JobState.CANCELLED, "Interrupted")


@pytest.mark.parametrize("where", ["pool", "job"])
def test_a_job_queued_for_too_long_fails(where: str) -> None:
    world = World(pool(max_queue_seconds=30 if where == "pool" else None), auto=False)
    job = world.submit(queue_timeout_seconds=30 if where == "job" else None)
    world.tick(29)
    assert world.rows[job].state is JobState.QUEUED
    world.tick(2)
    assert (world.rows[job].state, world.rows[job].error) == (JobState.FAILED, "QueueTimeout")


def test_a_pending_job_waits_for_its_package() -> None:
    world = one_idle_pod()
    job = world.submit(state=JobState.PENDING)
    refused = world.submit(state=JobState.PENDING)
    assert world.waiting[job].reason == "package"
    assert not world.commits
    out = world.send(e.JobReady(job))
    assert kinds(out) == ["CommitQueued", "CommitLaunch"]
    world.commit(world.commits[0])
    world.send(e.JobImpossible(refused, "PackageInvalid", "a symlink"))
    assert world.rows[refused].error == "PackageInvalid"


def test_a_stuck_start_is_given_up_and_tried_again_later() -> None:
    world = World(pool(start_timeout_seconds=60), auto=False)
    job = world.submit()
    (name,) = world.pods
    world.tick(61)
    assert "not ready" in world.retired[name]
    assert world.waiting[job].reason in ("no_capacity", "pod_starting")
    world.tick(10)
    assert len(world.pods) == 2


def test_failing_starts_pause_longer_and_longer() -> None:
    world = World(pool(), auto=False)
    job = world.submit()
    times = []
    for _ in range(6):
        (name,) = world.pods
        times.append(world.now)
        world.pods.pop(name)
        world.send(e.PodStartFailed(name, "no memory left"))
        assert not world.pods
        world.tick(0.1)
        assert "no memory left" in world.waiting[job].message
        while not world.pods:
            world.tick(0.5)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert gaps == sorted(gaps)
    assert gaps[0] < 2 < 10 < gaps[-1]


def test_portable_pods_serve_one_job() -> None:
    world = World(pool(), auto=False)
    job = world.submit()
    (name,) = world.pods
    world.pods[name].ready = True
    world.send(e.PodReady(name, "u", "none"))
    world.commit(world.commits[0])
    assert len(world.pods) == 2  # the replacement is staged at once
    world.running.pop(job)
    world.pods[name].active = None
    world.send(e.AttemptEnded(job, 1, SUCCESS))
    assert world.retired[name] == "it serves one job only"


def test_single_use_jobs_get_a_pod_of_their_own() -> None:
    world = World(pool(min_count=1))
    world.tick(3)
    world.tick(3)
    job = world.submit(single_use=True)
    assert job not in world.running
    world.tick(3)
    row = world.rows[job]
    on = world.on(job)
    assert row.path == "single_use"
    world.end(job)
    assert on not in world.pods
    cancelled = world.submit(single_use=True)
    made = [name for name in world.pods if world.machine.tracker.pods[name].single_use]
    world.send(e.CancelRequested(cancelled))
    assert world.retired.keys() >= set(made)


def test_a_retired_pod_finishes_its_job_first() -> None:
    world = one_idle_pod()
    job = world.submit()
    world.commit(world.commits[0])
    on = world.on(job)
    world.send(e.RetireRequested(on, "an operator"))
    assert world.machine.tracker.pods[on].state is PodState.DRAINING
    assert on not in world.retired
    world.end(job)
    assert world.retired[on] == "an operator"
    assert world.rows[job].state is JobState.SUCCEEDED


def test_an_unhealthy_pod_takes_no_more_work() -> None:
    world = one_idle_pod()
    job = world.submit()
    world.commit(world.commits[0])
    on = world.on(job)
    world.send(e.PodUnhealthy(on, "it lied"))
    world.submit()
    assert not any(name == on for one in world.commits for name, _ in one.pods)
    world.end(job)
    assert world.retired[on] == "it lied"


def test_a_retirement_is_repeated_until_it_is_done() -> None:
    world = one_idle_pod()
    (name,) = world.pods
    world.send(e.RetireRequested(name))
    before = sum(isinstance(one, i.RetirePod) for one in world.log)
    world.tick(95)
    assert sum(isinstance(one, i.RetirePod) for one in world.log) == before + 3


def test_a_pod_that_comes_up_too_late_is_removed() -> None:
    world = World(pool(min_count=1), auto=False)
    world.tick(1)
    (name,) = world.pods
    world.send(e.RetireRequested(name))
    assert kinds(world.send(e.PodReady(name, "u"))) == ["RetirePod"]
    assert kinds(world.send(e.PodReady("stranger", "u"))) == ["RetirePod"]


def test_draining_takes_nothing_new_and_lets_jobs_finish() -> None:
    world = World(pool(min_count=2))
    world.tick(3)
    world.tick(3)
    job = world.submit()
    world.send(e.DrainRequested())
    assert set(world.states()) == {"DRAINING"}
    with pytest.raises(Draining):
        world.submit()
    assert not world.machine.drained
    world.end(job)
    assert world.rows[job].state is JobState.SUCCEEDED
    assert world.machine.drained


def test_refusals_at_submit() -> None:
    world = World(pool(shape=Shape(gpu=4)), max_pods_per_caller=3, max_gpus_per_caller=2)
    with pytest.raises(UnknownSku, match="did you mean 'cpu-small'"):
        world.machine.admit(Job("a", "ann", "cpu-smal", 0.0))
    for job in (
        Job("a", "ann", "cpu-small", 0.0, pods=9),
        Job("a", "ann", "cpu-small", 0.0, pods=4),
    ):
        with pytest.raises(QuotaImpossible) as refusal:
            world.machine.admit(job)
        assert refusal.value.field == "pods"
    with pytest.raises(QuotaImpossible, match="4 GPUs"):
        world.machine.admit(Job("a", "ann", "cpu-small", 0.0))
    with pytest.raises(QuotaImpossible):
        world.machine.admit(Job("a", "ann", "cpu-small", 0.0, pods=0))
    with pytest.raises(NotAvailable):
        World().machine.admit(Job("a", "ann", "cpu-small", 0.0, pods=2))


def test_an_illegal_edge_names_the_story() -> None:
    world = one_idle_pod()
    (pod,) = world.machine.tracker.pods.values()
    with pytest.raises(IllegalTransition, match="STARTING → IDLE") as error:
        world.machine.tracker.hold(pod, world.now, 1.0)
    assert (error.value.start, error.value.finish) == ("IDLE", "HELD")


def test_every_pod_state_can_leave() -> None:
    for state in PodState:
        reached = {finish for start, finish in TRANSITIONS if start is state}
        assert bool(reached) is (state is not PodState.GONE)


def test_waiting_lines_say_why_and_how_long() -> None:
    world = World(pool(max_count=1, max_idle_count=1))
    job = world.submit()
    assert world.waiting[job].as_dict() == {
        "reason": "pod_starting",
        "message": "waiting for a pod: 1 starting, ~2 s",
        "position": 1,
        "estimate_seconds": 2.0,
    }
    world.tick(3)
    second = world.submit("bob")
    assert world.waiting[second].reason == "no_capacity"
    assert world.waiting[second].message.startswith("waiting for a pod: 1 of 1 busy")
    first = world.submit("cat", priority=1)
    assert world.machine.waiting(first, world.now).position == 1
    assert world.machine.waiting(second, world.now).reason == "priority"
    assert world.machine.waiting(second, world.now).position == 2
    assert world.machine.waiting(job, world.now) is None


def test_limits_block_their_caller_alone() -> None:
    world = World(pool(min_count=2), max_pods_per_caller=1)
    world.tick(3)
    world.tick(3)
    first = world.submit(parallel=True, tag="nb")
    blocked = world.submit(parallel=True)
    assert world.machine.waiting(blocked, world.now).reason == "quota"
    assert "1 pods in use (nb: 1)" in world.machine.waiting(blocked, world.now).message
    other = world.submit("bob")
    assert other in world.running
    world.end(first)
    assert blocked in world.running


def test_ten_thousand_submits_lose_none() -> None:
    world = World(pool(min_count=1), auto=False)
    machine = world.machine
    for number in range(10_000):
        machine.handle(e.JobSubmitted(Job(f"j{number}", "ann", "cpu-small", world.now)), world.now)
    assert len(machine.jobs) == len(machine.queue.jobs) == 10_000
    assert machine.waiting("j9999", world.now).position == 10_000
    machine.validate_state(world.now)
