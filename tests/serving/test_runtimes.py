"""The agent's graph in other runtimes than the newest ONNX Runtime."""

from __future__ import annotations

import onnx
from onnx import TensorProto


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
