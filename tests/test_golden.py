"""Nothing changes that nobody meant to change: numbers of the town, the mind and the proofs.

Where a change is meant, `python -m tests.golden.recipes` writes the new numbers. Those of the
trainers are compared in `test_device.py`, which computes them anyway.
"""

from __future__ import annotations

import pytest
import torch

from tests.golden.recipes import RECIPES, changes, kept

CLOSE = 1e-5


def test_every_recipe_has_its_numbers():
    assert kept().keys() == RECIPES.keys()
    assert all(len(numbers) > 5 for numbers in kept().values())


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "trainers"])
def test_numbers_are_what_they_were(name):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert list(changes(name, RECIPES[name](), CLOSE)) == []
    finally:
        torch.set_num_threads(threads)
