"""The queue: which jobs could be placed now, in which order, and which must wait for something.

A job that has not been placed is in exactly one place:

``PENDING``   what it needs is not there yet
``WITHHELD``  attached, and its session's client is away
``BEHIND``    attached, and another job of its session comes first
``DELAYED``   its last launch commit failed a moment ago
``ELIGIBLE``  could be placed; in its lane

A lane holds the eligible jobs of one pool that are alike to a claim (same caller, queue and tag),
in order: priority, then waiting time. So one look at a lane's head tells whether any of its jobs
can be placed, and a blocked job never blocks those of other lanes.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from enum import Enum

from firepool_broker.core.errors import InvariantBroken
from firepool_broker.core.jobs import Job, JobState
from firepool_broker.core.sessions import SessionKey

OrderKey = tuple[int, float, int]
LaneKey = tuple[str, str, str | None]


class Place(Enum):
    """Where a job that is not placed waits."""

    PENDING = "pending"
    WITHHELD = "withheld"
    BEHIND = "behind"
    DELAYED = "delayed"
    ELIGIBLE = "eligible"


def order_key(job: Job) -> OrderKey:
    """Return the key jobs of a pool are served by; lower comes first."""
    return (-job.priority, job.submitted_at, job.sequence)


class PoolQueue:
    """Queued jobs of one pool.

    Attributes
    ----------
    lanes
        Eligible warm jobs by lane, best first.
    by_caller
        Lane keys of each caller.
    single_use
        Eligible jobs that want a pod of their own, best first.
    order
        Every QUEUED job of the pool that is not withheld, best first.
    eligible
        Number of eligible warm jobs.
    """

    __slots__ = ("by_caller", "eligible", "lanes", "order", "single_use")

    def __init__(self) -> None:
        self.lanes: dict[LaneKey, list[tuple[OrderKey, Job]]] = {}
        self.by_caller: dict[str, set[LaneKey]] = {}
        self.single_use: list[tuple[OrderKey, Job]] = []
        self.order: list[OrderKey] = []
        self.eligible = 0


class Line:
    """Attached jobs of one session that run one after another."""

    __slots__ = ("active", "jobs")

    def __init__(self) -> None:
        self.active: str | None = None
        self.jobs: list[tuple[int, Job]] = []


class JobQueue:
    """Every job that is not terminal and not running, and the order within sessions."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.places: dict[str, Place] = {}
        self.pools: dict[str, PoolQueue] = {}
        self.lines: dict[SessionKey, Line] = {}

    def pool(self, name: str) -> PoolQueue:
        """Return a pool's queue."""
        found = self.pools.get(name)
        if found is None:
            found = self.pools[name] = PoolQueue()
        return found

    def add(self, job: Job, now: float) -> None:
        """Enter a job that waits; one that comes back keeps its place by its waiting time."""
        self.jobs[job.id] = job
        session = job.session
        if job.ordered and session is not None:
            line = self.lines.get(session)
            if line is None:
                line = self.lines[session] = Line()
            if line.active == job.id:
                line.active = None
            bisect.insort(line.jobs, (job.sequence, job), key=_first)
            self._settle_in_line(line, job, now)
            self._settle_heads(line, now)
        else:
            self._settle(job, now)

    def take(self, job: Job) -> None:
        """Remove a job that was claimed; the jobs behind it in its session go on waiting."""
        self._leave(job)
        del self.jobs[job.id], self.places[job.id]
        line = self._line(job)
        if line is not None:
            line.active = job.id
            _drop(line.jobs, job)

    def discard(self, job: Job, now: float) -> None:
        """Forget a job, waiting or active; the next one of its session comes forward."""
        if job.id in self.jobs:
            self._leave(job)
            del self.jobs[job.id], self.places[job.id]
        session = job.session
        line = self._line(job)
        if line is None or session is None:
            return
        if line.active == job.id:
            line.active = None
        _drop(line.jobs, job)
        if line.active is None and not line.jobs:
            del self.lines[session]
        else:
            self._settle_heads(line, now)

    def activate(self, job: Job) -> None:
        """Note at a restart that a job of a session is running already."""
        session = job.session
        if job.ordered and session is not None:
            self.lines.setdefault(session, Line()).active = job.id

    def settle(self, job: Job, now: float) -> None:
        """Look again where a job belongs, after one of its properties changed."""
        line = self._line(job)
        if job.id not in self.jobs:
            return
        if line is None:
            self._settle(job, now)
        else:
            self._settle_in_line(line, job, now)

    def place(self, job: Job) -> Place | None:
        """Return where a job waits; None when it does not."""
        return self.places.get(job.id)

    def is_eligible(self, job: Job) -> bool:
        """Whether a job could be placed now."""
        return self.places.get(job.id) is Place.ELIGIBLE

    def position(self, job: Job) -> int:
        """Return a job's position in its pool, from 1."""
        return bisect.bisect_left(self.pool(job.sku).order, order_key(job)) + 1

    def of_session(self, session: SessionKey) -> Iterator[Job]:
        """Iterate over the waiting jobs of a session, in the order of submission."""
        yield from [job for job in self.jobs.values() if job.session == session]

    def eligible(self, pool: str) -> list[Job]:
        """Return a pool's eligible warm jobs, best first."""
        entries = [entry for lane in self.pool(pool).lanes.values() for entry in lane]
        entries.sort(key=_first)
        return [job for _, job in entries]

    # ------------------------------------------------------------------ places

    def _line(self, job: Job) -> Line | None:
        session = job.session
        return self.lines.get(session) if job.ordered and session is not None else None

    def _settle_heads(self, line: Line, now: float) -> None:
        """Place the jobs of a line whose turn may have changed; those deeper are behind anyway."""
        for _, job in line.jobs[:2]:
            self._settle_in_line(line, job, now)

    def _settle_in_line(self, line: Line, job: Job, now: float) -> None:
        self._settle(job, now, line.active is not None or line.jobs[0][1] is not job)

    def _settle(self, job: Job, now: float, behind: bool = False) -> None:
        if job.state is JobState.PENDING:
            place = Place.PENDING
        elif job.withheld:
            place = Place.WITHHELD
        elif behind:
            place = Place.BEHIND
        elif now < job.not_before:
            place = Place.DELAYED
        else:
            place = Place.ELIGIBLE
        if self.places.get(job.id) is not place:
            self._leave(job)
            self._enter(job, place)

    def _enter(self, job: Job, place: Place) -> None:
        self.places[job.id] = place
        if place is Place.PENDING or place is Place.WITHHELD:
            return
        queue = self.pool(job.sku)
        key = order_key(job)
        bisect.insort(queue.order, key)
        if place is not Place.ELIGIBLE:
            return
        if job.single_use:
            bisect.insort(queue.single_use, (key, job), key=_first)
            return
        lane_key = (job.caller, job.queue, job.lease_tag)
        lane = queue.lanes.get(lane_key)
        if lane is None:
            queue.lanes[lane_key] = [(key, job)]
            queue.by_caller.setdefault(job.caller, set()).add(lane_key)
        else:
            bisect.insort(lane, (key, job), key=_first)
        queue.eligible += 1

    def _leave(self, job: Job) -> None:
        place = self.places.get(job.id)
        if place is None or place is Place.PENDING or place is Place.WITHHELD:
            return
        queue = self.pool(job.sku)
        key = order_key(job)
        del queue.order[bisect.bisect_left(queue.order, key)]
        if place is not Place.ELIGIBLE:
            return
        if job.single_use:
            _remove(queue.single_use, key)
            return
        lane_key = (job.caller, job.queue, job.lease_tag)
        lane = queue.lanes[lane_key]
        _remove(lane, key)
        if not lane:
            del queue.lanes[lane_key]
            lanes = queue.by_caller[job.caller]
            lanes.discard(lane_key)
            if not lanes:
                del queue.by_caller[job.caller]
        queue.eligible -= 1

    # ------------------------------------------------------------------ validation

    def validate(self, now: float) -> None:
        """Compare every collection with a recomputation from the jobs alone.

        Raises
        ------
        InvariantBroken
            Something differs.
        """
        if set(self.jobs) != set(self.places):
            raise InvariantBroken("a waiting job is in no place, or one that left still is")
        fresh = JobQueue()
        for session, line in self.lines.items():
            copy = fresh.lines[session] = Line()
            copy.active = line.active
        for job in self.jobs.values():
            fresh.add(job, now)
            if job.ordered and not any(entry is job for _, entry in self.lines[_key(job)].jobs):
                raise InvariantBroken(f"{job.id} is ordered and not in its session's line")
        for id_, place in self.places.items():
            expected = fresh.places[id_]
            late = place is Place.DELAYED and expected is Place.ELIGIBLE
            if place is not expected and not late:
                raise InvariantBroken(f"{id_} waits as {place}, should as {expected}")
        for name, queue in self.pools.items():
            if sorted(queue.order) != queue.order:
                raise InvariantBroken(f"{name}: the order is not sorted")
            entries = [entry for lane in queue.lanes.values() for entry in lane]
            if queue.eligible != len(entries):
                raise InvariantBroken(
                    f"{name} counts {queue.eligible}, has {len(entries)} eligible"
                )
            for key, job in [*entries, *queue.single_use]:
                if self.places.get(job.id) is not Place.ELIGIBLE or key != order_key(job):
                    raise InvariantBroken(f"{job.id} is in a lane and not eligible")
            waiting = sum(
                job.sku == name and self.places[job.id] not in (Place.PENDING, Place.WITHHELD)
                for job in self.jobs.values()
            )
            if len(queue.order) != waiting:
                raise InvariantBroken(f"{name}: {len(queue.order)} in order, {waiting} waiting")


def _key(job: Job) -> SessionKey:
    return (job.caller, job.lease_tag or "")


def _first(entry: tuple[OrderKey, Job] | tuple[int, Job]) -> OrderKey | int:
    return entry[0]


def _remove(entries: list[tuple[OrderKey, Job]], key: OrderKey) -> None:
    del entries[bisect.bisect_left(entries, key, key=lambda entry: entry[0])]


def _drop(entries: list[tuple[int, Job]], job: Job) -> None:
    index = bisect.bisect_left(entries, job.sequence, key=lambda entry: entry[0])
    if index < len(entries) and entries[index][1] is job:
        del entries[index]
