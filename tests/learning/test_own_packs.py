"""Towns of other shapes than ours: one agent, other meters, other names, another view."""

from __future__ import annotations

from typing import Any

import minds
import pytest
import torch
import yaml

from benchmarks import device_work
from hamlet.learning import train_world_model
from hamlet.modules.agent import AgentState, Thoughts
from hamlet.modules.contracts import TownShape, observation_from, observation_shapes, others_of
from hamlet.town import PackError, Scripted, Town, load_pack
from hamlet.town.load import PACKS
from hamlet.town.personalities import NAMES, parameters

HERMIT = device_work.ROOT / "examples" / "own_pack" / "pack.yaml"
NEW_NAMES = {
    "energy": "power", "health": "soundness", "money": "gold", "Bed": "Bunk", "Job": "Mine",
    "Labor": "Quarry", "Hospital": "Medic", "REST": "SIT",
}  # fmt: skip


def renamed(content: Any) -> Any:
    """Level 4 with names of its own in place of ours, wherever they stand."""
    if isinstance(content, dict):
        return {NEW_NAMES.get(key, key): renamed(value) for key, value in content.items()}
    if isinstance(content, list):
        return [renamed(value) for value in content]
    return NEW_NAMES.get(content, content) if isinstance(content, str) else content


def strangers() -> dict[str, Any]:
    """Three agents on a map that is not square, their meters in another order and renamed."""
    content = renamed(yaml.safe_load((PACKS / "l4_contention.yaml").read_text()))
    content |= {"name": "strangers", "agents": 3, "width": 9, "height": 6, "vision": 1}
    content |= {"lifespan": 40, "reward": {"meters": ["power", "soundness"]}, "cue_distance": 3}
    content["meters"].reverse()
    del content["experts"]
    return content


@pytest.fixture
def pack_file(request, tmp_path):
    if request.param == "hermit":
        return HERMIT
    (tmp_path / "strangers.yaml").write_text(yaml.safe_dump(strangers()))
    return tmp_path / "strangers.yaml"


BOTH = pytest.mark.parametrize("pack_file", ["hermit", "strangers"], indirect=True)


@pytest.mark.slow
@BOTH
def test_every_trainer_and_a_match_take_a_town_of_another_shape(pack_file, tmp_path, monkeypatch):
    params = device_work.PARAMS
    town = params.town.model_copy(update={"pack": str(pack_file), "layouts": 8})
    monkeypatch.setattr(device_work, "PARAMS", params.model_copy(update={"town": town}))
    monkeypatch.setattr(train_world_model, "REPORT_TICKS", (1, 5))
    monkeypatch.chdir(tmp_path)
    work = {name: do for name, do in device_work.WORK.items() if name != "prover"}
    monkeypatch.setattr(device_work, "WORK", work)
    given = device_work.recorded()
    told = dict(device_work.done_on(torch.device("cpu"), given))
    assert told.keys() == work.keys()
    alone = given.data["others_meters"].shape[3] == 0
    assert (told["social"]["rows"] == []) == alone
    assert (told["social"]["report"] == {}) == alone
    odd = [where for where, number in device_work.numbers(told) if not abs(number) < 1e6]
    assert odd == []
    assert torch.tensor(told["policy"]["returns"]).shape[1] == given.data["action"].shape[2]


@BOTH
def test_a_mind_thinks_in_a_town_of_another_shape(pack_file):
    town = Town(load_pack(pack_file), num_layouts=4)
    shape = TownShape.of(town)
    mind, blank = minds.new_mind(town, device_work.PARAMS.policy)
    world = town.reset(3, 2)
    obs = observation_from(town.observe(world), 2)
    for field, trailing in zip(obs, observation_shapes(shape).values(), strict=True):
        assert field.shape[1:] == trailing
    state = blank(2)
    for _ in range(3):
        action, *after = mind(*obs, *state)
        state = AgentState(*after[: len(state)])
        thoughts = Thoughts(*after[len(state) :])
        world = town.step_core(world, action.unflatten(0, (2, -1)))
        obs = observation_from(town.observe(world), 2)
    m, slots = shape.num_others, 2 * shape.num_agents
    assert thoughts.goal_dist_of_others.shape == (slots, m, shape.num_goals)
    assert thoughts.imagined_meters.shape[-1] == shape.num_meters == state.foreseen.shape[1]
    *_, f = mind.sense(obs, state)
    assert f.rivals.shape == (slots, shape.num_goals)
    assert f.ahead.shape == (slots, shape.num_affordances, 3)
    if not m:
        assert not f.rivals.any()
        assert not f.ahead.any()
    goals = torch.zeros(2, 5, shape.num_agents, 3)
    assert others_of(goals).shape == (2, 5, shape.num_agents, m, 3)


