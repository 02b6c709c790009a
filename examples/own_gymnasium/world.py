"""The world of this project: a T-maze. Change it as you like, `dvc repro` sees it.

A corridor leads to a junction. At the first tick, and never again, a sign says on which side the
reward lies: who does not remember it can only guess.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

CORRIDOR = 8  # steps from the start to the junction
LONGEST = 50  # ticks after which an episode is cut
RIGHT, WRONG, STEP = 1.0, -0.6, -0.01


class TMaze(gymnasium.Env[np.ndarray, int]):
    """Observes float32 [3]: the sign (-1 or 1 at the first tick, else 0), the place in the corridor
    from 0 to 1, and whether this is the junction."""

    class actions(IntEnum):
        """What can be done; turning does nothing but at the junction."""

        back = 0
        forward = 1
        left = 2
        right = 3

    observation_space = spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space = spaces.Discrete(4)

    def __init__(self, corridor: int = CORRIDOR) -> None:
        self.corridor, self.place, self.side, self.ticks = corridor, 0, 1, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.place, self.ticks = 0, 0
        self.side = 1 if self.np_random.random() < 0.5 else -1
        return self._seen(sign=self.side), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.ticks += 1
        cut = self.ticks >= LONGEST
        if self.place == self.corridor and action in (self.actions.left, self.actions.right):
            chosen = 1 if action == self.actions.right else -1
            return self._seen(), RIGHT if chosen == self.side else WRONG, True, False, {}
        move = {self.actions.back: -1, self.actions.forward: 1}.get(self.actions(action), 0)
        self.place = min(max(self.place + move, 0), self.corridor)
        return self._seen(), STEP, False, cut, {}

    def _seen(self, sign: int = 0) -> np.ndarray:
        there = self.place == self.corridor
        return np.array([sign, self.place / self.corridor, there], np.float32)


def make(render_mode: str | None = None) -> TMaze:
    """One new environment; Hamlet makes as many as it needs."""
    return TMaze()
