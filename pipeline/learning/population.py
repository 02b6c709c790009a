"""Self-play: who an agent learns among, and how the members of a population fare with one another.

A member learns as the first half of every world's agents. The other half are strangers: scripted
characters in the first half of the worlds, a past self of the agent in the rest, drawn anew for
every iteration and the likelier the less it is beaten (prioritised fictitious self-play, Vinyals et
al. 2019). Members differ in module D only: A, B and C are the same frozen graphs for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from hamlet.learning.learner import ACTION_STREAM, forget, gumbel, observation_of
from hamlet.learning.rollout import Record, evaluate, fused_step
from hamlet.modules.agent import AgentState, Mind
from hamlet.modules.contracts import TownShape
from hamlet.town import Scripted, Town

STREAM = 100  # added per first agent, so that agents of one world draw different noise
HARD = 2.0
"""Exponent of the chance to meet a past self again, in the share of worlds it wins."""
ELO_UNIT = 400.0
"""Rating points that make one ten times as likely to win (Elo 1978)."""


class Seat(Protocol):
    """Plays the agents first..last - 1 of every world."""

    first: int
    last: int

    def start(self, worlds: int) -> Any: ...
    def act(self, world: TensorDict, seen: TensorDict, memory: Any) -> tuple[Tensor, Any]: ...
    def forget(self, memory: Any, over: Tensor) -> Any: ...


class Selves:
    """The agent, or an earlier self of it, in these places: likeliest goals, drawn actions.

    Args:
        blank: blank minds of a number of worlds and of agents in each.
        imagines: whether goals are weighed by imagined futures, or first thoughts do.
    """

    def __init__(
        self,
        mind: Mind,
        shape: TownShape,
        blank: Callable[[int, int], AgentState],
        first: int,
        last: int,
        imagines: bool,
    ) -> None:
        self.mind, self.shape, self.blank = mind, shape, blank
        self.first, self.last, self.imagines = first, last, imagines

    def start(self, worlds: int) -> AgentState:
        return self.blank(worlds, self.last - self.first)

    def act(
        self, world: TensorDict, seen: TensorDict, memory: AgentState
    ) -> tuple[Tensor, AgentState]:
        agents = self.last - self.first
        thinking = None
        if self.imagines:
            thinking = thinking_slots(memory.clock, agents, self.mind.policy.meta_period)
        noise = gumbel(world, agents, self.shape.num_actions, ACTION_STREAM + STREAM * self.first)
        action, memory, _ = self.mind.sample_step(
            observation_of(seen, self.first, self.last),
            memory,
            thinking,
            noise.new_zeros(len(noise), self.shape.num_goals),
            noise,
        )
        return action.unflatten(0, (-1, agents)), memory

    def forget(self, memory: AgentState, over: Tensor) -> AgentState:
        return forget(memory, over.repeat_interleave(self.last - self.first))


def thinking_slots(clock: Tensor, agents: int, period: int) -> Tensor:
    """int64 [.] the slots that deliberate, by their clocks int64 [B * agents]; ascending.

    Where the period divides the worlds, whose clocks are staggered, equally many do at every tick:
    a GPU need not be asked how many.
    """
    due, worlds = clock % period == 0, len(clock) // agents
    if clock.device.type == "cpu" or worlds % period:
        return due.nonzero().flatten()
    return due.logical_not().int().argsort(stable=True)[: len(clock) // period]


class Characters:
    """Scripted characters, who remember nothing, in these places."""

    def __init__(self, scripted: Scripted, first: int, last: int) -> None:
        self.scripted, self.first, self.last = scripted, first, last

    def start(self, worlds: int) -> tuple[()]:
        return ()

    def act(self, world: TensorDict, seen: TensorDict, memory: Any) -> tuple[Tensor, Any]:
        nothing = TensorDict({}, batch_size=world.batch_size)
        return self.scripted.act(world, nothing)[0][:, self.first : self.last], memory

    def forget(self, memory: Any, over: Tensor) -> Any:
        return memory


class Strangers:
    """Co-players of a learning agent: characters in half of the worlds, a past self in the others.

    Args:
        selves: in whose mind the weights of whoever comes next are copied.
        past: module D of every past self.
        chances: float [len(past)] how likely each is to come.
    """

    def __init__(
        self,
        characters: Characters,
        selves: Selves,
        past: Sequence[torch.nn.Module],
        chances: Tensor,
    ) -> None:
        self.characters, self.selves, self.past, self.chances = characters, selves, past, chances
        self.count = selves.last - selves.first

    def meet(self, rng: torch.Generator) -> None:
        chosen = self.past[int(torch.multinomial(self.chances, 1, generator=rng))]
        mine: Any = self.selves.mind.policy
        mine.load_state_dict(chosen.state_dict())

    def start(self, worlds: int) -> AgentState:
        return self.selves.start(worlds - worlds // 2)

    def act(
        self, world: TensorDict, seen: TensorDict, memory: AgentState
    ) -> tuple[Tensor, AgentState]:
        half = len(world) // 2
        scripted, _ = self.characters.act(world[:half], seen[:half], ())
        ours, memory = self.selves.act(world[half:], seen[half:], memory)
        return torch.cat([scripted, ours]), memory

    def forget(self, memory: AgentState, over: Tensor) -> AgentState:
        return self.selves.forget(memory, over[len(over) // 2 :])


class Match:
    """Two kinds of players in every world, as a `Player`."""

    def __init__(self, mine: Seat, theirs: Seat) -> None:
        self.seats = mine, theirs

    def act(
        self, world: TensorDict, seen: TensorDict, memory: tuple[Any, ...]
    ) -> tuple[Tensor, tuple[Any, ...], Record]:
        acted = [seat.act(world, seen, m) for seat, m in zip(self.seats, memory, strict=True)]
        return torch.cat([a for a, _ in acted], 1), tuple(m for _, m in acted), {}

    def outcome(
        self, before: TensorDict, after: TensorDict, memory: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], Record]:
        over = after["episode_over"]
        left = [seat.forget(m, over) for seat, m in zip(self.seats, memory, strict=True)]
        return tuple(left), {"returns": after["reward"]}


def play(town: Town, mine: Seat, theirs: Seat, worlds: int, seed: int) -> Tensor:
    """float64 [worlds, N] the return of every agent of a life, `mine` being the first ones."""
    town.eval(worlds)
    step = fused_step(town, Match(mine, theirs))
    memory = (mine.start(worlds), theirs.start(worlds))
    try:
        return evaluate(town, step, memory, worlds, worlds, seed)["returns"]
    finally:
        town.train()


class Everyone:
    """One kind of player in all places of every world, as a `Player`."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat

    def act(self, world: TensorDict, seen: TensorDict, memory: Any) -> tuple[Tensor, Any, Record]:
        action, memory = self.seat.act(world, seen, memory)
        return action, memory, {}

    def outcome(self, before: TensorDict, after: TensorDict, memory: Any) -> tuple[Any, Record]:
        memory = self.seat.forget(memory, after["episode_over"])
        return memory, {"returns": after["reward"]}


