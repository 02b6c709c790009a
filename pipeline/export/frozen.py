"""Freeze a module with `torch.export`, prove that the frozen graph is the module, load it back.

The file holds no path, clock or stack trace, so the same weights give the same bytes.
"""

from __future__ import annotations

import copy
import io
import logging
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.passes import move_to_device_pass

from hamlet.artifacts import HamletError, atomic_path, check_card, how_to_make, write_card

PARITY_BATCHES = (1, 7, 256)


def tensor_schema(names: Sequence[str], tensors: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Name, dtype and shape of every tensor, the batch dimension as the string 'batch'."""
    return [
        {
            "name": name,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": ["batch", *tensor.shape[1:]],
        }
        for name, tensor in zip(names, tensors, strict=True)
    ]


def freeze(
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    outputs: Sequence[str],
    path: Path,
    *,
    kind: str,
    pack: str,
    upstream: Mapping[str, str],
    extra: Mapping[str, Any],
) -> None:
    """Export one tick of `module` with a named, dynamic batch dimension; write it and its card.

    It is exported on the CPU, wherever the module is: the file is the same for every device.

    Args:
        inputs: example tensors by argument name, batch 2 or more.
        outputs: a name for every tensor returned.
        path: the `.pt2` file.
        kind: what the module is, for the card.
        pack: sha256 of the town pack the module was trained in.
        upstream: sha256 by kind of everything it was trained on.
        extra: plain data for the card (sizes and the like).
    """
    if next(module.parameters()).device.type != "cpu":
        module = copy.deepcopy(module).to("cpu")
    flat = Flat(module).eval().requires_grad_(False)
    batch = torch.export.Dim("batch", min=1, max=1 << 20)
    # Copies: one tensor given for two inputs would be exported as one input.
    examples = tuple(tensor.clone() for tensor in inputs.values())
    with torch.no_grad(), quiet():
        produced = flat(*examples)
        program = torch.export.export(
            flat, examples, dynamic_shapes=(tuple({0: batch} for _ in examples),), strict=False
        )
    for submodule in program.graph_module.modules():
        graph = getattr(submodule, "graph", None)
        for node in graph.nodes if graph is not None else ():
            for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn"):
                node.meta.pop(key, None)
    schema = {
        "inputs": tensor_schema(list(inputs), examples),
        "outputs": tensor_schema(outputs, produced),
    }
    # Into memory first: on a full disk torch's own writer ends the process instead of raising.
    archive = io.BytesIO()
    with quiet(), warnings.catch_warnings():
        # Views of one storage, whose rest no tensor holds: `prove_parity` compares what is loaded.
        warnings.filterwarnings("ignore", "No complete tensor found")
        torch.export.save(program, archive)
    with atomic_path(path) as temporary:
        temporary.write_bytes(archive.getvalue())
    write_card(
        path,
        kind=kind,
        schema=schema,
        upstream=upstream,
        pack=pack,
        extra=extra,
    )


class Flat(nn.Module):
    """Tensors in by position, a plain tuple out: a frozen graph knows no class of ours."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.module(*inputs))


class Frozen(nn.Module):
    """A loaded graph. It has one mode: switching its owner to training leaves it as it is."""

    def __init__(self, graph: nn.Module) -> None:
        super().__init__()
        self.graph_of_tick = graph.requires_grad_(False)
        self.training = False

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return self.graph_of_tick(*inputs)

    def train(self, mode: bool = True) -> Frozen:
        return self


class quiet:
    """Inside the block torch.export tells nothing, and does not keep who called every operation."""

    def __enter__(self) -> None:
        self.level = logging.getLogger("torch").level
        self.traceless = torch.fx.config.do_not_emit_stack_traces
        logging.getLogger("torch").setLevel(logging.ERROR)
        torch.fx.config.do_not_emit_stack_traces = True

    def __exit__(self, *_: object) -> None:
        logging.getLogger("torch").setLevel(self.level)
        torch.fx.config.do_not_emit_stack_traces = self.traceless


@cache
def spare_work() -> None:
    """Let PyTorch ask each of its classes once what types its fields have.

    `torch.export.load` asks anew for every entry of a file, which is a third of what it takes.
    """
    from torch._export.serde import serialize

    def hints(cls: type, globalns: dict[str, Any]) -> dict[str, Any]:
        if cls not in known:
            known[cls] = typing.get_type_hints(cls, globalns)
        return known[cls]

    known: dict[type, dict[str, Any]] = {}
    if getattr(serialize, "typing", None) is typing:  # else it finds them in another way
        told = {**vars(typing), "get_type_hints": hints}
        setattr(serialize, "typing", SimpleNamespace(**told))  # noqa: B010


def load_frozen(
    path: Path, pack: str | None = None, device: str | torch.device = "cpu"
) -> tuple[Frozen, dict[str, Any]]:
    """Load a frozen graph after checking it against its card.

    Args:
        path: the `.pt2` file.
        pack: sha256 of the town pack that the caller runs in; None accepts any.
        device: where it shall run; the file itself knows the CPU only.

    Returns:
        a module without gradients for its own weights (they still reach its inputs), and the card.

    Raises:
        HamletError: file or card missing, hash or pack different, not readable.
    """
    card = check_card(path, expect_pack=pack)
    spare_work()
    try:
        with quiet():
            program = torch.export.load(path)
    except Exception as error:
        raise HamletError(
            f"{path} matches its card but torch {torch.__version__} cannot read it",
            how_to_make(path),
        ) from error
    if torch.device(device).type != "cpu":
        program = move_to_device_pass(program, str(device))
    graph = program.module(check_guards=False)
    # In place, as torch.export wrote it, a view could not be exported once more (in the agent).
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.detach_.default):
        node.target = torch.ops.aten.detach.default
    graph.recompile()
    return Frozen(graph), card


def prove_parity(
    module: nn.Module,
    frozen: Callable[..., Sequence[Tensor]],
    draw: Callable[[int, torch.Generator], tuple[Tensor, ...]],
    state_inputs: Mapping[int, int],
    ticks: int,
    seed: int,
) -> dict[str, float]:
    """Largest difference between a module and its frozen graph over many ticks.

    Args:
        draw: (batch, generator) -> fresh inputs, all of them.
        state_inputs: position among the inputs of each recurrent state -> position of its new
            value among the outputs; states are fed back from tick to tick, each side its own.

    Returns:
        {"batch_1": max abs difference, ...} for batch 1, 7 and 256.
    """
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for batch in PARITY_BATCHES:
        worst = 0.0
        left = right = list(draw(batch, generator))
        for _ in range(ticks):
            with torch.no_grad():
                ours, theirs = tuple(module(*left)), tuple(frozen(*right))
            worst = max(worst, *(_difference(a, b) for a, b in zip(ours, theirs, strict=True)))
            fresh = draw(batch, generator)
            left, right = list(fresh), list(fresh)
            for source, target in state_inputs.items():
                left[source], right[source] = ours[target], theirs[target]
        result[f"batch_{batch}"] = worst
    return result


def _difference(a: Tensor, b: Tensor) -> float:
    if a.dtype != b.dtype or a.shape != b.shape:
        return float("inf")
    return (a.double() - b.double()).abs().max().item() if a.numel() else 0.0
