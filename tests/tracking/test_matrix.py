"""{repro, exp run, --temp, queue} x {default store, relative URI, server, dead server}.

Under the real DVC and a real `mlflow server`: every run is found under one parent, and a server
that is down takes no time. The stages do nothing but what every stage does around its work.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from copied_repo import ROOT, Repo
from mlflow.tracking import MlflowClient
from tracked import mlflow_server

pytestmark = pytest.mark.slow

STORES = ["default", "relative", "dead", "server"]
PROCESSES = ["default", "dead"]  # the others' commands are forks, see `copied_repo.Repo`
MODES = ["repro", "exp run", "temp", "queue"]
HEAD_ROOM = 5.0  # seconds, of a machine that does other things too
WORK = """
import atexit, os, sys, time
began = time.monotonic()
def over():
    with open(os.environ["SECONDS"], "a") as file:
        print(os.environ["MODE"], time.monotonic() - began, file=file)
atexit.register(over)  # the first to register is the last to be called
from pathlib import Path
from hamlet.params import load_params
from hamlet.tracking import stage_run
name, params = sys.argv[1], load_params()
with stage_run(name, params) as run:
    for step in range(50):
        run.metrics({"x": params.seed + step}, step)
    run.tag("mode", os.environ["MODE"])
    case = os.environ["MODE"], os.environ["MLFLOW_EXPERIMENT_NAME"], name
    if case == ("queue", "default", "one"):
        from stages.common import cores  # which imports torch: once is enough
        run.tag("cores", cores())
    Path(name).write_text(str(params.seed))
"""
PIPELINE = """
stages:
  one:
    cmd: python work.py one
    deps: [work.py]
    params: [seed]
    outs: [one, artifacts/runs/one.json]
  two:
    cmd: python work.py two
    deps: [work.py, one]
    params: [seed]
    outs: [two, artifacts/runs/two.json]
"""


class Case(NamedTuple):
    """A repository whose stages were run in every mode against one store.

    Attributes:
        uri: where the runs should be.
        seconds: of each mode, its stages together.
        said: stderr of `dvc repro`.
    """

    repo: Repo
    uri: str
    seconds: dict[str, float]
    said: str


def small_repo(path: Path, port: int, store_name: str) -> tuple[Repo, str]:
    """A repository of two stages, and the URI at which its runs should be found."""
    path.mkdir()
    repo = Repo(path, warm=store_name not in PROCESSES)
    repo.env["PYTHONPATH"] = str(ROOT)
    given, expected = {
        "default": (None, f"sqlite:///{path / 'mlflow.db'}"),
        "relative": ("sqlite:///kept/runs.db", f"sqlite:///{path / 'kept/runs.db'}"),
    }.get(store_name, (f"http://127.0.0.1:{port}",) * 2)
    if given:
        repo.env["MLFLOW_TRACKING_URI"] = given
    repo.env["MLFLOW_EXPERIMENT_NAME"] = store_name
    repo.env["SECONDS"] = str(path.with_suffix(".seconds"))
    (path / "kept").mkdir()
    (path / "work.py").write_text(WORK)
    (path / "dvc.yaml").write_text(PIPELINE)
    (path / ".gitignore").write_text("/mlflow.db*\n/kept\n/artifacts\n/checkpoints\n/one\n/two\n")
    shutil.copy(ROOT / "params.yaml", path)
    repo.run("git", "init", "-q")
    repo.run("git", "config", "user.email", "t@t")
    repo.run("git", "config", "user.name", "t")
    repo.run("dvc", "init", "-q")
    return repo, expected


def queue(repo: Repo) -> None:
    """Two experiments by two workers, until both are done. Who only asks need not be a process; a
    fork says itself which execution it is of, and the workers' forks would all say the same."""
    asking, starting = Repo(repo.path), Repo(repo.path, warm=False)
    asking.env = starting.env = repo.env
    for seed in (14, 15):
        name = f"queued-{seed}"
        asking.run("dvc", "exp", "run", "-q", "--queue", "--name", name, "-S", f"seed={seed}")
    starting.run("dvc", "queue", "start", "-q", "-j", "2")
    until = time.monotonic() + 180
    try:
        while (status := asking.run("dvc", "queue", "status").stdout).count("Success") < 2:
            assert "Failed" not in status
            assert time.monotonic() < until, status
            time.sleep(1)
    finally:
        asking.run("dvc", "queue", "stop", "--kill", check=False)


