"""Recorded worlds are read in time order; windows of the world model stay inside one agent."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from hamlet.learning.sequences import SequenceReader, per_agent
from hamlet.learning.train_world_model import windows

TICKS, WORLDS, AGENTS = 12, 6, 3


def record() -> TensorDict:
    tick, world, agent = torch.meshgrid(
        torch.arange(TICKS), torch.arange(WORLDS), torch.arange(AGENTS), indexing="ij"
    )
    return TensorDict(
        {
            "action": tick * 100 + world * 10 + agent,
            "first": (torch.arange(TICKS) == 0).unsqueeze(1).expand(TICKS, WORLDS),
        },
        batch_size=[TICKS, WORLDS],
    )


def test_a_lane_reads_a_world_in_order_and_begins_others_at_their_beginning():
    reader = SequenceReader(
        record(), torch.tensor([0, 2, 5]), 4, 3, torch.Generator().manual_seed(1)
    )
    last = None
    worlds = set()
    for _ in range(20):
        chunk = reader.read()
        assert chunk.shape == (3, 4 * AGENTS)
        tick, world = chunk["action"] // 100, chunk["action"] // 10 % 10
        assert (tick[1:] == tick[:-1] + 1).all()
        assert (world == world[0]).all()
        assert (chunk["first"] == (tick == 0)).all()
        if last is not None:
            goes_on = tick[0] == last[0] + 1
            assert (goes_on | (tick[0] == 0)).all()
            assert (world[0][goes_on] == last[1][goes_on]).all()
            assert (last[0][~goes_on] == TICKS - 1).all()  # a world is read to its end
        last = (tick[-1], world[-1])
        worlds |= set(world.flatten().tolist())
    assert worlds == {0, 2, 5}


def test_per_agent_keeps_an_agents_fields_together():
    flat = per_agent(record()[:2])
    assert flat.shape == (2, WORLDS * AGENTS)
    assert flat["action"][1, :4].tolist() == [100, 101, 102, 110]


def test_windows_follow_one_agent():
    rng = torch.Generator().manual_seed(0)
    data = TensorDict({"action": record()["action"]}, batch_size=[TICKS, WORLDS, AGENTS])
    window = windows(data, 4, 500, torch.tensor([1, 3]), rng)
    assert window.shape == (5, 500)
    tick, who = window["action"] // 100, window["action"] % 100
    assert (tick[1:] == tick[:-1] + 1).all()
    assert (who == who[0]).all()
    assert set((who // 10).unique().tolist()) == {1, 3}
    assert set(tick[0].unique().tolist()) == set(range(TICKS - 4))
