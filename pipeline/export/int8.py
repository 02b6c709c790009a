"""An int8 copy of the agent, kept only if it acts as the agent does.

    python -m hamlet.export.int8 [artifacts/agent.onnx]

writes `agent.int8.onnx` with its card beside the agent; `hamlet serve` takes it like any other. The
weights of the products are int8, everything else stays as it is. Whether it is faster depends on
the processor: measure it.
"""

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from hamlet.artifacts import HamletError, atomic_path, write_card
from hamlet.serving.agent import STATE, Arrays, OnnxAgent

GATE = 0.995  # share of actions that must be equal
WORLDS, TICKS = 32, 200
UNSEEN_MAPS = 3_000_017  # maps that no stage has played


def quantize(agent: Path, target: Path, lived: Sequence[Arrays]) -> float:
    """Write the int8 copy of `agent` to `target` with its card; returns the share of equal actions.

    Args:
        lived: what the agent saw on a real trajectory, tick by tick, arrays [B, ...] by field.

    Raises:
        HamletError: fewer than `GATE` of the actions are equal; nothing is written.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    whole = OnnxAgent(agent)
    with tempfile.TemporaryDirectory() as folder:
        prepared, small = Path(folder) / "prepared.onnx", Path(folder) / target.name
        onnx.save(_with_weights_of_their_own(onnx.load(agent)), prepared)
        with redirect_stdout(io.StringIO()):  # it prints nodes
            quantize_dynamic(
                prepared,
                small,
                weight_type=QuantType.QInt8,
                extra_options={"EnableSubgraph": True, "MatMulConstBOnly": True},
            )
        card = whole.card
        extra: dict[str, Any] = {
            k: card[k] for k in card if k not in ("file", "kind", "schema", "upstream", "pack")
        }
        upstream = {**card["upstream"], "agent": card["sha256"]}
        write_card(small, "agent", card["schema"], upstream, card["pack"], extra)
        share = agreement(whole, OnnxAgent(small), lived)
        if share < GATE:
            raise HamletError(
                f"the int8 copy of {agent} takes the same action in {share:.2%} of "
                f"{len(lived) * len(lived[0]['action_mask'])} ticks, the gate asks {GATE:.1%}",
                "serve the agent as it is",
            )
        with atomic_path(target) as temporary:
            temporary.write_bytes(small.read_bytes())
    extra["int8_agreement"] = share
    write_card(target, "agent", card["schema"], upstream, card["pack"], extra)
    return share


def _with_weights_of_their_own(model: onnx.ModelProto) -> onnx.ModelProto:
    """The quantiser renames weights in place: one used twice would be quantised for one use only.
    Shapes of inner values are left for it to infer."""

    def own(graph: onnx.GraphProto) -> None:
        graph.ClearField("value_info")
        weights = {weight.name: weight for weight in graph.initializer}
        used: set[str] = set()
        for number, node in enumerate(graph.node):
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    own(attribute.g)
            for i, name in enumerate(node.input):
                if name in used and name in weights:
                    copy = graph.initializer.add()
                    copy.CopyFrom(weights[name])
                    copy.name = node.input[i] = f"{name}/{number}.{i}"
                used.add(name)

    own(model.graph)
    return model


def agreement(one: OnnxAgent, two: OnnxAgent, lived: Sequence[Arrays]) -> float:
    """Share of equal actions of two agents that see the same and remember for themselves."""
    states = [one.start(len(lived[0]["action_mask"])) for _ in range(2)]
    equal = []
    for fields in lived:
        decisions = [a.act(fields, s) for a, s in zip((one, two), states, strict=True)]
        states = [decision.state for decision in decisions]
        equal.append((decisions[0].action == decisions[1].action).mean())
    return float(np.mean(equal))


def live(agent: OnnxAgent, worlds: int, ticks: int) -> list[Arrays]:
    """What the agent sees while it plays all inhabitants of some worlds of its town."""
    import torch

    from hamlet.town import Town, load_pack

    town = Town(load_pack(agent.card["town"]["pack"]), num_layouts=worlds, layout_seed=UNSEEN_MAPS)
    world, lived = town.reset(UNSEEN_MAPS, worlds), []
    state = agent.start(worlds * town.num_agents)
    names = [name for name in agent.inputs if not name.startswith(STATE)]
    for _ in range(ticks):
        seen = town.observe(world)
        fields = {name: seen[name].flatten(0, 1).numpy().copy() for name in names}
        lived.append(fields)
        decision = agent.act(fields, state)
        state = decision.state
        action = torch.from_numpy(decision.action).unflatten(0, (-1, town.num_agents))
        world = town.step_core(world, action)
    return lived


def main() -> None:
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "artifacts/agent.onnx")
    target = path.with_suffix(".int8.onnx")
    try:
        share = quantize(path, target, live(OnnxAgent(path), WORLDS, TICKS))
    except HamletError as error:
        raise SystemExit(str(error)) from None
    print(f"{target} written: the same action in {share:.2%} of {WORLDS} worlds' {TICKS} ticks")


if __name__ == "__main__":
    main()
