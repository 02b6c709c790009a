"""Who plays beside our agent in `benchmarks.own_worlds`: Stable-Baselines3 PPO and sb3-contrib
RecurrentPPO with their defaults.

They see what module D sees of the world: each field scaled by the random data (`plain.senses`), and
an agent's index where there are several, one network playing all of them. Their rewards are divided
by the running deviation of discounted returns, as ours are (VecNormalize). Needs the `bench` extra.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from sb3_contrib import RecurrentPPO
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from hamlet.plain.senses import Senses
from hamlet.worlds.lanes import Lanes, Now

# PPO's defaults are made for one environment. RecurrentPPO collects 128 ticks between updates: of
# eight environments it learns from as many rows as our rollouts hold.
WORLDS = {"sb3_ppo": 1, "sb3_recurrent_ppo": 8}
GAMMA = 0.99  # the default of both


class SensedLanes(VecEnv):
    """Lanes as Stable-Baselines3 wants them: every slot is one of its environments.

    Args:
        lanes: of worlds in which nobody dies alone. senses: makes observations float32 [S, F].

    Attributes:
        ticks: of all worlds together.
    """

    def __init__(self, lanes: Lanes, senses: Senses) -> None:
        self.lanes, self.senses, self.ticks = lanes, senses, 0
        seen = Box(-np.inf, np.inf, (senses.width,), np.float32)
        super().__init__(len(lanes.now.alive), seen, Discrete(lanes.shape.num_actions))

    def reset(self) -> np.ndarray:
        return sensed(self.senses, self.lanes.now.fields)

    def step_async(self, actions: np.ndarray) -> None:
        self.actions = actions

    def step_wait(self) -> Any:
        row = self.lanes.step(np.asarray(self.actions, np.int64))
        self.ticks += len(self.lanes.worlds)
        ended = row.terminated | row.truncated
        infos: list[dict[str, Any]] = [{} for _ in ended]
        if ended.any():
            last = sensed(self.senses, row.last)
            for slot in np.flatnonzero(ended):
                infos[slot] = {
                    "terminal_observation": last[slot],
                    "TimeLimit.truncated": bool(row.truncated[slot]),
                }
        return sensed(self.senses, self.lanes.now.fields), row.reward, ended, infos

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self, attr_name, None)] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        setattr(self, attr_name, value)

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **named: Any) -> Any:
        return [getattr(self, method_name)(*args, **named)] * self.num_envs

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs

    def close(self) -> None:
        self.lanes.close()


@torch.no_grad()
def sensed(senses: Senses, fields: dict[str, np.ndarray]) -> np.ndarray:
    """Scaled observations float32 [S, F]."""
    return senses(*(torch.from_numpy(fields[f.name]) for f in senses.fields)).numpy()


class Theirs:
    """A model of Stable-Baselines3 as a player of `own.evaluating.play_cases`."""

    def __init__(self, model: Any, senses: Senses) -> None:
        self.model, self.senses, self.state = model, senses, None
        torch.manual_seed(0)

    def act(self, now: Now, cases: np.ndarray) -> np.ndarray:
        """int64 [S] actions, drawn from their odds."""
        seen = sensed(self.senses, now.fields)
        actions, self.state = self.model.predict(seen, self.state, now.first, deterministic=False)
        return np.asarray(actions, np.int64)


def train_theirs(
    name: str, lanes: Callable[[int], Lanes], senses: Senses, ticks: int, seed: int
) -> tuple[Theirs, int]:
    """Train for so many ticks of the world; the player, and the ticks that it took.

    Args:
        lanes: so many worlds side by side.
    """
    played = SensedLanes(lanes(WORLDS[name]), senses)
    scaled = VecNormalize(played, norm_obs=False, norm_reward=True, gamma=GAMMA)
    model: Any
    if name == "sb3_ppo":
        model = PPO("MlpPolicy", scaled, seed=seed, device="cpu")
    else:
        model = RecurrentPPO("MlpLstmPolicy", scaled, seed=seed, device="cpu")
    model.learn(ticks * lanes_agents(played))
    played.close()
    return Theirs(model, senses), played.ticks


def lanes_agents(env: SensedLanes) -> int:
    """Agents of each world: steps of Stable-Baselines3 in a tick of the world."""
    return env.lanes.shape.num_agents
