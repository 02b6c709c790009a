"""The benchmark of own worlds: what it counts, how it scores, what it keeps."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
import torch
from own_worlds import Counting, Hint

from benchmarks import own_worlds as bench
from benchmarks import own_worlds_ours as ours
from benchmarks import plain_town
from benchmarks.own_worlds_made import cartpole, late_sign
from hamlet.artifacts import read_json
from hamlet.learning.buffer import RolloutBuffer
from hamlet.own.evaluating import play_cases
from hamlet.own.params import PerceptionParams, PolicyParams
from hamlet.own.train_policy import with_advantages
from hamlet.plain.perception import Perception
from hamlet.plain.policy import Policy
from hamlet.plain.senses import Senses
from hamlet.town import Town, load_pack
from hamlet.worlds.gymnasium_world import GymnasiumWorld
from hamlet.worlds.lanes import Lanes, legal_at_random


def cell(world, player, seed, *returns):
    return {
        "world": world, "player": player, "seed": seed, "returns": list(returns),
        "all_together": list(returns), "ticks": bench.TICKS, "cpu_seconds": 1.0,
    }  # fmt: skip


def cells_of(*cells):
    return {bench.key(x["world"], x["player"], x["seed"]): x for x in cells}


def test_scores_are_from_random_play_to_the_best_known():
    cells = cells_of(
        cell("cartpole", "random", 0, 20.0), cell("cartpole", "hamlet", 0, 500.0),
        cell("cartpole", "hamlet", 1, 260.0), cell("cartpole", "sb3_ppo", 0, 8.0),
        cell("t_maze", "random", 0, 100.0),
    )  # fmt: skip
    scores = bench.normalised(cells, "cartpole")
    assert scores["hamlet"] == {0: 1.0, 1: 0.5}
    assert scores["sb3_ppo"][0] == pytest.approx(-0.025)
    assert scores["random"] == {0: 0.0}


def test_sides_are_scored_apart_by_the_best_of_the_table():
    cells = cells_of(
        cell("tag", "random", 0, 4.0, -16.0), cell("tag", "hamlet", 0, 14.0, -8.0),
        cell("tag", "sb3_ppo", 0, 9.0, 0.0),
    )  # fmt: skip
    scores = bench.normalised(cells, "tag")
    assert scores["hamlet"][0] == pytest.approx((1.0 + 0.5) / 2)
    assert scores["sb3_ppo"][0] == pytest.approx((0.5 + 1.0) / 2)


@pytest.mark.parametrize(
    ("ours", "ppo", "recurrent", "hidden", "told"),
    [
        ([0.9, 0.9], [0.5], [0.94], True, []),
        ([0.9, 0.9], [0.5], [0.96], True, ["0.060 below sb3_recurrent_ppo"]),
        ([0.9, -0.1], [0.1], [0.1], True, ["seed 1 is below random"]),
        ([0.5, 0.5], [0.45], [0.3], True, ["not 0.1 above"]),
        ([0.5, 0.5], [0.45], [0.3], False, []),
    ],
)
def test_the_gate_is_the_mean_against_each_and_every_seed_against_random(
    ours, ppo, recurrent, hidden, told
):
    given = {"hamlet": ours, "sb3_ppo": ppo, "sb3_recurrent_ppo": recurrent}
    scores = {name: dict(enumerate(values)) for name, values in given.items()}
    wrong = bench.verdict(scores, hidden)
    assert len(wrong) == len(told)
    assert all(part in reason for part, reason in zip(told, wrong, strict=True))


def test_the_gate_is_open_until_everyone_has_run_with_three_seeds():
    three, one = {0: 0.9, 1: 0.9, 2: 0.9}, {0: 0.5}
    all_run = {"hamlet": three, "sb3_ppo": three, "sb3_recurrent_ppo": three}
    assert bench.standing(all_run, False) == "holds"
    some = all_run | {"sb3_recurrent_ppo": one}
    told = "holds of what has run; sb3_recurrent_ppo has 1 of 3 seeds"
    assert bench.standing(some, False) == told
    lost = some | {"hamlet": one}
    assert bench.standing(lost, False) == "does not hold: 0.400 below sb3_ppo"


def test_finished_cells_are_kept_and_not_run_again(tmp_path):
    path, ran = tmp_path / "cells.json", []

    def run(one):
        if len(ran) == 2:
            raise KeyboardInterrupt
        ran.append(one)
        return cell(*one, float(len(ran)))

    cells = bench.wanted(["cartpole"], ["hamlet"], [0, 1])
    assert cells == [
        ("cartpole", "random", 0), ("cartpole", "hamlet", 0), ("cartpole", "hamlet", 1)
    ]  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        bench.run_all(path, cells, False, run)
    assert list(read_json(path)["cells"]) == ["cartpole/hamlet/0", "cartpole/random/0"]
    ran.clear()
    found = bench.run_all(path, cells, False, run)
    assert ran == [("cartpole", "hamlet", 1)]
    assert len(found["cells"]) == 3
    ran.clear()
    bench.run_all(path, cells[:1], True, run)
    assert ran == cells[:1]
    assert len(read_json(path)["cells"]) == 3


def test_everyone_gets_the_same_ticks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    params = bench.project("t_maze", 3)
    lanes, policy = params.collect.lanes, params.policy
    rollout = policy.rollout * policy.lanes
    assert params.seed == 3
    assert params.collect.ticks // lanes * lanes == bench.RANDOM_TICKS
    assert bench.RANDOM_TICKS + policy.ticks // rollout * rollout == bench.TICKS
    peers = pytest.importorskip("benchmarks.own_worlds_peers")
    steps = {"sb3_ppo": 2048, "sb3_recurrent_ppo": 128}  # their defaults
    for name, worlds in peers.WORLDS.items():
        assert bench.TICKS % (steps[name] * worlds) == 0


@pytest.mark.parametrize("ends", ["terminated", "truncated"])
def test_a_peer_is_told_the_last_observation_and_how_a_life_ended(ends):
    peers = pytest.importorskip("benchmarks.own_worlds_peers")
    lanes = Lanes(lambda: GymnasiumWorld(Counting(3, ends), "counting"), 2, count(), 1000)
    unit = {"observation": {"mean": torch.zeros(2), "std": torch.ones(2)}}
    env = peers.SensedLanes(lanes, Senses(lanes.shape, unit))
    assert env.reset()[:, 0].tolist() == [0, 0]
    for _ in range(2):
        seen, _, ended, infos = env.step(np.zeros(2, int))
        assert not ended.any()
        assert infos == [{}, {}]
    seen, reward, ended, infos = env.step(np.zeros(2, int))
    assert ended.all()
    assert reward.tolist() == [3, 3]
    assert seen[:, 0].tolist() == [0, 0]
    assert infos[1]["terminal_observation"][0] == 3
    assert infos[1]["TimeLimit.truncated"] == (ends == "truncated")
    assert env.ticks == 6  # three of each of two worlds


class Always:
    """Takes one action in every slot."""

    def __init__(self, action):
        self.action = action

    def act(self, now, cases):
        return np.full(len(now.alive), self.action)


def test_beside_random_play_a_player_acts_in_its_own_slots_only():
    lanes = Lanes(lambda: GymnasiumWorld(Counting(3), "counting"), 6, count(), 1000)
    mixed = bench.Beside(Always(2), (0, 2), agents=3)  # six slots as two worlds of three
    acts = np.stack([mixed.act(lanes.now, np.zeros(6, int)) for _ in range(40)])
    assert (acts[:, [0, 2, 3, 5]] == 2).all()
    assert set(acts[:, [1, 4]].flatten()) == {0, 1, 2}


def test_the_late_sign_is_shown_once_and_never_at_first():
    shown = []
    for seed in range(30):
        world = late_sign()
        seen = [world.reset(seed=seed)[0]]
        seen += [world.step(1)[0] for _ in range(8)]
        signs = [x[0] for x in seen]
        assert [x for x in signs if x] == [world.unwrapped.side]
        shown.append(int(np.flatnonzero(signs)[0]))
        reward = world.step(3)[1]
        assert reward == (1.0 if world.unwrapped.side == 1 else -0.6)
    assert set(shown) == {2, 3, 4, 5}


def test_cartpole_shows_no_velocity():
    env = cartpole()
    seen, _ = env.reset(seed=0)
    assert seen.tolist() == env.unwrapped.state[[0, 2]].astype(np.float32).tolist()
    returns, _ = play_cases(lambda: GymnasiumWorld(cartpole(), "cartpole"), Always(1), 2, 2, 100)
    assert (returns < 15).all()


# ------------------------------------------------------------------------------------------------
# The town as a plain world


@pytest.fixture(scope="module")
def town():
    return Town(load_pack("l4_contention"), num_layouts=8)


def test_the_town_is_told_as_a_world_of_fields(town):
    shape = plain_town.shape_of(town)
    kinds = {f.name: (f.kind, f.count) for f in shape.fields}
    assert kinds["view"] == ("codes", town.num_cell_codes)
    assert kinds["self_state"] == ("vector", None)
    assert "action_mask" not in kinds
    assert shape.masked
    seen = town.observe(town.reset(3, 2))
    found = plain_town.fields_in(shape, seen)
    for field in shape.fields:
        assert tuple(found[field.name].shape) == (2 * town.num_agents, *field.shape)
        assert str(found[field.name].dtype) == f"torch.{field.dtype}"
    # Slot l * N + n is agent n of world l.
    assert torch.equal(found["self_state"][town.num_agents + 1], seen["self_state"][1, 1])


def test_lives_in_the_town_end_once_and_begin_anew(town):
    lanes, rng = plain_town.TownLanes(town, 3, 0), np.random.default_rng(0)
    n, sums, ends, ticks = town.num_agents, np.zeros(3 * town.num_agents), [], 0
    while not lanes.returns:
        assert lanes.now.first.all() == (ticks == 0)
        alive = lanes.now.alive
        row = lanes.step(legal_at_random(lanes.now.mask, rng))
        assert (row.acted == alive).all()
        assert (row.reward[~alive] == 0).all()
        assert not row.terminated[~alive].any()
        sums += row.reward
        ends.append(row.terminated)
        ticks += 1
    lane = int(row.over.argmax())
    own = slice(lane * n, (lane + 1) * n)
    assert lanes.returns[0].tolist() == pytest.approx(sums[own].tolist(), abs=1e-4)
    assert lanes.lengths[0] == ticks
    assert (np.sum(ends, 0)[own] == 1).all()
    assert lanes.now.first[own].all()
    assert lanes.now.alive[own].all()
    assert row.last["self_state"][own].tolist() != lanes.now.fields["self_state"][own].tolist()


# ------------------------------------------------------------------------------------------------
# Our own PPO without the stages


def counting_lanes(slots=4):
    return Lanes(lambda: GymnasiumWorld(Counting(5), "counting"), slots, count(), 1000)


UNIT = {"observation": {"mean": torch.zeros(2), "std": torch.ones(2)}}


def test_the_last_observations_are_told_in_order_and_end_with_a_life():
    lanes = counting_lanes(1)
    senses = Senses(lanes.shape, UNIT)
    seen = []

    class Reading:
        def __call__(self, features, belief):
            seen.append(belief[0].view(-1, senses.width)[:, 0].tolist())
            return torch.zeros(1, lanes.shape.num_actions), torch.zeros(1)

    width, lately, before = ours.FRAMES * senses.width, ours.seen_lately(senses), []

    def perceive(*inputs):
        before.append(int(inputs[-2]))
        return lately(*inputs)

    player, acted = ours.Remembering(senses, perceive, Reading(), width), []
    for _ in range(6):
        acted.append(int(player.act(lanes.now, np.zeros(1, int))[0]))
        lanes.step(np.array(acted[-1:]))
    assert before == [0, *(action + 1 for action in acted[:4]), 0]
    assert seen == [[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 2], [0, 1, 2, 3], [1, 2, 3, 4], [0] * 4]


@pytest.fixture
def through_time():
    """A rollout that ends lives, and the loss that goes back through it."""
    torch.manual_seed(0)
    lanes = counting_lanes()
    params = PolicyParams(ticks=64, rollout=12)
    perception = Perception(lanes.shape, UNIT, 8)
    policy = Policy(perception.senses.width, 8, lanes.shape.num_actions, 8)
    player = ours.Recording(lanes, perception, policy, 8, 0, params.gamma)
    buffer = RolloutBuffer(12)
    for _ in range(2):  # the second begins within lives
        buffer.reset()
        player.play(buffer)
    with_advantages(buffer.data, 1.0, params.gamma, params.lam)
    return buffer.data, ours.LossThroughTime(perception, policy, params), perception


def test_end_to_end_it_remembers_in_learning_what_it_remembered_in_playing(through_time):
    data, loss, _ = through_time
    assert data["first"][1:].any()
    assert not data["first"][0].any()
    torch.testing.assert_close(loss.beliefs(data), data["belief"])
    assert loss(data)[1]["approx_kl"].abs() < 1e-6


def test_end_to_end_a_loss_reaches_what_was_seen_earlier_in_the_same_life_only(through_time):
    data, loss, _ = through_time
    data = data.clone()
    data["features"] = data["features"].requires_grad_()
    begun = int(data["first"][:, 0].nonzero()[0])
    end = begun + 3
    loss.beliefs(data)[end, 0].sum().backward()
    touched = data["features"].grad[:, 0].abs().sum(-1) > 0
    assert touched.tolist() == [begun <= tick <= end for tick in range(len(touched))]


@pytest.mark.parametrize(
    ("how", "ticks", "most", "least"),
    [
        ("now", 4096, 0.7, 0.3),
        pytest.param("stacked", 8192, 1.0, 0.95, marks=pytest.mark.slow),
        pytest.param("end to end", 3072, 1.0, 0.9, marks=pytest.mark.slow),
    ],
)
def test_a_hint_of_the_first_tick_is_used_by_who_can_remember_it(how, ticks, most, least):
    """The staged agent's is `test_own_learning.py`'s. Who does not remember earns half."""

    def make():
        return GymnasiumWorld(Hint(), "hint")

    torch.set_num_threads(1)
    side, params = Lanes(make, 8, count(), 1000), PolicyParams(ticks=ticks, rollout=32)
    senses = Senses(side.shape, UNIT)
    if how == "end to end":
        fresh, taken = ours.train_end_to_end(side, senses, UNIT, params, 0)
        torch.manual_seed(0)
        untrained = Perception(side.shape, UNIT, PerceptionParams().hidden)
        for name, weight in fresh().perceive.named_parameters():  # not D alone has learned
            assert not torch.equal(weight, untrained.get_parameter(name)), name
    else:
        fresh, taken = ours.train_alone(how == "stacked", side, senses, params, 0)
    assert taken == ticks
    returns, _ = play_cases(make, fresh(), 100, 16, 100)
    assert least <= returns.mean() <= most
