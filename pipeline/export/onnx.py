"""Export modules as ONNX with named inputs and outputs and a dynamic batch, each as one file.

The mind's imagination becomes a branch: it runs on the rows that deliberate, gathered, and not at
all when none does.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import onnx_ir as ir
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn

from hamlet.artifacts import atomic_path
from hamlet.export.frozen import Flat, quiet
from hamlet.export.simplify import simplify
from hamlet.export.translations import translated

if TYPE_CHECKING:
    from hamlet.modules.agent import Mind

OPSET = 20
RUNTIMES = (
    "It computes in float64 and int64: ONNX Runtime from 1.20 on and onnxruntime-web act alike; a "
    "runtime that computes these in 32 bits, as OpenVINO does, acts otherwise without saying so."
)


def export_onnx(
    module: nn.Module, inputs: Mapping[str, Tensor], outputs: Sequence[str]
) -> onnx.ModelProto:
    """`module` as an ONNX model without stack traces, paths or clocks.

    Args:
        module: takes tensors by position and returns tensors.
        inputs: example tensors by name, batch 2 or more (batch 1 would specialise).
        outputs: a name for every tensor returned.
    """
    # Copies: one tensor given for two inputs would be exported as one input.
    examples = tuple(tensor.clone() for tensor in inputs.values())
    batch = torch.export.Dim("batch", min=1, max=1 << 20)
    # Almost no operator meets the same shapes again: remembering what they make costs more.
    alone = torch._dynamo.config.patch(fake_tensor_cache_enabled=False)
    with torch.no_grad(), quiet(), warnings.catch_warnings(), alone:
        warnings.simplefilter("ignore")
        captured = torch.export.export(
            Flat(module),
            examples,
            dynamic_shapes=(tuple({0: batch} for _ in examples),),
            strict=False,
        )
        program = translated(captured, OPSET)
    model = program.model
    simplify(model)
    taken = {*inputs, *outputs}
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()
            if value.name in taken:
                value.name = f"{value.name}_inner"
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.doc_string = None
    first = model.graph.inputs[0].shape
    rows = first[0] if first else None
    for values, names in ((model.graph.inputs, inputs), (model.graph.outputs, outputs)):
        for value, name in zip(values, names, strict=True):
            value.name = name
            sizes = value.shape or ()
            value.shape = ir.Shape(["batch" if size == rows else size for size in sizes])
            value.metadata_props.clear()
    return program.model_proto


def export_mind(
    mind: Mind, inputs: Mapping[str, Tensor], outputs: Sequence[str], path: Path
) -> None:
    """Write `mind` to `path`; arguments as of `export_onnx`."""
    hole = _WithAHole(mind, len(inputs))
    with torch.no_grad():
        asked = _asked(mind, tuple(inputs.values()))
        given = mind.consider(*asked[1:])
    questions = {f"asked_{i}": tensor for i, tensor in enumerate(asked)}
    answers = {f"given_{i}": tensor for i, tensor in enumerate(given)}
    body = export_onnx(hole, {**inputs, **answers}, [*outputs, *questions])
    imagination = export_onnx(
        _Consider(mind),
        {f"row_{name}": tensor for name, tensor in list(questions.items())[1:]},
        [f"row_{name}" for name in answers],
    )
    _fill(body, imagination, list(questions), list(answers))
    onnx.checker.check_model(body)
    if _is_wide(onnx.shape_inference.infer_shapes(body).graph, {}):
        body.doc_string = RUNTIMES
    with atomic_path(path) as temporary:
        temporary.write_bytes(body.SerializeToString(deterministic=True))


def runtimes_of(path: Path) -> str | None:
    """What the card of an ONNX file says of the runtimes that it needs; None if any will do."""
    graph = onnx.shape_inference.infer_shapes(onnx.load(path)).graph
    return RUNTIMES if _is_wide(graph, {}) else None


def _is_wide(graph: onnx.GraphProto, types: dict[str, int]) -> bool:
    """Whether a graph, or one within it, calculates with float64 or multiplies int64."""
    values = (*graph.value_info, *graph.input, *graph.output)
    types = types | {v.name: v.type.tensor_type.elem_type for v in values}
    types |= {weight.name: weight.data_type for weight in graph.initializer}
    for node in graph.node:
        kinds = {types.get(name) for name in (*node.input, *node.output)}
        if TensorProto.DOUBLE in kinds or (node.op_type == "Mul" and TensorProto.INT64 in kinds):
            return True
        if any(a.HasField("g") and _is_wide(a.g, types) for a in node.attribute):
            return True
    return False


class _WithAHole(nn.Module):
    """One tick whose imagination comes in and whose questions to it go out."""

    def __init__(self, mind: Mind, count: int) -> None:
        super().__init__()
        self.mind, self.count = mind, count

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        asked: list[Tensor] = []

        def consider(*questions: Tensor) -> Sequence[Tensor]:
            asked.extend(questions)
            return tensors[self.count :]

        outputs = self.mind.think(tensors[: self.count], consider)
        return (*outputs, *asked)


class _Consider(nn.Module):
    def __init__(self, mind: Mind) -> None:
        super().__init__()
        self.mind = mind

    def forward(self, *asked: Tensor) -> tuple[Tensor, ...]:
        return self.mind.consider(*asked)


def _asked(mind: Mind, inputs: Sequence[Tensor]) -> list[Tensor]:
    asked: list[Tensor] = []

    def consider(*questions: Tensor) -> Sequence[Tensor]:
        asked.extend(questions)
        return mind.consider(*questions[1:])

    mind.think(inputs, consider)
    return asked


def _fill(
    body: onnx.ModelProto, imagination: onnx.ModelProto, questions: list[str], answers: list[str]
) -> None:
    """Put the imagination into the body, for the rows where `questions[0]` (bool [B]) is true."""
    inner = onnx.compose.add_prefix(imagination, "imagine/").graph
    graph = body.graph
    types = {v.name: v.type for v in graph.input}
    node = helper.make_node
    # A question that is a value of the body under another name is asked by its first name.
    same = {n.output[0]: n.input[0] for n in graph.node if n.op_type == "Identity"}
    same = {name: same[name] for name in questions if name in same}
    deliberate, *asked = questions

    rows = [  # int64 [n, 1] of the rows that deliberate
        node("NonZero", [deliberate], ["slice/where"]),
        node("Transpose", ["slice/where"], ["slice/rows"], perm=[1, 0]),
        node("Squeeze", ["slice/where", "slice/first"], ["slice/index"]),
    ]
    gather = [
        node("Gather", [same.get(name, name), "slice/index"], [f"imagine/row_{name}"], axis=0)
        for name in asked
    ]
    scatter, nothing = [], []
    constants = [helper.make_tensor("slice/first", TensorProto.INT64, [1], [0])]
    shapes = [node("Shape", [deliberate], ["slice/batch"])]
    for name in answers:
        tensor = types[name].tensor_type
        sizes = [d.dim_value for d in tensor.shape.dim[1:]]
        rest, shape, blank = (f"slice/{name}_{part}" for part in ("rest", "shape", "blank"))
        constants.append(helper.make_tensor(rest, TensorProto.INT64, [len(sizes)], sizes))
        zero = helper.make_tensor("zero", tensor.elem_type, [1], [0])
        zeros = [
            node("Concat", ["slice/batch", rest], [shape], axis=0),
            node("ConstantOfShape", [shape], [blank], value=zero),
        ]
        nothing += zeros
        scatter += [
            *zeros,
            node("ScatterND", [blank, "slice/rows", f"imagine/row_{name}"], [f"slice/{name}"]),
        ]

    def branch(name: str, nodes: list[Any], results: list[str], weights: list[Any]) -> Any:
        made = [
            helper.make_value_info(result, types[answer])
            for result, answer in zip(results, answers, strict=True)
        ]
        return helper.make_graph(nodes, name, [], made, initializer=weights)

    then = branch(
        "deliberate",
        [*rows, *shapes, *gather, *inner.node, *scatter],
        [f"slice/{name}" for name in answers],
        [*inner.initializer, *constants],
    )
    otherwise = branch(
        "go_on",
        [*shapes, *nothing],
        [f"slice/{name}_blank" for name in answers],
        constants[1:],
    )
    anyone = [
        node("ReduceMax", [deliberate], ["slice/anyone"], keepdims=0),
        node("If", ["slice/anyone"], answers, then_branch=then, else_branch=otherwise),
    ]
    # An answer that is an output under another name has that one from the start.
    shown = {n.input[0]: n.output[0] for n in graph.node if n.op_type == "Identity"}
    shown = {name: shown[name] for name in answers if name in shown}
    body_nodes = [n for n in graph.node if n.output[0] not in {*same, *shown.values()}]
    for one in (*body_nodes, anyone[-1]):
        for names in (one.input, one.output):
            names[:] = [shown.get(name, name) for name in names]
    before, after = _split_by(list(anyone[-1].output), body_nodes)
    nodes = [*before, *anyone, *after]
    inputs = [v for v in graph.input if v.name not in answers]
    outputs = [v for v in graph.output if v.name not in questions]
    for field, values in (("node", nodes), ("input", inputs), ("output", outputs)):
        kept = [type(v).FromString(v.SerializeToString()) for v in values]
        graph.ClearField(field)
        getattr(graph, field).extend(kept)


def _split_by(answers: list[str], nodes: list[onnx.NodeProto]) -> tuple[list[Any], list[Any]]:
    """The nodes that can run before the answers are there, and those that depend on them."""
    later = set(answers)
    before, after = [], []
    for one in nodes:
        if later.intersection(one.input):
            later.update(one.output)
            after.append(one)
        else:
            before.append(one)
    return before, after
