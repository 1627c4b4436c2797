"""A world around the machine: it executes instructions against plain memory and answers them.

The store, the pods and the agents here are the simplest things that keep the seam's promises. Each
instruction becomes a pending answer; a test lets answers happen in whatever order and with whatever
outcome it likes. The world also keeps its own witness accounts (who ran where), from which the
invariants are checked without asking the machine.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from random import Random
from typing import Any

from firepool_broker.core import Machine
from firepool_broker.core import events as e
from firepool_broker.core import instructions as i
from firepool_broker.core import pods as notes
from firepool_broker.core.jobs import Job, JobState
from firepool_broker.core.pods import Binding, ObservedPod
from firepool_broker.core.policy import PoolPolicies, PoolPolicy, Shape
from firepool_broker.core.sessions import Session

SUCCESS: dict[str, Any] = {"exit_code": 0, "signal": None, "error": None}
START_SECONDS = 2.0


def pool(name: str = "cpu-small", **knobs: Any) -> PoolPolicy:
    return PoolPolicy(name, knobs.pop("shape", Shape(cpu=2, memory_gib=4)), **knobs)


def failure(error_class: str, **more: Any) -> dict[str, Any]:
    return {"exit_code": 1, "signal": None, "error": {"class": error_class, "message": "", **more}}


@dataclass
class WorldPod:
    name: str
    pool: str
    created_at: float
    uid: str = ""
    ready: bool = False
    agent_state: str = "idle"
    attempts_started: int = 0
    annotations: dict[str, str] = field(default_factory=dict)
    ran: list[tuple[str, str | None]] = field(default_factory=list)
    """(caller, tag) of each attempt that ran on it."""
    active: str | None = None
    leaving: bool = False
    binding: Binding | None = None


@dataclass
class Row:
    """A job's row in the store."""

    job: Job
    state: JobState
    version: int
    attempt: int = 0
    user_retries: int = 0
    infra_retries: int = 0
    bound: tuple[tuple[str, str], ...] = ()
    path: str | None = None
    reason: str | None = None
    error: str | None = None
    runs: list[int] = field(default_factory=list)


