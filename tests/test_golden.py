"""Nothing changes that nobody meant to change: numbers of the town, the mind, the proofs and of all
that is trained.

Where a change is meant, `python -m tests.golden.recipes` writes the new numbers.
"""

from __future__ import annotations

import pytest
import torch

from tests.golden.recipes import RECIPES, changes, kept

CLOSE = {"trainers": 1e-4}


def test_every_recipe_has_its_numbers():
    assert kept().keys() == RECIPES.keys()
    assert all(len(numbers) > 5 for numbers in kept().values())


SLOW = {"trainers": pytest.mark.slow}


@pytest.mark.parametrize("name", [pytest.param(n, marks=SLOW.get(n, ())) for n in RECIPES])
def test_numbers_are_what_they_were(name):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert list(changes(name, RECIPES[name](), CLOSE.get(name, 1e-5))) == []
    finally:
        torch.set_num_threads(threads)
