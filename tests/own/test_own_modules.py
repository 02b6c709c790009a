"""What each trainer of an own world fits, where the right answer is known."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from own_worlds import Counting, Plain
from tensordict import TensorDict

from hamlet.artifacts import write_json
from hamlet.learning.buffer import RolloutBuffer
from hamlet.own import paths
from hamlet.own.data import Recorder, believe
from hamlet.own.evaluating import write_report
from hamlet.own.params import PolicyParams, SocialParams, WorldModelParams
from hamlet.own.train_perception import judge_perception, lessons_of, losses, unroll
from hamlet.own.train_policy import PLAYED, Loss, Player, train_policy
from hamlet.own.train_social import train_social
from hamlet.own.train_world_model import (
    Outcomes,
    errors,
    judge_world_model,
    outcomes_of,
    rows_of,
    train_world_model,
)
from hamlet.plain.perception import Perception, Told
from hamlet.plain.policy import Policy
from hamlet.plain.senses import statistics_of
from hamlet.plain.world_model import WorldModel
from hamlet.worlds.gymnasium_world import GymnasiumWorld
from hamlet.worlds.lanes import Lanes, legal_at_random


def counted(ticks, length=3, ends="terminated"):
    """Experience [ticks, 4] of `Counting`, and its shape."""
    side = Lanes(lambda: GymnasiumWorld(Counting(length, ends), "counting"), 4, count(), 1000)
    recorder, rng = Recorder(), np.random.default_rng(0)
    for _ in range(ticks):
        recorder.step(side, legal_at_random(side.now.mask, rng))
    return side.shape, recorder.data()


def new_perception(shape, data):
    rows = data["alive"].flatten()
    flat = {k: x.flatten(0, 1) for k, x in data.items()}
    return Perception(shape, statistics_of(shape, flat, rows), 8)


def test_a_is_trained_on_the_beliefs_that_it_has_when_it_is_used():
    """Memory begins anew with each life, and the action before is part of what is remembered."""
    shape, data = counted(11, 4)
    perception = new_perception(shape, data)
    used = believe(perception, shape, data, 8).belief
    lessons = lessons_of(shape, data, perception)
    trained = unroll(perception, lessons, slice(0, 11), torch.zeros(4, 8))
    torch.testing.assert_close(trained, used)


def test_the_belief_after_an_action_is_told_which():
    shape, data = counted(7)

    def told(observation, before, belief):
        return observation, before.unsqueeze(-1).float()

    believed = believe(told, shape, data, 1)
    assert torch.equal(believed.next_belief[..., 0], data["action"] + 1.0)
    begins = data["first"][1:]
    assert (believed.belief[1:, :, 0][begins] == 0).all()
    going = believed.belief[1:, :, 0][~begins]
    assert torch.equal(going, (data["action"][:-1] + 1.0)[~begins])


class AllKnowing:
    """Heads that say what is so: of `lessons` from its first tick on."""

    def __init__(self, lessons, sure=20.0):
        self.lessons, self.sure = lessons, sure

    def __call__(self, belief, features, action):
        change = self.lessons.next_features - self.lessons.features
        going_on = self.sure * (1 - 2 * self.lessons.terminated.float())
        told = Told(change, self.lessons.reward, going_on)
        return Told(*(x.flatten(0, 1) for x in told))

    def recall(self, belief, age, asked):
        """The counter's tick and the number of its episode, in units."""
        first = self.lessons.features.flatten(0, 1).clone()
        step = self.lessons.features[1, 0, 0] - self.lessons.features[0, 0, 0]
        first[:, 0] += step * (asked - age)
        return first


def test_a_loses_nothing_where_all_is_told_right():
    shape, data = counted(12)
    lessons = lessons_of(shape, data, new_perception(shape, data))
    beliefs = torch.zeros(12, 4, 8)
    generator = torch.Generator().manual_seed(0)
    found = losses(AllKnowing(lessons), lessons, slice(0, 12), beliefs, generator)
    for name, x in found.items():
        assert x.abs().max() < 1e-6, name
    wrong = losses(AllKnowing(lessons, -20.0), lessons, slice(0, 12), beliefs, generator)
    assert wrong["going_on"].min() > 19