def run_modes(repo: Repo) -> tuple[dict[str, float], str]:
    """Every mode once; seconds of each, without what DVC does; what `dvc repro` said."""
    experiment = ("dvc", "exp", "run", "-q")
    repo.env["MODE"] = "repro"
    said = repo.run("dvc", "repro").stderr
    repo.run("git", "add", "-A")
    repo.run("git", "commit", "-qm", "one")
    repo.env["MODE"] = "exp run"
    repo.run(*experiment, "--name", "in-place", "-S", "seed=12")
    repo.run("git", "reset", "-q", "--hard")
    repo.env["MODE"] = "temp"
    repo.run(*experiment, "--temp", "--name", "beside", "-S", "seed=13")
    repo.env["MODE"] = "queue"
    queue(repo)
    seconds = dict.fromkeys(MODES, 0.0)
    for line in Path(repo.env["SECONDS"]).read_text().splitlines():
        mode, _, told = line.rpartition(" ")
        seconds[mode] += float(told)
    return seconds, said


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> Iterator[dict[str, Case]]:
    """All of the matrix, the stores side by side, for most of it is waiting. The dead server is
    back at the end, and one more stage sees that."""
    folder = tmp_path_factory.mktemp("matrix")
    dead, living = free_port(), free_port()

    def case(name: str) -> Case:
        repo, uri = small_repo(folder / name, dead if name == "dead" else living, name)
        return Case(repo, uri, *run_modes(repo))

    with mlflow_server(living, folder / "served"), ThreadPoolExecutor() as pool:
        found = dict(zip(STORES, pool.map(case, STORES)))
        repo = found["dead"].repo
        repo.env["MODE"] = "later"
        with mlflow_server(dead, folder / "served late"):
            repo.run("dvc", "repro", "--force", "--single-item", "two")
            yield found


def executions(case: Case, experiment: str) -> list[tuple[Any, dict[str, Any]]]:
    """Each parent run, with its stages' runs."""
    client = MlflowClient(case.uri)
    known = client.get_experiment_by_name(experiment)
    runs = client.search_runs([known.experiment_id], max_results=1000)
    parents = [run for run in runs if "hamlet.execution" in run.data.tags]
    assert len(runs) - len(parents) == sum(
        run.data.tags.get("mlflow.parentRunId") in {p.info.run_id for p in parents} for run in runs
    )
    found = []
    for parent in parents:
        own = [r for r in runs if r.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
        stages = {run.data.tags["hamlet.stage"]: run for run in own}
        assert len(stages) == len(own)
        found.append((parent, stages))
    return found


@pytest.mark.parametrize("name", STORES)
def test_every_run_is_found_under_one_parent(cases, name):
    found = [
        (parent, stages)
        for parent, stages in executions(cases[name], name)
        if {run.data.tags["mode"] for run in stages.values()} != {"later"}
    ]
    modes = []
    for parent, stages in found:
        assert set(stages) == {"one", "two"}
        (mode,) = {run.data.tags["mode"] for run in stages.values()}
        modes.append(mode)
        assert parent.info.status == "FINISHED"
        for stage, run in stages.items():
            assert run.info.status == "FINISHED"
            assert run.data.params["seed"] == parent.data.params["seed"]
            assert run.data.metrics["x"] == float(run.data.params["seed"]) + 49
            assert parent.data.tags[f"hamlet.run.{stage}"] == run.info.run_id
    assert sorted(modes) == sorted([*MODES, "queue"])
    names = {parent.info.run_name for parent, _ in found}
    assert {"in-place", "beside", "queued-14", "queued-15"} < names
    if name == "default":
        queued = [s["one"] for (_, s), mode in zip(found, modes) if mode == "queue"]
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        assert {int(run.data.tags["cores"]) for run in queued} <= {max(1, cores // 2), cores}
    repo = cases[name].repo
    assert [path.name for path in repo.path.rglob("*.db")] == {
        "default": ["mlflow.db"], "relative": ["runs.db"]
    }.get(name, [])  # fmt: skip
    assert not list((repo.path / "mlflow.db.unsent").glob("*/")), "all of it was sent"


@pytest.mark.parametrize("mode", MODES)
def test_no_store_makes_it_slow(cases, mode, capsys):
    seconds = {name: case.seconds[mode] for name, case in cases.items()}
    with capsys.disabled():
        print(f"\n{mode}: " + ", ".join(f"{k} {v:.1f} s" for k, v in seconds.items()))
    assert 0 < seconds["dead"] <= 1.5 * seconds["default"] + HEAD_ROOM


def test_a_dead_server_is_one_line(cases):
    lines = [line for line in cases["dead"].said.splitlines() if "warning" in line]
    assert len(lines) == 2, "one of each stage"
    for stage, line in zip(("one", "two"), lines):
        assert "it does not answer" in line
        assert f"{stage} goes on" in line
    assert "warning" not in cases["server"].said
