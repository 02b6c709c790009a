"""Our own PPO without the stages, for `benchmarks.own_worlds`: what is staging itself worth?

Three take the place of module A, which learns by itself and is frozen before D learns: nothing (D
sees only what is observed now), the last observations side by side, and the same network as A, but
trained end to end by PPO's loss alone, through time. All else is D's: its network, its parameters,
its ticks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from hamlet.learning.buffer import RolloutBuffer
from hamlet.learning.update import Update
from hamlet.modules.categorical import masked_logits
from hamlet.own.data import Perceive
from hamlet.own.params import PerceptionParams, PolicyParams
from hamlet.own.train_policy import (
    Loss,
    Player,
    Trailing,
    trailing_of,
    train_policy,
    with_advantages,
)
from hamlet.plain.perception import Perception
from hamlet.plain.policy import Policy
from hamlet.plain.senses import Senses
from hamlet.worlds.lanes import Lanes, Now

FRAMES = 4  # observations side by side
PARTS = 4  # minibatches of a rollout where it is learned from through time, as D has of one world


class Quiet:
    """A `Log` that keeps nothing."""

    def steps(self, total: int, start: int) -> Iterable[int]:
        return range(start, total)

    def record(self, step: int, metrics: dict[str, Tensor]) -> None:
        pass


class Remembering:
    """A policy and what it perceives through, as a player of `own.evaluating.play_cases`.

    Args:
        hidden: width of the belief.
    """

    def __init__(self, senses: Senses, perceive: Perceive, policy: Policy, hidden: int) -> None:
        self.senses, self.perceive, self.policy, self.hidden = senses, perceive, policy, hidden
        self.generator = torch.Generator().manual_seed(0)
        self.belief, self.before = torch.zeros(0, hidden), torch.zeros(0, dtype=torch.int64)

    @torch.no_grad()
    def act(self, now: Now, cases: np.ndarray) -> np.ndarray:
        """int64 [S] actions, drawn from their odds."""
        if not len(self.before):
            self.belief = torch.zeros(len(cases), self.hidden)
            self.before = torch.zeros(len(cases), dtype=torch.int64)
        first = torch.from_numpy(now.first)
        belief = torch.where(first.unsqueeze(-1), 0.0, self.belief)
        before = torch.where(first, 0, self.before)
        fields = [torch.from_numpy(now.fields[f.name]) for f in self.senses.fields]
        features, self.belief = self.perceive(*fields, before, belief)
        mask = torch.from_numpy(now.mask | ~now.alive[:, None])
        odds = masked_logits(self.policy(features, self.belief)[0], mask).softmax(-1)
        action = torch.multinomial(odds, 1, generator=self.generator).squeeze(-1)
        self.before = action + 1
        return action.numpy()


def seen_now(senses: Senses) -> Perceive:
    """Only what is observed now; the belief is empty."""

    def perceive(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        *fields, _, belief = inputs
        return senses(*fields), belief

    return perceive


def seen_lately(senses: Senses) -> Perceive:
    """The last `FRAMES` observations as the belief, the newest last; zeros before a life began."""

    def perceive(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        *fields, _, belief = inputs
        seen = senses(*fields)
        return seen[:, :0], torch.cat([belief[:, senses.width :], seen], -1)

    return perceive


def train_alone(
    stacked: bool, side: Lanes, senses: Senses, params: PolicyParams, seed: int
) -> tuple[Callable[[], Remembering], int]:
    """D without A; what makes its player, and the ticks that it took."""
    sizes = (0, FRAMES * senses.width) if stacked else (senses.width, 0)
    perceive = (seen_lately if stacked else seen_now)(senses)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "checkpoint.pt"
        learned = train_policy(side, perceive, sizes, params, seed, file, Quiet())
    ticks = int(learned.numbers["ticks"])
    return lambda: Remembering(senses, perceive, learned.policy, sizes[1]), ticks


class Recording(Player):
    """A player that also keeps what its memory began every tick with."""

    def sense(self) -> tuple[Tensor, Tensor]:
        first = torch.from_numpy(self.lanes.now.first.copy())
        self.began.append(
            {"first": first, "before": torch.where(first, 0, self.before), "was": self.belief}
        )
        return super().sense()

    def play(self, buffer: RolloutBuffer) -> None:
        """As of every player; adds first bool, before int64 and was [T, S, ...]."""
        self.began: list[dict[str, Tensor]] = []
        super().play(buffer)
        assert buffer.data is not None
        for name in self.began[0]:
            # The last one is of the tick after the rollout.
            buffer.data[name] = torch.stack([x[name] for x in self.began[:-1]])


class LossThroughTime:
    """PPO's loss of whole rollouts of some slots, its gradient going back to their first tick."""

    def __init__(self, perception: Perception, policy: Policy, params: PolicyParams) -> None:
        self.perception, self.of_rows = perception, Loss(policy, params)

    def beliefs(self, batch: TensorDict) -> Tensor:
        """float32 [T, S, H] as the weights of now have them."""
        encoded, belief, found = self.perception.body(batch["features"]), batch["was"][0], []
        for tick in range(len(encoded)):
            belief = torch.where(batch["first"][tick].unsqueeze(-1), 0.0, belief)
            belief = self.perception.remember(encoded[tick], batch["before"][tick], belief)
            found.append(belief)
        return torch.stack(found)

    def __call__(self, batch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        rows = batch.exclude("was").clone(recurse=False)
        rows["belief"] = self.beliefs(batch)
        return self.of_rows(rows.flatten(0, 1))


def train_end_to_end(
    side: Lanes, senses: Senses, statistics: dict, params: PolicyParams, seed: int
) -> tuple[Callable[[], Remembering], int]:
    """A's network and D's as one, by PPO; what makes its player, and the ticks that it took.

    Args:
        side: worlds without pictures. statistics: by which `senses` scales.
    """
    torch.manual_seed(seed)
    shape, hidden = side.shape, PerceptionParams().hidden
    perception = Perception(shape, statistics, hidden)
    policy = Policy(senses.width, hidden, shape.num_actions, params.hidden)
    both = nn.ModuleList([perception, policy])
    player = Recording(side, perception, policy, hidden, seed, params.gamma)
    loss = LossThroughTime(perception, policy, params)
    update = Update(loss, both.parameters(), learning_rate=params.learning_rate, max_grad_norm=0.5)
    buffer, shuffles = RolloutBuffer(params.rollout), torch.Generator().manual_seed(seed)
    count = len(side.worlds)
    updates = max(1, params.ticks // (params.rollout * count))
    best, best_trailing, trailing = deepcopy(both), Trailing(-np.inf, 0.0), None
    for step in range(updates):
        update.set_learning_rate(params.learning_rate * (1 - step / updates))
        buffer.reset()
        player.play(buffer)
        assert buffer.data is not None
        trailing = trailing_of(side.returns)
        if trailing is not None and trailing.mean >= best_trailing.mean:
            best.load_state_dict(both.state_dict())
            best_trailing = trailing
        with_advantages(buffer.data, player.scale.value, params.gamma, params.lam)
        for _ in range(params.epochs):
            order = torch.randperm(buffer.data.shape[1], generator=shuffles)
            parts = [buffer.data[:, slots] for slots in order.tensor_split(PARTS)]
            divergence = torch.stack([update(part)["approx_kl"] for part in parts])
            if divergence.mean() > params.max_kl:
                break
    if trailing is None or not best_trailing.clearly_above(trailing):
        best = both
    learned, decided = best.eval()
    assert isinstance(learned, Perception)
    assert isinstance(decided, Policy)
    ticks = updates * params.rollout * count
    return lambda: Remembering(senses, learned, decided, hidden), ticks
