"""What the API answers about jobs, built from their rows and, while they live, from memory."""

from __future__ import annotations

from typing import Any

import msgspec

from firepool_broker.api import types
from firepool_broker.core.instructions import FinishJob, Waiting
from firepool_broker.loop.livejobs import LiveJob, decode_request
from firepool_broker.store.records import JobChange, JobRow

__all__ = ["finish_change", "job_view", "status_event", "waiting_view"]

_RESULT_FIELDS = ("name", "format", "size_bytes", "type", "data", "sha256", "error")


def job_view(row: JobRow, live: LiveJob | None, output: types.OutputPosition) -> types.JobView:
    """Describe a job to its caller.

    Parameters
    ----------
    row
        As committed last.
    live
        What memory knows, while the job is not finished.
    output
        How much output of it is kept.
    """
    request = live.request if live is not None else decode_request(row)
    record: dict[str, Any] = msgspec.json.decode(row.outcome) if row.outcome else {}
    outcome: dict[str, Any] = record.get("outcome") or {}
    pods = list(live.pods) if live is not None else list(record.get("pods") or ())
    return types.JobView(
        id=row.id,
        name=row.name,
        kind=request.kind,
        state=row.state,  # type: ignore[arg-type]  # the store keeps the same words
        lease_tag=row.lease_tag,
        queue=row.queue,
        sku=row.sku,
        priority=row.priority,
        attached=row.attached,
        attempt=row.attempt,
        times=types.JobTimes(
            submitted=row.submitted_at,
            queued=row.queued_at,
            claimed=row.claimed_at,
            committed=row.committed_at,
            handed_off=row.handed_off_at,
            first_instruction=row.first_instruction_at,
            ended=row.ended_at,
        ),
        acquisition=_acquisition(row),
        waiting=live.waiting if live is not None else None,
        error=msgspec.json.decode(row.error, type=types.JobError) if row.error else None,
        exit_code=row.exit_code,
        retries=types.Retries(user=row.user_retries, infra=row.infra_retries),
        pods=pods,
        results=[_result(item) for item in outcome.get("results") or ()],
        output=output,
        session_dir=live.session_dir if live is not None else record.get("session_dir"),
        session_files=live.session_files if live is not None else record.get("session_files"),
        tier=outcome.get("tier"),
        imports_seconds=outcome.get("imports_seconds"),
        peak_memory_mib=outcome.get("peak_memory_mib"),
        killed=[
            types.KilledProcess(pid=int(item["pid"]), name=str(item["name"]))
            for item in outcome.get("killed") or ()
        ],
        cell=request.cell,
        notes=list(live.notes) if live is not None else list(record.get("notes") or ()),
    )


def finish_change(instruction: FinishJob, live: LiveJob, now: float) -> JobChange:
    """Collect the columns that a terminal commit writes."""
    outcome = instruction.outcome
    change = JobChange(
        ended_at=now,
        user_retries=instruction.user_retries,
        infra_retries=instruction.infra_retries,
        outcome=msgspec.json.encode(
            {
                "outcome": outcome,
                "pods": live.pods,
                "session_dir": live.session_dir,
                "session_files": live.session_files,
                "notes": live.notes,
            }
        ),
    )
    if outcome is not None:
        times: Any = outcome.get("times") or {}
        change.exit_code = outcome.get("exit_code")  # type: ignore[assignment]  # the agent's JSON
        change.handed_off_at = times.get("handed_off")
        change.first_instruction_at = times.get("first_instruction")
        change.ended_at = times.get("ended") or now
    if instruction.error is not None:
        change.error = msgspec.json.encode(_error(instruction))
    return change


def status_event(live: LiveJob) -> types.StatusEvent:
    """Say where a job stands, for those who follow its output."""
    row = live.row
    return types.StatusEvent(
        state=row.state,  # type: ignore[arg-type]  # the store keeps the same words
        waiting=live.waiting,
        attempt=row.attempt,
        acquisition=_acquisition(row),
    )


def waiting_view(waiting: Waiting | None) -> types.Waiting | None:
    """Translate the core's waiting reason."""
    if waiting is None:
        return None
    return types.Waiting(
        reason=waiting.reason,
        message=waiting.message,
        position=waiting.position,
        estimate_seconds=waiting.estimate_seconds,
    )


def _acquisition(row: JobRow) -> types.Acquisition | None:
    if row.acquisition_path is None:
        return None
    return types.Acquisition(path=row.acquisition_path, reason=row.acquisition_reason or "")


def _error(instruction: FinishJob) -> dict[str, Any]:
    assert instruction.error is not None
    error: dict[str, Any] = dict(instruction.error.as_dict())
    reported: Any = (instruction.outcome or {}).get("error")
    if reported:
        # the machine decides the class; what the code itself raised stays with it
        for name in ("ename", "evalue", "traceback"):
            error[name] = reported.get(name)
    return error


def _result(item: dict[str, Any]) -> types.Result:
    fields = {name: item.get(name) for name in _RESULT_FIELDS}
    return msgspec.convert(fields, types.Result)
