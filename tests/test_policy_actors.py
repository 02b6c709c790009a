"""The policy stage: graphs that are read when they are asked, and `--actors N`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from hamlet.artifacts import HamletError
from hamlet.export.frozen import freeze, load_frozen
from hamlet.params import load_params
from stages import policy
from stages.policy import cast_of, lazily

TINY = load_params(Path(__file__).parents[1] / "params.yaml", "tiny")


def of(**changes):
    return TINY.model_copy(update={"policy": TINY.policy.model_copy(update=changes)})


def test_a_graph_is_read_once_when_it_is_asked_from_wherever_that_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    layer, x, pack = torch.nn.Linear(3, 2), torch.rand(4, 3), "p" * 64
    file = Path("layer.pt2")

    class Answers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return (self.layer(x),)

    freeze(Answers(), {"x": x}, ["y"], file, kind="layer", pack=pack, upstream={}, extra={})
    read = []

    def counted(path, *given):
        read.append(path)
        return load_frozen(path, *given)

    monkeypatch.setattr(policy, "load_frozen", counted)
    ask, card = lazily(file, pack, torch.device("cpu"))
    assert card["kind"] == "layer"
    assert not read
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    for _ in range(2):
        torch.testing.assert_close(ask(x)[0], layer(x))
    assert len(read) == 1
    with pytest.raises(HamletError, match="pack"):
        lazily(tmp_path / file, "q" * 64, torch.device("cpu"))


def test_actors_are_for_impala_and_share_the_worlds():
    impala = of(algorithm="impala")
    assert cast_of(0, TINY) is None
    assert cast_of(2, impala).size == 2
    with pytest.raises(HamletError, match=r"with PPO .* set policy.algorithm to impala"):
        cast_of(2, TINY)
    for count in (3, -1):
        with pytest.raises(HamletError, match=f"policy.worlds is 8, which {count} actors cannot"):
            cast_of(count, impala)


@pytest.mark.slow
def test_the_policy_stage_with_two_actors_makes_what_it_makes_alone(copy):
    copy.env["OMP_NUM_THREADS"] = "1"
    for key, value in {
        "algorithm": "impala",
        "ppo_iterations": 4,
        "imitation_iterations": 2,
    }.items():
        copy.set("policy", key, value)
    weights = copy.artifacts / "policy" / "weights.pt"
    alone = copy.stage("policy")
    assert alone.returncode == 0, alone.stderr
    expected = torch.load(weights, weights_only=True)["policy"]
    weights.unlink()
    done = copy.run(sys.executable, "-m", "stages.policy", "--actors", "2")
    assert "Traceback" not in done.stderr
    found = torch.load(weights, weights_only=True)["policy"]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5, msg=name)
    lines = (copy.artifacts / "plots" / "policy.csv").read_text().splitlines()
    column = lines[0].split(",").index("lag")
    assert [line.split(",")[column] for line in lines[-4:]] == ["0", "1", "2", "2"]
    here, until = str(copy.path), time.monotonic() + 30
    while left := [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == here]:
        assert time.monotonic() < until, left
        time.sleep(0.5)
