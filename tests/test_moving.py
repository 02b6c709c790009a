"""Small tensors that are made where they are needed."""

from __future__ import annotations

import torch

from hamlet.moving import one_hot


def test_one_past_the_last_index_is_none_of_them():
    found = one_hot(torch.tensor([[0, 2], [3, 1]]), 3, torch.float64)
    expected = [[[1, 0, 0], [0, 0, 1]], [[0, 0, 0], [0, 1, 0]]]
    assert torch.equal(found, torch.tensor(expected, dtype=torch.float64))
