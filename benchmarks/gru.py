"""A GRU policy written node by node: small, quick, float32, and none of Hamlet's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

SEEN, HIDDEN, ACTIONS = 6, 16, 5


def write_gru(path: Path, seed: int = 0) -> Path:
    """`obs`, `h_in` [B, ...] -> `action`, `logits`, `h_out`, without a card."""
    rng = np.random.default_rng(seed)
    sizes = {"wx": (SEEN, 3 * HIDDEN), "wh": (HIDDEN, 3 * HIDDEN), "wo": (HIDDEN, ACTIONS)}
    weights = [
        numpy_helper.from_array(rng.normal(0, 1, size).astype(np.float32), name)
        for name, size in sizes.items()
    ]
    weights.append(numpy_helper.from_array(np.array([1], np.float32), "one"))
    node = helper.make_node
    nodes = [
        node("MatMul", ["obs", "wx"], ["x"]),
        node("MatMul", ["h_in", "wh"], ["h"]),
        node("Split", ["x"], ["xr", "xz", "xn"], axis=1, num_outputs=3),
        node("Split", ["h"], ["hr", "hz", "hn"], axis=1, num_outputs=3),
        node("Add", ["xr", "hr"], ["r_"]),
        node("Sigmoid", ["r_"], ["r"]),
        node("Add", ["xz", "hz"], ["z_"]),
        node("Sigmoid", ["z_"], ["z"]),
        node("Mul", ["r", "hn"], ["rh"]),
        node("Add", ["xn", "rh"], ["n_"]),
        node("Tanh", ["n_"], ["n"]),
        node("Sub", ["one", "z"], ["not_z"]),
        node("Mul", ["not_z", "n"], ["new"]),
        node("Mul", ["z", "h_in"], ["old"]),
        node("Add", ["new", "old"], ["h_out"]),
        node("MatMul", ["h_out", "wo"], ["logits"]),
        node("ArgMax", ["logits"], ["action"], axis=1, keepdims=0),
    ]

    def value(name: str, dtype: int, *shape: int) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, dtype, ["batch", *shape])

    graph = helper.make_graph(
        nodes,
        "gru",
        [value("obs", TensorProto.FLOAT, SEEN), value("h_in", TensorProto.FLOAT, HIDDEN)],
        [
            value("action", TensorProto.INT64),
            value("logits", TensorProto.FLOAT, ACTIONS),
            value("h_out", TensorProto.FLOAT, HIDDEN),
        ],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def lives(path: Path, ticks: int, count: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """What `count` lives see, float32 [T, N, SEEN], and their actions by onnxruntime and nothing
    else, int64 [T, N]."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    seen = np.random.default_rng(seed).normal(0, 1, (ticks, count, SEEN)).astype(np.float32)
    state, actions = np.zeros((count, HIDDEN), np.float32), []
    for tick in seen:
        action, _, state = session.run(None, {"obs": tick, "h_in": state})
        actions.append(action)
    return seen, np.stack(actions)
