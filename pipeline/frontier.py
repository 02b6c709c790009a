"""Where to look next on a partly seen map: for scripted players and for perception."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def where_to_look(unseen: Tensor, x: Tensor, y: Tensor, vision: int) -> Tensor:
    """The cell from which most would be seen for the first time per step to it.

    Args:
        unseen: float [., H, W] 1 where a cell was never seen, else 0.
        x, y: int64 [.] column and row of the agent.
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
    up, across = (
        F.embedding(at, away.to(unseen.dtype)) for at, away in ((y, away_rows), (x, away_columns))
    )
    steps = up.unsqueeze(-1) + across.unsqueeze(-2)
    score = (found * steps.clamp_min(1).reciprocal()).flatten(-2)
    return torch.where(score.amax(-1) > 0, score.argmax(-1), y * width + x)
