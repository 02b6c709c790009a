"""Module C: what the others will do next, from an agent's own belief."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hamlet.plain.senses import dense


class Social(nn.Module):
    """[features, belief] -> logits float32 [B, M, A] of the next action of each of the M others, in
    the order of their slots."""

    def __init__(self, features: int, hidden: int, others: int, actions: int, width: int) -> None:
        super().__init__()
        self.others, self.actions = others, actions
        self.network = dense(features + hidden, width, others * actions)

    def forward(self, features: Tensor, belief: Tensor) -> Tensor:
        out = self.network(torch.cat([features, belief], -1))
        return out.unflatten(-1, (self.others, self.actions))


class Odds(nn.Module):
    """What is frozen: chances float32 [B, M, A] instead of logits."""

    def __init__(self, social: Social) -> None:
        super().__init__()
        self.social = social

    def forward(self, features: Tensor, belief: Tensor) -> tuple[Tensor]:
        return (self.social(features, belief).softmax(-1),)
