"""Module B's rules, one weight at a time: what each fact is, and what it moves."""

from __future__ import annotations

import math

import pytest
import torch

from hamlet.modules.contracts import LOOK
from hamlet.modules.world_model import HOURS, KNOTS, PROGRESS, RULE_UNIT, WorldModel

LATENT, PLACE, METER = 3, 2, 0
EACH = 0.1  # what one unit of a fact adds to the meter


@pytest.fixture
def blank(shape) -> WorldModel:
    """Knows nothing: nothing changes, and whether a place is free is a toss."""
    model = WorldModel(shape, LATENT, 8, 2)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    return model.requires_grad_(False).eval()


def told(model, action: str, at: int | None = PLACE, progress: int = 0, hour: float = 0.0,
         doubt: float = -5.0, **known: float):  # fmt: skip
    """The next tick by name, of an agent in the place `at`, all others being six cells away."""
    shape = model.shape
    mean = torch.zeros(1, model.places + LOOK + LATENT)
    mean[0, : model.places] = torch.tensor([6 / shape.width, 0.0] * shape.num_affordances)
    if at is not None:
        mean[0, 2 * at] = 0.0
    state = torch.full((1, shape.self_dim), 0.5)
    angle = hour * 2 * math.pi / 24
    values = {
        "progress": progress / 10, "sin_hour": math.sin(angle), "cos_hour": math.cos(angle),
        "x": 0.5, "y": 0.5, "age": 0.5, "blocked": 0.0, **known,
    }  # fmt: skip
    for name, value in values.items():
        state[0, shape.self_names.index(name)] = value
    number = torch.tensor([shape.action_names.index(action)])
    names = ("mean", "log_std", "known", "reward", "goes_on", "value", "legal", "disagreement",
             "confidence", "novel")  # fmt: skip
    return dict(zip(names, model(mean, torch.full_like(mean, doubt), state, number), strict=True))


def test_who_knows_nothing_says_that_nothing_changes(blank):
    now = told(blank, "INTERACT")
    assert now["known"][0, METER].item() == 0.5
    assert now["goes_on"].item() == 0.5
    assert now["reward"].item() == now["value"].item() == 0.0
    assert now["disagreement"].item() < 1e-5
    assert not now["legal"].any()


def test_what_the_members_say_is_averaged_and_how_far_they_are_apart_is_told(blank):
    said = blank.layers[-1].bias  # [members, 1, everything]
    of_value = sum(blank.sizes[:4])
    said[:, 0, of_value] = torch.tensor([1.0, 3.0])
    said[:, 0, 0] = torch.tensor([-5.0, 5.0])  # of the next belief: that is no disagreement
    now = told(blank, "WAIT")
    assert now["value"].item() == pytest.approx(2.0)
    # Each is 1 away from the mean, in one of the numbers.
    assert now["disagreement"].item() == pytest.approx(sum(blank.sizes[2:]) ** -0.5, rel=1e-5)
    assert not now["novel"]
    blank.novel_threshold.fill_(0.9 * now["disagreement"].item())
    assert told(blank, "WAIT")["novel"]


def facts(shape) -> dict[str, int]:
    """Where each kind of fact begins among the inputs of the effects."""
    f, a = shape.num_affordances, shape.num_actions
    sizes = {
        "using": f * PROGRESS, "used": f, "refused": 1, "does": a, "does for": a,
        "low": shape.num_meters * KNOTS, "known": shape.self_dim,
    }  # fmt: skip
    starts, at = {}, 0
    for name, size in sizes.items():
        starts[name], at = at, at + size
    return starts


@pytest.mark.parametrize(
    ("fact", "offset", "asked", "value"),
    [  # a half is that the place may be free
        (
            "using",
            PLACE * PROGRESS + 3,
            {"action": "INTERACT", "progress": 3},
            0.5,
        ),  # if it is free
        ("using", PLACE * PROGRESS + 3, {"action": "INTERACT", "progress": 2}, 0.0),
        ("using", PLACE * PROGRESS + 3, {"action": "WAIT", "progress": 3}, 0.0),
        ("using", 1 * PROGRESS + 3, {"action": "INTERACT", "progress": 3}, 0.0),
        ("used", PLACE, {"action": "INTERACT", "progress": 7}, 0.5),
        ("used", PLACE, {"action": "INTERACT", "at": None}, 0.0),
        ("used", PLACE, {"action": "INTERACT", "doubt": -0.5}, 0.0),  # it is not sure where it is
        ("refused", 0, {"action": "INTERACT"}, 0.5),
        ("refused", 0, {"action": "INTERACT", "at": None}, 0.0),
        ("does", "LEFT", {"action": "LEFT"}, 1.0),
        ("does", "LEFT", {"action": "RIGHT"}, 0.0),
        ("does for", "LEFT", {"action": "LEFT", "progress": 4}, 4.0),
        ("low", 1 * KNOTS + 0, {"action": "WAIT", "hygiene": 0.0}, 1 / KNOTS),
        ("low", 1 * KNOTS + KNOTS - 1, {"action": "WAIT", "hygiene": 0.25}, 0.75),
        ("low", 1 * KNOTS + 0, {"action": "WAIT", "hygiene": 0.9}, 0.0),
        ("known", "mood", {"action": "WAIT", "mood": 0.3}, 0.3),
    ],
)
def test_a_fact_moves_a_meter(blank, shape, fact, offset, asked, value):
    if isinstance(offset, str):
        names = shape.self_names if fact == "known" else shape.action_names
        offset = names.index(offset)
    blank.effects.weight[facts(shape)[fact] + offset, METER] = EACH / RULE_UNIT
    moved = told(blank, **asked)["known"][0, METER].item() - 0.5
    assert moved == pytest.approx(EACH * value, abs=1e-6)


