"""The town in a mirror: what is learned on one side of a map holds on the other.

A town has no east and no north: on a mirrored map the same life takes mirrored steps. So each tick
of experience can be learned from as any of four, drawn anew for every agent and tick, and fewer
ticks say as much (augmentation by symmetries, as in Silver et al. 2016). Swapping x and y as well
would not do: who goes to a place goes sideways first.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

from pipeline.learning import distributed
from pipeline.modules.contracts import LOOK, STEPS, TownShape

MIRRORS = torch.tensor([[1.0, 1.0], [-1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]])
"""What x and y are multiplied by."""


def mirrored_actions(shape: TownShape) -> Tensor:
    """int64 [4, A]: the action that is each action in each of MIRRORS."""
    names = {step: name for name, step in STEPS.items()}

    def seen(name: str, x: float, y: float) -> str:
        if name not in STEPS:
            return name
        step = STEPS[name]
        return names[step[0] * x, step[1] * y]

    index = {name: number for number, name in enumerate(shape.action_names)}
    return torch.tensor(
        [[index[seen(name, *mirror)] for name in shape.action_names] for mirror in MIRRORS.tolist()]
    )


def mirrored(
    data: TensorDict, shape: TownShape, rng: torch.Generator, goals_are_actions: bool = False
) -> dict[str, Tensor]:
    """What changes of experience [T, S] when every row is seen in a mirror, one of MIRRORS.

    Rows are mirrored alike however many ranks hold them. The latent of beliefs cannot be mirrored
    and stays; module D does not look at it.
    """
    ticks, slots = data.batch_size
    drawn = torch.randint(len(MIRRORS), (ticks, slots * distributed.ranks()), generator=rng)
    drawn = distributed.part(drawn, 1)
    mirror = MIRRORS[drawn]

    mean, known = data["f_mean"].clone(), data["f_known_state"].clone()
    # The way to each place, then the way to where to look, in map sizes.
    ways = mean[..., : 2 * shape.num_affordances + LOOK - 1]
    ways *= mirror.repeat(1, 1, shape.num_affordances + 1)
    here = [shape.self_names.index(name) for name in "xy"]
    known[..., here] = 0.5 + (known[..., here] - 0.5) * mirror
    actions = mirrored_actions(shape)
    moved = torch.cat([torch.zeros_like(actions[:, :1]), actions + 1], 1)  # 0: not yet
    changed = {
        "f_mean": mean,
        "f_known_state": known,
        "f_moved": moved[drawn, data["f_moved"]],
        "expert_action": actions[drawn, data["expert_action"]],
    }
    if goals_are_actions:
        goals = torch.arange(shape.num_goals + 1).repeat(len(MIRRORS), 1)
        goals[:, : shape.num_actions] = actions
        changed |= {name: goals[drawn, data[name]] for name in ("f_pursued", "expert_goal")}
    return changed
