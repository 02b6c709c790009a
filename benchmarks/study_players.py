"""Who plays and who teaches in the study (`benchmarks.study`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict
from torch import Tensor

from hamlet.learning.learner import ACTION_STREAM, GOAL_STREAM, forget, gumbel
from hamlet.learning.rollout import Record
from hamlet.modules.agent import AgentState, Mind
from hamlet.modules.contracts import TownShape, observation_from
from hamlet.moving import one_hot
from hamlet.town import Scripted, Town
from hamlet.town.adapters.flat import flat_observation
from stages.evaluate import life_of

if TYPE_CHECKING:
    from benchmarks.learning_peers import Learner


class Sharing(Town):
    """Every agent is rewarded with the mean reward of its world."""

    def step_and_reset_core(self, state: TensorDict, actions: Tensor) -> TensorDict:
        after = super().step_and_reset_core(state, actions)
        mean = after["reward"].mean(1, keepdim=True).expand_as(after["reward"])
        return after.copy().update({"reward": mean})


class Resting:
    """Co-players that never do anything: who learns beside it learns alone."""

    def __init__(self, shape: TownShape, count: int) -> None:
        self.count, self.rest = count, shape.action_names.index("WAIT")

    def meet(self, rng: torch.Generator) -> None:
        """It is always the same."""

    def start(self, worlds: int) -> tuple[()]:
        return ()

    def act(self, world: TensorDict, seen: TensorDict, memory: Any) -> tuple[Tensor, Any]:
        return torch.full((len(world), self.count), self.rest), memory

    def forget(self, memory: Any, over: Tensor) -> Any:
        return memory


class ActingExpert:
    """The expert, naming its action as its goal: whom `Flat` imitates."""

    def __init__(self, expert: Scripted) -> None:
        self.expert, self.reset, self.watch = expert, expert.reset, expert.watch

    def act(self, state: TensorDict, memory: TensorDict) -> tuple[Tensor, Tensor, TensorDict]:
        action, _, memory = self.expert.act(state, memory)
        return action, action, memory

    def tell(self, state: TensorDict, memory: TensorDict) -> tuple[Tensor, Tensor, Tensor]:
        """It is sure of its action: what others would be worth it does not know."""
        action, _, odds = self.expert.tell(state, memory)
        return action, action, one_hot(action, odds.shape[-1], odds.dtype)


class Everyone:
    """The trained mind in every place, as a `Player`: likeliest goals, drawn actions.

    What has no better than drawn goals, draws them.
    """

    def __init__(
        self,
        town: Town,
        shape: TownShape,
        mind: Mind,
        draws: bool,
        blank: Callable[..., AgentState],
    ) -> None:
        self.town, self.shape, self.mind, self.draws = town, shape, mind, draws
        self.blank = blank

    def act(
        self, world: TensorDict, seen: TensorDict, memory: AgentState
    ) -> tuple[Tensor, AgentState, Record]:
        n, shape = self.shape.num_agents, self.shape
        goals = gumbel(world, n, shape.num_goals, GOAL_STREAM) * float(self.draws)
        noise = gumbel(world, n, shape.num_actions, ACTION_STREAM)
        thinking = (memory.clock % self.mind.policy.meta_period == 0).nonzero().flatten()
        action, memory, _ = self.mind.sample_step(
            observation_from(seen, 2), memory, thinking, goals, noise
        )
        return action.unflatten(0, (-1, n)), memory, {}

    def outcome(
        self, before: TensorDict, after: TensorDict, memory: AgentState
    ) -> tuple[AgentState, Record]:
        over = after["episode_over"].repeat_interleave(self.shape.num_agents)
        return forget(memory, over), life_of(before, after)


class RivalLives:
    """A rival that was trained, in every place, as a `Player`."""

    def __init__(self, town: Town, learner: Learner, width: int) -> None:
        self.town, self.learner, self.width = town, learner, width

    def start(self, worlds: int) -> tuple[Tensor, Tensor]:
        h, c = torch.zeros(2, worlds * self.town.num_agents, self.width)
        return h, c

    def act(
        self, world: TensorDict, seen: TensorDict, memory: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor], Record]:
        flat = flat_observation(self.town, seen).flatten(0, 1)
        action, memory = self.learner.act(flat, memory)
        return action.unflatten(0, (-1, self.town.num_agents)), memory, {}

    def outcome(
        self, before: TensorDict, after: TensorDict, memory: tuple[Tensor, Tensor]
    ) -> tuple[tuple[Tensor, Tensor], Record]:
        goes_on = ~after["episode_over"].repeat_interleave(self.town.num_agents).unsqueeze(-1)
        return (memory[0] * goes_on, memory[1] * goes_on), life_of(before, after)
