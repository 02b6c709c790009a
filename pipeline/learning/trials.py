"""Reinforcement by whole lives: habits that the teacher has not are tried, and kept if they pay.

Some of what is worth much shows long after, and in no choice of its own: where one looks around, or
that one need not provide for what comes after one's life. PPO, which compares choices within a
rollout and by what a critic says of what follows, does not find it out. So the agents live whole
lives with and without, in the same worlds and with the same random numbers, and all agents of a
world alike, since what one gains others might lose. A direct policy search, by paired comparison
with common random numbers (Glasserman and Yao 1992), one habit after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hamlet.learning import distributed
from hamlet.learning.learner import slots_of
from hamlet.learning.population import Selves
from hamlet.modules.agent import AgentState, Mind
from hamlet.modules.contracts import TownShape
from hamlet.profiling import region
from hamlet.town import Town

TRIAL_SEED = 7  # added to the seed: lives that no other stage plays
WORLDS = 128
"""In which who scouts is compared, at most: they tell a gain of 3 of 190."""
SURE = 1.96
"""Standard errors by which a habit must pay."""


class Habit(NamedTuple):
    """One of `Policy`, which its teacher has not."""

    ways: Tensor
    """[ways, n] the ways to have it."""
    share: float
    """Of the worlds, in which it is tried: how much it brings differs more or less among them."""


def habits(lifespan: int) -> dict[str, Habit]:
    return {
        "scouts": Habit(torch.tensor([[True]]), 1.0),
        "stays": Habit(torch.tensor([[0.15, 0.4, 0.7, 1.0]]), 0.5),
        "countdown": Habit(torch.tensor([[4 / 12], [5 / 12]]) * lifespan, 0.25),
    }


def worlds_lived(worlds: int, lifespan: int) -> int:
    """How many lives of a world `try_habits` takes, on one rank."""
    worlds = min(worlds, WORLDS)
    return worlds + sum(
        len(ways) * in_part(worlds, share) for ways, share in habits(lifespan).values()
    )


def in_part(worlds: int, share: float) -> int:
    """A share of the worlds, rounded up, and two at least: there has to be an interval."""
    return min(worlds, max(2, math.ceil(worlds * share)))


@torch.no_grad()
def try_habits(
    town: Town,
    shape: TownShape,
    mind: Mind,
    first: Callable[[int, int], AgentState],
    worlds: int,
    seed: int,
    shown: Callable[[int], Iterable[int]] = range,
) -> dict[str, float]:
    """Give `mind.policy` the habits that pay.

    Args:
        first: blank minds of a number of worlds and of agents in each.
        worlds: in which each way to live is tried, or a share of them, over all ranks; at most
            WORLDS.
        shown: goes through so many ticks, and shows how far it is.

    Returns:
        each habit as it is now, `scouts`, `countdown` and the first of the `stays`; by how much the
        mean return of a world is higher with the best of the ways to have it, `scouts_gain`, and
        half of its 95 % interval, `scouts_gain_ci95`.
    """
    policy: Any = mind.policy
    count, seed = -(-min(worlds, WORLDS) // distributed.ranks()), seed + TRIAL_SEED
    told: dict[str, float] = {}
    tries = habits(town.lifespan)
    ticks = iter(shown((1 + len(tries)) * town.lifespan))
    with region("trials"):
        before = lives(town, shape, mind, first, count, seed, {}, ticks)[0]
        for name, (ways, share) in tries.items():
            part = in_part(count, share)
            way = {name: ways.to(town.device)}
            tried = lives(town, shape, mind, first, part, seed, way, ticks)
            gain, error = (x.tolist() for x in paired(tried, before[:part]))
            best = max(range(len(ways)), key=lambda way: gain[way])
            if gain[best] > SURE * error[best]:
                setattr(policy, name, way[name][best : best + 1])
                before = torch.cat([tried[best], before[part:]])
            told |= {
                name: float(getattr(policy, name)[0, 0]),
                f"{name}_gain": gain[best],
                f"{name}_gain_ci95": SURE * error[best],
            }
    next(ticks, None)  # all have been
    return told


def paired(tried: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """float64 [ways] each: the mean gain of returns [ways, worlds] over [worlds], and its standard
    error, over the worlds of all ranks."""
    gain = (tried - before).double()
    count, total, squares = distributed.all_reduce_sum(
        torch.full_like(gain[:, 0], gain.shape[1]), gain.sum(1), gain.square().sum(1)
    )
    mean = total / count
    variance = (squares / count - mean.square()).clamp_min(0)
    return mean, (variance / (count - 1).clamp_min(1)).sqrt()


def lives(
    town: Town,
    shape: TownShape,
    mind: Mind,
    first: Callable[[int, int], AgentState],
    worlds: int,
    seed: int,
    ways: dict[str, Tensor],
    ticks: Iterator[int],
) -> Tensor:
    """float32 [ways, worlds] the mean return of the agents of every world, each of which is lived
    in by all `ways` to have a habit, [ways, n], with the same random numbers; by one where there is
    none. Nobody imagines. A life takes as many `ticks`."""
    policy: Any = mind.policy
    kept = {name: getattr(policy, name) for name in ways}
    many = next((len(values) for values in ways.values()), 1)
    again = torch.arange(worlds, device=town.device).repeat(many)
    seat = Selves(mind, shape, first, 0, shape.num_agents, imagines=False)
    world = town.reset(seed, worlds, distributed.rank() * WORLDS)[again]
    # Those of one world deliberate at the same ticks, whatever their ways.
    rows = slots_of(again, shape.num_agents)
    memory = AgentState(*(x[rows] for x in seat.start(worlds)))
    returns = torch.zeros(len(again), device=town.device)
    for name, values in ways.items():
        setattr(policy, name, values.repeat_interleave(worlds * shape.num_agents, 0))
    try:
        for _ in islice(ticks, town.lifespan):
            action, memory = seat.act(world, town.observe(world), memory)
            world = town.step_core(world, action)
            returns = returns + world["reward"].mean(1)
    finally:
        for name, value in kept.items():
            setattr(policy, name, value)
    return returns.unflatten(0, (many, worlds))
