"""Where to look next on a partly seen map: for scripted players and for perception."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from hamlet.moving import constant


def where_to_look(unseen: Tensor, position: Tensor, vision: int) -> Tensor:
    """The cell from which most would be seen for the first time per step to it.

    Args:
        unseen: float [., H, W] 1 where a cell was never seen, else 0.
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
    found = (near_rows @ unseen @ near_columns).flatten(-2)
    # Of each column the columns to every cell, and of each row, below these, the rows to it.
    to_column = away_columns.unsqueeze(1).expand(-1, height, -1)
    to_row = away_rows.unsqueeze(2).expand(-1, -1, width)
    away = torch.cat([to_column, to_row]).flatten(1)
    which = position + constant([0, width], position.dtype, position.device)
    steps = F.embedding(which, away.to(unseen.dtype)).sum(-2)
    score = found / steps.clamp_min(1)
    return torch.where(score.amax(-1) > 0, score.argmax(-1), cell_at(position, width))


def cell_at(position: Tensor, width: int) -> Tensor:
    """int64 [.] row * width + column of int64 [., 2] columns and rows."""
    return (position * constant([1, width], position.dtype, position.device)).sum(-1)
