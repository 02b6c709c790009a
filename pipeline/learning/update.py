"""The update step shared by every trained stage of both worlds.

Forward and loss are one compiled graph; clipping and the fused optimizer stay eager. A compile
error shows at the first call, not at construction, so the guarded fallback lives there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from hamlet.artifacts import HamletError, in_one_line
from hamlet.learning import distributed
from hamlet.learning.compiling import inductor_options, with_room
from hamlet.learning.precision import Precision, autocast
from hamlet.learning.sharded import is_shared, part_of, whole
from hamlet.profiling import region

Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]
PATIENCE = 20
"""Steps that may overflow one after the other while a scaler halves its scale, at first 2^16."""


def fused_adam(parameters: Iterable[nn.Parameter], learning_rate: float, **options: Any):
    """AdamW, fused with a tensor learning rate where supported, else foreach with a plain one."""
    parameters = list(parameters)
    fused = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters)
    fused = fused and not is_shared(parameters)
    if fused:
        rate = torch.tensor(learning_rate, device=parameters[0].device)
        return torch.optim.AdamW(parameters, lr=rate, eps=1e-5, fused=True, **options)
    return torch.optim.AdamW(parameters, lr=learning_rate, eps=1e-5, foreach=True, **options)


def to_device(batch: Iterable[Tensor], device: str) -> list[Tensor]:
    """Move a batch; from pinned memory without blocking on CUDA, plainly elsewhere."""
    if device.startswith("cuda"):
        return [x.pin_memory().to(device, non_blocking=True) for x in batch]
    return [x.to(device) for x in batch]


class Update:
    """One optimisation step of `loss(*batch) -> (scalar, diagnostics)`.

    Args:
        loss: pure function of the batch and of the modules it closes over.
        parameters: what is optimised.
        learning_rate: initial rate; `set_learning_rate` changes it without recompiling.
        max_grad_norm: gradients are clipped to this global norm, in nats of nothing: unitless.
        compile: compile forward and loss as one graph; falls back to eager with one warning.
        cuda_graphs: replay what was compiled as CUDA graphs (for batches on a GPU; on the CPU there
            is nothing to replay). Their shapes are those of the first batch: a batch of another
            size runs eager and is counted in `off_graph_steps`.
        precision: autocast type of forward and loss; fp16 adds a gradient scaler.
        weight_decay: decoupled weight decay.
        settle: what of a batch is worked out once for all epochs but the first, as more entries.

    Raises:
        ValueError: for CUDA graphs of what is not compiled.
    """

    def __init__(
        self,
        loss: Loss,
        parameters: Iterable[nn.Parameter],
        *,
        learning_rate: float,
        max_grad_norm: float = 1.0,
        compile: bool = False,
        cuda_graphs: bool = False,
        precision: Precision = "fp32",
        weight_decay: float = 0.0,
        settle: Callable[[TensorDict], dict[str, Tensor]] | None = None,
    ) -> None:
        if cuda_graphs and not compile:
            raise ValueError("cuda_graphs: only a compiled loss is replayed: set compile too")
        self.parameters = list(parameters)
        self.max_grad_norm = max_grad_norm
        self._device, self._shared = self.parameters[0].device.type, is_shared(self.parameters)
        self.optimizer = fused_adam(self.parameters, learning_rate, weight_decay=weight_decay)
        self.scaler = torch.amp.GradScaler(self._device, enabled=precision == "fp16")
        self.skipped_steps = 0
        self.compile_active = compile
        self.off_graph_steps = 0
        self._cuda_graphs = cuda_graphs
        self._shapes: list[torch.Size] = []
        self._first = True
        self._lost_in_a_row = 0
        self._precision = precision
        self._settle = settle
        self._eager = loss
        self._loss = loss
        if compile:
            options = inductor_options() | {"triton.cudagraphs": cuda_graphs}
            self._loss = torch.compile(loss, fullgraph=True, options=options)

    def set_learning_rate(self, rate: float) -> None:
        self._set_rates([rate] * len(self.optimizer.param_groups))

    def _set_rates(self, rates: list[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _backward(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        with autocast(self._precision, self._device):
            loss, diagnostics = self._forward(batch)(*batch)
        self.scaler.scale(loss).backward()
        return loss, diagnostics

    def _forward(self, batch: tuple[Tensor, ...]) -> Loss:
        """The loss to call: the eager one for a batch that does not fit the CUDA graphs."""
        if not (self._cuda_graphs and self.compile_active):
            return self._loss
        shapes = [x.shape for x in batch]
        self._shapes = self._shapes or shapes
        if shapes != self._shapes:
            self.off_graph_steps += 1
            return self._eager
        torch.compiler.cudagraph_mark_step_begin()
        return self._loss

    def __call__(self, *batch: Tensor) -> dict[str, Tensor]:
        """Take one step; returns detached scalars.

        Raises:
            HamletError: the loss or a gradient is not a finite number. With a scaler, which skips
                steps that overflow: so it was in PATIENCE steps, one after the other. The weights
                are those before the step.
        """
        with region("loss"):
            loss, diagnostics = self._gradients(batch)
        with region("optimizer"):
            norm = self._apply(loss, diagnostics)
        told = {"loss": loss, "grad_norm": norm} | diagnostics
        told["compile_active"] = torch.tensor(float(self.compile_active))
        # The next replay writes where this one's results are.
        keep = torch.Tensor.clone if self._cuda_graphs else torch.Tensor.detach
        return {name: keep(value.detach()) for name, value in told.items()}

    def _gradients(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        self.optimizer.zero_grad(set_to_none=True)
        if self._first and self.compile_active:
            try:
                loss, diagnostics = with_room(self._backward)(batch)
            except Exception as error:
                reason = in_one_line(error)
                warnings.warn(
                    f"compiling the update failed, eager from now on: {reason}", stacklevel=2
                )
                self._loss, self.compile_active = self._eager, False
                self.optimizer.zero_grad(set_to_none=True)
                loss, diagnostics = self._backward(batch)
        else:
            loss, diagnostics = self._backward(batch)
        self._first = False
        return loss, diagnostics

    def _apply(self, loss: Tensor, diagnostics: dict[str, Tensor]) -> Tensor:
        """Clip and step; returns the norm of the gradients before clipping."""
        if not self._shared:  # else they are summed as they come
            distributed.sum_gradients(self.parameters)
        self.scaler.unscale_(self.optimizer)
        norm = whole(nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm))
        lost = not bool((loss.detach() + norm).isfinite())
        self._lost_in_a_row = self._lost_in_a_row + 1 if lost else 0
        scaled = self.scaler.is_enabled()
        if lost and self._lost_in_a_row >= (PATIENCE if scaled else 1):
            told = {"loss": loss, **diagnostics, "grad_norm": norm}
            wrong = [name for name, value in told.items() if not bool(value.isfinite().all())]
            raise HamletError(
                f"training stopped: not a finite number: {', '.join(wrong)}",
                "look for nan or inf in the rewards and observations, or lower the learning rate; "
                "the last checkpoint is from before it",
            )
        if scaled:
            before = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.skipped_steps += self.scaler.get_scale() < before
        else:
            self.optimizer.step()
        return norm

    def settled(self, data: TensorDict) -> TensorDict:
        """What all epochs but the first learn from."""
        return data.copy().update(self._settle(data)) if self._settle else data

    def part_of(self, rank: int, ranks: int) -> Update:
        """What this rank does of it where each learns by itself: all of it, as the others do."""
        return self

    def exchange(self, told: dict[str, Tensor]) -> dict[str, Tensor]:
        """After all ranks learned by themselves: equal weights at every rank. All ranks call it.

        Args:
            told: the last diagnostics of this rank; those of all are returned.
        """
        distributed.take_from(self.parameters)
        return told

    def take_moments(self, source: int) -> None:
        """The optimizer's state of another rank, at every rank. All ranks call it."""
        for p in self.parameters:
            if not self.optimizer.state[p]:
                self.optimizer.state[p] = {
                    "step": torch.zeros((), device=p.device),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }
        state = [self.optimizer.state[p] for p in self.parameters]
        distributed.take_from([each[name] for each in state for name in sorted(each)], source)

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizer": whole(self.optimizer.state_dict()),
            "scaler": self.scaler.state_dict(),
            "skipped_steps": self.skipped_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # Of what was saved on another device only the numbers: how they are used is this one's.
        own = self.optimizer.state_dict()["param_groups"]
        rates = [float(group["lr"]) for group in state["optimizer"]["param_groups"]]
        moments = {
            number: {name: part_of(x, self.parameters[number]) for name, x in each.items()}
            for number, each in state["optimizer"]["state"].items()
        }
        self.optimizer.load_state_dict({"state": moments, "param_groups": own})
        self._set_rates(rates)
        self.scaler.load_state_dict(state["scaler"])
        self.skipped_steps = state["skipped_steps"]


