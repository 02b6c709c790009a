"""Train module D by PPO on the frozen perception's beliefs."""

from __future__ import annotations

import time
from collections import deque
from copy import deepcopy
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from hamlet.learning.buffer import RolloutBuffer
from hamlet.learning.checkpoint import Checkpoint
from hamlet.learning.log import Log
from hamlet.learning.losses import entropy_of, ppo_policy_loss, weighted_mean
from hamlet.learning.returns import gae
from hamlet.learning.update import Update
from hamlet.modules.categorical import log_prob_of, masked_logits
from hamlet.own.data import Believed, Perceive, fields_of
from hamlet.own.params import PolicyParams
from hamlet.plain.policy import Policy
from hamlet.worlds.lanes import Lanes, Row

LEAST = 0.1  # deviation of advantages that is made to be 1
LARGEST = 10.0  # of a scaled reward: the first of a sparse world must not drown all else
TRAILING = 40  # episodes whose mean return says how good the weights are
# What is kept of D's play, for B and C: `Believed`, and what was done and what came of it.
PLAYED = (
    *Believed._fields, "action", "alive", "reward", "terminated", "truncated",
)  # fmt: skip


class RewardScale:
    """The running deviation of discounted returns, by which rewards are divided.

    It runs on for as long as D learns: a scale that was fixed on random play, where a sparse world
    pays next to nothing, would blow up what comes later.
    """

    def __init__(self, slots: int, gamma: float) -> None:
        self.gamma = gamma
        self.sums = np.zeros(slots)
        self.count, self.mean, self.squares = 1e-4, 0.0, 1e-4

    def add(self, reward: np.ndarray, ended: np.ndarray, acted: np.ndarray) -> None:
        """One tick's rewards float [S]; only slots that acted count."""
        self.sums = self.sums * self.gamma + reward
        for x in self.sums[acted]:
            self.count += 1
            delta = x - self.mean
            self.mean += delta / self.count
            self.squares += delta * (x - self.mean)
        self.sums[ended | ~acted] = 0.0

    def state(self) -> list[float]:
        """Plain data: what `load` takes. Discounted sums of lives under way are left out."""
        return [float(x) for x in (self.count, self.mean, self.squares)]

    def load(self, state: list[float]) -> None:
        self.count, self.mean, self.squares = state

    @property
    def value(self) -> float:
        """What to divide by."""
        return max(float(np.sqrt(self.squares / self.count)), 1e-6)


class Trailing(NamedTuple):
    """The mean return of the last episodes, and its standard error."""

    mean: float
    error: float

    def clearly_above(self, other: Trailing) -> bool:
        """Whether it is higher by more than luck explains: two standard errors."""
        return self.mean - other.mean > 2 * float(np.hypot(self.error, other.error))


def trailing_of(returns: list[np.ndarray]) -> Trailing | None:
    """Of the last `TRAILING` episodes' returns [N]; None as long as there are fewer."""
    if len(returns) < TRAILING:
        return None
    means = np.mean(returns[-TRAILING:], axis=1)
    return Trailing(float(means.mean()), float(means.std() / TRAILING**0.5))


class Learned(NamedTuple):
    """What PPO leaves.

    Attributes:
        policy: the last one, or an earlier one whose trailing return was clearly higher.
        scale: of rewards at the end; values are in its units.
        played: PLAYED [T, S, ...] of the last ticks.
        numbers: of the training.
    """

    policy: Policy
    scale: float
    played: dict[str, Tensor]
    numbers: dict[str, float]


