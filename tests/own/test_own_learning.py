"""What is learned from an own world's experience: beliefs, endings, masks, recall."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
import torch
from own_worlds import Counting, Hint, Leaving, Masked, Plain

from hamlet.learning.buffer import RolloutBuffer
from hamlet.own.data import Recorder, before_of, believe, held_out
from hamlet.own.evaluating import AtRandom, play_cases
from hamlet.own.params import PerceptionParams, PolicyParams
from hamlet.own.train_perception import ages, judge_perception, questions, train_perception
from hamlet.own.train_policy import Player as Learner
from hamlet.own.train_policy import (
    RewardScale,
    Trailing,
    normalised,
    trailing_of,
    train_policy,
    with_advantages,
)
from hamlet.own.train_social import others_of
from hamlet.plain.agent import draw
from hamlet.plain.policy import Policy
from hamlet.worlds.gymnasium_world import GymnasiumWorld
from hamlet.worlds.lanes import HELD_OUT, Lanes, legal_at_random
from hamlet.worlds.pettingzoo_world import PettingZooWorld


def lanes_of(make, lanes=4):
    return Lanes(make, lanes, count(), 1000)


def recorded(make, ticks, lanes=4):
    side, recorder, rng = lanes_of(make, lanes), Recorder(), np.random.default_rng(0)
    for _ in range(ticks):
        recorder.step(side, legal_at_random(side.now.mask, rng))
    return side.shape, recorder.data()


def by_tick(*inputs):
    """A perception whose feature is the counter's tick, and whose belief counts its own ticks."""
    observation, _, belief = inputs
    return observation[:, :1], belief + 1


class Linear(torch.nn.Module):
    """A policy that is indifferent and values a feature as itself."""

    def forward(self, features, belief):
        return torch.zeros(len(features), 3), features[:, 0]


@pytest.mark.parametrize("ends", ["terminated", "truncated"])
def test_a_truncated_life_is_worth_what_it_saw_last_a_terminated_one_nothing(ends):
    lanes = lanes_of(lambda: GymnasiumWorld(Counting(3, ends), "counting"), 2)
    player = Learner(lanes, by_tick, Linear(), 1, 0, 0.9)
    buffer = RolloutBuffer(4)
    player.play(buffer)
    assert buffer.data["value"][:, 0].tolist() == [0, 1, 2, 0]
    assert buffer.data["next_value"][:, 0].tolist() == [1, 2, 3, 1]  # never of the new life
    with_advantages(buffer.data, 1.0, 0.9, 0.95)
    bootstrap = 0.9 * 3.0 if ends == "truncated" else 0.0
    assert buffer.data["target"][2, 0].item() == pytest.approx(3.0 + bootstrap)
    # Nothing of the next life flows back.
    assert buffer.data["advantage"][2, 0].item() == pytest.approx(3.0 + bootstrap - 2.0)
    assert buffer.data["belief"][:, 0, 0].tolist() == [1, 2, 3, 1]  # begins anew


def test_nothing_is_learned_from_empty_slots():
    lanes = lanes_of(lambda: PettingZooWorld(Leaving(), "leaving"), 2)

    def perceive(*inputs):
        return inputs[0][:, :1], inputs[-1] + 1

    player = Learner(lanes, perceive, Linear(), 1, 0, 0.9)
    buffer = RolloutBuffer(4)
    player.play(buffer)
    with_advantages(buffer.data, 1.0, 0.9, 0.95)
    dead = ~buffer.data["alive"]
    assert dead[:, 0].tolist() == [False, False, True, True]
    assert (buffer.data["advantage"][dead] == 0).all()
    # `early` ended at its second tick: its target is its reward.
    assert buffer.data["target"][1, 0].item() == pytest.approx(1.0)
    # `late` was cut at the fourth: its last observation counts 5.
    assert buffer.data["target"][3, 1].item() == pytest.approx(2.0 + 0.9 * 5)


def test_d_never_takes_what_the_mask_forbids():
    lanes = lanes_of(lambda: GymnasiumWorld(Masked(7), "masked"), 2)
    player = Learner(lanes, by_tick, Policy(1, 1, 3, 8), 1, 0, 0.9)
    buffer = RolloutBuffer(30)
    player.play(buffer)
    chosen = buffer.data["mask"].gather(-1, buffer.data["action"].unsqueeze(-1))
    assert chosen.all()
    assert (buffer.data["log_prob"] == 0).all()  # one is legal: it is certain


def test_memory_begins_anew_in_every_life_and_the_last_belief_is_before_the_reset():
    shape, data = recorded(lambda: GymnasiumWorld(Counting(3), "counting"), 7)
    believed = believe(by_tick, shape, data, 1)
    assert believed.belief[:, 0, 0].tolist() == [1, 2, 3, 1, 2, 3, 1]
    assert believed.next_belief[:, 0, 0].tolist() == [2, 3, 4, 2, 3, 4, 2]
    assert believed.next_features[:, 0, 0].tolist() == [1, 2, 3, 1, 2, 3, 1]
    before = before_of(data["action"], data["first"])
    assert before[:, 0].tolist()[::3] == [0, 0, 0]
    assert torch.equal(before[1], data["action"][0] + 1)
    assert ages(data["first"])[:, 0].tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_recall_asks_only_of_this_life():
    _, data = recorded(lambda: GymnasiumWorld(Counting(5), "counting"), 23)

    class Fixed:
        age = ages(data["first"])
        features = data["observation"]

    asked, then = questions(Fixed(), slice(8, 16), torch.Generator().manual_seed(0))
    assert (asked <= Fixed.age[8:16]).all()
    assert torch.equal(then[..., 0], asked.float())  # the counter's tick is the tick of its life
    assert torch.equal(then[..., 1], data["observation"][8:16, :, 1])  # and of this episode
    assert (asked == 0).float().mean() > 0.25


