"""Anybody's world: endings, slots, masks, padding, spaces, and what is wrong in one line."""

from __future__ import annotations

import sys
from itertools import count

import numpy as np
import pytest
from gymnasium import spaces
from own_worlds import Counting, Leaving, Masked

from hamlet.artifacts import HamletError
from hamlet.worlds.contract import Field, WorldShape
from hamlet.worlds.gymnasium_world import GymnasiumWorld
from hamlet.worlds.lanes import HELD_OUT, Lanes, held_out_seeds, legal_at_random, training_seeds
from hamlet.worlds.opening import open_world, wrapped
from hamlet.worlds.pettingzoo_world import PettingZooWorld


def lanes_of(make, lanes=1, longest=1000):
    return Lanes(make, lanes, count(), longest)


def counting(length=3, ends="terminated"):
    return GymnasiumWorld(Counting(length, ends), "counting")


def zeros(lanes):
    return np.zeros(len(lanes.now.alive), np.int64)


# ------------------------------------------------------------------------------------------------
# Endings


@pytest.mark.parametrize("ends", ["terminated", "truncated"])
def test_the_last_thing_seen_is_kept_and_the_next_life_begins(ends):
    lanes = lanes_of(lambda: counting(3, ends))
    for _ in range(2):
        assert not lanes.step(zeros(lanes)).over.any()
    row = lanes.step(zeros(lanes))
    assert row.over.tolist() == [True]
    assert (row.terminated[0], row.truncated[0]) == (ends == "terminated", ends == "truncated")
    assert row.last["observation"][0, 0] == 3  # before the reset
    assert lanes.now.fields["observation"][0, 0] == 0  # after it
    assert lanes.now.first.tolist() == [True]
    assert [x.tolist() for x in lanes.returns] == [[6.0]]
    assert lanes.lengths == [3]


def test_an_episode_that_does_not_end_is_cut_and_not_terminated():
    lanes = lanes_of(lambda: counting(100), longest=5)
    rows = [lanes.step(zeros(lanes)) for _ in range(5)]
    assert [bool(row.truncated[0]) for row in rows] == [False] * 4 + [True]
    assert not any(row.terminated[0] for row in rows)
    assert rows[-1].last["observation"][0, 0] == 5
    assert lanes.lengths == [5]


def test_who_ends_by_the_rules_at_the_last_tick_is_not_cut():
    lanes = lanes_of(lambda: counting(5), longest=5)
    rows = [lanes.step(zeros(lanes)) for _ in range(5)]
    assert rows[-1].terminated[0]
    assert not rows[-1].truncated[0]


def test_lanes_begin_episodes_in_the_order_of_their_seeds():
    worlds = []

    def make():
        worlds.append(counting(2 + len(worlds)))
        return worlds[-1]

    lanes = lanes_of(make, 2)
    for _ in range(3):
        lanes.step(zeros(lanes))
    # Each was reset once to be looked at.
    assert [w.env.seeds for w in worlds] == [[0, 0, 2], [0, 1, 3]]


def test_seeds_of_training_and_of_evaluation_never_meet():
    training, held = training_seeds(0, 1), held_out_seeds()
    assert max(next(training) for _ in range(1000)) < HELD_OUT <= next(held)
    again, other = training_seeds(0, 1), training_seeds(0, 2)
    assert next(again) == next(training_seeds(0, 1))
    assert next(again) != next(other)


# ------------------------------------------------------------------------------------------------
# Several agents


def test_slots_are_empty_before_and_after_an_agents_life():
    lanes = lanes_of(lambda: PettingZooWorld(Leaving(), "leaving"))
    seen, rows = [lanes.now], []
    for _ in range(4):
        rows.append(lanes.step(zeros(lanes)))
        seen.append(lanes.now)
    alive = [now.alive.tolist() for now in seen]
    assert alive == [
        [True, False, True],
        [True, True, True],
        [False, True, True],
        [False, True, True],
        [True, False, True],  # the next episode
    ]
    assert [now.first.tolist() for now in seen] == [
        [True, False, True],
        [False, True, False],
        [False, False, False],
        [False, False, False],
        [True, False, True],
    ]
    assert [row.reward.tolist() for row in rows] == [[1, 0, 3], [1, 2, 3], [0, 2, 3], [0, 2, 3]]
    assert [row.terminated.tolist() for row in rows] == [
        [False] * 3,
        [True, False, False],
        [False] * 3,
        [False] * 3,
    ]
    assert rows[3].truncated.tolist() == [False, True, True]
    assert [bool(row.over[0]) for row in rows] == [False, False, False, True]
    assert lanes.returns[0].tolist() == [2, 6, 12]
    assert rows[1].last["observation"][0].tolist() == [3, 3, 0]  # the last thing that `early` saw