class Player:
    """D acts in lanes, through the frozen perception, and fills a rollout."""

    def __init__(
        self, lanes: Lanes, perceive: Perceive, policy: Policy, hidden: int, seed: int, gamma: float
    ) -> None:
        self.lanes, self.perceive, self.policy, self.hidden = lanes, perceive, policy, hidden
        self.generator = torch.Generator().manual_seed(seed)
        slots = len(lanes.now.alive)
        self.belief = torch.zeros(slots, hidden)
        self.before = torch.zeros(slots, dtype=torch.int64)
        self.scale = RewardScale(slots, gamma)

    def sense(self) -> tuple[Tensor, Tensor]:
        """Features and beliefs of what is seen now."""
        now = self.lanes.now
        first = torch.from_numpy(now.first)
        belief = torch.where(first.unsqueeze(-1), 0.0, self.belief)
        before = torch.where(first, 0, self.before)
        fields = [torch.from_numpy(now.fields[f.name]) for f in self.lanes.shape.fields]
        features, belief = self.perceive(*fields, before, belief)
        return features, belief

    @torch.no_grad()
    def play(self, buffer: RolloutBuffer) -> None:
        """Fill the buffer. What comes next is, of a row that ended, the last thing that it saw."""
        features, belief = self.sense()
        logits, value = self.policy(features, belief)
        while not buffer.full:
            now = self.lanes.now
            mask, alive = torch.from_numpy(now.mask), torch.from_numpy(now.alive)
            mask = mask | ~alive.unsqueeze(-1)
            logits = masked_logits(logits, mask)
            action = torch.multinomial(logits.softmax(-1), 1, generator=self.generator).squeeze(-1)
            row = self.lanes.step(action.numpy())
            record = {
                "features": features, "belief": belief, "mask": mask, "alive": alive,
                "action": action, "log_prob": log_prob_of(logits, action), "value": value,
            }  # fmt: skip
            self.scale.add(row.reward, row.terminated | row.truncated, row.acted)
            self.belief, self.before = belief, action + 1
            features, belief = self.sense()
            logits, value = self.policy(features, belief)
            buffer.add(
                record
                | self._following(row, features, belief, value)
                | {
                    "reward": torch.from_numpy(row.reward).float(),
                    "terminated": torch.from_numpy(row.terminated),
                    "truncated": torch.from_numpy(row.truncated),
                }
            )

    def _following(
        self, row: Row, features: Tensor, belief: Tensor, value: Tensor
    ) -> dict[str, Tensor]:
        """Features, belief and value [S] after a step and before any reset."""
        after = {"next_features": features, "next_belief": belief, "next_value": value}
        ended = torch.from_numpy(row.terminated | row.truncated)
        if not ended.any():
            return after
        fields = fields_of(self.lanes.shape, {k: torch.from_numpy(x) for k, x in row.last.items()})
        last = self.perceive(*fields, self.before, self.belief)
        values = self.policy(*last)[1]
        return {
            name: torch.where(ended.view(-1, *[1] * (x.ndim - 1)), y, x)
            for (name, x), y in zip(after.items(), (*last, values), strict=True)
        }


