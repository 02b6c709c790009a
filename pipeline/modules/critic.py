"""The centralised critic (CTDE): it reads the true state of a whole world, in training only."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from hamlet.modules.contracts import TownShape
from hamlet.modules.policy import mlp
from hamlet.moving import constant


def privileged_dim(shape: TownShape) -> int:
    return shape.num_agents * (shape.num_meters + 3) + 3 * shape.num_affordances + 3


def privileged_features(town: Any, shape: TownShape, state: TensorDict) -> Tensor:
    """float32 [B, N, P]: for every agent the true state of the world, itself first.

    Own meters and position, progress; the true offsets of all affordances; the hour and the age;
    then each other agent's meters, offset and whether it lives.
    """
    meters, position = state["meters"], state["position"].to(torch.float32)
    b, n = meters.shape[:2]
    size = constant((shape.width, shape.height), position.dtype, position.device)
    cells = town.affordance_cells[state["layout"]]
    places = torch.stack([cells % shape.width, cells // shape.width], -1).to(torch.float32)
    offsets = ((places.unsqueeze(1) - position.unsqueeze(2)) / size).flatten(2)

    angle = state["hour"].to(torch.float32) * (2 * torch.pi / 24)
    age = state["tick"].to(torch.float32) / shape.lifespan
    clock = torch.stack([angle.sin(), angle.cos(), age], -1).unsqueeze(1).expand(b, n, 3)

    everyone = torch.cat([meters, position / size, state["alive"].unsqueeze(-1).float()], -1)
    agent = torch.arange(n, device=meters.device)
    order = (agent.unsqueeze(0) + agent.unsqueeze(1)) % n  # self first
    rows = everyone[:, order].flatten(2)
    using = nn.functional.one_hot(state["last_affordance"].long() + 1, shape.num_affordances + 1)
    working = using[..., 1:] * (state["progress"].unsqueeze(-1).float() / 10)
    return torch.cat([rows, offsets, clock, working], -1)


class Critic(nn.Module):
    """Value of `privileged_features`, in scaled rewards."""

    def __init__(self, shape: TownShape, width: int) -> None:
        super().__init__()
        self.net = mlp(privileged_dim(shape), width, 1)

    def forward(self, privileged: Tensor) -> Tensor:
        """float32 [.] from float32 [., P]."""
        return self.net(privileged).squeeze(-1).float()
