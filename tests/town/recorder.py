"""Traces as the reference environment would record them, made by the plain-Python rules.

Each world holds one agent, nobody is gated by death or age, and nothing is reset: the format of
the recorded runs (see `benchmarks.town_parity`), for packs, multipliers, lifespans and initial
meters of which no recorded run is at hand.
"""

from __future__ import annotations

import math
import random

import numpy as np
from oracle import Agent, Rules, f32, tick_world

from hamlet.town import Pack


def record(pack: Pack, worlds: int, ticks: int, seed: int) -> dict[str, np.ndarray]:
    """A trace of lone agents with random maps, starts, meters and (also illegal) actions."""
    rng = random.Random(seed)
    names, meters = pack.affordance_names, pack.meter_names
    rows: dict[str, list[list]] = {}
    spots = np.zeros((worlds, len(names), 2), np.int8)
    for world in range(worlds):
        cells = {}
        for index, cell in enumerate(rng.sample(range(pack.width * pack.height), len(names))):
            cells[names[index]] = (cell % pack.width, cell // pack.width)
            spots[world, index] = cells[names[index]]
        levels = {m: f32(rng.random() * 0.9 + 0.05) for m in meters}
        agent = Agent(levels, rng.randrange(pack.width), rng.randrange(pack.height))
        for name, value in live(pack, cells, agent, ticks, rng).items():
            rows.setdefault(name, []).append(value)
    kinds = {"positions": np.int8, "actions": np.int8, "masks": bool, "dones": bool,
             "hour": np.int8, "interaction_progress": np.int16, "interacted": np.int8,
             "last_affordance": np.int8}  # fmt: skip
    trace = {
        name: np.stack([np.asarray(v, kinds.get(name, np.float32)) for v in found], 1)
        for name, found in rows.items()
    }
    return trace | {
        "affordance_positions": spots,
        "depletion_multiplier": np.float32(pack.depletion_multiplier),
        "lifespan": np.int32(pack.lifespan),
        "affordance_names": np.array(names),
    }


def live(pack: Pack, cells: dict, agent: Agent, ticks: int, rng: random.Random) -> dict[str, list]:
    """One life of `ticks` ticks: the arrays of a trace for this world, time first."""
    names = pack.affordance_names
    known = {name: i for i, name in enumerate(names)} | {None: -1}
    found: dict[str, list] = {name: [] for name in (
        "obs", "meters", "positions", "masks", "dones", "hour", "interaction_progress", "actions",
        "rewards", "interacted", "last_affordance")}  # fmt: skip
    done, velocity = False, (0, 0)
    for tick in range(ticks + 1):
        hour = (pack.start_hour + tick) % 24
        mask = legal(pack, cells, agent, hour)
        found["obs"].append(observation(pack, cells, agent, hour, tick, velocity))
        found["meters"].append([agent.meters[m] for m in pack.meter_names])
        found["positions"].append((agent.x, agent.y))
        found["masks"].append(mask)
        found["dones"].append(done)
        found["hour"].append(hour)
        found["interaction_progress"].append(agent.progress)
        if tick == ticks:
            break
        options = [a for a, one in enumerate(mask) if one] or [5]
        action = rng.choice(options) if rng.random() < 0.8 else rng.randrange(len(mask))
        action = 4 if mask[4] and rng.random() < 0.7 else action
        x, y, agent.alive = agent.x, agent.y, True
        clock = {"seed": 0, "world": 0, "episode": 0, "tick": tick, "hour": hour}
        tick_world(pack, cells, [agent], [action], clock, [0])
        velocity = (agent.x - x, agent.y - y)
        done = done or agent.died
        reward = f32(pack.reward.base) * agent.meters["energy"] * agent.meters["health"]
        reward = f32(0.0) if done else reward
        retired = tick + 1 >= pack.lifespan
        found["actions"].append(action)
        found["rewards"].append(reward + f32(1.0) if retired else reward)
        found["interacted"].append(known[agent.used])
        found["last_affordance"].append(known[agent.last])
        done = done or retired
    return found


def legal(pack: Pack, cells: dict, agent: Agent, hour: int) -> list[bool]:
    if agent.meters["energy"] <= 0 or agent.meters["health"] <= 0:
        return [False] * len(pack.action_names)
    here = [name for name, cell in cells.items() if cell == (agent.x, agent.y)]
    usable = any(Rules(pack, 0).is_open(name, hour) for name in here)
    moves = [agent.y > 0, agent.y < pack.height - 1, agent.x > 0, agent.x < pack.width - 1]
    return [*moves, usable, *([True] * (len(pack.action_names) - 5))]


def observation(
    pack: Pack, cells: dict, agent: Agent, hour: int, tick: int, velocity: tuple[int, int]
) -> np.ndarray:
    width, here = pack.width, (agent.x, agent.y)
    partial = pack.vision < max(pack.width, pack.height) - 1
    grid, window = np.zeros((pack.height, width), f32), np.zeros((5, 5), f32)
    under = np.zeros(len(cells) + 1, f32)
    for index, (x, y) in enumerate(cells.values()):
        dx, dy = x - agent.x, y - agent.y
        if partial and max(abs(dx), abs(dy)) <= 2:
            window[dy + 2, dx + 2] = 1
        if not partial:
            grid[y, x] += 1
            under[index] = (x, y) == here
    if not partial:
        grid[agent.y, agent.x] += 1
        under[-1] = here not in cells.values()
    angle = 2 * math.pi * hour / 24 if pack.temporal else 0.0
    progress = f32(agent.progress if pack.temporal else 0) / f32(10)
    speed = np.sqrt(f32(velocity[0] ** 2 + velocity[1] ** 2))
    age = min(f32(tick) / f32(pack.lifespan), f32(1))
    return np.concatenate([
        grid.flatten(), window.flatten(),
        f32([agent.x, agent.y]) / f32([width - 1, pack.height - 1]),
        f32(velocity), [speed], f32([agent.meters[m] for m in pack.meter_names]), under,
        [f32(math.sin(angle)), f32(math.cos(angle)), progress, age],
    ]).astype(np.float32)  # fmt: skip
