"""Properties of the town: fairness, bounds, secrecy, replays, parity with recorded runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recorder import record

from benchmarks.town_parity import main as parity
from benchmarks.town_parity import replay
from hamlet.learning.compiling import compiled
from hamlet.town import Scripted, Town, load_pack
from hamlet.town.personalities import NAMES

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "hamlet"
LEVELS = ("L1_full_observability", "L2_partial_observability", "L3_temporal_mechanics")
TOWN = Town(load_pack("l4_contention"), num_layouts=64)
ZOO = str(Path(__file__).parent / "zoo.yaml")
needs_traces = pytest.mark.skipif(not DATA.is_dir(), reason="no recorded runs in ../shared")


@needs_traces
@pytest.mark.parametrize("level", LEVELS)
def test_recorded_runs_are_replayed_exactly(level, capsys):
    assert parity([str(DATA / "packs" / level), str(DATA / "traces" / f"{level}.npz")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "max_abs_diff=0.0"


@needs_traces
def test_a_wrong_pack_does_not_replay(capsys):
    trace = DATA / "traces" / "L3_temporal_mechanics.npz"
    assert parity([str(DATA / "packs" / "L1_full_observability"), str(trace)]) == 1


@needs_traces
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("multiplier", "lifespan", "seed"), [(0.2, 25, 1), (1.0, 500, 2), (3.7, 60, 3)]
)
def test_runs_that_nobody_recorded_are_replayed_exactly(level, multiplier, lifespan, seed):
    """Other multipliers, lifespans and initial meters, recorded by the plain-Python rules."""
    folder = DATA / "packs" / level
    pack = load_pack(folder).model_copy(
        update={"depletion_multiplier": multiplier, "lifespan": lifespan, "agents": 1}
    )
    trace = record(pack, worlds=6, ticks=80, seed=seed)
    assert (trace["interacted"] >= 0).sum() > 20
    assert trace["dones"][-1].any()
    diffs = replay(folder, trace)
    assert set(diffs) > {"obs", "meters", "positions", "masks", "rewards", "dones"}
    assert max(diffs.values()) == 0.0, diffs


@pytest.mark.slow
@needs_traces
@pytest.mark.parametrize("level", LEVELS[-1:])  # which has every rule of the others
def test_compiled_runs_agree_with_the_recorded_ones(level):
    """Everything discrete exactly, floats within 1e-5 (the exit status of --compile)."""
    folder, trace = DATA / "packs" / level, DATA / "traces" / f"{level}.npz"
    assert parity([str(folder), str(trace), "--compile"]) == 0


def play(town, state, players, ticks):
    memory = players.reset(state)
    for _ in range(ticks):
        actions, _, memory = players.act(state, memory)
        state = town.step_and_reset_core(state, actions)
    return state


@settings(max_examples=5)
@given(seed=st.integers(0, 2**40), ticks=st.integers(1, 40))
def test_observations_hide_what_is_private(seed, ticks):
    """What an agent cannot see may change at will without changing its observation."""
    state = play(TOWN, TOWN.reset(seed, 8), Scripted(TOWN, seed=seed), ticks)
    seen = TOWN.observe(state)
    n = TOWN.num_agents
    for agent in range(n):
        others = [i for i in range(n) if i != agent]
        secret = state.clone()
        secret["meters"][:, others] = torch.rand_like(secret["meters"][:, others])
        secret["progress"][:, others] = 3
        secret["last_affordance"][:, others] = 2
        secret["reward"][:] = 0.5
        position = state["position"]
        far = (position - position[:, agent : agent + 1]).abs().amax(-1) > TOWN.pack.cue_distance
        secret["cue_bits"][far] = 1023
        secret["last_action"][far] = 3
        again = TOWN.observe(secret)
        for name in seen.keys():  # noqa: SIM118
            assert torch.equal(seen[name][:, agent], again[name][:, agent]), name


@settings(max_examples=5)
@given(seed=st.integers(0, 2**40))
def test_meters_stay_in_bounds_and_replays_are_equal(seed):
    players = Scripted(TOWN, seed=1)
    first = play(TOWN, TOWN.reset(seed, 6), players, 50)
    assert ((first["meters"] >= 0) & (first["meters"] <= 1)).all()
    again = play(TOWN, TOWN.reset(seed, 6), players, 50)
    assert (first == again).all()


@settings(max_examples=10)
@given(seed=st.integers(0, 2**40), place=st.integers(0, 13))
def test_nothing_is_owned_after_leaving(seed, place):
    """Whoever is alone at an open, affordable place gets it, whoever had it a tick before."""
    state = TOWN.reset(seed, 4)
    spot = TOWN.affordance_cells[state["layout"], place]
    there = torch.stack([spot % TOWN.width, spot // TOWN.width], -1)[:, None]
    hour = 10 if TOWN.pack.affordances[place].is_open(10) else 20
    state = TOWN.rearrange(
        state, position=there.expand(-1, TOWN.num_agents, -1), hour=torch.full((4,), hour)
    )
    state = TOWN.step_core(state, torch.full((4, TOWN.num_agents), 4))
    assert ((state["used"] == place).sum(1) == 1).all()
    assert (state["blocked"].sum(1) == TOWN.num_agents - 1).all()
    winner = (state["used"] == place).int().argmax(1)
    actions = torch.full((4, TOWN.num_agents), 5)
    newcomer = (winner + 1) % TOWN.num_agents
    actions[torch.arange(4), newcomer] = 4
    after = TOWN.step_core(state, actions)
    assert (after["used"][torch.arange(4), newcomer] == place).all()


def test_memory_per_agent_is_small():
    state = TOWN.reset(0, 256)
    size = sum(
        v.numel() * v.element_size() for v in (*state.values(), *TOWN.observe(state).values())
    )
    assert size / (256 * TOWN.num_agents) < 1024


@pytest.mark.slow
def test_contention_is_fair():
    """Over 2,000 lives of equal agents no slot's mean return stands out of its interval."""
    from hamlet.town.lives import play as lives

    returns = lives(TOWN, Scripted(TOWN, ["expert_ignoring"]), 11, 512)["returns"][:, 0]
    mean, error = returns.mean(0), returns.std(0) / len(returns) ** 0.5
    for i in range(TOWN.num_agents):
        for j in range(i):
            gap = (mean[i] - mean[j]).abs()
            # Bonferroni over six pairs at 95 %
            assert gap < 2.64 * (error[i] ** 2 + error[j] ** 2).sqrt(), (i, j, mean)


