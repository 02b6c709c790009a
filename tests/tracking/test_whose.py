"""Where the runs of a repository are, and which of them are of one execution."""

import os
import shutil
import subprocess
import sys

import pytest
from mlflow.tracking import MlflowClient
from tracked import ROOT

from hamlet.tracking import execution_key, processes, read_file, repo_root, stage_run, tracking_uri


def test_the_database_is_at_the_root_of_the_real_repository(repo, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    copy = repo / ".dvc" / "tmp" / "exps" / "tmpabc"
    (copy / ".dvc").mkdir(parents=True, exist_ok=True)
    (repo / "sub").mkdir(exist_ok=True)
    for folder in (repo, repo / "sub", copy):
        monkeypatch.chdir(folder)
        assert repo_root() == repo
    monkeypatch.setenv("DVC_ROOT", str(copy))
    assert repo_root() == repo
    assert tracking_uri() == f"sqlite:///{repo}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost:1")
    assert tracking_uri() == "http://localhost:1"


KEY = "from hamlet.tracking import execution_key; print(execution_key())"


def test_children_of_one_dvc_process_share_a_key(tmp_path, monkeypatch):
    monkeypatch.delenv("HAMLET_EXECUTION", raising=False)
    dvc = tmp_path / "dvc"  # a process whose program is called dvc, as the real one's is
    dvc.write_text(
        f"import subprocess, sys\nfor _ in range(2):\n"
        f"    subprocess.run('{sys.executable} -c \"{KEY}\"; true', shell=True, check=True)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}

    def keys():
        done = subprocess.run(
            [sys.executable, str(dvc)], env=env, capture_output=True, text=True, check=True
        )
        return done.stdout.split("\n")[:2]

    first, second = keys(), keys()
    assert first[0] == first[1]
    assert second[0] == second[1]
    assert first[0] != second[0]
    monkeypatch.setenv("HAMLET_EXECUTION", "mine")
    assert execution_key() == "mine"


def test_without_dvc_a_process_is_its_own_execution(monkeypatch):
    monkeypatch.delenv("HAMLET_EXECUTION", raising=False)
    assert execution_key() == execution_key()
    assert str(os.getpid()) in execution_key() or "dvc" in " ".join(sys.argv)


@pytest.mark.parametrize("uri", [None, "sqlite:///kept/runs.db"])
def test_a_moved_checkout_takes_its_files_along(repo, tmp_path, monkeypatch, uri):
    """Into a path with a space; what is logged there does not go to the old one."""
    monkeypatch.setenv("HAMLET_EXECUTION", "moved")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    if uri:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    old, new = tmp_path / "old", tmp_path / "a new place"
    (old / "kept").mkdir(parents=True)
    (old / ".dvc").mkdir()
    shutil.copy(repo / "mlflow.db", old / ("kept/runs.db" if uri else "mlflow.db"))
    made = []
    for folder in (old, new):
        if folder == new:
            old.rename(new)
        monkeypatch.chdir(folder)
        (folder / "note.txt").write_text(f"in {folder.name}")
        with stage_run("work") as run:
            run.artifact("note.txt")
        made.append(run.run_id)
    assert not old.exists()
    client = MlflowClient(tracking_uri())
    assert [read_file(client, run_id, "note.txt") for run_id in made] == [
        "in old", "in a new place"
    ]  # fmt: skip
    beside = new / "kept" if uri else new  # where the database is
    assert len(list(beside.glob("mlartifacts/**/note.txt"))) == 2


@pytest.mark.skipif(os.name == "nt", reason="there psutil is asked")
def test_those_above_are_told_from_the_nearest_on():
    above = processes.processes_above()
    assert above[0].pid == os.getppid()
    assert [one.ppid() for one in above[:-1]] == [one.pid for one in above[1:]]
