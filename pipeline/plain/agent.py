"""One tick of the whole agent: the four frozen modules in one graph, state in and out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hamlet.modules.categorical import masked_logits
from hamlet.worlds.contract import MASK, WorldShape

MULTIPLIER, MODULUS = 48271, 2**31 - 1
STATES = ("state_belief", "state_acted", "state_rng")
Graph = Callable[..., tuple[Tensor, ...]]


def draw(rng: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Gumbel noise float32 [B, count] and the next state int64 [B] of Lehmer's generator.

    Park and Miller 1988, minimal standard form: its integers are exact in every runtime.
    """
    multipliers = [pow(MULTIPLIER, k, MODULUS) for k in range(1, count + 1)]
    numbers = ((rng + 1).unsqueeze(-1) * rng.new_tensor(multipliers)) % MODULUS
    uniform = (numbers.double() / MODULUS).clamp(1e-6, 1 - 1e-6)
    return (-(-uniform.log()).log()).float(), numbers[..., -1] % (MODULUS - 1)


class PlainAgent(nn.Module):
    """Fields, `action_mask` where the world has one, and the state -> action, new state, thoughts.

    Args:
        social: None in a world of one agent.
        value_scale: of the policy's value, to the world's rewards.
    """

    def __init__(
        self, shape: WorldShape, perception: Graph, world_model: Graph, policy: Graph,
        social: Graph | None, value_scale: float,
    ) -> None:  # fmt: skip
        super().__init__()
        self.shape, self.value_scale = shape, value_scale
        self.perception, self.world_model, self.policy = perception, world_model, policy
        self.social = social

    @property
    def inputs(self) -> list[str]:
        """Names of what `forward` takes."""
        mask = [MASK] if self.shape.masked else []
        return [*(f.name for f in self.shape.fields), *mask, *STATES]

    @property
    def outputs(self) -> list[str]:
        """Names of what `forward` gives."""
        others = ["next_action_of_others"] if self.social is not None else []
        return [
            "action", "next_belief", "next_acted", "next_rng", "action_logits", "value",
            "imagined_reward", "imagined_going_on", "imagined_value", "imagined_uncertainty",
            *others,
        ]  # fmt: skip

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """One tick.

        Returns:
            action int64 [B], drawn from its odds by the state's own random numbers; the new belief,
            1 + action and random state; logits [B, A], of illegal actions -3.4e38; value [B]; what
            B imagines of each action [B, A] (see `WorldModel`); and C's chances [B, M, A].
        """
        *seen, belief, acted, rng = inputs
        mask = seen.pop() if self.shape.masked else None
        features, belief = self.perception(*seen, acted, belief)
        logits, value = self.policy(features, belief)
        if mask is not None:
            logits = masked_logits(logits, mask)
        noise, rng = draw(rng, self.shape.num_actions)
        action = (logits + noise).argmax(-1)
        imagined = self.world_model(features, belief)
        others = self.social(features, belief) if self.social is not None else ()
        return (
            action, belief, action + 1, rng, logits, value * self.value_scale, *imagined, *others,
        )  # fmt: skip


def example_inputs(
    shape: WorldShape, hidden: int, batch: int, rng: torch.Generator
) -> list[Tensor]:
    """Random legal inputs of a tick: fields, mask if any, and a state of some life."""
    tensors: list[Tensor] = []
    for field in shape.fields:
        size = (batch, *field.shape)
        if field.kind == "codes":
            assert field.count is not None
            tensors.append(torch.randint(field.count, size, generator=rng))
        elif field.dtype == "uint8":
            tensors.append(torch.randint(256, size, generator=rng).to(torch.uint8))
        else:
            tensors.append(torch.randn(size, generator=rng))
    if shape.masked:
        mask = torch.rand(batch, shape.num_actions, generator=rng) > 0.5
        mask[:, 0] = True
        tensors.append(mask)
    return [
        *tensors,
        torch.zeros(batch, hidden),
        torch.zeros(batch, dtype=torch.int64),
        torch.randint(2**31 - 2, (batch,), generator=rng),
    ]
