"""``/v1/jobs``: submit, look up, cancel, interrupt, follow."""

from __future__ import annotations

from typing import ClassVar, get_args

from firepool_broker.api import errors, types
from firepool_broker.api.handlers import Handler
from firepool_broker.api.operations import EVENTS, FROM, LAST_EVENT_ID, Operation, Parameter
from firepool_broker.api.validation import check_job, check_name

_STATES = get_args(types.JobState)
_LIST_LIMIT = 1000
_NUMBER_LIMIT = 2**53


class Jobs(Handler):
    """All jobs of the caller."""

    OPERATIONS: ClassVar = {
        "POST": Operation(
            summary="Submit a job; the same id or key with the same request gives the same job.",
            request=types.JobRequest,
            answer=types.JobView,
            status=201,
            also=((200, "The same request was seen before."),),
            parameters=(
                Parameter("follow", "integer", "1: answer with the job's output stream."),
                Parameter(
                    "Idempotency-Key",
                    "string",
                    "Makes a blind retry safe: the same key gives the same job.",
                    place="header",
                ),
            ),
        ),
        "GET": Operation(
            summary="List jobs, newest first.",
            answer=types.JobList,
            parameters=(
                Parameter("state", "string", "Only jobs in this state."),
                Parameter("lease_tag", "string", "Only jobs of this session."),
                Parameter("limit", "integer", "At most this many (100 when left out)."),
                Parameter("before", "string", "Id of the last job seen."),
            ),
        ),
    }

    async def post(self) -> None:
        """Submit a job."""
        follow = self.query_integer("follow", low=0, high=1, default=0)
        request = self.body(types.JobRequest)
        if request.lease_tag is None:
            request.lease_tag = self.identity.session
        check_job(request)
        key = self.request.headers.get("Idempotency-Key")
        check_name(key, "Idempotency-Key")
        view, created = await self.parts.service.submit(self.identity, request, key)
        self.set_status(201 if created else 200)
        if follow:
            await self.send_events(self.parts.service.output(self.identity, view.id, 0))
        else:
            self.answer(view, 201 if created else 200)

    async def get(self) -> None:
        """List jobs."""
        state = self.query("state")
        if state is not None and state not in _STATES:
            raise errors.Invalid(f"state must be one of {', '.join(_STATES)}", field="state")
        jobs = await self.parts.service.jobs(
            self.identity,
            state=state,  # type: ignore[arg-type]  # checked against the literal's words
            lease_tag=self.query("lease_tag"),
            limit=self.query_integer("limit", low=1, high=_LIST_LIMIT, default=100),
            before=self.query("before"),
        )
        self.answer(types.JobList(jobs=jobs))


class Job(Handler):
    """One job."""

    OPERATIONS: ClassVar = {"GET": Operation(summary="Look a job up.", answer=types.JobView)}

    async def get(self, job_id: str) -> None:
        """Look a job up."""
        self.answer(await self.parts.service.job(self.identity, job_id))


class Cancel(Handler):
    """Cancel a job."""

    OPERATIONS: ClassVar = {
        "POST": Operation(
            summary="Cancel a job: a queued one at once, a running one by ending its attempt.",
            request=types.Empty,
            answer=types.JobView,
        )
    }

    async def post(self, job_id: str) -> None:
        """Cancel a job."""
        self.body(types.Empty)
        self.answer(await self.parts.service.cancel(self.identity, job_id))


class Interrupt(Handler):
    """Interrupt a job."""

    OPERATIONS: ClassVar = {
        "POST": Operation(
            summary="Interrupt a running job, or kill its attempt.",
            request=types.InterruptRequest,
            answer=types.JobView,
        )
    }

    async def post(self, job_id: str) -> None:
        """Interrupt a job."""
        request = self.body(types.InterruptRequest)
        view = await self.parts.service.interrupt(self.identity, job_id, kill=request.kill)
        self.answer(view)


class Output(Handler):
    """The output of a job."""

    OPERATIONS: ClassVar = {
        "GET": Operation(
            summary="Follow a job's output: numbered messages, resumable; `end` comes last.",
            content_type=EVENTS,
            parameters=(FROM, LAST_EVENT_ID),
        )
    }

    async def get(self, job_id: str) -> None:
        """Follow a job's output."""
        start = self.query_integer("from", low=0, high=_NUMBER_LIMIT, default=-1)
        if start < 0:
            last = self.integer(
                self.request.headers.get("Last-Event-ID"),
                "Last-Event-ID",
                low=0,
                high=_NUMBER_LIMIT,
                default=-1,
            )
            start = last + 1
        await self.send_events(self.parts.service.output(self.identity, job_id, start))
