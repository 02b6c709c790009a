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
    row, column = (
        torch.arange(height * width, device=unseen.device) // width,
        columns.repeat(height),
    )
    steps = (row[:, None] - row).abs() + (column[:, None] - column).abs()
    score = found.flatten(-2) * steps.clamp_min(1).to(unseen.dtype).reciprocal()[y * width + x]
    best = score.amax(-1, keepdim=True)
    cell = torch.arange(height * width, device=unseen.device, dtype=unseen.dtype)
    first = torch.where(score == best, cell, cell[-1]).amin(-1).long()
    row = torch.div(first, width, rounding_mode="floor")
    some = best.squeeze(-1) > 0
    return torch.where(some, first - row * width - x, 0), torch.where(some, row - y, 0)
