"""Processes that train together, for the tests of a file."""

import pytest
from ranks import Ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    processes = Ranks(tmp_path_factory.mktemp("ranks"))
    yield processes
    processes.close()
