"""Agents and provers that are small, and what the registry says of them."""

import os
import subprocess
import sys
from pathlib import Path

import mlflow
import numpy as np
import onnx
import onnxruntime
import yaml
from onnx import TensorProto, helper, numpy_helper

from hamlet import tracking
from hamlet.artifacts import write_card, write_json
from hamlet.tracking import tracking_uri

ROOT = Path(__file__).parents[2]
SCORES = {
    "mean_return": 400.5,
    "rest_return": 134.0,
    "survival": 0.998,
    "ratio_over_rest": 2.99,
    "ratio_over_rest_ci95": [2.9, 3.1],
    "scores": {
        "random": {"mean_return": 68.5, "survival": 0.0},
        "rest": {"mean_return": 134.0, "survival": 0.1},
        "expert": {"mean_return": 426.0, "survival": 0.999},
    },
}


# The training's own mean return is not what the gate looks at.
TRAINED = {"loss": 0.1, "value_loss": 0.01, "goal_entropy": 0.06, "mean_return": 1.0}


def write_agent(repo: Path, weight: float) -> None:
    """A small agent: two named inputs, a float output and an action, dynamic batch."""
    x = helper.make_tensor_value_info("view", TensorProto.FLOAT, ["batch", 3])
    h = helper.make_tensor_value_info("hidden", TensorProto.FLOAT, ["batch", 4])
    action = helper.make_tensor_value_info("action", TensorProto.INT64, ["batch"])
    new = helper.make_tensor_value_info("new_hidden", TensorProto.FLOAT, ["batch", 4])
    matrix = np.linspace(-weight, weight, 12, dtype=np.float32).reshape(3, 4)
    nodes = [
        helper.make_node("MatMul", ["view", "w"], ["mixed"]),
        helper.make_node("Add", ["mixed", "hidden"], ["new_hidden"]),
        helper.make_node("ArgMax", ["new_hidden"], ["action"], axis=1, keepdims=0),
    ]
    weights = [numpy_helper.from_array(matrix, "w")]
    graph = helper.make_graph(nodes, "agent", [x, h], [action, new], weights)
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])
    path = repo / "artifacts" / "agent.onnx"
    path.parent.mkdir(exist_ok=True)
    onnx.save(model, path)
    write_card(path, "agent", {"inputs": [], "outputs": []}, {"policy": "p" * 64})


def write_prover(repo: Path, mrr: float) -> None:
    """A small scorer, and its ranks beside the symbolic baseline's 0.95."""
    x = helper.make_tensor_value_info("prior", TensorProto.FLOAT, ["batch"])
    score = helper.make_tensor_value_info("score", TensorProto.FLOAT, ["batch"])
    nodes = [helper.make_node("Relu", ["prior"], ["score"])]
    graph = helper.make_graph(nodes, f"prover{mrr}", [x], [score])
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])
    path = repo / "artifacts" / "prover.onnx"
    onnx.save(model, path)
    write_card(path, "prover scorer", {"inputs": [], "outputs": []})
    ranks = {"mrr_all": mrr, "mrr_100": 0.97, "symbolic_mrr_all": 0.95, "symbolic_mrr_100": 0.97}
    write_json(repo / "artifacts/metrics/prove_evaluate.json", ranks)
    rows = [f"0 {i} {i + 1},2,{1 / (mrr + 0.01 * (-1) ** i):.6f},1.0" for i in range(20)]
    (repo / "artifacts/ranks.csv").write_text("\n".join(["triple,open,rank,symbolic_rank", *rows]))


def write_returns(repo: Path, *more: float, rest: float = 134.0) -> None:
    """What the agent and one that rests got in each world."""
    rows = [f"rest,{i},{rest + i:.6g}" for i in range(len(more))]
    rows += [f"agent,{i},{400 + i + more[i]:.6g}" for i in range(len(more))]
    path = repo / "artifacts/plots/returns.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["player,world,return", *rows]) + "\n")


def set_gate(repo: Path, ratio: float, **limits: float) -> None:
    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    params["register"] |= {"min_ratio_over_rest": ratio, "min_mean_return": 0.0} | limits
    (repo / "params.yaml").write_text(yaml.safe_dump(params))


def versions() -> dict[int, str]:
    found = tracking.client().search_model_versions("name = 'hamlet-agent'")
    return {int(v.version): v.tags["sha256"] for v in found}


def champion() -> int | None:
    found = tracking.champion(tracking.client())
    return int(found.version) if found else None


def runs() -> list:
    client = tracking.client()
    return client.search_runs([client.get_experiment_by_name("hamlet").experiment_id])


def load_champion() -> onnx.ModelProto:
    mlflow.set_tracking_uri(tracking_uri())
    mlflow.set_registry_uri(tracking_uri())
    return mlflow.onnx.load_model("models:/hamlet-agent@champion")


STAGE = (
    "import runpy, sys; runpy.run_module('stages.register', run_name='__main__'); "
    "assert 'torch' not in sys.modules; print('imported:', *{'mlflow'} & set(sys.modules))"
)


def start_stage(execution: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", STAGE],
        env={**os.environ, "PYTHONPATH": str(ROOT), "HAMLET_EXECUTION": execution},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_stage(execution: str) -> tuple[str, set[str]]:
    """What the stage says, and whether it has imported MLflow (PyTorch never)."""
    process = start_stage(execution)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    said, _, imported = out.partition("imported:")
    return said, set(imported.split())


def play(model: str | bytes) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    state, played = np.zeros((64, 4), np.float32), []
    for _ in range(20):
        view = rng.normal(size=(64, 3)).astype(np.float32)
        action, state = session.run(["action", "new_hidden"], {"view": view, "hidden": state})
        played += [action, state]
    return played


def tags(number: int) -> dict[str, str]:
    return tracking.client().get_model_version("hamlet-agent", str(number)).tags
