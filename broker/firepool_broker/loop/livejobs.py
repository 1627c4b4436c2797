"""The jobs that are not finished, as they stand in memory beside their rows.

The row is the truth; what is kept here besides is what can be made again from it, or is only of
interest while the job lives (why it waits, which pods it has). A finished job is read from the
store.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct, field

from firepool_broker.api import types
from firepool_broker.core.jobs import Job, JobState
from firepool_broker.store.records import BindingRow, JobRow

__all__ = ["LiveJob", "LiveJobs", "core_job"]

_REQUESTS = msgspec.json.Decoder(types.JobRequest)


class LiveJob(Struct, eq=False):
    """One unfinished job.

    Attributes
    ----------
    row
        As committed last.
    request
        What was asked.
    pods
        Names of the pods of its running attempt.
    waiting
        Why it waits; None once it runs.
    session_dir
        Folder of its session, or its own when it has none.
    session_files
        ``kept`` or ``fresh``, as its session's folder was found.
    notes
        Lines that a person would want to know.
    silent
        Nothing can have been put into its output yet.
    insertion
        Its row is being stored meanwhile.
    """

    row: JobRow
    request: types.JobRequest
    session_dir: str
    session_files: types.SessionFiles = "kept"
    pods: tuple[str, ...] = ()
    waiting: types.Waiting | None = None
    notes: list[str] = field(default_factory=list)
    silent: bool = False
    insertion: asyncio.Task[tuple[JobRow, bool]] | None = None


class LiveJobs:
    """Finds unfinished jobs by id, and counts them by session."""

    def __init__(self) -> None:
        self._jobs: dict[str, LiveJob] = {}
        self._by_session: Counter[tuple[str, str]] = Counter()

    def add(self, job: LiveJob) -> None:
        """Take a job in."""
        self._jobs[job.row.id] = job
        if job.row.lease_tag is not None:
            self._by_session[job.row.caller, job.row.lease_tag] += 1

    def remove(self, job_id: str) -> LiveJob | None:
        """Let a finished job go."""
        job = self._jobs.pop(job_id, None)
        if job is not None and job.row.lease_tag is not None:
            key = (job.row.caller, job.row.lease_tag)
            self._by_session[key] -= 1
            if self._by_session[key] <= 0:
                del self._by_session[key]
        return job

    def get(self, job_id: str) -> LiveJob | None:
        """Return an unfinished job."""
        return self._jobs.get(job_id)

    def of_session(self, caller: str, tag: str) -> Iterable[LiveJob]:
        """Yield the unfinished jobs of a session."""
        if (caller, tag) in self._by_session:
            for job in self._jobs.values():
                if job.row.caller == caller and job.row.lease_tag == tag:
                    yield job

    def has_session(self, caller: str, tag: str) -> bool:
        """Tell whether a session has unfinished jobs."""
        return (caller, tag) in self._by_session

    def ids(self) -> set[str]:
        """Return the ids of all unfinished jobs."""
        return set(self._jobs)

    def __iter__(self) -> Any:
        return iter(list(self._jobs.values()))

    def __len__(self) -> int:
        return len(self._jobs)


def decode_request(row: JobRow) -> types.JobRequest:
    """Read a row's request."""
    return _REQUESTS.decode(row.request)


def core_job(
    row: JobRow,
    request: types.JobRequest,
    *,
    environment: str | None,
    bindings: Iterable[BindingRow] = (),
) -> Job:
    """Describe a row to the machine.

    Parameters
    ----------
    environment
        Digest of the environment that the job will run in.
    bindings
        Those of its last attempt.
    """
    job = Job(
        id=row.id,
        caller=row.caller,
        sku=row.sku or "",
        submitted_at=row.submitted_at,
        queue=row.queue,
        lease_tag=row.lease_tag,
        client_id=row.client_id,
        priority=row.priority,
        attached=row.attached,
        parallel=request.parallel,
        on_lost=request.on_lost,
        max_retries=request.max_retries,
        timeout_seconds=request.timeout_seconds,
        single_use=request.single_use,
        pods=request.pods,
        environment=environment,
        name=row.name,
        state=JobState(row.state),
        version=row.version,
        attempt=row.attempt,
        user_retries=row.user_retries,
        infra_retries=row.infra_retries,
        queued_at=row.queued_at,
        path=row.acquisition_path,
        reason=row.acquisition_reason,
    )
    if job.state is JobState.RUNNING:
        job.bound = tuple((binding.pod_name, binding.pod_uid) for binding in bindings)
        job.started_at = row.committed_at
    return job