@BOTH
def test_an_emergency_is_of_the_meters_whose_end_is_ones_own(pack_file):
    pack = load_pack(pack_file)
    town = Town(pack, num_layouts=4)
    mind, _ = minds.new_mind(town, device_work.PARAMS.policy)
    policy: Any = mind.policy
    vital = {condition.meter for condition in pack.terminal}
    resting = torch.tensor([town.goal_names.index("rest")])
    for place, name in enumerate(pack.meter_names):
        known = torch.full((1, town.self_dim), 0.9)
        known[0, place] = 0.01
        assert policy.goal_ended(known, resting, torch.tensor([2])).item() == (name in vital)


def test_the_low_money_rule_is_silent_where_there_is_no_energy():
    town = Town(load_pack(HERMIT), num_layouts=4)
    mind, _ = minds.new_mind(town, device_work.PARAMS.policy)
    policy: Any = mind.policy
    assert not policy.low_money_bias(torch.zeros(3, town.self_dim)).any()
    ours = Town(load_pack("l4_contention"), num_layouts=4)
    policy = minds.new_mind(ours, device_work.PARAMS.policy)[0].policy
    assert policy.low_money_bias(torch.zeros(3, ours.self_dim)).any()


def test_what_is_paid_in_and_what_is_vital_come_from_the_rules(tmp_path):
    ours, hermit = load_pack("l7_scarce"), load_pack(HERMIT)
    assert [ours.meter_names[i] for i in ours.vital_meters] == ["energy", "health"]
    assert ours.meter_names[ours.paid_in] == "money"
    assert [hermit.meter_names[i] for i in hermit.vital_meters] == ["strength", "warmth"]
    assert hermit.meter_names[hermit.paid_in] == "coins"
    free = load_pack("l0_full_view")
    assert free.meter_names[free.paid_in] == "money"  # where nothing costs
    content = yaml.safe_load(HERMIT.read_text())
    for place in content["affordances"]:
        place.pop("price_per_tick", None)
    content["terminal"].append({"meter": "calm", "op": ">=", "value": 1.0})  # not by running out
    (tmp_path / "free.yaml").write_text(yaml.safe_dump(content))
    pack = load_pack(tmp_path / "free.yaml")
    assert (pack.paid_in, pack.vital_meters) == (4, (0, 1))


def test_everybody_we_have_plays_in_a_town_of_other_meters():
    """And those that we have no parameters for matter by what they are."""
    pack = load_pack(HERMIT)
    town = Town(pack, num_layouts=4)
    players = Scripted(town, list(NAMES), 5)
    state = town.reset(2, len(NAMES))
    memory = players.reset(state)
    for _ in range(40):
        actions, _, memory = players.act(state, memory)
        state = town.step_core(state, actions)
    expert, greedy = parameters(pack, "expert"), parameters(pack, "tycoon")
    assert expert["value.strength"] == expert["value.warmth"] > expert["value.coins"]
    assert expert["value.coins"] > expert["value.fullness"]
    assert greedy["value.coins"] > expert["value.coins"]


@pytest.mark.parametrize(("where", "name"), [("affordances", "rest"), ("meters", "age")])
def test_a_name_that_is_ours_is_refused(where, name, tmp_path):
    content = yaml.safe_load(HERMIT.read_text())
    content[where][-1]["name"] = name
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(PackError, match=f"{where}: '{name}' is already a name of ours"):
        load_pack(tmp_path / "mine.yaml")
