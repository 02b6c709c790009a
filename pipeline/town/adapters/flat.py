"""One float vector per agent from the compact observation, for networks that want a plain input."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import one_hot

from hamlet.town.town import Town


def flat_size(town: Town) -> int:
    """Length of `flat_observation`'s last dimension."""
    cells = (2 * town.vision + 1) ** 2
    others = town.num_agents - 1
    per_other = town.num_cues + 1 + 2 + town.num_actions + 1 + 1
    return cells * (town.num_cell_codes + 1) + town.self_dim + others * per_other


def flat_observation(town: Town, observation: TensorDict) -> Tensor:
    """`Town.observe` as f32 [B, N, flat_size]: cell codes and others' actions become one-hot."""
    o = observation
    view = one_hot(o["view"].flatten(2).long(), town.num_cell_codes).flatten(2)
    acts = one_hot(o["others_action"], town.num_actions + 1).flatten(2)
    parts = [
        view, o["occupancy"].flatten(2) / max(town.num_agents - 1, 1), o["self_state"],
        o["cues"].flatten(2), o["visible"], o["others_offset"].flatten(2), acts, o["comm"],
    ]  # fmt: skip
    return torch.cat([part.float() for part in parts], -1)


def state_size(town: Town) -> int:
    """Length of `true_state`'s last dimension."""
    return town.num_agents * (town.num_meters + 4) + 2 * town.num_affordances + 2


def true_state(town: Town, state: TensorDict) -> Tensor:
    """The true state for a centralised critic: f32 [B, state_size].

    Of every agent its meters, column and row (/ size - 1), progress / 10 and whether it lives; of
    every place its column and row; the hour / 24 and the age / lifespan.
    """
    scale = torch.tensor([town.width - 1, town.height - 1], device=town.device)
    cells = town.affordance_cells[state["layout"]]
    places = torch.stack([cells % town.width, cells // town.width], -1) / scale
    clock = torch.stack([state["hour"] / 24.0, state["tick"] / town.lifespan], -1)
    parts = [
        state["meters"].flatten(1), (state["position"] / scale).flatten(1),
        state["progress"] * 0.1, state["alive"], places.flatten(1), clock,
    ]  # fmt: skip
    return torch.cat([part.float() for part in parts], -1)
