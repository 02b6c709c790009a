"""Where to look next on a partly seen map: for scripted players and for perception."""

from __future__ import annotations

import torch
from torch import Tensor


def where_to_look(unseen: Tensor, x: Tensor, y: Tensor, vision: int) -> tuple[Tensor, Tensor]:
    """The way to the cell from which most would be seen for the first time per step to it.

    Args:
        unseen: float [., H, W] 1 where a cell was never seen, else 0.
        x, y: int64 [.] column and row of the agent.
        vision: cells seen to each side.

    Returns:
        dx, dy int64 [.], both 0 where all is seen; of equally good cells the first in reading
        order, in every runtime.
    """
    height, width = unseen.shape[-2:]
    rows = torch.arange(height, device=unseen.device)
    columns = torch.arange(width, device=unseen.device)
    near_rows = ((rows[:, None] - rows).abs() <= vision).to(unseen.dtype)
    near_columns = ((columns[:, None] - columns).abs() <= vision).to(unseen.dtype)
    found = near_rows @ unseen @ near_columns
    up, across = (
        (places.to(unseen.dtype) - at.unsqueeze(-1).to(unseen.dtype)).abs()
        for places, at in ((rows, y), (columns, x))
    )
    steps = up.unsqueeze(-1) + across.unsqueeze(-2)
    score = found * steps.clamp_min(1).reciprocal()
    best_of_row = score.amax(-1)
    best = best_of_row.amax(-1, keepdim=True)
    row = first(best_of_row == best)
    line = score.gather(-2, row[..., None, None].expand(*row.shape, 1, width)).squeeze(-2)
    column = first(line == best)
    some = best.squeeze(-1) > 0
    return torch.where(some, column - x, 0), torch.where(some, row - y, 0)


def first(chosen: Tensor) -> Tensor:
    """int64 [.]: index of the first True of bool [., n], or the last index; among floats, which
    vector units compare fastest."""
    index = torch.arange(chosen.shape[-1], device=chosen.device, dtype=torch.float32)
    return torch.where(chosen, index, index[-1]).amin(-1).long()
