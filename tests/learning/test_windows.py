"""What module B learns from and each term of its loss, against sums written out."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from hamlet.learning.train_world_model import (
    IMPORTANCE,
    auroc,
    experience,
    output_scale,
    r_squared,
    targets,
    windows,
    world_model_loss,
)
from hamlet.modules.world_model import ERROR_UNIT, Prediction

METERS = 5


def lives(ticks: int, worlds: int) -> tuple[TensorDict, TensorDict]:
    rng = torch.Generator().manual_seed(6)
    size = (ticks, worlds, 2)
    data = TensorDict(
        {
            "self_state": torch.rand(*size, 3, generator=rng),
            "action": torch.randint(3, size, generator=rng),
            "action_mask": torch.rand(*size, 3, generator=rng) < 0.5,
            "reward": torch.rand(size, generator=rng),
            "done": torch.rand(size, generator=rng) < 0.2,
            "alive": torch.rand(size, generator=rng) < 0.8,
        },
        batch_size=[ticks, worlds],
    )  # fmt: skip
    beliefs = TensorDict(
        {"mean": torch.rand(*size, 4), "log_std": torch.rand(*size, 4)}, batch_size=size
    )
    return data, beliefs


def test_a_ticks_value_is_the_return_that_followed_it():
    data, beliefs = lives(12, 3)
    got = experience(data, beliefs, gamma=0.9)
    alive = data["alive"]
    mean_reward = float((data["reward"] * alive).sum() / alive.sum())
    for w in range(3):
        for n in range(2):
            reward, done = data["reward"][:, w, n].tolist(), data["done"][:, w, n].tolist()
            for t in range(12):
                expected, factor, k = 0.0, 1.0, t + 1
                going = not done[t]
                while going and k < 12:
                    expected += factor * reward[k]
                    factor *= 0.9
                    going = not done[k]
                    k += 1
                if going:
                    expected += factor * mean_reward / (1 - 0.9)
                assert float(got["value"][t, w, n]) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert torch.equal(got["legal"], data["action_mask"])
    assert torch.equal(got["known_state"], data["self_state"])


def test_windows_are_ticks_in_a_row_of_one_agent_of_the_worlds_given():
    data, beliefs = lives(20, 4)
    every = experience(data, beliefs, 0.9)
    every["mean"] = torch.stack(
        torch.meshgrid(torch.arange(20), torch.arange(4), torch.arange(2), indexing="ij"), -1
    ).float()
    rng = torch.Generator().manual_seed(0)
    got = windows(every, 3, 400, torch.tensor([1, 3]), rng)
    where = got["mean"].long()
    assert got.batch_size == (4, 400)
    assert torch.equal(where[..., 0], where[0, :, 0] + torch.arange(4).unsqueeze(1))
    assert (where[..., 1:] == where[0, :, 1:]).all()
    assert where[..., 1].unique().tolist() == [1, 3]
    assert where[..., 2].unique().tolist() == [0, 1]
    assert set(where[0, :, 0].tolist()) == set(range(17))  # the last begins 3 before the end
    rng = torch.Generator().manual_seed(0)
    some = windows(every, 3, 400, torch.tensor([1, 3]), rng, torch.tensor([5, 0]))
    assert torch.equal(some["mean"], got["mean"][:, [5, 0]])


def test_what_came_of_an_action_stands_one_row_later_but_for_what_it_brought():
    data, beliefs = lives(6, 1)
    window = experience(data, beliefs, 0.9)[:, 0]
    got = targets(window, 2)
    for name in ("mean", "log_std", "known_state"):
        assert torch.equal(got[name], window[name][3])
    assert torch.equal(got["legal_logit"], window["legal"][3].float())
    assert torch.equal(got["reward"], window["reward"][2])
    assert torch.equal(got["value"], window["value"][2])
    assert torch.equal(got["continue_logit"], 1 - window["done"][2].float())


class Guess:
    """Module B for a self-state of all meters and `blocked`: it says what it is given, changed by
    fixed numbers, and counts its members' ticks."""

    def __init__(self, places: int, latent: int) -> None:
        fields = METERS + 1
        self.places, self.latent = places, latent
        self.shape = SimpleNamespace(
            self_names=[*(f"m{i}" for i in range(METERS)), "blocked"],
            action_names=["WAIT", "INTERACT"],
            num_meters=METERS,
        )
        self.sizes = [places + latent, places, fields, 1, 1, 2, 1, 1]
        self.scale = torch.arange(1, sum(self.sizes) + 1) / 10
        self.given: list[torch.Tensor] = []

    def members_step(self, mean, log_std, known, action, free):
        self.given.append(mean)
        rows = mean[..., 0]

        def say(number):
            return torch.full_like(rows, number)

        told = Prediction(
            mean + 0.1, log_std + 0.2, known + 0.01, say(0.3), say(0.4), say(0.5),
            torch.stack([say(0.6), say(-0.6)], -1), say(0.7), say(-0.2),
        )  # fmt: skip
        return told, told._replace(known_state=known + 0.04)


