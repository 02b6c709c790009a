"""Where to look next: against a search by hand, and the same in a batch as alone."""

from __future__ import annotations

import torch

from hamlet.frontier import where_to_look


def by_hand(unseen, x, y, vision):
    """The first cell in reading order with the most new cells in view per step to it."""
    height, width = unseen.shape
    best, found = 0.0, (0, 0)
    for row in range(height):
        for column in range(width):
            rows = slice(max(0, row - vision), row + vision + 1)
            columns = slice(max(0, column - vision), column + vision + 1)
            score = float(unseen[rows, columns].sum()) / max(1, abs(row - y) + abs(column - x))
            if score > best + 1e-6:
                best, found = score, (column - x, row - y)
    return found


def test_it_is_the_cell_from_which_most_is_new_per_step():
    rng = torch.Generator().manual_seed(0)
    unseen = (torch.rand(60, 7, 9, generator=rng) < torch.linspace(0, 1, 60)[:, None, None]).float()
    x, y = (torch.randint(n, (60,), generator=rng) for n in (9, 7))
    cell = where_to_look(unseen, torch.stack([x, y], 1), 2)
    dx, dy = cell % 9 - x, cell // 9 - y
    expected = [by_hand(unseen[i], int(x[i]), int(y[i]), 2) for i in range(60)]
    assert list(zip(dx.tolist(), dy.tolist(), strict=True)) == expected
    assert len(set(expected)) >= 8


def test_where_all_is_seen_there_is_nowhere_to_go():
    x, y = torch.arange(3), torch.tensor([2, 0, 3])
    found = where_to_look(torch.zeros(3, 4, 5), torch.stack([x, y], 1), 2)
    assert torch.equal(found, y * 5 + x)
