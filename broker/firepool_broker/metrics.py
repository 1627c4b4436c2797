"""What the broker counts, and its form for Prometheus.

The contract: counting is a dictionary update and imports nothing; ``prometheus_client`` is
imported at the first scrape (its import takes longer than half a start of the broker), where a
collector in a registry of its own hands over what was counted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct, field

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.core import Metric
    from prometheus_client.registry import CollectorRegistry

    from firepool_broker.store.committer import CommitReport

T = TypeVar("T")

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
_LABELS = 64
"""Distinct reasons that are told apart; a reason is text, and text must not fill the memory."""

PHASES = ("accept", "dispatch", "hand_off", "first_instruction")
"""Phases of a start: to stored, to committed, to handed off, to the first instruction."""


class FleetSnapshot(Struct, kw_only=True):
    """What ``/metrics`` asks the tracker for."""

    pods: Mapping[tuple[str, ...], int] = field(default_factory=dict)
    """Pods by (pool, state)."""
    supply: Mapping[tuple[str, ...], int] = field(default_factory=dict)
    """Pods by (pool, ``requested|scheduled|ready|routable``)."""
    queue_length: Mapping[str, int] = field(default_factory=dict)
    """Queued jobs by pool."""
    queue_age_seconds: Mapping[str, float] = field(default_factory=dict)
    """Age of the oldest queued job by pool."""


class Histogram:
    """Counts of durations by upper bound."""

    def __init__(self) -> None:
        self.counts = [0] * (len(_SECONDS) + 1)
        self.sum_seconds = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(_SECONDS, seconds)] += 1
        self.sum_seconds += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Return cumulative counts by upper bound."""
        total = 0
        found: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, _SECONDS), "+Inf"), self.counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found


class Metrics:
    """Counters and histograms of one broker."""

    def __init__(self) -> None:
        self._acquisitions: Counter[tuple[str, ...]] = Counter()
        self._phases = {phase: Histogram() for phase in PHASES}
        self._resets: Counter[str] = Counter()
        self._reset_seconds = Histogram()
        self._holds_broken: Counter[str] = Counter()
        self._retirements: Counter[str] = Counter()
        self._jobs_ended: Counter[tuple[str, ...]] = Counter()
        self._commits = 0
        self._writes = 0
        self._lost = 0
        self._commit_seconds = Histogram()
        self._double_runs = 0
        self._fleet: Callable[[], FleetSnapshot] = FleetSnapshot
        self._registry: CollectorRegistry | None = None

    def watch_fleet(self, snapshot: Callable[[], FleetSnapshot]) -> None:
        """Ask this for pods and queues at each scrape."""
        self._fleet = snapshot

    def acquired(self, path: str, reason: str) -> None:
        """Count an acquisition of pods by its path and why no warmer one was used."""
        self._acquisitions[_bounded(self._acquisitions, (path, reason), (path, "other"))] += 1

    def started(self, phase: str, seconds: float) -> None:
        """Count how long one of ``PHASES`` took."""
        self._phases[phase].observe(max(0.0, seconds))

    def reset(self, seconds: float, *, clean: bool) -> None:
        """Count a reset of a pod."""
        self._resets["clean" if clean else "unclean"] += 1
        self._reset_seconds.observe(seconds)

    def hold_broken(self, reason: str) -> None:
        """Count a hold that was broken for another job."""
        self._holds_broken[_bounded(self._holds_broken, reason, "other")] += 1

    def retired(self, reason: str) -> None:
        """Count a pod that was retired."""
        self._retirements[_bounded(self._retirements, reason, "other")] += 1

    def job_ended(self, state: str, error_class: str | None) -> None:
        """Count a job that ended."""
        self._jobs_ended[(state, error_class or "")] += 1

    def committed(self, report: CommitReport) -> None:
        """Count a transaction of the store."""
        self._commits += 1
        self._writes += report.writes
        self._lost += report.lost
        self._commit_seconds.observe(report.seconds)

    def double_run(self) -> None:
        """Count two attempts of a job that ran at once; must never happen."""
        self._double_runs += 1

    def render(self) -> bytes:
        """Return everything in Prometheus' text format."""
        from prometheus_client import generate_latest
        from prometheus_client.registry import CollectorRegistry

        if self._registry is None:
            self._registry = CollectorRegistry(auto_describe=False)
            self._registry.register(self)
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """Yield the metric families (Prometheus' collector interface)."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        def counter(
            name: str, text: str, labels: tuple[str, ...], counts: Mapping[tuple[str, ...], float]
        ) -> CounterMetricFamily:
            family = CounterMetricFamily(f"firepool_{name}", text, labels=labels)
            for values, count in counts.items():
                family.add_metric(values, count)
            return family

        def gauge(
            name: str, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]
        ) -> GaugeMetricFamily:
            family = GaugeMetricFamily(f"firepool_{name}", text, labels=labels)
            for each, value in values.items():
                family.add_metric(each, value)
            return family

        def single(counts: Mapping[str, float]) -> dict[tuple[str, ...], float]:
            return {(label,): count for label, count in counts.items()}

        yield counter(
            "acquisitions", "Acquisitions of pods.", ("path", "reason"), self._acquisitions
        )
        phases = HistogramMetricFamily(
            "firepool_start_seconds", "Latency of a start by phase.", labels=("phase",)
        )
        for phase, histogram in self._phases.items():
            phases.add_metric((phase,), histogram.buckets(), histogram.sum_seconds)
        yield phases
        yield counter("resets", "Resets of pods.", ("result",), single(self._resets))
        yield HistogramMetricFamily(
            "firepool_reset_seconds",
            "Time of a reset.",
            buckets=self._reset_seconds.buckets(),
            sum_value=self._reset_seconds.sum_seconds,
        )
        yield counter("holds_broken", "Holds broken.", ("reason",), single(self._holds_broken))
        yield counter("pods_retired", "Pods retired.", ("reason",), single(self._retirements))
        yield counter("jobs_ended", "Jobs ended.", ("state", "error_class"), self._jobs_ended)
        yield counter("commits", "Transactions of the store.", (), {(): self._commits})
        yield counter("commit_writes", "Writes they carried.", (), {(): self._writes})
        yield counter("lost_versions", "Conditional writes that lost.", (), {(): self._lost})
        yield HistogramMetricFamily(
            "firepool_commit_seconds",
            "Time of a transaction, sync included.",
            buckets=self._commit_seconds.buckets(),
            sum_value=self._commit_seconds.sum_seconds,
        )
        yield counter(
            "double_runs",
            "Jobs of which two attempts ran at once; must stay 0.",
            (),
            {(): self._double_runs},
        )
        fleet = self._fleet()
        yield gauge("pods", "Pods by state.", ("pool", "state"), fleet.pods)
        yield gauge("pods_supply", "Pods by stage of supply.", ("pool", "stage"), fleet.supply)
        yield gauge("queue_length", "Queued jobs.", ("pool",), single(fleet.queue_length))
        yield gauge(
            "queue_age_seconds",
            "Age of the oldest queued job.",
            ("pool",),
            single(fleet.queue_age_seconds),
        )


def _bounded(counts: Counter[T], label: T, otherwise: T) -> T:
    return label if label in counts or len(counts) < _LABELS else otherwise
