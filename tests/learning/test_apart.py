"""Updates of separate parameters: ranks that learn by themselves share them out."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from hamlet.learning.buffer import RolloutBuffer
from hamlet.learning.distributed import local_shard
from hamlet.learning.rollout import learn
from hamlet.learning.update import Apart, Update, merged
from tests.learning.test_distributed import actor, batches, ppo, weights

pytestmark = pytest.mark.usefixtures("one_thread")


def two_models(slots, stored=None):
    """As `learned`, but of two models that know nothing of each other, one at half the rate; what
    each rank took of them; and what a checkpoint would hold."""
    batch = next(iter(batches(1, 4 * slots)))
    names = ("x", "action", "old", "advantage", "returns", "weight")
    buffer, taken = RolloutBuffer(4), [0, 0]
    for t in range(4):
        rows = {name: x.unflatten(0, (4, slots))[t] for name, x in zip(names, batch, strict=True)}
        buffer.add(local_shard(rows))
    models, updates = [actor(), actor()], []
    losses = [ppo(model) for model in models]

    def loss(number, rows):
        taken[number] += 1
        value, told = losses[number](*(rows[name] for name in names))
        return value, {f"{name}_{number}": x for name, x in told.items()}

    for number, model in enumerate(models):
        rate = 0.01 / (1 + number)
        updates.append(Update(partial(loss, number), model.parameters(), learning_rate=rate))
    both = Apart(*updates)
    if stored:
        both.load_state_dict(stored)
    last = learn(both, [buffer], 2, 4, torch.Generator().manual_seed(3))
    told = {name: float(value) for name, value in last.items()}
    return {
        "weights": torch.cat([weights(model) for model in models]), "told": told, "taken": taken,
        "state": both.state_dict(),
    }  # fmt: skip


@pytest.mark.parametrize("count", [2, 3])
def test_updates_of_separate_parameters_are_shared_out(ranks, count):
    """Each rank takes one whole; weights, what is told and what is kept are one process's."""
    expected = two_models(96)
    assert expected["taken"] == [8, 8]
    assert {"loss", "grad_norm", "approx_kl_0", "approx_kl_1"} <= expected["told"].keys()
    again = two_models(96, expected["state"])
    assert not torch.equal(again["weights"], expected["weights"])
    found = ranks.run(count, two_models, 96)
    assert [seen["taken"] for seen in found] == [[8, 0], [0, 8], [0, 0]][:count]
    for seen in found:
        assert torch.equal(seen["weights"], expected["weights"])
        assert seen["told"] == pytest.approx(expected["told"], rel=1e-6)
        assert torch.equal(two_models(96, seen["state"])["weights"], again["weights"])


def test_what_several_updates_tell_is_told_as_of_one():
    tensors = [
        {name: torch.tensor(value) for name, value in one.items()}
        for one in (
            {"loss": 1.0, "grad_norm": 3.0, "compile_active": 1.0, "a": 5.0},
            {"loss": 2.0, "grad_norm": 4.0, "compile_active": 0.0, "b": 6.0},
        )
    ]
    found = {name: float(value) for name, value in merged([*tensors, {}]).items()}
    expected = {"loss": 3.0, "grad_norm": 5.0, "compile_active": 0.0, "a": 5.0, "b": 6.0}
    assert found == pytest.approx(expected)
