"""What reinforcement learning added to what imitation left, in the same held-out worlds."""

from __future__ import annotations

from typing import Any

import torch

from hamlet.learning.population import Selves, play_alone
from hamlet.modules.contracts import TownShape
from hamlet.params import Params
from stages import paths
from stages.collect import make_town
from stages.common import progress
from stages.policy import make_mind

JUDGED_SEED = 6  # added to the seed: worlds that no other stage plays
LEFT_BY = ("imitated", "policy")  # the weights that imitation and that reinforcement left


def reinforced(params: Params, device: torch.device) -> dict[str, float]:
    """The mean return of the agents that imitation left and of those that the policy stage ended
    with, in the same worlds; the difference and half of its 95 % interval."""
    town = make_town(params, held_out=True, device=device)
    shape = TownShape.of(town)
    mind, blank, _ = make_mind(params, town)
    policy: Any = mind.policy
    weights = torch.load(paths.POLICY / "weights.pt", weights_only=True)
    seat = Selves(mind, shape, blank, 0, shape.num_agents, imagines=True)
    returns = []
    for left in progress(LEFT_BY, "population: before and after reinforcement"):
        policy.load_state_dict(weights[left])
        lived = play_alone(town, seat, params.population.worlds, params.seed + JUDGED_SEED)
        returns.append(lived.mean(1).cpu())
    before, after = returns
    gain = after - before
    return {
        "imitated_return": before.mean().item(),
        "reinforced_return": after.mean().item(),
        "reinforcement_gain": gain.mean().item(),
        "reinforcement_gain_ci95": 1.96 * gain.std().item() / len(gain) ** 0.5,
    }
