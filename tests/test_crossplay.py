"""Agents of several trainings in shared worlds: what is measured, and what the table says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.crossplay import main, measure, resident, table
from hamlet.artifacts import HamletError
from hamlet.learning.population import Characters
from hamlet.params import load_params
from hamlet.town import Scripted
from stages.collect import make_town


@pytest.fixture
def brief(tmp_path):
    """The params of a town whose lives end early."""
    pack = tmp_path / "brief.yaml"
    text = Path("pipeline/town/packs/l4_contention.yaml").read_text()
    pack.write_text(text.replace("lifespan: 500", "lifespan: 100"))
    params = load_params(preset="tiny")
    town = params.town.model_copy(update={"pack": str(pack), "layouts": 16})
    return params.model_copy(update={"town": town})


def seating(town, who):
    return lambda first, last: Characters(Scripted(town, [who], 0), first, last)


@pytest.mark.slow
def test_who_plays_better_gets_more_beside_anyone(brief):
    town = make_town(brief)
    agents = {"good": seating(town, "expert"), "bad": seating(town, "random")}
    found = measure(agents, brief, 16, 0)
    payoff, focal = found["payoff"], found["focal"]
    for column in agents:
        assert payoff["good"][column]["mean"] > 1.1 * payoff["bad"][column]["mean"]
    assert focal["expert"]["mean"] > focal["rest"]["mean"]
    assert focal["bad"]["normalised"] < 0.5
    assert found["strangers_minus_own_kind"]["ci95"] > 0
    assert f"| bad | {payoff['bad']['good']['mean']:.1f} ± " in table(found, "x")


def test_a_checkout_without_a_run_is_named(tmp_path):
    shutil.copy("params.yaml", tmp_path)
    with pytest.raises(HamletError, match=r"perception\.pt2 is not there"):
        resident(tmp_path)


@pytest.mark.slow
def test_the_tiny_pipelines_agents_meet(copy, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("benchmarks.crossplay.RESULTS", tmp_path / "results")
    other = shutil.copytree(copy.path, tmp_path / "other", symlinks=True)
    params = other / "params.yaml"
    params.write_text(params.read_text().replace("seed: 7", "seed: 8"))
    assert main([str(copy.path), str(other), "--worlds", "2"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    kept = json.loads((tmp_path / "results" / "brief.json").read_text())
    assert set(told["focal"]) == {"seed 7", "seed 8", "expert", "rest"}
    assert kept["strangers_minus_own_kind"]["mean"] == 0  # they are of the same weights
    with pytest.raises(HamletError, match="a second agent of seed 7"):
        main([str(copy.path), str(copy.path)])
