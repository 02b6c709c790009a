"""What whole lives say of a habit: it is kept where it pays, and only there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hamlet.learning.trials import lives, try_scouting
from hamlet.modules.contracts import TownShape
from hamlet.town import Town, load_pack
from hamlet.town.schema import INTERACT, LEFT, WAIT
from tests.learning.minds import new_mind
from tests.learning.test_train_policy import TINY

TOWN = Town(load_pack("l7_scarce"), num_layouts=8)
SHAPE = TownShape.of(TOWN)


class Idle:
    """A mind whose agents wait or, for a price, walk: by their habit of scouting, turned or not."""

    def __init__(self, scouting: int, else_: int) -> None:
        self.scouting, self.otherwise = scouting, else_
        self.policy = SimpleNamespace(scouts=torch.tensor(False), meta_period=8)
        self.ticks = 0

    def sample_step(self, obs: Any, state: Any, slice_: Any, *noise: Any) -> Any:
        assert slice_ is None  # nobody imagines
        self.ticks += 1
        scouts = self.policy.scouts.squeeze(-1)
        assert len(scouts) == len(state.clock)
        clock = state.clock.unflatten(0, (2, -1))
        assert torch.equal(clock[0], clock[1])  # those of a pair deliberate at the same ticks
        return torch.where(scouts, self.scouting, self.otherwise), state, {}


def blank(worlds: int, agents: int = SHAPE.num_agents):
    return new_mind(TOWN, TINY.policy)[1](worlds, agents)


@pytest.mark.parametrize(
    ("scouting", "otherwise", "kept"),
    [(WAIT, LEFT, True), (LEFT, WAIT, False), (WAIT, WAIT, False)],
)
def test_what_pays_is_kept_and_nothing_else(scouting, otherwise, kept):
    mind: Any = Idle(scouting, otherwise)
    habit = mind.policy.scouts
    found = try_scouting(TOWN, SHAPE, mind, blank, 8, 3)
    assert mind.policy.scouts is habit
    assert habit.shape == ()
    assert bool(habit) == bool(found["scouts"]) == kept
    assert mind.ticks == TOWN.lifespan
    gain, interval = found["scouting_gain"], found["scouting_gain_ci95"]
    if scouting == otherwise:
        assert gain == interval == 0.0  # the same lives twice
    else:
        assert (gain > interval) == kept
        assert (gain < -interval) != kept


def test_the_gain_and_its_interval_are_over_pairs_of_worlds():
    mind: Any = Idle(WAIT, INTERACT)  # that pays where one happens to stand in a place
    found = try_scouting(TOWN, SHAPE, mind, blank, 16, 3)
    mind.policy.scouts = torch.zeros(2 * 16 * SHAPE.num_agents, 1, dtype=torch.bool)
    stayed = lives(TOWN, SHAPE, mind, blank, 16, 3)
    assert torch.equal(stayed[:16], stayed[16:])
    mind.policy.scouts = ~mind.policy.scouts
    waited = lives(TOWN, SHAPE, mind, blank, 16, 3)
    gain = (waited[:16] - stayed[:16]).double()
    assert found["scouting_gain"] == pytest.approx(gain.mean().item(), rel=1e-4)
    error = gain.std().item() / 4
    assert error > 1e-3
    assert found["scouting_gain_ci95"] == pytest.approx(1.96 * error, rel=1e-3)
    mind.policy.scouts = ~mind.policy.scouts
    assert not torch.equal(lives(TOWN, SHAPE, mind, blank, 16, 4), stayed)


def test_a_habit_is_not_tried_for_good_when_a_life_fails():
    mind: Any = Idle(WAIT, LEFT)
    habit = mind.policy.scouts

    def fails(*_: Any) -> Any:
        raise KeyboardInterrupt

    mind.sample_step = fails
    with pytest.raises(KeyboardInterrupt):
        try_scouting(TOWN, SHAPE, mind, blank, 8, 3)
    assert mind.policy.scouts is habit
    assert not habit
