"""An int8 copy of the agent, kept only if it acts as the agent does.

    python -m hamlet.export.int8 [artifacts/agent.onnx]

writes `agent.int8.onnx` with its card beside the agent; `hamlet serve` takes it like any other. The
weights of the products are int8, everything else stays as it is; products that change too many
actions are searched for and left as they are. Whether it is faster depends on the processor:
measure it.
"""

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from hamlet.artifacts import HamletError, atomic_path, write_card
from hamlet.serving.agent import STATE, Arrays, OnnxAgent

GATE = 0.995  # share of actions that must be equal
SEARCH_TICKS = 40  # at which products are tried; what is found must hold for all ticks
WORLDS, TICKS = 32, 200
UNSEEN_MAPS = 3_000_017  # maps that no stage has played


def quantize(agent: Path, target: Path, lived: Sequence[Arrays]) -> float:
    """Write the int8 copy of `agent` to `target` with its card; returns the share of equal actions.

    The card says in `int8` how many of its products are int8 and which were left out for the gate;
    products in float64 always stay as they are.

    Args:
        lived: what the agent saw on a real trajectory, tick by tick, arrays [B, ...] by field.

    Raises:
        HamletError: with any product as int8 fewer than `GATE` of the actions are equal; nothing is
            written.
    """
    whole = OnnxAgent(agent)
    with tempfile.TemporaryDirectory() as folder:
        prepared, small = Path(folder) / "prepared.onnx", Path(folder) / target.name
        model = _with_weights_of_their_own(onnx.load(agent))
        onnx.save(model, prepared)
        names = products(model.graph)
        found = [0.0]

        def agrees(chosen: Sequence[str], ticks: int | None = None) -> bool:
            write_copy(prepared, small, [name for name in names if name not in chosen])
            _card(small, whole, {})
            found.append(agreement(whole, OnnxAgent(small), lived[:ticks]))
            return found[-1] >= GATE

        if agrees(names):
            kept = names
        else:
            kept = search(names, lambda chosen: agrees(chosen, SEARCH_TICKS))
            while kept and not agrees(kept):  # what a longer life shows
                kept = kept[: -max(1, len(kept) // 8)]
        share = found[-1]
        if not kept:
            raise HamletError(
                f"no product of {agent} can be int8: with all of them the action is the same in "
                f"{found[1]:.2%} of {len(lived) * len(lived[0]['action_mask'])} ticks, with the "
                f"last one alone in {share:.2%}, the gate asks {GATE:.1%}",
                "serve the agent as it is",
            )
        with atomic_path(target) as temporary:
            temporary.write_bytes(small.read_bytes())
    count = integer_products(onnx.load(target).graph)
    told = {"products": count, "of": len(names), "left_out": sorted(set(names) - set(kept))}
    _card(target, whole, {"int8_agreement": share, "int8": told})
    return share


def search(names: Sequence[str], agrees: Callable[[Sequence[str]], bool]) -> list[str]:
    """As many names as still agree together: a part that does not is halved, down to the one name
    that must be left out."""
    kept: list[str] = []
    parts = [list(names)]
    while parts:
        part = parts.pop()
        half = len(part) // 2
        if agrees([*kept, *part]):
            kept += part
        elif half:
            parts += [part[half:], part[:half]]
    return kept


def products(graph: onnx.GraphProto) -> list[str]:
    """Names of the products with a constant weight, those of inner graphs too."""
    weights, names = {weight.name for weight in graph.initializer}, []
    for node in graph.node:
        if node.op_type in ("MatMul", "Gemm") and node.input[1] in weights:
            names.append(node.name)
        for attribute in node.attribute:
            if attribute.HasField("g"):
                names += products(attribute.g)
    return names


def integer_products(graph: onnx.GraphProto) -> int:
    """How many products a graph and those within it do in int8."""
    inner = [a.g for node in graph.node for a in node.attribute if a.HasField("g")]
    own = sum(node.op_type == "MatMulInteger" for node in graph.node)
    return own + sum(map(integer_products, inner))


def write_copy(prepared: Path, small: Path, left_out: Sequence[str]) -> None:
    """Write `prepared` to `small` with its products as int8, but for those left out."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with redirect_stdout(io.StringIO()):  # it prints nodes
        quantize_dynamic(
            prepared,
            small,
            op_types_to_quantize=["MatMul"],
            weight_type=QuantType.QInt8,
            # A Gemm becomes a MatMul of this name first.
            nodes_to_exclude=[*left_out, *(f"{name}_MatMul" for name in left_out)],
            extra_options={"EnableSubgraph": True, "MatMulConstBOnly": True},
        )


def _card(small: Path, whole: OnnxAgent, more: dict[str, Any]) -> None:
    card = whole.card
    extra = {k: card[k] for k in card if k not in ("file", "kind", "schema", "upstream", "pack")}
    upstream = {**card["upstream"], "agent": card["sha256"]}
    write_card(small, "agent", card["schema"], upstream, card["pack"], extra | more)


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


def live(path: Path, worlds: int, ticks: int) -> list[Arrays]:
    """What an agent sees while it plays all inhabitants of some worlds of its town."""
    import torch

    from hamlet.town import Town, pack_of_card

    agent = OnnxAgent(path)
    town = Town(pack_of_card(agent.card, path), num_layouts=worlds, layout_seed=UNSEEN_MAPS)
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
        share = quantize(path, target, live(path, WORLDS, TICKS))
    except HamletError as error:
        raise SystemExit(str(error)) from None
    told = OnnxAgent(target).card["int8"]
    print(
        f"{target} written: {told['products']} of {told['of']} products are int8, the same action "
        f"in {share:.2%} of {WORLDS} worlds' {TICKS} ticks"
    )


if __name__ == "__main__":
    main()
