"""Who learns in a town, as a `Player`: sampled goals and actions, and the experience of every tick.

In some worlds an expert may act for the learners, or tell what it would do in their place; and in
every world somebody else, the co-players, may play the last agents.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from hamlet.learning.rollout import Record
from hamlet.modules.agent import AgentState, Mind
from hamlet.modules.contracts import METERS, RawObservation, TownShape
from hamlet.modules.critic import Critic, privileged_features
from hamlet.profiling import region
from hamlet.town import Town, counter_uniform

GOAL_STREAM, ACTION_STREAM = 1000, 2000
SENSED = RawObservation._fields


def first_state(
    worlds: int, agents: int, recurrent_dim: int, others: int, social_dim: int
) -> AgentState:
    """Blank minds, the worlds' clocks staggered so that few agents deliberate at a time."""
    slots = worlds * agents
    zeros = torch.zeros(slots, dtype=torch.int64)
    return AgentState(
        belief=torch.zeros(slots, recurrent_dim),
        social=torch.zeros(slots, others, social_dim),
        goal=zeros,
        goal_age=zeros,
        clock=torch.arange(worlds).repeat_interleave(agents),
        moved=zeros,
        foreseen=torch.zeros(slots, METERS),
        surprise=torch.zeros(slots),
        rng=zeros,
    )


def forget(state: AgentState, over: Tensor) -> AgentState:
    """Blank minds for the slots in `over` bool [S]; clocks run on."""
    going = ~over
    return AgentState(
        belief=state.belief * going.unsqueeze(-1),
        social=state.social * going[:, None, None],
        goal=state.goal,
        goal_age=torch.where(over, 0, state.goal_age),
        clock=state.clock,
        moved=torch.where(over, 0, state.moved),
        foreseen=state.foreseen * going.unsqueeze(-1),
        surprise=state.surprise * going,
        rng=state.rng,
    )


def gumbel(world: TensorDict, agents: int, choices: int, stream: int) -> Tensor:
    """float32 [B * N, choices] Gumbel noise from the counter generator of each world."""
    streams = stream + torch.arange(agents * choices).view(1, agents, choices)
    seed, number, episode, tick = (
        world[key].view(-1, 1, 1) for key in ("seed", "world", "episode", "tick")
    )
    u = counter_uniform(seed, number, episode, tick, streams)
    return -(-(u.clamp(1e-9, 1 - 1e-7)).log()).log().flatten(0, 1)


class RolloutCarry(NamedTuple):
    """What is carried from tick to tick beside the town."""

    agent: AgentState
    expert: Any
    """The expert's memory while it is needed; None otherwise."""
    co_players: Any = None
    """That of the other agents, where somebody else plays them."""


class CoPlayers(Protocol):
    """Who plays the last agents of every world, so that the others learn among strangers."""

    count: int
    """How many agents of a world they are."""

    def meet(self, rng: torch.Generator) -> None:
        """Choose who comes next; called before every iteration."""
        ...

    def start(self, worlds: int) -> Any:
        """The blank minds, an `AgentState`, of those of them who have one; () if nobody has."""
        ...

    def act(self, world: TensorDict, seen: TensorDict, memory: Any) -> tuple[Tensor, Any]:
        """Actions int64 [B, count], and the new memory."""
        ...

    def forget(self, memory: Any, over: Tensor) -> Any:
        """The memory without the lives that ended in the worlds `over` bool [B]."""
        ...


class Teacher(Protocol):
    """Says what it would do in the place of every agent, and to what end; see `Scripted`."""

    def reset(self, state: TensorDict) -> TensorDict: ...
    def act(self, state: TensorDict, memory: TensorDict) -> tuple[Tensor, Tensor, TensorDict]: ...
    def watch(self, state: TensorDict, memory: TensorDict) -> TensorDict: ...


