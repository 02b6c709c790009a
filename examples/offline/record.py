"""Record CartPole, played by a hesitant expert, as a Minari data set and as a Parquet log.

    python -m examples.offline.record [--episodes 1000]

The expert pushes towards the side to which the pole falls, the more surely the faster it falls.
An episode ends after 60 steps. Written below examples/offline/data: `cartpole/hesitant-v0` (Minari)
and `cartpole.parquet` with its schema `cartpole.yaml`.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

import gymnasium
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hamlet.artifacts import atomic_path
from hamlet.offline.gym import record
from hamlet.offline.minari_data import open_minari

DATA = Path(__file__).parent / "data"
NAME = "cartpole/hesitant-v0"
SENSES = ("position", "speed", "angle", "turning")
SCHEMA = f"""\
actions: [left, right]
log_prob: log_prob
terminated: terminated
truncated: truncated
fields:
  cart: {{kind: vector, columns: [{", ".join(SENSES)}]}}
"""


def hesitant(seen: np.ndarray) -> np.ndarray:
    """Log-probabilities float [2] of left and right."""
    fall = float(seen[2] + 0.5 * seen[3])
    right = -np.log1p(np.exp(-2 * fall))
    return np.array([right - 2 * fall, right])


def columns(folder: Path) -> dict[str, list]:
    """The columns of a Minari data set of CartPole; an action that is null ends each episode."""
    found: dict[str, list] = {
        name: []
        for name in ("episode", "step", *SENSES, "action", "log_prob", "reward", "terminated",
                     "truncated")
    }  # fmt: skip
    for episode in open_minari(folder).iterate_episodes():
        n = len(episode)
        found["episode"] += [episode.id] * (n + 1)
        found["step"] += range(n + 1)
        for i, name in enumerate(SENSES):
            found[name] += episode.observations[:, i].tolist()
        for name, values, last in (
            ("action", episode.actions, None), ("reward", episode.rewards, None),
            ("log_prob", episode.infos["log_prob"][:n], None),
            ("terminated", episode.terminations, False), ("truncated", episode.truncations, False),
        ):  # fmt: skip
            found[name] += [*np.asarray(values).tolist(), last]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=1000)
    episodes = parser.parse_args().episodes
    shutil.rmtree(DATA, ignore_errors=True)
    DATA.mkdir(parents=True)
    os.environ["MINARI_DATASETS_PATH"] = str(DATA)
    env = gymnasium.make("CartPole-v1", max_episode_steps=60)
    folder = record(env, NAME, episodes, hesitant, np.random.default_rng(0))
    with atomic_path(DATA / "cartpole.parquet") as path:
        pq.write_table(pa.table(columns(folder / "data")), path)
    (DATA / "cartpole.yaml").write_text(SCHEMA)
    print(f"{folder} and {DATA / 'cartpole.parquet'} written: {episodes} episodes")


if __name__ == "__main__":
    main()
