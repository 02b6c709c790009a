"""PettingZoo: every agent of one world as a player of a ParallelEnv."""

from __future__ import annotations

from typing import Any, Literal, get_args

import gymnasium
import numpy as np
from gymnasium.error import ResetNeeded
from pettingzoo import ParallelEnv

from hamlet.artifacts import HamletError
from hamlet.town.adapters.flat import flat_observation, flat_size, state_size, true_state
from hamlet.town.adapters.requests import (
    checked_actions,
    checked_render_mode,
    checked_seed,
    tell_options,
)
from hamlet.town.load import load_pack
from hamlet.town.render import render_png
from hamlet.town.schema import WAIT
from hamlet.town.town import Town

Convention = Literal["pettingzoo", "rllib", "supersuit"]


class TownParallelEnv(ParallelEnv):
    """One world. Dying terminates an agent, reaching the lifespan truncates it.

    `convention` says whose wrappers shall take it:

    - pettingzoo: observations are {"observation": f32 [D], "action_mask": int8 [A]}. Who has ended
      leaves `agents`.
    - rllib: the same with the key "observations", which RLlib's action-masking module reads. Its
      wrapper may step once more with no agents left; that returns five empty mappings.
    - supersuit: observations are f32 [D], since its wrappers take boxes, and the mask is
      `infos[agent]["action_mask"]`. The dead stay in `agents` until the world ends: they see
      zeros, may only WAIT, earn 0, and are terminated in the tick of their death and again when
      all others end.

    `step` wants an action of every agent in `agents` and of nobody else.

    Raises:
        HamletError: a pack, convention, render mode or seed that does not exist; an action that is
            missing, of somebody who does not play, or out of range.
        gymnasium.error.ResetNeeded: a step before the first reset.
    """

    metadata = {"name": "town_v0", "render_modes": ["rgb_array"], "is_parallelizable": True}  # noqa: RUF012

    def __init__(
        self,
        pack: str = "l4_contention",
        layout_seed: int = 0,
        render_mode: str | None = None,
        convention: Convention = "pettingzoo",
    ):
        if convention not in get_args(Convention):
            raise HamletError(
                f"convention {convention!r} does not exist",
                f"use one of {', '.join(get_args(Convention))}",
            )
        self.render_mode = checked_render_mode(render_mode, self.metadata)
        self.town = Town(load_pack(pack), layout_seed=layout_seed)
        self._stay = convention == "supersuit"
        self._key = {"pettingzoo": "observation", "rllib": "observations"}.get(convention)
        self.possible_agents = [f"agent_{i}" for i in range(self.town.num_agents)]
        self.agents: list[str] = []
        self._number = {agent: i for i, agent in enumerate(self.possible_agents)}
        self._episodes = np.random.default_rng()
        self.world: Any = None
        box = gymnasium.spaces.Box(-np.inf, np.inf, (flat_size(self.town),), np.float32)
        mask = gymnasium.spaces.Box(0, 1, (self.town.num_actions,), np.int8)
        space = gymnasium.spaces.Dict({self._key: box, "action_mask": mask}) if self._key else box
        self.observation_spaces = dict.fromkeys(self.possible_agents, space)
        self.action_spaces = {
            agent: gymnasium.spaces.Discrete(self.town.num_actions)
            for agent in self.possible_agents
        }
        self.state_space = gymnasium.spaces.Box(
            -np.inf, np.inf, (state_size(self.town),), np.float32
        )

    def observation_space(self, agent: str) -> gymnasium.Space:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> gymnasium.Space:
        return self.action_spaces[agent]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        tell_options(options)
        if seed is not None:
            self._episodes = np.random.default_rng(checked_seed(seed))
        self.world = self.town.reset(int(self._episodes.integers(2**31)), 1)
        self.agents = list(self.possible_agents)
        return self._observe(self.agents)

    def step(self, actions: dict[str, Any]) -> tuple[dict, dict, dict, dict, dict]:
        if self.world is None:
            raise ResetNeeded("the town has no state yet: call reset() before step()")
        if not self.agents and not actions:
            return {}, {}, {}, {}, {}
        row = [WAIT] * self.town.num_agents
        for agent, action in self._checked(actions).items():
            row[self._number[agent]] = action
        chosen = checked_actions([row], (1, len(row)), self.town.action_names)
        self.world = self.town.step_core(self.world, chosen)
        acted, over = list(self.agents), bool(self.world["over"][0])
        rewards = self._read("reward", acted)
        terminated, truncated = self._read("died", acted), self._read("retired", acted)
        if self._stay:
            alive = self._read("alive", acted)
            terminated = {a: died or (over and not alive[a]) for a, died in terminated.items()}
            self.agents = [] if over else acted
        else:
            self.agents = [a for a in acted if not (terminated[a] or truncated[a])]
        observations, infos = self._observe(acted)
        return observations, rewards, terminated, truncated, infos

    def state(self) -> np.ndarray:
        """The true state of the world, f32 [S], see `flat.true_state`: for centralised critics."""
        if self.world is None:
            raise ResetNeeded("the town has no state yet: call reset() before state()")
        return true_state(self.town, self.world)[0].numpy()

    def render(self) -> np.ndarray | None:
        return np.asarray(render_png(self.town, self.world, 0)) if self.render_mode else None

    def close(self) -> None:
        """Nothing to release."""

    def _checked(self, actions: dict[str, Any]) -> dict[str, Any]:
        missing = [agent for agent in self.agents if agent not in actions]
        if missing:
            raise HamletError(
                f"no action of {missing[0]}", "pass one for every agent in env.agents"
            )
        strangers = [str(agent) for agent in actions if agent not in self.agents]
        if strangers:
            raise HamletError(
                f"{strangers[0]} does not play, or no longer",
                "pass actions of those in env.agents only",
            )
        return actions

    def _read(self, name: str, agents: list[str]) -> dict[str, Any]:
        values = self.world[name][0].tolist()
        return {agent: values[self._number[agent]] for agent in agents}

    def _observe(self, agents: list[str]) -> tuple[dict[str, Any], dict[str, dict]]:
        """Observations and infos of these agents."""
        flat = flat_observation(self.town, self.town.observe(self.world))[0]
        mask = self.town.action_mask(self.world)[0].numpy().astype(np.int8)
        if self._stay:
            flat = flat * self.world["alive"][0][:, None]
        rows = {agent: self._number[agent] for agent in agents}
        if self._key is None:
            infos = {agent: {"action_mask": mask[i]} for agent, i in rows.items()}
            return {agent: flat[i].numpy() for agent, i in rows.items()}, infos
        seen = {a: {self._key: flat[i].numpy(), "action_mask": mask[i]} for a, i in rows.items()}
        return seen, {agent: {} for agent in agents}
