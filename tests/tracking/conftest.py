"""A repository with MLflow's database, and a client of it."""

import subprocess

import pytest
from mlflow.tracking import MlflowClient
from tracked import ROOT

from hamlet.params import Params, load_params
from hamlet.tracking import tracking_uri


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    """An empty DVC repository whose database is already made (that takes seconds)."""
    root = tmp_path_factory.mktemp("repo")
    (root / ".dvc").mkdir()
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    commit = ["-c", "user.name=t", "-c", "user.email=t@t", "commit", "--allow-empty", "-qm", "one"]
    subprocess.run(["git", *commit], cwd=root, check=True)
    MlflowClient(f"sqlite:///{root / 'mlflow.db'}").search_experiments()
    return root


@pytest.fixture
def here(repo, monkeypatch, request):
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI", "MLFLOW_RUN_ID", "DVC_ROOT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(repo)
    monkeypatch.setenv("HAMLET_EXECUTION", request.node.name)
    return repo


@pytest.fixture
def client(here):
    return MlflowClient(tracking_uri())


@pytest.fixture(scope="module")
def params() -> Params:
    return load_params(ROOT / "params.yaml")
