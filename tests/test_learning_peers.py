"""The benchmark's peers: that they learn what they say they learn, on equal terms."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("gymnasium", reason="the adapters extra is not installed")

from benchmarks.learning_peers import Clock, Everyone, LstmPolicy, lstm_ppo, recurrent_ppo
from pipeline.files import HamletError

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
        peer(**SMALL, iterations=2, threads=threads, everyone=everyone)
        for peer in (lstm_ppo, recurrent_ppo)
    )
    assert ours.parameters == theirs.parameters
    assert ours.steps == theirs.steps == 4 * 8 * 2 * (4 if everyone else 1)
    assert all(0 < peer.environment_share < 1 for peer in (ours, theirs))


def test_lanes_of_everyone_end_with_their_agent_and_with_their_world():
    lanes = Everyone(3, Clock())
    lanes.reset(seed=1)
    draw = np.random.default_rng(0)
    lives, idled = lanes._state["episode"], False
    for _ in range(400):
        alive = lanes._state["alive"].flatten()
        actions = draw.integers(lanes.town.num_actions, size=12)
        observation, reward, ended, _, _ = lanes.step(actions)
        begun = (lanes._state["episode"] > lives).repeat_interleave(4)
        died = alive & ~lanes._state["alive"].flatten()
        assert np.array_equal(ended, begun | died)
        assert lanes.observation_space.contains(observation)
        assert (reward[~alive.numpy()] == 0).all()
        idled |= bool((begun & ~alive).any())
        lives = lanes._state["episode"]
    assert (lives > 0).all()
    assert idled  # some agent died before its world was over, so both kinds of end were seen


def test_lanes_that_do_not_divide_into_minibatches_are_refused(threads):
    with pytest.raises(HamletError, match=r"minibatches: 3 do not divide 4 lanes"):
        lstm_ppo(**SMALL | {"minibatches": 3}, iterations=1, threads=threads)
