"""Served from MLflow's registry: the alias moves, points nowhere, and MLflow goes away."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from served import Served

from hamlet.artifacts import check_card
from hamlet.serving.agent import OnnxAgent

CHAMPION = "models:/hamlet-agent@champion"


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Work in a repository as a stage of one execution does."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI", "MLFLOW_RUN_ID", "DVC_ROOT"):
            patch.delenv(name, raising=False)
        patch.setenv("HAMLET_EXECUTION", "once")
        patch.chdir(folder)
        yield


@pytest.fixture(scope="module")
def filled(agent, other, tmp_path_factory) -> Path:
    """A repository whose registry holds two agents: 1 is `agent`, 2 `other`, the champion 1."""
    pytest.importorskip("mlflow")
    from hamlet import tracking
    from hamlet.registry import Candidate, Cases, log_model

    folder = tmp_path_factory.mktemp("registry")
    (folder / ".dvc").mkdir()
    with inside(folder):
        with tracking.stage_run("register") as run:
            assert run.flush(60)
            for path in (agent, other):
                cases = Cases("return", "", [])
                candidate = Candidate(tracking.MODEL, path, check_card(path), {}, [], cases, {})
                log_model(run, candidate)
        tracking.client().set_registered_model_alias("hamlet-agent", "champion", "1")
    return folder


@pytest.fixture
def registry(filled, tmp_path):
    """A client of a copy of it, the working directory."""
    from hamlet import tracking

    shutil.copytree(filled, tmp_path / "copy")
    with inside(tmp_path / "copy"):
        yield tracking.client()


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


def test_the_alias_moves_and_sessions_stay(registry, agent, other, seen):
    hashes = {str(i): OnnxAgent(p).card["sha256"] for i, p in enumerate((agent, other), 1)}
    with Served(CHAMPION, env=environment()) as server:
        assert server.first("loaded")["sha256"] == hashes["1"]
        first = server.tick(seen[0], "old", sequence_start=True).json
        assert first["model_version"] == "1"
        registry.set_registered_model_alias("hamlet-agent", "champion", "2")
        assert server.wait("loaded", 60)["sha256"] == hashes["2"]
        assert server.tick(seen[1], "old").json["model_version"] == "1"
        assert server.tick(seen[0], "new", sequence_start=True).json["model_version"] == "2"
        path = "/v2/models/hamlet-agent/versions/2/ready"
        assert server.ask("GET", path).status == 200
        registry.set_registered_model_alias("hamlet-agent", "champion", "1")  # roll back
        server.wait("loaded", 60)
        assert server.tick(seen[0], "newer", sequence_start=True).json["model_version"] == "1"
        assert server.tick(seen[1], "new").json["model_version"] == "2"


def test_sessions_outlive_the_alias(registry, seen):
    with Served(CHAMPION, env=environment()) as server:
        server.first("loaded")
        assert server.tick(seen[0], "old", sequence_start=True).json["model_version"] == "1"
        registry.delete_registered_model_alias("hamlet-agent", "champion")
        assert "is not to be had" in server.wait("not loaded", 60)["error"]
        assert server.tick(seen[2], "old").status == 200
        assert server.ask("GET", "/v2/health/ready").status == 200


def test_sessions_outlive_the_registry(registry, seen):
    """The registry is no database any more, then it is back and names the other agent."""
    with Served(CHAMPION, env=environment()) as server:
        server.first("loaded")
        assert server.tick(seen[0], "old", sequence_start=True).json["model_version"] == "1"
        Path("mlflow.db").rename("away.db")
        assert "mlflow.db is missing" in server.wait("not loaded", 60)["error"]
        Path("mlflow.db").write_bytes(b"nonsense" * 1000)
        assert "is not to be had" in server.wait("not loaded", 60)["error"]
        assert server.tick(seen[3], "old").status == 200
        assert server.tick(seen[0], "newest", sequence_start=True).status == 200

        registry._tracking_client.store.engine.dispose()
        shutil.copy("away.db", "mended.db")
        with sqlite3.connect("mended.db") as database:
            database.execute("UPDATE registered_model_aliases SET version = 2")
        os.replace("mended.db", "mlflow.db")
        server.wait("loaded", 60)
        assert server.tick(seen[0], "last", sequence_start=True).json["model_version"] == "2"
        assert server.tick(seen[4], "old").json["model_version"] == "1"


def test_a_registry_that_is_not_there_is_waited_for(registry, seen):
    Path("mlflow.db").rename("away.db")
    with Served(CHAMPION, env=environment()) as server:
        assert "mlflow.db is missing" in server.first("not loaded")["error"]
        assert server.ask("GET", "/v2/health/live").status == 200
        for answer in (
            server.ask("GET", "/v2/health/ready"),
            server.tick(seen[0], "early", sequence_start=True),
        ):
            assert answer.status == 503
            assert "retry-after" in {name.lower() for name in answer.headers}
        Path("away.db").rename("mlflow.db")
        server.wait("loaded", 60)
        assert server.ask("GET", "/v2/health/ready").status == 200
        assert server.tick(seen[0], "early", sequence_start=True).status == 200


def test_one_version_by_its_number(registry, seen):
    with Served("models:/hamlet-agent/2", env=environment()) as server:
        server.first("loaded")
        answer = server.tick(seen[0], "a", sequence_start=True)
        assert answer.json["model_version"] == "2"


def test_a_moved_registry_is_served_from_anywhere(registry, agent, other, monkeypatch):
    """Its files lie beside it, by relative names: the old place is not looked at."""
    from hamlet.serving.source import RegistrySource

    here = Path.cwd()
    moved = here.with_name(here.name + "-moved")
    here.rename(moved)
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{moved / 'mlflow.db'}")
    for number, path in (("1", agent), ("2", other)):
        name = f"models:/hamlet-agent/{number}"
        loaded, version = RegistrySource(name, "hamlet-agent", None, number).fetch()
        assert version == number
        assert loaded.card["sha256"] == check_card(path)["sha256"]


def test_other_models_of_the_registry(registry, prover, tmp_path):
    """The prover's scorer as the stage registers it, and a policy that somebody else logged."""
    import mlflow
    import onnx
    from policies import HIDDEN, OBS, by_raw_onnxruntime, hand_made_gru

    from hamlet import tracking
    from hamlet.registry import Candidate, Cases, log_model

    file, asked = prover
    with tracking.stage_run("register") as run:
        assert run.flush(60)
        card, named = check_card(file), tracking.PROVER_MODEL
        candidate = Candidate(named, file, card, {}, [], Cases("mrr", "", []), {})
        log_model(run, candidate)
    registry.set_registered_model_alias(tracking.PROVER_MODEL, "champion", "1")
    with Served(f"models:/{tracking.PROVER_MODEL}@champion", env=environment()) as server:
        server.first("loaded")
        seen = {name: x[0].tolist() for name, x in asked.items()}
        answer = server.ask("POST", "/act", {"observation": seen})
        assert answer.status == 200, answer.body
        want = OnnxAgent(file).session.run(["score"], {n: x[:1] for n, x in asked.items()})[0]
        assert answer.json["action"] == pytest.approx(float(want[0]), abs=1e-5)

    made = hand_made_gru(tmp_path)
    with mlflow.start_run():
        mlflow.onnx.log_model(
            onnx.load(made.path), name="pilot", registered_model_name="pilot",
            pip_requirements=["onnxruntime"], save_as_external_data=False,
        )  # fmt: skip
    registry.set_registered_model_alias("pilot", "best", "1")
    rows = np.random.default_rng(4).uniform(-1, 1, (12, 1, OBS)).astype(np.float32)
    expected = by_raw_onnxruntime(made, rows)[:, 0].tolist()
    with Served("models:/pilot@best", env=environment()) as server:
        assert server.first("policy")["states"] == made.states
        got = []
        for t in range(12):
            body = {"observation": {"obs": rows[t, 0].tolist()}, "session": "a", "start": t == 0}
            got.append(server.ask("POST", "/act", body).json["action"])
        assert got == expected
        state = {"inputs": [{"name": "h", "datatype": "FP32", "shape": [1, HIDDEN]}]}
        assert server.ask("POST", "/v2/models/pilot/infer", state).status == 400
