"""What is posted of every place, against what happens to somebody who stands there."""

from __future__ import annotations

import torch

from hamlet.town import Town, load_pack
from hamlet.town.schema import INTERACT, WAIT
from hamlet.town.tables import draw_layouts, menu, nearest_usable, timetable

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


def test_a_use_gives_what_the_menu_says():
    f, offered = TOWN.num_affordances, menu(TOWN.pack)
    per_tick, finished, duration = offered.split([8, 8, 1], 1)
    assert duration.flatten().tolist() == [a.duration for a in TOWN.pack.affordances]
    used = waited = TOWN.rearrange(
        standing(100), meters=torch.full((f, 1, 8), 0.4).index_fill_(2, torch.tensor(MONEY), 0.6)
    )
    open_ = timetable(TOWN.pack)[100, :, 0] == 0
    for tick in range(2):
        used, waited = (
            TOWN.step_core(state, torch.full((f, 1), action))
            for state, action in ((used, INTERACT), (waited, WAIT))
        )
        gained = (used["meters"] - waited["meters"])[:, 0] + (tick + 1) * torch.tensor(
            [TOWN.pack.interact_price.get(name, 0.0) for name in TOWN.meter_names]
        )
        expected = (tick + 1) * per_tick + finished * (duration == tick + 1)
        expected[:, MONEY] -= (tick + 1) * timetable(TOWN.pack)[100, :, 2]
        rows = open_ & (duration[:, 0] >= tick + 1)
        assert rows.sum() > 4
        torch.testing.assert_close(gained[rows], expected[rows], atol=4e-3, rtol=0)


def test_what_is_usable_in_a_cell_is_the_nearest_within_its_reach_and_the_first_of_equals():
    pack = load_pack("l4_contention")
    reaches = [0, 2, 1, 3]
    places = [
        place.model_copy(update={"distance_limit": reaches[i % len(reaches)]})
        for i, place in enumerate(pack.affordances)
    ]
    pack = pack.model_copy(update={"affordances": places})
    layouts = draw_layouts(pack, 3, 5)
    code, distance = nearest_usable(pack, layouts)
    for layout, cells in enumerate(layouts.tolist()):
        for cell in range(pack.width * pack.height):
            x, y = cell % pack.width, cell // pack.width
            steps = [abs(x - c % pack.width) + abs(y - c // pack.width) for c in cells]
            near = [(d, i) for i, d in enumerate(steps) if d <= places[i].distance_limit]
            expected = min(near) if near else (0, -1)
            assert (int(distance[layout, cell]), int(code[layout, cell])) == expected
