"""The planner that knows the true town is an upper reference: no worse than the expert."""

from __future__ import annotations

import torch

from hamlet.town import Scripted, Town, load_pack
from hamlet.town.lives import HELD_OUT_LAYOUTS, play
from hamlet.town.planner import Planner


def lone_town(lifespan: int) -> Town:
    pack = load_pack("l3_hours").model_copy(update={"lifespan": lifespan})
    return Town(pack, num_layouts=64, layout_seed=HELD_OUT_LAYOUTS)


def test_planning_beats_the_expert_up_to_the_horizon():
    """Lives no longer than the horizon: what the planner foresees is all there is."""
    town = lone_town(48)
    expert = play(town, Scripted(town, ["expert"]), 3, 6)["returns"]
    planned = play(town, Planner(town, period=4, horizon=48, margin=0.02), 3, 6)["returns"]
    assert expert.shape == (6, 1, 1)
    assert (planned >= expert - 1e-4).all()
    assert planned.mean() > expert.mean()


def test_an_option_ends_when_it_is_done_or_fails():
    town = lone_town(48)
    state = town.reset(1, 4)
    option = torch.full((4, 1), 3)
    going = Planner.going_on(state, option)
    assert torch.equal(going, option)  # not tried yet
    cell = town.affordance_cells[state["layout"], 3]
    there = torch.stack([cell % town.width, cell // town.width], -1)[:, None]
    state = town.rearrange(state, position=there, hour=torch.full((4,), 10))
    used = 0
    while (going := Planner.going_on(state, option))[0, 0] >= 0:
        state = town.step_core(state, torch.full((4, 1), 4))
        used += 1
    assert used == town.pack.affordances[3].duration
    broke = town.rearrange(state, meters=state["meters"] * 0)
    broke = town.step_core(broke, torch.full((4, 1), 4))
    assert (Planner.going_on(broke, option) == -1).all()
    assert going[0, 0] == -1


def test_agents_plan_in_turns_and_another_begins_each_time():
    town = Town(load_pack("l4_contention").model_copy(update={"agents": 3}), num_layouts=8)
    asked = []

    class Notes(Planner):
        def _best(self, state, option, agent):
            asked.append((int(state["tick"][0]), agent))
            return option

    planner, state = Notes(town, period=2, horizon=1), town.reset(1, 2)
    memory = planner.reset(state)
    for _ in range(5):
        action, _, memory = planner.act(state, memory)
        state = town.step_core(state, action)
    assert asked == [(tick, (turn + tick // 2) % 3) for tick in (0, 2, 4) for turn in range(3)]
