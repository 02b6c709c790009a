"""What whole lives say of habits: one is kept where it pays, the best way to have it, and only
there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hamlet.learning import trials
from hamlet.learning.trials import habits, lives, paired, try_habits, worlds_lived
from hamlet.modules.contracts import TownShape
from hamlet.town import Town, load_pack
from hamlet.town.schema import INTERACT, LEFT, WAIT
from tests.learning.minds import new_mind
from tests.learning.test_train_policy import TINY

TOWN = Town(load_pack("l7_scarce"), num_layouts=8)
SHAPE = TownShape.of(TOWN)
REST = TOWN.action_names.index("REST")
FIRST, SECOND = habits(SHAPE.lifespan)["countdown"].ways[:, 0].tolist()
EARLIEST = habits(SHAPE.lifespan)["stays"].ways[0, 0].item()


class Idle:
    """A mind whose agents wait or, for a price, walk or use what they stand in: by their habits,
    which are whether it scouts, from when on it may leave, and its countdown."""

    def __init__(self, actions: dict[tuple[bool, float, float], int]) -> None:
        self.actions, self.ticks = actions, 0
        self.policy = SimpleNamespace(
            scouts=torch.tensor([[False]]), stays=torch.tensor([[1.0]]),
            countdown=torch.tensor([[0.0]]), meta_period=8,
        )  # fmt: skip

    def sample_step(self, obs: Any, state: Any, slice_: Any, *noise: Any) -> Any:
        assert slice_ is None  # nobody imagines
        self.ticks += 1
        # Those of one world deliberate at the same ticks, and all ways are of the same worlds.
        worlds = int(state.clock.max()) + 1
        clock = state.clock.view(-1, worlds, SHAPE.num_agents)
        assert (clock == torch.arange(worlds).unsqueeze(-1)).all()
        kept = (self.policy.scouts, self.policy.stays, self.policy.countdown)
        assert all(len(habit) in (1, len(state.clock)) for habit in kept)
        scouts, stays, countdown = (habit[:, 0].expand(len(state.clock)) for habit in kept)
        action = torch.full_like(state.clock, LEFT)
        for (scouting, part, ticks), chosen in self.actions.items():
            action[(scouts == scouting) & (stays == part) & (countdown == ticks)] = chosen
        return action, state, {}


def blank(worlds: int, agents: int = SHAPE.num_agents):
    return new_mind(TOWN, TINY.policy)[1](worlds, agents)


def lived(mind: Any, worlds: int, seed: int, ways: dict[str, Any]):
    ticks = iter(range(TOWN.lifespan + 1))
    found = lives(TOWN, SHAPE, mind, blank, worlds, seed, ways, ticks)
    assert next(ticks) == TOWN.lifespan  # one is left
    return found


@pytest.mark.parametrize(
    ("good", "kept"),
    [
        ([], (False, 1.0, 0.0)),
        ([(True, 1.0, 0.0)], (True, 1.0, 0.0)),
        ([(False, EARLIEST, 0.0)], (False, EARLIEST, 0.0)),
        ([(False, 1.0, FIRST)], (False, 1.0, FIRST)),
        ([(False, 1.0, SECOND)], (False, 1.0, SECOND)),
        # Together only: it would have to be found by each.
        ([(True, 1.0, SECOND)], (False, 1.0, 0.0)),
        ([(True, EARLIEST, 0.0)], (False, 1.0, 0.0)),
        # One is enough.
        ([(True, 1.0, 0.0), (True, EARLIEST, FIRST), (True, 1.0, SECOND)], (True, 1.0, 0.0)),
        ([(False, 1.0, 0.0)], (False, 1.0, 0.0)),  # it has the best there is
    ],
)
def test_what_pays_is_kept_and_nothing_else(good, kept):
    mind: Any = Idle(dict.fromkeys(good, WAIT))
    shown = []

    def ticks(total: int):
        shown.append(total)
        yield from range(total)
        shown.append("all")

    found = try_habits(TOWN, SHAPE, mind, blank, 16, 3, ticks)
    assert shown == [4 * TOWN.lifespan, "all"]
    assert mind.ticks == 4 * TOWN.lifespan
    without = (False, 1.0, 0.0)
    for name, value, none in zip(("scouts", "stays", "countdown"), kept, without, strict=True):
        habit = getattr(mind.policy, name)
        expected = habits(SHAPE.lifespan)[name].ways if value != none else torch.tensor([[none]])
        assert any(torch.equal(habit, way.unsqueeze(0)) for way in expected)
        assert found[name] == pytest.approx(float(value))
        assert habit[0, 0] == value
        assert (found[f"{name}_gain"] > found[f"{name}_gain_ci95"]) == (value != none)


@pytest.mark.parametrize(("gain", "kept"), [(0.1, False), (0.45, False), (0.55, True)])
def test_what_may_pay_by_chance_is_not_kept(monkeypatch, gain, kept):
    """Of 16 worlds whose gains deviate by one, the mean has a standard error of a quarter."""
    deviation = torch.tensor([1.0, -1.0] * 8) * (15 / 16) ** 0.5

    def lives(town, shape, mind, first, worlds, seed, ways, ticks):
        assert seed == 3 + trials.TRIAL_SEED  # in lives that nothing else plays
        way = ways.get("scouts", torch.zeros(1, 1))
        return way.float() * (gain + deviation) if ways else torch.zeros(1, worlds)

    monkeypatch.setattr(trials, "habits", lambda lifespan: {"scouts": habits(lifespan)["scouts"]})
    monkeypatch.setattr(trials, "lives", lives)
    mind: Any = Idle({})
    found = try_habits(TOWN, SHAPE, mind, blank, 16, 3)
    assert found["scouts_gain"] == pytest.approx(gain)
    assert found["scouts_gain_ci95"] == pytest.approx(1.96 / 4, rel=1e-4)
    assert bool(found["scouts"]) == bool(mind.policy.scouts) == kept


def test_a_habit_is_tried_with_those_that_were_kept():
    """Else it would be said to gain what the first one brought."""
    mind: Any = Idle(
        {
            (True, 1.0, 0.0): WAIT, (True, EARLIEST, 0.0): REST,
            (True, EARLIEST, FIRST): WAIT, (True, EARLIEST, SECOND): WAIT,
        }
    )  # fmt: skip
    found = try_habits(TOWN, SHAPE, mind, blank, 16, 3)
    assert found["scouts"] == 1.0
    assert found["stays"] == pytest.approx(EARLIEST)
    assert found["countdown"] == 0.0
    waited, rested = (
        lived(Idle({(False, 1.0, 0.0): action}), 16, 3 + trials.TRIAL_SEED, {})[0]
        for action in (WAIT, REST)
    )
    gain = (rested - waited)[:8]  # half of the worlds are enough
    assert found["stays_gain"] == pytest.approx(gain.mean().item(), rel=1e-4)
    assert found["countdown_gain"] == pytest.approx(-gain[:4].mean().item(), rel=1e-4)


def test_gains_and_intervals_are_over_pairs_of_worlds():
    before, tried = torch.rand(16), torch.rand(3, 16)
    gain, error = paired(tried, before)
    differences = (tried - before).double()
    torch.testing.assert_close(gain, differences.mean(1))
    torch.testing.assert_close(error, differences.std(1) / 4)


def test_lives_are_counted():
    assert worlds_lived(500, SHAPE.lifespan) == 128 + 128 + 64 + 2 * 32
    assert worlds_lived(8, SHAPE.lifespan) == 8 + 8 + 4 + 2 * 2
    assert worlds_lived(4, SHAPE.lifespan) == 4 + 4 + 2 + 2 * 2  # of one there is no interval


def test_every_way_is_lived_in_the_same_worlds_with_the_same_luck():
    mind: Any = Idle({(True, 1.0, 0.0): INTERACT, (False, 1.0, 0.0): INTERACT})
    ways = {"scouts": torch.tensor([[True], [False]])}
    first, second = lived(mind, 16, 3, ways)
    assert torch.equal(first, second)
    fewer = lived(mind, 4, 3, ways)
    torch.testing.assert_close(fewer[0], first[:4])
    assert first.unique().numel() > 2
    torch.testing.assert_close(first, lived(mind, 16, 3, {})[0])
    assert not torch.equal(first, lived(mind, 16, 4, {})[0])


def test_a_habit_is_not_kept_when_a_life_is_cut_short():
    mind: Any = Idle({})
    kept = mind.policy.scouts

    def fails(*_: Any) -> Any:
        assert mind.policy.scouts.all()
        raise KeyboardInterrupt

    mind.sample_step = fails
    with pytest.raises(KeyboardInterrupt):
        lived(mind, 8, 3, {"scouts": torch.tensor([[True]])})
    assert mind.policy.scouts is kept
    assert not kept


def test_a_real_mind_lives_by_its_habits():
    """All change what it does, and nothing is written to where it is kept."""
    given: Any = new_mind(TOWN, TINY.policy)
    mind, _first = given
    policy = mind.policy
    kinds = torch.arange(SHAPE.num_affordances)
    with torch.no_grad():  # it knows a place when it sees it, and goes where most is to be had
        table = mind.perceive.location_table.weight.fill_(-1.0)
        table[kinds + 2, kinds] = 1.0
        policy.goal_prior.sharpness.fill_(5.0)
    before = {name: x.clone() for name, x in policy.state_dict().items()}
    plain = lived(mind, 8, 3, {})
    early = {
        name: habit.ways for name, habit in habits(SHAPE.lifespan).items() if name != "countdown"
    }
    early["countdown"] = torch.tensor([[400.0], [800.0]])  # who has learned nothing dies early
    for name, ways in early.items():
        tried = lived(mind, 8, 3, {name: ways})
        assert tried.shape == (len(ways), 8)
        assert all((way != plain[0]).any() for way in tried), name
    assert all(torch.equal(x, before[name]) for name, x in policy.state_dict().items())
