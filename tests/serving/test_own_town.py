"""The agent of a town where it is alone: what is seen of others has no numbers, however sent."""

from __future__ import annotations

import numpy as np
import pytest
from copied_repo import ROOT
from exported import export, untrained
from served import Served

from hamlet.artifacts import HamletError
from hamlet.modules.contracts import RawObservation, TownShape
from hamlet.serving.agent import OnnxAgent
from hamlet.serving.client import Agent
from hamlet.town import Town, load_pack

HERMIT = ROOT / "examples" / "own_pack" / "pack.yaml"
SEED, TICKS = 5, 12
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def town():
    return Town(load_pack(HERMIT), num_layouts=8)


@pytest.fixture(scope="module")
def hermit(town, tmp_path_factory):
    path = tmp_path_factory.mktemp("hermit") / "agent.onnx"
    export(*untrained(town), TownShape.of(town), path, str(HERMIT))
    return path


@pytest.fixture(scope="module")
def life(town, hermit):
    """What it sees in the life that it lives by raw ONNX Runtime, and what it does."""
    agent, world = OnnxAgent(hermit), town.reset(3, 1)
    state, life = agent.start(1), []
    state["state_rng"][:] = SEED
    for _ in range(TICKS):
        obs = town.observe(world)
        seen = {name: obs[name].flatten(0, 1).numpy() for name in RawObservation._fields}
        decision = agent.act(seen, state)
        life.append(({name: x[0] for name, x in seen.items()}, int(decision.action[0])))
        state = decision.state
        action = np.asarray(decision.action)
        world = town.step_core(world, world["tick"].new_tensor(action)[:, None].long())
    assert len({action for _, action in life}) > 1
    return life


def test_it_acts_the_same_by_arrays_and_by_lists_here_and_served(hermit, life):
    with Served(hermit) as server:
        for where in (hermit, f"http://127.0.0.1:{server.port}"):
            for told in (lambda x: x, lambda x: x.tolist()):
                with Agent(where, seed=SEED) as agent:
                    for seen, action in life:
                        assert agent.act({name: told(x) for name, x in seen.items()}) == action
        for number, (seen, action) in enumerate(life):
            first = {"sequence_start": True, "seed": SEED} if number == 0 else {}
            assert server.tick(seen, "raw", **first).action == action


def test_lists_of_nothing_are_checked_as_far_as_they_go(hermit, life):
    agent, (seen, _) = OnnxAgent(hermit), life[0]
    batch = {name: [x.tolist()] for name, x in seen.items()}
    assert agent.check(batch)["cues"].shape == (1, 0, 0)
    with pytest.raises(HamletError, match="different batch sizes"):
        agent.check(batch | {"others_offset": []})
    with pytest.raises(HamletError, match="observation field 'view' has shape"):
        agent.check(batch | {"view": [[]]})
