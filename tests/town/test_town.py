"""The town's basic behaviour: purity, replays, resets, legality."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hamlet.town import Scripted, Town, counter_uniform, load_pack


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


SEEDS = st.integers(0, 2**40)


def short_lives(name: str) -> Town:
    """Lives of at most 30 ticks, so that a few runs see many ends and beginnings."""
    pack = load_pack(Path(__file__).parent / "zoo.yaml" if name == "zoo" else name)
    return Town(pack.model_copy(update={"lifespan": 30}), num_layouts=16)


SHORT = {name: short_lives(name) for name in ("l4_contention", "zoo")}


@pytest.mark.parametrize("name", SHORT)
@settings(max_examples=10)
@given(seed=SEEDS, ticks=st.integers(0, 40), reset=st.booleans())
def test_a_step_leaves_its_input_alone(name, seed, ticks, reset):
    town = SHORT[name]
    state = town.reset(seed, 4)
    for _ in range(ticks):
        state = town.step_and_reset_core(state, random_actions(town, state))
    actions = random_actions(town, state)
    before, asked = state.clone(), actions.clone()
    step = town.step_and_reset_core if reset else town.step_core
    step(state, actions)
    town.observe(state)
    assert (state == before).all()
    assert torch.equal(actions, asked)


@pytest.mark.parametrize("name", SHORT)
@settings(max_examples=5)
@given(seed=SEEDS, worlds=st.integers(2, 12), data=st.data())
def test_a_world_is_the_same_bits_in_any_batch(name, seed, worlds, data):
    """Neither its neighbours nor their number matter: alone it lives as it does in a batch."""
    town, chosen = SHORT[name], data.draw(st.integers(0, worlds - 1))
    many, one = town.reset(seed, worlds), town.reset(seed, 1, first_world=chosen)
    for _ in range(70):
        many = town.step_and_reset_core(many, random_actions(town, many))
        one = town.step_and_reset_core(one, random_actions(town, one))
        assert (many[chosen : chosen + 1] == one).all()
        seen, alone = town.observe(many), town.observe(one)
        assert (seen[chosen : chosen + 1] == alone).all()
    assert one["episode"].item() >= 2


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


@pytest.mark.parametrize(
    "names",
    [
        None,
        ("expert",),
        ("expert_sightings",),
        ("random", "rest"),
        ("visitor", "expert_searching", "expert"),
    ],
)
def test_players_only_take_legal_actions(town, names):
    players = Scripted(town, names, seed=2)
    state = town.reset(4, 8)
    memory = players.reset(state)
    for _ in range(60):
        actions, goals, memory = players.act(state, memory)
        assert town.action_mask(state).gather(2, actions[..., None]).all()
        assert ((goals >= 0) & (goals < town.num_goals)).all()
        state = town.step_and_reset_core(state, actions)
