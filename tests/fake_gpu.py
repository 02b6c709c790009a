"""A GPU that is none: tensors on `gpu:0` that refuse what CUDA refuses, and count what waits.

Each holds the numbers of a tensor of the CPU. Refused are operations on tensors of both devices,
graphs that were frozen for the CPU, and what CUDA has no deterministic kernel for. Everything that
would make the host wait for the GPU is noted with the line of our code that asked for it.

What it cannot show: kernels, streams, rounding, and what only `type == "cuda"` does. It changes
PyTorch for the whole process, so tests run it in one of their own.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

ROOT = Path(__file__).parents[1]
OURS = tuple(f"{ROOT / folder}/" for folder in ("hamlet", "pipeline", "stages"))
HELPER = "/moving.py"  # whoever called it is named
# Operations that CUDA takes with tensors of both devices.
MIXED = {"index", "index_put", "copy_", "_to_copy"}
# Those whose result, or its size, the host must know.
WAITING = {
    "_local_scalar_dense", "nonzero", "bincount", "_unique2", "unique_dim", "unique_consecutive",
    "equal", "masked_select", "repeat_interleave", "is_nonzero",
}  # fmt: skip
REFUSED = {"nll_loss2d_forward", "put_", "histc", "median", "kthvalue"}

waits: Counter[str] = Counter()
uploads: Counter[str] = Counter()


class OnGpu(torch.Tensor):
    """A tensor that says it is on `gpu:0`."""

    real_: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, real: torch.Tensor) -> OnGpu:
        made = torch.Tensor._make_wrapper_subclass(
            cls, real.size(), strides=real.stride(), storage_offset=real.storage_offset(),
            dtype=real.dtype, device="gpu:0",
        )  # fmt: skip
        made.real_ = real
        return made

    @classmethod
    def __torch_dispatch__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(f, args, kwargs or {})


class Gpu(TorchDispatchMode):
    """The context in which there is such a GPU."""

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(f, args, kwargs or {})


def install() -> None:
    """Let this process know the device."""
    _setup_privateuseone_for_python_backend("gpu")
    torch.gpu.synchronize = lambda *_: None
    torch.gpu.get_amp_supported_dtype = lambda: [torch.bfloat16]
    torch._C._set_only_lift_cpu_tensors(True)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    library = torch.library.Library("aten", "IMPL")
    library.impl("gru_cell", gru_cell, "AutogradPrivateUse1")
    install.kept = library  # type: ignore[attr-defined]


def run(f: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation as the GPU takes it, if it is the GPU's."""
    to, name = kwargs.get("device"), f._opname
    tensors = [*found((*args, *kwargs.values()))]
    mine = any(type(x) is OnGpu for x in tensors)
    ours = to is not None and to.type == "gpu"
    if not (mine or ours) or any(type(x).__name__ == "FakeTensor" for x in tensors):
        return f(*args, **kwargs)
    if mine:
        check(name, to, tensors)
    elif name in ("_to_copy", "copy_"):
        uploads[place()] += 1
    given = {key: real(value) for key, value in kwargs.items()}
    out = f(*map(real, args), **(given if to is None else given | {"device": torch.device("cpu")}))
    if not ours and (to is not None or name == "_local_scalar_dense"):
        return out
    out = shown(out)
    return return_and_correct_aliasing(f, args, kwargs, out) if mine and aliases(f) else out


def found(values: Any) -> Iterator[torch.Tensor]:
    for x in values:
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, list | tuple):
            yield from found(x)


def real(x: Any) -> Any:
    if type(x) is OnGpu:
        return x.real_
    return type(x)(map(real, x)) if type(x) in (list, tuple) else x


def shown(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return OnGpu(x)
    return type(x)(map(shown, x)) if isinstance(x, list | tuple) else x


@cache
def aliases(f: Any) -> bool:
    """Whether a result is, or looks into, an argument."""
    return any(each.alias_info is not None for each in f._schema.returns)


def check(name: str, to: Any, tensors: list[torch.Tensor]) -> None:
    """Refuse what CUDA refuses; note what waits, and what sends numbers to the GPU."""
    away = to is not None and to.type != "gpu"
    if name == "_assert_tensor_metadata" and away:
        raise RuntimeError("this graph was frozen for the CPU")
    weighted = name == "bincount" and len(tensors) > 1
    adding = name == "cumsum" and tensors[0].is_floating_point()
    if name in REFUSED or weighted or adding:
        raise RuntimeError(f"{name}: CUDA has no deterministic kernel for it")
    # Of the CPU's, only numbers without a dimension may take part.
    others = [x for x in tensors if type(x) is not OnGpu and x.dim()]
    if others and name not in MIXED:
        raise RuntimeError(f"{name}: tensors on gpu:0 and on the CPU")
    if others and type(tensors[0]) is OnGpu:
        uploads[place()] += 1
    booleans = name in ("index", "index_put", "index_put_") and any(
        x.dtype in (torch.bool, torch.uint8) for x in tensors[1:]
    )
    takes_away = name == "copy_" and type(tensors[0]) is not OnGpu
    if name in WAITING or booleans or takes_away or away:
        waits[place()] += 1


def place() -> str:
    """`file.py:function` of the innermost line of ours."""
    frame = inspect.currentframe()
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(OURS) and not file.endswith(HELPER):
            return f"{Path(file).name}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


def gru_cell(x: Any, h: Any, w_x: Any, w_h: Any, b_x: Any = None, b_h: Any = None) -> torch.Tensor:
    """On CUDA this is a kernel of its own."""
    reset, update, new = linear(x, w_x, b_x).chunk(3, -1)
    reset_h, update_h, new_h = linear(h, w_h, b_h).chunk(3, -1)
    update = (update + update_h).sigmoid()
    return (1 - update) * (new + (reset + reset_h).sigmoid() * new_h).tanh() + update * h
