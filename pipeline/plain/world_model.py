"""Module B: an ensemble that tells what an action leads to."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Member(nn.Module):
    """[features, belief] and an action -> what changes, reward, continuation and value."""

    def __init__(self, known: int, actions: int, hidden: int) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(known + actions, hidden), nn.SiLU(),
            nn.Linear(hidden, hidden), nn.SiLU(),
            nn.Linear(hidden, known + 3),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)


class WorldModel(nn.Module):
    """E members.

    Args:
        known: width K of [features, belief].
        spread: float32 [K] deviation of what changes; members tell changes in its units.
        reward: mean and deviation of the rewards; value: of the returns.
    """

    spread: Tensor
    reward: Tensor
    value: Tensor

    def __init__(
        self, known: int, actions: int, hidden: int, members: int,
        spread: Tensor, reward: Tensor, value: Tensor,
    ) -> None:  # fmt: skip
        super().__init__()
        self.known, self.actions = known, actions
        self.members = nn.ModuleList(Member(known, actions, hidden) for _ in range(members))
        for name, x in (("spread", spread), ("reward", reward), ("value", value)):
            self.register_buffer(name, x)

    def told(self, features: Tensor, belief: Tensor, action: Tensor) -> Tensor:
        """float32 [E, R, K + 3]: change, reward, logit of going on, value, all in units."""
        done = F.one_hot(action, self.actions).float()
        x = torch.cat([features, belief, done], -1)
        return torch.stack([member(x) for member in self.members])

    def forward(self, features: Tensor, belief: Tensor) -> tuple[Tensor, ...]:
        """What every action A would lead to.

        Returns:
            reward [B, A], going_on [B, A] the chance that life goes on, value [B, A] the discounted
            return from here as the recorded players played on, uncertainty [B, A] the members'
            disagreement about what changes, in deviations. float32.
        """
        rows, count = features.shape[0], self.actions
        actions = torch.arange(count, device=features.device).repeat(rows)
        told = self.told(
            features.repeat_interleave(count, 0), belief.repeat_interleave(count, 0), actions
        ).unflatten(1, (rows, count))
        mean = told.mean(0)
        reward = mean[..., -3] * self.reward[1] + self.reward[0]
        value = mean[..., -1] * self.value[1] + self.value[0]
        spread = (told[..., : self.known] - mean[..., : self.known]).square().mean(0)
        return reward, mean[..., -2].sigmoid(), value, spread.mean(-1).sqrt()
