"""What an agent of the public Hamlet would observe in our town: for replaying its recorded runs."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

from hamlet.town.observe import legal_mask
from hamlet.town.town import Town
from hamlet.town.vectors import agent_major, holds

WINDOW = 5  # the reference's window is always 5x5 in its observation


def reference_mask(town: Town, state: TensorDict) -> Tensor:
    """The reference's action masks, bool [B, N, A]: all False at no energy or health."""
    s = agent_major(state.clone().set("alive", torch.ones_like(state["alive"])))
    meters = list(s["meters"].unbind(0))
    ends = [holds(condition, meters, town.meter_index) for condition in town.pack.terminal]
    dead = torch.stack(ends).any(0).t()
    return legal_mask(town, s).permute(2, 1, 0) & ~dead[..., None]


def reference_observation(town: Town, state: TensorDict, before: Tensor, partial: bool) -> Tensor:
    """The reference's flat observation, f32 [B, N, cells + 25 + 5 + meters + F + 1 + 4].

    Args:
        state: the state to observe.
        before: int [B, N, 2], positions one tick earlier (velocity is their difference).
        partial: window instead of grid; then the place under the agent is not told either.
    """
    position = state["position"]
    b, n = position.shape[:2]
    width, height = town.grid
    x, y = position.long().unbind(-1)
    cells = town.affordance_cells[state["layout"]]
    f = town.num_affordances
    grid = torch.zeros(b, n, width * height)
    window = torch.zeros(b, n, WINDOW, WINDOW)
    under = torch.zeros(b, n, f + 1)
    if partial:
        reach = WINDOW // 2
        for index in range(f):
            dx = cells[:, index, None] % width - x + reach
            dy = cells[:, index, None] // width - y + reach
            inside = (dx >= 0) & (dx < WINDOW) & (dy >= 0) & (dy < WINDOW)
            world, agent = inside.nonzero(as_tuple=True)
            window[world, agent, dy[inside], dx[inside]] = 1.0
    else:
        grid.scatter_(2, cells[:, None].expand(b, n, f), 1.0)
        grid.scatter_add_(2, (y * width + x)[..., None], torch.ones(b, n, 1))
        here = cells[:, None] == (y * width + x)[..., None]
        under[..., :f] = here.float()
        under[..., f] = (~here.any(-1)).float()
    velocity = (position - before).float()
    hour = state["hour"].double() * (2.0 * torch.pi / 24.0)
    temporal = town.pack.temporal
    clock = torch.stack([hour.sin(), hour.cos()], -1).float()[:, None].expand(b, n, 2)
    if not temporal:
        clock = torch.tensor([0.0, 1.0]).expand(b, n, 2)
    age = (state["tick"].float() / town.lifespan).clamp(max=1.0)
    scale = torch.tensor([max(width - 1, 1), max(height - 1, 1)], dtype=torch.float32)
    return torch.cat(
        [
            grid,
            window.flatten(2),
            position.float() / scale,
            velocity,
            velocity.square().sum(-1, keepdim=True).sqrt(),
            state["meters"],
            under,
            clock,
            (state["progress"].float() / 10.0)[..., None],
            age[:, None, None].expand(b, n, 1),
        ],
        -1,
    )
