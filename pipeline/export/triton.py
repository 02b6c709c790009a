"""A model repository for NVIDIA Triton, which keeps the sessions' state itself.

`artifacts/triton/hamlet-agent/` holds `config.pbtxt` and version 1 of the graph. The state tensors
are declared as implicit state of the sequence batcher: Triton hands them in and takes them back, a
client sends observations with a sequence id. Fields: `model_config.proto` of Triton's repository.
State that is one number is given a dimension in the graph, [batch, 1]: an implicit state has `dims`
and no `reshape`.

The text is written and parsed (tests parse it with Triton's own protobuf); nobody has run it here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper

from hamlet.artifacts import atomic_dir
from hamlet.serving.agent import NEXT, STATE
from hamlet.serving.model import NAME

TYPES = {"uint8": "UINT8", "bool": "BOOL", "int64": "INT64", "float32": "FP32"}
MAX_BATCH = 64
MAX_SEQUENCES = 10_000
IDLE_SECONDS = 600
QUEUE_MICROSECONDS = 500


def write_repository(agent: Path, card: Mapping[str, Any], folder: Path) -> None:
    """Write the repository `folder` for the graph `agent` with its card.

    Raises:
        HamletError: the disk is full; an older repository is untouched.
    """
    with atomic_dir(folder) as fresh:
        (fresh / NAME / "1").mkdir(parents=True)
        onnx.save(_with_dimensions(onnx.load(agent), card), fresh / NAME / "1" / "model.onnx")
        (fresh / NAME / "config.pbtxt").write_text(config(card), encoding="utf-8", newline="\n")


def _with_dimensions(model: onnx.ModelProto, card: Mapping[str, Any]) -> onnx.ModelProto:
    graph = model.graph
    scalars = [
        e["name"]
        for e in card["schema"]["inputs"]
        if e["name"].startswith(STATE) and len(e["shape"]) == 1
    ]
    inside = {name: f"{name}_flat" for name in scalars}
    inside |= {NEXT + n.removeprefix(STATE): f"{NEXT}{n.removeprefix(STATE)}_flat" for n in scalars}
    for node in graph.node:
        for names in (node.input, node.output):
            for i, name in enumerate(names):
                names[i] = inside.get(name, name)
    graph.initializer.append(helper.make_tensor("last_axis", TensorProto.INT64, [1], [1]))
    for i, name in enumerate(scalars):
        following = NEXT + name.removeprefix(STATE)
        flatten = helper.make_node("Squeeze", [name, "last_axis"], [inside[name]])
        graph.node.insert(i, flatten)
        graph.node.append(
            helper.make_node("Unsqueeze", [inside[following], "last_axis"], [following])
        )
        for values in (graph.input, graph.output):
            for value in values:
                if value.name in (name, following):
                    value.type.tensor_type.shape.dim.add().dim_value = 1
    onnx.checker.check_model(model)
    return model


def config(card: Mapping[str, Any]) -> str:
    """The text of `config.pbtxt`."""
    inputs = {e["name"]: e for e in card["schema"]["inputs"]}
    outputs = {e["name"]: e for e in card["schema"]["outputs"]}
    states = [name for name in inputs if name.startswith(STATE)]
    following = {NEXT + name.removeprefix(STATE) for name in states}
    seen = [e for name, e in inputs.items() if name not in states]
    told = [e for name, e in outputs.items() if name not in following]
    return "\n".join(
        [
            f'name: "{NAME}"',
            'backend: "onnxruntime"',
            f"max_batch_size: {MAX_BATCH}",
            *(_block("input", _tensor(e)) for e in seen),
            *(_block("output", _tensor(e)) for e in told),
            _block(
                "sequence_batching",
                [
                    f"max_sequence_idle_microseconds: {IDLE_SECONDS * 1_000_000}",
                    # Any sequence may be in any batch: the state is gathered for it.
                    _block(
                        "oldest",
                        [
                            f"max_candidate_sequences: {MAX_SEQUENCES}",
                            f"max_queue_delay_microseconds: {QUEUE_MICROSECONDS}",
                        ],
                    ),
                    *(_block("state", _state(inputs[name], outputs)) for name in states),
                ],
            ),
            # One thread inside an operator; Triton runs instances side by side.
            *(_parameter(k, "1") for k in ("intra_op_thread_count", "inter_op_thread_count")),
            _block("instance_group", ["count: 1", "kind: KIND_AUTO"]),
            _block("model_warmup", [f'name: "one"\nbatch_size: 1\ncount: 1\n{_warm(seen)}']),
            "",
        ]
    )


def _block(name: str, lines: list[str]) -> str:
    inside = "\n".join(lines).replace("\n", "\n  ")
    return f"{name} {{\n  {inside}\n}}"


def _dims(entry: Mapping[str, Any]) -> str:
    # A tensor with nothing but a batch has the shape [1] for Triton and is reshaped to [].
    dims = entry["shape"][1:]
    return f"dims: [ {', '.join(map(str, dims)) or '1'} ]" + ("" if dims else "\nreshape { }")


def _tensor(entry: Mapping[str, Any]) -> list[str]:
    return [f'name: "{entry["name"]}"', f"data_type: TYPE_{TYPES[entry['dtype']]}", _dims(entry)]


def _state(entry: Mapping[str, Any], outputs: Mapping[str, Any]) -> list[str]:
    name = entry["name"]
    output = NEXT + name.removeprefix(STATE)
    assert outputs[output]["shape"] == entry["shape"]
    dims = ", ".join(map(str, entry["shape"][1:])) or "1"
    kind = f"TYPE_{TYPES[entry['dtype']]}"
    initial = [f"data_type: {kind}", f"dims: [ {dims} ]", "zero_data: true", 'name: "zero"']
    return [
        f'input_name: "{name}"',
        f'output_name: "{output}"',
        f"data_type: {kind}",
        f"dims: [ {dims} ]",
        _block("initial_state", initial),
    ]


def _parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'


def _warm(seen: list[Mapping[str, Any]]) -> str:
    blocks = []
    for e in seen:
        dims = ", ".join(map(str, e["shape"][1:]))
        kind = f"data_type: TYPE_{TYPES[e['dtype']]}"
        value = _block("value", [kind, f"dims: [ {dims} ]", "zero_data: true"])
        blocks.append(_block("inputs", [f'key: "{e["name"]}"', value]))
    return "\n".join(blocks)
