"""Module A: from what is observed and done to a belief, and what it must be able to tell of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hamlet.plain.senses import Pictures, Senses, dense
from hamlet.worlds.contract import WorldShape


class Perception(nn.Module):
    """One tick: fields, the previous action and the belief so far -> features and a new belief.

    Args:
        statistics: as of `Senses`.
        hidden: width H of the belief.
    """

    def __init__(
        self,
        shape: WorldShape,
        statistics: dict[str, dict[str, Tensor]],
        hidden: int,
        encoder: int = 128,
    ) -> None:
        super().__init__()
        self.senses = Senses(shape, statistics)
        self.pictures = Pictures(shape, statistics)
        self.actions, self.hidden = shape.num_actions, hidden
        self.body = nn.Sequential(
            nn.Linear(self.senses.width + self.pictures.width, encoder), nn.SiLU()
        )
        self.cell = nn.GRUCell(encoder + self.actions, hidden)

    def encode(self, fields: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Features [B, F] and what the memory takes in [B, E]."""
        features = self.senses(*fields)
        return features, self.body(torch.cat([features, *self.pictures(fields)], -1))

    def remember(self, encoded: Tensor, before: Tensor, belief: Tensor) -> Tensor:
        """The new belief [B, H].

        Args:
            before: int64 [B] 1 + the previous action, 0 where a life begins.
        """
        done = F.one_hot(before, self.actions + 1)[:, 1:].float()
        return self.cell(torch.cat([encoded, done], -1), belief)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Fields [B, ...], 1 + previous action int64 [B], belief [B, H] -> features, belief."""
        *fields, before, belief = inputs
        features, encoded = self.encode(fields)
        return features, self.remember(encoded, before, belief)


class Told(NamedTuple):
    """What follows, as told from a belief and an action."""

    change: Tensor
    """float32 [R, F] of the features."""
    reward: Tensor
    """float32 [R] in units of the rewards' deviation."""
    going_on: Tensor
    """float32 [R] logit that the life does not terminate."""


class Heads(nn.Module):
    """What a belief must be good for; used in training only.

    `recall` asks for what was observed at an earlier tick of this life. Without it a belief keeps
    what helps to tell the next tick and loses what pays later.
    """

    def __init__(self, features: int, hidden: int, actions: int) -> None:
        super().__init__()
        self.actions, self.features = actions, features
        self.following = dense(hidden + features + actions, 128, features + 2)
        self.recalled = dense(hidden + 5, 128, features)

    def forward(self, belief: Tensor, features: Tensor, action: Tensor) -> Told:
        """Of beliefs [R, H], features [R, F] and actions int64 [R]."""
        done = F.one_hot(action, self.actions).float()
        out = self.following(torch.cat([belief, features, done], -1))
        return Told(out[:, : self.features], out[:, -2], out[:, -1])

    def recall(self, belief: Tensor, age: Tensor, asked: Tensor) -> Tensor:
        """float32 [R, F]: features at tick `asked` int64 [R] of a life that is `age` ticks old."""
        lag = age - asked
        question = torch.stack(
            [
                asked / 50,
                lag / 50,
                asked.float().log1p(),
                lag.float().log1p(),
                (asked == 0).float(),
            ],
            -1,
        )
        return self.recalled(torch.cat([belief, question], -1))
