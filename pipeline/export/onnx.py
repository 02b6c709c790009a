"""Export a whole module as one ONNX file with named inputs and outputs and a dynamic batch."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from pipeline.export.frozen import Flat, quiet
from pipeline.files import atomic_path

OPSET = 20


def export_onnx(
    module: nn.Module, inputs: Mapping[str, Tensor], outputs: Sequence[str], path: Path
) -> None:
    """Write `module` to `path`: a single file without stack traces, paths or clocks.

    Args:
        module: takes tensors by position and returns tensors.
        inputs: example tensors by name, batch 2 or more (batch 1 would specialise).
        outputs: a name for every tensor returned.
    """
    # Copies: one tensor given for two inputs would be exported as one input.
    examples = tuple(tensor.clone() for tensor in inputs.values())
    batch = torch.export.Dim("batch", min=1, max=1 << 20)
    with torch.no_grad(), quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            Flat(module),
            examples,
            dynamo=True,
            opset_version=OPSET,
            dynamic_shapes=(tuple({0: batch} for _ in examples),),
            optimize=True,
            verbose=False,
        )
    assert program is not None
    model = program.model
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
    for values, names in ((model.graph.inputs, inputs), (model.graph.outputs, outputs)):
        for value, name in zip(values, names, strict=True):
            value.name = name
            value.metadata_props.clear()
    with atomic_path(path) as temporary:
        program.save(str(temporary), external_data=False)
