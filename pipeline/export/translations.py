"""ONNX for the operators that torch's exporter knows only in parts.

For any of these torch would trace the whole program once more, to take it apart. That took as long
as the capture itself twice over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from onnxscript import ir, opset20
from torch.export import ExportedProgram

aten = torch.ops.aten
op: Any = opset20


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
    """Both gates come from one product: less is cut apart and added up after it."""
    start, end = (op.Constant(value_ints=[i]) for i in (0, w_ih.shape[0]))
    hidden = op.Constant(value_ints=[2 * w_hh.shape[1]])

    def of_gates(x: Any) -> Any:
        return op.Slice(x, start, hidden, start)

    def of_new(x: Any) -> Any:
        return op.Slice(x, hidden, end, start)

    weight = op.Concat(of_gates(w_ih), of_gates(w_hh), axis=1)
    bias, bias_ih, bias_hh = None, None, None
    if b_ih is not None:
        bias, bias_ih, bias_hh = of_gates(op.Add(b_ih, b_hh)), of_new(b_ih), of_new(b_hh)
    both = op.Gemm(op.Concat(input, hx, axis=1), weight, bias, transB=1)
    reset, update = op.Split(op.Sigmoid(both), axis=1, num_outputs=2)
    told = op.Gemm(input, of_new(w_ih), bias_ih, transB=1)
    kept = op.Gemm(hx, of_new(w_hh), bias_hh, transB=1)
    new = op.Tanh(op.Add(told, op.Mul(kept, reset)))
    return op.Add(op.Mul(op.Sub(hx, new), update), new)


def unbind(self: Any, dim: int = 0) -> Any:
    count = self.shape[dim]
    return [op.Gather(self, op.Constant(value_int=i), axis=dim) for i in range(count)]


def index_select(self: Any, dim: int, index: Any) -> Any:
    return op.Gather(self, index, axis=dim)


def stack(tensors: Sequence[Any], dim: int = 0) -> Any:
    rank = len(tensors[0].shape)
    dim %= rank + 1
    sizes = [0 if i < dim else size for i, size in enumerate(tensors[0].shape)]
    sizes = [size if isinstance(size, int) else -1 for size in sizes]
    if dim == rank or sizes.count(-1) > 1:
        last = op.Constant(value_ints=[dim])
        return op.Concat(*(op.Unsqueeze(each, last) for each in tensors), axis=dim)
    sizes.insert(dim, len(tensors))
    return op.Reshape(op.Concat(*tensors, axis=dim), op.Constant(value_ints=sizes))


def movedim(self: Any, source: int, destination: int) -> Any:
    rank = len(self.shape)
    order = [axis for axis in range(rank) if axis != source % rank]
    order.insert(destination % rank, source % rank)
    return op.Transpose(self, perm=order)


def any_of(self: Any, dim: int, keepdim: bool = False) -> Any:
    return op.ReduceMax(truth(self), op.Constant(value_ints=[dim]), keepdims=keepdim)


def all_of(self: Any, dim: int, keepdim: bool = False) -> Any:
    return op.ReduceMin(truth(self), op.Constant(value_ints=[dim]), keepdims=keepdim)


def truth(self: Any) -> Any:
    return self if self.dtype == ir.DataType.BOOL else op.Cast(self, to=ir.DataType.BOOL)


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
    aten.index_select.default: index_select,
    aten.unbind.int: unbind,
    aten.stack.default: stack,
    aten.movedim.int: movedim,
    aten.any.dim: any_of,
    aten.all.dim: all_of,
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
