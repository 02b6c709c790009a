"""Regions add up to the wall time, nest, and vanish where nobody looks."""

from __future__ import annotations

import gzip
import json

import pytest
import torch

from hamlet import profiling
from hamlet.profiling import Watch, profiled, region


class Clock:
    """A clock on which nothing but what is booked takes time."""

    now = 0.0

    def perf_counter(self):
        return self.now

    def work(self, name, seconds, inner=()):
        with region(name):
            self.now += seconds
            for other, part in inner:
                self.work(other, part)


def watched(steps, tmp_path, body, skip=1, count=3):
    last = None
    for last in profiled(range(steps), skip, count, tmp_path / "trace.json.gz"):
        if not isinstance(last, Watch):
            body(last)
    return last


def test_shares_are_exclusive_and_add_up(tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(profiling, "time", clock)

    def body(step):
        if step == 0:
            clock.work("data", 0.3)  # the warm-up is not in the window
        clock.work("policy", 0.01, [("perception", 0.03), ("policy", 0.005)])
        clock.now += 0.01

    watch = watched(9, tmp_path, body)
    shares = watch.shares()
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["data"] == 0.0
    assert shares["perception"] == pytest.approx(0.03 / 0.055)
    assert shares["policy"] == pytest.approx(0.015 / 0.055)
    assert shares["other"] == pytest.approx(0.01 / 0.055)
    first = watch.table().splitlines()[1].split()
    assert first[0] == "perception"
    assert watch.steps == 3


def test_the_trace_holds_regions_and_operations(tmp_path):
    def body(step):
        with region("loss"):
            torch.ones(64, 64) @ torch.ones(64, 64)

    watched(9, tmp_path, body)
    with gzip.open(tmp_path / "trace.json.gz") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"loss", "aten::mm"} <= names


def test_nothing_is_watched_before_or_after(tmp_path):
    clock = Clock()
    watch = watched(9, tmp_path, lambda step: clock.work("loss", 0.001))
    before = dict(watch.seconds)
    clock.work("loss", 0.01)
    assert watch.seconds == before
    assert profiling.current_watch is None
    with pytest.raises(ValueError, match="ends before"):
        watched(3, tmp_path, lambda step: None)
    assert profiling.current_watch is None


def test_regions_do_not_break_a_graph():
    @torch.compile(fullgraph=True, backend="eager")
    def double(x):
        with region("policy"):
            return x * 2

    assert double(torch.ones(2)).tolist() == [2.0, 2.0]
