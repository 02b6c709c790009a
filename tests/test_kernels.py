"""How many kernels a tick is on a GPU: it may not grow without somebody saying so."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.kernels import RESULTS

ROOT = Path(__file__).parents[1]
BEFORE = 329
"""Of the default town's tick of PPO, before kernels that do not wait for each other were joined."""


@pytest.mark.slow
def test_a_tick_has_no_more_kernels_than_it_had():
    command = [sys.executable, "-m", "benchmarks.kernels"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr[-2000:]
    assert "tick of PPO" in done.stdout


def test_a_tick_has_a_third_fewer_kernels_than_it_had():
    counts = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert sum(counts["tick of PPO"].values()) <= BEFORE * 2 / 3
