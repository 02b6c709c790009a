"""What is counted, as Prometheus's own parser reads it; no server."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hamlet.serving.metrics import Counts, Histogram, Metrics


def read(metrics: Metrics, **given) -> dict[tuple, float]:
    """(sample's name, its labels) -> value."""
    told = {"sessions": {}, "queued": 0, "provider": "CPU", "version": "1"} | given
    families = text_string_to_metric_families(metrics.text(**told))
    return {
        (s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples
    }


def test_a_histogram_counts_every_value_up_to_each_bound():
    found = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        found.observe(value)
    assert found.cumulative() == [("1.0", 2), ("2.0", 4), ("+Inf", 5)]  # a bound is inside it
    assert found.sum == 14.0


def test_a_run_is_counted_by_rows_by_time_and_by_what_waited():
    metrics, counts = Metrics(), Counts()
    metrics.batch(counts, 3, 0.25, [0.0005, 0.5, 4.0])
    metrics.batch(counts, 64, 0.5, [])
    assert (counts.rows, counts.runs) == (67, 2)
    assert counts.run_seconds == 3 * 0.25 + 64 * 0.5
    assert counts.queue_seconds == 4.5005
    found = read(metrics)
    run, queue = ("stage", "run"), ("stage", "queue")
    assert found["hamlet_batch_rows_bucket", ("le", "2.0")] == 0
    assert found["hamlet_batch_rows_bucket", ("le", "4.0")] == 1
    assert found["hamlet_batch_rows_bucket", ("le", "64.0")] == 2
    assert found["hamlet_batch_rows_sum",] == 67
    assert found["hamlet_batch_rows_count",] == 2
    assert found["hamlet_seconds_sum", run] == 0.75
    assert found["hamlet_seconds_count", run] == 2
    assert found["hamlet_seconds_bucket", ("le", "0.0005"), queue] == 1
    assert found["hamlet_seconds_bucket", ("le", "0.512"), queue] == 2
    assert found["hamlet_seconds_bucket", ("le", "+Inf"), queue] == 3
    assert found["hamlet_seconds_count", ("stage", "request")] == 0


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("sessions_opened", "hamlet_sessions_opened_total"),
        ("pushed_back", "hamlet_pushed_back_total"),
        ("repeated", "hamlet_repeated_total"),
        ("late", "hamlet_late_total"),
        ("failed_runs", "hamlet_failed_runs_total"),
    ],
)
def test_each_counter_stands_under_its_name(field, name):
    metrics = Metrics()
    before = read(metrics)
    setattr(metrics, field, 3)
    after = read(metrics)
    assert {key for key in after if after[key] != before.get(key)} == {(name,)}
    assert after[name,] == 3


def test_counts_by_label_and_what_is_now():
    metrics = Metrics()
    metrics.responses[404] += 2
    metrics.sessions_closed["timeout"] += 1
    metrics.reloads["failed"] += 4
    odd = 'a"b\\c\nd'  # a version is whatever an alias was called
    found = read(metrics, sessions={"1": 5, odd: 7}, queued=6, provider="CPU", version=odd)
    assert found["hamlet_responses_total", ("status", "404")] == 2
    assert found["hamlet_sessions_closed_total", ("reason", "timeout")] == 1
    assert found["hamlet_reloads_total", ("result", "failed")] == 4
    assert found["hamlet_reloads_total", ("result", "done")] == 0
    assert found["hamlet_sessions", ("version", "1")] == 5
    assert found["hamlet_sessions", ("version", odd)] == 7
    assert found["hamlet_queue",] == 6
    assert found["hamlet_info", ("provider", "CPU"), ("version", odd)] == 1
