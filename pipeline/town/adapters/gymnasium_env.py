"""Gymnasium: one focal agent (slot 0) per world, the others played by scripted characters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from hamlet.artifacts import HamletError
from hamlet.town.adapters.flat import flat_observation, flat_size
from hamlet.town.adapters.requests import (
    checked_actions,
    checked_render_mode,
    checked_seed,
    tell_options,
)
from hamlet.town.load import load_pack
from hamlet.town.players import Scripted
from hamlet.town.render import render_png
from hamlet.town.town import Town


class TownVectorEnv(VectorEnv):
    """`num_envs` worlds as a Gymnasium VectorEnv with same-step auto-reset.

    Observations f32 [num_envs, D] (see `flat_observation`), actions int [num_envs], rewards
    float64 [num_envs]. Dying terminates, reaching the lifespan truncates. `infos["action_mask"]`
    int8 [num_envs, A] says what is legal now, as `Discrete.sample(mask)` wants it; an illegal
    action wastes its tick. Where a life ended, `infos["final_obs"]` and `infos["final_info"]` hold
    what was seen and legal in its last tick.

    Seeds: env i of `reset(seed=s)` is the world of `TownEnv().reset(seed=s + i)`.

    Raises:
        HamletError: a pack, characters, a render mode, seeds or actions that do not exist.
        gymnasium.error.ResetNeeded: a step before the first reset.
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
        self.render_mode = checked_render_mode(render_mode, self.metadata)
        self.town = Town(load_pack(pack), layout_seed=layout_seed)
        self.players = Scripted(self.town, names)
        self.num_envs = num_envs
        box = gymnasium.spaces.Box(-np.inf, np.inf, (flat_size(self.town),), np.float32)
        self.single_observation_space = box
        self.single_action_space = gymnasium.spaces.Discrete(self.town.num_actions)
        self.observation_space = batch_space(box, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.world: Any = None

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[np.ndarray, dict[str, Any]]:
        tell_options(options)
        seeds = self._seeds(seed)
        self.world = self.town.reset(torch.tensor(seeds), self.num_envs)
        self._memory = self.players.reset(self.world)
        return self._observe(), self._info(np.ones(self.num_envs, dtype=bool))

    def _seeds(self, seed: int | Sequence[int | None] | None) -> list[int]:
        if seed is None or isinstance(seed, int | np.integer):
            number = None if seed is None else checked_seed(seed)
            super().reset(seed=number)
            if number is not None:
                return [number + i for i in range(self.num_envs)]
            return [int(n) for n in self.np_random.integers(2**31, size=self.num_envs)]
        if len(seed) != self.num_envs:
            raise HamletError(
                f"{len(seed)} seeds for {self.num_envs} environments",
                "pass one for each, or a number",
            )
        super().reset()
        return [
            int(self.np_random.integers(2**31)) if one is None else checked_seed(one)
            for one in seed
        ]

    def step(
        self, actions: Any
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        if self.world is None:
            raise ResetNeeded("the town has no state yet: call reset() before step()")
        chosen = checked_actions(actions, (self.num_envs,), self.town.action_names)
        everyone, _, self._memory = self.players.act(self.world, self._memory)
        everyone = everyone.clone()
        everyone[:, 0] = chosen
        self.world = self.town.step_core(self.world, everyone)
        rewards = self.world["reward"][:, 0].double().numpy().copy()
        died = self.world["died"][:, 0].numpy().copy()
        retired = self.world["retired"][:, 0].numpy().copy()
        ended = died | retired
        infos: dict[str, Any] = {}
        if ended.any():
            last = self._observe()
            final = np.empty(self.num_envs, dtype=object)
            for index in np.flatnonzero(ended):
                final[index] = last[index]
            infos = {"final_obs": final, "_final_obs": ended}
            infos |= {"final_info": self._info(ended), "_final_info": ended}
            self.world = self.town.renew(self.world, torch.from_numpy(ended))
        return (
            self._observe(), rewards, died, retired,
            infos | self._info(np.ones(self.num_envs, dtype=bool)),
        )  # fmt: skip

    def render(self) -> tuple[np.ndarray, ...] | None:
        if self.render_mode is None:
            return None
        return tuple(np.asarray(render_png(self.town, self.world, w)) for w in range(self.num_envs))

    def _observe(self) -> np.ndarray:
        return flat_observation(self.town, self.town.observe(self.world))[:, 0].numpy()

    def _info(self, of: np.ndarray) -> dict[str, Any]:
        """What is legal, for the environments of the mask `of`; zeros for the others."""
        mask = self.town.action_mask(self.world)[:, 0].numpy() & of[:, None]
        return {"action_mask": mask.astype(np.int8), "_action_mask": of}


class TownEnv(gymnasium.Env):
    """One world as a Gymnasium Env; the same rules as `TownVectorEnv`, without auto-reset.

    After the end of a life it wants `reset`, and raises gymnasium.error.ResetNeeded until then.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 6}  # noqa: RUF012

    def __init__(
        self,
        pack: str = "l4_contention",
        names: Sequence[str] | None = None,
        layout_seed: int = 0,
        render_mode: str | None = None,
    ):
        self.worlds = TownVectorEnv(1, pack, names, layout_seed, render_mode)
        self.render_mode = render_mode
        self.observation_space = self.worlds.single_observation_space
        self.action_space = self.worlds.single_action_space
        self._mask: np.ndarray | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        tell_options(options)
        super().reset(seed=None if seed is None else checked_seed(seed))
        number = int(self.np_random.integers(2**31)) if seed is None else seed
        observation, info = self.worlds.reset(seed=number)
        self._mask = info["action_mask"][0]
        return observation[0], {"action_mask": self._mask}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if self._mask is None:
            raise ResetNeeded("this life has ended or none has begun: call reset() before step()")
        actions = np.asarray(action)[None]
        observation, reward, died, retired, info = self.worlds.step(actions)
        if died[0] or retired[0]:
            observation, info, self._mask = info["final_obs"], info["final_info"], None
        else:
            self._mask = info["action_mask"][0]
        mask = {"action_mask": info["action_mask"][0]}
        return observation[0], float(reward[0]), bool(died[0]), bool(retired[0]), mask

    def action_masks(self) -> np.ndarray:
        """Legal actions now, bool [A] (the name maskable PPO implementations look for)."""
        if self._mask is None:
            raise ResetNeeded("this life has ended or none has begun: call reset() first")
        return self._mask.astype(bool)

    def render(self) -> np.ndarray | None:
        frames = self.worlds.render()
        return None if frames is None else frames[0]