def test_the_world_models_loss_by_hand():
    """Two ticks, fed its own predictions; nobody counts after a death but for itself."""
    model = Guess(places=2, latent=1)
    rng = torch.Generator().manual_seed(2)
    members, count, horizon = 2, 3, 2
    size = (horizon + 1, members, count)
    window = TensorDict(
        {
            "mean": torch.rand(*size, 3, generator=rng),
            "log_std": torch.rand(*size, 3, generator=rng),
            "known_state": torch.rand(*size, METERS + 1, generator=rng).round(decimals=1),
            "action": torch.randint(2, size, generator=rng),
            "legal": torch.rand(*size, 2, generator=rng) < 0.5,
            "reward": torch.rand(size, generator=rng),
            "done": torch.rand(size, generator=rng) < 0.4,
            "alive": torch.rand(size, generator=rng) < 0.8,
            "value": torch.rand(size, generator=rng),
        },
        batch_size=size,
    )  # fmt: skip
    window["known_state"][..., -1] = (window["known_state"][..., -1] > 0.5).float()
    window["alive"][0, 0] = True
    loss, parts = world_model_loss(model, window)

    def bce(logit: float, truth: float) -> float:
        return math.log1p(math.exp(logit)) - truth * logit

    sizes = model.sizes
    starts = [sum(sizes[:i]) for i in range(len(sizes))]

    def unit(place: int, i: int) -> float:
        return (starts[place] + i + 1) / 10

    expected = dict.fromkeys(parts, 0.0)
    for t in range(horizon):
        total, weight = dict.fromkeys(parts, 0.0), dict.fromkeys(parts, 0.0)
        for e in range(members):
            for c in range(count):
                row = {k: v[:, e, c] for k, v in window.items()}
                alive = float(row["alive"][0])
                for earlier in range(t):
                    alive *= not row["done"][earlier]
                lived = alive * (not row["done"][t])
                mean = [float(x) + 0.1 * (t + 1) for x in row["mean"][0]]
                spread = [float(x) + 0.2 * (t + 1) for x in row["log_std"][0]]
                known = [float(x) + 0.01 * (t + 1) for x in row["known_state"][0]]
                given = [float(x) + 0.01 * t for x in row["known_state"][0]]
                blind = [x + 0.04 for x in given]
                then, now = row["known_state"][t + 1].tolist(), row["known_state"][t].tolist()
                moved, spreading = row["mean"][t + 1].tolist(), row["log_std"][t + 1].tolist()
                square = [((m - x) / unit(0, i)) ** 2
                          for i, (m, x) in enumerate(zip(mean, moved))]  # fmt: skip
                spreads = [((s - x) / unit(1, i)) ** 2
                           for i, (s, x) in enumerate(zip(spread[:2], spreading))]  # fmt: skip
                off = [abs(k - x) / max(unit(2, i), ERROR_UNIT)
                       for i, (k, x) in enumerate(zip(known, then))]  # fmt: skip
                added = [abs(b - x) - abs(g - y)
                         for b, x, g, y in zip(blind, then, given, now)][:METERS]  # fmt: skip
                added = max(sum(added) / METERS, 0.0)
                free = 1 - then[-1]
                legal = row["legal"][t + 1].tolist()
                terms = {
                    "mean": (sum(square[:2]) / 2 + 0.1 * square[2], lived),
                    "log_std": (sum(spreads) / 2, lived),
                    "known_state": (4 * sum(off) / len(off), lived),
                    "reward": (10 * abs(0.3 - float(row["reward"][t])), alive),
                    "continue": (bce(0.4, float(not row["done"][t])), alive),
                    "value": (((0.5 - float(row["value"][t])) / unit(4, 0)) ** 2, alive),
                    "legal": ((bce(0.6, legal[0]) + bce(-0.6, legal[1])) / 2, lived),
                    "free": (0.3 * bce(0.7, free), alive * (int(row["action"][t]) == 1)),
                    "error": (0.3 * (added / ERROR_UNIT * math.exp(0.2) - 0.2), lived),
                }
                for name, (value, by) in terms.items():
                    total[name] += value * by
                    weight[name] += by
        for name in expected:
            expected[name] += total[name] / max(weight[name], 1.0) / horizon
    assert dict.fromkeys(parts, 1.0) | {
        "known_state": 4.0, "reward": 10.0, "free": 0.3, "error": 0.3,
    } == IMPORTANCE  # fmt: skip
    for name, value in parts.items():
        assert float(value) == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name
    assert float(loss) == pytest.approx(sum(expected.values()), rel=1e-4)
    torch.testing.assert_close(model.given[1], window["mean"][0] + 0.1)