@pytest.mark.slow
def test_compiled_and_eager_worlds_agree():
    """Every rule: everything discrete exactly, floats to rounding; also with actions in the other
    memory order, for which a step is compiled once more."""
    town = Town(load_pack(ZOO), num_layouts=64)

    def step(state, actions):
        state = town.step_and_reset_core(state, actions)
        return state, town.observe(state)

    torch._dynamo.reset()
    fast = compiled(step, fixed=True)
    players = Scripted(town, seed=5)
    state = town.reset(3, 16)
    memory = players.reset(state)
    for tick in range(town.lifespan + 20):
        actions, _, memory = players.act(state, memory)
        eager = step(state, actions)
        other_order = tick % 10 == 0
        actions = actions.t().contiguous().t() if other_order else actions.contiguous()
        state, seen = fast(state, actions)
        for ours, theirs in zip(eager, (state, seen), strict=True):
            for name, value in ours.items():
                if value.is_floating_point():
                    torch.testing.assert_close(value, theirs[name], atol=1e-6, rtol=0)
                else:
                    assert torch.equal(value, theirs[name]), (tick, name)
    assert (state["episode"] > 0).all()


@pytest.mark.parametrize("pack", ["l5_changing", "l7_scarce", pytest.param(ZOO, id="zoo")])
def test_what_is_compiled_reads_the_same_numbers(pack, monkeypatch):
    """The branches that only compiled code takes, run without compiling."""
    town = Town(load_pack(pack), num_layouts=8)
    players = Scripted(town, NAMES, 5)
    state = town.reset(11, 16)
    tick = torch.arange(16) * (town.lifespan - 4) // 15
    state = town.rearrange(state, tick=tick, hour=(town.pack.start_hour + tick) % 24)
    memory = players.reset(state)
    for _ in range(10):
        action, _, memory = players.act(state, memory)
        plain = town.step_core(state, action)
        with monkeypatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
            state = town.step_core(state, action)
        assert (state == plain).all()
