"""Where the runs of a repository are, and which of them are of one execution."""

import os
import subprocess
import sys

from tracked import ROOT

from hamlet.tracking import execution_key, repo_root, tracking_uri


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
