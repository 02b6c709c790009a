"""Reading recorded experience as sequences, in time order, with recurrent state carried along.

A dataset is a TensorDict [T, B] of B recorded worlds; per-agent fields are [T, B, N, ...].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from hamlet.learning.distributed import local_shard
from hamlet.moving import upload
from hamlet.profiling import region

PER_WORLD = ("first", "places", "hour")


def per_agent(chunk: TensorDict) -> TensorDict:
    """[T, L] of worlds -> [T, L * N] of agents: fields of a world are repeated for its agents."""
    agents = chunk["action"].shape[2]
    fields = {
        key: value.unsqueeze(2).expand(-1, -1, agents, *value.shape[2:])
        if key in PER_WORLD
        else value
        for key, value in chunk.items()
    }  # fmt: skip
    return TensorDict(
        {key: value.flatten(1, 2) for key, value in fields.items()},
        batch_size=[chunk.shape[0], chunk.shape[1] * agents],
    )


def sent(rows: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """Indices [.] of equal shapes, drawn on the CPU, where the data is; sent together."""
    if device.type == "cpu":
        return tuple(rows)
    return upload(torch.stack(tuple(rows)), device).unbind()


class SequenceReader:
    """Reads worlds side by side, in chunks; a lane at the end of its world takes a random other.

    Args:
        data: TensorDict [T, B], T a multiple of `chunk`.
        worlds: int64 [W] which of the B worlds may be read.
        lanes: how many worlds are read side by side, by all ranks together.
        chunk: ticks per read.
        generator: chooses the worlds; part of a checkpoint, with `state_dict`.
    """

    def __init__(
        self, data: TensorDict, worlds: Tensor, lanes: int, chunk: int, generator: torch.Generator
    ) -> None:
        self.data, self.worlds, self.chunk, self.generator = data, worlds, chunk, generator
        self.world = self._draw(lanes)
        starts = torch.randint(data.shape[0] // chunk, (lanes,), generator=generator)
        self.start = starts * chunk

    def _draw(self, count: int) -> Tensor:
        return self.worlds[torch.randint(len(self.worlds), (count,), generator=self.generator)]

    def read(self) -> TensorDict:
        """The next [chunk, S] of this rank's lanes; `first` is True where a life begins.

        S is lanes * N / ranks.
        """
        with region("data"):
            ticks = local_shard(self.start).unsqueeze(0) + torch.arange(self.chunk).unsqueeze(1)
            worlds = local_shard(self.world).unsqueeze(0).expand_as(ticks)
            chunk = self.data[sent((ticks, worlds), self.data["action"].device)]
            self.start = self.start + self.chunk
            over = self.start >= self.data.shape[0]
            self.world = torch.where(over, self._draw(len(over)), self.world)
            self.start = torch.where(over, 0, self.start)
            return per_agent(chunk)

    def state_dict(self) -> dict[str, Any]:
        return {
            "world": self.world,
            "start": self.start,
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.world, self.start = state["world"], state["start"]
        self.generator.set_state(state["generator"])