def test_a_is_judged_on_held_out_lanes_beside_who_knows_nothing():
    shape, data = counted(12)
    perception = new_perception(shape, data)
    data["reward"][:, :3] = 99.0  # of lanes that are not judged
    out = {k: x[:, 3:] for k, x in data.items()}
    told = judge_perception(shape, data, perception, AllKnowing(lessons_of(shape, out, perception)))
    for name in ("next_error", "reward_error", "going_on_loss", "recall_error"):
        assert told[name] == pytest.approx(0, abs=1e-5), name
    # The tick goes up by one, which is so many deviations; the other feature stays as it is.
    deviation = perception.senses.std_of_observation[0].item()
    assert told["next_error_nothing_changes"] == pytest.approx(deviation**-2 / 2)
    assert told["reward_error_mean"] == pytest.approx(1.0)  # in units of their own deviation
    third = 1 / 3  # of the ticks are a life's last
    by_chance = -third * np.log(third) - (1 - third) * np.log(1 - third)
    assert told["going_on_loss_mean"] == pytest.approx(by_chance, abs=1e-5)
    features = lessons_of(shape, out, perception).features
    assert told["recall_error_mean"] == pytest.approx(features.var((0, 1), correction=0).mean())


def test_b_is_judged_beside_the_best_constants():
    """A model that tells nothing but means is as good as who knows nothing."""
    change = torch.tensor([[1.0, 2.0], [3.0, -2.0], [2.0, 0.0], [2.0, 4.0]])
    reward, value = torch.tensor([0.0, 0.0, 0.0, 4.0]), torch.tensor([1.0, 3.0, 9.0, 9.0])
    rows = Outcomes(
        torch.zeros(4, 1), torch.zeros(4, 1), torch.zeros(4, dtype=torch.int64), change, reward,
        torch.tensor([1.0, 1.0, 1.0, 0.0]), value, torch.tensor([True, True, False, False]),
    )  # fmt: skip
    means = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
    model = WorldModel(2, 2, 8, 2, torch.tensor([2.0, 2.0]), *means)
    for member in model.members:
        for parameter in member.parameters():
            torch.nn.init.zeros_(parameter)
        member.network[-1].bias.data[-2] = np.log(3)  # three of four lives go on
    told = judge_world_model(model, rows)
    assert told["change_error_nothing_changes"] == pytest.approx(change.square().mean() / 4)
    assert told["change_error"] == pytest.approx(told["change_error_nothing_changes"])
    assert told["reward_error_mean"] == pytest.approx(3.0 / 4)
    assert told["reward_error"] == pytest.approx(told["reward_error_mean"])
    assert told["going_on_loss"] == pytest.approx(told["going_on_loss_mean"])
    assert told["value_error_mean"] == pytest.approx((1 + 1) / 4)  # of what is known
    assert told["value_error"] == pytest.approx(told["value_error_mean"])


