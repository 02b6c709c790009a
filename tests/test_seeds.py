"""Runs of several seeds side by side: what the table says of them."""

from __future__ import annotations

import json
import shutil

import pytest

from benchmarks import seeds
from hamlet.artifacts import HamletError


def run(seed: int, **other: float) -> dict:
    good = {"<=": 0.0, ">": 1.0}
    found: dict = {"pack": "x", "seed": seed}
    for _, stage, key, asked in seeds.ROWS:
        sign, limit = asked.split() if asked else ("", "0.5")
        value = good.get(sign, max(float(limit), 1.0) if asked else 0.5)
        found.setdefault(stage, {})[key] = other.get(key, value)
    return found


def row(text: str, what: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {what} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_what_is_not_as_asked_is_bold_and_the_mean_has_an_interval():
    runs = [
        run(1),
        run(2, share_of_expert=0.89, retired_fraction=0.97),
        run(3, map_ece=0.06, mean_return=180.0),
    ]
    text = seeds.table(runs)
    assert text.count("**") == 4
    share = "share of the full-map expert's"
    assert row(text, share)[:4] == [">= 0.95", "1.000", "**0.890**", "1.000"]
    assert row(text, share)[4] == "0.963 ± 0.16"  # 4.303 * 0.0635 / sqrt 3
    assert row(text, "calibration error of the map")[1:4] == ["0.000", "0.000", "**0.060**"]
    assert row(text, "mean return R of a life")[1:4] == ["0.500", "0.500", "180.0"]


def test_one_seed_has_no_interval():
    assert "±" not in seeds.table([run(1)])


def test_what_one_run_was_not_asked_has_no_row():
    old = run(1)
    del old["population"], old["evaluate"]["over_expert_watching"]
    text = seeds.table([old, run(2)])
    assert text.count("| seed ") == 2
    assert len(text.splitlines()) == len(seeds.ROWS) - 2 + 4


def test_the_easy_pack_asks_for_other_things():
    far = {"mean_return": 450.0, "normalised_score": 1.06, "share_of_expert": 0.8}
    easy = run(1, retired_fraction=0.98, **far) | {"pack": "l4_contention"}
    assert row(seeds.table([easy]), "retired") == [">= 0.99", "**0.980**", "**0.980**"]
    easy["evaluate"]["retired_fraction"] = 0.99
    assert "**" not in seeds.table([easy])


def test_a_checkout_without_a_run_is_named(tmp_path):
    shutil.copy("params.yaml", tmp_path)
    with pytest.raises(HamletError, match=r"perception\.json is not there"):
        seeds.taken(tmp_path)


@pytest.mark.slow
def test_the_tiny_pipelines_run_is_taken_in(copy):
    done = copy.run("python", "-m", "benchmarks.seeds")
    results = copy.path / "benchmarks" / "results"
    kept = json.loads((results / "seeds" / "brief-7.json").read_text())
    measured = json.loads((copy.artifacts / "metrics" / "evaluate.json").read_text())
    assert kept["evaluate"]["mean_return"] == measured["mean_return"]
    assert kept["evaluate"]["expert_return"] == measured["scores"]["expert"]["mean_return"]
    assert "## brief" in done.stdout
    assert done.stdout.strip() == (results / "seeds.md").read_text().strip()