def test_the_reward_scale_runs_on():
    scale = RewardScale(2, 0.9)
    nothing, yes = np.zeros(2), np.ones(2, bool)
    for _ in range(100):
        scale.add(nothing, ~yes, yes)
    sparse = scale.value
    for _ in range(100):
        scale.add(np.array([10.0, -10.0]), ~yes, yes)
    assert sparse < 0.01
    assert 30 < scale.value < 100  # deviation of returns of up to 100
    scale.add(nothing, yes, yes)
    assert (scale.sums == 0).all()


def test_earlier_weights_are_taken_only_if_they_were_clearly_better():
    even = [np.array([float(i % 2), float(i % 2)]) for i in range(60)]
    assert trailing_of(even[:39]) is None
    now = trailing_of(even)
    assert now == (0.5, pytest.approx(0.5 / 40**0.5))
    assert not Trailing(0.7, now.error).clearly_above(now)  # 0.2 is less than 0.224
    assert Trailing(0.73, now.error).clearly_above(now)


def test_the_first_reward_of_a_sparse_world_is_cut_off():
    lanes = lanes_of(lambda: GymnasiumWorld(Counting(3), "counting"), 2)
    buffer = RolloutBuffer(3)
    Learner(lanes, by_tick, Linear(), 1, 0, 0.9).play(buffer)
    with_advantages(buffer.data, 0.001, 0.9, 0.95)
    assert buffer.data["target"][2, 0].item() == pytest.approx(10.0)


def test_the_critics_noise_is_not_made_large():
    advantages, everyone = torch.tensor([2.0, 4.0, 100.0]), torch.tensor([1.0, 1.0, 0.0])
    assert normalised(advantages, everyone)[:2].tolist() == pytest.approx([-1, 1])
    assert normalised(advantages / 1000, everyone)[:2].tolist() == pytest.approx([-0.01, 0.01])


def test_the_others_of_each_slot_are_those_of_its_lane():
    x = torch.tensor([[10, 11, 12, 20, 21, 22]])
    assert others_of(x, 3)[0].tolist() == [
        [11, 12], [10, 12], [10, 11], [21, 22], [20, 22], [20, 21]
    ]  # fmt: skip


def test_held_out_lanes_keep_their_agents_together():
    class Three:
        num_agents = 3

    assert held_out(Three(), 24).tolist() == [False] * 18 + [True] * 6
    assert held_out(Three(), 6).tolist() == [False] * 3 + [True] * 3


def test_random_numbers_of_the_graph_are_uniform_and_differ_by_life():
    rng = torch.arange(4000) * 7919
    noise, following = draw(rng, 3)
    picked = torch.bincount(noise.argmax(-1), minlength=3) / 4000
    assert (picked - 1 / 3).abs().max() < 0.03
    assert len(following.unique()) == 4000
    again, _ = draw(rng[:5], 3)
    assert torch.equal(again, noise[:5])


@pytest.mark.parametrize("lanes", [1, 3, 8])
def test_every_held_out_episode_is_played_once_whatever_the_lanes(lanes):
    made = []

    def make():
        made.append(GymnasiumWorld(Counting(2 + len(made) % 3), "counting"))
        return made[-1]

    returns, lengths = play_cases(make, AtRandom(1), 8, lanes, 100)
    assert not np.isnan(returns).any()
    assert set(lengths) <= {2, 3, 4}
    seeds = [seed for world in made for seed in world.env.seeds[1:]]
    assert {HELD_OUT + case for case in range(8)} <= set(seeds)
    assert len(seeds) == len(set(seeds))


def memory(recall, tmp_path):
    """How much of its first tick A tells, against the mean, and what D then earns with it."""

    def make():
        return GymnasiumWorld(Hint(delay=12), "hint")

    shape, data = recorded(make, 300, 8)
    params = PerceptionParams(hidden=16, steps=200, chunk=16, recall=recall)
    perception, heads = train_perception(
        shape, data, params, 0, tmp_path / "perception.pt", Plain()
    )
    judged = judge_perception(shape, data, perception, heads)
    sizes = (perception.senses.width, 16)
    chosen = PolicyParams(ticks=10_000, lanes=8, rollout=64, minibatch=64, epochs=6, hidden=32)
    learned = train_policy(
        lanes_of(make, 8), perception, sizes, chosen, 0, tmp_path / "policy.pt", Plain()
    )
    share = judged["recall_error"] / judged["recall_error_mean"]
    return share, learned.numbers["trailing_return"]


@pytest.mark.slow
def test_a_hint_of_the_first_tick_is_remembered_and_used_only_with_recall(tmp_path):
    """0.5 is guessing, 1 the best; a guesser's luckiest 40 episodes are somewhat above."""
    share, earned = memory(1.0, tmp_path / "with")
    assert share < 0.9
    assert earned > 0.95
    assert memory(0.0, tmp_path / "without")[1] < 0.8
