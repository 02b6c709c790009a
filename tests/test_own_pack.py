"""The worked example of a town of one's own, trained as its page says, at the smallest size."""

from __future__ import annotations

import json
import shutil

import pytest
import yaml
from copied_repo import ROOT, Repo, tail, working_tree

from hamlet.params import load_params
from hamlet.town import load_pack

EXAMPLE = "examples/own_pack"
STAGES = (
    "world", "collect", "perception", "freeze_perception", "world_model", "social", "policy",
    "population", "agent", "evaluate",
)  # fmt: skip


def test_the_examples_parameters_are_a_preset(tmp_path, monkeypatch):
    shutil.copy(ROOT / "params.yaml", tmp_path)
    (tmp_path / "presets").mkdir()
    shutil.copy(ROOT / EXAMPLE / "params.yaml", tmp_path / "presets" / "own_pack.yaml")
    params = load_params(tmp_path / "params.yaml", "own_pack")
    monkeypatch.chdir(ROOT)
    pack = load_pack(params.town.pack)
    assert (pack.agents, len(pack.meters), pack.vision, pack.cues) == (1, 5, 3, ())
    ours = load_pack("l7_scarce")
    assert not set(pack.meter_names) & set(ours.meter_names)
    assert not set(pack.affordance_names) & set(ours.affordance_names)


@pytest.mark.slow
def test_the_example_is_trained_exported_evaluated_and_played(tmp_path):
    repo = Repo(tmp_path / "own")
    repo.path.mkdir()
    working_tree(repo.path)
    repo.set("town", "pack", f"{EXAMPLE}/pack.yaml")
    for stage in STAGES:
        done = repo.stage(stage)
        assert done.returncode == 0, f"{stage}\n{tail(done)}"
        if stage == "social":
            assert "in hermitage an agent is alone: there is nobody to read" in done.stdout
    metrics = json.loads((repo.artifacts / "metrics" / "agent.json").read_text())
    assert metrics["different_actions_batch_7"] == 0
    report = (repo.artifacts / "REPORT.md").read_text()
    assert "## policy" in report
    assert "others" not in report
    card = json.loads((repo.artifacts / "agent.onnx.json").read_text())
    assert card["town"]["meter_names"] == ["strength", "warmth", "fullness", "coins", "calm"]
    inputs = {entry["name"]: entry["shape"] for entry in card["schema"]["inputs"]}
    assert inputs["view"] == ["batch", 7, 7]
    assert inputs["cues"] == ["batch", 0, 0]
    content = yaml.safe_load((ROOT / EXAMPLE / "pack.yaml").read_text())
    assert card["resolved_pack"]["affordances"][0]["name"] == content["affordances"][0]["name"]
    played = repo.hamlet("play", "--ticks", "4")
    assert played.returncode == 0, played.stderr
    assert "agent 0: return" in played.stdout
    example = repo.hamlet("act", "--example").stdout
    told = repo.hamlet("act", input=example)
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout)["others"] == []
