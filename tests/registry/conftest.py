"""A repository that is about to register its first agent and prover."""

import shutil

import pytest
from mlflow.tracking import MlflowClient
from registered import SCORES, TRAINED, set_gate, write_agent, write_prover, write_returns

from hamlet.artifacts import write_json


@pytest.fixture(scope="module")
def fresh_database(tmp_path_factory):
    path = tmp_path_factory.mktemp("db") / "mlflow.db"
    client = MlflowClient(f"sqlite:///{path}")
    client.search_experiments()
    client._tracking_client.store.engine.dispose()
    return path


@pytest.fixture
def repo(tmp_path, monkeypatch, fresh_database):
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI", "MLFLOW_RUN_ID", "DVC_ROOT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HAMLET_EXECUTION", "first")
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".dvc").mkdir()
    shutil.copy(fresh_database, tmp_path / "mlflow.db")
    write_agent(tmp_path, 1.0)
    write_prover(tmp_path, 0.96)
    write_returns(tmp_path, 0, 0, 0, 0)
    write_json(tmp_path / "artifacts/metrics/evaluate.json", SCORES)
    write_json(tmp_path / "artifacts/metrics/policy.json", TRAINED)
    set_gate(tmp_path, 2.0)
    return tmp_path
