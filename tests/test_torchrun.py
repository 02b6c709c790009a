"""`torchrun` runs the training stages: equal to one process; what is left when a rank is lost."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from copied_repo import Repo

from hamlet.artifacts import sha256_file

pytestmark = pytest.mark.slow

UPDATES = {  # at least 20 of every stage; the policy and the prover take more
    "perception": ("perception", "steps", 20),
    # Not more: its loss has corners (absolute errors), and where a rounding puts an error on a
    # corner's other side, both are right and 1e-4 apart. One seed in two met one within 30.
    "world_model": ("world_model", "steps", 20),
}
# As `torchrun ... -m stages.X`, but every step is saved, so that there is something to resume from.
EAGER = """
import gc, runpy, sys
gc.disable()  # while PyTorch is imported, as `python -m stages.X` does
from hamlet.learning.checkpoint import Checkpoint
Checkpoint.__init__.__defaults__ = (0.0,)
runpy.run_module(f"stages.{sys.argv.pop(1)}", run_name="__main__")
"""


def torchrun(*arguments: str) -> list[str]:
    """With --standalone: it takes a free port, so that tests may run side by side."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*command, "--nproc-per-node", "2", *arguments]


def two_ranks(repo, *command: str, check: bool = True) -> subprocess.CompletedProcess:
    """What torchrun starts, without torchrun: two processes, told by their environment who is who.

    Quicker where it is not about who ends whom.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def run(rank: int) -> subprocess.CompletedProcess:
        one = Repo(repo.path)
        told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        one.env = repo.env | {name: str(value) for name, value in told.items()}
        return one.run(sys.executable, *command, check=check)

    with ThreadPoolExecutor() as pool:
        both = list(pool.map(run, range(2)))
    both[0].stderr += both[1].stderr
    both[0].returncode = both[0].returncode or both[1].returncode
    return both[0]


def made(repo, stage: str) -> list[Path]:
    names = {
        "perception": ["perception.pt"],
        "policy": [f"policy/{part}.pt2" for part in ("prior", "ended", "weigh", "act")],
        "prove": ["prover/weights.pt", "prover.onnx"],
    }
    return [repo.artifacts / name for name in names.get(stage, [f"{stage}.pt2"])]


def numbers(repo, stage: str) -> torch.Tensor:
    """Every trained number of the stage's first artifact."""
    path = made(repo, stage)[0]
    if path.suffix == ".pt2":
        state = torch.export.load(path).state_dict
    else:
        state = torch.load(path, weights_only=True)
    return torch.cat([value.double().flatten() for _, value in sorted(state.items())])


def curve(repo, stage: str) -> list[list[float]]:
    lines = (repo.artifacts / "plots" / f"{stage}.csv").read_text().splitlines()[1:]
    return [[float(x) for x in line.split(",") if x] for line in lines]


