"""Choices from logits: a mask that leaves illegal ones no chance, and what a choice was worth."""

from __future__ import annotations

from torch import Tensor

ILLEGAL_LOGIT = -3.4e38


def masked_logits(logits: Tensor, mask: Tensor) -> Tensor:
    """Logits whose illegal entries get probability exactly 0 (`mask` True = legal)."""
    return logits.float().masked_fill(~mask, ILLEGAL_LOGIT)


def log_prob_of(logits: Tensor, index: Tensor) -> Tensor:
    """float [.] log-probability of `index` int64 [.] under `logits` [., A]."""
    return logits.log_softmax(-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)
