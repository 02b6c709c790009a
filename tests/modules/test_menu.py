"""What a use gives, asked of a world model that knows the rules."""

from __future__ import annotations

import torch

from hamlet.modules.menu import imagined_menu, menu_error
from hamlet.town.tables import menu, timetable

SERVED = 0.9
"""How probably this world model thinks a place to be free."""


def test_the_menu_asked_of_one_who_knows_the_rules_is_the_true_one(town, shape):
    posted, true = timetable(town.pack), menu(town.pack)
    meters = shape.num_meters
    per_tick, finished, duration = true.split([meters, meters, 1], 1)
    names, f = shape.self_names, shape.num_affordances
    interact = shape.action_names.index("INTERACT")
    clocks = set()

    def imagine_tick(mean, log_std, known, action):
        here = mean[:, : 2 * f].unflatten(1, (f, 2)).abs().sum(-1) == 0
        assert (here.sum(1) == 1).all()
        assert log_std.amax() < -3
        place = here.int().argmax(1)
        tick = (known[:, names.index("age")] * shape.lifespan).round().long()
        angle = (town.pack.start_hour + tick) % 24 * (torch.pi / 12)
        torch.testing.assert_close(known[:, names.index("sin_hour")], angle.sin())
        torch.testing.assert_close(known[:, names.index("cos_hour")], angle.cos())
        assert (posted[tick, place, 0] == 0).all()  # open
        clocks.update(tick.tolist())
        rest = set(names) - {*names[: meters + 2], "sin_hour", "cos_hour", "age", "progress"}
        assert not known[:, [names.index(name) for name in rest]].any()
        assert (known[:, : meters + 2] == 0.5).all()
        stage = (10 * known[:, names.index("progress")]).round()
        uses = SERVED * (action == interact).float()
        whole = stage + 1 >= duration[place, 0]
        gain = per_tick[place] + finished[place] * whole.unsqueeze(1)
        gain[:, names.index("money")] -= posted[tick, place, 2]
        after = known.clone()
        after[:, :meters] += uses.unsqueeze(1) * gain - 0.01
        after[:, names.index("progress")] = uses * torch.where(whole, 0.0, (stage + 1) / 10)
        return mean, log_std, after

    found = imagined_menu(imagine_tick, shape, 2 * f + 9, posted, town.pack.start_hour)
    assert torch.equal(found[:, -1], true[:, -1])
    expected = SERVED * true[:, :-1]
    money = names.index("money")
    price = torch.stack([posted[posted[:, i, 0] == 0, i, 2].mean() for i in range(f)])
    expected[:, money] += (1 - SERVED) * price
    torch.testing.assert_close(found[:, :-1], expected, atol=1e-3, rtol=1e-3)
    assert len(clocks) > 8
    assert 0.05 < menu_error(found, true) < 0.2  # a tenth is the doubt that a place is free
    assert menu_error(true, true) == 0
