"""Random interleavings of everything that can happen, with the invariants checked at every step.

After each step the world checks its own accounts (who ran where, what was claimed, how many pods
there are) and the machine compares every index with a recomputation. At the end of a run everything
is let finish: no job may be left, and the floors must be restored.
"""

from __future__ import annotations

import os
from typing import Any

from firepool_broker.core import events as e
from firepool_broker.core.jobs import JobState
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from world import World, failure, pool

CALLERS = st.sampled_from(["ann", "bob"])
TAGS = st.sampled_from(["a", "b"])
CLIENTS = st.sampled_from(["k1", "k2"])
OUTCOMES = st.sampled_from(
    [
        None,
        None,
        failure("NonZeroExit"),
        failure("OOM"),
        failure("RequirementsFailed"),
        failure("LaunchFailed"),
    ]
)


class Interleavings(RuleBasedStateMachine):
    @initialize(
        floor=st.integers(0, 2),
        ceiling=st.integers(1, 4),
        cap=st.sampled_from([None, 2]),
        limit=st.sampled_from([None, 1, 2]),
        policy=st.sampled_from(["retire", "hint"]),
        lifetime=st.sampled_from([None, 200.0]),
    )
    def build(
        self, floor: int, ceiling: int, cap: Any, limit: Any, policy: Any, lifetime: Any
    ) -> None:
        self.world = World(
            pool(
                min_count=min(floor, ceiling),
                max_count=ceiling,
                max_idle_count=min(2, ceiling),
                max_jobs_per_pod=cap,
                max_pod_lifetime_seconds=lifetime,
                tag_policy=policy,
                step=2,
                caller_hold_seconds=120.0,
            ),
            pool("other", max_count=2, max_idle_count=1),
            auto=False,
            max_pods_per_caller=limit,
        )
        self.world.send(e.Tick())

    def pick(self, data: Any, items: Any) -> Any:
        return data.draw(st.sampled_from(sorted(items)))

    # ------------------------------------------------------------ callers

    @rule(
        caller=CALLERS,
        tag=st.one_of(st.none(), TAGS),
        queue=st.sampled_from(["default", "default", "q"]),
        sku=st.sampled_from(["cpu-small", "cpu-small", "other"]),
        attached=st.booleans(),
        parallel=st.booleans(),
        on_lost=st.sampled_from(["fail", "requeue"]),
        max_retries=st.integers(0, 1),
        priority=st.sampled_from([0, 0, 1]),
        single_use=st.sampled_from([False, False, False, True]),
        pending=st.sampled_from([False, False, False, True]),
        environment=st.sampled_from(["e1", "e2"]),
    )
    def submit(self, caller: str, tag: str | None, pending: bool, **more: Any) -> None:
        state = JobState.PENDING if pending else JobState.QUEUED
        self.world.submit(caller, tag, state=state, **more)

    @rule(data=st.data(), kill=st.booleans(), interrupt=st.booleans())
    @precondition(lambda self: self.unfinished())
    def stop(self, data: Any, kill: bool, interrupt: bool) -> None:
        job = self.pick(data, self.unfinished())
        self.world.send(e.InterruptRequested(job, kill) if interrupt else e.CancelRequested(job))

    @rule(data=st.data(), refused=st.booleans())
    @precondition(lambda self: self.unfinished(JobState.PENDING))
    def package_arrives(self, data: Any, refused: bool) -> None:
        job = self.pick(data, self.unfinished(JobState.PENDING))
        self.world.send(e.JobImpossible(job, "PackageInvalid", "") if refused else e.JobReady(job))

    @rule(caller=CALLERS, tag=TAGS, client=CLIENTS, environment=st.sampled_from(["e1", "e2"]))
    def open_session(self, caller: str, tag: str, client: str, environment: str) -> None:
        self.world.open(caller, tag, client, environment=environment)

    @rule(caller=CALLERS, tag=TAGS, client=CLIENTS)
    def lose_contact(self, caller: str, tag: str, client: str) -> None:
        self.world.close(caller, tag, client)

    @rule(caller=CALLERS, tag=TAGS, how=st.sampled_from(["shutdown", "restart"]))
    def say_goodbye(self, caller: str, tag: str, how: str) -> None:
        self.world.goodbye(caller, tag, how)

    @rule(caller=CALLERS, tag=TAGS)
    def release(self, caller: str, tag: str) -> None:
        self.world.send(e.ReleaseRequested(caller, tag))

    # ------------------------------------------------------------ commits and attempts

    @rule(data=st.data(), lost=st.sampled_from([False, False, False, True]))
    @precondition(lambda self: self.world.commits)
    def commit(self, data: Any, lost: bool) -> None:
        launch = data.draw(st.sampled_from(self.world.commits))
        self.world.commit(launch, lost)

    @rule(data=st.data(), outcome=OUTCOMES, clean=st.sampled_from([True, True, True, False]))
    @precondition(lambda self: self.world.running)
    def end(self, data: Any, outcome: Any, clean: bool) -> None:
        self.world.end(self.pick(data, self.world.running), outcome, clean)

    @rule(data=st.data(), suspect=st.booleans())
    @precondition(lambda self: self.world.running)
    def launch_fails(self, data: Any, suspect: bool) -> None:
        job = self.pick(data, self.world.running)
        launch = self.world.running.pop(job)
        pod = self.world.pods[launch.pods[0][0]]
        pod.active, pod.agent_state = None, "idle"
        pod.attempts_started -= 1
        pod.ran.pop()
        self.world.send(e.LaunchFailed(job, launch.attempt, "LaunchFailed", "refused", suspect))

    # ------------------------------------------------------------ pods

    @rule(data=st.data(), fails=st.sampled_from([False, False, False, True]))
    @precondition(lambda self: self.starting())
    def start(self, data: Any, fails: bool) -> None:
        name = self.pick(data, self.starting())
        if fails:
            del self.world.pods[name]
            self.world.send(e.PodStartFailed(name, "no room"))
        else:
            self.world.pod_ready(name)

    @rule(data=st.data())
    @precondition(lambda self: self.world.pods)
    def pod_dies(self, data: Any) -> None:
        self.world.pod_gone(self.pick(data, self.world.pods))

    @rule(data=st.data())
    @precondition(lambda self: self.leaving())
    def pod_leaves(self, data: Any) -> None:
        self.world.pod_gone(self.pick(data, self.leaving()), "removed")

    @rule(data=st.data(), healthy=st.booleans())
    @precondition(lambda self: self.world.pods)
    def distrust(self, data: Any, healthy: bool) -> None:
        name = self.pick(data, self.world.pods)
        self.world.send(e.RetireRequested(name) if healthy else e.PodUnhealthy(name, "it lied"))

    # ------------------------------------------------------------ the broker and time

    @rule()
    def restart(self) -> None:
        self.world.restart()

    @rule(seconds=st.sampled_from([0.0, 0.5, 3.0, 15.0, 31.0, 65.0, 130.0, 700.0]))
    def wait(self, seconds: float) -> None:
        self.world.tick(seconds)

    @rule()
    def clock_steps_back(self) -> None:
        self.world.now -= 2.0

    # ------------------------------------------------------------ helpers

    def unfinished(self, *states: JobState) -> list[str]:
        return [
            row.job.id
            for row in self.world.rows.values()
            if not row.state.terminal and (not states or row.state in states)
        ]

    def starting(self) -> list[str]:
        return [pod.name for pod in self.world.pods.values() if not pod.ready and not pod.leaving]

    def leaving(self) -> list[str]:
        return [pod.name for pod in self.world.pods.values() if pod.leaving and not pod.active]

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        for job in self.unfinished(JobState.PENDING):
            world.send(e.JobReady(job))
        # Everything goes well from now on; withheld jobs end when their sessions lapse.
        deadline = world.now + 2000
        while self.unfinished() and world.now < deadline:
            for launch in list(world.commits):
                world.commit(launch)
            for job in list(world.running):
                world.end(job)
            for name in self.leaving():
                world.pod_gone(name, "removed")
            for name in self.starting():
                world.pod_ready(name)
            world.tick(1.0)
        assert not self.unfinished(), f"starved: {self.unfinished()}"
        for _ in range(120):
            for name in self.leaving():
                world.pod_gone(name, "removed")
            for name in self.starting():
                world.pod_ready(name)
            world.tick(1.0)
        for policy in world.policies.pools:
            bucket = world.machine.tracker.buckets[policy.name]
            serving = len(bucket.pods) - bucket.single_use - bucket.leaving
            assert serving >= policy.min_count, f"the floor of {policy.name} was not restored"


Interleavings.TestCase.settings = settings(
    max_examples=60 * int(os.environ.get("FIREPOOL_STRESS", "1")),
    stateful_step_count=50,
    deadline=None,
    # Shrinking fifty steps takes minutes; a failure prints every step and its seed as it is.
    report_multiple_bugs=False,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
test_interleavings = Interleavings.TestCase
