"""A small town's shape and blank modules of every kind."""

from __future__ import annotations

import pytest
import torch

from hamlet.modules.contracts import TownShape
from hamlet.town import Town, load_pack


@pytest.fixture(scope="session")
def town() -> Town:
    return Town(load_pack("l4_contention"), num_layouts=8)


@pytest.fixture(scope="session")
def shape(town) -> TownShape:
    return TownShape.of(town)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    torch.set_num_threads(1)