def test_whether_a_place_is_free_is_learned(blank):
    free = sum(blank.sizes[:-2])
    blank.layers[-1].bias[..., free] = 50.0
    blank.effects.weight[facts(blank.shape)["used"] + PLACE, METER] = EACH / RULE_UNIT
    assert told(blank, "INTERACT")["known"][0, METER].item() == pytest.approx(0.5 + EACH)


def test_an_action_moves_every_place_that_is_known(blank, shape):
    right = shape.action_names.index("RIGHT")
    blank.shift.weight[right, 0 : blank.places : 2] = -1 / shape.width / RULE_UNIT
    moved = told(blank, "RIGHT")["mean"][0, : blank.places].unflatten(0, (-1, 2))
    expected = torch.tensor([5 / shape.width, 0.0]).repeat(shape.num_affordances, 1)
    expected[PLACE, 0] = -1 / shape.width
    torch.testing.assert_close(moved, expected)
    assert told(blank, "LEFT")["mean"][0, 0].item() == pytest.approx(6 / shape.width)


def test_what_will_be_legal_depends_on_the_place_its_hours_and_the_walls(blank, shape):
    interact, up = (shape.action_names.index(name) for name in ("INTERACT", "UP"))
    blank.legal.weight[0, interact] = 0.3
    blank.open.fill_(-50.0)
    blank.open[9, PLACE] = 50.0

    def legal(action: int, **asked) -> float:
        return told(blank, "WAIT", **asked)["legal"][0, action].item()

    assert legal(interact, hour=9) == pytest.approx(0.3 * blank.legal.unit)
    assert legal(interact, hour=10) == pytest.approx(0.0, abs=1e-5)
    assert legal(interact, hour=9, at=None) == pytest.approx(0.0, abs=1e-5)
    assert legal(interact, hour=9, at=1) == pytest.approx(0.0, abs=1e-5)
    assert legal(interact, hour=9.4) == pytest.approx(0.3 * blank.legal.unit)  # the nearest hour
    for wall, (name, value) in enumerate([("y", 0.0), ("y", 1.0), ("x", 0.0), ("x", 1.0)]):
        blank.legal.weight.zero_()
        blank.legal.weight[1 + wall, up] = -0.2
        assert legal(up, **{name: value}) == pytest.approx(-0.2 * blank.legal.unit)
        assert legal(up, **{name: 1 - value}) == pytest.approx(0.0, abs=1e-5)
        assert legal(up, **{name: 0.5}) == pytest.approx(0.0, abs=1e-5)
    assert blank.open.shape[0] == HOURS == 24


def test_a_life_ends_with_a_meter_or_with_age_and_rewards_are_products(blank, shape):
    count = shape.num_meters
    blank.survival.weight[METER, 0] = -2.0
    sure = told(blank, "WAIT")["goes_on"].item()
    assert sure == pytest.approx(0.5, abs=1e-6)
    empty = told(blank, "WAIT", energy=0.0)["goes_on"].item()
    ends = math.exp(-50 * 0.02)
    assert empty == pytest.approx(1 / (1 + math.exp(2.0 * blank.survival.unit * ends)), rel=1e-4)
    blank.survival.weight.zero_()
    blank.survival.weight[count, 0] = -1.0
    last = (shape.lifespan - 1) / shape.lifespan
    assert told(blank, "WAIT", age=last)["goes_on"].item() == pytest.approx(0.5, abs=1e-3)
    old = told(blank, "WAIT", age=1.0)["goes_on"].item()
    assert old == pytest.approx(1 / (1 + math.exp(blank.survival.unit)), rel=1e-4)
    blank.worth.weight[2, 0] = 3.0  # of the third meter
    assert told(blank, "WAIT", satiation=0.2)["reward"].item() == pytest.approx(0.6, abs=1e-5)
    blank.worth.weight.zero_()
    blank.worth.weight[count + 1 * count + 2, 0] = 3.0  # of the second times the third
    now = told(blank, "WAIT", hygiene=0.5, satiation=0.2)["reward"].item()
    assert now == pytest.approx(0.3, abs=1e-5)
    blank.worth.weight.zero_()
    blank.worth.weight[-1, 0] = 3.0
    assert told(blank, "WAIT", age=1.0)["reward"].item() == pytest.approx(3.0, abs=1e-4)