def test_an_agent_that_vanishes_without_a_word_has_terminated():
    class Vanishing(Leaving):
        def step(self, actions):
            seen, reward, ends, cuts, info = super().step(actions)
            return seen, reward, dict.fromkeys(ends, False), cuts, info

    lanes = lanes_of(lambda: PettingZooWorld(Vanishing(), "vanishing"))
    lanes.step(zeros(lanes))
    assert lanes.step(zeros(lanes)).terminated.tolist() == [True, False, False]


def test_vectors_and_actions_are_padded_and_the_agents_index_is_added():
    world = PettingZooWorld(Leaving(), "leaving")
    shape = world.shape
    assert [(f.name, f.kind, f.shape, f.count) for f in shape.fields] == [
        ("observation", "vector", (3,), None),
        ("agent", "codes", (), 3),
    ]
    assert (shape.num_actions, shape.action_counts, shape.masked) == (3, (2, 2, 3), True)
    seen = world.reset(0)
    assert seen.fields["observation"].tolist() == [[1, 1, 0], [0, 0, 0], [1, 1, 1]]
    assert seen.fields["agent"].tolist() == [0, 1, 2]
    assert seen.mask.tolist() == [[True, True, False], [True, True, False], [True] * 3]


def test_agents_that_observe_one_code_keep_each_their_own():
    class Codes(Leaving):
        def observation_space(self, agent):
            return spaces.Discrete(5 if agent == "whole" else 4, start=1)

        def seen(self, agents):
            return {a: self.tick + 1 + self.possible_agents.index(a) for a in agents}

    world = PettingZooWorld(Codes(), "codes")
    assert [f.count for f in world.shape.fields] == [5, 3]
    assert world.reset(0).fields["observation"].tolist() == [0, 0, 2]


def test_masks_of_info_and_of_the_observation_are_obeyed():
    class Inside(Masked):
        observation_space = spaces.Dict(
            {
                "observation": spaces.Box(-9, 9, (2,), np.float32),
                "action_mask": spaces.MultiBinary(3),
            }
        )

        def reset(self, *, seed=None, options=None):
            seen, info = super().reset(seed=seed)
            return {"observation": seen, **info}, {}

        def step(self, action):
            seen, *rest, info = super().step(action)
            return {"observation": seen, **info}, *rest, {}

    rng = np.random.default_rng(0)
    for kind in (Masked, Inside):
        world = GymnasiumWorld(kind(20), "masked")
        assert world.shape.masked
        assert [f.name for f in world.shape.fields] == ["observation"]
        lanes = lanes_of(lambda world=world: world)
        for _ in range(30):
            lanes.step(legal_at_random(lanes.now.mask, rng))
    with pytest.raises(HamletError, match="action 2 of agent is illegal"):
        lanes.step(np.array([(lanes.now.mask[0].argmax() + 2) % 3]) * 0 + 2)


# ------------------------------------------------------------------------------------------------
# The description


def test_every_space_becomes_the_field_that_a_network_can_take():
    class Rich(Counting):
        observation_space = spaces.Dict(
            {
                "where": spaces.Discrete(4, start=2),
                "bits": spaces.MultiBinary(3),
                "parts": spaces.MultiDiscrete([2, 5]),
                "screen": spaces.Box(0, 255, (8, 9, 3), np.uint8),
                "words": spaces.Text(5),
                "inner": spaces.Dict({"value": spaces.Box(-1, 1, (2,), np.float64)}),
            }
        )

        def seen(self):
            return {
                "where": 5,
                "bits": np.array([1, 0, 1], np.int8),
                "parts": np.array([1, 4]),
                "screen": np.zeros((8, 9, 3), np.uint8),
                "words": "a",
                "inner": {"value": np.array([0.5, -0.5])},
            }

    world = GymnasiumWorld(Rich(), "rich")
    fields = {f.name: (f.kind, f.shape, f.dtype, f.count) for f in world.shape.fields}
    assert fields == {
        "where": ("codes", (), "int64", 4),
        "bits": ("vector", (3,), "float32", None),
        "parts": ("codes", (2,), "int64", 5),
        "screen": ("picture", (8, 9, 3), "uint8", None),
        "inner_value": ("vector", (2,), "float32", None),
    }
    assert world.shape.ignored == ("words",)
    seen = world.reset(0).fields
    assert seen["where"].tolist() == [3]  # counted from 0
    assert seen["inner_value"].dtype == np.float32


