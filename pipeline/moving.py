"""Tensors where they are needed: moved, sent without waiting, made there once; or as bytes."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

T = TypeVar("T")


def moved(value: T, device: torch.device | str) -> T:
    """The same with all tensors on the device: a tensor, or a TensorDict, dataclass, tuple, list or
    mapping of such. What is there already is not copied: if all is, it is `value` itself."""
    if isinstance(value, Tensor):
        return value.to(device)  # type: ignore[return-value]
    parts: dict[Any, Any]
    if is_dataclass(value) and not isinstance(value, type):
        parts = {each.name: getattr(value, each.name) for each in fields(value)}
    elif isinstance(value, list | tuple):
        parts = dict(enumerate(value))
    elif isinstance(value, Mapping) or hasattr(value, "batch_size"):
        parts = dict(value.items())  # type: ignore[attr-defined]
    else:
        return value
    new = {name: moved(part, device) for name, part in parts.items()}
    if all(new[name] is part for name, part in parts.items()):
        return value
    made: Any = type(value)
    if hasattr(value, "batch_size"):
        return made(new, batch_size=value.batch_size)
    if is_dataclass(value):
        return made(**new)
    if isinstance(value, list | tuple):
        return made(*new.values()) if hasattr(value, "_fields") else made(new.values())
    return new  # type: ignore[return-value]


def dumped(content: Any) -> bytes:
    """Plain data and tensors, to be sent to another process; see `loaded`."""
    file = io.BytesIO()
    torch.save(moved(content, "cpu"), file)
    return file.getvalue()


def loaded(content: bytes) -> Any:
    """What `dumped` was given, on the CPU. Nothing is unpickled."""
    return torch.load(io.BytesIO(content), weights_only=True)


def constant(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of numbers, or of rows of numbers, that never change; not to be written to.

    On the CPU it is made anew, and so is a part of what is exported there. On a GPU it is made
    once: to send it at every tick would make the GPU wait. Compiled for a GPU it is a part of the
    code.
    """
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype, device=device)
    if torch.compiler.is_compiling():
        return _in_code(values, dtype, device)
    return _kept(_hashable(values), dtype, device)


def columns(x: Tensor, index: Sequence[int]) -> Tensor:
    """[., len(index)] some columns of x [., n]."""
    return x.index_select(-1, constant(index, torch.int64, x.device))


def one_hot(index: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """[., count] 1 at the index int64 [.], 0 elsewhere; the index `count` gives zeros."""
    each = torch.arange(count + 1, device=index.device)
    return F.embedding(index, (each.unsqueeze(-1) == each[:count]).to(dtype))


def _hashable(values: Any) -> Any:
    return tuple(map(_hashable, values)) if isinstance(values, list | tuple) else values


def _in_code(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    if isinstance(values, list | tuple):
        return torch.stack([_in_code(each, dtype, device) for each in values])
    return torch.full((), values, dtype=dtype, device=device)


@cache
def _kept(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def uploaded(parts: list[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors [n] of the CPU and of one type on the device, sent together."""
    if device.type == "cpu":
        return parts
    return list(upload(torch.cat(parts), device).split([len(part) for part in parts]))


def upload(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on the device, without waiting for what the device does."""
    return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)


def numbers(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """Scalars as plain numbers; those on a GPU are waited for once."""
    away = [x.detach().float() for x in metrics.values() if x.device.type != "cpu"]
    told = iter(torch.stack(away).tolist() if away else ())
    return {name: x.item() if x.device.type == "cpu" else next(told) for name, x in metrics.items()}
