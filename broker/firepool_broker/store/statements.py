"""Every statement that the store runs, as SQLAlchemy expressions.

``python -m firepool_broker.store.prebuild`` compiles them into ``prebuilt.py``; a test compares.
A statement is static: what varies are its parameters, so nothing is built while jobs run.
"""

from __future__ import annotations

from sqlalchemy import (
    Boolean,
    ColumnElement,
    Double,
    Integer,
    String,
    bindparam,
    case,
    delete,
    insert,
    or_,
    select,
    update,
)
from sqlalchemy.sql import ClauseElement

from firepool_broker.store import tables
from firepool_broker.store.records import JobChange

_jobs = tables.jobs.c
_bindings = tables.bindings.c
_sessions = tables.sessions.c
_tokens = tables.tokens.c
_idempotency = tables.idempotency.c
_leadership = tables.leadership.c

_TERMINAL = ("SUCCEEDED", "FAILED", "CANCELLED")


def _kept_or_changed(name: str) -> ColumnElement[object]:
    """Return the column's new value: the parameter where its flag is set, else what it holds."""
    column = _jobs[name]
    flag = bindparam(f"set_{name}", type_=Boolean)
    return case((flag, bindparam(f"new_{name}", type_=column.type)), else_=column)


def _when_given(name: str, column: ColumnElement[object]) -> ColumnElement[bool]:
    """Return a condition that holds for every row when the parameter is NULL."""
    parameter = bindparam(name, type_=String)
    return or_(parameter.is_(None), column == parameter)


def all_statements() -> dict[str, ClauseElement]:
    """Return the statements by name."""
    return {**_leader_statements(), **_job_statements(), **_session_statements()}


def _leader_statements() -> dict[str, ClauseElement]:
    return {
        # a shared row lock where the database has one; SQLite's transaction holds its write lock
        "epoch": select(_leadership.epoch).where(_leadership.id == 1).with_for_update(read=True),
        "leader": select(_leadership.holder, _leadership.epoch, _leadership.expires_at).where(
            _leadership.id == 1
        ),
        "leader_insert": insert(tables.leadership),
        "leader_take": update(tables.leadership)
        .where(_leadership.id == 1, _leadership.epoch == bindparam("old_epoch"))
        .values(
            holder=bindparam("new_holder"),
            epoch=bindparam("new_epoch"),
            expires_at=bindparam("new_expires_at"),
        ),
    }


def _job_statements() -> dict[str, ClauseElement]:
    before_time = bindparam("before_time", type_=Double)
    before_id = bindparam("before_id", type_=String)
    ended = select(_jobs.id).where(
        _jobs.state.in_([bindparam(None, state, unique=True) for state in _TERMINAL]),
        _jobs.ended_at < bindparam("ended_before"),
    )
    return {
        "job_insert": insert(tables.jobs),
        "job": select(tables.jobs).where(_jobs.id == bindparam("job_id")),
        "job_launch": update(tables.jobs)
        .where(
            _jobs.id == bindparam("job_id"),
            _jobs.version == bindparam("old_version"),
            _jobs.state == bindparam("from_state"),
        )
        .values(
            state=bindparam("to_state"),
            version=_jobs.version + 1,
            attempt=bindparam("new_attempt"),
            acquisition_path=bindparam("path"),
            acquisition_reason=bindparam("reason"),
            claimed_at=bindparam("new_claimed_at"),
            committed_at=bindparam("new_committed_at"),
        ),
        "binding_insert": insert(tables.bindings).from_select(
            [
                "job_id",
                "attempt",
                "pod_name",
                "pod_uid",
                "caller",
                "lease_tag",
                "queue",
                "committed_at",
            ],
            select(
                _jobs.id,
                _jobs.attempt,
                bindparam("pod_name", type_=String),
                bindparam("pod_uid", type_=String),
                _jobs.caller,
                _jobs.lease_tag,
                _jobs.queue,
                _jobs.committed_at,
            ).where(_jobs.id == bindparam("job_id")),
        ),
        "job_transition": update(tables.jobs)
        .where(_jobs.id == bindparam("job_id"), _jobs.version == bindparam("old_version"))
        .values(
            state=bindparam("to_state"),
            version=_jobs.version + 1,
            **{name: _kept_or_changed(name) for name in JobChange.__struct_fields__},
        ),
        "job_list": select(tables.jobs)
        .where(
            _when_given("of_caller", _jobs.caller),
            _when_given("in_state", _jobs.state),
            _when_given("under_tag", _jobs.lease_tag),
            or_(
                before_time.is_(None),
                _jobs.submitted_at < before_time,
                (_jobs.submitted_at == before_time) & (_jobs.id < before_id),
            ),
        )
        .order_by(_jobs.submitted_at.desc(), _jobs.id.desc())
        .limit(bindparam("row_limit", type_=Integer)),
        "job_unfinished": select(tables.jobs)
        .where(
            _jobs.state.in_(
                [bindparam(None, state, unique=True) for state in ("PENDING", "QUEUED", "RUNNING")]
            )
        )
        .order_by(_jobs.submitted_at, _jobs.id),
        "job_ended": ended.limit(bindparam("row_limit", type_=Integer)),
        "job_delete": delete(tables.jobs).where(_jobs.id == bindparam("job_id")),
        "binding_delete": delete(tables.bindings).where(_bindings.job_id == bindparam("job_id")),
        "binding_of_pod": select(*_binding_columns())
        .where(_bindings.pod_uid == bindparam("of_uid"))
        .order_by(_bindings.sequence.desc())
        .limit(bindparam(None, 1, unique=True, type_=Integer)),
        "binding_of_job": select(*_binding_columns())
        .where(_bindings.job_id == bindparam("of_job"))
        .order_by(_bindings.sequence),
        "idempotency": select(_idempotency.job_id, _idempotency.request_digest).where(
            _idempotency.caller == bindparam("of_caller"), _idempotency.key == bindparam("of_key")
        ),
        "idempotency_insert": insert(tables.idempotency),
        "idempotency_delete": delete(tables.idempotency).where(
            _idempotency.job_id == bindparam("of_job")
        ),
    }


def _binding_columns() -> list[ColumnElement[object]]:
    return [column for column in tables.bindings.c if column.name != "sequence"]


def _session_statements() -> dict[str, ClauseElement]:
    this = (
        _sessions.caller == bindparam("of_caller"),
        _sessions.lease_tag == bindparam("of_tag"),
    )
    return {
        "session_insert": insert(tables.sessions),
        "session_replace": update(tables.sessions)
        .where(*this)
        .values(
            {
                name: bindparam(f"new_{name}")
                for name in (
                    "client_id",
                    "request",
                    "session_dir",
                    "created_at",
                    "expires_at",
                    "ended_at",
                )
            }
        ),
        "session_touch": update(tables.sessions)
        .where(*this, _sessions.ended_at.is_(None))
        .values(expires_at=bindparam("new_expires_at")),
        "session_end": update(tables.sessions)
        .where(*this, _sessions.ended_at.is_(None))
        .values(ended_at=bindparam("new_ended_at")),
        "session_delete": delete(tables.sessions).where(*this),
        "session_list": select(tables.sessions).order_by(_sessions.created_at),
        "token": select(_tokens.caller, _tokens.lease_tag).where(
            _tokens.digest == bindparam("of_digest")
        ),
        "token_insert": insert(tables.tokens),
        "token_delete": delete(tables.tokens).where(
            _tokens.caller == bindparam("of_caller"), _tokens.lease_tag == bindparam("of_tag")
        ),
    }
