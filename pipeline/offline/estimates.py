"""What a policy would earn, estimated from another's log, with intervals (off-policy evaluation).

Three estimators of the expected discounted return of an episode:

- weighted importance sampling, per decision (Precup et al. 2000): no model, much variance;
- fitted Q by least squares (LSTD-Q, Lagoudakis and Parr 2003): no ratios, biased by its features;
- weighted doubly robust (Thomas and Brunskill 2016): the first, with the second as its baseline.

Everything is summed over blocks of episodes, and the blocks are drawn again and again (bootstrap):
memory does not grow with the log.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

DRAWS = 400
LOG_RATIO_LIMIT = 50.0  # e^50: beyond it a product of ratios is as good as infinite


class Estimate(NamedTuple):
    value: float
    low: float
    """2.5 % of the bootstrap."""
    high: float
    """97.5 % of it."""

    def told(self) -> dict[str, float | list[float]]:
        return {"value": self.value, "ci95": [self.low, self.high]}


@dataclass
class LeastSquaresQ:
    """Q(s, a) = features(s) . weights[a], fitted to satisfy its Bellman equation on logged rows.

    Add rows block by block, then `solve`. Features should hold a constant.

    Args:
        features: F; actions: A.
        blocks: of episodes, for the bootstrap.
        gamma: discount per step.
        ridge: pull of the weights towards 0, as so many rows.
    """

    features: int
    actions: int
    blocks: int
    gamma: float
    ridge: float = 1e-3
    matrix: np.ndarray = field(init=False)
    vector: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        size = self.features * self.actions
        self.matrix = np.zeros((self.blocks, size, size))
        self.vector = np.zeros((self.blocks, size))

    def add(
        self,
        block: int,
        phi: np.ndarray,
        action: np.ndarray,
        reward: np.ndarray,
        phi_next: np.ndarray,
        odds_next: np.ndarray,
        goes_on: np.ndarray,
    ) -> None:
        """Add rows.

        Args:
            phi, phi_next: float [R, F] before and after; action: int [R]; reward: float [R].
            odds_next: float [R, A] the evaluated policy's, afterwards.
            goes_on: bool [R] False where the episode ended.
        """
        hot = np.eye(self.actions)[action]
        now = (hot[:, :, None] * phi[:, None, :]).reshape(len(phi), -1)
        after = (odds_next[:, :, None] * phi_next[:, None, :]).reshape(len(phi), -1)
        self.matrix[block] += now.T @ (now - self.gamma * goes_on[:, None] * after)
        self.vector[block] += now.T @ reward

    def solve(self, counts: np.ndarray | None = None) -> np.ndarray:
        """Weights float64 [A, F]; `counts` float [blocks]: how often each block was drawn."""
        counts = np.ones(self.blocks) if counts is None else counts
        matrix = np.tensordot(counts, self.matrix, 1)
        matrix[np.diag_indices_from(matrix)] += self.ridge
        solved = np.linalg.lstsq(matrix, counts @ self.vector, rcond=None)[0]
        return solved.reshape(self.actions, self.features)


@dataclass
class ReturnSums:
    """Sums over blocks of episodes from which the estimates follow.

    Args:
        blocks: G; longest: T, the most steps of an episode; gamma: discount per step.
    """

    blocks: int
    longest: int
    gamma: float

    def __post_init__(self) -> None:
        shape = (self.blocks, self.longest)
        self.weight, self.square = np.zeros(shape), np.zeros(shape)
        self.before, self.weighted_value = np.zeros(shape), np.zeros(shape)
        self.weighted_reward, self.weighted_error = np.zeros(shape), np.zeros(shape)
        self.earned, self.first_value = np.zeros(self.blocks), np.zeros(self.blocks)
        self.count = np.zeros(self.blocks)

    def add(
        self,
        block: np.ndarray,
        log_ratio: np.ndarray,
        reward: np.ndarray,
        q: np.ndarray,
        value: np.ndarray,
        acted: np.ndarray,
    ) -> None:
        """Add episodes, time-major [T', E], padded after their end.

        Args:
            block: int [E].
            log_ratio: of the evaluated policy to the behaviour, of the action that was taken.
            q: Q of that action; value: of the state, the policy's mean of Q.
            acted: bool, False in the padding.

        An episode that was cut counts until there: what is estimated is the return until then.
        """
        ticks = len(log_ratio)
        log_ratio, reward = np.where(acted, log_ratio, 0.0), np.where(acted, reward, 0.0)
        q, value = np.where(acted, q, 0.0), np.where(acted, value, 0.0)
        error = reward - q
        product = np.exp(np.clip(np.cumsum(log_ratio, 0), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
        before = np.concatenate([np.ones_like(product[:1]), product[:-1]])
        for sums, x in (
            (self.weight, product), (self.square, product**2), (self.before, before),
            (self.weighted_reward, product * reward), (self.weighted_error, product * error),
            (self.weighted_value, before * value),
        ):  # fmt: skip
            np.add.at(sums, (block[None, :], np.arange(ticks)[:, None]), x)
        # An episode that is over keeps its weight in the mean of those that go on.
        if ticks < self.longest:
            for sums, x in (
                (self.weight, product[-1]),
                (self.square, product[-1] ** 2),
                (self.before, product[-1]),
            ):
                rest = np.zeros(self.blocks)
                np.add.at(rest, block, x)
                sums[:, ticks:] += rest[:, None]
        discounts = self.gamma ** np.arange(ticks)
        np.add.at(self.earned, block, discounts @ reward)
        np.add.at(self.first_value, block, value[0])
        np.add.at(self.count, block, 1.0)

    def _of(self, counts: np.ndarray) -> dict[str, np.ndarray]:
        """The estimates for draws of the blocks float [D, G]."""
        discounts = self.gamma ** np.arange(self.longest)
        weight = counts @ self.weight
        weight = np.maximum(weight, 1e-300)
        before = np.maximum(counts @ self.before, 1e-300)
        number = counts @ self.count
        robust = (counts @ self.weighted_error) / weight + (counts @ self.weighted_value) / before
        return {
            "importance": ((counts @ self.weighted_reward) / weight) @ discounts,
            "doubly_robust": robust @ discounts,
            "behaviour": (counts @ self.earned) / number,
            "first_value": (counts @ self.first_value) / number,
        }

    def effective_episodes(self) -> float:
        """How many episodes of the policy's own the weighted ones are worth at the last step."""
        total = self.weight.sum(0)
        return float((total**2 / np.maximum(self.square.sum(0), 1e-300)).min())


def draws_of(blocks: int, generator: np.random.Generator, draws: int = DRAWS) -> np.ndarray:
    """float [draws, blocks]: how often each block comes in each bootstrap sample."""
    return generator.multinomial(blocks, np.full(blocks, 1 / blocks), size=draws).astype(float)


def estimates(
    sums: ReturnSums,
    generator: np.random.Generator,
    first_values: np.ndarray | None = None,
) -> dict[str, Estimate]:
    """All estimates by name, and `improvement`: doubly robust less the behaviour's own return.

    Args:
        first_values: float [D] of `DRAWS` refits of Q the mean value of the first states, for the
            interval of `fitted_q`; else only the episodes are drawn anew.
    """
    counts = draws_of(sums.blocks, generator)
    exact, drawn = sums._of(np.ones((1, sums.blocks))), sums._of(counts)
    for values in (exact, drawn):
        values["improvement"] = values["doubly_robust"] - values["behaviour"]
        values["fitted_q"] = values.pop("first_value")
    if first_values is not None:
        drawn["fitted_q"] = drawn["fitted_q"] + (first_values - first_values.mean())
    found = {}
    for name, value in exact.items():
        low, high = np.percentile(drawn[name], [2.5, 97.5])
        found[name] = Estimate(float(value[0]), float(low), float(high))
    return found
