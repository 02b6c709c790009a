"""ONNX for the operators that torch's exporter knows only in parts.

For any of these torch would trace the whole program once more, to take it apart. That took as long
as the capture itself twice over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from onnxscript import ir, opset18
from torch.export import ExportedProgram

aten = torch.ops.aten
op: Any = opset18


def to(self: Any, dtype: int, non_blocking: bool = False, copy: bool = False) -> Any:
    return op.Cast(self, to=dtype)


def both(self: Any, other: Any) -> Any:
    return (op.And if self.dtype == ir.DataType.BOOL else op.BitwiseAnd)(self, other)


def either(self: Any, other: Any) -> Any:
    return (op.Or if self.dtype == ir.DataType.BOOL else op.BitwiseOr)(self, other)


def detach(self: Any) -> Any:
    return op.Identity(self)


def rsub(self: Any, other: float, alpha: float = 1) -> Any:
    """other - alpha * self, in floating point if any of the three is, as PyTorch promotes."""
    if isinstance(other + alpha, float) and not self.dtype.is_floating_point():
        self = op.Cast(self, to=ir.DataType.FLOAT)
    if alpha != 1:
        self = op.Mul(self, op.CastLike(op.Constant(value=ir.tensor(alpha)), self))
    return op.Sub(op.CastLike(op.Constant(value=ir.tensor(other)), self), self)


def transpose(self: Any) -> Any:
    """Of matrices: PyTorch is about to refuse the `.T` of anything else."""
    return op.Transpose(self, perm=[1, 0])


def numel(self: Any) -> Any:
    return op.Size(self)


def square(self: Any) -> Any:
    return op.Mul(self, self)


def one_hot(self: Any, num_classes: int) -> Any:
    classes = op.Constant(value_ints=list(range(num_classes)))
    each = op.Equal(op.Unsqueeze(self, op.Constant(value_ints=[-1])), classes)
    return op.Cast(each, to=ir.DataType.INT64)


def gru_cell(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    told = op.Split(op.Gemm(input, w_ih, b_ih, transB=1), axis=-1, num_outputs=3)
    kept = op.Split(op.Gemm(hx, w_hh, b_hh, transB=1), axis=-1, num_outputs=3)
    reset = op.Sigmoid(op.Add(kept[0], told[0]))
    update = op.Sigmoid(op.Add(kept[1], told[1]))
    new = op.Tanh(op.Add(told[2], op.Mul(kept[2], reset)))
    return op.Add(op.Mul(op.Sub(hx, new), update), new)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    aten.to.dtype: to,
    aten.__and__.Tensor: both,
    aten.__or__.Tensor: either,
    aten.detach_.default: detach,
    aten.rsub.Scalar: rsub,
    aten.square.default: square,
    aten.sym_numel.default: numel,
    aten.numpy_T.default: transpose,
    aten.one_hot.default: one_hot,
    aten.gru_cell.default: gru_cell,
}


class Whole(ExportedProgram):
    """A program that is not taken apart, unless that would change it."""

    def run_decompositions(self, decomp_table: Any = None, **options: Any) -> ExportedProgram:
        for node in self.graph.nodes:
            if node.op != "call_function" or node.target in TRANSLATIONS:
                continue
            schema = getattr(node.target, "_schema", None)
            if node.target in decomp_table or (schema and schema.is_mutable):
                return super().run_decompositions(decomp_table, **options)
        return self


def translated(program: ExportedProgram, opset: int) -> torch.onnx.ONNXProgram:
    """A captured program in ONNX, not yet simplified."""

    def translate() -> torch.onnx.ONNXProgram:
        made = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=opset,
            custom_translation_table=TRANSLATIONS,
            optimize=False,
            verbose=False,
        )
        assert made is not None
        return made

    program.__class__ = Whole
    try:
        return translate()
    except torch.onnx.OnnxExporterError:  # an operator is in no table, as a whole
        program.__class__ = ExportedProgram
        return translate()