def play_alone(town: Town, seat: Seat, worlds: int, seed: int) -> Tensor:
    """float64 [worlds, N] the return of every agent of a life, all of them played by `seat`."""
    town.eval(worlds)
    step = fused_step(town, Everyone(seat))
    try:
        return evaluate(town, step, seat.start(worlds), worlds, worlds, seed)["returns"]
    finally:
        town.train()


class Standing(NamedTuple):
    """What a table of matches says of the K members of a population."""

    payoff: Tensor
    """float64 [K, K] mean return of a member of the row in worlds shared with the column."""
    wins: Tensor
    """float64 [K, K] share of those worlds in which the row's members do better; ties count half;
    one half on the diagonal."""
    elo: Tensor
    """float64 [K] rating, the first member's being 0."""
    exploitability: Tensor
    """float64 [K] what the best member gains among members of this kind over what they get."""


def standing(returns: Tensor) -> Standing:
    """From float64 [K, K, worlds, 2]: mean returns of the row's and the column's members."""
    ours, theirs = returns.unbind(-1)
    payoff = ours.mean(-1)
    wins = ((ours > theirs).double() + 0.5 * (ours == theirs).double()).mean(-1)
    wins = (wins + 1 - wins.T) / 2  # each pair met twice
    wins.fill_diagonal_(0.5)
    return Standing(payoff, wins, elo(wins), payoff.amax(0) - payoff.diagonal())


def elo(wins: Tensor, rounds: int = 200) -> Tensor:
    """float64 [K] ratings whose odds fit shares of wins [K, K], the first one's being 0.

    The Bradley-Terry model's maximum likelihood by minorisation-maximisation (Hunter 2004), half a
    win being added to both sides of every pair as if 100 worlds had been played.
    """
    wins = (wins * 100 + 0.5).fill_diagonal_(0)
    strength = torch.ones(len(wins), dtype=wins.dtype)
    games = wins + wins.T
    for _ in range(rounds):
        shared = (games / (strength.unsqueeze(0) + strength.unsqueeze(1))).sum(1)
        strength = wins.sum(1) / shared
        strength = strength / strength[0]
    return ELO_UNIT * strength.log10()


def chances(won: Tensor) -> Tensor:
    """float [K] how likely each of K opponents is met, of the share of worlds won against each."""
    hard = (1 - won).clamp_min(1e-3) ** HARD
    return hard / hard.sum()
