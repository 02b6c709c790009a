"""What is told of a whole run: the stages to come, how long they took, where the time went."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from hamlet.own.project import PLAYERS_PLOT
from stages import overall
from stages.overall import duration, line, read_plan, to_come

ROOT = Path(__file__).parents[1]
STAGES = {
    "world": {"outs": ["w.json"]},
    "a": {"params": ["seed", {"w.json": ["x"]}], "outs": ["a"]},
    "b": {"deps": ["a/part"], "metrics": [{"b.json": {"cache": False}}]},
    "c": {"deps": ["code.py"], "outs": ["c"]},
    "register": {"deps": ["b.json", "c"]},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DVC_STAGE", "a")
    monkeypatch.setenv("HAMLET_EXECUTION", "one")
    monkeypatch.delenv("DVC_ROOT", raising=False)
    (tmp_path / ".dvc").mkdir()
    (tmp_path / "dvc.yaml").write_text(yaml.safe_dump({"stages": STAGES}))
    for name in ("w.json", "a", "b.json", "c"):
        (tmp_path / name).touch()
    return tmp_path


def test_who_waits_for_whom(folder):
    after = read_plan(folder / "dvc.yaml").after
    assert after["a"] == {"b", "register"}
    assert after["c"] == {"register"}
    assert after["world"] == {"a", "b", "register"}
    assert after["register"] == set()


def test_the_own_pipeline_is_read():
    after = read_plan(ROOT / "dvc.yaml").after
    assert after["social"] == {"policy", "population", "agent", "evaluate", "register"}
    assert "social" in after["freeze_perception"]
    assert "prove" not in after["collect"]


def test_what_is_to_come_are_dependents_and_what_was_never_made(folder):
    plan = read_plan(folder / "dvc.yaml")
    assert to_come(plan, "a", [], folder) == ["b", "register"]
    assert to_come(plan, "a", ["b"], folder) == ["register"]
    assert to_come(plan, "world", [], folder) == ["register"]
    (folder / "c").unlink()
    assert to_come(plan, "a", [], folder) == ["b", "c", "register"]
    (folder / "a").unlink()
    assert to_come(plan, "world", [], folder) == ["a", "b", "c", "register"]


def test_the_line_counts_and_adds_up():
    known = {"a": 60.0, "b": 30.0, "register": 5.0}
    assert line("a", {}, ["b", "register"], known, 0.0) == "stage 1 of 3, about 1 min 35 s to go"
    told = line("b", {"a": 50.0}, ["register"], known, 61.0)
    assert told == "stage 2 of 3, 1 min 01 s so far, about 35 s to go"
    told = line("b", {"a": 61.0}, ["c", "register"], known, 61.0)
    assert told == "stage 2 of 4, 1 min 01 s so far, 35 s to go, and 1 stages never timed here"
    assert line("c", {}, [], known, 0.0) == "stage 1 of 1"


def test_seconds_of_an_execution_and_of_earlier_ones(folder, monkeypatch, capsys):
    now = [1_712_345_678.0]
    monkeypatch.setattr(overall.time, "time", lambda: now[0])
    with overall.timed("a"):
        assert capsys.readouterr().err == "a: stage 1 of 3\n"
        now[0] += 100
    now[0] += 20  # in which DVC looked at files
    with overall.timed("b"):
        assert capsys.readouterr().err == "b: stage 2 of 3, 2 min 00 s so far\n"
        with monkeypatch.context() as beside, overall.timed("c"):
            beside.setenv("HAMLET_BESIDE", "somebody")
            now[0] += 30
        now[0] += 10
    assert overall.spent() == {"a": 100.0, "b": 40.0, "c": 30.0}
    assert overall.where_it_went() == [
        "a                  1 min 40 s   62 %",
        "b                       40 s   25 %",
        "c                       30 s  beside another",
        "starts, the rest        20 s",
        "in all             2 min 40 s",
    ]
    capsys.readouterr()
    kept = json.loads((folder / "checkpoints" / "seconds.json").read_text())
    assert kept == {"default/a": 100, "default/b": 40, "default/c": 0}  # by so much it took longer
    monkeypatch.setenv("HAMLET_EXECUTION", "two")
    assert (overall.spent(), overall.so_far(), overall.where_it_went()) == ({}, 0.0, [])
    with pytest.raises(ZeroDivisionError), overall.timed("a"):
        raise ZeroDivisionError
    assert capsys.readouterr().err.startswith("a: stage 1 of 3, 2 min 20 s to go, and 1 stages")
    assert overall.spent() == {}  # what failed took no such time


def test_outside_dvc_nothing_is_told_or_kept(folder, monkeypatch, capsys):
    monkeypatch.delenv("DVC_STAGE")
    with overall.timed("a"):
        pass
    assert capsys.readouterr().err == ""
    assert not (folder / "checkpoints").exists()


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(8.6, "9 s"), (59.7, "1 min 00 s"), (245, "4 min 05 s"), (3725, "1 h 02 min")],
)
def test_durations(seconds, told):
    assert duration(seconds) == told


# ------------------------------------------------------------------------------------------------
# What is drawn of it


def test_every_curve_is_of_columns_that_are_there_by_a_template_that_is_there():
    curves = yaml.safe_load((ROOT / "dvc.yaml").read_text())["plots"]
    drawn = {name: what for each in curves for name, what in each.items()}
    assert drawn.keys() == {"perception", "world_model", "social", "policy", "returns"}
    for name, what in drawn.items():
        ((file, columns),) = what["y"].items()
        header = (ROOT / file).read_text().partition("\n")[0].split(",")
        assert {what["x"], *([columns] if isinstance(columns, str) else columns)} <= set(header)
        if "template" in what:
            template = (ROOT / ".dvc" / "plots" / f"{what['template']}.json").read_text()
            told_apart = json.loads(template)["encoding"]["color"]["field"]
            assert told_apart in header, name
    assert drawn["returns"]["template"] == "players"
    assert template == PLAYERS_PLOT  # of one's own project too
