"""The agent as an MLflow `python_function` model that remembers its sessions.

`save(agent, folder)` writes it; then, wherever hamlet and mlflow are installed:

    model = mlflow.pyfunc.load_model(folder)
    model.predict(observations, params={"session": "world 3"})["action"]

Observations are arrays [B, ...] by field name: B agents that act together under one session's name,
from call to call, until `params={"end": True}`. MLflow runs this file when it loads the model, so
nothing is unpickled.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from hamlet.artifacts import HamletError, card_path
from hamlet.serving.agent import STATE, Arrays, OnnxAgent

try:
    import mlflow
    from mlflow.pyfunc import PythonModel
except ImportError:  # only `save` and MLflow itself need it
    mlflow = None  # type: ignore[assignment]
    PythonModel = object  # type: ignore[assignment, misc]

MAX_SESSIONS = 10_000  # the least recently used one is forgotten


class Flavour(PythonModel):
    """What MLflow calls."""

    def load_context(self, context: Any) -> None:
        self.agent = OnnxAgent(context.artifacts["agent"])
        self.sessions: OrderedDict[str, Arrays] = OrderedDict()

    def predict(
        self, context: Any, model_input: Any, params: dict[str, Any] | None = None
    ) -> dict[str, np.ndarray]:
        """One tick: action int64 [B].

        Raises:
            HamletError: naming the field that is wrong; or the session has another number of rows.
        """
        params = params or {}
        session = str(params.get("session", ""))
        fields = self.agent.check(dict(model_input))
        inputs = self.agent.signature.inputs
        rows = max((inputs[n].rows_first(x).shape[0] for n, x in fields.items()), default=1)
        state = self.sessions.pop(session, None)
        if state is None:
            state = self.agent.start(rows, int(params.get("seed", 0)))
        for name, value in state.items():
            have = inputs[name].rows_first(value).shape[0]
            if have != rows:
                self.sessions[session] = state
                raise HamletError(
                    f"session '{session}' has {have} rows, {rows} came", "begin another session"
                )
        decision = self.agent.act(fields, state)
        if not params.get("end", False):
            self.sessions[session] = decision.state
            if len(self.sessions) > MAX_SESSIONS:
                self.sessions.popitem(last=False)
        return {"action": decision.action}


def save(agent: str | Path, folder: str | Path) -> None:
    """Write the model of an ONNX file with its card to `folder`, which must not exist.

    Raises:
        HamletError: mlflow is not installed, or the file is missing or corrupt.
    """
    if mlflow is None:
        raise HamletError("mlflow is not installed", "run `pip install mlflow`")
    from mlflow.models import ModelSignature
    from mlflow.types import ParamSchema, ParamSpec, Schema, TensorSpec

    card = OnnxAgent(agent).card
    inputs: Any = [
        TensorSpec(np.dtype(e["dtype"]), [-1, *e["shape"][1:]], e["name"])
        for e in card["schema"]["inputs"]
        if not e["name"].startswith(STATE)
    ]
    params: Any = [
        ParamSpec("session", "string", ""),
        ParamSpec("seed", "long", 0),
        ParamSpec("end", "boolean", False),
    ]
    outputs: Any = Schema([TensorSpec(np.dtype("int64"), [-1], "action")])
    mlflow.pyfunc.save_model(
        path=str(folder),
        python_model=__file__,
        artifacts={"agent": str(agent), "card": str(card_path(agent))},
        signature=ModelSignature(Schema(inputs), outputs, ParamSchema(params)),
        pip_requirements=["hamlet[cpu]"],
    )


if __name__.startswith("code_model_"):  # MLflow runs the file under such a name
    mlflow.models.set_model(Flavour())
