"""The commands of the town as a user calls them."""

from __future__ import annotations

import re
import runpy
import sys

import pytest
import yaml

from hamlet.town import Scripted, Town, load_pack, planner, validate
from hamlet.town.lives import HELD_OUT_LAYOUTS, play
from hamlet.town.load import PACKS


def short(tmp_path) -> str:
    file = tmp_path / "short.yaml"
    file.write_text("extends: l4_contention\nname: short\nlifespan: 20\nagents: 2\n")
    return str(file)


def test_the_planner_is_set_beside_the_expert(tmp_path, capsys):
    pack = short(tmp_path)
    assert planner.main([pack, "--worlds", "2", "--horizon", "6", "--period", "5"]) == 0
    told = capsys.readouterr().out
    found = re.fullmatch(
        r"expert ([\d.]+)  planner ([\d.]+)  difference ([+-][\d.]+) \(standard error ([\d.]+), "
        r"2 worlds\)\n",
        told,
    )
    expert, planned, difference, _ = map(float, found.groups())
    town = Town(load_pack(pack), layout_seed=HELD_OUT_LAYOUTS)
    for player, mean in (
        (Scripted(town, ["expert"]), expert),
        (planner.Planner(town, 5, 6), planned),
    ):
        each = play(town, player, 0, 2)["returns"].mean((1, 2))
        assert abs(each.mean().item() - mean) < 0.006
    assert abs(planned - expert - difference) < 0.015


def test_a_valid_pack_is_told_with_what_an_expert_gets_in_it(tmp_path, capsys):
    pack = short(tmp_path)
    assert validate.main([pack, "--worlds", "3", "--seed", "2"]) == 0
    town = Town(load_pack(pack), num_layouts=256)
    found = play(town, Scripted(town, ["expert"]), 2, 3)
    assert capsys.readouterr().out == (
        f"short {load_pack(pack).content_hash[:12]}: valid; full-map expert return "
        f"{found['returns'].mean():.1f}, life {found['life'].mean():.1f} of 20, "
        f"retired {found['retired'].mean():.0%}\n"
    )


@pytest.mark.parametrize("command", ["planner", "tune", "validate"])
def test_a_module_that_is_run_runs_its_command(command, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [command, "nowhere"])
    monkeypatch.delitem(sys.modules, f"hamlet.town.{command}", raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"hamlet.town.{command}", run_name="__main__")
    assert ended.value.code == 2
    assert f"{command}: " in capsys.readouterr().err


def test_what_is_no_pack_or_cannot_be_survived_is_one_line_and_exit_code_2(tmp_path, capsys):
    for command in (planner.main, validate.main):
        assert command(["nowhere"]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.count("\n") == 1
        assert "nowhere" in said.err
    hard = tmp_path / "hard.yaml"
    content = yaml.safe_load((PACKS / "l3_hours.yaml").read_text())
    hard.write_text(yaml.safe_dump(content | {"name": "hard", "depletion_multiplier": 9.0}))
    assert validate.main([str(hard), "--worlds", "2"]) == 2
    assert "even an expert that knows the map lives only" in capsys.readouterr().err
