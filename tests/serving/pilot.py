"""A small policy with a memory, a mask and whole numbers, and requests to a server of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from policies import HIDDEN, OBS
from served import Answer, Served

INFER = "/v2/models/masked/infer"
LINE = "POST " + INFER + " HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n"


def life(policy: Path, rows: np.ndarray) -> list[int]:
    import onnxruntime

    session = onnxruntime.InferenceSession(policy, providers=["CPUExecutionProvider"])
    h, actions = np.zeros((1, HIDDEN), np.float32), []
    for row in rows:
        feeds = {
            "obs": row[None], "action_mask": np.ones((1, 5), bool),
            "level": np.array([[1, 0]]), "h": h,
        }  # fmt: skip
        action, _, h = session.run(None, feeds)
        actions.append(int(action[0]))
    return actions


def request(row: np.ndarray, name: object, **more: object) -> dict:
    """One tick in JSON; `more` are parameters, but for `id` and `outputs`."""
    top = {key: more.pop(key) for key in ("id", "outputs") if key in more}
    return {
        "parameters": {"sequence_id": name, **more},
        "inputs": [
            {"name": "obs", "shape": [1, OBS], "datatype": "FP32", "data": row.tolist()},
            {"name": "action_mask", "shape": [1, 5], "datatype": "BOOL", "data": [True] * 5},
            {"name": "level", "shape": [1, 2], "datatype": "INT64", "data": [1, 0]},
        ],
        "outputs": [{"name": "action"}],
        **top,
    }


def tick(server: Served, row: np.ndarray, name: object, **more: object) -> Answer:
    return server.ask("POST", INFER, request(row, name, **more))


def observation(row: np.ndarray) -> dict:
    return {"obs": row, "action_mask": np.ones(5, bool), "level": np.array([1, 0])}
