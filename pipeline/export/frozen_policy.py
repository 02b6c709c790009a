"""Module D as it is after training: the frozen graphs of its four questions, in one folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hamlet.export.frozen import load_frozen
from hamlet.modules.contracts import Features, TownShape

PARTS = ("prior", "ended", "weigh", "act")


class FrozenPolicy(nn.Module):
    """Module D from its frozen graphs, one for each of its four questions."""

    def __init__(
        self,
        prior: nn.Module,
        ended: nn.Module,
        weigh: nn.Module,
        act: nn.Module,
        num_meters: int,
        places: int,
        meta_period: int,
    ) -> None:
        super().__init__()
        self.prior, self.ended, self.weigh, self.act = prior, ended, weigh, act
        self.num_meters, self.places, self.meta_period = num_meters, places, meta_period

    def prior_logits(self, f: Features) -> Tensor:
        return self.prior(*f)[0]

    def goal_ended(self, known_state: Tensor, goal: Tensor, age: Tensor) -> Tensor:
        return self.ended(known_state, goal, age)[0]

    def goal_logits(
        self, prior: Tensor, candidates: Tensor, returns: Tensor, confidence: Tensor
    ) -> Tensor:
        return self.weigh(prior, candidates, returns, confidence)[0]

    def action_logits(self, f: Features, goal: Tensor) -> Tensor:
        return self.act(*f, goal)[0]


def load_policy(
    folder: Path, shape: TownShape, device: str | torch.device = "cpu"
) -> tuple[FrozenPolicy, dict[str, dict[str, Any]]]:
    """D on a device, from the frozen graphs in `folder`, and their cards by part."""
    loaded = {part: load_frozen(folder / f"{part}.pt2", shape.pack_hash, device) for part in PARTS}
    cards = {part: card for part, (_, card) in loaded.items()}
    graphs = {part: graph for part, (graph, _) in loaded.items()}
    card = cards["prior"]
    policy = FrozenPolicy(
        **graphs,
        num_meters=shape.num_meters,
        places=card["places"],
        meta_period=card["meta_period"],
    )
    return policy, cards
