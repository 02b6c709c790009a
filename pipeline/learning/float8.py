"""Modules A and B in float8: linear, batched and recurrent layers multiply rounded numbers.

As torchao's tensorwise recipe does (Micikevicius et al. 2022): activations and weights in
float8_e4m3fn, gradients of outputs in float8_e5m2, each tensor scaled to the type's range by its
own largest number, in all three products of a layer; sums in float32. Convolutions, gates, losses
and what the optimizer keeps are as under bf16. On a GPU that multiplies float8, torchao does it;
elsewhere it can be emulated, which is slow and tells what the rounding costs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hamlet.artifacts import HamletError
from hamlet.learning.precision import Precision, best_precision
from hamlet.learning.update import Loss
from hamlet.params import ModulePrecision

Product = Callable[[Tensor, Tensor], Tensor]
MULTIPLE = 16  # of both sides of a matrix that the hardware multiplies in float8
# Up to these sizes of a layer, to scale and round costs more than it saves (torchao's own filter).
SMALL_INPUTS, SMALL_OUTPUTS = 4096, 1024


def in_precision(
    loss: Loss, precision: ModulePrecision, weights: Iterable[Tensor], device: str = "cpu"
) -> tuple[Loss, Precision]:
    """The loss to train with, and the precision that `Update` runs it in.

    Args:
        weights: of the module: fp8 is bf16, with one line, where no layer is large enough to gain.

    Raises:
        HamletError: the GPU multiplies float8 and torchao is not installed.
    """
    if precision == "fp32" or precision == "bf16":
        return loss, precision
    if precision == "fp8" and not multiplies_float8(device):
        instead = best_precision(device)
        warnings.warn(f"nothing here multiplies float8: {instead} from now on", stacklevel=2)
        return loss, instead
    if precision == "fp8" and (reason := too_small(weights)):
        warnings.warn(f"{reason}: bf16 from now on", stacklevel=2)
        return loss, "bf16"
    product = emulated if precision == "fp8-emulated" else by_torchao(emulate=False)

    def float8_loss(*batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        with Float8(product):
            return loss(*batch)

    return float8_loss, "bf16"


def too_small(weights: Iterable[Tensor]) -> str:
    """Why float8 gains nothing in layers of these weights [outputs, inputs]; empty if it does."""
    layers = [x.shape[-2:] for x in weights if x.dim() >= 2]
    if any(k > SMALL_INPUTS or n > SMALL_OUTPUTS for n, k in layers):
        return ""
    n, k = max(layers, key=lambda size: size[0] * size[1], default=(0, 0))
    return (
        f"float8 gains nothing in layers of at most {k} inputs and {n} outputs "
        f"(it does above {SMALL_INPUTS} or {SMALL_OUTPUTS})"
    )


def multiplies_float8(device: str) -> bool:
    """Tensor cores do from Ada and Hopper on."""
    return device.startswith("cuda") and torch.cuda.get_device_capability(device) >= (8, 9)


class Float8(TorchFunctionMode):
    """A context, like autocast, in which layers multiply by `product`."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.product = product

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return self.linear(*args, **kwargs)
        if func is torch.baddbmm and not kwargs:
            bias, x, weight = args
            return self.product(x, weight) + bias
        if func is torch.gru_cell:
            return self.gru_cell(*args)
        return func(*args, **kwargs)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = self.product(x.flatten(0, -2), weight.T).unflatten(0, x.shape[:-1])
        return y if bias is None else y + bias

    def gru_cell(self, x: Tensor, h: Tensor, w_x: Tensor, w_h: Tensor, b_x: Tensor, b_h: Tensor):
        """As `nn.GRUCell` (Cho et al. 2014), two products for the three gates."""
        reset, update, new = self.linear(x, w_x, b_x).chunk(3, -1)
        reset_h, update_h, new_h = self.linear(h, w_h, b_h).chunk(3, -1)
        update = (update + update_h).sigmoid()
        new = (new + (reset + reset_h).sigmoid() * new_h).tanh()
        return new + update * (h - new)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 [., R, C]: each matrix scaled to the range of `dtype`, rounded to it, scaled back."""
    most = torch.finfo(dtype).max
    x = x.float()
    scale = most / x.abs().amax((-2, -1), keepdim=True).clamp_min(1e-12)
    return (x * scale).clamp(-most, most).to(dtype).float() / scale


class _Emulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x8, weight8 = (rounded(t, torch.float8_e4m3fn) for t in (x, weight))
        ctx.save_for_backward(x8, weight8)
        ctx.dtypes = x.dtype, weight.dtype
        with torch.autocast(x.device.type, enabled=False):
            return x8 @ weight8

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x8, weight8 = ctx.saved_tensors
        gradient = rounded(gradient, torch.float8_e5m2)
        of_x, of_weight = ctx.dtypes
        return (gradient @ weight8.mT).to(of_x), (x8.mT @ gradient).to(of_weight)


def emulated(x: Tensor, weight: Tensor) -> Tensor:
    """float32 [., R, N] of x [., R, K] and weight [., K, N]; nothing but PyTorch is needed."""
    return _Emulated.apply(x, weight)


def by_torchao(emulate: bool) -> Product:
    """The same product by torchao; `emulate` its own emulation, for where no hardware does it."""
    try:
        from torchao.float8 import Float8LinearConfig
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
        from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig
    except ImportError:
        raise HamletError(
            "precision fp8 needs torchao", 'run `pip install -c constraints.txt -e ".[fp8]"`'
        ) from None
    config = Float8LinearConfig(emulate=emulate, pad_inner_dim=not emulate)
    one = ScaledMMConfig(emulate, False, False, config.pad_inner_dim)
    each = LinearMMConfig(one, one, one)

    def product(x: Tensor, weight: Tensor) -> Tensor:
        if weight.dim() == 3:
            return torch.stack([product(a, b) for a, b in zip(x, weight, strict=True)])
        inner, outer = weight.shape
        more_inner, more_outer = -inner % MULTIPLE, -outer % MULTIPLE
        x = F.pad(x, (0, more_inner))
        weight = F.pad(weight, (0, more_outer, 0, more_inner))
        return matmul_with_hp_or_float8_args.apply(x, weight, each, config)[:, :outer]

    return product