class World:
    """Drives a machine.

    With ``auto`` every launch commit, hand-off and pod start is answered at once; otherwise they
    wait in ``commits``, ``launches`` and ``starting`` for the test.
    """

    def __init__(self, *pools: PoolPolicy, auto: bool = True, seed: int = 1, **knobs: Any) -> None:
        self.policies = PoolPolicies(
            pools or (pool(),), default=(pools[0] if pools else pool()).name, **knobs
        )
        self.auto = auto
        self.now = 1_000_000.0
        self.random = Random(seed)
        self.machine = Machine(self.policies, Random(seed))
        self.pods: dict[str, WorldPod] = {}
        self.rows: dict[str, Row] = {}
        self.commits: list[i.CommitLaunch] = []
        self.running: dict[str, i.Launch] = {}
        self.log: list[i.Instruction] = []
        self.signals: list[i.SignalAttempt] = []
        self.sessions: dict[tuple[str, str], Session] = {}
        self.waiting: dict[str, i.Waiting] = {}
        self.retired: dict[str, str] = {}
        self.created = 0

    # -------------------------------------------------------------- driving

    def send(self, event: e.Event) -> list[i.Instruction]:
        out = self.machine.handle(event, self.now)
        self._take(out)
        self.machine.validate_state(self.now)
        self.check()
        return out

    def tick(self, seconds: float = 0.0) -> None:
        """Let time pass, waking the machine whenever it asked for it."""
        end = self.now + seconds
        while True:
            wake = self.machine.next_wakeup()
            if wake is None or wake > end:
                break
            self.now = max(self.now, wake)
            self.send(e.Tick())
        self.now = end
        self.send(e.Tick())

    def submit(self, caller: str = "ann", tag: str | None = None, **more: Any) -> str:
        job_id = more.pop("id", f"j{len(self.rows)}")
        more.setdefault("sku", self.policies.pools[0].name)
        session = self.sessions.get((caller, tag or ""))
        if session is not None:
            more.setdefault("client_id", session.client_id)
        job = Job(job_id, caller, submitted_at=self.now, lease_tag=tag, version=1, **more)
        self.machine.admit(job)
        self.rows[job_id] = Row(copy.copy(job), job.state, 1)
        self.send(e.JobSubmitted(job))
        return job_id

    def open(self, caller: str = "ann", tag: str = "nb", client: str = "k1", **more: Any) -> None:
        session = Session(caller, tag, client, **more)
        self.sessions[session.key] = copy.copy(session)
        self.send(e.SessionOpened(session))
        self.send(e.SessionConnected(caller, tag, client))

    def close(self, caller: str = "ann", tag: str = "nb", client: str = "k1") -> None:
        self.send(e.SessionDisconnected(caller, tag, client))

    def goodbye(self, caller: str = "ann", tag: str = "nb", how: Any = "shutdown") -> None:
        if how == "shutdown":
            self.sessions.pop((caller, tag), None)
        self.send(e.SessionEnded(caller, tag, how))

    def pod_ready(self, name: str) -> None:
        pod = self.pods[name]
        pod.ready = True
        pod.uid = f"uid-{name}"
        self.send(e.PodReady(name, pod.uid))

    def pod_gone(self, name: str, reason: str = "died") -> None:
        pod = self.pods.pop(name)
        if pod.active is not None:
            self.running.pop(pod.active, None)
        self.send(e.PodGone(name, reason))

    def commit(self, launch: i.CommitLaunch, lost: bool = False) -> None:
        """Apply or lose a launch commit."""
        self.commits.remove(launch)
        row = self.rows[launch.job_id]
        assert row.version == launch.version, f"{launch} is conditional on a version that is gone"
        if lost:
            self.send(e.LaunchLost(launch.job_id, launch.attempt, row.version))
            return
        assert row.state is JobState.QUEUED
        row.state, row.version, row.attempt = JobState.RUNNING, row.version + 1, launch.attempt
        row.bound, row.path, row.reason = launch.pods, launch.path, launch.reason
        for name, _ in launch.pods:
            if name in self.pods:
                job = row.job
                self.pods[name].binding = Binding(
                    job.id, launch.attempt, job.caller, job.queue, job.lease_tag
                )
        self.send(e.LaunchCommitted(launch.job_id, launch.attempt))

    def end(self, job_id: str, outcome: dict[str, Any] | None = None, clean: bool = True) -> None:
        """End a running attempt and, unless its pod retires, its reset."""
        launch = self.running.pop(job_id)
        pod = self.pods[launch.pods[0][0]]
        pod.active = None
        pod.agent_state = "resetting"
        self.send(e.AttemptEnded(job_id, launch.attempt, SUCCESS if outcome is None else outcome))
        if pod.name in self.pods and not pod.leaving:
            self.reset(pod.name, clean)

    def reset(self, name: str, clean: bool = True) -> None:
        pod = self.pods[name]
        pod.agent_state = "idle" if clean else "unclean"
        self.send(e.ResetFinished(name, clean, None if clean else "a file stayed"))

    def run(self, caller: str = "ann", tag: str | None = None, **more: Any) -> Row:
        """Submit a job, let whatever it needs happen, and end it."""
        job_id = self.submit(caller, tag, **more)
        for _ in range(200):
            if job_id in self.running:
                break
            self.tick(1.0)
        self.tick(0.5)
        self.end(job_id)
        return self.rows[job_id]

    def restart(self) -> None:
        """Kill the broker and start another one over the same store, pods and agents."""
        self.commits.clear()
        pods = [
            ObservedPod(
                pod.name,
                pod.uid or f"uid-{pod.name}",
                pod.pool,
                pod.created_at,
                pod.ready,
                pod.agent_state if pod.ready else None,
                pod.attempts_started if pod.ready else None,
                dict(pod.annotations),
            )
            for pod in self.pods.values()
        ]
        for pod in self.pods.values():
            pod.uid = pod.uid or f"uid-{pod.name}"
        jobs = []
        for row in self.rows.values():
            if row.state.terminal:
                continue
            job = copy.copy(row.job)
            job.state, job.version, job.attempt = row.state, row.version, row.attempt
            job.user_retries, job.infra_retries = row.user_retries, row.infra_retries
            job.bound, job.path, job.reason = row.bound, row.path, row.reason
            jobs.append(job)
        bindings = {pod.uid: pod.binding for pod in self.pods.values() if pod.binding}
        self.machine = Machine(self.policies, Random(self.random.random()))
        for pod in self.pods.values():
            pod.leaving = False
        self._take(
            self.machine.restore(
                pods, jobs, [copy.copy(one) for one in self.sessions.values()], bindings, self.now
            )
        )
        self.machine.validate_state(self.now)
        self.check()
        # What the loop does next: ask the agents about every RUNNING job, the resets about theirs.
        for row in list(self.rows.values()):
            if row.state is JobState.RUNNING and row.job.id not in self.running:
                self.send(e.LaunchFailed(row.job.id, row.attempt, "LaunchFailed", "unknown", False))
        for pod in list(self.pods.values()):
            if pod.agent_state == "resetting" and pod.name in self.machine.tracker.pods:
                self.reset(pod.name)

    # -------------------------------------------------------------- executing

    def _take(self, out: list[i.Instruction]) -> None:
        self.log += out
        for one in out:
            match one:
                case i.CreatePod(name, pool_name, _):
                    assert name not in self.pods
                    self.created += 1
                    self.pods[name] = WorldPod(name, pool_name, self.now)
                case i.RetirePod(name, reason):
                    self.retired[name] = reason
                    if name in self.pods:
                        self.pods[name].leaving = True
                case i.CommitQueued(job_id, version):
                    row = self.rows[job_id]
                    assert row.version == version
                    row.state, row.version = JobState.QUEUED, version + 1
                case i.CommitLaunch():
                    self.commits.append(one)
                case i.Launch(job_id, attempt, pods):
                    self._launch(one, job_id, attempt, pods[0][0])
                case i.SignalAttempt():
                    self.signals.append(one)
                case i.CommitRequeue(job_id, version, user, infra, _):
                    row = self.rows[job_id]
                    assert (row.version, row.state) == (version, JobState.RUNNING)
                    row.state, row.version, row.bound = JobState.QUEUED, version + 1, ()
                    row.user_retries, row.infra_retries = user, infra
                    self.running.pop(job_id, None)
                case i.FinishJob(job_id, version, state, error, _):
                    row = self.rows[job_id]
                    assert (row.version, row.state.terminal) == (version, False)
                    row.state, row.version = state, version + 1
                    row.error = error.error_class if error is not None else None
                    self.running.pop(job_id, None)
                case i.AnnotatePod(name, annotations):
                    if name in self.pods:
                        kept = self.pods[name].annotations
                        for key, value in annotations.items():
                            kept.pop(key, None) if value is None else kept.update({key: value})
                case i.NotifyJob(job_id, waiting):
                    self.waiting[job_id] = waiting
                case _:
                    pass
        if self.auto:
            self._answer()

    def _launch(self, launch: i.Launch, job_id: str, attempt: int, name: str) -> None:
        row = self.rows[job_id]
        assert (row.state, row.attempt) == (JobState.RUNNING, attempt), "launched before its commit"
        assert attempt not in row.runs, "an attempt was handed over twice"
        row.runs.append(attempt)
        if name not in self.pods:
            return
        pod = self.pods[name]
        assert pod.ready, f"{name} was not ready for {job_id}"
        assert pod.active is None, f"{name} still runs {pod.active}"
        assert not pod.leaving, f"{name} was leaving"
        job = row.job
        owners = {caller for caller, _ in pod.ran}
        assert owners <= {job.caller}, f"{name} of {owners} was given to {job.caller}"
        if self.machine.policies.get(pod.pool).tag_policy == "retire" and pod.ran:
            crossed = {tag for _, tag in pod.ran}
            assert len(crossed) == 1, f"{name} crossed a boundary twice"
            (tag,) = crossed
            if tag != job.lease_tag:
                assert row.path == "recycled"
                key = (job.caller, tag or "")
                assert key not in self.machine.tracker.open_sessions, f"{name} left an open session"
        pod.ran.append((job.caller, job.lease_tag))
        pod.active, pod.agent_state = job_id, "running"
        pod.attempts_started += 1
        self.running[job_id] = launch

    def _answer(self) -> None:
        while self.commits:
            self.commit(self.commits[0])
        for pod in [pod for pod in self.pods.values() if pod.leaving]:
            if pod.active is None and pod.name in self.pods:
                self.pod_gone(pod.name, "removed")
        for pod in list(self.pods.values()):
            if not pod.ready and self.now - pod.created_at >= START_SECONDS:
                self.pod_ready(pod.name)

    # -------------------------------------------------------------- watching

    def check(self) -> None:
        """Check what must hold after every step, from this side of the seam."""
        claims: dict[str, str] = {}
        for launch in self.commits:
            for name, _ in launch.pods:
                assert name not in claims, (
                    f"{name} was claimed by {claims[name]} and {launch.job_id}"
                )
                claims[name] = launch.job_id
        for policy in self.policies.pools:
            mine = [pod for pod in self.pods.values() if pod.pool == policy.name]
            assert len(mine) <= policy.max_count, f"{policy.name} is above its ceiling"
        limit = self.policies.max_pods_per_caller
        if limit is not None:
            used: dict[str, int] = {}
            living = [one.job_id for one in self.commits if one.pods[0][0] in self.pods]
            for job_id in {*self.running, *living}:
                caller = self.rows[job_id].job.caller
                used[caller] = used.get(caller, 0) + 1
            assert all(count <= limit for count in used.values()), f"a limit was overrun: {used}"

    def on(self, job_id: str) -> str:
        """Return the pod a job runs on."""
        return self.running[job_id].pods[0][0]

    def states(self) -> list[str]:
        return sorted(pod.state.value for pod in self.machine.tracker.pods.values())


__all__ = ["START_SECONDS", "SUCCESS", "World", "WorldPod", "failure", "notes", "pool"]
