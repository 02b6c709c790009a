"""PettingZoo: every agent of one world as a player of a ParallelEnv."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from pettingzoo import ParallelEnv

from hamlet.town.adapters.flat import flat_observation, flat_size
from hamlet.town.load import load_pack
from hamlet.town.render import render_png
from hamlet.town.town import Town


class TownParallelEnv(ParallelEnv):
    """One world. Observations are {"observation": f32 [D], "action_mask": int8 [A]} per agent.

    Dying terminates an agent and removes it from `agents`; reaching the lifespan truncates.
    """

    metadata = {"name": "town_v0", "render_modes": ["rgb_array"], "is_parallelizable": True}  # noqa: RUF012

    def __init__(
        self, pack: str = "l4_contention", layout_seed: int = 0, render_mode: str | None = None
    ):
        self.town = Town(load_pack(pack), layout_seed=layout_seed)
        self.render_mode = render_mode
        self.possible_agents = [f"agent_{i}" for i in range(self.town.num_agents)]
        self.agents: list[str] = []
        self._episodes = np.random.default_rng()
        space = gymnasium.spaces.Dict(
            {
                "observation": gymnasium.spaces.Box(
                    -np.inf, np.inf, (flat_size(self.town),), np.float32
                ),
                "action_mask": gymnasium.spaces.Box(0, 1, (self.town.num_actions,), np.int8),
            }
        )
        self.observation_spaces = dict.fromkeys(self.possible_agents, space)
        self.action_spaces = {
            agent: gymnasium.spaces.Discrete(self.town.num_actions)
            for agent in self.possible_agents
        }

    def observation_space(self, agent: str) -> gymnasium.Space:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> gymnasium.Space:
        return self.action_spaces[agent]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        if seed is not None:
            self._episodes = np.random.default_rng(seed)
        self._state = self.town.reset(int(self._episodes.integers(2**31)), 1)
        self.agents = list(self.possible_agents)
        return self._observe(self.agents), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> tuple[dict, dict, dict, dict, dict]:
        wait = self.town.action_names.index("WAIT")
        row = [int(actions.get(agent, wait)) for agent in self.possible_agents]
        self._state = self.town.step_core(self._state, torch.tensor([row]))
        acted = list(self.agents)
        number = {agent: i for i, agent in enumerate(self.possible_agents)}

        def read(name: str) -> dict[str, Any]:
            values = self._state[name][0].tolist()
            return {agent: values[number[agent]] for agent in acted}

        terminated, truncated = read("died"), read("retired")
        self.agents = [a for a in acted if not (terminated[a] or truncated[a])]
        infos: dict[str, dict] = {agent: {} for agent in acted}
        return self._observe(acted), read("reward"), terminated, truncated, infos

    def render(self) -> np.ndarray | None:
        return np.asarray(render_png(self.town, self._state, 0)) if self.render_mode else None

    def close(self) -> None:
        """Nothing to release."""

    def _observe(self, agents: list[str]) -> dict[str, Any]:
        flat = flat_observation(self.town, self.town.observe(self._state))[0].numpy()
        mask = self.town.action_mask(self._state)[0].to(torch.int8).numpy()
        return {
            agent: {"observation": flat[i], "action_mask": mask[i]}
            for i, agent in enumerate(self.possible_agents)
            if agent in agents
        }
