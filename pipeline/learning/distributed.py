"""Data-parallel training under `torchrun`: whose rows are whose, and the sums of all ranks.

Every rank holds an equal part of the rows of a batch (worlds, lanes or samples) and all of the
weights. Two rules make its updates those of a single process with all the rows:

- a sum over rows is one over the rows of all ranks, and so is every mean, moment and metric made of
  such sums; its gradient is that of the rank's own rows (`all_reduce_sum`);
- the gradients of the ranks are summed, not averaged (`sum_gradients`).

Small minibatches are not worth the messages: they are gathered, and every rank takes whole steps by
itself (`alone`), all of them, or those of some of the parameters (`update.Apart`).

What is drawn at random is drawn for all rows by every rank, from the same seed, and each takes its
part: the number of ranks changes no draw, and a checkpoint of whole rows suits any number of ranks.
`DistributedDataParallel` is not used: it wraps the forward pass of one module where a loss here
is a function of several, and it averages over ranks where the rows that count differ between them.

In one process, with or without `torchrun`, all of this does nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hamlet.artifacts import HamletError

T = TypeVar("T")
# A rank that is silent for so long is lost; the first one compiles meanwhile, or saves.
PATIENCE = timedelta(minutes=10)
_LOST = re.compile(r"gloo|nccl|connection (closed|reset)|broken pipe|timed out", re.IGNORECASE)

_rank, _ranks = 0, 1


def rank() -> int:
    """This process among the ranks; 0 is the one that writes files and tells how it goes."""
    return _rank


def ranks() -> int:
    """How many processes train together."""
    return _ranks


@contextmanager
def alone() -> Iterator[None]:
    """Inside, every rank computes as if it were the only process; all do the same."""
    global _rank, _ranks
    before = _rank, _ranks
    _rank, _ranks = 0, 1
    try:
        yield
    finally:
        _rank, _ranks = before


@contextmanager
def process_group(device: str | torch.device = "cpu") -> Iterator[None]:
    """Join the processes that `torchrun` started: over gloo, and over NCCL what is on a GPU.

    Args:
        device: of this process; a GPU is its own.

    Raises:
        HamletError: another rank ended or does not answer.
    """
    global _rank, _ranks
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    gpu = torch.device(device) if torch.device(device).type == "cuda" else None
    try:
        store, number, count = next(dist.rendezvous("env://", timeout=PATIENCE))
        # torchrun starts all again with the same store: addresses of the lost must not be found.
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if gpu else "gloo",
            store=store, rank=number, world_size=count, timeout=PATIENCE, device_id=gpu,
        )  # fmt: skip
        _rank, _ranks = number, count
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not _LOST.search(str(error)):
            raise
        raise HamletError(
            "another rank ended or does not answer",
            "see its own message, then run the same command again: it goes on from the checkpoint",
        ) from error
    finally:
        _rank, _ranks = 0, 1
        if dist.is_initialized():
            dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------
# Parts of rows


def local_count(count: int, name: str) -> int:
    """How many of `count` rows each rank holds.

    Raises:
        HamletError: the ranks do not divide them; `name` is what to change.
    """
    if count % _ranks:
        raise HamletError(
            f"{name} is {count}, which {_ranks} ranks cannot share equally",
            f"make it a multiple of {_ranks}, or start another number of ranks",
        )
    return count // _ranks


def local_shard(rows: T, dim: int = 0) -> T:
    """This rank's part of a tensor or TensorDict of the rows of all ranks, or of several in a
    dict or tuple."""
    return shard(rows, _rank, _ranks, dim)


def shard(rows: T, index: int, count: int, dim: int = 0) -> T:
    """One of `count` equal parts of a tensor or TensorDict, or of several in a dict or tuple."""
    if count == 1:
        return rows
    if isinstance(rows, dict):
        return {name: shard(value, index, count, dim) for name, value in rows.items()}  # type: ignore[return-value]
    if isinstance(rows, tuple):
        return tuple(shard(value, index, count, dim) for value in rows)  # type: ignore[return-value]
    return rows.chunk(count, dim)[index]  # type: ignore[attr-defined]


def joined(parts: Sequence[T], dim: int = 0) -> T:
    """The opposite of `shard`: all parts, in order, as one."""
    first = parts[0]
    if isinstance(first, dict):
        return {name: joined([part[name] for part in parts], dim) for name in first}  # type: ignore[index,return-value]
    if isinstance(first, tuple):
        return tuple(joined(same, dim) for same in zip(*parts, strict=True))  # type: ignore[return-value]
    return torch.cat(parts, dim)  # type: ignore[arg-type,return-value]


def all_gather(rows: T, dim: int = 0) -> T:
    """The opposite of `local_shard`: the rows of all ranks, at every rank. All ranks call it.

    The gradient of a rank's rows is the sum of what all ranks made of them, so each rank's loss
    must be its own part of the whole: a loss that every rank computes whole counts `ranks()` times.
    """
    if _ranks == 1:
        return rows
    if isinstance(rows, dict):
        return {name: all_gather(value, dim) for name, value in rows.items()}  # type: ignore[return-value]
    if isinstance(rows, tuple):
        return tuple(all_gather(value, dim) for value in rows)  # type: ignore[return-value]
    return _AllGather.apply(rows, dim)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        sent = rows.contiguous().flatten().view(torch.uint8)  # gloo does not know every type
        parts = [torch.empty_like(sent) for _ in range(_ranks)]
        dist.all_gather(parts, sent)
        return torch.cat([got.view(rows.dtype).view(rows.shape) for got in parts], dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return local_shard(gradient, ctx.dim), None


def noise(like: Tensor, dim: int) -> Tensor:
    """Standard normal noise for this rank's rows along `dim`, out of that for all rows."""
    if _ranks == 1:
        return torch.randn_like(like)
    shape = list(like.shape)
    shape[dim] *= _ranks
    return local_shard(torch.randn(shape, dtype=like.dtype, device=like.device), dim)


# ------------------------------------------------------------------------------------------------
# Sums over all ranks


def all_reduce_sum(*sums: Tensor) -> tuple[Tensor, ...]:
    """Sums over the rows of all ranks, from those over this rank's; equal bits at every rank.

    float [.] of equal shapes, sent as one message. The gradient stays the one of this rank's rows,
    for `sum_gradients` to add. Can be compiled.
    """
    return sums if _ranks == 1 else _AllReduceSum.apply(torch.stack(sums)).unbind()


class _AllReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums: Tensor) -> Tensor:
        sums = sums.clone()
        dist.all_reduce(sums)
        return sums

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@torch.no_grad()
def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace the gradients, in place, by their sums over all ranks: one message."""
    if _ranks == 1:
        return
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(summed.view_as(gradient))


@torch.no_grad()
def take_from(tensors: Iterable[Tensor], source: int = 0) -> None:
    """The numbers of one rank, at every rank: one message. All ranks call it.

    What all compute alike differs in its last bits where their processors do.
    """
    if _ranks == 1:
        return
    tensors = list(tensors)
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.broadcast(flat, source)
    for tensor, new in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(new.view_as(tensor))


def everyones(told: dict[str, float]) -> list[dict[str, float]]:
    """What each rank tells, in their order, at every rank. All ranks call it."""
    if _ranks == 1:
        return [told]
    heard: list[Any] = [None] * _ranks
    dist.all_gather_object(heard, told)
    return heard


def from_first(number: int) -> int:
    """What the first rank says, at every rank. All ranks call it."""
    if _ranks == 1:
        return number
    said = torch.tensor(number)
    dist.broadcast(said, 0)
    return int(said)
