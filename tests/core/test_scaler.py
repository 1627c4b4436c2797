"""The formulas, case by case; the census is the whole input."""

from typing import Any

import pytest
from firepool_broker.core.scaler import Census, Knobs, Plan, match, median, plan


def knobs(**values: Any) -> Knobs:
    return Knobs(**{"floor": 0, "ceiling": 10, "max_idle": 0, "step": 10, **values})


CASES = [
    # name, census, knobs, (add, remove)
    ("nothing wanted", Census(), knobs(), (0, 0)),
    ("floor from nothing", Census(), knobs(floor=2), (2, 0)),
    ("demand", Census(queued=3, unmatched=3), knobs(), (3, 0)),
    ("no second wave while starts are pending", Census(queued=3, starting=3), knobs(), (0, 0)),
    ("only the missing part of a wave", Census(queued=5, starting=3, unmatched=2), knobs(), (2, 0)),
    (
        "running jobs are no missing supply",
        Census(queued=1, running=4, unmatched=1),
        knobs(),
        (1, 0),
    ),
    ("held pods serve nobody else", Census(queued=2, held=3, unmatched=2), knobs(), (2, 0)),
    ("held pods serve their owner", Census(queued=2, held=3, matched_held=2), knobs(), (0, 0)),
    ("held pods count to the floor", Census(held=2), knobs(floor=2), (0, 0)),
    ("held pods count to the ceiling", Census(queued=5, held=8, unmatched=5), knobs(), (2, 0)),
    ("stale pods fill the ceiling", Census(queued=5, stale=9, unmatched=5), knobs(), (1, 0)),
    (
        "single-use pods do not satisfy the floor",
        Census(stale=3, single_use=3),
        knobs(floor=2),
        (2, 0),
    ),
    ("stale ones that stay do", Census(stale=2), knobs(floor=2), (0, 0)),
    ("leaving pods do not satisfy the floor", Census(running=1, leaving=1), knobs(floor=1), (1, 0)),
    (
        "a replacement starts while its job runs",
        Census(running=1, leaving=1, replaced=1),
        knobs(),
        (1, 0),
    ),
    (
        "one replacement is enough",
        Census(running=1, starting=1, leaving=1, replaced=1),
        knobs(),
        (0, 0),
    ),
    (
        "an idle pod is the replacement",
        Census(running=1, idle=1, leaving=1, replaced=1),
        knobs(),
        (0, 0),
    ),
    ("step bounds a pass", Census(queued=9, unmatched=9), knobs(step=4), (4, 0)),
    ("headroom bounds a pass", Census(queued=9, unmatched=9), knobs(headroom=3), (3, 0)),
    ("the ceiling bounds a pass", Census(queued=9, running=8, unmatched=9), knobs(), (2, 0)),
    ("above a lowered ceiling", Census(queued=9, running=12, unmatched=9), knobs(), (0, 0)),
    (
        "supply that only others may use is not counted on",
        Census(queued=2, idle=2, unmatched=1),
        knobs(),
        (1, 0),
    ),
    # removal
    ("floor = cap = 0 is a plain time-to-live", Census(idle=3, expired_idle=2), knobs(), (0, 2)),
    ("nothing goes before its keep-alive", Census(idle=3), knobs(), (0, 0)),
    ("the idle cap retains", Census(idle=3, expired_idle=3), knobs(max_idle=2), (0, 1)),
    ("the idle cap never creates", Census(), knobs(max_idle=5), (0, 0)),
    ("never below the floor", Census(idle=3, expired_idle=3), knobs(floor=2), (0, 1)),
    (
        "held and busy pods carry the floor",
        Census(idle=2, held=1, running=1, expired_idle=2),
        knobs(floor=2),
        (0, 2),
    ),
    (
        "stale pods never lower what is retained",
        Census(idle=2, stale=5, expired_idle=2),
        knobs(floor=2),
        (0, 0),
    ),
    (
        "idle pods for queued jobs stay",
        Census(queued=2, idle=3, expired_idle=3),
        knobs(),
        (0, 1),
    ),
    (
        "near the ceiling the idle cap shrinks",
        Census(idle=3, held=8, expired_idle=3),
        knobs(max_idle=3),
        (0, 1),
    ),
]


@pytest.mark.parametrize(
    ("census", "bounds", "expected"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_plan(census: Census, bounds: Knobs, expected: tuple[int, int]) -> None:
    decided = plan(census, bounds)
    assert (decided.add, decided.remove) == expected


def test_partition_adds_up() -> None:
    census = Census(starting=1, idle=2, assigned=3, running=4, held=5, stale=6, matched_held=2)
    assert census.physical == 21
    assert census.eligible == 1 + 2 + 2 + 3 + 4
    assert census.other_held == 3


def test_the_plan_says_why() -> None:
    assert plan(Census(queued=2, unmatched=2), knobs(floor=1)) == Plan(2, 0, 1, 2, 0)


def test_matching_serves_restricted_groups_first() -> None:
    # An open session's pod serves that session alone; giving the free one to it would strand "b".
    usable = {("open-a", "a"), ("free", "a"), ("free", "b")}
    matched = match(
        {"a": 1, "b": 1}, [("free", 1), ("open-a", 1)], lambda group, lane: (group, lane) in usable
    )
    assert matched == {"a": 1, "b": 1}


def test_matching_never_exceeds_either_side() -> None:
    assert match({"a": 5}, [("x", 2)], lambda *_: True) == {"a": 2}
    assert match({"a": 1}, [("x", 9)], lambda *_: True) == {"a": 1}
    assert match({"a": 1}, [("x", 9)], lambda *_: False) == {"a": 0}


@pytest.mark.parametrize(
    ("values", "expected"), [([], None), ([3.0], 3.0), ([1.0, 5.0], 3.0), ([9.0, 1.0, 2.0], 2.0)]
)
def test_median(values: list[float], expected: float | None) -> None:
    assert median(values) == expected
