"""Stage `agent`: the frozen A, B, C and D as one ONNX file, proved equal to the graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor

from hamlet.artifacts import HamletError, atomic_path, card_path, read_json, write_card
from hamlet.export.frozen import tensor_schema
from hamlet.export.onnx import OPSET, export_onnx, runtimes_of
from hamlet.own import paths
from hamlet.own.data import loaded
from hamlet.own.running import Running
from hamlet.plain.agent import STATES, PlainAgent, example_inputs
from hamlet.serving.agent import OnnxAgent
from hamlet.worlds.contract import WorldShape

PARITY_BATCHES = (1, 7, 64)
PARITY_TICKS = 16
TOLERANCE = 1e-4
ILLEGAL = -1e30


def agent(s: Running) -> None:
    """Put the frozen modules together and export them."""
    files = {
        "perception": paths.PERCEPTION, "world_model": paths.WORLD_MODEL, "policy": paths.POLICY
    }  # fmt: skip
    if s.shape.num_agents > 1:
        files["social"] = paths.SOCIAL
    graphs, cards = {}, {}
    for kind, path in files.items():
        graphs[kind], cards[kind] = loaded(path, s.world)
        if kind != "perception" and (
            cards[kind]["upstream"]["perception"] != cards["perception"]["sha256"]
        ):
            raise HamletError(
                f"{path} was trained on another {paths.PERCEPTION}", "run `dvc repro`"
            )
    mind = PlainAgent(
        s.shape, graphs["perception"], graphs["world_model"], graphs["policy"],
        graphs.get("social"), cards["policy"]["value_scale"],
    ).eval()  # fmt: skip
    hidden = cards["perception"]["hidden"]
    export(mind, hidden, s.world, {kind: card["sha256"] for kind, card in cards.items()})
    gap, splits = compare(mind, OnnxAgent(paths.AGENT), hidden, s.params.seed)
    if gap > TOLERANCE or splits > 1:
        paths.AGENT.unlink()
        card_path(paths.AGENT).unlink()
        raise HamletError(
            f"{paths.AGENT} differs from PyTorch by {gap:.2g}, and in {splits} actions",
            "run `hamlet doctor`: these versions of torch and onnxruntime do not agree",
        )
    s.write({"parity": gap, "split_ties": splits, "onnx_bytes": paths.AGENT.stat().st_size})


def export(mind: PlainAgent, hidden: int, world: str, upstream: dict[str, str]) -> None:
    """Write paths.AGENT and its card."""
    examples = example_inputs(mind.shape, hidden, 4, torch.Generator().manual_seed(0))
    inputs = dict(zip(mind.inputs, examples, strict=True))
    model = export_onnx(mind, inputs, mind.outputs)
    onnx.checker.check_model(model)
    with atomic_path(paths.AGENT) as temporary:
        temporary.write_bytes(model.SerializeToString(deterministic=True))
    with torch.no_grad():
        produced = mind(*examples)
    described = read_json(paths.WORLD)
    write_card(
        paths.AGENT,
        "agent",
        {
            "inputs": tensor_schema(mind.inputs, examples),
            "outputs": tensor_schema(mind.outputs, produced),
        },
        upstream,
        world,
        {
            "world": described["world"],
            "world_made_of": {k: described[k] for k in ("make", "kwargs", "packages")},
            "policy": {"action": "action", "actions": list(mind.shape.actions)},
            "limits": limits(mind.shape),
            "opset": OPSET,
            "runtimes": runtimes_of(paths.AGENT),
        },
    )


def limits(shape: WorldShape) -> dict[str, list[float]]:
    """Inclusive range of every field of codes."""
    return {f.name: [0, f.count - 1] for f in shape.fields if f.count is not None}


def compare(mind: PlainAgent, exported: OnnxAgent, hidden: int, seed: int) -> tuple[float, int]:
    """Let both live the same random lives: the largest relative difference, and in how many actions
    they broke a tie differently."""
    generator = torch.Generator().manual_seed(seed)
    worst, splits = 0.0, 0
    for batch in PARITY_BATCHES:
        state = example_inputs(mind.shape, hidden, batch, generator)[-3:]
        for _ in range(PARITY_TICKS):
            seen = example_inputs(mind.shape, hidden, batch, generator)[:-3]
            with torch.no_grad():
                ours = dict(zip(mind.outputs, mind(*seen, *state), strict=True))
            names = [n for n in mind.inputs if n not in STATES]
            decision = exported.act(
                {n: x.numpy() for n, x in zip(names, seen, strict=True)},
                {n: x.numpy() for n, x in zip(STATES, state, strict=True)},
            )
            theirs: dict[str, Any] = {"action": decision.action, **decision.thoughts}
            theirs |= {n.replace("state_", "next_"): x for n, x in decision.state.items()}
            splits += int((ours["action"].numpy() != theirs["action"]).sum())
            worst = max([worst, *(_gap(ours[n], theirs[n]) for n in ours)])
            state = [ours["next_belief"], ours["next_acted"], ours["next_rng"]]
    return worst, splits


def _gap(a: Tensor, b: np.ndarray) -> float:
    if not a.is_floating_point():
        return 0.0
    other = torch.from_numpy(np.asarray(b))
    known = a > ILLEGAL
    gap = (a - other).abs() / a.abs().clamp_min(1.0)
    return float(torch.where(known, gap, 0.0).max()) if a.numel() else 0.0
