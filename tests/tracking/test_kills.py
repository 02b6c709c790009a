"""dvc, a rank or both are killed at random moments: one run, one training, the same bytes."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from copied_repo import Repo, working_tree

from hamlet.artifacts import sha256_file

pytestmark = pytest.mark.slow

STAGE, STEPS, EVERY = "perception", 60, 10
MADE = ["perception.pt", "perception.pt.json", "metrics/perception.json", "plots/perception.csv"]
COMMAND = ("dvc", "repro", "--single-item", STAGE)  # what is before it stands


class Kill(NamedTuple):
    """Whom to kill, and when.

    Attributes:
        training: count from the first step that this attempt trained, not from dvc's start.
        seconds: from there.
    """

    whom: str
    training: bool
    seconds: float


def plan(seed: int, start_up: float, pace: float) -> list[Kill]:
    """Ten kills, half of them during a start and half within a few steps of training.

    Args:
        start_up: seconds until training begins, where nobody disturbs it.
        pace: seconds of a step.
    """
    rng = random.Random(seed)
    whom = ["dvc", "rank", "both"] * 3 + [rng.choice(["dvc", "rank", "both"])]
    training = [True, False] * 5
    rng.shuffle(whom)
    rng.shuffle(training)
    longest = {True: 7 * pace, False: start_up}
    return [Kill(w, t, rng.uniform(0.0, longest[t])) for w, t in zip(whom, training)]


@pytest.fixture
def repo(tmp_path) -> Repo:
    """A small data set, and a training of two ranks on it that has yet to begin."""
    path = tmp_path / "hamlet"
    path.mkdir()
    working_tree(path)
    (path / "dvc.lock").unlink(missing_ok=True)
    repo = Repo(path)
    repo.replace("dvc.yaml", f"stages.ranks auto {STAGE}", f"stages.ranks 2 {STAGE}")
    for key, value in {"steps": STEPS, "sequences": 8, "chunk": 8}.items():
        repo.set(STAGE, key, value)
    repo.repro("collect")
    saving = Path(__file__).parent / "saving"
    repo.env |= {
        "PYTHONPATH": f"{saving}{os.pathsep}{repo.env['PYTHONPATH']}",
        "OMP_NUM_THREADS": "1",
    }
    return repo


def hashes(repo: Repo) -> dict[str, str]:
    return {name: sha256_file(repo.artifacts / name) for name in MADE}


def workers(repo: Repo) -> dict[int, psutil.Process]:
    """What this repository's stages run in: launchers and ranks, whoever started them."""
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            ours = Path(process.cwd()) == repo.path and process.status() != psutil.STATUS_ZOMBIE
            if ours and any(word.startswith("stages.") for word in process.cmdline()):
                found[process.pid] = process
    return found


def ranks(repo: Repo, of: int) -> list[psutil.Process]:
    """The ranks that a dvc process started."""
    found = []
    for process in workers(repo).values():
        with suppress(psutil.Error):
            above = [parent.pid for parent in process.parents()]
            if of in above and f"stages.{STAGE}" in process.cmdline():
                found.append(process)
    return found


def strike(repo: Repo, dvc: subprocess.Popen, whom: str, rng: random.Random) -> None:
    """SIGKILL. While there is no rank yet, what stands for one is the last process there is."""
    with suppress(psutil.Error):
        root = psutil.Process(dvc.pid)
        victims = ranks(repo, dvc.pid) or [root, *root.children(recursive=True)][-1:]
        if whom in ("dvc", "both"):
            dvc.kill()
        if whom in ("rank", "both"):
            rng.choice(victims).kill()


class Watch(threading.Thread):
    """Sees whether two trainings ever have a checkpoint folder at once."""

    def __init__(self, repo: Repo) -> None:
        super().__init__(daemon=True)
        self.folders: set[str] = set()
        self._repo, self._over = repo, threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.02):
            found = (self._repo.path / "checkpoints").glob(f"{STAGE}-*/")
            self.folders |= {folder.name for folder in found}

    def stop(self) -> set[str]:
        self._over.set()
        self.join()
        return self.folders


