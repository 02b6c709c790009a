"""A policy of a log as an ONNX file, and the gate before it."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch

pytest.importorskip("pyarrow")
from hamlet.artifacts import HamletError, check_card
from hamlet.export.onnx import export_onnx
from hamlet.offline import export
from hamlet.offline.export import export_policy
from hamlet.offline.judge import GateParams, gate, judge
from hamlet.offline.model import LogPolicy
from hamlet.offline.open_log import open_log
from tests.offline.logged import BEHAVIOUR, GAMMA, play, policy_table, true_return, write

EVERYTHING = """\
actions: [wait, go, turn]
log_prob: log_prob
terminated: over
action_mask: legal
fields:
  numbers: {kind: vector, columns: [a, b]}
  history: {kind: sequence, columns: [history], shape: [4, 2]}
  device: {kind: category, columns: [device], count: 5}
  cells: {kind: grid, columns: [cells], shape: [5, 4], count: 6}
  picture: {kind: grid, columns: [picture], shape: [2, 5, 5]}
"""


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """A store with every kind of field."""
    rng = np.random.default_rng(0)
    n = 60
    columns = {
        "episode": np.repeat(np.arange(20), 3), "step": np.tile(np.arange(3), 20),
        "a": 50 + 20 * rng.normal(size=n), "b": rng.normal(size=n),
        "history": rng.normal(size=(n, 8)).tolist(), "device": rng.integers(5, size=n),
        "cells": rng.integers(6, size=(n, 20)).tolist(),
        "picture": rng.normal(size=(n, 50)).tolist(), "action": np.zeros(n, int),
        "legal": [[True, *rng.integers(2, size=2).astype(bool).tolist()] for _ in range(n)],
        "log_prob": np.full(n, -1.0), "reward": rng.normal(size=n),
        "over": np.tile([False, False, True], 20),
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("everything")
    return open_log(write(folder, columns, schema=EVERYTHING), None, folder / "cache")


def scrambled(store, recurrent):
    torch.manual_seed(0)
    policy = LogPolicy(store.schema, store.facts["statistics"], 16, recurrent)
    with torch.no_grad():
        policy.logits.weight.normal_()
    return policy


def test_the_file_acts_as_the_policy_in_every_kind_of_field(everything, tmp_path):
    policy = scrambled(everything, recurrent=True)
    path = tmp_path / "policy.onnx"
    worst = export_policy(policy, everything, path, {"objective": "ppo"})
    assert worst < 1e-5
    card = check_card(path)
    assert card["policy"]["actions"] == ["wait", "go", "turn"]
    assert card["limits"] == {"device": [0, 4], "cells": [0, 5]}
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert [i.name for i in session.get_inputs()] == [e["name"] for e in card["schema"]["inputs"]]
    # A whole episode, tick by tick, equals the policy on the episode.
    windows = everything.windows(3, np.ones(20, bool))
    rows = everything.read(windows, np.arange(20), 3)
    with torch.no_grad():
        wanted = policy(rows)[0].softmax(-1)
    memory = np.zeros((20, 16), np.float32)
    for t in range(3):
        names = [*everything.fields, "action_mask"]
        feed = {name: rows[name][t].numpy() for name in names}
        feed["state_memory"] = memory
        action, odds, _, memory = session.run(None, feed)
        np.testing.assert_allclose(odds, wanted[t], atol=1e-5)
        assert (odds[~feed["action_mask"]] == 0).all()
        assert feed["action_mask"][np.arange(20), action].all()


def test_a_file_that_differs_is_refused(tmp_path, monkeypatch):
    store = open_log(write(tmp_path, play(BEHAVIOUR, 30, 5)), None, tmp_path / "cache")
    policy = scrambled(store, recurrent=False)
    path = tmp_path / "policy.onnx"
    assert export_policy(policy, store, path, {}) < 1e-5
    assert [e["name"] for e in check_card(path)["schema"]["inputs"]] == ["noise", "state"]
    path.unlink()

    def shifted(tick, *rest):
        bias = tick.policy.logits.bias
        with torch.no_grad():
            bias[1] += 0.5
            made = export_onnx(tick, *rest)
            bias[1] -= 0.5
        return made

    monkeypatch.setattr(export, "export_onnx", shifted)
    with pytest.raises(HamletError, match="ONNX Runtime differs from the policy by"):
        export_policy(policy, store, path, {})
    assert not path.exists()


def test_a_policy_is_judged_near_its_true_return(tmp_path):
    """A policy set by hand, whose return is known, judged from another's log."""
    store = open_log(write(tmp_path, play(BEHAVIOUR, 3000, 5)), None, tmp_path / "cache")
    torch.manual_seed(0)
    policy = LogPolicy(store.schema, store.facts["statistics"], 16, False)
    with torch.no_grad():
        policy.logits.bias.copy_(torch.tensor([0.0, 0.8]))
    truth = true_return(policy_table(policy))
    before = true_return(BEHAVIOUR)
    found = judge(store, policy, GAMMA, 0)
    assert found["held_out_episodes"] == 600
    for name in ("importance", "doubly_robust", "fitted_q"):
        low, high = found[name]["ci95"]
        assert low - 0.1 * truth < truth < high + 0.1 * truth, name
        assert abs(found[name]["value"] - truth) < 0.12 * truth, name
    assert found["improvement"]["value"] == pytest.approx(truth - before, abs=0.25)
    assert found["behaviour_kl"] > 0.05
    odds = torch.tensor([0.0, 0.8]).softmax(0)
    assert found["entropy"] == pytest.approx(-(odds * odds.log()).sum().item(), abs=1e-4)
    assert gate(found, GateParams(), "ppo") == []


def test_every_limit_of_the_gate_gives_its_reason():
    fine = {
        "improvement": {"value": 0.5, "ci95": [0.1, 0.9]}, "effective_episodes": 50.0,
        "entropy": 0.5, "behaviour_kl": 0.1, "loss": 0.7,
    }  # fmt: skip
    limits = GateParams(min_entropy=0.1)
    assert gate(fine, limits, "ppo") == []
    for name, value, reason in (
        ("improvement", {"value": 0.5, "ci95": [-0.1, 0.9]}, "95 % from -0.1 to 0.9"),
        ("effective_episodes", 3.0, "effective_episodes is 3, the gate asks at least 10"),
        ("entropy", 0.01, "entropy is 0.01, the gate asks at least 0.1"),
        ("behaviour_kl", 2.0, "behaviour_kl is 2, the gate asks at most 1"),
        ("loss", float("nan"), "loss is nan, the gate asks at most 3"),
    ):
        (told,) = gate(fine | {name: value}, limits, "ppo")
        assert reason in told
    worse = fine | {"improvement": {"value": 0.0, "ci95": [-0.1, 0.1]}}
    assert gate(worse, limits, "imitation") == []
