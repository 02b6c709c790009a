"""The worlds that `benchmarks.own_worlds` plays, as functions for `python:` worlds."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_gymnasium" / "world.py"
SHOWN = (2, 5)  # first and last tick at which the late sign may be shown


class LateSign(gymnasium.Wrapper):
    """The T-maze of the example, but its sign is shown at one random tick from 2 to 5, and is 0
    before and after. The junction is eight steps away, so everybody meets the sign."""

    shown = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        seen, info = self.env.reset(seed=seed, options=options)
        self.shown = int(self.unwrapped.np_random.integers(SHOWN[0], SHOWN[1] + 1))
        return self._seen(seen), info

    def step(self, action: int) -> Any:
        seen, *rest = self.env.step(action)
        return self._seen(seen), *rest

    def _seen(self, seen: np.ndarray) -> np.ndarray:
        maze: Any = self.unwrapped
        return np.array([maze.side if maze.ticks == self.shown else 0, *seen[1:]], np.float32)


class WithoutVelocities(gymnasium.ObservationWrapper):
    """CartPole that shows where the cart is and how the pole leans, not how fast: float32 [2]."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return observation[[0, 2]]


def cartpole() -> gymnasium.Env:
    """CartPole-v1 without its velocities."""
    return WithoutVelocities(gymnasium.make("CartPole-v1"))


def t_maze() -> gymnasium.Env:
    """The world of examples/own_gymnasium."""
    spec = spec_from_file_location("t_maze_of_the_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.make()


def late_sign() -> gymnasium.Env:
    """The T-maze whose cue comes later than the first tick."""
    return LateSign(t_maze())


def tag() -> Any:
    """The world of examples/own_pettingzoo."""
    from mpe2 import simple_tag_v3

    return simple_tag_v3.parallel_env()
