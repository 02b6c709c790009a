"""The tensor town against the plain-Python one, tick by tick, on lives driven by random actions."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Agent, show_cues, tick_world

from hamlet.town import Scripted, Town, load_pack

ZOO = Path(__file__).parent / "zoo.yaml"
PACKS = {
    "l4": {},
    "zoo": {},
    "zoo-first": {},  # its first place sends people away too
    "zoo-hamlet": {"mode": "hamlet"},
    "zoo-instant": {"temporal": False},
    "zoo-hamlet-instant": {"mode": "hamlet", "temporal": False, "depletion_multiplier": 0.2},
}


def make_town(name: str) -> Town:
    pack = load_pack("l4_contention" if name == "l4" else ZOO)
    changes = dict(PACKS[name])
    if changes.get("mode") == "hamlet" or not changes.get("temporal", True):
        # refunds belong to uses that take several ticks, in atomic mode
        places = tuple(a.model_copy(update={"refund": 0.0}) for a in pack.affordances)
        changes["affordances"] = places
    if name == "zoo-first":
        first, *others = pack.affordances
        sends = next(place.on_completion for place in others if place.on_completion)
        changes["affordances"] = (first.model_copy(update={"on_completion": sends}), *others)
    return Town(pack.model_copy(update=changes), num_layouts=32)


TOWNS = {name: make_town(name) for name in PACKS}


def read_agents(town: Town, state, world: int) -> list[Agent]:
    names = (*town.affordance_names, None)
    return [
        Agent(
            meters={m: np.float32(state["meters"][world, i, k].item())
                    for k, m in enumerate(town.meter_names)},
            x=int(state["position"][world, i, 0]),
            y=int(state["position"][world, i, 1]),
            alive=bool(state["alive"][world, i]),
            progress=int(state["progress"][world, i]),
            last=names[int(state["last_affordance"][world, i])],
            comm=int(state["comm"][world, i]) if town.pack.families else 0,
        )
        for i in range(town.num_agents)
    ]  # fmt: skip


def read_clock(state, world: int) -> dict[str, int]:
    return {n: int(state[n][world]) for n in ("seed", "world", "episode", "tick", "hour")}


def choose(town: Town, state, rng: random.Random, scripted: torch.Tensor) -> torch.Tensor:
    """Half scripted (so that agents meet), some legal, some anything at all."""
    shape = (state.batch_size[0], town.num_agents)
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    anything = torch.randint(town.num_actions, shape, generator=generator)
    interact = torch.full(shape, 4)
    pick = torch.rand(shape, generator=generator)
    return torch.where(pick < 0.5, scripted, torch.where(pick < 0.75, interact, anything))


@pytest.mark.parametrize("name", PACKS)
@settings(max_examples=4)
@given(seed=st.integers(0, 2**40), crowd=st.booleans())
def test_every_tick_agrees_with_the_oracle(name, seed, crowd):
    town, rng = TOWNS[name], random.Random(seed)
    pack = town.pack
    worlds = 2
    state = town.reset(seed, worlds)
    if crowd:  # start everyone on one affordance, so that they must compete
        spot = town.affordance_cells[state["layout"], rng.randrange(town.num_affordances)]
        both = torch.stack([spot % town.width, spot // town.width], -1)[:, None]
        hungry = torch.rand(state["meters"].shape) * 0.8 + 0.1
        state = town.rearrange(state, position=both.expand(-1, town.num_agents, -1), meters=hungry)
    players = Scripted(town, seed=seed)
    memory = players.reset(state)
    codes = {n: i for i, n in enumerate(town.affordance_names)} | {None: -1}
    counters = [[(a.streak, a.hold) for a in read_agents(town, state, w)] for w in range(worlds)]
    for w in range(worlds):  # the counters after the cues of tick 0
        agents = read_agents(town, state, w)
        cells = read_cells(town, state, w)
        show_cues(pack, cells, agents, [5] * len(agents), read_clock(state, w))
        counters[w] = [(a.streak, a.hold) for a in agents]
        if not crowd:
            compare_cues(town, state, w, agents)
    if crowd:
        counters = None  # rearranged states have younger counters than the oracle's
    for _ in range(60):
        scripted, _, memory = players.act(state, memory)
        actions = choose(town, state, rng, scripted)
        before, state = state, town.step_core(state, actions)
        for w in range(worlds):
            if before["over"][w]:
                continue
            agents, clock = read_agents(town, before, w), read_clock(before, w)
            cells = read_cells(town, before, w)
            order = rng.sample(range(town.num_agents), town.num_agents)
            moves = actions[w].tolist()
            tick_world(pack, cells, agents, moves, clock, order)
            for i, agent in enumerate(agents):
                place = (w, i)
                found = state["meters"][place]
                wanted = torch.tensor([float(agent.meters[m]) for m in town.meter_names])
                if pack.mode == "hamlet":
                    assert torch.equal(found, wanted), (name, place)
                else:
                    torch.testing.assert_close(found, wanted, atol=2e-7, rtol=0)
                assert state["position"][place].tolist() == [agent.x, agent.y]
                assert bool(state["blocked"][place]) == agent.blocked
                assert int(state["used"][place]) == codes[agent.used]
                assert int(state["progress"][place]) == agent.progress
                assert int(state["last_affordance"][place]) == codes[agent.last]
                assert bool(state["alive"][place]) == agent.alive
                assert bool(state["died"][place]) == agent.died
                assert bool(state["retired"][place]) == agent.retired
                assert abs(float(state["reward"][place]) - float(agent.reward)) < 1e-6
                if pack.families:
                    assert int(state["comm"][place]) == agent.comm
            if counters is not None:
                clock["tick"] += 1
                last = state["last_action"][w].tolist()
                for agent, (streak, hold) in zip(agents, counters[w], strict=True):
                    agent.streak, agent.hold = streak, hold
                show_cues(pack, cells, agents, last, clock)
                compare_cues(town, state, w, agents)


def read_cells(town: Town, state, world: int) -> dict[str, tuple[int, int]]:
    cells = town.affordance_cells[int(state["layout"][world])].tolist()
    return {
        n: (c % town.width, c // town.width)
        for n, c in zip(town.affordance_names, cells, strict=True)
    }


def compare_cues(town: Town, state, world: int, agents: list[Agent]) -> None:
    for i, agent in enumerate(agents):
        bits = int(state["cue_bits"][world, i])
        shown = {name for c, name in enumerate(town.cue_names) if bits >> c & 1}
        assert shown == agent.cues, (world, i)