class Apart:
    """Updates that are taken one after the other, each of parameters that no other one changes.

    Each clips its own gradients. So where ranks learn by themselves (see `rollout.learn`), each
    takes some of the updates, and the ranks exchange what they learned.
    """

    def __init__(self, *updates: Update) -> None:
        self.updates = updates

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for update in self.updates for p in update.parameters]

    def __call__(self, *batch: Tensor) -> dict[str, Tensor]:
        """Take a step of each; the diagnostics of all, the losses summed."""
        return merged([update(*batch) for update in self.updates])

    def set_learning_rate(self, rate: float) -> None:
        for update in self.updates:
            update.set_learning_rate(rate)

    def settled(self, data: TensorDict) -> TensorDict:
        """As `Update.settled`."""
        for update in self.updates:
            data = update.settled(data)
        return data

    def part_of(self, rank: int, ranks: int) -> Apart:
        """The updates that this rank takes where each learns by itself."""
        return Apart(*self.updates[rank::ranks])

    def exchange(self, told: dict[str, Tensor]) -> dict[str, Tensor]:
        """As `Update.exchange`."""
        for number, update in enumerate(self.updates):
            distributed.take_from(update.parameters, number % distributed.ranks())
        mine = {name: float(value) for name, value in told.items()}
        return merged(
            {name: torch.tensor(value) for name, value in one.items()}
            for one in distributed.everyones(mine)
        )

    def state_dict(self) -> dict[str, Any]:
        """All ranks call it."""
        for number, update in enumerate(self.updates):
            if distributed.ranks() > 1:
                update.take_moments(number % distributed.ranks())
        return {str(number): update.state_dict() for number, update in enumerate(self.updates)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for number, update in enumerate(self.updates):
            update.load_state_dict(state[str(number)])


def merged(told: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The diagnostics of several updates as those of one."""
    several = [one for one in told if one]
    found = {name: value for one in several for name, value in one.items()}
    for name, together in (
        ("loss", torch.sum),
        ("grad_norm", torch.linalg.vector_norm),
        ("compile_active", torch.amin),
    ):
        if name in found:
            found[name] = together(torch.stack([one[name] for one in several]))
    return found
