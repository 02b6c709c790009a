"""The assembled agent, tick by tick; who may be champion; what is played between episodes."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
import torch
from own_worlds import Counting, Leaving

from hamlet.own.evaluating import Player
from hamlet.own.params import RegisterParams
from hamlet.own.registering import gate
from hamlet.plain.agent import PlainAgent, example_inputs
from hamlet.plain.perception import Perception
from hamlet.plain.policy import Policy
from hamlet.plain.senses import Senses, statistics_of, width
from hamlet.plain.social import Odds, Social
from hamlet.plain.world_model import WorldModel
from hamlet.serving.agent import Decision
from hamlet.worlds.contract import Field, WorldShape
from hamlet.worlds.gymnasium_world import GymnasiumWorld
from hamlet.worlds.lanes import Lanes
from hamlet.worlds.pettingzoo_world import PettingZooWorld

HIDDEN = 8


@pytest.fixture(scope="module")
def agent():
    """An untrained agent for three agents with padded, masked actions."""
    torch.manual_seed(0)
    shape = PettingZooWorld(Leaving(), "leaving").shape
    statistics = {"observation": {"mean": torch.zeros(3), "std": torch.ones(3)}}
    perception = Perception(shape, statistics, HIDDEN)
    known = perception.senses.width
    unit = torch.tensor([0.0, 1.0])
    model = WorldModel(known + HIDDEN, 3, 16, 2, torch.ones(known + HIDDEN), unit, unit)
    policy = Policy(known, HIDDEN, 3, 16)
    with torch.no_grad():
        policy.actor[-1].bias.copy_(torch.tensor([1.2, 0.0, 0.0]))  # it prefers something
    social = Odds(Social(known, HIDDEN, 2, 3, 16))
    return PlainAgent(shape, perception, model, policy, social, 2.0).eval()


def tick(agent, inputs):
    with torch.no_grad():
        return dict(zip(agent.outputs, agent(*inputs), strict=True))


def drawn(agent, batch):
    return example_inputs(agent.shape, HIDDEN, batch, torch.Generator().manual_seed(1))


def test_an_action_is_legal_and_drawn_from_its_odds(agent):
    assert agent.inputs == [
        "observation", "agent", "action_mask", "state_belief", "state_acted", "state_rng"
    ]  # fmt: skip
    inputs = drawn(agent, 3000)
    out = tick(agent, inputs)
    mask = inputs[2]
    assert mask.gather(-1, out["action"].unsqueeze(-1)).all()
    assert torch.equal(out["next_acted"], out["action"] + 1)
    one = [x[:1].expand(3000, *x.shape[1:]) for x in inputs[:-1]]
    for legal in ([True, False, True], [True, True, True]):
        one[2] = torch.tensor([legal]).expand(3000, 3)
        out = tick(agent, [*one, inputs[-1]])
        odds = out["action_logits"][0].softmax(-1)
        seen = torch.bincount(out["action"], minlength=3) / 3000
        assert (seen - odds).abs().max() < 0.025
        assert (seen > 0).tolist() == legal
    assert 0.5 < odds[0] < 0.75


def test_equal_inputs_give_equal_outputs_and_the_next_numbers_are_others(agent):
    inputs = drawn(agent, 5)
    first, again = tick(agent, inputs), tick(agent, inputs)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["next_rng"], inputs[-1])


def test_what_is_thought_has_the_shape_of_the_world(agent):
    out = tick(agent, drawn(agent, 4))
    shapes = {name: tuple(x.shape) for name, x in out.items()}
    for what in ("reward", "going_on", "value", "uncertainty"):
        assert shapes[f"imagined_{what}"] == (4, 3)
    assert shapes["next_action_of_others"] == (4, 2, 3)
    assert torch.allclose(out["next_action_of_others"].sum(-1), torch.ones(4, 2))
    assert ((out["imagined_going_on"] >= 0) & (out["imagined_going_on"] <= 1)).all()
    with torch.no_grad():
        features, belief = agent.perception(*drawn(agent, 4)[:2], *drawn(agent, 4)[4:2:-1])
        value = agent.policy(features, belief)[1]
    assert torch.allclose(out["value"], 2 * value)


def test_each_action_is_imagined_for_itself(agent):
    out = tick(agent, drawn(agent, 4))
    model = agent.world_model
    features, belief = torch.randn(4, model.known - HIDDEN), torch.randn(4, HIDDEN)
    with torch.no_grad():
        reward = model(features, belief)[0]
        for action in range(3):
            told = model.told(features, belief, torch.full((4,), action))
            assert torch.allclose(reward[:, action], told[..., -3].mean(0), atol=1e-6)
    assert out["imagined_reward"].std(-1).min() > 0


# ------------------------------------------------------------------------------------------------
# Senses


def test_features_are_scaled_cut_off_and_one_hot():
    fields = (
        Field("x", "vector", (2,), "float32"),
        Field("code", "codes", (2,), "int64", 0, 2, 3),
        Field("screen", "picture", (3, 30, 24), "uint8", 0, 255),
    )
    shape = WorldShape("all", fields, ("agent",), ("a", "b"), (2,), False)
    data = {
        "x": torch.tensor([[1.0, 5.0], [3.0, 5.0], [99.0, 99.0]]),
        "code": torch.tensor([[0, 2], [1, 1], [2, 2]]),
        "screen": torch.full((3, 3, 30, 24), 7, dtype=torch.uint8),
    }
    statistics = statistics_of(shape, data, torch.tensor([True, True, False]))
    assert statistics["x"]["mean"].tolist() == [2, 5]
    # The second never changed: its deviation is a share of the field's size.
    assert statistics["x"]["std"].tolist() == pytest.approx([1.0, 0.25])
    senses = Senses(shape, statistics)
    out = senses(*(data[f.name] for f in fields))
    assert senses.width == out.shape[1] == 2 + 6 + 3 * 12 * 12
    assert out[0, :8].tolist() == [-1, 0, 1, 0, 0, 0, 0, 1]
    assert out[2, :2].tolist() == [10, 10]
    assert [width(f) for f in fields] == [2, 6, 432]


# ------------------------------------------------------------------------------------------------
# Playing and the gate


class Remembering:
    """Stands for an `OnnxAgent`: counts its ticks and acts by nothing."""

    inputs = ("observation", "state_belief", "state_acted", "state_rng")

    def start(self, batch):
        zeros = np.zeros(batch, np.int64)
        return {"state_belief": np.zeros((batch, 1), np.float32), "state_acted": zeros,
                "state_rng": zeros.copy()}  # fmt: skip

    def act(self, fields, state):
        self.seen = {name: x.copy() for name, x in state.items()}
        following = {**state, "state_belief": state["state_belief"] + 1}
        return Decision(np.zeros(len(fields["observation"]), np.int64), following, {})


def test_a_life_begins_with_no_memory_and_numbers_of_its_case():
    lanes = Lanes(lambda: GymnasiumWorld(Counting(3), "counting"), 2, count(), 100)
    mind = Remembering()
    player = Player(mind, 1)
    beliefs, numbers = [], []
    for t in range(5):
        cases = np.array([0, 1]) + 2 * (t // 3)
        lanes.step(player.act(lanes.now, cases))
        beliefs.append(mind.seen["state_belief"][0, 0])
        numbers.append(mind.seen["state_rng"].tolist())
    assert beliefs == [0, 1, 2, 0, 1]
    assert numbers[0] == numbers[2]
    assert len({*map(tuple, numbers)}) == 2
    assert len({n for pair in numbers for n in pair}) == 4


@pytest.mark.parametrize(
    ("low", "mean", "params", "told"),
    [
        (0.5, 3.0, {}, []),
        (-0.1, 3.0, {}, ["which may be luck"]),
        (-0.1, 3.0, {"beats_random": False}, []),
        (0.5, 3.0, {"min_return": 4.0}, ["the gate asks min 4"]),
        (0.0, 3.0, {"min_return": 4.0}, ["which may be luck", "the gate asks min 4"]),
    ],
)
def test_the_gate(low, mean, params, told):
    scores = {"above_random": 1.0, "above_random_ci95": [low, 2.0], "mean_return": mean}
    reasons = gate(RegisterParams(**params), scores)
    assert len(reasons) == len(told)
    assert all(part in reason for part, reason in zip(told, reasons, strict=True))
