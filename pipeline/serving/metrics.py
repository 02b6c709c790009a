"""What the server counts, told as Prometheus reads it.

Counting is our own, since it is done in every tick: prometheus_client's histogram takes a lock at
each value. It writes the text.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric

SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.0, 5.0)
ROWS = (1, 2, 4, 8, 16, 32, 64)


class Histogram:
    """Counts per bucket; `observe` costs a fraction of a microsecond."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, how many values are at most that) of every bucket."""
        bounds = [str(float(bound)) for bound in self.bounds]
        return list(zip([*bounds, "+Inf"], accumulate(self.counts), strict=True))


@dataclass
class Counts:
    """What one version has done."""

    rows: int = 0
    runs: int = 0
    failed: int = 0
    run_seconds: float = 0.0
    """Of all rows: a batch of two that takes 1 s is 2 s."""
    queue_seconds: float = 0.0
    last: float = 0.0
    """When, as seconds since 1970."""


class Metrics:
    """Counters and histograms of one server; one event loop writes them."""

    def __init__(self) -> None:
        self.seconds = {stage: Histogram(SECONDS) for stage in ("queue", "run", "request")}
        self.rows = Histogram(ROWS)
        self.responses: Counter[int] = Counter()
        self.reloads: Counter[str] = Counter({"done": 0, "failed": 0})
        self.sessions_opened = 0
        self.sessions_closed: Counter[str] = Counter()
        self.pushed_back = 0
        self.repeated = 0
        self.late = 0
        self.failed_runs = 0

    def batch(self, counts: Counts, rows: int, seconds: float, waited: Sequence[float]) -> None:
        """One run: its size, its time and how long each of its requests had waited for it."""
        self.rows.observe(rows)
        self.seconds["run"].observe(seconds)
        for wait in waited:
            self.seconds["queue"].observe(wait)
        counts.rows += rows
        counts.runs += 1
        counts.run_seconds += rows * seconds
        counts.queue_seconds += sum(waited)
        counts.last = time.time()

    def text(self, sessions: Mapping[str, int], queued: int, provider: str, version: str) -> str:
        """The exposition.

        Args:
            sessions: open sessions by version; queued: requests that wait; provider: of ONNX
            Runtime; version: the current one.
        """
        registry = CollectorRegistry()
        registry.register(Families(self.families(sessions, queued, provider, version)))
        return generate_latest(registry).decode()

    def families(
        self, sessions: Mapping[str, int], queued: int, provider: str, version: str
    ) -> Iterator[Metric]:
        seconds = HistogramMetricFamily("hamlet_seconds", "Time by stage.", labels=["stage"])
        for stage, histogram in self.seconds.items():
            seconds.add_metric([stage], histogram.cumulative(), histogram.sum)
        yield seconds
        rows = self.rows.cumulative(), self.rows.sum
        yield HistogramMetricFamily("hamlet_batch_rows", "Rows per run.", *rows)
        yield by_label("responses", "Responses by status.", "status", self.responses)
        open_ = GaugeMetricFamily("hamlet_sessions", "Open sessions.", labels=["version"])
        for name, count in sessions.items():
            open_.add_metric([name], count)
        yield open_
        yield GaugeMetricFamily("hamlet_queue", "Requests that wait for a batch.", queued)
        for name, what, count in (
            ("sessions_opened", "Sessions begun.", self.sessions_opened),
            ("pushed_back", "Requests refused because the queue was full.", self.pushed_back),
            ("repeated", "Requests answered again by their id.", self.repeated),
            ("late", "Requests whose deadline passed.", self.late),
            ("failed_runs", "Runs that ONNX Runtime refused.", self.failed_runs),
        ):
            yield CounterMetricFamily(f"hamlet_{name}", what, count)
        closed = self.sessions_closed
        yield by_label("sessions_closed", "Sessions ended, by reason.", "reason", closed)
        yield by_label("reloads", "New versions taken up, or not.", "result", self.reloads)
        serves = {"provider": provider, "version": version}
        yield InfoMetricFamily("hamlet", "What serves.", serves)


class Families:
    """What prometheus_client asks for its metrics."""

    def __init__(self, found: Iterator[Metric]) -> None:
        self.found = found

    def collect(self) -> Iterator[Metric]:
        return self.found


def by_label(name: str, what: str, label: str, counts: Mapping[Any, int]) -> CounterMetricFamily:
    """A counter with a value for each value of one label."""
    family = CounterMetricFamily(f"hamlet_{name}", what, labels=[label])
    for value, count in counts.items():
        family.add_metric([str(value)], count)
    return family