def test_the_unit_of_each_number_is_its_deviation_among_those_that_live_on():
    model = Guess(places=2, latent=1)
    data, beliefs = lives(30, 4)
    data["self_state"] = torch.rand(30, 4, 2, METERS + 1)
    beliefs["mean"], beliefs["log_std"] = torch.rand(2, 30, 4, 2, 3)
    window = windows(experience(data, beliefs, 0.9), 1, 60, torch.arange(4), torch.Generator())
    got = output_scale(model, window)
    ok = [i for i in range(60) if window["alive"][0, i] and not window["done"][0, i]]

    def deviation(numbers: list[float]) -> float:
        mean = sum(numbers) / len(numbers)
        return math.sqrt(sum((x - mean) ** 2 for x in numbers) / (len(numbers) - 1))

    def change(name: str, i: int) -> float:
        return deviation([float(window[name][1, k, i] - window[name][0, k, i]) for k in ok])

    expected = [change("mean", i) for i in range(3)]
    expected += [change("log_std", i) for i in range(2)]
    expected += [change("known_state", i) for i in range(METERS + 1)]
    expected += [1.0, deviation([float(window["value"][0, k]) for k in ok]), 1.0, 1.0, 1.0, 1.0]
    assert got.tolist() == pytest.approx(expected, rel=1e-4)


def test_auroc_is_the_share_of_pairs_in_order_and_r_squared_what_is_explained():
    score = torch.tensor([0.1, 0.9, 0.4, 0.8, 0.3])
    positive = torch.tensor([False, True, True, False, False])
    pairs = [(p, n) for p in (0.9, 0.4) for n in (0.1, 0.8, 0.3)]
    assert auroc(score, positive) == pytest.approx(sum(p > n for p, n in pairs) / 6)
    assert auroc(score, torch.zeros(5, dtype=torch.bool)) == 0.5
    truth = torch.tensor([1.0, 2.0, 3.0, 6.0])
    # residuals 1, 0, 1, 2 against deviations 2, 1, 0, 3 from the mean
    assert r_squared(torch.tensor([2.0, 2.0, 2.0, 4.0]), truth) == pytest.approx(1 - 6 / 14)
    assert r_squared(truth.mean().expand(4), truth) == pytest.approx(0.0, abs=1e-6)