def mend(repo: Repo) -> None:
    """Do what `hamlet doctor` says of the one file that dvc writes in place while it starts."""
    with suppress(FileNotFoundError):
        try:
            json.loads((repo.path / ".dvc" / "tmp" / "rwlock").read_text())
        except json.JSONDecodeError:
            said = repo.hamlet("doctor").stdout
            assert "rm .dvc/tmp/rwlock" in said, said
            (repo.path / ".dvc" / "tmp" / "rwlock").unlink()


def attempt(repo: Repo, log: Path, kill: Kill | None, rng: random.Random) -> bool:
    """One `dvc repro`, killed as told, unless it ends before; whether the kill came."""
    began = time.time()
    with log.open("w") as file:
        dvc = subprocess.Popen(
            COMMAND, cwd=repo.path, env=repo.env, stdout=file, stderr=file, start_new_session=True
        )

    def saved() -> bool:
        files = (repo.path / "checkpoints").glob(f"{STAGE}-*/checkpoint.pt")
        return any(path.stat().st_mtime > began for path in files)

    if kill is None:
        assert dvc.wait(timeout=240) == 0, log.read_text()
        return False
    until = time.monotonic() + 240
    while kill.training and dvc.poll() is None and not saved():
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.01)
    with suppress(subprocess.TimeoutExpired):
        assert dvc.wait(kill.seconds) == 0, log.read_text()
        return False
    strike(repo, dvc, kill.whom, rng)
    dvc.wait(timeout=120)  # of a killed rank's: it ends itself
    return True


def test_killed_at_ten_random_moments_it_is_one_run_one_training_the_same_bytes(
    repo, tmp_path, capsys
):
    from mlflow.tracking import MlflowClient

    calm = Repo(tmp_path / "calm" / "hamlet")
    calm.env |= {key: repo.env[key] for key in ("OMP_NUM_THREADS", "PYTHONPATH")}
    shutil.copytree(repo.path, calm.path, symlinks=True)
    began = time.monotonic()
    with subprocess.Popen(
        COMMAND, cwd=calm.path, env=calm.env, stderr=subprocess.PIPE, text=True
    ) as process:
        at = {line.split(" (")[0]: time.monotonic() - began for line in process.stderr}
    assert process.returncode == 0
    start_up = at[f"{STAGE}: 0/{STEPS}"]
    pace = (at[f"{STAGE}: {STEPS}/{STEPS}"] - start_up) / STEPS
    expected = hashes(calm)

    seed = int.from_bytes(os.urandom(2))
    kills, rng, logs = plan(seed, start_up, pace), random.Random(seed), []
    with capsys.disabled():
        print(f"\nseed {seed}, start {start_up:.1f} s, {pace:.3f} s a step: {kills}")
    watch = Watch(repo)
    watch.start()
    came = 0
    for kill in [*kills, None]:
        logs.append(tmp_path / f"{len(logs)}.log")
        if not attempt(repo, logs[-1], kill, rng):
            break
        mend(repo)
        came += 1
    folders = watch.stop()
    said = "\n".join(f"{kill}\n{log.read_text()}" for kill, log in zip([*kills, None], logs))

    assert came >= 7, said  # a machine may be so much quicker than it was that it ends before
    assert hashes(repo) == expected, said
    assert len(folders) == 1, said  # a second training has a folder of its own
    begun = [re.search(rf"^{STAGE}: (\d+)/{STEPS} \(", log.read_text(), re.M) for log in logs]
    steps = [int(found[1]) for found in begun if found]
    assert steps == sorted(steps), said
    assert steps[-1] > 0, said  # from where the killed ones came to
    until = time.monotonic() + 30
    while left := workers(repo):
        assert time.monotonic() < until, f"still there: {left}\n{said}"
        time.sleep(0.1)

    client = MlflowClient(f"sqlite:///{repo.path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("hamlet").experiment_id
    (run,) = client.search_runs([experiment], f"tags.`hamlet.stage` = '{STAGE}'")
    assert run.info.status == "FINISHED"
    steps = [m.step for m in client.get_metric_history(run.info.run_id, "loss")]
    assert sorted(steps) == list(range(0, STEPS, EVERY)), said
    parents = client.search_runs([experiment], "tags.`hamlet.execution` != ''")
    assert run.data.tags["mlflow.parentRunId"] in {parent.info.run_id for parent in parents}
    assert not list((repo.path / "checkpoints").glob(f"{STAGE}-*/"))
