"""A small world whose every truth is known, and logs of it.

Three states in a row; action `go` moves on with probability .8; in the last state it pays 4 and
ends the episode. Action `stay` pays .2 at once and leads back to the start. Every step may end the
episode, with probability .1.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tensordict import TensorDict

STATES, ACTIONS, GAMMA = 3, 2, 0.95
ADVANCES, ENDS = 0.8, 0.1
BEHAVIOUR = np.array([[0.6, 0.4], [0.5, 0.5], [0.4, 0.6]])
SCHEMA = """\
actions: [stay, go]
fields:
  state: {kind: category, columns: [state], count: 3}
  noise: {kind: vector, columns: [noise_a, noise_b]}
log_prob: log_prob
terminated: terminated
"""


def true_q(policy: np.ndarray) -> np.ndarray:
    """float [STATES, ACTIONS] of a policy of that shape, by solving Bellman's equation."""
    moves = np.zeros((STATES, ACTIONS, STATES))
    pays = np.array([[0.2, 0.0], [0.2, 0.0], [0.2, 4.0]])
    moves[:, 0, 0] = 1 - ENDS
    for s in range(STATES - 1):
        moves[s, 1, s + 1] = (1 - ENDS) * ADVANCES
        moves[s, 1, s] = (1 - ENDS) * (1 - ADVANCES)
    under = (policy[:, :, None] * moves).sum(1)
    value = np.linalg.solve(np.eye(STATES) - GAMMA * under, (policy * pays).sum(1))
    return pays + GAMMA * moves @ value


def true_return(policy: np.ndarray) -> float:
    """Expected discounted return of an episode."""
    return float(policy[0] @ true_q(policy)[0])


def play(policy: np.ndarray, episodes: int, seed: int) -> dict[str, np.ndarray]:
    """Columns of a log, played side by side and then sorted."""
    rng = np.random.default_rng(seed)
    state, going = np.zeros(episodes, int), np.arange(episodes)
    parts, step = [], 0
    while len(going):
        n, now = len(going), state[going]
        action = (rng.random(n) < policy[now, 1]).astype(int)
        wins = (action == 1) & (now == STATES - 1)
        terminated = wins | (rng.random(n) < ENDS)
        reward = np.where(action == 0, 0.2, np.where(wins, 4.0, 0.0))
        after = np.where(action == 0, 0, np.minimum(now + (rng.random(n) < ADVANCES), STATES - 1))
        log_prob = np.log(policy[now, action])
        parts.append((going, np.full(n, step), now, action, log_prob, reward, terminated))
        state[going] = after
        going, step = going[~terminated], step + 1
    names = ("episode", "step", "state", "action", "log_prob", "reward", "terminated")
    columns = {name: np.concatenate(x) for name, x in zip(names, zip(*parts))}
    order = np.lexsort((columns["step"], columns["episode"]))
    columns = {name: x[order] for name, x in columns.items()}
    noise = rng.normal(size=(2, len(order))).astype(np.float32)
    return columns | {"noise_a": noise[0], "noise_b": noise[1]}


def write(folder: Path, columns: dict, name: str = "log.parquet", schema: str = SCHEMA) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    pq.write_table(pa.table(columns), path)
    path.with_suffix(".yaml").write_text(schema)
    return path


class Quiet:
    """A log that keeps the last numbers."""

    def __init__(self) -> None:
        self.last: dict[str, float] = {}

    def steps(self, total, start):
        return range(start, total)

    def record(self, step, metrics):
        self.last = {name: float(value) for name, value in metrics.items()}


def policy_table(policy) -> np.ndarray:
    """float64 [STATES, ACTIONS] of a `LogPolicy` of `SCHEMA`, without noise."""
    rows = TensorDict(
        {
            "state": torch.arange(STATES)[None],
            "noise": torch.zeros(1, STATES, 2),
            "first": torch.ones(1, STATES, dtype=torch.bool),
        },
        batch_size=[1, STATES],
    )
    with torch.no_grad():
        return policy(rows)[0].softmax(-1)[0].double().numpy()
