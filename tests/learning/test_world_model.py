"""The world model's report tells good from bad, its rules are learned, and it does not enlarge
rounding."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from hamlet.export.frozen import freeze, load_frozen
from hamlet.export.onnx import export_onnx
from hamlet.learning.checkpoint import Checkpoint
from hamlet.learning.train_world_model import (
    INPUTS,
    calibrate,
    evaluate_world_model,
    rank_correlation,
    train_world_model,
)
from hamlet.modules.contracts import LOOK, TownShape
from hamlet.modules.world_model import WorldModel, level
from hamlet.ort import open_unchecked
from hamlet.params import WorldModelParams
from hamlet.town import Town, load_pack
from tests.learning.interrupted import Stopped, StoppedLog

LATENT, TICKS, WORLDS, GAMMA = 3, 80, 24, 0.9
GAIN, LOSS = 0.1, 0.02


class Silent:
    def steps(self, total, start):
        return range(start, total)

    def record(self, step, metrics):
        pass


@pytest.fixture(scope="module")
def shape() -> TownShape:
    return TownShape.of(Town(load_pack("l4_contention"), num_layouts=8))


def live(shape, refused: float, duration: int = 1, tried: float = 0.25) -> Any:
    """[T, B, 1]: everybody stands on affordance 0 or on none; using it for so many ticks on end
    feeds energy by GAIN for each, all with the last, unless it is refused, with that probability;
    every tick costs LOSS; the reward is energy, and a life ends with it."""
    rng = torch.Generator().manual_seed(2)
    size = (WORLDS, 1)
    stands = torch.rand(size, generator=rng) < 0.5
    energy = 0.3 + 0.7 * torch.rand(size, generator=rng)
    alive = torch.ones(size, dtype=torch.bool)
    mean = torch.full((*size, 2 * shape.num_affordances + LOOK + LATENT), 0.4)
    mean[..., :2] = torch.where(stands, 0.0, 0.4).unsqueeze(-1)
    log_std = torch.full_like(mean, -3.9)
    interact = shape.action_names.index("INTERACT")
    blocked, progress = torch.zeros(2, *size)
    rows: list[Any] = []
    for _ in range(TICKS):
        known = torch.zeros(*size, shape.self_dim)
        known[..., : shape.num_meters] = 0.5
        known[..., 0] = energy
        known[..., shape.self_names.index("blocked")] = blocked
        known[..., shape.self_names.index("cos_hour")] = 1.0
        known[..., shape.self_names.index("progress")] = progress / 10
        tries = torch.rand(size, generator=rng) < tried
        action = torch.where(tries, interact, torch.randint(4, size, generator=rng))
        toss = torch.rand(size, generator=rng) < refused
        blocked = (tries & stands & toss).float()
        progress = torch.where(tries & stands & ~toss, progress + 1, 0.0)
        whole = progress == duration
        progress = torch.where(whole, 0.0, progress)
        after = (energy - LOSS + GAIN * duration * whole).clamp(0, 1)
        after = torch.where(alive, after, energy)
        done = alive & (after <= 0)
        reward = torch.where(alive & ~done, after, 0.0)
        rows.append(
            TensorDict(
                {
                    "mean": mean, "log_std": log_std, "known_state": known, "action": action,
                    "legal": torch.ones(*size, shape.num_actions, dtype=torch.bool),
                    "reward": reward, "done": done | ~alive, "alive": alive,
                    "value": 10 * after,
                },
                batch_size=size,
            )
        )  # fmt: skip
        energy, alive = after, alive & ~done
    return torch.stack(rows)


@pytest.fixture(scope="module")
def lived(shape) -> Any:
    return live(shape, 0.0)


def oracle(shape):
    """The rules of `lived`, as a model."""

    def step(mean, log_std, known, action):
        stands = mean[:, 0] == 0
        tries = action == shape.action_names.index("INTERACT")
        energy = (known[:, 0] - LOSS + GAIN * (tries & stands)).clamp(0, 1)
        known = torch.cat([energy.unsqueeze(1), known[:, 1:]], 1)
        survives = (energy > 0).float()
        sure = torch.ones_like(energy)
        return (
            mean, log_std, known, energy * survives, survives, 10 * energy,
            torch.ones(len(mean), shape.num_actions), 1 - sure, sure, sure < 0,
        )  # fmt: skip

    return step


def test_the_report_of_a_model_that_knows_and_of_one_that_says_nothing_changes(shape, lived):
    worlds = torch.arange(WORLDS)
    known = evaluate_world_model(oracle(shape), lived, worlds, worlds, shape.num_meters, GAMMA, 3)
    for k in (1, 5, 15, 50):
        assert known[f"meter_error_{k}_over_persistence"] < 1e-5
        assert known[f"return_rank_correlation_{k}"] > 0.999
    assert known["reward_r2"] > 0.999
    assert known["value_explained_variance"] > 0.999
    assert known["continue_auroc"] > 0.999
    assert known["continue_brier"] < 1e-6

    def nothing(mean, log_std, state, action):
        _, _, _, *rest = oracle(shape)(mean, log_std, state, action)
        return mean, log_std, state, *rest

    still = evaluate_world_model(nothing, lived, worlds, worlds, shape.num_meters, GAMMA, 3)
    for k in (1, 5, 15, 50):
        assert still[f"meter_error_{k}_over_persistence"] == pytest.approx(1, abs=1e-6)
    assert still["return_rank_correlation_50"] < known["return_rank_correlation_50"]


def test_nothing_of_the_dead_is_in_the_report(shape, lived):
    worlds = torch.arange(WORLDS)
    dead = ~lived["alive"]
    assert dead.any()
    spoilt = lived.clone()
    for name, value in (("reward", 7.0), ("value", -50.0)):
        spoilt[name] = torch.where(dead, value, lived[name])
    told = [
        evaluate_world_model(oracle(shape), data, worlds, worlds, shape.num_meters, GAMMA, 3)
        for data in (lived, spoilt)
    ]
    assert told[0] == pytest.approx(told[1], nan_ok=True)


def test_rank_correlation_looks_at_the_order_only():
    x = torch.tensor([3.0, 1.0, 2.0, 7.0])
    assert rank_correlation(x, x.exp()) == pytest.approx(1)
    assert rank_correlation(x, -x) == pytest.approx(-1)
    assert rank_correlation(x, torch.tensor([1.0, 3.0, 2.0, 7.0])) == pytest.approx(0.2)


def sized(horizon: int, steps: int) -> WorldModelParams:
    return WorldModelParams(
        hidden=16, members=2, horizon=horizon, steps=steps, batch=64, learning_rate=5e-3,
        precision="fp32", shard=False,
    )  # fmt: skip


def test_an_interrupted_training_ends_with_the_same_weights(shape, lived, tmp_path, monkeypatch):
    every_step = partial(Checkpoint, interval=0)
    monkeypatch.setattr("hamlet.learning.train_world_model.Checkpoint", every_step)
    params, worlds = sized(horizon=2, steps=6), torch.arange(16)

    def train(file, stop=None):
        log = StoppedLog(stop)
        model = train_world_model(lived, worlds, shape, LATENT, params, 5, tmp_path / file, log)
        return model.state_dict()

    whole = train("whole.pt")
    with pytest.raises(Stopped):
        train("parts.pt", stop=4)
    parts = train("parts.pt")
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


def test_rules_are_learned_and_held_out_worlds_are_predicted(shape, lived, tmp_path):
    params = sized(horizon=2, steps=400)
    worlds = torch.arange(WORLDS)
    train, held_out = worlds[:16], worlds[16:]
    model = train_world_model(
        lived, train, shape, LATENT, params, 5, tmp_path / "checkpoint.pt", Silent()
    )
    calibrate(model, lived, held_out, 5)
    now = lived[:-1, 16:].flatten()
    now = now[now["alive"]]
    with torch.no_grad():
        *_, disagreement, confidence, novel = model(*(now[key] for key in INPUTS))
    usual, strange = disagreement.quantile(0.97), 1.01 * disagreement.max()
    assert usual < model.novel_threshold < strange  # one of two hundred is
    assert novel.float().mean() < 0.02
    assert 0.6 < confidence.mean() < 0.9  # at the mean error exp(-1/4)
    numbers = evaluate_world_model(model, lived, held_out, worlds, shape.num_meters, GAMMA, 5)
    assert numbers["meter_error_1_over_persistence"] < 0.5
    assert numbers["meter_error_15_over_persistence"] < 0.5
    assert numbers["reward_r2"] > 0.9
    assert numbers["continue_auroc"] > 0.9


@pytest.mark.slow
def test_a_toss_is_expected_in_the_mean_and_doubted(shape, tmp_path):
    """Half of all uses are refused: the rule is still learned whole, its effect expected by half,
    and confidence is lower than where nothing is tried."""
    params = sized(horizon=2, steps=900)
    tossed, worlds = live(shape, 0.5), torch.arange(WORLDS)
    model = train_world_model(
        tossed, worlds[:16], shape, LATENT, params, 5, tmp_path / "checkpoint.pt", Silent()
    )
    calibrate(model, tossed, worlds[16:], 5)
    now = tossed[:-1, 16:].flatten()
    inside = now["alive"] & (now["known_state"][:, 0] > 0.2) & (now["known_state"][:, 0] < 0.8)
    now = now[inside]
    with torch.no_grad():
        _, _, known, *_, confidence, _ = model(*(now[key] for key in INPUTS))
    used = (now["mean"][:, 0] == 0) & (now["action"] == shape.action_names.index("INTERACT"))
    gained = (known - now["known_state"])[:, 0] + LOSS
    assert GAIN * 0.3 < gained[used].mean() < GAIN * 0.7
    assert gained[~used].abs().mean() < GAIN / 10
    assert confidence[used].mean() < confidence[~used].mean() - 0.2


@pytest.mark.slow
def test_the_ticks_of_a_use_are_told_apart(shape, tmp_path):
    """Of three ticks only the last feeds. Fed its own predictions from the beginning, a model may
    take the second for the third, see that confirmed, and never learn better."""
    params = sized(horizon=5, steps=600)
    used, worlds = live(shape, 0.0, duration=3, tried=0.8), torch.arange(WORLDS)
    model = train_world_model(
        used, worlds[:16], shape, LATENT, params, 5, tmp_path / "checkpoint.pt", Silent()
    )
    progress = shape.self_names.index("progress")
    now = used[:-1, 16:].flatten()
    inside = now["alive"] & (now["known_state"][:, 0] > 0.2) & (now["known_state"][:, 0] < 0.6)
    tries = (now["mean"][:, 0] == 0) & (now["action"] == shape.action_names.index("INTERACT"))
    now = now[inside & tries]
    with torch.no_grad():
        known = model(*(now[key] for key in INPUTS))[2]
    gained = (known - now["known_state"])[:, 0] + LOSS
    stage = (10 * now["known_state"][:, progress]).round()
    for tick, (gain, following) in enumerate([(0.0, 0.1), (0.0, 0.2), (3 * GAIN, 0.0)]):
        of_tick = stage == tick
        assert gained[of_tick].mean().item() == pytest.approx(gain, abs=0.03)
        assert known[of_tick, progress].mean().item() == pytest.approx(following, abs=0.03)


def test_what_is_nearly_whole_counts_as_whole():
    x = torch.linspace(0, 4, 401)
    parts = level((x.unsqueeze(1) - torch.arange(5)).abs())
    torch.testing.assert_close(parts.sum(1), torch.ones(401))
    near = (x - x.round()).abs() < 0.24
    assert ((parts == 0) | (parts == 1))[near].all()


def sharp(shape, seed: int) -> WorldModel:
    """A model whose rules are as sharp as any that were learned."""
    torch.manual_seed(seed)
    model = WorldModel(shape, LATENT, 32, 3).eval().requires_grad_(False)
    for rule in (model.effects, model.shift):
        torch.nn.init.normal_(rule.weight, std=0.15)
    for rule in (model.worth, model.survival):
        torch.nn.init.normal_(rule.weight, std=2.0)
    torch.nn.init.normal_(model.legal.weight, std=0.5)
    torch.nn.init.normal_(model.open, std=10.0)
    model.scale.fill_(0.02)
    return model


@pytest.mark.slow
def test_the_frozen_graph_runs_in_bfloat16_too(shape, tmp_path):
    """As in the policy's rollouts, where what a network says is half a number's width."""
    model, d = sharp(shape, 2), 2 * shape.num_affordances + LOOK + LATENT
    rng = torch.Generator().manual_seed(4)
    values = [
        torch.rand(4, d, generator=rng) - 0.5,
        torch.full((4, d), -3.9),
        torch.rand(4, shape.self_dim, generator=rng),
        torch.arange(4),
    ]
    inputs = dict(zip(INPUTS, values, strict=True))
    outputs = [f"o{i}" for i in range(10)]
    freeze(
        model, inputs, outputs, tmp_path / "m.pt2",
        kind="world_model", pack="p" * 64, upstream={}, extra={},
    )  # fmt: skip
    frozen, _ = load_frozen(tmp_path / "m.pt2")
    exact = frozen(*values)
    with torch.autocast("cpu", torch.bfloat16):
        near = frozen(*values)
    for a, b in zip(exact[:7], near[:7], strict=True):
        assert b.dtype == torch.float32
        torch.testing.assert_close(a, b, atol=0.02, rtol=0.02)


def test_ten_imagined_ticks_are_the_same_in_onnx_runtime(shape):
    """Each runtime is fed its own predictions: what enlarges rounding would show."""
    model, rng = sharp(shape, 1), torch.Generator().manual_seed(6)
    d, batch = 2 * shape.num_affordances + LOOK + LATENT, 256

    def start(*size):
        return torch.rand(batch, *size, generator=rng)

    mean = start(d) - 0.5
    mean[: batch // 2, :2] = 0.0  # half of them stand on a place
    state = [mean, torch.full((batch, d), -3.9), start(shape.self_dim)]
    example = dict(zip(INPUTS, [*(x[:4] for x in state), torch.arange(4)], strict=True))
    outputs = [f"o{i}" for i in range(10)]
    session = open_unchecked(export_onnx(model, example, outputs).SerializeToString())
    ours, theirs = list(state), [x.numpy() for x in state]
    worst = 0.0
    for _ in range(10):
        action = torch.randint(shape.num_actions, (batch,), generator=rng)
        action[torch.rand(batch, generator=rng) < 0.5] = shape.action_names.index("INTERACT")
        expected = model(*ours, action)
        found = session.run(
            None, dict(zip(INPUTS, [*theirs, action.numpy().astype(np.int64)], strict=True))
        )
        ours, theirs = list(expected[:3]), found[:3]
        for a, b in zip(expected[:7], found[:7], strict=True):
            gap = (a - torch.from_numpy(b)).abs() / a.abs().clamp_min(1)
            worst = max(worst, gap.max().item())
    assert worst < 3e-5
