"""The agent's graph in other runtimes than the newest ONNX Runtime."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from served import lives_by_raw_onnxruntime

from benchmarks.gru import write_gru
from hamlet.artifacts import HamletError, write_card
from hamlet.export.onnx import RUNTIMES, runtimes_of
from hamlet.ort import open_session

WEB = "onnxruntime-web@1.30.0"


def products(graph: onnx.GraphProto, types: dict[str, int]) -> list[tuple[str, str]]:
    """(maker of an input, element type) of every input of every product, subgraphs too."""
    types = types | {v.name: v.type.tensor_type.elem_type for v in graph.value_info}
    types |= {v.name: v.type.tensor_type.elem_type for v in graph.input}
    types |= {w.name: w.data_type for w in graph.initializer}
    makers = {name: node.op_type for node in graph.node for name in node.output}
    found = []
    for node in graph.node:
        if node.op_type in ("MatMul", "Gemm"):
            found += [(makers.get(n, ""), TensorProto.DataType.Name(types[n])) for n in node.input]
        for attribute in node.attribute:
            if attribute.HasField("g"):
                found += products(attribute.g, types)
    return found


def test_no_float64_product_takes_a_transpose(agent):
    """ONNX Runtime fuses both into FusedMatMul, of which it had no float64 kernel before 1.26."""
    graph = onnx.shape_inference.infer_shapes(onnx.load(agent)).graph
    found = products(graph, {})
    assert ("Transpose", "DOUBLE") not in found
    assert sum(kind == "DOUBLE" for _, kind in found) > 4, "it sees the products at all"


def test_a_graph_of_64_bits_says_which_runtimes_it_is_for(agent, tmp_path):
    assert runtimes_of(agent) == RUNTIMES
    assert onnx.load(agent).doc_string == RUNTIMES
    assert runtimes_of(write_gru(tmp_path / "gru.onnx")) is None


def test_openvino_is_refused_for_it(tmp_path):
    path = write_gru(tmp_path / "gru.onnx")
    write_card(path, "agent", {"inputs": [], "outputs": []}, extra={"runtimes": RUNTIMES})
    with pytest.raises(HamletError, match=r"cannot run in OpenVINO.*acts otherwise"):
        open_session(path, ["OpenVINOExecutionProvider"])
    assert open_session(path, ["CPUExecutionProvider"])


def as_json(array: np.ndarray) -> dict:
    return {"shape": array.shape, "data": array.ravel().tolist()}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node to run it")
def test_onnxruntime_web_acts_alike(agent, seen, tmp_path):
    lives, ticks = 16, 20
    batches = [[seen[40 * life + tick] for life in range(lives)] for tick in range(ticks)]
    expected = lives_by_raw_onnxruntime(agent, batches, list(range(lives)))
    inputs = json.loads(agent.with_name("agent.onnx.json").read_text())["schema"]["inputs"]
    states = [e for e in inputs if e["name"].startswith("state_")]
    start = {e["name"]: np.zeros((lives, *e["shape"][1:]), e["dtype"]) for e in states}
    start["state_rng"][:] = range(lives)
    case = {
        "states": {name: name.replace("state_", "next_") for name in start},
        "types": {e["name"]: e["dtype"] for e in inputs},
        "start": {name: as_json(array) for name, array in start.items()},
        "ticks": [
            {name: as_json(np.stack([row[name] for row in rows])) for name in rows[0]}
            for rows in batches
        ],
    }
    (tmp_path / "case.json").write_text(json.dumps(case))
    shutil.copy(Path(__file__).with_name("play.mjs"), tmp_path)
    npm = ["npm", "install", "--no-save", "--ignore-scripts", WEB]
    subprocess.run(npm, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    done = subprocess.run(
        ["node", "play.mjs", str(agent), "case.json"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected.tolist()
    assert len(np.unique(expected)) > 1