@pytest.mark.parametrize("stage", ["perception", "world_model", "policy", "prove"])
def test_a_stage_on_two_ranks_makes_what_one_process_makes(copy, stage, capsys):
    copy.env["OMP_NUM_THREADS"] = "1"
    if stage in UPDATES:  # else what one process makes is there already
        before = numbers(copy, stage)
        copy.set(*UPDATES[stage])
        alone = copy.stage(stage)
        assert alone.returncode == 0, alone.stderr
        assert (numbers(copy, stage) - before).abs().max() > 1e-3
    expected, expected_curve = numbers(copy, stage), curve(copy, stage)
    bytes_of_one = {path.name: path.stat().st_size for path in made(copy, stage)}
    for path in made(copy, stage):
        path.unlink()

    done = two_ranks(copy, "-m", f"stages.{stage}", check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    difference = (numbers(copy, stage) - expected).abs().max().item()
    with capsys.disabled():
        print(f"\n{stage}: largest difference of a parameter {difference:.1e}")
    assert difference <= 1e-5
    for ours, theirs in zip(curve(copy, stage), expected_curve, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)
    assert {path.name: path.stat().st_size for path in made(copy, stage)} == bytes_of_one
    assert len(re.findall(rf"^{stage}: 0/", done.stderr, re.M)) == (stage != "prove")  # one log
    assert not list((copy.path / "checkpoints").glob(f"{stage}-*/"))
    runs = runs_of(copy, stage)
    assert runs[0].data.tags["ranks"] == "2"
    assert runs[0].info.status == "FINISHED"
    others = {run.data.tags.get("ranks") for run in runs[1:]}
    assert others == {None}  # the batches of the preset tiny are too small to share


def runs_of(repo, stage: str) -> list:
    """The stage's MLflow runs, the last one first."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{repo.path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("hamlet")
    where = f"tags.`hamlet.stage` = '{stage}'"
    return client.search_runs(
        [experiment.experiment_id], where, order_by=["attributes.start_time DESC"]
    )


def kill_a_rank(repo, stage: str, rank: int, *options: str) -> tuple[int, str, float]:
    """Start the stage, kill one rank once there is a checkpoint: exit code, what was said, and
    the seconds that the others took to end."""
    script = repo.path / "eager.py"
    script.write_text(EAGER)
    command = torchrun(*options, str(script), stage)
    said = repo.path / "said.txt"
    with (
        said.open("w") as output,
        subprocess.Popen(command, cwd=repo.path, env=repo.env, stdout=output, stderr=output) as run,
    ):
        until = time.monotonic() + 120
        while not list((repo.path / "checkpoints").glob(f"{stage}-*/checkpoint.pt")):
            assert run.poll() is None, said.read_text()
            assert time.monotonic() < until, "no checkpoint"
            time.sleep(0.002)
        children = psutil.Process(run.pid).children(recursive=True)
        (victim,) = [c for c in children if c.environ().get("RANK") == str(rank)]
        victim.send_signal(signal.SIGKILL)
        began = time.monotonic()
        code = run.wait(timeout=180)
    return code, said.read_text(), time.monotonic() - began


def first_step(stage: str, said: str) -> int:
    return int(re.findall(rf"^{stage}: (\d+)/", said, re.M)[0])


def test_without_one_rank_the_other_ends_and_the_same_command_goes_on(copy):
    """Either rank of perception is killed by `tracking/test_kills.py`."""
    stage = "policy"
    (copy.path / "eager.py").write_text(EAGER)
    two_ranks(copy, "eager.py", stage)
    expected = [sha256_file(path) for path in made(copy, stage)]

    code, said, seconds = kill_a_rank(copy, stage, 1)
    assert code != 0
    assert seconds < 60
    ours = said.partition("Traceback (most recent call last):\n  File")[0]  # torchrun has its own
    assert re.search(
        r"(another rank ended or does not answer: .* run the same command again"
        r"|was interrupted: the checkpoint .* the same command resumes from it)",
        ours,
    ), said
    assert [sha256_file(path) for path in made(copy, stage)] == expected  # nothing half-written
    for path in made(copy, stage):
        path.unlink()

    done = two_ranks(copy, "eager.py", stage)
    assert first_step(stage, done.stderr) > 0, "began again instead of resuming"
    assert [sha256_file(path) for path in made(copy, stage)] == expected
    assert not list((copy.path / "checkpoints").glob(f"{stage}-*/"))


def test_torchrun_itself_restarts_what_was_lost_and_one_process_may_go_on(copy):
    """Two ranks, then two again by --max-restarts; killed for good, one process goes on."""
    copy.set("perception", "steps", 80)
    assert copy.stage("perception").returncode == 0
    expected = numbers(copy, "perception")
    code, said, _ = kill_a_rank(copy, "perception", 1, "--max-restarts", "1")
    assert code == 0, said
    starts = [int(step) for step in re.findall(r"^perception: (\d+)/80 \(", said, re.M)]
    assert starts[0] == 0
    assert any(step > 0 for step in starts[1:-1]), said
    torch.testing.assert_close(numbers(copy, "perception"), expected, atol=1e-5, rtol=0)

    code, said, _ = kill_a_rank(copy, "perception", 1)
    assert code != 0
    done = copy.stage("perception")
    assert done.returncode == 0, done.stderr
    assert first_step("perception", done.stderr) > 0
    torch.testing.assert_close(numbers(copy, "perception"), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("stage", "change", "told"),
    [
        ("world_model", ("world_model", "batch", 33), r"world_model\.batch is 33, which 2 ranks"),
        ("policy", ("policy", "meta_period", 32), r"policy.worlds of a rank is 4, not a multiple"),
        ("prove", ("proofs", "slots", 33), r"proofs\.slots is 33, which 2 ranks"),
        ("evaluate", None, r"evaluate trains nothing on 2 ranks: run `python -m stages\.evaluate`"),
    ],
)
def test_what_ranks_cannot_do_is_one_line(copy, stage, change, told):
    if change:
        copy.set(*change)
    before = json.loads((copy.artifacts / "metrics" / f"{stage}.json").read_text())
    done = two_ranks(copy, "-m", f"stages.{stage}", check=False)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith(f"{stage} (rank ")]
    assert len(lines) == 2, done.stderr  # one of each rank
    assert all(re.search(told, line) for line in lines), lines
    assert json.loads((copy.artifacts / "metrics" / f"{stage}.json").read_text()) == before


RANKS = [sys.executable, "-m", "stages.ranks", "2"]


def test_what_goes_wrong_under_stages_ranks_is_told_without_torchruns_page(copy):
    done = copy.run(*RANKS, "evaluate", check=False)
    assert done.returncode == 2
    assert "invalid choice: 'evaluate'" in done.stderr

    done = copy.run(*RANKS[:-1], "0", "social", check=False)
    assert done.returncode == 2
    assert "count: 0: ask for one process or more" in done.stderr

    (copy.artifacts / "perception.pt2").unlink()
    done = copy.run(*RANKS, "social", check=False)
    assert done.returncode == 1
    told = "artifacts/perception.pt2 is missing: run `dvc repro freeze_perception`"
    lines = set(done.stderr.strip().splitlines())
    failed = {f"social (rank {rank}): {told}" for rank in range(2)}
    assert lines & failed  # the first to fail ends the other, which may not have come so far
    ended = "social was interrupted: run the same command to start it again"
    assert lines <= failed | {"social: 2 ranks", ended}

    copy.set("social", "steps", -1)
    done = copy.run(*RANKS, "social", check=False)
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()  # before the ranks, so not by each of them
    assert line.startswith("social: params.yaml: `social.steps` is -1")


@contextmanager
def training(copy) -> Iterator[subprocess.Popen[str]]:
    """`social` on the ranks of `stages.ranks`, when it has kept a first checkpoint."""
    copy.set("social", "steps", 4000)
    saving = Path(__file__).parent / "tracking" / "saving"  # at every step
    copy.env["PYTHONPATH"] = f"{saving}{os.pathsep}{copy.env['PYTHONPATH']}"
    with subprocess.Popen(
        [*RANKS, "social"], cwd=copy.path, env=copy.env, stderr=subprocess.PIPE, text=True
    ) as run:
        until = time.monotonic() + 120
        while not list((copy.path / "checkpoints").glob("social-*/checkpoint.pt")):
            assert run.poll() is None
            assert time.monotonic() < until, "no checkpoint"
            time.sleep(0.1)
        yield run


def test_an_interrupt_of_stages_ranks_loses_nothing(copy):
    with training(copy) as run:
        run.send_signal(signal.SIGTERM)
        _, said = run.communicate(timeout=60)
    assert run.returncode == 143
    assert re.search(r"social was interrupted: the checkpoint in checkpoints/\S+ is kept", said)
    assert "Traceback" not in said
    assert list((copy.path / "checkpoints").glob("social-*/checkpoint.pt"))


def test_a_rank_that_is_killed_ends_the_other_and_is_told_by_the_exit_code(copy):
    with training(copy) as run:
        ranks = psutil.Process(run.pid).children(recursive=True)
        ranks = [one for one in ranks if "-m" in one.cmdline() and "stages.social" in one.cmdline()]
        ranks[-1].kill()
        run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGKILL
    assert not psutil.wait_procs(ranks, timeout=5)[1]
    assert list((copy.path / "checkpoints").glob("social-*/checkpoint.pt"))
