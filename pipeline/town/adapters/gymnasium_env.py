"""Gymnasium: one focal agent (slot 0) per world, the others played by scripted characters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from hamlet.town.adapters.flat import flat_observation, flat_size
from hamlet.town.load import load_pack
from hamlet.town.players import Scripted
from hamlet.town.render import render_png
from hamlet.town.town import Town


class TownVectorEnv(VectorEnv):
    """`num_envs` worlds as a Gymnasium VectorEnv with same-step auto-reset.

    Observations f32 [num_envs, D] (see `flat_observation`), actions int [num_envs], rewards
    float64 [num_envs]. Dying terminates, reaching the lifespan truncates. `infos["action_mask"]`
    bool [num_envs, A] says what is legal now; an illegal action wastes its tick.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP, "render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(
        self,
        num_envs: int = 1,
        pack: str = "l4_contention",
        names: Sequence[str] | None = None,
        layout_seed: int = 0,
        render_mode: str | None = None,
    ):
        self.town = Town(load_pack(pack), layout_seed=layout_seed)
        self.players = Scripted(self.town, names)
        self.num_envs, self.render_mode = num_envs, render_mode
        box = gymnasium.spaces.Box(-np.inf, np.inf, (flat_size(self.town),), np.float32)
        self.single_observation_space = box
        self.single_action_space = gymnasium.spaces.Discrete(self.town.num_actions)
        self.observation_space = batch_space(box, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        number = int(self.np_random.integers(2**31)) if seed is None else seed
        self._state = self.town.reset(number, self.num_envs)
        self._memory = self.players.reset(self._state)
        return self._observe(), self._info()

    def step(
        self, actions: Any
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        everyone, _, self._memory = self.players.act(self._state, self._memory)
        everyone = everyone.clone()
        everyone[:, 0] = torch.as_tensor(np.asarray(actions), dtype=torch.int64)
        self._state = self.town.step_core(self._state, everyone)
        rewards = self._state["reward"][:, 0].double().numpy().copy()
        died = self._state["died"][:, 0].numpy().copy()
        retired = self._state["retired"][:, 0].numpy().copy()
        ended = died | retired
        infos: dict[str, Any] = {}
        if ended.any():
            last = self._observe()
            final = np.empty(self.num_envs, dtype=object)
            for index in np.flatnonzero(ended):
                final[index] = last[index]
            infos |= {"final_obs": final, "_final_obs": ended, "final_info": {}}
            infos["_final_info"] = ended
            self._state = self.town.renew(self._state, torch.from_numpy(ended))
        return self._observe(), rewards, died, retired, infos | self._info()

    def render(self) -> tuple[np.ndarray, ...] | None:
        if self.render_mode != "rgb_array":
            return None
        return tuple(
            np.asarray(render_png(self.town, self._state, w)) for w in range(self.num_envs)
        )

    def _observe(self) -> np.ndarray:
        return flat_observation(self.town, self.town.observe(self._state))[:, 0].numpy()

    def _info(self) -> dict[str, Any]:
        return {"action_mask": self.town.action_mask(self._state)[:, 0].numpy()}


class TownEnv(gymnasium.Env):
    """One world as a Gymnasium Env; the same rules as `TownVectorEnv`, without auto-reset."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 6}  # noqa: RUF012

    def __init__(
        self,
        pack: str = "l4_contention",
        names: Sequence[str] | None = None,
        layout_seed: int = 0,
        render_mode: str | None = None,
    ):
        self._worlds = TownVectorEnv(1, pack, names, layout_seed, render_mode)
        self.render_mode = render_mode
        self.observation_space = self._worlds.single_observation_space
        self.action_space = self._worlds.single_action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        number = int(self.np_random.integers(2**31)) if seed is None else seed
        observation, info = self._worlds.reset(seed=number)
        return observation[0], {"action_mask": info["action_mask"][0]}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        observation, reward, died, retired, info = self._worlds.step([action])
        if died[0] or retired[0]:
            observation = info["final_obs"]
        mask = {"action_mask": info["action_mask"][0]}
        return observation[0], float(reward[0]), bool(died[0]), bool(retired[0]), mask

    def action_masks(self) -> np.ndarray:
        """Legal actions now, bool [A] (the name maskable PPO implementations look for)."""
        return self._worlds._info()["action_mask"][0]

    def render(self) -> np.ndarray | None:
        frames = self._worlds.render()
        return None if frames is None else frames[0]
