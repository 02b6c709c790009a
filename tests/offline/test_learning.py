"""What is learned from logs of a world whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("pyarrow")
from hamlet.artifacts import HamletError
from hamlet.offline.log_store import open_store
from hamlet.offline.open_log import open_log
from hamlet.offline.train import (
    Loss,
    OfflineParams,
    batch_of,
    estimate_behaviour,
    new_policy,
    return_scale,
    targets,
    train_policy_on_log,
)
from tests.offline.logged import (
    BEHAVIOUR,
    GAMMA,
    SCHEMA,
    Quiet,
    play,
    policy_table,
    true_return,
    write,
)

PARAMS = OfflineParams(
    gamma=GAMMA, steps=40, window=12, windows=64, minibatches=2, hidden=16, learning_rate=5e-3
)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("log")
    return open_log(write(folder, play(BEHAVIOUR, 1500, 0)), None, folder / "cache")


def trained(store, tmp_path, log=None, **changes):
    params = PARAMS.model_copy(update=changes)
    policy = new_policy(store, params)
    train_policy_on_log(store, policy, params, tmp_path / "checkpoint.pt", log or Quiet())
    return policy


def test_imitation_recovers_the_behaviour(tmp_path):
    """Its likeliest action agrees with a fresh log almost as often as any rule could."""
    sharp = np.array([[0.8, 0.2], [0.3, 0.7], [0.1, 0.9]])
    store = open_log(write(tmp_path, play(sharp, 600, 3)), None, tmp_path / "cache")
    table = policy_table(trained(store, tmp_path, objective="imitation"))
    fresh = play(sharp, 2000, 9)
    taken, state = fresh["action"], fresh["state"]
    best = (sharp.argmax(1)[state] == taken).mean()
    assert (table.argmax(1)[state] == taken).mean() > best - 0.02
    assert np.abs(table - sharp).max() < 0.1


def test_values_do_not_pull_at_what_is_cloned(store, tmp_path):
    """Another reward, another value: the policy that imitates is the same."""
    params = PARAMS.model_copy(update={"objective": "imitation"})
    policy = new_policy(store, params)
    batch = targets(
        policy, store.read(store.windows(12, ~store.held_out()), np.arange(8), 12), params
    )
    with torch.no_grad():
        policy.logits.weight.normal_()
    loss = Loss(policy, params)
    found = []
    for shift in (0.0, 5.0):
        batch["targets"] = batch["targets"] + shift
        policy.zero_grad()
        loss(batch)[0].backward()
        found.append({n: p.grad.clone() for n, p in policy.named_parameters()})
    for name, gradient in found[0].items():
        assert torch.equal(gradient, found[1][name]) == (not name.startswith("value.")), name


@pytest.mark.parametrize(("objective", "least"), [("ppo", 0.15), ("impala", 0.3)])
def test_the_policy_improves_on_the_behaviour(objective, least, store, tmp_path):
    """Truly, not by an estimate; three seeds, the interval clear of zero."""
    gains = []
    for seed in range(3):
        folder = tmp_path / str(seed)
        policy = trained(store, folder, objective=objective, seed=seed)
        gains.append(true_return(policy_table(policy)) - true_return(BEHAVIOUR))
    half = 4.303 * np.std(gains, ddof=1) / 3**0.5  # Student's t, two degrees of freedom
    assert np.mean(gains) - half > 0
    assert min(gains) > least


def test_a_policy_too_far_from_the_behaviour_comes_back(store, tmp_path):
    log = Quiet()
    trained(store, tmp_path, log, objective="impala", max_kl=0.05, steps=80)
    assert log.last["behaviour_kl"] < 0.15
    free = Quiet()
    trained(store, tmp_path / "free", free, objective="impala", max_kl=100.0, steps=80)
    assert free.last["behaviour_kl"] > 0.3


class Constant(nn.Module):
    """Even odds, and V = 10 everywhere."""

    scale = torch.tensor(1.0)

    def forward(self, rows):
        shape = rows.batch_size
        return torch.zeros(*shape, 2), torch.full(shape, 10.0)


@pytest.mark.parametrize("objective", ["ppo", "impala", "imitation"])
def test_nothing_crosses_an_ending_that_is_not_known(objective, tmp_path):
    """With V = 10, reward 1 and gamma .9 every advantage is 0 where the ending is open."""
    columns = play(BEHAVIOUR, 60, 2)
    n = len(columns["episode"])
    columns["reward"] = np.ones(n)
    columns["terminated"] = np.zeros(n, bool)
    store = open_log(write(tmp_path, columns), None, tmp_path / "cache")
    windows = store.windows(3, np.ones(60, bool))
    rows = store.read(windows, np.arange(len(windows.start)), 3)
    params = OfflineParams(objective=objective, gamma=0.9)
    got = targets(Constant(), rows, params)
    assert got["advantages"].abs().max() < 1e-5
    assert (got["targets"] - 10).abs().max() < 1e-5
    assert int(rows["known"].sum()) == n - 60  # the last of each is not learned from


def test_credit_never_crosses_an_episode(tmp_path):
    """The reward of one episode changes no target of another, whichever way they lie."""
    columns = play(BEHAVIOUR, 30, 4)
    first = open_log(write(tmp_path, columns), None, tmp_path / "cache")
    changed = columns | {"reward": columns["reward"] + 100.0 * (columns["episode"] == 11)}
    second = open_log(write(tmp_path / "b", changed), None, tmp_path / "cache")
    windows = first.windows(4, np.ones(30, bool))
    which = np.arange(len(windows.start))
    for objective in ("ppo", "impala"):
        params = OfflineParams(objective=objective, gamma=0.9)
        a, b = (targets(Constant(), s.read(windows, which, 4), params) for s in (first, second))
        for name in ("targets", "advantages"):
            moved = (a[name] != b[name]).any(0).numpy()
            assert moved.any()
            assert set(windows.episode[moved]) == {11}


def test_a_recurrent_policy_remembers_within_an_episode_and_not_beyond(tmp_path):
    """The first row shows what the later ones ask for; the next episode shows another."""
    rng = np.random.default_rng(0)
    shown = rng.integers(2, size=400)
    step = np.tile(np.arange(3), 400)
    cue = np.where(step == 0, np.repeat(shown, 3) + 1, 0)
    right = np.repeat(shown, 3)
    n = len(step)
    columns = {
        "episode": np.repeat(np.arange(400), 3), "step": step, "cue": cue,
        "action": np.where(step == 2, right, rng.integers(2, size=n)),
        "reward": np.zeros(n), "terminated": step == 2,
    }  # fmt: skip
    schema = (
        "actions: 2\nterminated: terminated\n"
        "fields:\n  cue: {kind: category, columns: [cue], count: 3}\n"
    )
    store = open_log(write(tmp_path, columns, schema=schema), None, tmp_path / "cache")
    windows = store.windows(3, store.held_out())
    rows = store.read(windows, np.arange(len(windows.start)), 3)
    agreement = {}
    for recurrent in (True, False):
        policy = trained(
            store, tmp_path / str(recurrent), objective="imitation", recurrent=recurrent, steps=60,
            window=3, learning_rate=1e-2,
        )  # fmt: skip
        with torch.no_grad():
            chosen = policy(rows)[0].argmax(-1)
        agreement[recurrent] = (chosen[2] == rows["action"][2]).float().mean().item()
    assert agreement[True] > 0.97
    assert agreement[False] < 0.75


def test_decisions_with_sequences_seeds_and_blueprints(tmp_path):
    """One decision an episode: the best blueprint depends on the seed and on a rising metric."""
    rng = np.random.default_rng(0)
    n, seeds, blueprints = 1500, 5, 4
    rising, seed = rng.integers(2, size=n), rng.integers(seeds, size=n)
    slope = (2.0 * rising - 1)[:, None, None] * np.arange(6.0)[None, :, None]
    metrics = slope + 0.3 * rng.normal(size=(n, 6, 2))
    best = (seed + rising) % blueprints
    action = rng.integers(blueprints, size=n)
    columns = {
        "episode": np.arange(n), "step": np.zeros(n, int), "seed_idx": seed,
        "metric_sequence": metrics.reshape(n, 12).tolist(), "blueprint_idx": action,
        "features": rng.normal(size=(n, 3)).tolist(), "log_prob": np.full(n, -np.log(blueprints)),
        "returns": (action == best) + 0.1 * rng.normal(size=n), "over": np.ones(n, bool),
    }  # fmt: skip
    schema = """\
