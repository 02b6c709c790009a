"""Small worlds whose every number is known, for the tests of own worlds."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import Env, spaces


class Counting(Env):
    """Counts its ticks: reward is the tick's number; ends as `ends` says after `length` ticks."""

    observation_space: spaces.Space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space: spaces.Space = spaces.Discrete(3)

    def __init__(self, length: int = 3, ends: str = "terminated") -> None:
        self.length, self.ends, self.tick, self.seeds, self.closed = length, ends, 0, [], False

    def seen(self) -> Any:
        return np.array([self.tick, len(self.seeds)], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.tick = 0
        self.seeds.append(seed)
        return self.seen(), {}

    def step(self, action):
        self.tick += 1
        over = self.tick == self.length
        ends = over and self.ends == "terminated", over and self.ends == "truncated"
        return self.seen(), float(self.tick), *ends, {}

    def close(self):
        self.closed = True


class Masked(Counting):
    """Only the action that its tick says is legal."""

    def info(self):
        mask = np.zeros(3, np.int8)
        mask[self.tick % 3] = 1
        return {"action_mask": mask}

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0], self.info()

    def step(self, action):
        assert action == self.tick % 3
        seen, reward, ended, cut, _ = super().step(action)
        return seen, reward, ended, cut, self.info()


class Hint(Env):
    """The sign is shown at the first tick only; after `delay` ticks the action must repeat it.

    Reward 1 for the right one of two, else 0: who does not remember earns 0.5.
    """

    observation_space: spaces.Space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space: spaces.Space = spaces.Discrete(2)

    def __init__(self, delay: int = 3) -> None:
        self.delay, self.tick, self.sign = delay, 0, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.tick, self.sign = 0, int(self.np_random.integers(2))
        return np.array([2 * self.sign - 1, 0], np.float32), {}

    def step(self, action):
        self.tick += 1
        over = self.tick == self.delay
        seen = np.array([0, self.tick / self.delay], np.float32)
        return seen, float(over and action == self.sign), over, False, {}


class Leaving:
    """A parallel world of three: `late` comes at tick 1, `early` goes at tick 2, all end at 4.

    Its agents have vectors of two lengths and two or three actions. Whoever acts earns its index
    + 1.
    """

    possible_agents = ("early", "late", "whole")
    metadata: dict[str, Any] = {}  # noqa: RUF012
    render_mode = None

    def __init__(self) -> None:
        self.agents: list[str] = []
        self.tick = 0

    def observation_space(self, agent):
        return spaces.Box(-np.inf, np.inf, (3 if agent == "whole" else 2,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(3 if agent == "whole" else 2)

    def seen(self, agents):
        sizes = {"early": 2, "late": 2, "whole": 3}
        return {agent: np.full(sizes[agent], self.tick + 1, np.float32) for agent in agents}

    def reset(self, seed=None, options=None):
        self.tick, self.agents = 0, ["early", "whole"]
        return self.seen(self.agents), {agent: {} for agent in self.agents}

    def step(self, actions):
        assert set(actions) == set(self.agents)
        self.tick += 1
        acted = list(self.agents)
        reward = {agent: float(self.possible_agents.index(agent) + 1) for agent in acted}
        ends = {agent: agent == "early" and self.tick == 2 for agent in acted}
        cuts = dict.fromkeys(acted, self.tick == 4)
        told = acted + (["late"] if self.tick == 1 else [])
        self.agents = [a for a in told if not ends.get(a) and not cuts.get(a)]
        return self.seen(told), reward, ends, cuts, {agent: {} for agent in told}

    def close(self):
        pass


class Plain:
    """A `hamlet.learning.log.Log` that keeps nothing."""

    def steps(self, total, start):
        return range(start, total)

    def record(self, step, metrics):
        pass
