"""Whole lines of `benchmarks.curves`, on the preset tiny, a rival's a thousandth of its length."""

from __future__ import annotations

import itertools
import json
import sys

import pytest

from benchmarks.curves_report import OURS
from benchmarks.curves_rivals import LENGTHS
from hamlet.artifacts import read_json

pytestmark = pytest.mark.slow


def test_lines_are_made_and_are_refused_until_dvc_has_made_them(copy):
    lines = copy.path / "benchmarks" / "results" / "curves"

    def run(*arguments, check=True):
        return copy.run(sys.executable, "-m", "benchmarks.curves", *arguments, check=check)

    def told_in_one_line(*arguments):
        done = run(*arguments, check=False)
        assert done.returncode == 1
        return [line for line in done.stderr.splitlines() if line.startswith("curves: ")][-1]

    for file in lines.iterdir():
        file.unlink()
    last = {OURS: json.loads(run("line", OURS).stdout)}
    assert "keeps no map of what it saw" in told_in_one_line("line", "end_to_end")
    last["lstm_ppo"] = json.loads(run("line", "lstm_ppo", "--share", "0.001").stdout)
    assert last["lstm_ppo"]["steps"] >= 0.001 * LENGTHS["lstm_ppo"].steps
    for name, end in last.items():
        points = read_json(lines / f"{name}.json")["points"]
        assert points[-1] == pytest.approx({k: v for k, v in end.items() if k != "line"}, rel=1e-4)
        for key in ("steps", "cpu_seconds"):
            assert all(a[key] < b[key] for a, b in itertools.pairwise(points))
    assert "other code or parameters than these: line-ours" in told_in_one_line("report")