actions: 4
action: blueprint_idx
reward: returns
log_prob: log_prob
terminated: over
fields:
  features: {kind: vector, columns: [features], shape: [3]}
  metric_sequence: {kind: sequence, columns: [metric_sequence], shape: [6, 2]}
  seed_idx: {kind: category, columns: [seed_idx], count: 5}
"""
    store = open_log(write(tmp_path, columns, schema=schema), None, tmp_path / "cache")
    policy = trained(
        store, tmp_path, objective="impala", steps=60, windows=256, minibatches=4, hidden=32,
        max_kl=5.0,
    )  # fmt: skip
    windows = store.windows(1, store.held_out())
    with torch.no_grad():
        rows = store.read(windows, np.arange(len(windows.start)), 1)
        odds = policy(rows)[0][0].softmax(-1)
    chance = odds.gather(1, torch.from_numpy(best[store.held_out()])[:, None]).mean()
    assert chance > 0.75


def test_a_killed_training_goes_on_bit_for_bit(store, tmp_path):
    whole = trained(store, tmp_path / "whole", objective="impala", steps=12)

    class Killed(Quiet):
        def record(self, step, metrics):
            super().record(step, metrics)
            if step == 7:
                raise KeyboardInterrupt

    import hamlet.learning.checkpoint as checkpoints

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints.time, "monotonic", _clock())
        with pytest.raises(KeyboardInterrupt):
            trained(store, tmp_path / "cut", Killed(), objective="impala", steps=12)
    assert (tmp_path / "cut" / "checkpoint.pt").exists()
    torch.manual_seed(99)
    resumed = Quiet()
    params = PARAMS.model_copy(update={"objective": "impala", "steps": 12})
    policy = new_policy(store, params.model_copy(update={"seed": 5}))
    train_policy_on_log(store, policy, params, tmp_path / "cut" / "checkpoint.pt", resumed)
    for a, b in zip(whole.parameters(), policy.parameters(), strict=True):
        assert torch.equal(a, b)


def _clock():
    """A clock on which every look is a minute later, so that every step is saved."""
    now = [0.0]

    def look():
        now[0] += 60.0
        return now[0]

    return look


def test_every_window_comes_once_before_any_comes_again():
    seen = np.concatenate([batch_of(step, 6, 20, 3) for step in range(20)])
    for turn in seen.reshape(-1, 20):
        assert sorted(turn) == list(range(20))
    assert (seen[:20] != seen[20:40]).any()


def test_log_probabilities_are_estimated_where_the_log_has_none(tmp_path):
    columns = play(BEHAVIOUR, 1000, 0)
    path = write(tmp_path, columns, schema=SCHEMA.replace("log_prob: log_prob\n", ""))
    store = open_log(path, None, tmp_path / "cache")
    with pytest.raises(HamletError, match=r"ppo needs the behaviour's log-prob.* or take `imitat"):
        trained(store, tmp_path, objective="ppo")
    params = PARAMS.model_copy(update={"behaviour_steps": 60})
    estimate_behaviour(store, params, tmp_path / "behaviour.pt", Quiet())
    again = open_store(store.folder)
    assert again.estimated
    assert np.abs(again.log_prob - columns["log_prob"]).mean() < 0.1
    trained(again, tmp_path, objective="ppo", steps=2)


@pytest.mark.parametrize("objective", ["ppo", "impala"])
def test_the_unit_of_the_rewards_does_not_matter(objective, store, tmp_path):
    """Rewards a thousand times as large: the same odds, and values a thousand times as large."""
    columns = play(BEHAVIOUR, 1500, 0)
    columns["reward"] = columns["reward"] * 1000
    large = open_log(write(tmp_path, columns), None, tmp_path / "cache")
    assert return_scale(large, GAMMA) == pytest.approx(1000 * return_scale(store, GAMMA), rel=1e-5)
    small, same = (
        trained(s, tmp_path / name, objective=objective, steps=8)
        for s, name in ((store, "a"), (large, "b"))
    )
    np.testing.assert_allclose(policy_table(small), policy_table(same), atol=1e-3)
    rows = store.read(store.windows(8, store.held_out()), np.arange(9), 8)
    with torch.no_grad():
        torch.testing.assert_close(1000 * small(rows)[1], same(rows)[1], rtol=1e-2, atol=5.0)


def test_windows_must_be_divisible(store, tmp_path):
    with pytest.raises(HamletError, match=r"windows is 64, not a multiple of minibatches \(7\)"):
        trained(store, tmp_path, minibatches=7)
