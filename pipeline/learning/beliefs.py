"""Run the frozen perception over recorded experience, once, so that later stages read features."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from tensordict import TensorDict
from torch import Tensor


@torch.no_grad()
def believe(
    perceive: Callable[..., Sequence[Tensor]], recurrent_dim: int, data: TensorDict
) -> TensorDict:
    """TensorDict [T, B, N] with `mean` and `log_std` [T, B, N, D], float32.

    Args:
        perceive: the frozen graph of module A.
        recurrent_dim: R, from its card.
        data: recorded worlds [T, B]; `first` says where a life begins.
    """
    ticks, worlds = data.shape
    agents = data["action"].shape[2]
    state = torch.zeros(worlds * agents, recurrent_dim, device=data["action"].device)
    means, log_stds = [], []
    fields = ("view", "occupancy", "self_state", "cues", "visible", "others_offset")
    for t in range(ticks):
        now = data[t]
        going = ~now["first"].repeat_interleave(agents)
        mean, log_std, _, _, state = perceive(
            *(now[name].flatten(0, 1) for name in fields), state * going.unsqueeze(-1)
        )
        means.append(mean)
        log_stds.append(log_std)
    shape = (worlds, agents)
    return TensorDict(
        {
            "mean": torch.stack(means).unflatten(1, shape),
            "log_std": torch.stack(log_stds).unflatten(1, shape),
        },
        batch_size=[ticks, worlds, agents],
    )
