"""Module C as a member of a population: trained part by part, scored on held-out worlds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn import functional as F

from hamlet.artifacts import atomic_dir, read_json, write_json
from hamlet.learning.pbt import Turn, started
from hamlet.learning.precision import set_precision
from hamlet.learning.sequences import per_agent, sent
from hamlet.learning.train_social import predict, train_social
from hamlet.modules.contracts import TownShape
from hamlet.modules.social import Social
from hamlet.moving import moved
from hamlet.params import SocialParams


class Silent:
    """A trainer's log that nobody reads: the score tells how a member does."""

    def steps(self, total: int, start: int) -> Iterable[int]:
        return range(start, total)

    def record(self, step: int, metrics: dict[str, Tensor]) -> None:
        pass


@dataclass(frozen=True)
class SocialMember:
    """Trains module C through one turn; see `pbt.Train`.

    One thread, on whatever machine: so the same turn gives the same score.

    Attributes:
        data: the folder that `share` has made.
        folder: of the population.
        params: of the stage `social`; the turn's settings take the place of some.
        seed: members begin with seeds of their own, which follow from it.
        generations: into which the steps are divided.
        device: where they train.
    """

    data: Path
    folder: Path
    params: SocialParams
    seed: int
    generations: int
    device: str = "cpu"

    def __call__(self, turn: Turn) -> float:
        """Minus the loss in nats on the worlds to choose by; not finite if the training is lost."""
        data, worlds, _ = opened(self.data, self.device)
        model = self.train(turn)
        return -held_out_loss(model, data, worlds["choose"], self.params.chunk)

    def train(self, turn: Turn) -> Social:
        torch.set_num_threads(1)
        set_precision()
        data, worlds, shape = opened(self.data, self.device)
        params = SocialParams(**(self.params.model_dump() | turn.settings))
        until = params.steps * (turn.generation + 1) // self.generations
        seed = self.seed * 1000 + turn.member
        checkpoint = started(self.folder, turn)
        return train_social(data, worlds["learn"], shape, params, seed, checkpoint, Silent(), until)


def share(target: Path, data: TensorDict, worlds: dict[str, Tensor], shape: TownShape) -> None:
    """Write the labelled data [T, B] to where all members read it.

    Args:
        worlds: int64 indices by use: `learn`, `choose` (the score), `test` (for nobody's score).
    """
    with atomic_dir(target) as fresh:
        data.memmap(str(fresh / "labelled"), copy_existing=True)
        lists = {name: indices.tolist() for name, indices in worlds.items()}
        write_json(fresh / "town.json", {"town": shape.to_dict(), "worlds": lists})


@cache
def opened(source: Path, device: str = "cpu") -> tuple[TensorDict, dict[str, Tensor], TownShape]:
    """What `share` wrote; on the CPU memory-mapped, so that members on one machine hold it once."""
    facts = read_json(source / "town.json")
    worlds = {name: torch.tensor(indices) for name, indices in facts["worlds"].items()}
    data = TensorDict.load_memmap(source / "labelled")
    if device != "cpu":
        data = TensorDict(moved(dict(data.items()), device), batch_size=data.shape)
    return data, worlds, TownShape.from_dict(facts["town"])


@torch.no_grad()
def held_out_loss(model: Social, data: TensorDict, worlds: Tensor, chunk_ticks: int) -> float:
    """Mean cross-entropy of goal and next action of the others in sight, together; nats."""
    slots = len(worlds) * model.shape.num_agents
    device = data["action"].device
    (worlds,) = sent((worlds,), device)
    state = torch.zeros(slots, model.shape.num_others, model.recurrent_dim, device=device)
    summed, count = 0.0, 0
    for begin in range(0, data.shape[0], chunk_ticks):
        chunk = per_agent(data[begin : begin + chunk_ticks][:, worlds])
        goal, action, state = predict(model, chunk, state)
        keep = chunk["visible"] & chunk["others_alive"] & chunk["alive"].unsqueeze(-1)
        for logits, label in ((goal, "others_goal"), (action, "others_next_action")):
            summed += F.cross_entropy(logits[keep], chunk[label][keep], reduction="sum").item()
        count += int(keep.sum())
    return summed / max(count, 1)
