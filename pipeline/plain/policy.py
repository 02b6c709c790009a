"""Module D: what to do, without a memory of its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Policy(nn.Module):
    """[features, belief] -> logits float32 [B, A] and value float32 [B], in units of `scale`."""

    def __init__(self, features: int, belief: int, actions: int, width: int) -> None:
        super().__init__()

        def body(out: int, gain: float) -> nn.Sequential:
            layers = nn.Sequential(
                nn.Linear(features + belief, width), nn.Tanh(),
                nn.Linear(width, width), nn.Tanh(),
                nn.Linear(width, out),
            )  # fmt: skip
            for layer, size in zip((layers[0], layers[2], layers[4]), (2**0.5, 2**0.5, gain)):
                assert isinstance(layer, nn.Linear)
                nn.init.orthogonal_(layer.weight, size)
                nn.init.zeros_(layer.bias)
            return layers

        self.actor, self.critic = body(actions, 0.01), body(1, 1.0)

    def forward(self, features: Tensor, belief: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.cat([features, belief], -1)
        return self.actor(x), self.critic(x).squeeze(-1)
