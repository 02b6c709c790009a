"""Processes that train together, kept from test to test."""

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    processes = Ranks(tmp_path_factory.mktemp("ranks"))
    yield processes
    processes.close()
