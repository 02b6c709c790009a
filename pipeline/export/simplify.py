"""Fold, rewrite and tidy an exported graph: onnxscript's passes, with those rules that it meets.

onnxscript tries each of its 85 rules at each node, twice over. That took a quarter of an export.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript.optimizer import fold_constants_ir
from onnxscript.rewriter import rewrite
from onnxscript.rewriter.rules.common import (
    cast_cast_rule,
    cast_constant_of_shape_without_value_rule,
    collapse_slice2_rule,
    collapse_slice_rule,
    flatten_to_reshape_rule,
    materialize_reshape_shape_rule,
    max_min_rule,
    min_max_rule,
    mul_by_1_rule,
    no_op_cast_rule,
    no_op_expand_rule,
    no_op_transpose_rule,
    reshape_reshape_rule,
    squeeze_reshape_1d_rule,
    sub_0_rule,
    unsqueeze_unsqueeze_rule,
)

RULES = (
    sub_0_rule,
    mul_by_1_rule,
    cast_constant_of_shape_without_value_rule,
    collapse_slice_rule,
    collapse_slice2_rule,
    materialize_reshape_shape_rule,
    min_max_rule,
    max_min_rule,
    cast_cast_rule,
    no_op_cast_rule,
    no_op_expand_rule,
    reshape_reshape_rule,
    flatten_to_reshape_rule,
    no_op_transpose_rule,
    squeeze_reshape_1d_rule,
    unsqueeze_unsqueeze_rule,
)

FOLDED = 1 << 16
"""Numbers of a constant that is computed with: a GRU's weights are cut and joined."""


def simplify(model: ir.Model) -> None:
    """In place: a graph that says the same with fewer nodes."""
    common.InlinePass()(model)
    fold_constants_ir(model, onnx_shape_inference=True, input_size_limit=FOLDED)
    take_parts_whole(model)
    rewrite(model, RULES)
    fold_constants_ir(model, onnx_shape_inference=True)
    common.IdentityEliminationPass()(model)
    for tidy in (
        common.RemoveUnusedNodesPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.RemoveUnusedOpsetsPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
    ):
        tidy(model)


def take_parts_whole(model: ir.Model) -> None:
    """In place: what was put together and is cut out again is taken as it was."""
    for node in model.graph.all_nodes():
        if node.op_type != "Slice" or node.outputs[0].is_graph_output():
            continue
        whole, *told = node.inputs
        joining = whole.producer() if whole is not None else None
        numbers = [ir.convenience.get_const_tensor(x) for x in told if x is not None]
        values = [x.numpy().flatten().tolist() for x in numbers if x is not None]
        if joining is None or joining.op_type != "Concat" or [*map(len, values)] != [1] * 4:
            continue
        [start], [end], [axis], [step] = values
        parts = [part for part in joining.inputs if part is not None and part.shape is not None]
        shapes = [part.shape for part in parts if part.shape is not None]
        joined = joining.attributes["axis"].as_int()
        sizes = [size for shape in shapes if isinstance(size := shape[joined], int)]
        if len(sizes) != len(joining.inputs) or (axis - joined) % len(shapes[0]):
            continue
        cut, at = range(sum(sizes))[start:end:step], 0
        for part, size in zip(parts, sizes, strict=True):
            if range(at, at + size) == cut:
                ir.convenience.replace_all_uses_with(node.outputs[0], part)
            at += size
