"""Small operations on tensors that the rules of the town are written in."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import TensorDict
from torch import Tensor

from hamlet.town.schema import Condition


def compare(value: Tensor, op: str, bound: float) -> Tensor:
    """Elementwise comparison named by its operator."""
    if op == "<":
        return value < bound
    if op == "<=":
        return value <= bound
    return value > bound if op == ">" else value >= bound


def holds(test: Condition, meters: list[Tensor], index: Mapping[str, int]) -> Tensor:
    """Where a condition is true of the meters; `index` is the number of each by name."""
    return compare(meters[index[test.meter]], test.op, test.value)


def clamp01(value: Tensor) -> Tensor:
    return value.clamp(0.0, 1.0)


def unfold(bits: Tensor, each: Tensor) -> Tensor:
    """int32: the bits of `bits` one by one, along the dimension of `each`."""
    return (bits >> each) & 1


def together(parts: list[Tensor]) -> Tensor:
    """Tensors of one shape and type side by side in one piece of memory: [len(parts), ...].

    A compiled loop over all agents ends where something is written to memory, and what is not
    written is computed anew by every later loop that needs it. This writes: integers and floats,
    never bools, whose loads do not vectorise.
    """
    return torch.cat(parts).view(len(parts), *parts[0].shape)


def agent_major(state: TensorDict) -> dict[str, Tensor]:
    """The fields of a state as they lie in memory: [..., N, B] instead of [B, N, ...]."""
    return {name: value.permute(*reversed(range(value.ndim))) for name, value in state.items()}


def batch_major(fields: dict[str, Tensor]) -> TensorDict:
    """The state of such fields: a TensorDict of batch [B], nothing copied."""
    shown = {name: value.permute(*reversed(range(value.ndim))) for name, value in fields.items()}
    return TensorDict(shown, batch_size=[fields["tick"].shape[0]])
