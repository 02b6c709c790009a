"""Whole lives of the town's inhabitants, counted."""

from __future__ import annotations

from typing import Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from hamlet.town.town import Town

HELD_OUT_LAYOUTS = 1_000_003  # layout seed of everything that is reported


class Player(Protocol):
    """Whoever acts for all agents of all worlds: `Scripted`, `Planner`."""

    def reset(self, state: TensorDict) -> TensorDict: ...

    def act(self, state: TensorDict, memory: TensorDict) -> tuple[Tensor, Tensor, TensorDict]: ...


@torch.no_grad()
def play(town: Town, players: Player, seed: int, worlds: int, repeat: int = 1) -> dict[str, Tensor]:
    """One life in each of `worlds` worlds, each played `repeat` times side by side.

    Returns per agent, f32 [worlds, repeat, N]: `returns` (sum of rewards), `life` (ticks lived),
    `retired` (1.0 or 0.0).
    """
    state = town.reset(seed, worlds)
    if repeat > 1:
        state = state[torch.arange(worlds, device=town.device).repeat_interleave(repeat)]
    memory = players.reset(state)
    returns = torch.zeros_like(state["reward"])
    life = torch.zeros_like(returns)
    for _ in range(town.lifespan):
        life += state["alive"] & ~state["over"][:, None]
        actions, _, memory = players.act(state, memory)
        state = town.step_core(state, actions)
        returns += state["reward"]
    shape = (worlds, repeat, town.num_agents)
    return {
        "returns": returns.view(shape),
        "life": life.view(shape),
        "retired": (state["alive"] & (life >= town.lifespan)).float().view(shape),
    }
