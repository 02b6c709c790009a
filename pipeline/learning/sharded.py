"""Weights that ranks share: each holds a part, and all of a layer only while it computes (FSDP2).

For a model larger than one GPU (Zhao et al. 2023). What is saved is whole: a file says nothing of
how many ranks there were.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from hamlet.learning import distributed

M = TypeVar("M", bound=nn.Module)


def shard(model: M, layers: Iterable[nn.Module], method: str, device: torch.device) -> M:
    """Let the ranks share the weights of a whole model of the CPU, in place.

    Args:
        layers: of the model, each gathered by itself; what is left is gathered as one.
        method: of the model, the one that a training calls.
        device: of this rank.
    """
    mesh = init_device_mesh(device.type, (distributed.ranks(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    module: Any
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)  # summed over the ranks, as all gradients are
            module.set_force_sum_reduction_for_comms(True)
    register_fsdp_forward_method(model, method)
    return model


def is_shared(parameters: Iterable[Tensor]) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in parameters)


def whole(value: Any) -> Any:
    """The same with whole tensors in place of parts. All ranks call it, with the same structure."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, Mapping) and is_shared(leaves(value)):
        return {name: whole(each) for name, each in value.items()}
    return value


def leaves(value: Any) -> Iterable[Any]:
    """What is in a mapping of mappings."""
    if isinstance(value, Mapping):
        for each in value.values():
            yield from leaves(each)
    else:
        yield value


def part_of(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor, as `like` has its own; or the tensor itself."""
    if not isinstance(like, DTensor) or tensor.shape != like.shape:
        return tensor
    there = tensor.to(like.device)
    return distribute_tensor(there, like.device_mesh, like.placements, src_data_rank=None)


class Shared:
    """A model whose weights are shared, as a part of a checkpoint."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return whole(self.model.state_dict())

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        own = self.model.state_dict()
        self.model.load_state_dict({name: part_of(x, own[name]) for name, x in state.items()})
