"""What the machine's rules share: every collection, and the pass at hand.

The rules (``job_rules``, ``pod_rules``, ``session_rules``) change it; nothing else does.
"""

from __future__ import annotations

from random import Random

from firepool_broker.core.deadlines import Deadlines
from firepool_broker.core.instructions import Instruction, Waiting
from firepool_broker.core.jobs import Job
from firepool_broker.core.policy import PoolPolicies
from firepool_broker.core.queue import JobQueue
from firepool_broker.core.sessions import SessionBook, SessionKey
from firepool_broker.core.supply import Supply
from firepool_broker.core.tracker import Tracker


class State:
    """The collections, and what one event has touched so far.

    Parameters
    ----------
    policies
        Pools and limits.
    random
        Source of pod names.

    Attributes
    ----------
    jobs
        Every job that is not terminal, by id.
    out
        Instructions of the event at hand.
    dirty
        Pools to look at when the event has been taken in.
    timed
        Pools to look at as by a tick.
    new
        Jobs whose waiting line is due.
    told
        The last waiting line of each job.
    unprepared
        Open sessions for whose environment no pod keeps a spare yet.
    draining
        No job is placed any more.
    """

    def __init__(self, policies: PoolPolicies, random: Random) -> None:
        self.policies = policies
        self.tracker = Tracker(
            policies.pools, policies.max_pods_per_caller, policies.max_gpus_per_caller
        )
        self.queue = JobQueue()
        self.deadlines = Deadlines()
        self.sessions = SessionBook(policies.session_ttl_seconds, self.tracker.open_sessions)
        self.supply = Supply(policies, self.tracker, self.queue, self.deadlines, random)
        self.jobs: dict[str, Job] = {}
        self.out: list[Instruction] = []
        self.dirty: set[str] = set()
        self.timed: set[str] = set(self.tracker.buckets)
        self.new: list[Job] = []
        self.told: dict[str, Waiting] = {}
        self.unprepared: dict[SessionKey, None] = {}
        self.draining = False
