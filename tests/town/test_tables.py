"""What is posted of every place, against what happens to somebody who stands there."""

from __future__ import annotations

import torch

from pipeline.town import Town, load_pack
from pipeline.town.tables import timetable
from pipeline.town.town import INTERACT, WAIT

TOWN = Town(load_pack("l7_scarce").model_copy(update={"agents": 1}), num_layouts=8)
MONEY = 3


def standing(tick: int):
    """A world for every place, with its agent in the place and in want of nothing but it."""
    f = TOWN.num_affordances
    state = TOWN.reset(3, f)
    cell = TOWN.affordance_cells[state["layout"]].diagonal()
    return TOWN.rearrange(
        state,
        position=torch.stack([cell % TOWN.width, cell // TOWN.width], -1).unsqueeze(1),
        meters=torch.full((f, 1, 8), 0.5),
        tick=torch.full((f,), tick),
        hour=torch.full((f,), (TOWN.pack.start_hour + tick) % 24),
    )


def test_a_place_is_open_when_the_timetable_says_so():
    posted = timetable(TOWN.pack)
    assert posted.shape == (TOWN.lifespan + 1, TOWN.num_affordances, 3)
    opens = torch.stack(
        [
            TOWN.observe(standing(tick))["action_mask"][:, 0, INTERACT]
            for tick in range(TOWN.lifespan)
        ]
    )
    assert torch.equal(opens, posted[:-1, :, 0] == 0)
    assert 0.3 < opens.float().mean() < 0.95
    for tick in range(0, TOWN.lifespan - 48, 7):
        if any(tick < change.tick <= tick + 48 for change in TOWN.pack.schedule):
            continue  # what is posted is today's
        for place, (wait, stays, _) in enumerate(posted[tick].int().tolist()):
            ahead = opens[tick : tick + 48, place].tolist()
            assert ahead[:wait] == [False] * wait
            assert ahead[wait : wait + stays] == [True] * stays
            assert stays == 24 or not ahead[wait + stays]


def test_using_a_place_costs_what_is_posted():
    posted, costs = timetable(TOWN.pack), []
    for tick in (10, 80, 150, 250):
        state = standing(tick)
        used, waited = (
            TOWN.step_core(state, torch.full((TOWN.num_affordances, 1), action))["meters"]
            for action in (INTERACT, WAIT)
        )
        paid = (waited - used)[:, 0, MONEY] + TOWN.pack.interact_price.get("money", 0.0)
        free = torch.tensor(
            [not a.effects_per_tick.get("money") for a in TOWN.pack.affordances]
        ) & (posted[tick, :, 0] == 0)
        torch.testing.assert_close(paid[free], posted[tick, free, 2], atol=1e-5, rtol=0)
        costs.append(posted[tick, :, 2])
    assert len({tuple(row.tolist()) for row in costs}) == 2  # and back again
