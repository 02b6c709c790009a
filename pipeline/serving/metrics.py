"""What the server counts, in the text format of Prometheus."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

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

    def lines(self, name: str, labels: str = "") -> Iterator[str]:
        total = 0
        for bound, count in zip((*self.bounds, "+Inf"), self.counts, strict=True):
            total += count
            yield f'{name}_bucket{{{labels}{"," if labels else ""}le="{bound}"}} {total}'
        braces = f"{{{labels}}}" if labels else ""
        yield f"{name}_sum{braces} {self.sum:.9g}"
        yield f"{name}_count{braces} {total}"


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

        def counted(name: str, what: str, kind: str, values: Mapping[str, float]) -> Iterator[str]:
            yield f"# HELP {name} {what}"
            yield f"# TYPE {name} {kind}"
            for labels, value in values.items():
                yield f"{name}{{{labels}}} {value}" if labels else f"{name} {value}"

        def labelled(key: str, values: Mapping[str, int] | Mapping[int, int]) -> dict[str, float]:
            return {f'{key}="{label}"': value for label, value in values.items()}

        lines = ["# HELP hamlet_seconds Time by stage.", "# TYPE hamlet_seconds histogram"]
        for stage, histogram in self.seconds.items():
            lines += histogram.lines("hamlet_seconds", f'stage="{stage}"')
        lines += ["# HELP hamlet_batch_rows Rows per run.", "# TYPE hamlet_batch_rows histogram"]
        lines += self.rows.lines("hamlet_batch_rows")
        gauge, counter = "gauge", "counter"
        lines += counted(
            "hamlet_responses_total", "Responses by status.", counter,
            labelled("status", self.responses),
        )  # fmt: skip
        lines += counted("hamlet_sessions", "Open sessions.", gauge, labelled("version", sessions))
        lines += counted(
            "hamlet_sessions_opened_total", "Sessions begun.", counter, {"": self.sessions_opened}
        )
        lines += counted(
            "hamlet_sessions_closed_total", "Sessions ended, by reason.", counter,
            labelled("reason", self.sessions_closed),
        )  # fmt: skip
        lines += counted("hamlet_queue", "Requests that wait for a batch.", gauge, {"": queued})
        lines += counted(
            "hamlet_pushed_back_total", "Requests refused because the queue was full.", counter,
            {"": self.pushed_back},
        )  # fmt: skip
        lines += counted(
            "hamlet_repeated_total", "Requests answered again by their id.", counter,
            {"": self.repeated},
        )  # fmt: skip
        lines += counted(
            "hamlet_late_total", "Requests whose deadline passed.", counter, {"": self.late}
        )
        lines += counted(
            "hamlet_failed_runs_total", "Runs that ONNX Runtime refused.", counter,
            {"": self.failed_runs},
        )  # fmt: skip
        lines += counted(
            "hamlet_reloads_total", "New versions taken up, or not.", counter,
            labelled("result", self.reloads),
        )  # fmt: skip
        info = f'provider="{provider}",version="{version}"'
        lines += counted("hamlet_info", "What serves.", gauge, {info: 1})
        return "\n".join([*lines, ""])
