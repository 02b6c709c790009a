"""Recorded experience: written with a card, read back, and seen through a frozen perception."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hamlet.artifacts import HamletError, atomic_path, check_card, how_to_make, write_card
from hamlet.export.frozen import Frozen, load_frozen
from hamlet.worlds.contract import WorldShape
from hamlet.worlds.lanes import Lanes

LAST = "last_"
Perceive = Callable[..., tuple[Tensor, ...]]


class Recorder:
    """Rows of lanes, time-major.

    Entries, each [T, S, ...]: the fields; `last_` + field, what was seen after the step and before
    any reset; mask; action int64; reward float32; terminated, truncated, alive, first bool.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, np.ndarray]] = []

    def step(self, lanes: Lanes, actions: np.ndarray) -> dict[str, np.ndarray]:
        """Let the lanes act and keep what happened; returns it."""
        now = lanes.now
        row = lanes.step(actions)
        kept = {
            **now.fields,
            **{LAST + name: x for name, x in row.last.items()},
            "mask": now.mask, "alive": row.acted, "first": now.first, "action": actions,
            "reward": row.reward.astype(np.float32), "terminated": row.terminated,
            "truncated": row.truncated,
        }  # fmt: skip
        self.rows.append(kept)
        return kept

    def data(self) -> dict[str, Tensor]:
        """All rows as tensors."""
        return {
            name: torch.from_numpy(np.stack([row[name] for row in self.rows]))
            for name in self.rows[0]
        }


def write_data(
    path: Path, data: Mapping[str, Tensor], world: str, upstream: Mapping[str, str]
) -> None:
    """Write tensors and their card. `world`: the hash of artifacts/world.json."""
    with atomic_path(path) as temporary:
        torch.save(dict(data), temporary)
    write_card(path, "experience", {}, upstream, world)


def read_data(path: Path, world: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `write_data` wrote, and its card.

    Raises:
        HamletError: it is missing, corrupt or of another world.
    """
    card = check_card(path)
    of_this_world(path, card, world)
    return torch.load(path, weights_only=True), card


def of_this_world(path: Path, card: Mapping[str, Any], world: str) -> None:
    """Refuse what was made in another world.

    Raises:
        HamletError: naming the file.
    """
    if card.get("pack") != world:
        raise HamletError(
            f"{path} was made in another world than artifacts/world.json describes",
            how_to_make(path),
        )


def loaded(path: Path, world: str) -> tuple[Frozen, dict[str, Any]]:
    """A frozen module of this world, and its card.

    Raises:
        HamletError: it is missing, corrupt or of another world.
    """
    graph, card = load_frozen(path)
    of_this_world(path, card, world)
    return graph, card


def fields_of(shape: WorldShape, data: Mapping[str, Tensor], last: bool = False) -> list[Tensor]:
    """The fields in the shape's order."""
    return [data[(LAST if last else "") + field.name] for field in shape.fields]


def before_of(action: Tensor, first: Tensor) -> Tensor:
    """int64 [T, S]: 1 + the action of the tick before, 0 where a life begins."""
    previous = torch.cat([torch.zeros_like(action[:1]), action[:-1] + 1])
    return torch.where(first, 0, previous)


class Believed(NamedTuple):
    """What a frozen perception makes of experience.

    Attributes:
        features, belief: float32 [T, S, .] when the action was chosen.
        next_features, next_belief: after it, and before any reset.
    """

    features: Tensor
    belief: Tensor
    next_features: Tensor
    next_belief: Tensor


@torch.no_grad()
def believe(
    perceive: Perceive, shape: WorldShape, data: Mapping[str, Tensor], hidden: int
) -> Believed:
    """Let the perception live through recorded experience [T, S]."""
    before = before_of(data["action"], data["first"])
    belief = torch.zeros(data["action"].shape[1], hidden)
    parts: list[list[Tensor]] = [[], [], [], []]
    now, last = fields_of(shape, data), fields_of(shape, data, last=True)
    for t in range(data["action"].shape[0]):
        belief = torch.where(data["first"][t].unsqueeze(-1), 0.0, belief)
        features, belief = perceive(*(x[t] for x in now), before[t], belief)
        after = perceive(*(x[t] for x in last), data["action"][t] + 1, belief)
        for part, x in zip(parts, (features, belief, *after), strict=True):
            part.append(x)
    return Believed(*(torch.stack(part) for part in parts))


def held_out(shape: WorldShape, slots: int) -> Tensor:
    """bool [S]: the last quarter of the lanes, all agents of each; at least one lane."""
    lanes = slots // shape.num_agents
    first = lanes - max(1, lanes // 4)
    return torch.arange(slots) // shape.num_agents >= first
