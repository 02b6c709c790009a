"""Ticks that are captured once and replayed; on the CPU the work itself stands for its graph."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import pytest
import torch
from tensordict import TensorDict
from torch.utils._pytree import tree_flatten

from benchmarks.counts import Untrained, default_params
from hamlet.learning.buffer import RolloutBuffer
from hamlet.learning.captured import Captured
from hamlet.learning.learner import RolloutCarry, thinking_in
from hamlet.learning.rollout import collect, fused_step
from hamlet.learning.train_policy import add_advantages

WORLDS, TICKS = 4, 3


def as_a_graph_does(work: Any, inputs: Any) -> Any:
    """Each replay reads its inputs where they stand and writes its outputs where they stood."""
    outputs = work(*inputs)

    def replay() -> None:
        new = [x.clone() for x in tensors(work(*inputs))]
        for old, fresh in zip(tensors(outputs), new, strict=True):
            old.copy_(fresh)

    for old in tensors(outputs):
        old.fill_(0)  # a capture computes nothing
    return outputs, replay


def tensors(nest: Any) -> list[torch.Tensor]:
    return [x for x in tree_flatten(nest)[0] if isinstance(x, torch.Tensor)]


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor | None


def total(pair: Pair, world: TensorDict) -> tuple[torch.Tensor, torch.Tensor]:
    return pair.x + world["z"], pair.x * 2


def given(number: float, rows: int = 3, dtype: torch.dtype = torch.float32) -> Any:
    x = torch.full((rows,), number, dtype=dtype)
    return Pair(x, None), TensorDict({"z": x + 1}, batch_size=rows)


def test_every_call_computes_its_own_inputs_and_changes_none_of_them():
    captured = Captured(total, as_a_graph_does)
    for number in (1.0, 2.0, 5.0):
        pair, world = given(number)
        outputs = captured(pair, world)
        assert [x.tolist() for x in outputs] == [[2 * number + 1] * 3, [2 * number] * 3]
        assert pair.x.tolist() == [number] * 3
    assert (captured.replays, captured.outside) == (3, 0)


@pytest.mark.parametrize(
    "other",
    [
        given(4.0, rows=2),
        given(4.0, dtype=torch.float64),
        (given(4.0)[0]._replace(y=torch.zeros(1)), given(4.0)[1]),
    ],
)
def test_what_does_not_fit_runs_outside_and_is_counted(other):
    captured = Captured(total, as_a_graph_does)
    captured(*given(1.0))
    outputs = captured(*other)
    assert outputs[0].tolist() == [9.0] * len(outputs[0])
    assert (captured.replays, captured.outside) == (1, 1)
    assert captured(*given(2.0))[0].tolist() == [5.0] * 3


def test_what_cannot_be_captured_is_told_once_and_runs_outside():
    def refused(work: Any, inputs: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    captured = Captured(total, refused)
    with pytest.warns(UserWarning, match="^no CUDA graph.*not permitted when stream is capturing$"):
        assert captured(*given(1.0))[0].tolist() == [3.0] * 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert captured(*given(2.0))[0].tolist() == [5.0] * 3
    assert (captured.replays, captured.outside) == (0, 2)


def test_a_rollout_with_its_advantages_is_what_it_is_tick_by_tick():
    """Three rollouts one after another: experience, advantages and where the worlds stand."""
    params = default_params()
    new = Untrained(params)
    step = fused_step(new.town, new.learner)
    sizes = params.policy.model_copy(update={"rollout": TICKS})

    def lived(graph: bool) -> list[TensorDict]:
        buffer, found = RolloutBuffer(TICKS), []

        def played(world: TensorDict, carry: RolloutCarry, contexts: Any) -> Any:
            world, carry = collect(step, world, carry, buffer, contexts)
            add_advantages(buffer, world, new.learner, sizes)
            return world, carry

        work: Any = Captured(played, as_a_graph_does) if graph else played
        world, carry = new.start(WORLDS, seed=5)
        for iteration in range(3):
            contexts = [(now, None) for now in thinking_in(iteration, WORLDS, sizes)]
            world, carry = work(world, carry, contexts)
            assert buffer.data is not None
            found += [buffer.data.clone(), world.clone()]
        if graph:
            assert (work.replays, work.outside) == (3, 0)
        return found

    for ours, theirs in zip(lived(True), lived(False), strict=True):
        assert set(ours.keys()) == set(theirs.keys())
        for name, value in theirs.items():
            assert torch.equal(ours[name], value), name
