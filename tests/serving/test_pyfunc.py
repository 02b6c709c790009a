"""MLflow's `python_function` flavour remembers its sessions."""

from __future__ import annotations

import numpy as np
import pytest
from served import lives_by_raw_onnxruntime

from hamlet.serving.agent import OnnxAgent
from hamlet.serving.pyfunc import save


def test_a_loaded_model_carries_the_state(agent, seen, tmp_path):
    mlflow = pytest.importorskip("mlflow")
    save(agent, tmp_path / "model")
    assert not list((tmp_path / "model").rglob("*.pkl"))
    model = mlflow.pyfunc.load_model(str(tmp_path / "model"))
    rows = [[seen[40 * s + t] for s in range(3)] for t in range(6)]
    for session, seed in (("one", 4), ("two", 5)):
        first = OnnxAgent(agent).start(3, seed)["state_rng"].tolist()
        expected = lives_by_raw_onnxruntime(agent, rows, first)
        for tick, now in enumerate(rows):
            fields = {n: np.stack([row[n] for row in now]) for n in now[0]}
            got = model.predict(fields, params={"session": session, "seed": seed})
            assert got["action"].tolist() == expected[tick].tolist()
    again = {n: np.stack([row[n] for row in rows[0]]) for n in rows[0][0]}
    seeded = {"session": "one", "seed": 4}
    later = model.predict(again, params=seeded | {"end": True})["action"].tolist()
    begun = model.predict(again, params=seeded)["action"].tolist()
    first = OnnxAgent(agent).start(3, 4)["state_rng"].tolist()
    assert begun == lives_by_raw_onnxruntime(agent, rows[:1], first)[0].tolist()
    assert len(later) == 3
