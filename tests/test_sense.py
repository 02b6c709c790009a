"""A and C as one ONNX graph: what D learns from is what think() sees."""

from pathlib import Path

import pytest
import torch

from hamlet.artifacts import HamletError
from hamlet.export.sense import load_sense, write_sense
from hamlet.modules.contracts import TownShape, observation_from
from hamlet.params import load_params
from hamlet.town import Town, load_pack
from tests.learning.minds import new_mind

pytestmark = pytest.mark.slow  # exporting takes a quarter of a minute

TOWN = Town(load_pack("l4_contention"), num_layouts=8)
SHAPE = TownShape.of(TOWN)
SIZES = load_params(Path(__file__).parents[1] / "params.yaml", "tiny").policy
MADE_OF = {"perception": "a" * 64, "social": "c" * 64}
WORLDS, TICKS = 3, 12


@pytest.fixture(scope="module")
def minds(tmp_path_factory):
    """One that asks its modules, and the same one with the graph; blank states; the file."""
    mind, blank = new_mind(TOWN, SIZES)
    torch.nn.init.normal_(mind.perceive.location_table.weight, std=0.1)
    path = tmp_path_factory.mktemp("sense") / "sense.onnx"
    recurrent = mind.perceive.recurrent_dim, mind.read_others.recurrent_dim
    write_sense(mind.perceive, mind.read_others, SHAPE, recurrent, path, MADE_OF)
    fused = new_mind(TOWN, SIZES)[0]
    fused.fused_sense = load_sense(path, SHAPE.pack_hash, MADE_OF)
    return mind, fused, blank, path


@torch.no_grad()
def test_it_says_what_the_modules_say_over_a_life(minds):
    mind, fused, blank, _ = minds
    world, state, other = TOWN.reset(3, WORLDS), blank(WORLDS), blank(WORLDS)
    rng = torch.Generator().manual_seed(0)
    seen = 0
    for tick in range(TICKS):
        obs = observation_from(TOWN.observe(world), 2)
        state, other = (
            s._replace(goal_age=s.clock + tick, moved=s.clock + 2) for s in (state, other)
        )
        f, log_std, belief, social = mind.sense_features(obs, state)
        g, *rest = fused.sense_features(obs, other)
        for name, one, two in zip(f._fields, f, g, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5, msg=name)
        for one, two in zip((log_std, belief, social), rest, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
        state = state._replace(belief=belief, social=social)
        other = other._replace(belief=rest[1], social=rest[2])
        seen += int(obs.visible.sum())
        world = TOWN.step_core(world, torch.randint(4, (WORLDS, SHAPE.num_agents), generator=rng))
    assert seen > 0
    assert f.rivals.std() > 0
    assert f.ahead.amax() > 0


def test_a_graph_of_another_module_is_refused(minds):
    with pytest.raises(HamletError, match="social"):
        load_sense(minds[3], SHAPE.pack_hash, MADE_OF | {"social": "b" * 64})
