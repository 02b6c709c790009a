"""Where to look next on a partly seen map: for scripted players and for perception."""

from __future__ import annotations

import torch
from torch import Tensor

from hamlet.moving import constant

LOOKED_AT = 1 / 16
"""What an unseen cell counts, for who scouts, that somebody else was seen to look at: what is worth
a visit there will be shown by its use. A power of two: sums are exact."""


def where_to_look(unseen: Tensor, position: Tensor, vision: int) -> Tensor:
    """The cell from which most would be seen for the first time per step to it.

    Args:
        unseen: float [., H, W] 1 where a cell was never seen, LOOKED_AT where somebody else was
            seen to look at it, 0 where it was seen.
        position: int64 [., 2] column and row of the agent.
        vision: cells seen to each side.

    Returns:
        int64 [.] row * W + column, the agent's own cell where all is seen; of equally good cells
        the first in reading order, in every runtime.
    """
    height, width = unseen.shape[-2:]
    rows = torch.arange(height, device=unseen.device)
    columns = torch.arange(width, device=unseen.device)
    away_rows, away_columns = ((n[:, None] - n).abs() for n in (rows, columns))
    near_rows, near_columns = (
        (away <= vision).to(unseen.dtype) for away in (away_rows, away_columns)
    )
    found = near_rows @ unseen @ near_columns
    # Of an agent in each cell: the rows to every other row, and the columns to every other column.
    rows_away = away_rows.to(unseen.dtype).repeat_interleave(width, 0).unsqueeze(-1)
    columns_away = away_columns.to(unseen.dtype).repeat(height, 1).unsqueeze(-2)
    cell = cell_at(position, width)
    steps = rows_away[cell] + columns_away[cell]
    score = (found / steps.clamp_min(1)).flatten(-2)
    best, where = score.max(-1)
    return torch.where(best > 0, where, cell)


def cell_at(position: Tensor, width: int) -> Tensor:
    """int64 [.] row * width + column of int64 [., 2] columns and rows."""
    return (position * constant([1, width], position.dtype, position.device)).sum(-1)
