"""The town's basic behaviour: purity, replays, resets, legality."""

from __future__ import annotations

import pytest
import torch

from pipeline.town import Scripted, Town, counter_uniform, load_pack


@pytest.fixture(scope="module")
def town() -> Town:
    return Town(load_pack("l4_contention"), num_layouts=64)


def random_actions(town, state):
    mask = town.action_mask(state)
    _b, n, a = mask.shape
    stream = 9000 + torch.arange(n * a).view(n, a)
    draw = counter_uniform(
        state["seed"][:, None, None], state["world"][:, None, None],
        state["episode"][:, None, None], state["tick"].long()[:, None, None], stream,
    )  # fmt: skip
    return torch.where(mask, draw, -1.0).argmax(-1)


def test_a_step_leaves_its_input_alone(town):
    state = town.reset(3, 8)
    before = state.clone()
    town.step_and_reset_core(state, random_actions(town, state))
    assert (state == before).all()


def test_a_world_does_not_depend_on_its_neighbours(town):
    many, one = town.reset(5, 16), town.reset(5, 1, first_world=11)
    for _ in range(300):
        many = town.step_and_reset_core(many, random_actions(town, many))
        one = town.step_and_reset_core(one, random_actions(town, one))
        assert (many[11:12] == one).all()
    assert many["episode"].sum() > 0


def test_finished_worlds_freeze_without_reset(town):
    state = town.reset(0, 8)
    for _ in range(300):
        state = town.step_core(state, random_actions(town, state))
    assert state["over"].all()
    later = town.step_core(state, random_actions(town, state))
    for name in ("meters", "position", "tick", "hour", "progress", "cue_bits", "done"):
        assert torch.equal(later[name], state[name]), name
    assert not later["reward"].any()
    assert not later["died"].any()
    assert not later["episode_over"].any()


@pytest.mark.parametrize("names", [None, ("expert",), ("expert_sightings",), ("random", "rest")])
def test_players_only_take_legal_actions(town, names):
    players = Scripted(town, names, seed=2)
    state = town.reset(4, 8)
    memory = players.reset(state)
    for _ in range(60):
        actions, goals, memory = players.act(state, memory)
        assert town.action_mask(state).gather(2, actions[..., None]).all()
        assert ((goals >= 0) & (goals < town.num_goals)).all()
        state = town.step_and_reset_core(state, actions)
