"""Tuning writes what it found, for whom it was asked, and leaves the rest of the pack alone."""

from __future__ import annotations

import yaml

from hamlet.town import load_pack
from hamlet.town.tune import NOTE, main

QUICK = ["--generations", "2", "--candidates", "4", "--worlds", "1"]
MINE = """# My town.
extends: l4_contention
name: mine
lifespan: 12
agents: 2
schedule: [{tick: 6, price_factor: {Bed: 2.0}}]

experts:
  expert: {contended: 1.5, parameters: {foresight: 0.5}}
  expert_ignoring: {contended: 2.5}
"""


def test_the_experts_asked_for_are_tuned_and_the_others_kept(tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text(MINE)
    assert main([str(file), "--experts", "expert,expert_yesterday", *QUICK]) == 0
    assert file.read_text().startswith(MINE.split("\nexperts")[0])
    assert file.read_text().count("parameters:") == 2
    assert file.read_text().count(NOTE) == 1
    experts = yaml.safe_load(file.read_text())["experts"]
    assert experts.keys() == {"expert", "expert_ignoring", "expert_yesterday"}
    assert experts["expert"].keys() == {"contended", "alone", "parameters"}
    assert experts["expert_ignoring"] == {"contended": 2.5}
    found = {name: experts[name]["parameters"] for name in ("expert", "expert_yesterday")}
    assert found["expert"]["foresight"] not in (0.0, 0.5)
    assert found["expert_yesterday"] != found["expert"]
    assert all(values["wander"] == 0.0 for values in found.values())
    pack = load_pack(file)
    assert 0.0 < pack.experts["expert"].contended < 12.0
    assert pack.experts["expert_yesterday"].parameters == found["expert_yesterday"]


def test_ignoring_stays_ignoring_and_zero_stays_zero(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(MINE.replace(", parameters: {foresight: 0.5}", ""))
    assert main([str(file), *QUICK]) == 0
    experts = load_pack(file).experts
    assert experts["expert"].parameters["foresight"] == 0.0
    assert experts["expert"].parameters["occupied_wait"] > 0.0
    for name in ("foresight", "occupied_wait"):
        assert experts["expert_ignoring"].parameters[name] == 0.0


def test_an_unknown_expert_is_named(tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text(MINE)
    assert main([str(file), "--experts", "oracle", *QUICK]) == 2
    assert "no expert 'oracle'; use some of expert," in capsys.readouterr().err
    assert file.read_text() == MINE
