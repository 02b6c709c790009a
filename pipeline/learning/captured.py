"""Many ticks as one CUDA graph: the host starts one thing where it started thousands.

After `torch.cuda.graph` (PyTorch's notes on CUDA graphs): the work runs a few times on a stream of
its own, is captured once, and is then replayed on inputs that are copied to where it reads them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from hamlet.artifacts import in_one_line

WARM_UPS = 3
"""Runs before the capture: what is compiled, chosen or allocated at a first run is so by then."""

Work = Callable[..., Any]
Record = Callable[[Work, tuple[Any, ...]], tuple[Any, Callable[[], None]]]


def cuda_graph(work: Work, inputs: tuple[Any, ...]) -> tuple[Any, Callable[[], None]]:
    """Capture `work(*inputs)`; returns its outputs, and what computes them anew from what then
    stands in the same inputs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            work(*inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = work(*inputs)
    return outputs, graph.replay


class Captured:
    """A function of nests of tensors that is captured at its first call and replayed ever after.

    It may write to tensors of its own, which keep their addresses, and must not read a number on
    the host. What it returns is overwritten by the next call. Inputs of another structure, shape or
    type than the first ones run as they are, outside of the graph; so does everything, with one
    warning, where the capture fails.

    Attributes:
        replays: calls that were a replay. outside: calls that were not.

    Args:
        work: the function.
        record: captures it; another one for tests without a GPU.
    """

    def __init__(self, work: Work, record: Record = cuda_graph) -> None:
        self.work, self.record = work, record
        self.replays = self.outside = 0
        self._replay: Callable[[], None] | None = None
        self._kept: list[Any] = []
        self._spec: TreeSpec | None = None
        self._outputs: Any = None

    def __call__(self, *inputs: Any) -> Any:
        leaves, spec = tree_flatten(inputs)
        if self._replay is None:
            self._kept = [x.clone() if isinstance(x, Tensor) else x for x in leaves]
            self._spec = spec
            self._outputs, self._replay = self._captured(tree_unflatten(self._kept, spec))
        if self._replay is _cannot or not self._fits(leaves, spec):
            self.outside += 1
            return self.work(*inputs)
        for kept, new in zip(self._kept, leaves, strict=True):
            if isinstance(kept, Tensor):
                kept.copy_(new)
        self._replay()
        self.replays += 1
        return self._outputs

    def _captured(self, inputs: tuple[Any, ...]) -> tuple[Any, Callable[[], None]]:
        try:
            return self.record(self.work, inputs)
        except RuntimeError as error:
            reason = in_one_line(error)
            warnings.warn(f"no CUDA graph, tick by tick from now on: {reason}", stacklevel=3)
            return None, _cannot

    def _fits(self, leaves: list[Any], spec: TreeSpec) -> bool:
        return spec == self._spec and all(map(_alike, self._kept, leaves))


def _cannot() -> None:
    """What stands for the graph of work that cannot be captured."""


def _alike(kept: Any, new: Any) -> bool:
    if not isinstance(kept, Tensor):
        return bool(kept == new)
    same = isinstance(new, Tensor) and kept.shape == new.shape and kept.dtype == new.dtype
    return same and kept.device == new.device
