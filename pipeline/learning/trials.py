"""Reinforcement by whole lives: what the teacher never does is tried, and kept if it pays.

How an agent looks around is worth much, but shows long after and in no choice of its own: what one
need not look for, because somebody will show it, is time for all else. PPO, which compares choices
within a rollout and by what a critic says of what follows, cannot find that out. So the agents live
whole lives both ways, in the same worlds and with the same random numbers: all agents of a world
the one way, since what one gains others might lose. A direct policy search (paired comparison with
common random numbers, Glasserman and Yao 1992) over the one habit there is, `Policy.scouts`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hamlet.learning import distributed
from hamlet.learning.learner import slots_of
from hamlet.learning.population import Selves
from hamlet.modules.agent import AgentState, Mind
from hamlet.modules.contracts import TownShape
from hamlet.profiling import region
from hamlet.town import Town

WORLDS = 128
"""Pairs of worlds, at most: they tell a gain of 3 of 190."""
SURE = 1.96
"""Standard errors by which it must pay."""


@torch.no_grad()
def try_scouting(
    town: Town,
    shape: TownShape,
    mind: Mind,
    first: Callable[[int, int], AgentState],
    worlds: int,
    seed: int,
) -> dict[str, float]:
    """Let the agents of `mind.policy` explore where nobody whom they saw has looked, if that pays.

    Args:
        first: blank minds of a number of worlds and of agents in each.
        worlds: pairs of worlds, over all ranks.

    Returns:
        `scouting_gain`, by how much the mean return of a world is higher, and half of its 95 %
        interval, `scouting_gain_ci95`; `scouts` 1.0 if it is kept.
    """
    policy: Any = mind.policy
    pairs = distributed.local_count(worlds, "params.yaml: policy.worlds")
    scouting = torch.arange(2 * pairs, device=town.device) >= pairs
    kept = policy.scouts
    policy.scouts = scouting.repeat_interleave(shape.num_agents).unsqueeze(-1)
    try:
        with region("trials"):
            plain, scouts = lives(town, shape, mind, first, pairs, seed).unflatten(0, (2, pairs))
    finally:
        policy.scouts = kept
    gain = (scouts - plain).double()
    count, total, squares = distributed.all_reduce_sum(
        torch.full_like(gain.sum(), pairs), gain.sum(), gain.square().sum()
    )
    mean = total / count
    error = ((squares / count - mean.square()).clamp_min(0) / (count - 1).clamp_min(1)).sqrt()
    kept.fill_(mean > SURE * error)
    return {
        "scouting_gain": mean.item(),
        "scouting_gain_ci95": SURE * error.item(),
        "scouts": float(kept),
    }


def lives(
    town: Town,
    shape: TownShape,
    mind: Mind,
    first: Callable[[int, int], AgentState],
    pairs: int,
    seed: int,
) -> Tensor:
    """float32 [2 * pairs] the mean return of the agents of every world; the worlds of the second
    half are those of the first once more, and what is random in them is the same."""
    seat = Selves(mind, shape, first, 0, shape.num_agents, imagines=False)
    twice = torch.arange(pairs, device=town.device).repeat(2)
    world = town.reset(seed, pairs, distributed.rank() * pairs)[twice]
    # Those of a pair deliberate at the same ticks.
    memory = AgentState(*(x[slots_of(twice, shape.num_agents)] for x in seat.start(pairs)))
    returns = torch.zeros(2 * pairs, device=town.device)
    for _ in range(town.lifespan):
        action, memory = seat.act(world, town.observe(world), memory)
        world = town.step_core(world, action)
        returns = returns + world["reward"].mean(1)
    return returns
