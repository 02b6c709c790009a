"""A policy learned from a log as one ONNX file with a card, proved equal to the policy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hamlet.artifacts import HamletError, atomic_path, write_card
from hamlet.export.onnx import export_onnx
from hamlet.offline.log_store import LogStore
from hamlet.offline.model import LogPolicy, Tick
from hamlet.ort import open_unchecked

PARITY_BATCHES = (1, 7, 256)
TOLERANCE = 1e-4
KIND = "logged-policy"


def export_policy(
    policy: LogPolicy, store: LogStore, path: Path, extra: Mapping[str, Any]
) -> float:
    """Write `policy` to `path` with its card; returns the largest difference found.

    Inputs are the schema's fields, `action_mask` if the log has one, and `state_memory` if the
    policy is recurrent; outputs `action`, `probability`, `value` and `next_memory`.

    Raises:
        HamletError: ONNX Runtime gives other numbers than the policy on the log's own rows.
    """
    import onnx

    policy.eval()
    tick = Tick(policy, store.mask is not None).eval()
    outputs = ["action", "probability", "value", *(["next_memory"] if policy.recurrent else [])]
    model = export_onnx(tick, _inputs(policy, store, np.zeros(4, np.int64)), outputs)
    onnx.checker.check_model(model)
    source = model.SerializeToString(deterministic=True)
    worst = _parity(tick, policy, store, source, path)
    with atomic_path(path) as temporary:
        temporary.write_bytes(source)
    schema, actions = store.schema, store.schema.num_actions
    inputs = _inputs(policy, store, np.zeros(2, np.int64))
    limits = {n: [0, f.count - 1] for n, f in schema.fields.items() if f.count}
    memory = [{"name": "next_memory", "dtype": "float32", "shape": ["batch", policy.hidden]}]
    write_card(
        path,
        KIND,
        {
            "inputs": [
                {
                    "name": name,
                    "dtype": str(x.dtype).removeprefix("torch."),
                    "shape": ["batch", *x.shape[1:]],
                }
                for name, x in inputs.items()
            ],
            "outputs": [
                {"name": "action", "dtype": "int64", "shape": ["batch"]},
                {"name": "probability", "dtype": "float32", "shape": ["batch", actions]},
                {"name": "value", "dtype": "float32", "shape": ["batch"]},
                *(memory if policy.recurrent else []),
            ],
        },
        upstream={"log": store.folder.name.removeprefix("log-")},
        extra={
            "limits": limits,
            "policy": {"action": "action", "actions": schema.action_names},
            "parity": worst,
            **extra,
        },
    )
    return worst


def _inputs(policy: LogPolicy, store: LogStore, rows: np.ndarray) -> dict[str, Tensor]:
    """The graph's inputs for rows int64 [R] of the log, with no memory."""
    found = {name: torch.from_numpy(array[rows].copy()) for name, array in store.fields.items()}
    if store.mask is not None:
        mask = store.mask[rows].copy()
        mask[~mask.any(1)] = True  # a final row may have none
        found["action_mask"] = torch.from_numpy(mask)
    if policy.recurrent:
        found["state_memory"] = torch.zeros(len(rows), policy.hidden)
    return found


def _parity(tick: Tick, policy: LogPolicy, store: LogStore, source: bytes, path: Path) -> float:
    """The largest difference on the log's own rows, over a few ticks with the memory carried."""
    session = open_unchecked(source, name=str(path))
    names = [output.name for output in session.get_outputs()]
    generator = np.random.default_rng(0)
    worst = 0.0
    for batch in PARITY_BATCHES:
        memory: Tensor | None = None
        for _ in range(8 if policy.recurrent else 2):
            rows = generator.integers(len(store.action), size=batch)
            inputs = _inputs(policy, store, rows)
            if memory is not None:
                inputs["state_memory"] = memory
            with torch.no_grad():
                wanted = tick(*inputs.values())
            got = session.run(None, {name: x.numpy() for name, x in inputs.items()})
            for name, a, b in zip(names, wanted, got, strict=True):
                if name == "action":
                    continue
                scale = 1.0 + float(a.abs().max())
                worst = max(worst, float((a - torch.from_numpy(b)).abs().max()) / scale)
            differ = wanted[0] != torch.from_numpy(got[0])
            top = wanted[1].topk(2, -1).values
            unclear = top[:, 0] - top[:, 1] < TOLERANCE
            if worst > TOLERANCE or bool((differ & ~unclear).any()):
                raise HamletError(
                    f"{path}: ONNX Runtime differs from the policy by {worst:g}",
                    f"report it with the log's schema; {TOLERANCE:g} is allowed",
                )
            if policy.recurrent:
                memory = wanted[-1]
    return worst
