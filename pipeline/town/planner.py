"""A planner that tries things out in the true town: the upper reference for every other player.

Every few ticks each agent plays its options forward in copies of the world: to go to one place,
use it until it is done, and live on as the expert does; or to live as the expert from now on. All
others are taken to be experts. What pays most is done (rollout policy improvement, Tesauro and
Galperin 1996), so that up to what happens after the horizon, and to others changing their minds
too, no life is worse than the expert's. It knows everything and is slow: for measuring, not for
playing.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

from pipeline.town.players import Scripted
from pipeline.town.town import INTERACT, Town


class Planner:
    """Rollout planning for every agent of every world; used like `Scripted`.

    Args:
        town: the town they live in.
        period: ticks between two rounds of planning.
        horizon: ticks that each option is played forward.
        margin: how much more, in reward over the horizon, an option must bring than the expert.
    """

    def __init__(self, town: Town, period: int = 8, horizon: int = 200, margin: float = 0.1):
        self.town, self.expert = town, Scripted(town, ["expert"])
        self.period, self.horizon, self.margin = period, horizon, margin

    def reset(self, state: TensorDict) -> TensorDict:
        """Memory for fresh worlds: `option` int64 [B, N], a place to use or -1 for the expert."""
        shape = (state.batch_size[0], self.town.num_agents)
        option = torch.full(shape, -1, device=self.town.device)
        return TensorDict({"option": option}, batch_size=state.batch_size)

    def act(self, state: TensorDict, memory: TensorDict) -> tuple[Tensor, Tensor, TensorDict]:
        """Actions and goals int64 [B, N], and the new memory; see `Scripted.act`.

        All worlds plan together, when the first one's age is a multiple of the period.
        """
        if int(state["tick"][0]) % self.period == 0:
            option = self._best(state)
        else:
            option = self._going_on(state, memory["option"])
        actions, goals = self._follow(state, option)
        goals = torch.where(option >= 0, option, goals)
        return actions, goals, TensorDict({"option": option}, batch_size=state.batch_size)

    def _best(self, state: TensorDict) -> Tensor:
        """The option that pays most for each agent, int64 [B, N]."""
        n, options = self.town.num_agents, self.town.num_affordances + 1
        b = state.batch_size[0]
        # World copies in the order [B, N, options]: in each, one agent tries one option.
        world = torch.arange(b, device=self.town.device).repeat_interleave(n * options)
        copies = state[world]
        tried = torch.arange(-1, options - 1, device=self.town.device).repeat(b * n)
        who = torch.arange(n, device=self.town.device).repeat_interleave(options).repeat(b)
        option = torch.full((len(world), n), -1, device=self.town.device)
        option[torch.arange(len(world)), who] = tried
        total = torch.zeros(len(world), device=self.town.device)
        for tick in range(self.horizon):
            if tick:
                option = self._going_on(copies, option)
            copies = self.town.step_core(copies, self._follow(copies, option)[0])
            total += copies["reward"].gather(1, who[:, None])[:, 0]
        score = total.view(b, n, options)
        score[..., 0] += self.margin
        return score.argmax(-1) - 1

    @staticmethod
    def _going_on(state: TensorDict, option: Tensor) -> Tensor:
        """The options not yet done: under way, or in use and not complete."""
        tried = (state["place"] == option) & (state["last_action"] == INTERACT)
        in_use = (state["used"] == option) & (state["last_affordance"] == option)
        return torch.where(state["alive"] & (~tried | in_use), option, -1)

    def _follow(self, state: TensorDict, option: Tensor) -> tuple[Tensor, Tensor]:
        """Actions of agents with these options, and the expert's goals."""
        town = self.town
        actions, goals, _ = self.expert.act(state, self.expert.reset(state))
        cells = town.affordance_cells[state["layout"]].gather(1, option.clamp(min=0))
        x, y = state["position"].long().unbind(-1)
        step = Scripted._step_towards(cells % town.width - x, cells // town.width - y)
        use = torch.where(state["place"] == option, INTERACT, step)
        legal = town.action_mask(state).gather(2, use[..., None])[..., 0]
        use = torch.where(legal, use, actions)
        return torch.where((option >= 0) & state["alive"], use, actions), goals
