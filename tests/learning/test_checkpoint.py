"""An interrupted training that resumes ends with the same bits as one that was left alone."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from hamlet.learning.checkpoint import Checkpoint
from hamlet.learning.sequences import SequenceReader
from hamlet.learning.update import Update

STEPS = 14


def train(path, stop_at: int | None = None, interval: float = 0.0):
    """A small recurrent learner over reader; returns its weights and state, or None if stopped."""
    torch.manual_seed(3)
    torch.set_num_threads(1)
    model = nn.GRUCell(2, 4)
    data = TensorDict(
        {
            "x": torch.randn(12, 5, 3, 2, generator=torch.Generator().manual_seed(9)),
            "action": torch.zeros(12, 5, 3, dtype=torch.int64),
            "first": torch.zeros(12, 5, dtype=torch.bool),
        },
        batch_size=[12, 5],
    )
    reader = SequenceReader(data, torch.arange(5), 2, 4, torch.Generator().manual_seed(4))
    noise = torch.Generator().manual_seed(5)
    state = torch.zeros(6, 4)
    carried = []

    def loss(chunk, state):
        for t in range(4):
            state = model(chunk["x"][t], state)
        carried[:] = [state.detach()]
        return (state - torch.randn(6, 4, generator=noise)).square().mean(), {}

    update = Update(loss, model.parameters(), learning_rate=0.05)
    saved = Checkpoint(
        path, {"model": model, "update": update, "reader": reader, "noise": noise}, interval
    )
    start, extra = saved.load()
    state = extra.get("state", state)
    for step in range(start, STEPS):
        if step == stop_at:
            return None
        update.set_learning_rate(0.05 * (1 - step / STEPS))
        update(reader.read(), state)
        state = carried[0]
        saved.save(step + 1, {"state": state})
    return [p.detach().clone() for p in model.parameters()], state, start


@pytest.mark.parametrize("stop_at", [1, 5, 13])
def test_resuming_is_exact(tmp_path, stop_at):
    whole, whole_state, _ = train(tmp_path / "whole.pt")
    assert train(tmp_path / "cut.pt", stop_at) is None
    parts, state, start = train(tmp_path / "cut.pt")
    assert start == stop_at
    assert torch.equal(state, whole_state)
    assert all(torch.equal(a, b) for a, b in zip(parts, whole, strict=True))


def test_without_a_file_it_begins_at_zero(tmp_path):
    assert Checkpoint(tmp_path / "none.pt", {"m": nn.Linear(1, 1)}).load() == (0, {})


def test_it_saves_no_more_often_than_its_interval(tmp_path):
    saved = Checkpoint(tmp_path / "c.pt", {"m": nn.Linear(1, 1)}, interval=1000)
    saved.save(1)
    assert not (tmp_path / "c.pt").exists()
    saved.save(2, force=True)
    assert saved.load()[0] == 2


def test_nothing_is_unpickled(tmp_path):
    """A checkpoint that would run code when loaded is refused."""

    class Bomb:
        def __reduce__(self):
            return print, ("boom",)

    path = tmp_path / "c.pt"
    torch.save({"step": 1, "parts": {"m": Bomb()}, "extra": {}}, path)
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        Checkpoint(path, {"m": nn.Linear(1, 1)}).load()