class Learner:
    """The learning agents, and in some worlds an expert that acts for them, as a `Player`.

    Args:
        co_players: plays the last agents of every world; None where all agents learn.
    """

    def __init__(
        self,
        town: Town,
        shape: TownShape,
        mind: Mind,
        critic: Critic,
        expert: Teacher | None,
        co_players: CoPlayers | None = None,
    ) -> None:
        self.town, self.shape, self.mind, self.critic = town, shape, mind, critic
        self.expert, self.co_players = expert, co_players
        self.agents = shape.num_agents - (co_players.count if co_players else 0)

    def act(
        self,
        world: TensorDict,
        seen: TensorDict,
        memory: RolloutCarry,
        thinking: Tensor | None,
        driven: Tensor | None,
    ) -> tuple[Tensor, RolloutCarry, Record]:
        """Sampled actions int64 [B, N].

        Args:
            thinking: int64 [B / meta_period] the worlds whose agents deliberate now, and imagine;
                None in imitation, in which nothing is imagined.
            driven: bool [B] worlds where the expert acts. Where it is None, the expert says which
                goals it would choose only in the worlds that deliberate.
        """
        n = self.agents
        action, agent, record = self.mind.sample_step(
            observation_of(seen, 0, n),
            memory.agent,
            None if thinking is None else slots_of(thinking, n),
            gumbel(world, n, self.shape.num_goals, GOAL_STREAM),
            gumbel(world, n, self.shape.num_actions, ACTION_STREAM),
        )
        acted, remembered = action.unflatten(0, (-1, n)), memory.expert
        if self.expert is not None and driven is not None:
            with region("expert"):
                acts, means, remembered = self.expert.act(world, remembered)
            expert_action, expert_goal = acts[:, :n], means[:, :n]
            acted = torch.where(driven.unsqueeze(-1), expert_action, acted)
            led = driven.repeat_interleave(n)
            agent = agent._replace(
                goal=torch.where(led, expert_goal.flatten(), agent.goal),
                moved=acted.flatten() + 1,
            )
            record["expert_action"] = expert_action.flatten()
            record["expert_goal"] = expert_goal.flatten()
        elif self.expert is not None and thinking is not None:
            with region("expert"):
                remembered = self.expert.watch(world, memory.expert)
                told = self.expert.act(world[thinking], remembered[thinking])[1]
            goals = torch.zeros_like(acted).index_copy(0, thinking, told[:, :n])
            record["expert_goal"] = goals.flatten()
        record["privileged"] = self.privileged(world)
        record["value"] = self.critic(record["privileged"])
        co_players = memory.co_players
        if self.co_players is not None:
            with region("co_players"):
                theirs, co_players = self.co_players.act(world, seen, co_players)
            acted = torch.cat([acted, theirs], 1)
        return acted, RolloutCarry(agent, remembered, co_players), record

    def privileged(self, world: TensorDict) -> Tensor:
        """float32 [S, P] what the critic sees of the learning agents."""
        everyone = privileged_features(self.town, self.shape, world)
        return everyone[:, : self.agents].flatten(0, 1)

    def outcome(
        self, before: TensorDict, after: TensorDict, memory: RolloutCarry
    ) -> tuple[RolloutCarry, Record]:
        over, n = after["episode_over"], self.agents
        co_players = memory.co_players
        if self.co_players is not None:
            co_players = self.co_players.forget(co_players, over)
        agent = forget(memory.agent, over.repeat_interleave(n))
        return RolloutCarry(agent, memory.expert, co_players), {
            "reward": after["reward"][:, :n].flatten(),
            "done": after["done"][:, :n].flatten(),
            "active": before["alive"][:, :n].flatten(),
        }


def observation_of(seen: TensorDict, first: int, last: int) -> RawObservation:
    """What the agents first..last - 1 of every world sense, [B * (last - first), ...]."""
    return RawObservation(*(seen[name][:, first:last].flatten(0, 1) for name in SENSED))


def slots_of(worlds: Tensor, agents: int) -> Tensor:
    """int64 [B * N] the slots of the agents of worlds int64 [B]."""
    return (worlds.unsqueeze(-1) * agents + torch.arange(agents)).flatten()
