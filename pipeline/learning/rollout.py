"""One tick of any world with any player, fused; and what drives it: experience, evaluation.

Both worlds share it. A world has `reset(seed, slots)`, `observe(state)`,
`step_and_reset_core(state, actions)`, `playing(state)` and the modes `train()` and `eval(cases)`;
state is a TensorDict of batch [B]. A player is a pure function of what it sees, and carries what it
remembers from tick to tick.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from hamlet import profiling
from hamlet.learning import distributed
from hamlet.learning.buffer import RolloutBuffer
from hamlet.learning.captured import Captured
from hamlet.learning.compiling import compiled_or_plain
from hamlet.learning.precision import Precision, autocast
from hamlet.profiling import region

if TYPE_CHECKING:
    from hamlet.learning.update import Apart, Update

Record = dict[str, Tensor]
SHARED_ROWS = 4096  # of a minibatch, from which on ranks save more by sharing it than they send
GPU_TICKS = 16  # played between two looks at whether an evaluation is over, on a GPU
Step = Callable[..., tuple[TensorDict, Any, Record]]


class World(Protocol):
    device: torch.device

    def reset(self, seed: int, num_worlds: int) -> TensorDict: ...
    def observe(self, state: TensorDict) -> TensorDict: ...
    def step_and_reset_core(self, state: TensorDict, actions: Tensor) -> TensorDict: ...
    def playing(self, state: TensorDict) -> tuple[Tensor, Tensor]: ...


class Player(Protocol):
    def act(
        self, state: TensorDict, seen: TensorDict, memory: Any, *context: Any
    ) -> tuple[Tensor, Any, Record]:
        """The actions for this tick, the new memory, and what to record of the decision."""
        ...

    def outcome(self, before: TensorDict, after: TensorDict, memory: Any) -> tuple[Any, Record]:
        """The memory without what ended lives knew, and what to record of the world's answer."""
        ...


def fused_step(
    world: World, player: Player, compile: bool = False, precision: Precision = "fp32"
) -> Step:
    """`step(state, memory, *context) -> (state, memory, record)`: observe, act, step and reset.

    One graph when compiled. The player's modules inside stay uncompiled modules, so new weights are
    seen, and one engine and one set of weights serve rollouts and evaluation. No input is mutated.

    Args:
        precision: of the player: that of the update which learns from what it did.
    """

    @torch.no_grad()
    def step(
        state: TensorDict, memory: Any, *context: Any
    ) -> tuple[TensorDict, Any, dict[str, Tensor]]:
        with region("environment"):
            seen = world.observe(state)
        with region("policy"), autocast(precision, world.device):
            action, memory, record = player.act(state, seen, memory, *context)
        with region("environment"):
            after = world.step_and_reset_core(state, action)
        memory, answer = player.outcome(state, after, memory)
        return after, memory, record | answer

    return compiled_or_plain(step) if compile else step


def collect(
    step: Step,
    state: TensorDict,
    memory: Any,
    buffer: RolloutBuffer,
    contexts: Iterable[tuple[Any, ...]] | None = None,
) -> tuple[TensorDict, Any]:
    """Fill `buffer` with the records of its T ticks; returns the state and memory that follow.

    Args:
        contexts: extra arguments of `step`, tick by tick.
    """
    buffer.reset()
    for context in contexts or [()] * buffer.ticks:
        with region("rollout"):
            state, memory, record = step(state, memory, *context)
        with region("data"):
            buffer.add(record)
    return state, memory


def learn(
    update: Update | Apart,
    experience: Sequence[RolloutBuffer],
    epochs: int,
    minibatches: int,
    generator: torch.Generator,
    max_kl: float = math.inf,
) -> Record:
    """Update on every row of full buffers, `epochs` times over; returns the last diagnostics.

    A minibatch of fewer than SHARED_ROWS rows of all ranks is not shared: each rank learns from all
    of it, its part of the update, and none waits for the others.

    Args:
        experience: every update is given a minibatch of each of these.
        max_kl: no further minibatch is learned from once `approx_kl` (nats) of one went above it:
            the early stop of Spinning Up's PPO (Achiam 2018), which acts in a single epoch too.
    """
    rows = max(buffer.rows for buffer in experience) * distributed.ranks() // minibatches
    if distributed.ranks() > 1 and rows < SHARED_ROWS:
        experience = [buffer.of_all_ranks() for buffer in experience]
        own = update.part_of(distributed.rank(), distributed.ranks())
        with distributed.alone():
            diagnostics = _learn(own, experience, epochs, minibatches, generator, max_kl)
        return update.exchange(diagnostics)
    return _learn(update, experience, epochs, minibatches, generator, max_kl)


def _learn(
    update: Update | Apart,
    experience: Sequence[RolloutBuffer],
    epochs: int,
    minibatches: int,
    generator: torch.Generator,
    max_kl: float,
) -> Record:
    diagnostics: Record = {}
    for epoch in range(epochs):
        if epoch == 1:
            experience = [buffer.replaced(update.settled) for buffer in experience]
        parts = [buffer.minibatches(minibatches, generator) for buffer in experience]
        for batches in zip(*parts, strict=True):
            diagnostics = update(*batches)
            if "approx_kl" in diagnostics and bool(diagnostics["approx_kl"] > max_kl):
                return diagnostics
    return diagnostics


def evaluate(
    world: World,
    step: Step,
    memory: Any,
    cases: int,
    slots: int,
    seed: int = 0,
    watch: Callable[[TensorDict], None] | None = None,
) -> dict[str, Tensor]:
    """Play every case of a world in `eval` mode exactly once; finished slots take the next case.

    The results do not depend on the number of slots.

    Args:
        step: of a player whose record holds, per slot, what is to be added up over each case.
        memory: of the player, for `slots` slots.
        watch: told the state before every tick.

    Returns:
        float64 [cases, ...] sums of every entry of the record.
    """
    state = world.reset(seed, slots)
    # To ask whether all is over makes a GPU wait; a tick too many adds nothing.
    every = 1 if world.device.type == "cpu" else GPU_TICKS
    graphs = world.device.type == "cuda" and watch is None and profiling.current_watch is None

    def played(state: TensorDict, memory: Any, totals: Record) -> tuple[TensorDict, Any, Record]:
        for _ in range(every):
            case, playing = world.playing(state)
            row = torch.where(playing, case, cases)  # slots without a case add to one of their own
            if watch:
                watch(state)
            state, memory, record = step(state, memory)
            for name, value in record.items():
                if name not in totals:
                    shape = (cases + 1, *value.shape[1:])
                    nothing = torch.zeros(shape, dtype=torch.float64, device=value.device)
                    totals = {**totals, name: nothing}
                totals = {**totals, name: totals[name].index_add(0, row, value.double())}
        return state, memory, totals

    totals: Record = {}
    work: Callable[..., tuple[TensorDict, Any, Record]] = played
    while bool(world.playing(state)[1].any()):
        state, memory, totals = work(state, memory, totals)
        if work is played and graphs:
            work = Captured(played)
    return {name: total[:cases] for name, total in totals.items()}
