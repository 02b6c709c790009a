"""What a use of each place gives, as the frozen world model imagines it.

Nobody tells the agent the rules of the town. It asks module B: "I stand in this place, have used it
for so many ticks, and use it; what if I only waited?" Asked of every place at every stage of a use,
at hours at which the place is open, the answers are the menu that module D reckons with.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hamlet.modules.contracts import PLACE_STD_MIN, PROGRESS, TownShape

HOURS_ASKED = 8


@torch.no_grad()
def imagined_menu(
    imagine_tick: Callable[..., tuple[Tensor, ...]],
    shape: TownShape,
    belief_dim: int,
    timetable: Tensor,
    start_hour: int,
) -> Tensor:
    """float32 [F, 2N + 1] of each place: what a tick of use gives to each of the N meters, what the
    last tick gives beyond that, the ticks a whole use takes.

    The meters are asked at a half, so that none is full or empty. The price is not part of it: the
    posted one of the hour asked is given back.

    Args:
        imagine_tick: the frozen graph of B.
        belief_dim: D.
        timetable: float32 [lifespan + 1, F, 3] (see `hamlet.town.tables`).
        start_hour: of a life.
    """
    f, names, device = shape.num_affordances, shape.self_names, timetable.device
    soonest = timetable[:-1, :, 0] == timetable[:-1, :, 0].amin(0)  # open, unless it never is
    open_at = [soonest[:, place].nonzero().flatten() for place in range(f)]
    asked = torch.linspace(0, 1, HOURS_ASKED, device=device)
    tick = torch.stack([at[(asked * (len(at) - 1)).long()] for at in open_at])  # [F, hours]
    hour = (start_hour + tick) % 24 * (2 * math.pi / 24)
    size = (f, PROGRESS, HOURS_ASKED)
    mean = torch.zeros(*size, belief_dim, device=device)
    log_std = torch.full_like(mean, math.log(PLACE_STD_MIN))
    elsewhere = 0.5 * (1 - torch.eye(f, device=device)).unsqueeze(-1).expand(f, f, 2)
    mean[..., : 2 * f] = elsewhere.flatten(1)[:, None, None]
    known = torch.zeros(*size, shape.self_dim, device=device)
    known[..., : shape.num_meters + 2] = 0.5  # the meters, and in the middle of the map
    for name, value in {
        "sin_hour": hour.sin().unsqueeze(1),
        "cos_hour": hour.cos().unsqueeze(1),
        "age": (tick / shape.lifespan).unsqueeze(1),
        "progress": torch.arange(PROGRESS, device=device).unsqueeze(-1) / 10,
    }.items():
        known[..., names.index(name)] = value
    state = [x.flatten(0, 2) for x in (mean, log_std, known)]

    def after(action: str) -> Tensor:
        chosen = torch.full((len(state[0]),), shape.action_names.index(action), device=device)
        return imagine_tick(*state, chosen)[2].unflatten(0, size)

    used, waited = after("INTERACT"), after("WAIT")
    gain = (used - waited)[..., : shape.num_meters]
    price = timetable[tick, torch.arange(f, device=device).unsqueeze(-1), 2]
    gain[..., shape.paid_in] += price.unsqueeze(1)
    gain = gain.mean(2)
    # A use is whole when progress does not go on.
    progress = 10 * used[..., names.index("progress")].mean(2)
    whole = progress < 0.5 * torch.arange(1, PROGRESS + 1, device=device)
    last = torch.where(whole.any(-1), whole.int().argmax(-1), PROGRESS - 1)
    before = torch.arange(PROGRESS, device=device) < last.clamp_min(1).unsqueeze(-1)
    per_tick = (gain * before.unsqueeze(-1)).sum(1) / before.sum(-1, keepdim=True)
    finished = gain[torch.arange(f, device=device), last] - per_tick
    return torch.cat([per_tick, finished, (last + 1.0).unsqueeze(-1)], -1)


def menu_error(imagined: Tensor, true: Tensor) -> float:
    """How far what whole uses give is from the truth, as a share of what they give.

    Args:
        imagined, true: float32 [F, 2N + 1] as `imagined_menu` returns it.
    """

    def whole(menu: Tensor) -> Tensor:
        meters = menu.shape[-1] // 2
        per_tick, finished, duration = menu.split([meters, meters, 1], -1)
        return per_tick * duration + finished

    return ((whole(imagined) - whole(true)).abs().sum() / whole(true).abs().sum()).item()
