"""Experience is kept at fixed addresses and every row of it is served once."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from hamlet.learning import distributed
from hamlet.learning.buffer import RolloutBuffer


def tick(t: int, slots: int) -> TensorDict:
    return TensorDict(
        {"id": torch.arange(slots) + t * slots, "x": torch.full((slots, 2), float(t))},
        batch_size=[slots],
    )


def filled(ticks: int, slots: int) -> RolloutBuffer:
    buffer = RolloutBuffer(ticks)
    for t in range(ticks):
        assert not buffer.full
        buffer.add(tick(t, slots))
    assert buffer.full
    return buffer


def test_rows_are_where_they_were_put():
    buffer = filled(4, 3)
    assert buffer.data["id"].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert buffer.data["x"].shape == (4, 3, 2)


@pytest.mark.parametrize("count", [1, 2, 4, 5, 7])
def test_every_row_is_served_once_also_with_a_remainder(count):
    buffer = filled(5, 6)
    generator = torch.Generator().manual_seed(0)
    parts = list(buffer.minibatches(count, generator))
    assert len(parts) == count
    served = torch.cat([part["id"] for part in parts])
    assert sorted(served.tolist()) == list(range(30))
    assert served.tolist() != list(range(30))
    sizes = {len(part) for part in parts}
    assert max(sizes) - min(sizes) <= 1
    for part in parts:  # fields stay together
        torch.testing.assert_close(part["x"][:, 0], (part["id"] // 6).float())
    again = torch.cat([part["id"] for part in buffer.minibatches(count, generator)])
    assert again.tolist() != served.tolist()


def test_a_full_buffer_says_so_and_a_reset_one_keeps_its_memory():
    buffer = filled(3, 2)
    with pytest.raises(IndexError, match="reset"):
        buffer.add(tick(3, 2))
    addresses = {key: value.data_ptr() for key, value in buffer.data.items()}
    buffer.reset()
    for t in range(10, 13):
        buffer.add(tick(t, 2))
    assert {key: value.data_ptr() for key, value in buffer.data.items()} == addresses
    assert buffer.data["id"][0].tolist() == [20, 21]


def test_the_buffer_keeps_copies():
    buffer = RolloutBuffer(2)
    record = tick(0, 2)
    buffer.add(record)
    record["x"].fill_(9.0)
    assert buffer.data["x"][0].eq(0).all()


def test_a_part_has_some_entries_of_some_slots_of_each_tick():
    buffer = filled(3, 4)
    assert set(buffer.part(["id"]).data.keys()) == {"id"}
    slots = torch.tensor([[0, 3], [1, 2], [2, 0]])
    part = buffer.part(["x", "id"], slots)
    assert part.data["id"].tolist() == [[0, 3], [5, 6], [10, 8]]
    assert part.data["x"].shape == (3, 2, 2)
    served = torch.cat([b["id"] for b in part.minibatches(2, torch.Generator().manual_seed(0))])
    assert sorted(served.tolist()) == [0, 3, 5, 6, 8, 10]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_serves_its_rows_of_the_minibatches_that_all_shuffle(ranks, monkeypatch):
    """Row t of slot s at rank r is number t * S * ranks + r * S + s of all."""
    ticks, slots, count = 4, 3, 5
    order = torch.randperm(ticks * slots * ranks, generator=torch.Generator().manual_seed(1))
    expected = [part.tolist() for part in order.tensor_split(count)]
    monkeypatch.setattr(distributed, "ranks", lambda: ranks)
    served = [[] for _ in range(count)]
    for rank in range(ranks):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        buffer = RolloutBuffer(ticks)
        for t in range(ticks):
            ids = t * slots * ranks + rank * slots + torch.arange(slots)
            buffer.add(TensorDict({"id": ids}, batch_size=[slots]))
        parts = list(buffer.minibatches(count, torch.Generator().manual_seed(1)))
        for part, found in zip(parts, served, strict=True):
            found.append(part["id"].tolist())
    for numbers, found in zip(expected, served, strict=True):
        for rank, own in enumerate(found):
            assert own == [n for n in numbers if n // slots % ranks == rank]