def test_the_report_sets_each_module_beside_its_baseline(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = {"nats": 1.25, "nats_commonest": 1.5}
    write_json(paths.metrics("social"), told)
    beside = {"reward_error": 0.25, "reward_error_mean": 0.5}
    still = {"going_on_loss": 0.002, "going_on_loss_mean": 0.0}
    write_json(paths.metrics("world_model"), beside | still)
    numbers = {
        "episodes": 9, "mean_return": 3.0, "mean_return_ci95": [2.0, 4.0], "random_return": 1.0
    }  # fmt: skip
    write_report(SimpleNamespace(shape=SimpleNamespace(name="Mine")), numbers)
    rows = [line for line in paths.REPORT.read_text().splitlines() if line.startswith("| ")]
    assert rows[2:] == [
        "| world_model | reward | 0.25 | 0.5 | the mean |",
        "| world_model | life goes on | 0.002 | | always the same |",
        "| social | others' next actions, nats | 1.25 | 1.5 | their odds |",
    ]


def test_d_is_told_the_action_before():
    told = []

    def perceive(observation, before, belief):
        if observation[0, 0] < 4:  # the fourth is the last of a life, no action follows
            told.append(before)
        return observation[:, :1], belief

    lanes = Lanes(lambda: GymnasiumWorld(Counting(4), "counting"), 2, count(), 1000)
    player, buffer = Player(lanes, perceive, Policy(1, 1, 3, 8), 1, 0, 0.9), RolloutBuffer(10)
    player.play(buffer)
    action = buffer.data["action"]
    for t in range(1, 10):
        expected = torch.zeros(2, dtype=torch.int64) if t % 4 == 0 else action[t - 1] + 1
        assert torch.equal(told[t], expected)


def test_ds_loss_rewards_being_unsure():
    policy = Policy(2, 1, 3, 8)
    rng = torch.Generator().manual_seed(0)
    features, belief = torch.randn(6, 2, generator=rng), torch.randn(6, 1, generator=rng)
    batch = TensorDict(
        {
            "features": features, "belief": belief, "mask": torch.ones(6, 3, dtype=torch.bool),
            "alive": torch.ones(6, dtype=torch.bool), "action": torch.zeros(6, dtype=torch.int64),
            "log_prob": torch.full((6,), -1.1), "advantage": torch.arange(6.0),
            "target": torch.zeros(6),
        },
        batch_size=[6],
    )  # fmt: skip
    (flat, told), (bold, _) = (Loss(policy, PolicyParams(entropy=e))(batch) for e in (0.0, 0.5))
    assert (flat - bold).item() == pytest.approx(0.5 * told["entropy"].item(), abs=1e-6)
    assert told["entropy"] > 0.5


def by_tick(observation, before, belief):
    """The counter's tick in thirds, and nothing remembered."""
    return observation[:, :1] / 3, belief


@pytest.mark.parametrize("ends", ["terminated", "truncated"])
def test_b_tells_reward_end_and_return_of_every_action(ends, tmp_path):
    shape, data = counted(60, 3, ends)
    believed = believe(by_tick, shape, data, 1)
    params = WorldModelParams(members=2, hidden=32, steps=500, batch=64, learning_rate=5e-3)
    both = (data, believed), (data, believed)
    model, report = train_world_model(
        shape, *both, params, 0.9, 0, tmp_path / "world_model.pt", Plain()
    )
    with torch.no_grad():
        seen = torch.tensor([[0.0], [1 / 3], [2 / 3]])
        reward, going_on, value, uncertainty = model(seen, torch.zeros(3, 1))
    assert reward.shape == (3, 3)
    one_each = {"atol": 0.15, "rtol": 0}
    right = torch.tensor([[1.0], [2.0], [3.0]]).expand(3, 3)
    torch.testing.assert_close(reward, right, **one_each)
    returns = torch.tensor([[1 + 0.9 * (2 + 0.9 * 3)], [2 + 0.9 * 3], [3.0]]).expand(3, 3)
    torch.testing.assert_close(value, returns, **one_each)
    last = 0.0 if ends == "terminated" else 1.0
    expected = torch.tensor([[1.0], [1.0], [last]]).expand(3, 3)
    torch.testing.assert_close(going_on, expected, **one_each)
    assert uncertainty.max() < 0.2
    assert report["reward_error"] < 0.1 * report["reward_error_mean"]
    assert report["value_error"] < 0.1 * report["value_error_mean"]
    assert report["change_error"] < 0.1 * report["change_error_nothing_changes"]


def test_b_tells_of_each_action_its_own_reward(tmp_path):
    shape, data = counted(60)
    data["reward"] = data["action"].float()
    params = WorldModelParams(members=2, hidden=32, steps=300, batch=64, learning_rate=5e-3)
    both = [(data, believe(by_tick, shape, data, 1))] * 2
    model, _ = train_world_model(shape, *both, params, 0.9, 0, tmp_path / "world_model.pt", Plain())
    with torch.no_grad():
        reward = model(torch.tensor([[0.0], [1 / 3]]), torch.zeros(2, 1))[0]
    expected = torch.arange(3.0).expand(2, 3)
    torch.testing.assert_close(reward, expected, atol=0.15, rtol=0)


def test_b_learns_what_comes_after_and_no_return_that_the_record_does_not_reach():
    shape, data = counted(5)  # a life of three ticks, and two ticks of the next
    everyone = torch.ones(4, dtype=torch.bool)
    rows = outcomes_of(data, believe(by_tick, shape, data, 1), 0.9, everyone)
    torch.testing.assert_close(rows.change[:, 0], torch.full((20,), 1 / 3))
    assert rows.known.unflatten(0, (5, 4))[:, 0].tolist() == [True, True, True, False, False]
    unit = torch.tensor([0.0, 1.0])
    model = WorldModel(2, 3, 8, 2, torch.ones(2), unit, unit)
    told = errors(model, rows)["value"]
    assert (told[:, ~rows.known] == 0).all()
    assert (told[:, rows.known] > 0).all()


def test_b_learns_from_both_plays_and_returns_from_ds_only():
    shape, random = counted(6)
    _, own = counted(3)
    collected, played = ((data, believe(by_tick, shape, data, 1)) for data in (random, own))
    rows = rows_of(shape, collected, played, 0.9, judged=False)
    # Three of four lanes; each life of three ticks ends within the record.
    assert len(rows.action) == 3 * 6 + 3 * 3
    assert rows.known.tolist() == [False] * 18 + [True] * 9
    judged = rows_of(shape, collected, played, 0.9, judged=True)
    assert len(judged.action) == 6 + 3
    assert judged.reward.tolist() == [1, 2, 3, 1, 2, 3, 1, 2, 3]


def test_ds_play_is_kept_as_a_frozen_a_would_see_it(tmp_path):
    """What follows a row is the last thing seen in that life, ended either way."""
    for ends in ("terminated", "truncated"):
        lanes = Lanes(lambda: GymnasiumWorld(Counting(3, ends), "counting"), 2, count(), 1000)  # noqa: B023
        params = PolicyParams(ticks=16, lanes=2, rollout=8, minibatch=8, epochs=1)
        data = train_policy(
            lanes, counting_belief, (1, 1), params, 0, tmp_path / "policy.pt", Plain()
        ).played
        assert set(data) == set(PLAYED)
        assert data["features"][:4, 0, 0].tolist() == [0, 1, 2, 0]
        assert data["next_features"][:4, 0, 0].tolist() == [1, 2, 3, 1]
        assert data["belief"][:4, 0, 0].tolist() == [1, 2, 3, 1]
        assert data["next_belief"][:4, 0, 0].tolist() == [2, 3, 4, 2]
        assert data[ends][:4, 0].tolist() == [False, False, True, False]
        assert data["reward"][:4, 0].tolist() == [1, 2, 3, 1]


def counting_belief(observation, before, belief):
    """The counter's tick, and a belief that counts its own ticks."""
    return observation[:, :1], belief + 1


def test_c_tells_each_of_the_others_from_what_it_sees(tmp_path):
    """Each of three sees what the others will do, in the order of their slots."""
    rng = torch.Generator().manual_seed(0)
    action = torch.randint(3, (100, 12), generator=rng)
    one, two, three = action.unflatten(1, (4, 3)).unbind(-1)
    seen_by = [torch.stack(others, -1) for others in ((two, three), (one, three), (one, two))]
    sees = torch.stack(seen_by, 2).flatten(1, 2)
    features = torch.nn.functional.one_hot(sees, 3).flatten(2).float()
    data = {
        "features": features, "belief": torch.zeros(100, 12, 1), "action": action,
        "alive": torch.ones(100, 12, dtype=torch.bool),
    }  # fmt: skip
    shape = SimpleNamespace(num_agents=3, num_actions=3)
    params = SocialParams(hidden=32, steps=200, batch=64, learning_rate=1e-2)
    model, report = train_social(shape, data, params, 0, tmp_path / "social.pt", Plain())
    assert report["accuracy"] > 0.95
    assert report["accuracy_commonest"] < 0.5
    assert report["nats"] < 0.3 < report["nats_commonest"]
    # The second other of the first slot is slot 2.
    told = model(features[0], data["belief"][0]).argmax(-1)
    assert told[0].tolist() == action[0, 1:3].tolist()
    assert told[1].tolist() == [action[0, 0].item(), action[0, 2].item()]
