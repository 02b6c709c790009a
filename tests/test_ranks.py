"""How many ranks a stage gets where nobody says it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hamlet.params import load_params
from stages import ranks
from stages.ranks import helpful

ROOT = Path(__file__).parents[1]
PARAMS = load_params(ROOT / "params.yaml")


def sized(stage: str, **values: int):
    section = getattr(PARAMS, stage).model_copy(update=values)
    return PARAMS.model_copy(update={stage: section})


@pytest.mark.parametrize(
    ("sequences", "cores", "count"),
    [(16, 1, 1), (16, 2, 2), (16, 3, 2), (16, 4, 4), (16, 64, 4), (12, 4, 3), (7, 2, 1), (4, 2, 1)],
)
def test_a_rank_for_each_core_while_the_batch_divides(sequences, cores, count):
    assert helpful("social", sized("social", sequences=sequences), cores + 1) == count
    assert helpful("perception", sized("perception", sequences=sequences), cores) == count


@pytest.mark.parametrize(
    ("worlds", "period", "cores", "count"),
    [(128, 4, 2, 2), (128, 4, 8, 8), (128, 4, 99, 8), (120, 4, 4, 3), (96, 5, 4, 1), (8, 4, 2, 1)],
)
def test_the_worlds_of_a_rank_are_a_multiple_of_meta_period(worlds, period, cores, count):
    params = sized("policy", worlds=worlds, meta_period=period)
    assert helpful("policy", params, cores) == count


def test_what_loses_by_a_second_rank_has_one():
    assert {helpful(stage, PARAMS, 8) for stage in ("world_model", "prove")} == {1}


def test_the_default_sizes_use_both_cores_of_two():
    """The social model has one of them: the world model is trained beside it."""
    counts = {stage: helpful(stage, PARAMS, 2) for stage in ranks.SHARED}
    assert counts == {"perception": 2, "social": 1, "policy": 2}


@pytest.mark.parametrize("count", ["0", "-1", "many", "1.5"])
def test_another_count_is_refused(count):
    done = subprocess.run(
        [sys.executable, "-m", "stages.ranks", count, "social"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "ask for one process or more, or auto" in done.stderr or "invalid" in done.stderr


@pytest.mark.parametrize(("sequences", "gpus", "count"), [(16, 1, 1), (16, 8, 8), (12, 8, 6)])
def test_on_gpus_a_rank_for_each_while_the_batch_divides(sequences, gpus, count):
    assert helpful("social", sized("social", sequences=sequences), 2, gpus) == count
    assert helpful("prove", PARAMS, 2, gpus) == 1


def test_a_world_model_has_ranks_where_they_share_its_weights():
    assert helpful("world_model", PARAMS, 2, 4) == 1
    shared = sized("world_model", shard=True, batch=256)
    assert [helpful("world_model", shared, 2, gpus) for gpus in (0, 4)] == [1, 4]


def test_what_is_wrong_with_the_device_is_told_once_and_not_by_every_rank():
    done = subprocess.run(
        [sys.executable, "-m", "stages.ranks", "2", "social"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"HAMLET_DEVICE": "gpu"},
    )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("social: HAMLET_DEVICE is 'gpu': give auto, cpu, cuda or cuda:N")
