"""Rules for sessions: opened, connected, lost, restarted, ended, lapsed.

Lost contact never cancels what runs. An attached job that is still queued waits for its client;
when the session lapses, or another client comes under its tag, it is cancelled. A goodbye cancels
the session's attached jobs, and gives its pods back unless it is a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from firepool_broker.core import events as e
from firepool_broker.core.deadlines import Due
from firepool_broker.core.instructions import (
    NotifySession,
    PreparePod,
)
from firepool_broker.core.job_rules import JobRules
from firepool_broker.core.jobs import JobError
from firepool_broker.core.pod_rules import PodRules
from firepool_broker.core.pods import (
    Pod,
    PodState,
)
from firepool_broker.core.sessions import Session, SessionKey, SessionState
from firepool_broker.core.state import State

# A goodbye waits for nobody: what does not end within this grace is killed.
_GOODBYE_GRACE_SECONDS = 2.0
_FORGET_LAPSED_SECONDS = 86_400.0


class SessionRules:
    """What happens to sessions.

    Parameters
    ----------
    state
        What it changes.
    jobs, pods
        The rules for the jobs and pods of the sessions.

    Attributes
    ----------
    handlers, due
        What it answers to, by the type of event and of deadline.
    """

    def __init__(self, state: State, jobs: JobRules, pods: PodRules) -> None:
        self._state = state
        self._jobs = jobs
        self._pods = pods
        self.handlers: dict[type, Callable[[Any, float], None]] = {
            e.SessionOpened: self._on_session_opened,
            e.SessionConnected: self._on_session_connected,
            e.SessionDisconnected: self._on_session_disconnected,
            e.SessionEnded: self._on_session_ended,
            e.ReleaseRequested: self._on_release,
        }
        self.due: dict[Due, Callable[[str, str, float], None]] = {
            Due.SESSION: self._due_session,
            Due.FORGET: self._due_forget,
        }

    def prepare(self) -> None:
        """Have idle pods keep a spare for sessions whose first cell is still to come."""
        for key in list(self._state.unprepared):
            session = self._state.sessions.get(key)
            if session is None or session.lapsed or session.environment is None:
                del self._state.unprepared[key]
                continue
            pool = session.pool or self._state.policies.default
            bucket = None if pool is None else self._state.tracker.buckets.get(pool)
            if bucket is None:
                del self._state.unprepared[key]
                continue
            pod = self._spare_for(bucket.idle, session)
            if pod is not None:
                self._state.tracker.update(pod, prepared_for=key, environment=session.environment)
                self._state.out.append(PreparePod(pod.name, *key))
                del self._state.unprepared[key]

    @staticmethod
    def _spare_for(idle: Iterable[Pod], session: Session) -> Pod | None:
        """Return the newest idle pod that keeps no other session's spare."""
        found = None
        for pod in idle:
            if pod.prepared_for is None and pod.isolation != "none":
                found = pod
        return found

    def _on_session_opened(self, event: e.SessionOpened, now: float) -> None:
        session = event.session
        key = session.key
        before = self._state.sessions.put(session, now)
        self._state.deadlines.add(session.expires_at, Due.SESSION, *key)
        if before is not None and before.client_id != session.client_id:
            error = JobError("SessionClosed", "another client took its session over")
            for job in list(self._state.queue.of_session(key)):
                if job.attached and job.client_id in (None, before.client_id):
                    self._jobs.finish(job, error, None, now)
        self._jobs.let_go_on(key, now)
        if session.environment is None:
            return
        if before is None or before.environment != session.environment:
            self._prepare_again(session, before is None)

    def _prepare_again(self, session: Session, new: bool) -> None:
        """Have the session's pods keep a spare of its new environment."""
        found = False
        for bucket in self._state.tracker.buckets.values():
            prepared = bucket.prepared.get(session.key)
            if prepared is not None:
                self._state.tracker.update(prepared, environment=session.environment)
                self._state.out.append(PreparePod(prepared.name, *session.key))
                found = True
            for pod in bucket.held_by(session.caller):
                if pod.tag == session.tag:
                    self._state.out.append(PreparePod(pod.name, *session.key))
                    found = True
        busy = any(pod.tag == session.tag for pod in self._state.tracker.leases.values())
        if new and not found and not busy:
            self._state.unprepared[session.key] = None

    def _on_session_connected(self, event: e.SessionConnected, now: float) -> None:
        key = (event.caller, event.tag)
        if self._state.sessions.connect(key, event.client_id, now) is not None:
            self._jobs.let_go_on(key, now)

    def _on_session_disconnected(self, event: e.SessionDisconnected, now: float) -> None:
        key = (event.caller, event.tag)
        session = self._state.sessions.disconnect(key, event.client_id, now)
        if session is None:
            return
        self._state.deadlines.add(session.expires_at, Due.SESSION, *key)
        for job in list(self._state.queue.of_session(key)):
            if job.attached and not job.withheld:
                job.withheld = True
                self._jobs.give_up_reservation(job, now)
                self._state.queue.settle(job, now)
        self._touch_pools_of(event.caller)

    def _on_session_ended(self, event: e.SessionEnded, now: float) -> None:
        key = (event.caller, event.tag)
        session = self._state.sessions.get(key)
        replaced = (
            session is not None
            and event.client_id is not None
            and event.client_id != session.client_id
        )
        if session is None or replaced:
            return
        how = "restarted" if event.how == "restart" else "shut down"
        error = JobError("SessionClosed", f"its session was {how}")
        for job in [
            job for job in self._state.jobs.values() if job.session == key and job.attached
        ]:
            if job.id in self._state.jobs:
                self._jobs.cancel(job, error, _GOODBYE_GRACE_SECONDS, now)
        if event.how == "restart":
            self._state.sessions.restart(key, now)
            self._state.deadlines.add(session.expires_at, Due.SESSION, *key)
            return
        self._state.sessions.remove(key)
        self._state.unprepared.pop(key, None)
        self._give_back(key, "its session ended", now, busy=True)
        self._state.out.append(NotifySession(*key, None))

    def _on_release(self, event: e.ReleaseRequested, now: float) -> None:
        self._give_back((event.caller, event.tag), "its session gave it back", now, busy=False)

    def _give_back(self, key: SessionKey, reason: str, now: float, *, busy: bool) -> None:
        """Retire what a session holds; with ``busy``, also what it still uses, afterwards."""
        for bucket in self._state.tracker.buckets.values():
            prepared = bucket.prepared.get(key)
            if prepared is not None:
                self._state.tracker.update(prepared, prepared_for=None)
            for pod in list(bucket.held_by(key[0])):
                if pod.tag == key[1]:
                    self._pods.retire(pod, reason, now)
            for pod in list(bucket.pods.values()):
                if (pod.owner, pod.tag) != key:
                    continue
                in_use = pod.state is PodState.RUNNING or pod.state is PodState.ASSIGNED
                if pod.state is PodState.RESETTING or (busy and in_use):
                    pod.retire_reason = reason
                    self._state.tracker.update(pod, retire_after=True)
                    self._state.dirty.add(pod.pool)

    def _due_session(self, caller: str, tag: str, now: float) -> None:
        key = (caller, tag)
        if self._state.sessions.lapse_if_due(key, now) is None:
            return
        error = JobError("SessionClosed", "its session lapsed: its client did not come back")
        for job in list(self._state.queue.of_session(key)):
            if job.attached:
                self._jobs.finish(job, error, None, now)
        self._state.unprepared.pop(key, None)
        self._touch_pools_of(caller)
        self._state.deadlines.add(now + _FORGET_LAPSED_SECONDS, Due.FORGET, *key)
        self._state.out.append(NotifySession(caller, tag, SessionState.LAPSED))

    def _due_forget(self, caller: str, tag: str, now: float) -> None:
        session = self._state.sessions.get((caller, tag))
        if session is not None and session.lapsed:
            self._state.sessions.remove((caller, tag))

    def _touch_pools_of(self, caller: str) -> None:
        """Look again at pools where a caller has pods that others of its sessions may now take."""
        for name, bucket in self._state.tracker.buckets.items():
            if caller in bucket.held:
                self._state.dirty.add(name)
