"""`hamlet play` in an own world: an episode as text, tick by tick, or as a GIF."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from hamlet.artifacts import HamletError, atomic_path
from hamlet.own.evaluating import Player
from hamlet.own.params import load_own_params
from hamlet.serving.agent import OnnxAgent
from hamlet.worlds.contract import WorldShape
from hamlet.worlds.lanes import HELD_OUT, Lanes, maker
from hamlet.worlds.opening import open_world

UNSEEN = HELD_OUT // 2  # held-out seeds from here on: episodes that no stage has played


def play_own(agent: OnnxAgent, seed: int, ticks: int, gif: Path | None, speed: float) -> None:
    """Let the agent play one episode and show it.

    Raises:
        HamletError: the world cannot be opened here, is another one, or has no picture for a GIF.
    """
    shape = WorldShape.from_dict(agent.card["world"])
    given = load_own_params().world
    mode = "rgb_array" if gif else None
    make = maker(lambda: open_world(given.make, given.kwargs, mode), shape)
    lanes = Lanes(make, 1, iter([HELD_OUT + UNSEEN + seed % UNSEEN] * 2), given.longest)
    console = Console(highlight=False)
    try:
        frames = []
        for picture, line in _moments(lanes, Player(agent, shape.num_agents), ticks):
            if gif is None:
                if picture is not None:
                    print(picture)
                console.print(line, soft_wrap=True)
                if console.is_terminal:
                    time.sleep(1 / speed)
            else:
                frames.append(picture)
        if gif is not None:
            _write_gif(gif, frames, shape.name)
            console.print(f"{gif} written", soft_wrap=True)
    finally:
        lanes.close()


def _moments(lanes: Lanes, player: Player, ticks: int) -> Iterator[tuple[Any, str]]:
    """A picture and a line of every tick, and of the end."""
    shape, world = lanes.shape, lanes.worlds[0]
    totals, lived = np.zeros(shape.num_agents), 0
    for tick in range(ticks):
        alive = lanes.now.alive
        picture = world.render()
        actions = player.act(lanes.now, np.zeros(len(alive), np.int64))
        row = lanes.step(actions)
        totals += row.reward
        lived += 1
        done = ", ".join(
            f"{who + ' ' if shape.num_agents > 1 else ''}{shape.actions[action]} ({reward:+.4g})"
            for who, action, reward, living in zip(shape.agents, actions, row.reward, alive)
            if living
        )
        yield picture, f"{tick}: {done}"
        if row.over[0]:
            break
    told = ", ".join(f"{who} {total:.4g}" for who, total in zip(shape.agents, totals))
    yield world.render(), f"return after {lived} ticks: {told}"


def _write_gif(path: Path, frames: list[Any], world: str) -> None:
    from PIL import Image

    pictures = [
        Image.fromarray(x) for x in frames if isinstance(x, np.ndarray) and x.dtype == np.uint8
    ]
    if not pictures:
        raise HamletError(f"{world} gives no pictures", 'let `make` take render_mode="rgb_array"')
    with atomic_path(path) as temporary:
        pictures[0].save(
            temporary, format="GIF", save_all=True, append_images=pictures[1:], duration=60, loop=0
        )