def test_the_hash_sees_every_part_of_the_description_and_survives_json():
    shape = counting().shape
    assert WorldShape.from_dict(shape.to_dict()) == shape
    assert WorldShape.from_dict(shape.to_dict()).content_hash == shape.content_hash
    changes = {
        "name": "other",
        "fields": (Field("observation", "vector", (3,), "float32"),),
        "agents": ("a", "b"),
        "actions": ("left", "right", "up"),
        "action_counts": (2,),
        "masked": True,
        "ignored": ("words",),
    }
    for name, value in changes.items():
        other = WorldShape(**{**shape.__dict__, name: value})
        assert other.content_hash != shape.content_hash, name


# ------------------------------------------------------------------------------------------------
# What is wrong, in one line


class Continuous(Counting):
    action_space = spaces.Box(-1, 1, (2,))


class Graphs(Counting):
    observation_space = spaces.Graph(spaces.Box(0, 1, (2,)), None)


class Changing(Counting):
    def seen(self):
        return np.zeros(2 + (self.tick > 1), np.float32)


class NotANumber(Counting):
    def seen(self):
        return np.array([np.nan if self.tick else 0, 0], np.float32)


class NoReward(Counting):
    def step(self, action):
        seen, _, *rest = super().step(action)
        return seen, float("inf"), *rest


class Raising(Counting):
    def step(self, action):
        raise RuntimeError("the bridge is out")


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (Continuous, "the actions are Box.*only Discrete ones"),
        (Graphs, "observation `observation` is Graph.*cannot be taken"),
        (Changing, r"observation `observation` has shape \[3\], its space says \[2\]"),
        (NotANumber, "observation `observation` is not finite"),
        (NoReward, "the reward of the agent is inf"),
        (Raising, "its step raised RuntimeError: the bridge is out"),
    ],
)
def test_a_world_that_cannot_be_taken_says_why_in_one_line(kind, told):
    def play():
        lanes = lanes_of(lambda: GymnasiumWorld(kind(9), "mine"))
        for _ in range(3):
            lanes.step(zeros(lanes))

    with pytest.raises(HamletError, match=f"^mine: {told}") as caught:
        play()
    assert "\n" not in str(caught.value)


def test_a_world_is_found_by_its_name_or_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_world_of_a_test.py").write_text("def make(:\n")
    (tmp_path / "needy_world_of_a_test.py").write_text("import surely_not_there\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for source, told in {
        "atari:Pong": "of no kind that is known here",
        "gymnasium:NoSuchThing-v0": "cannot be made.*NoSuchThing",
        "pettingzoo:surely_not_there.simple_v3": "needs surely_not_there.*pip install surely",
        "pettingzoo:json": "the module has no `parallel_env`",
        "python:broken_world_of_a_test.make": "raised SyntaxError when it was read",
        "python:needy_world_of_a_test.make": "needs surely_not_there.*pip install surely",
        "python:json.nothing": "json has no function `nothing`",
    }.items():
        with pytest.raises(HamletError, match=told):
            open_world(source)
    assert open_world("gymnasium:CartPole-v1").shape.name == "CartPole-v1"


def test_what_is_no_single_parallel_environment_is_refused():
    class Vector(Counting):
        num_envs = 4

    class Turns(Leaving):
        def agent_iter(self):
            return iter(())

    for env, told in ((Vector(), "a vector of"), (Turns(), "in turns"), (3, "is no environment")):
        with pytest.raises(HamletError, match=told):
            wrapped(env, "mine")


class Choosy(Leaving):
    """Who is there may take its last action only; the mask stands where `where` says."""

    def __init__(self, where):
        super().__init__()
        self.where = where

    def told(self, seen, info):
        for agent in seen:
            mask = np.zeros(self.action_space(agent).n, np.int8)
            mask[-1] = 1
            if self.where == "info":
                info[agent]["action_mask"] = mask
            else:
                seen[agent] = {"observation": seen[agent], "action_mask": mask}
        return seen, info

    def observation_space(self, agent):
        own = super().observation_space(agent)
        if self.where == "info":
            return own
        mask = spaces.Box(0, 1, (self.action_space(agent).n,), np.int8)
        return spaces.Dict({"observation": own, "action_mask": mask})

    def reset(self, seed=None, options=None):
        return self.told(*super().reset(seed, options))

    def step(self, actions):
        seen, reward, ends, cuts, info = super().step(actions)
        seen, info = self.told(seen, info)
        return seen, reward, ends, cuts, info


@pytest.mark.parametrize("where", ["info", "observation"])
def test_masks_of_several_agents_are_those_of_whoever_is_alive(where):
    world = PettingZooWorld(Choosy(where), "choosy")
    assert world.shape.masked
    seen = world.reset(0)
    assert seen.alive.tolist() == [True, False, True]
    assert seen.mask[0].tolist() == [False, True, False]
    assert seen.mask[2].tolist() == [False, False, True]
    seen = world.step(np.array([1, 0, 2])).seen
    assert seen.mask[1].tolist() == [False, True, False]  # `late` has come
