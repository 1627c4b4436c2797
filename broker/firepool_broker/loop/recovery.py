"""A broker starts: what the last one left is taken up before anything new is dispatched.

The tracker is rebuilt from the backend's pods and the store. Every job that ran is asked after at
its agent: one that still runs is followed on from the last stored message, one that finished
meanwhile is finalised from the agent's journal without a second run, one that its agent never
heard of did not run. What is gone with its pod, the machine decides. A list of pods that cannot
be read aborts the start: it is never taken for an empty fleet.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from firepool_broker.backends import Backend, PodRecord
from firepool_broker.core.instructions import Instruction
from firepool_broker.core.jobs import Job, JobState
from firepool_broker.core.machine import Machine
from firepool_broker.core.pods import Binding, ObservedPod
from firepool_broker.launch.agent_client import AgentLied, AgentRefused, AgentUnreachable
from firepool_broker.loop.attempts import Attempts
from firepool_broker.loop.fleet import Fleet
from firepool_broker.loop.jobs import Jobs
from firepool_broker.loop.livejobs import LiveJob, core_job, decode_request
from firepool_broker.loop.sessions import Sessions
from firepool_broker.store.records import BindingRow, JobRow
from firepool_broker.store.store import Store

__all__ = ["Recovered", "recover"]

log = logging.getLogger(__name__)

_HEALTH_TIMEOUT_SECONDS = 2.0


class Recovered(Struct, frozen=True):
    """What was found.

    Attributes
    ----------
    instructions
        What the machine wants done about it.
    resuming
        Starts to follow what runs; to be called once events are handled.
    pods, jobs, sessions
        How many there are.
    """

    instructions: list[Instruction]
    resuming: Callable[[], None]
    pods: int
    jobs: int
    sessions: int


async def recover(
    machine: Machine,
    store: Store,
    backend: Backend,
    fleet: Fleet,
    jobs: Jobs,
    attempts: Attempts,
    sessions: Sessions,
    now: float,
) -> Recovered:
    """Rebuild the machine.

    Raises
    ------
    BackendUnavailable
        When the pods could not be listed.
    StoreError
        When the store could not be read.
    """
    restored_sessions = await sessions.restore(now)
    records = await backend.list_pods()
    for record in records:
        fleet.adopt(record.name, record.pool)
    healths = await asyncio.gather(*(_health(fleet, record) for record in records))
    observed = [
        _observed(record, health, backend.revision)
        for record, health in zip(records, healths, strict=True)
    ]
    rows = await store.unfinished_jobs()
    bound = await store.bindings_of_jobs(row.id for row in rows if row.state == "RUNNING")
    owners = await store.bindings_by_pod_uid(record.uid for record in records)
    core_jobs = [_take_in(row, bound.get(row.id, []), jobs, sessions) for row in rows]
    instructions = machine.restore(
        pods=observed,
        jobs=core_jobs,
        sessions=restored_sessions,
        bindings={uid: _binding(row) for uid, row in owners.items()},
        now=now,
    )
    present = {record.name for record in records}

    def resume() -> None:
        followed = set()
        for job in core_jobs:
            if job.state is JobState.RUNNING and job.bound and job.bound[0][0] in present:
                followed.add(job.bound[0][0])
                attempts.resume(job.id, job.attempt, job.bound[0][0])
        for record, pod in zip(records, observed, strict=True):
            if pod.agent_state == "resetting":
                fleet.await_reset(pod.name)
            elif record.serving and not pod.ready and pod.name not in followed:
                # nobody waits for it, and nobody can know what it does
                fleet.condemn(pod.name, "its agent lives but does not answer")

    return Recovered(instructions, resume, len(observed), len(rows), len(restored_sessions))


async def _health(fleet: Fleet, record: PodRecord) -> dict[str, Any] | None:
    if not record.serving:
        return None
    try:
        return await fleet.client(record.name).health(_HEALTH_TIMEOUT_SECONDS)
    except (AgentUnreachable, AgentRefused, AgentLied) as error:
        log.warning("pod %s lives but does not answer: %s", record.name, error)
        return None


def _observed(record: PodRecord, health: dict[str, Any] | None, revision: str) -> ObservedPod:
    return ObservedPod(
        name=record.name,
        uid=record.uid,
        pool=record.pool,
        created_at=record.created_at,
        ready=health is not None,
        agent_state=None if health is None else str(health["state"]),
        attempts_started=None if health is None else int(health["attempts_started"]),
        annotations={name: str(value) for name, value in record.annotations.items()},
        isolation=record.isolation or "process",
        stale=record.revision != revision,
    )


def _take_in(row: JobRow, bindings: list[BindingRow], jobs: Jobs, sessions: Sessions) -> Job:
    request = decode_request(row)
    setting = sessions.setting(row.caller, row.lease_tag, row.id)
    live = LiveJob(
        row=row,
        request=request,
        session_dir=setting.session_dir,
        pods=tuple(binding.pod_name for binding in bindings),
    )
    jobs.add(live)
    digest = request.environment.digest if request.environment is not None else None
    environment = digest or sessions.environment(row.caller, row.lease_tag)
    return core_job(row, request, environment=environment, bindings=bindings)


def _binding(row: BindingRow) -> Binding:
    return Binding(row.job_id, row.attempt, row.caller, row.queue, row.lease_tag)
