"""A planner that tries things out in the true town: the upper reference for every other player.

Every few ticks the agents in turn play their options forward in copies of the world: to go to one
place, use it until it is done, and live on as the expert does; or to live as the expert from now
on. The others do meanwhile what they have settled on, and are experts after that. What brings the
whole town most is done (rollout policy improvement, Tesauro and Galperin 1996, one agent at a
time, Bertsekas 2019), so that, up to what comes after the horizon, no town fares worse than a town
of experts. It knows everything and is slow: for measuring, not for playing.

    python -m hamlet.town.planner l4_contention [--worlds 8]

prints what planner and expert reach in the same lives, on layouts that tuning never saw.
"""

from __future__ import annotations

import argparse
import sys

import torch
from tensordict import TensorDict
from torch import Tensor

from hamlet.town.expert import step_towards
from hamlet.town.lives import HELD_OUT_LAYOUTS, play
from hamlet.town.load import load_pack
from hamlet.town.players import Scripted
from hamlet.town.schema import INTERACT, PackError
from hamlet.town.town import Town


class Planner:
    """Rollout planning for every agent of every world; used like `Scripted`.

    Args:
        town: the town they live in.
        period: ticks between two rounds of planning.
        horizon: ticks that each option is played forward.
        margin: how much more reward, over the horizon, an option must bring than the expert.
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
        option = self.going_on(state, memory["option"])
        tick = int(state["tick"][0])
        if tick % self.period == 0:
            n = self.town.num_agents
            for turn in range(n):
                option = self._best(state, option, (turn + tick // self.period) % n)
        actions, goals = self._follow(state, option)
        goals = torch.where(option >= 0, option, goals)
        return actions, goals, TensorDict({"option": option}, batch_size=state.batch_size)

    def _best(self, state: TensorDict, option: Tensor, agent: int) -> Tensor:
        """The options int64 [B, N] with the one of this agent that pays most for its world."""
        options = self.town.num_affordances + 1
        b = state.batch_size[0]
        world = torch.arange(b, device=self.town.device).repeat_interleave(options)
        copies, trial = state[world], option[world]
        trial[:, agent] = torch.arange(-1, options - 1, device=self.town.device).repeat(b)
        total = torch.zeros(len(world), device=self.town.device)
        for tick in range(self.horizon):
            if tick:
                trial = self.going_on(copies, trial)
            copies = self.town.step_core(copies, self._follow(copies, trial)[0])
            total += copies["reward"].sum(1)
        score = total.view(b, options)
        score[:, 0] += self.margin
        option = option.clone()
        option[:, agent] = score.argmax(1) - 1
        return option

    @staticmethod
    def going_on(state: TensorDict, option: Tensor) -> Tensor:
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
        step = step_towards(cells % town.width - x, cells // town.width - y)
        use = torch.where(state["place"] == option, INTERACT, step)
        legal = town.action_mask(state).gather(2, use[..., None])[..., 0]
        use = torch.where(legal, use, actions)
        return torch.where((option >= 0) & state["alive"], use, actions), goals


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pack", help="pack name, file or Hamlet directory")
    parser.add_argument("--worlds", type=int, default=8)
    parser.add_argument("--horizon", type=int, default=200, help="ticks played forward")
    parser.add_argument("--period", type=int, default=8, help="ticks between rounds of planning")
    args = parser.parse_args(arguments)
    try:
        town = Town(load_pack(args.pack), layout_seed=HELD_OUT_LAYOUTS)
    except PackError as error:
        print(f"planner: {error}", file=sys.stderr)
        return 2
    expert = play(town, Scripted(town, ["expert"]), 0, args.worlds)["returns"].mean((1, 2))
    planner = Planner(town, args.period, args.horizon)
    planned = play(town, planner, 0, args.worlds)["returns"].mean((1, 2))
    gain = planned - expert
    print(
        f"expert {expert.mean():.2f}  planner {planned.mean():.2f}  difference {gain.mean():+.2f} "
        f"(standard error {gain.std() / args.worlds**0.5:.2f}, {args.worlds} worlds)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
