"""What is observed as numbers of about unit size, and pictures as a network reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hamlet.worlds.contract import Field, WorldShape

LIMIT = 10.0  # deviations beyond which a number is cut off
POOLED = 12  # rows and columns of a larger picture as features
PART = 512  # pictures that are worked on at once
LEAST_SHARE = 0.05  # least deviation, as a share of the field's largest size


def channels_first(x: Tensor, field: Field) -> Tensor:
    """Pictures [B, ...] as float32 [B, channels, height, width]."""
    x = x.float()
    if len(field.shape) == 2:
        return x.unsqueeze(1)
    return x.permute(0, 3, 1, 2) if field.shape[2] <= field.shape[0] else x


class Senses(nn.Module):
    """Fields -> features float32 [B, F]: numbers scaled by the mean and deviation that they had in
    the data, codes one-hot, pictures pooled to at most 12x12 cells.

    Args:
        statistics: {"mean", "std"} of every vector and picture as it is flattened here.
    """

    def __init__(self, shape: WorldShape, statistics: Mapping[str, Mapping[str, Tensor]]) -> None:
        super().__init__()
        self.fields = shape.fields
        for field in self.fields:
            if field.kind != "codes":
                for what in ("mean", "std"):
                    self.register_buffer(f"{what}_of_{field.name}", statistics[field.name][what])
        self.width = sum(width(field) for field in self.fields)

    def forward(self, *fields: Tensor) -> Tensor:
        """float32 [B, F] of the fields [B, ...] in the shape's order."""
        parts = []
        for field, x in zip(self.fields, fields, strict=True):
            if field.kind == "codes":
                assert field.count is not None
                parts.append(F.one_hot(x, field.count).float().flatten(1))
            else:
                mean = getattr(self, f"mean_of_{field.name}")
                std = getattr(self, f"std_of_{field.name}")
                parts.append(((flat(x, field) - mean) / std).clamp(-LIMIT, LIMIT))
        return torch.cat(parts, -1)


def flat(x: Tensor, field: Field) -> Tensor:
    """A vector or picture [B, ...] as float32 [B, width], before it is scaled."""
    if field.kind == "vector":
        return x.float().reshape(x.shape[0], width(field))
    picture = channels_first(x, field)
    height, across = picture.shape[2:]
    size = (min(height, POOLED), min(across, POOLED))
    if size != (height, across):
        picture = F.adaptive_avg_pool2d(picture, size)
    return picture.flatten(1)


def width(field: Field) -> int:
    """Features that a field becomes."""
    count = 1
    if field.kind == "picture":
        sides = [*field.shape, 1] if len(field.shape) == 2 else list(field.shape)
        if sides[2] > sides[0]:
            sides = [*sides[1:], sides[0]]
        return min(sides[0], POOLED) * min(sides[1], POOLED) * sides[2]
    for side in field.shape:
        count *= side
    return count * (field.count or 1)


@torch.no_grad()
def statistics_of(
    shape: WorldShape, data: Mapping[str, Tensor], rows: Tensor
) -> dict[str, dict[str, Tensor]]:
    """Mean and deviation of every vector and picture over rows.

    The deviation has a floor: a number that hardly changed in the data must not blow up later.

    Args:
        data: fields [R, ...] by name. rows: bool [R] those that count.
    """
    found = {}
    for field in shape.fields:
        if field.kind == "codes":
            continue
        parts = [flat(x, field) for x in data[field.name][rows].split(PART)]
        x = torch.cat(parts).double()
        largest = x.abs().max().clamp_min(1e-6)
        std = x.std(0, correction=0).clamp_min(LEAST_SHARE * largest)
        found[field.name] = {"mean": x.mean(0).float(), "std": std.float()}
    return found


class Pictures(nn.Module):
    """All pictures of a world, seen by convolutions.

    Args:
        statistics: as of `Senses`; a picture is scaled by those of all its cells together.
        out: width of what each becomes.
    """

    def __init__(
        self,
        shape: WorldShape,
        statistics: Mapping[str, Mapping[str, Tensor]],
        out: int = 64,
    ) -> None:
        super().__init__()
        self.fields = shape.fields
        self.networks = nn.ModuleDict()
        for field in self.fields:
            if field.kind == "picture":
                example = channels_first(torch.zeros(1, *field.shape), field)
                self.networks[f"of_{field.name}"] = _convolutions(example, out)
                mean, std = statistics[field.name]["mean"], statistics[field.name]["std"]
                middle = mean.mean()
                spread = (std.square() + (mean - middle).square()).mean().sqrt()
                self.register_buffer(f"middle_of_{field.name}", middle)
                self.register_buffer(f"spread_of_{field.name}", spread)
        self.width = out * len(self.networks)

    def forward(self, fields: Sequence[Tensor]) -> list[Tensor]:
        """float32 [B, out] of every picture; none, where a world has no pictures."""
        parts = []
        for field, x in zip(self.fields, fields, strict=True):
            if field.kind == "picture":
                picture = channels_first(x, field)
                middle = getattr(self, f"middle_of_{field.name}")
                spread = getattr(self, f"spread_of_{field.name}")
                parts.append(self.networks[f"of_{field.name}"]((picture - middle) / spread))
        return parts


def _convolutions(example: Tensor, out: int) -> nn.Sequential:
    """3x3 convolutions, each halving what is larger than 8, then one dense layer."""
    layers: list[nn.Module] = []
    channels, side, count = example.shape[1], min(example.shape[2:]), 0
    while count < 2 or side > 8:
        stride = 2 if side > 8 else 1
        wider = 16 if count == 0 else 32
        layers += [nn.Conv2d(channels, wider, 3, stride=stride, padding=1), nn.SiLU()]
        channels, side, count = wider, -(-side // stride), count + 1
    with torch.no_grad():
        size = nn.Sequential(*layers)(example).flatten(1).shape[1]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(size, out), nn.SiLU())


def dense(*sizes: int) -> nn.Sequential:
    """Layers of these widths with SiLU between them."""
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.SiLU()]
    return nn.Sequential(*layers[:-1])
