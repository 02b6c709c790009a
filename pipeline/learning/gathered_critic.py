"""The critic's features where the agents of one world live on several ranks."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict
from torch import Tensor

from hamlet.learning.distributed import all_gather, local_shard
from hamlet.modules.contracts import TownShape
from hamlet.modules.critic import privileged_features

OF_AGENTS = ("meters", "position", "alive", "last_affordance", "progress")


def gathered_features(town: Any, shape: TownShape, state: TensorDict) -> Tensor:
    """float32 [B, N / ranks, P] `privileged_features` where agents of one world live on many ranks.

    Ranks tell each other the true state of their agents. The gradient of that state comes back
    summed over the ranks, so each must take the loss of its own agents only (`all_gather`).

    Args:
        state: of the world [B], but of the agents only this rank's: fields OF_AGENTS are
            [B, N / ranks, ...], those of rank k being the k-th of the N agents.
    """
    everyone = {name: all_gather(state[name], 1) for name in OF_AGENTS}
    known = TensorDict({**dict(state.items()), **everyone}, batch_size=state.batch_size)
    return local_shard(privileged_features(town, shape, known), 1)
