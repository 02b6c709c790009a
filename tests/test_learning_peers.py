"""The benchmark's peers: that they learn what they say they learn, on equal terms."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("gymnasium", reason="the adapters extra is not installed")

from benchmarks.learning_peers import REWARD_SCALE, Clock, Everyone, LstmPolicy, LstmPPO, measure
from benchmarks.recurrent_dqn import RecurrentDQN
from hamlet.artifacts import HamletError
from hamlet.town import Town, load_pack

SMALL = {"worlds": 4, "rollout": 8, "epochs": 1, "minibatches": 2, "hidden": 16}


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield 1
    torch.set_num_threads(before)


def run(policy, seen, begins):
    memory = (torch.zeros(1, 2, 8), torch.zeros(1, 2, 8))
    return policy(seen, memory, begins)[1]


def test_the_lstm_forgets_where_a_life_begins_and_only_there():
    torch.manual_seed(0)
    policy = LstmPolicy(5, 8, 3)
    seen = torch.randn(6, 2, 5, requires_grad=True)
    begins = torch.zeros(6, 2)
    begins[3, 1] = 1
    value = run(policy, seen, begins)
    alone = run(policy, seen[3:], torch.zeros(3, 2))
    assert torch.allclose(value[3:, 1], alone[:, 1], atol=1e-6)
    assert not torch.allclose(value[3:, 0], alone[:, 0], atol=1e-6)
    value[5].sum().backward()
    assert seen.grad is not None
    assert (seen.grad[:, 0].abs().sum(-1) > 0).all()  # through all of the rollout
    assert (seen.grad[:3, 1] == 0).all()  # but not into the life before
    assert (seen.grad[3:, 1].abs().sum(-1) > 0).all()


@pytest.mark.parametrize("everyone", [False, True])
def test_both_peers_train_as_many_parameters_on_as_many_steps(everyone, threads):
    pytest.importorskip("sb3_contrib", reason="the bench extra is not installed")
    ours, theirs = (
        measure(peer, **SMALL, iterations=2, threads=threads, everyone=everyone)
        for peer in ("lstm_ppo", "recurrent_ppo")
    )
    assert ours.parameters == theirs.parameters
    assert ours.steps == theirs.steps == 4 * 8 * 2 * (4 if everyone else 1)
    assert all(0 < peer.environment_share < 1 for peer in (ours, theirs))


def test_lanes_of_everyone_end_with_their_agent_and_with_their_world():
    lanes = Everyone(3, Clock())
    lanes.reset(seed=1)
    draw = np.random.default_rng(0)
    lives, idled = lanes.world["episode"], False
    for _ in range(400):
        alive = lanes.world["alive"].flatten()
        actions = draw.integers(lanes.town.num_actions, size=12)
        observation, reward, ended, _, _ = lanes.step(actions)
        begun = (lanes.world["episode"] > lives).repeat_interleave(4)
        died = alive & ~lanes.world["alive"].flatten()
        assert np.array_equal(ended, begun | died)
        assert lanes.observation_space.contains(observation)
        assert (reward[~alive.numpy()] == 0).all()
        idled |= bool((begun & ~alive).any())
        lives = lanes.world["episode"]
    assert (lives > 0).all()
    assert idled  # some agent died before its world was over, so both kinds of end were seen


def test_lanes_that_do_not_divide_into_minibatches_are_refused(threads):
    with pytest.raises(HamletError, match=r"minibatches: 3 do not divide 4 lanes"):
        measure("lstm_ppo", **SMALL | {"minibatches": 3}, iterations=1, threads=threads)


class Recall:
    """Lanes in which the action that pays is the number that was shown three ticks before."""

    def __init__(self, lanes: int) -> None:
        self.num_envs, self.town = lanes, SimpleNamespace(num_actions=4)
        self.single_action_space = SimpleNamespace(n=4)

    def _show(self) -> np.ndarray:
        self.tick = 0
        self.shown = self.draw.integers(4, size=self.num_envs)
        return np.eye(5, dtype=np.float32)[self.shown]

    def reset(self, *, seed: int):
        self.draw = np.random.default_rng(seed)
        return self._show(), {}

    def step(self, actions: np.ndarray):
        self.tick += 1
        ended = np.full(self.num_envs, self.tick == 4)
        reward = np.where(ended, (actions == self.shown).astype(np.float32), 0.0)
        blank = np.tile(np.eye(5, dtype=np.float32)[4], (self.num_envs, 1))
        return self._show() if self.tick == 4 else blank, reward, ended, ~ended & ended, {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lstm_ppo", "recurrent_dqn"])
def test_a_recurrent_peer_learns_what_only_memory_can_tell(kind, threads):
    torch.set_num_threads(threads)
    lanes = Recall(64)
    learner = (
        LstmPPO(lanes, 16, 4, 4, 32, seed=1)
        if kind == "lstm_ppo"
        else RecurrentDQN(lanes, 16, updates=16, iterations=40, hidden=32, seed=1)
    )
    learner.learn(40)
    seen, _ = lanes.reset(seed=2)
    memory, right = (torch.zeros(64, 32), torch.zeros(64, 32)), 0.0
    for _ in range(4):
        action, memory = learner.act(torch.from_numpy(seen), memory)
        seen, reward, _, _, _ = lanes.step(action.numpy())
        right += reward.mean().item()
    assert right > 0.8  # by chance a quarter


def test_everyone_lives_in_the_town_that_is_given_and_is_paid_in_units_of_one():
    town = Town(load_pack("l7_scarce"), num_layouts=8)
    lanes = Everyone(2, Clock(), town)
    seen, _ = lanes.reset(seed=3)
    assert lanes.num_envs == 2 * town.num_agents
    assert lanes.observation_space.contains(seen)
    state = lanes.world
    actions = np.zeros(lanes.num_envs, dtype=np.int64)
    _, reward, _, _, _ = lanes.step(actions)
    earned = town.step_core(state, torch.zeros(2, town.num_agents, dtype=torch.int64))["reward"]
    assert np.allclose(reward, REWARD_SCALE * earned.flatten().numpy())
    assert reward.any()
