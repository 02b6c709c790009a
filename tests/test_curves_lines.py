"""Whole lines of `benchmarks.curves`, on the preset tiny, with less time than a rival is given."""

from __future__ import annotations

import itertools
import json
import sys

import pytest
import yaml

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
    params = yaml.safe_load((copy.path / "params.yaml").read_text())
    params["policy"]["teacher"] = "expert_watching"
    (copy.path / "params.yaml").write_text(yaml.safe_dump(params))
    for name in ("end_to_end", "lstm_ppo"):
        last[name] = json.loads(run("line", name, "--share", "0.004").stdout)
        assert last[name]["steps"] >= 0.004 * LENGTHS[name].steps
    for name, end in last.items():
        points = read_json(lines / f"{name}.json")["points"]
        assert points[-1] == pytest.approx({k: v for k, v in end.items() if k != "line"}, rel=1e-4)
        for key in ("steps", "cpu_seconds"):
            assert all(a[key] < b[key] for a, b in itertools.pairwise(points))
    assert "other code or parameters than these: line-ours" in told_in_one_line("report")