class Loss:
    """PPO's loss of a minibatch."""

    def __init__(self, policy: Policy, params: PolicyParams) -> None:
        self.policy, self.params = policy, params

    def __call__(self, batch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        logits, value = self.policy(batch["features"], batch["belief"])
        logits = masked_logits(logits, batch["mask"])
        weight = batch["alive"].float()
        improve, told = ppo_policy_loss(
            log_prob_of(logits, batch["action"]), batch["log_prob"],
            normalised(batch["advantage"], weight), weight, self.params.clip,
        )  # fmt: skip
        spread = weighted_mean(entropy_of(logits), weight)
        fit = weighted_mean((value - batch["target"]).square(), weight)
        loss = improve + 0.5 * fit - self.params.entropy * spread
        return loss, {
            "approx_kl": told["approx_kl"], "clip_fraction": told["clip_fraction"],
            "entropy": spread.detach(), "value_loss": fit.detach(),
        }  # fmt: skip


def normalised(advantages: Tensor, weight: Tensor) -> Tensor:
    """Zero mean and at most unit deviation over the rows that count.

    What deviates by less than `LEAST`, in units of the returns' own deviation, stays small: before
    a sparse world has paid anything, advantages are the critic's noise, and made large they would
    wear down the odds of all actions but a few.
    """
    mean = weighted_mean(advantages, weight)
    deviation = weighted_mean((advantages - mean).square(), weight).sqrt()
    return (advantages - mean) / deviation.clamp_min(LEAST)


def with_advantages(rollout: TensorDict, scale: float, gamma: float, lam: float) -> None:
    """Add advantages and targets [T, S], of rewards divided by `scale` and cut off at `LARGEST`.

    A terminated life is worth nothing more; a truncated one what its last observation promises.
    """
    ended = rollout["terminated"] | rollout["truncated"]
    advantage, target = gae(
        (rollout["reward"] / scale).clamp(-LARGEST, LARGEST), rollout["value"],
        rollout["next_value"], rollout["terminated"], ended, gamma, lam, rollout["alive"],
    )  # fmt: skip
    rollout["advantage"], rollout["target"] = advantage, target


def train_policy(
    lanes: Lanes,
    perceive: Perceive,
    sizes: tuple[int, int],
    params: PolicyParams,
    seed: int,
    checkpoint: Path,
    log: Log,
) -> Learned:
    """PPO in `lanes`. A training that was interrupted goes on with the weights that it had, in
    episodes that begin anew.

    Args:
        sizes: widths of features and belief.
    """
    torch.manual_seed(seed)
    policy = Policy(*sizes, lanes.shape.num_actions, params.hidden)
    player = Player(lanes, perceive, policy, sizes[1], seed, params.gamma)
    update = Update(
        Loss(policy, params), policy.parameters(), learning_rate=params.learning_rate,
        max_grad_norm=0.5,
    )  # fmt: skip
    buffer, count = RolloutBuffer(params.rollout), len(lanes.worlds)
    updates = max(1, params.ticks // (params.rollout * count))
    rows = params.rollout * len(lanes.now.alive)
    shuffles = torch.Generator().manual_seed(seed)
    kept: deque[TensorDict] = deque(maxlen=max(1, params.kept_ticks // (params.rollout * count)))
    best, best_trailing, taken, trailing = deepcopy(policy), Trailing(-np.inf, 0.0), 0, None
    saved = Checkpoint(
        checkpoint,
        {
            "policy": policy, "best": best, "update": update, "actions": player.generator,
            "shuffles": shuffles,
        },
    )  # fmt: skip
    start, extra = saved.load()
    if start:
        lanes.go_on(extra["lanes"])
        player.scale.load(extra["scale"])
        best_trailing, taken = Trailing(*extra["best_trailing"]), extra["taken"]
        kept.extend(TensorDict(part, batch_size=part["alive"].shape) for part in extra["kept"])
        trailing = trailing_of(lanes.returns)
    for step in log.steps(updates, start):
        update.set_learning_rate(params.learning_rate * (1 - step / updates))
        buffer.reset()
        player.play(buffer)
        assert buffer.data is not None
        kept.append(buffer.data.select(*PLAYED).clone())
        trailing = trailing_of(lanes.returns)
        if trailing is not None and trailing.mean >= best_trailing.mean:
            best.load_state_dict(policy.state_dict())
            best_trailing, taken = trailing, step
        with_advantages(buffer.data, player.scale.value, params.gamma, params.lam)
        told: dict[str, Tensor] = {}
        for _ in range(params.epochs):
            divergence = []
            for part in buffer.minibatches(max(1, rows // params.minibatch), shuffles):
                told = update(part)
                divergence.append(told["approx_kl"])
            if torch.stack(divergence).mean() > params.max_kl:
                break
        mean = torch.tensor(trailing.mean if trailing else float("nan"))
        log.record(step, {"trailing_return": mean, **told})
        if time.monotonic() - saved.last >= saved.interval:  # what is kept takes time to gather
            saved.save(step + 1, {
                "lanes": lanes.state(), "scale": player.scale.state(), "taken": taken,
                "best_trailing": [float(x) for x in best_trailing],
                "kept": [part.to_dict() for part in kept],
            })  # fmt: skip
    if trailing is None or not best_trailing.clearly_above(trailing):
        best, best_trailing, taken = policy, trailing or Trailing(float("nan"), 0.0), updates
    numbers = {
        "trailing_return": best_trailing.mean, "taken_update": taken, "updates": updates,
        "ticks": updates * params.rollout * count, "episodes": len(lanes.returns),
        "reward_scale": player.scale.value,
    }  # fmt: skip
    return Learned(best.eval(), player.scale.value, _joined(kept), numbers)


def _joined(kept: deque[TensorDict]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in kept]) for name in PLAYED}
