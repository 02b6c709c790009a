"""Who learns in a town, as a `Player`: sampled goals and actions, and the experience of every tick.

In some worlds an expert may act for the learners, or tell what it would do in their place; and in
every world somebody else, the co-players, may play the last agents.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from hamlet.learning.rollout import Record
from hamlet.modules.agent import AgentState, Mind
from hamlet.modules.contracts import RawObservation, TownShape
from hamlet.modules.critic import Critic, privileged_features
from hamlet.params import PolicyParams
from hamlet.profiling import region
from hamlet.town import Town, counter_uniform

GOAL_STREAM, ACTION_STREAM = 1000, 2000
SENSED = RawObservation._fields
TOLD = ("expert_action", "expert_goal", "expert_odds")


def first_state(
    worlds: int,
    agents: int,
    recurrent_dim: int,
    others: int,
    social_dim: int,
    meters: int,
    device: str | torch.device = "cpu",
) -> AgentState:
    """Blank minds, the worlds' clocks staggered so that few agents deliberate at a time."""
    slots = worlds * agents
    zeros = torch.zeros(slots, dtype=torch.int64, device=device)
    return AgentState(
        belief=torch.zeros(slots, recurrent_dim, device=device),
        social=torch.zeros(slots, others, social_dim, device=device),
        goal=zeros,
        goal_age=zeros,
        clock=torch.arange(worlds, device=device).repeat_interleave(agents),
        moved=zeros,
        foreseen=torch.zeros(slots, meters, device=device),
        surprise=torch.zeros(slots, device=device),
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
    each = torch.arange(agents * choices, device=world["tick"].device)
    streams = stream + each.view(1, agents, choices)
    seed, number, episode, tick = (
        world[key].view(-1, 1, 1) for key in ("seed", "world", "episode", "tick")
    )
    u = counter_uniform(seed, number, episode, tick, streams)
    return -(-(u.clamp(1e-9, 1 - 1e-7)).log()).log().flatten(0, 1)


def deliberating(worlds: int, period: int, clock: int) -> Tensor:
    """int64 [worlds / period]: those whose own clock is at a multiple of `period` after `clock`
    ticks; blank minds are staggered so that they are equally many at every tick."""
    return torch.arange(worlds // period) * period + (-clock) % period


def thinking_in(iteration: int, worlds: int, params: PolicyParams) -> list[Tensor]:
    """int64 [.] of each tick of an iteration, which of `worlds` have agents that deliberate."""
    clocks = range(iteration * params.rollout, (iteration + 1) * params.rollout)
    return [deliberating(worlds, params.meta_period, clock) for clock in clocks]


class Led(NamedTuple):
    """Who acts in the worlds of imitation."""

    driven: Tensor
    """int64 [.] ascending: where the expert acts."""
    free: Tensor
    """int64 [.] ascending: where the learner does."""
    judged: bool = False
    """Whether the critic says what it thinks of the worlds."""


def led(driven: Tensor) -> Led:
    """Of the worlds bool [B] in which the expert acts."""
    return Led(driven.nonzero().flatten(), (~driven).nonzero().flatten())


class RolloutCarry(NamedTuple):
    """What is carried from tick to tick beside the town."""

    agent: AgentState
    expert: Any
    """The expert's memory while it is needed; None otherwise."""
    co_players: Any = None
    """That of the other agents, where somebody else plays them."""


def packed(world: TensorDict, carry: RolloutCarry) -> dict[str, Any]:
    """The worlds as they stand and all memories, as rows of plain tensors; see `unpacked`."""
    return {
        "world": dict(world.items()),
        "expert": dict(carry.expert.items()),
        "agent": tuple(carry.agent),
        "co_players": tuple(carry.co_players),
    }


def unpacked(rows: Mapping[str, Any]) -> tuple[TensorDict, RolloutCarry]:
    """What `packed` was given."""
    size = [len(rows["world"]["tick"])]
    met = AgentState(*rows["co_players"]) if rows["co_players"] else ()
    expert = TensorDict(rows["expert"], batch_size=size)
    carry = RolloutCarry(AgentState(*rows["agent"]), expert, met)
    return TensorDict(rows["world"], batch_size=size), carry


def weights_of(policy: Any) -> dict[str, Tensor]:
    """A copy of a policy's weights."""
    return {name: value.clone() for name, value in policy.state_dict().items()}


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
    """Says what it would do in the place of every agent, to what end, and how surely; see
    `Scripted`."""

    def reset(self, state: TensorDict) -> TensorDict: ...
    def act(self, state: TensorDict, memory: TensorDict) -> tuple[Tensor, Tensor, TensorDict]: ...
    def tell(self, state: TensorDict, memory: TensorDict) -> tuple[Tensor, Tensor, Tensor]: ...
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
        thinking: Tensor,
        led: Led | None,
    ) -> tuple[Tensor, RolloutCarry, Record]:
        """Sampled actions int64 [B, N].

        Args:
            thinking: int64 [.] the worlds whose agents deliberate now; not read in imitation, in
                which nothing is imagined.
            led: where the expert acts, in imitation; None in PPO. What the expert does is recorded
                where it acts; elsewhere the record holds zeros (see `told`).
        """
        if led is not None:
            acted, agent, expert, record = self._imitate(world, seen, memory, led)
        else:
            acted, agent, expert, record = self._improve(world, seen, memory, thinking)
        if led is None or led.judged:
            record["privileged"] = self.privileged(world)
            record["value"] = self.critic(record["privileged"])
        co_players = memory.co_players
        if self.co_players is not None:
            with region("co_players"):
                theirs, co_players = self.co_players.act(world, seen, co_players)
            acted = torch.cat([acted, theirs], 1)
        return acted, RolloutCarry(agent, expert, co_players), record

    def _improve(
        self, world: TensorDict, seen: TensorDict, memory: RolloutCarry, thinking: Tensor
    ) -> tuple[Tensor, AgentState, Any, Record]:
        """A tick of PPO: the agents of `thinking` worlds imagine; the expert says their goals."""
        n, expert = self.agents, memory.expert
        action, agent, record = self.mind.sample_step(
            observation_of(seen, 0, n),
            memory.agent,
            slots_of(thinking, n),
            gumbel(world, n, self.shape.num_goals, GOAL_STREAM),
            gumbel(world, n, self.shape.num_actions, ACTION_STREAM),
        )
        if self.expert is not None:
            with region("expert"):
                expert = self.expert.watch(world, expert)
                told = self.told(world[thinking], expert[thinking])["expert_odds"]
            odds = told.new_zeros(len(world), *told.shape[1:]).index_copy(0, thinking, told)
            record["expert_odds"] = odds.flatten(0, 1)
        return action.unflatten(0, (-1, n)), agent, expert, record

    def _imitate(
        self,
        world: TensorDict,
        seen: TensorDict,
        memory: RolloutCarry,
        led: Led,
    ) -> tuple[Tensor, AgentState, Any, Record]:
        """A tick of imitation: the expert acts in the led worlds, module D in the free ones."""
        assert self.expert is not None, "imitation needs a teacher"
        n, driven, free = self.agents, led.driven, led.free
        with region("expert"):
            expert = self.expert.watch(world, memory.expert)
            told = self._untold(world)
            if len(driven):
                shown = self.told(world[driven], expert[driven])
                told = {name: x.index_copy(0, driven, shown[name]) for name, x in told.items()}
            told = {name: x.flatten(0, 1) for name, x in told.items()}
        part = world[free]
        action, agent, record = self.mind.follow_step(
            observation_of(seen, 0, n),
            memory.agent,
            slots_of(free, n),
            told["expert_goal"],
            told["expert_action"],
            gumbel(part, n, self.shape.num_goals, GOAL_STREAM),
            gumbel(part, n, self.shape.num_actions, ACTION_STREAM),
        )
        return action.unflatten(0, (-1, n)), agent, expert, record | told

    def told(self, world: TensorDict, expert: Any) -> Record:
        """What the expert would do in the learners' place: `expert_action` and `expert_goal`
        int64 [B, N], and `expert_odds` float32 [B, N, G] of the goals.

        Args:
            expert: its memory, of before or after it watched this tick.
        """
        assert self.expert is not None
        told = (x[:, : self.agents] for x in self.expert.tell(world, expert))
        return dict(zip(TOLD, told, strict=True))

    def _untold(self, world: TensorDict) -> Record:
        """Zeros in the form of `told`."""
        none = torch.zeros(len(world), self.agents, dtype=torch.int64, device=self.town.device)
        odds = none.new_zeros(*none.shape, self.shape.num_goals, dtype=torch.float32)
        return dict(zip(TOLD, (none, none, odds), strict=True))

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
    each = torch.arange(agents, device=worlds.device)
    return (worlds.unsqueeze(-1) * agents + each).flatten()
