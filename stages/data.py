"""Reading what `collect` made, checked against its card."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from hamlet.artifacts import HamletError, check_card, how_to_make
from hamlet.learning.beliefs import believe
from hamlet.modules.contracts import TownShape, validate_observation
from hamlet.moving import moved
from hamlet.params import Params
from hamlet.town import load_pack
from stages import paths


class Recorded(NamedTuple):
    data: TensorDict
    """[T, B] all recorded worlds."""
    training: Tensor
    """int64 indices of the worlds to learn from."""
    held_out: Tensor
    """int64 indices of the worlds of held-out personalities and maps."""
    mortal: Tensor
    """int64 indices of the worlds, on held-out maps too, whose players act at random and die."""
    shape: TownShape
    card: dict[str, Any]


def load_dataset(params: Params, device: str | torch.device = "cpu") -> Recorded:
    """The data set of the pack in params.yaml: the data on a device, the indices on the CPU.

    Raises:
        HamletError: missing, changed since it was written, or of another pack.
    """
    card = check_card(paths.DATASET, expect_pack=load_pack(params.town.pack).content_hash)
    try:
        data = TensorDict.load_memmap(paths.DATASET)
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise HamletError(
            f"{paths.DATASET} cannot be read ({type(error).__name__})", how_to_make(paths.DATASET)
        ) from error
    shape = TownShape.from_dict(card["town"])
    validate_observation(data, shape)
    worlds = torch.arange(data.shape[1])
    training, held_out, mortal = worlds.tensor_split(
        (card["worlds"], card["worlds"] + card["held_out_worlds"])
    )
    if torch.device(device).type != "cpu":  # on the CPU it is read from the disk as it is used
        data = TensorDict(moved(dict(data.items()), device), batch_size=data.shape)
    return Recorded(data, training, held_out, mortal, shape, card)


def load_beliefs(recorded: Recorded, perceive: Any, card: dict[str, Any]) -> TensorDict:
    """What the frozen perception believes at every recorded tick, [T, B, N]."""
    return believe(perceive, card["recurrent_dim"], recorded.data)
