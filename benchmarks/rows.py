"""What the rows of the benchmarks share: percentiles and the form of a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Skipped(Exception):
    """A row cannot run on this machine; the text says why."""


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return a percentile of `samples` by linear interpolation, as the paper's B.4 does."""
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def row(
    samples: Sequence[float],
    *,
    unit: str,
    goal: str,
    p50_at_most: float | None = None,
    p99_at_most: float | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Return a row from samples.

    Parameters
    ----------
    samples
        What was measured, in `unit`.
    unit
        The unit of the samples.
    goal
        The goal in words, as in ``docs/performance.md``.
    p50_at_most, p99_at_most
        The goal in figures; ``met`` tells whether both hold.
    more
        Further figures of the row.
    """
    p50 = percentile(samples, 50)
    p99 = percentile(samples, 99)
    met = (p50_at_most is None or p50 <= p50_at_most) and (
        p99_at_most is None or p99 <= p99_at_most
    )
    return {
        "unit": unit,
        "n": len(samples),
        "p50": round(p50, 4),
        "p99": round(p99, 4),
        "goal": goal,
        "met": met,
        **more,
    }
