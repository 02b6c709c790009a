"""Record a Minari data set from a Gymnasium environment, and play a policy in one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

LogProbs = Callable[[np.ndarray], np.ndarray]
"""Log-probabilities float [A] of the actions, from an observation."""


def record(
    env: Any,
    name: str,
    episodes: int,
    policies: LogProbs | Sequence[LogProbs],
    rng: np.random.Generator,
) -> Path:
    """Play `episodes` and keep them as the Minari data set `name`; returns its folder.

    The behaviour's log-probabilities are kept as `infos["log_prob"]`. Minari keeps data sets in the
    folder that MINARI_DATASETS_PATH names. (Minari's own `DataCollector` would need JAX.)

    Args:
        env: a Gymnasium environment with a Discrete action space.
        policies: one, or several that take turns, episode by episode.
    """
    import minari
    from minari.data_collector import EpisodeBuffer
    from minari.storage import get_dataset_path

    policies = [policies] if callable(policies) else policies
    buffers = []
    for episode in range(episodes):
        policy, seed = policies[episode % len(policies)], int(rng.integers(2**31))
        seen = [env.reset(seed=seed)[0]]
        actions: list[Any] = []
        rewards: list[Any] = []
        ends: list[Any] = []
        cuts: list[Any] = []
        log_probs: list[Any] = []
        while not (ends and (ends[-1] or cuts[-1])):
            odds = policy(seen[-1])
            action = int((np.log(rng.random()) < np.logaddexp.accumulate(odds)).argmax())
            observation, reward, terminated, truncated, _ = env.step(action)
            for kept, x in (
                (seen, observation), (actions, action), (rewards, float(reward)),
                (ends, bool(terminated)), (cuts, bool(truncated)), (log_probs, odds[action]),
            ):  # fmt: skip
                kept.append(x)
        buffers.append(
            EpisodeBuffer(
                id=episode,
                seed=seed,
                observations=np.stack(seen),
                actions=np.array(actions),
                rewards=rewards,
                terminations=ends,
                truncations=cuts,
                infos={"log_prob": np.append(log_probs, 0.0)},
            )
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nobody signed the data set
        minari.create_dataset_from_buffers(name, buffers, env=env)
    return Path(get_dataset_path(name))


def play(env: Any, act: Callable[[np.ndarray], int], episodes: int, seed: int) -> list[float]:
    """The undiscounted return of each of so many episodes, with the seeds that follow `seed`."""
    returns = []
    for episode in range(episodes):
        observation, _ = env.reset(seed=seed + episode)
        total, over = 0.0, False
        while not over:
            observation, reward, terminated, truncated, _ = env.step(act(observation))
            total, over = total + float(reward), bool(terminated or truncated)
        returns.append(total)
    return returns
