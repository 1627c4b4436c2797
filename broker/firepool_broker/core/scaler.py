"""The scaler's arithmetic: exact formulas over a census, as pure functions.

Everything is counted in whole pods. Every pod that is not gone is in exactly one of *stale*,
*running*, *assigned*, *starting*, *idle* and *held* (see ``tracker.term_of``). A held pod that one
of its owner's queued jobs could take counts as idle for the pass, as supply for that owner alone.
Pods that are starting are supply that is late, never missing.

Source: §7 and A.5 of the paper; ``leaving`` and ``replaceDeficit`` are additions that make a
replacement start before the pod it replaces is gone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Lane = TypeVar("Lane")
Group = TypeVar("Group")


@dataclass(frozen=True, slots=True)
class Census:
    """What one pass sees of one pool, in pods.

    Parameters
    ----------
    queued
        Pods of queued warm jobs: without withheld ones and those that wait behind another job of
        their session, with those blocked by a quota.
    starting, idle, assigned, running, held, stale
        The partition of the pool's pods; ``idle`` is unheld, ``held`` includes resetting ones.
    single_use
        Single-use pods of any state (all of them are stale).
    leaving
        Pods that are about to be missing, single-use ones apart.
    replaced
        Assigned or running pods that retire afterwards.
    matched_held
        Held pods that their owners' queued jobs could take.
    unmatched
        Queued demand for which no held, idle or starting pod is left.
    expired_idle
        Idle pods past their keep-alive.
    """

    queued: int = 0
    starting: int = 0
    idle: int = 0
    assigned: int = 0
    running: int = 0
    held: int = 0
    stale: int = 0
    single_use: int = 0
    leaving: int = 0
    replaced: int = 0
    matched_held: int = 0
    unmatched: int = 0
    expired_idle: int = 0

    @property
    def demand(self) -> int:
        """Pods of warm jobs, queued and placed."""
        return self.queued + self.assigned + self.running

    @property
    def supply_idle(self) -> int:
        """The formulas' *idle*: unheld pods, and held ones matched by their owners' jobs."""
        return self.idle + self.matched_held

    @property
    def other_held(self) -> int:
        """Held pods that nobody queued may take."""
        return self.held - self.matched_held

    @property
    def eligible(self) -> int:
        """Pods that serve, or will serve, warm jobs."""
        return self.starting + self.supply_idle + self.assigned + self.running

    @property
    def physical(self) -> int:
        """Every pod that occupies capacity."""
        return self.eligible + self.other_held + self.stale


@dataclass(frozen=True, slots=True)
class Knobs:
    """What bounds one pass, in pods; ``headroom`` is what the global budget leaves."""

    floor: int
    ceiling: int
    max_idle: int
    step: float
    headroom: float = math.inf


@dataclass(frozen=True, slots=True)
class Plan:
    """What one pass decides: how many pods to create, or how many idle ones to remove."""

    add: int = 0
    remove: int = 0
    floor_deficit: int = 0
    demand_deficit: int = 0
    replace_deficit: int = 0


def plan(census: Census, knobs: Knobs) -> Plan:
    """Return the pass's plan; never both creations and removals."""
    c = census
    floor_deficit = max(0, knobs.floor - (c.physical - c.single_use - c.leaving))
    demand_deficit = max(0, c.demand - c.eligible, c.unmatched)
    replace_deficit = max(0, c.replaced - c.starting - c.idle)
    need = max(floor_deficit, demand_deficit, replace_deficit)
    add = max(0, min(need, knobs.ceiling - c.physical, knobs.step, knobs.headroom))
    deficits = (floor_deficit, demand_deficit, replace_deficit)
    if add > 0:
        return Plan(int(add), 0, *deficits)
    busy = c.assigned + c.running
    idle_cap = min(knobs.max_idle, knobs.ceiling - (c.physical - c.supply_idle))
    retain = max(idle_cap, knobs.floor - (c.held + busy), c.demand - (c.starting + busy))
    remove = max(0, min(c.supply_idle - retain, c.expired_idle, c.physical - knobs.floor))
    return Plan(0, remove, *deficits)


def match(
    demand: Mapping[Lane, int],
    supply: Sequence[tuple[Group, int]],
    usable: Callable[[Group, Lane], bool],
) -> dict[Lane, int]:
    """Match queued jobs to held pods, as many as possible.

    Parameters
    ----------
    demand
        Number of jobs by lane; the jobs of a lane are alike.
    supply
        Number of pods by group; the pods of a group are alike.
    usable
        Whether a group's pods may serve a lane's jobs.

    Returns
    -------
    dict
        Matched jobs by lane.

    Notes
    -----
    Who may use a group is either its own session or every session of the caller, so the sets are
    nested or disjoint; serving the most restricted group first is then optimal.
    """
    left = dict(demand)
    matched = dict.fromkeys(demand, 0)
    options = [([lane for lane in demand if usable(group, lane)], count) for group, count in supply]
    options.sort(key=lambda option: len(option[0]))
    for lanes, count in options:
        for lane in lanes:
            taken = min(count, left[lane])
            left[lane] -= taken
            matched[lane] += taken
            count -= taken
            if not count:
                break
    return matched


def median(values: Iterable[float]) -> float | None:
    """Return the median, None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2
