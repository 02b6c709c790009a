"""The town in a mirror: ways, positions and steps go together, in every mirror."""

from pathlib import Path

import pytest
import torch
from minds import new_mind
from tensordict import TensorDict

from pipeline.learning.learner import Learner, Memory
from pipeline.learning.mirrored import MIRRORS, mirrored, mirrored_actions
from pipeline.learning.train_policy import features_of
from pipeline.modules.contracts import TownShape
from pipeline.modules.critic import Critic
from pipeline.params import load_params
from pipeline.town import Scripted, Town, load_pack
from pipeline.town.town import WAIT

TINY = Path(__file__).parents[2] / "tiny.yaml"


@pytest.fixture(scope="module")
def lives():
    """A town's shape, the policy, and 60 ticks of experts' experience of twelve worlds.

    An untrained perception does not know the way: it is put into the beliefs.
    """
    town, sizes = Town(load_pack("l4_contention"), num_layouts=8), load_params(TINY).policy
    shape = TownShape.of(town)
    mind, blank = new_mind(town, sizes)
    expert = Scripted(town, ["expert_sightings"], 0)
    learner = Learner(town, shape, mind, Critic(shape, 8), expert)
    world, driven, rows = town.reset(3, 12), torch.ones(12, dtype=torch.bool), []
    memory = Memory(blank(12), expert.reset(world))
    size = torch.tensor([shape.width, shape.height])
    with torch.no_grad():
        for _ in range(60):
            action, memory, record = learner.act(world, town.observe(world), memory, None, driven)
            cells = town.affordance_cells[world["layout"]].unsqueeze(1)
            places = torch.stack([cells % shape.width, cells // shape.width], -1)
            ways = (places - world["position"].unsqueeze(2)) / size
            record["f_mean"][:, : 2 * shape.num_affordances] = ways.flatten(2).flatten(0, 1)
            rows.append(TensorDict(record, batch_size=[48]))
            world = town.step_core(world, action)
    return shape, mind.policy, torch.stack(rows)


def under_way(data, shape):
    """Rows in which the expert walks to a place: the way to it in cells [., 2], its step [.]."""
    places, size = shape.num_affordances, torch.tensor([shape.width, shape.height])
    goal = data["expert_goal"]
    ways = data["f_mean"][..., : 2 * places].unflatten(-1, (-1, 2)) * size
    index = goal.clamp_max(places - 1)[..., None, None].expand(*goal.shape, 1, 2)
    way = ways.gather(-2, index).squeeze(-2).round().long()
    steps = [shape.action_names.index(name) for name in ("UP", "DOWN", "LEFT", "RIGHT")]
    walks = (goal < places) & torch.isin(data["expert_action"], torch.tensor(steps))
    return way[walks], data["expert_action"][walks], walks


def test_experts_walk_towards_their_goals_in_the_town_and_in_its_mirrors(lives):
    shape, _, data = lives
    other = data.clone().update(mirrored(data, shape, torch.Generator().manual_seed(0)))
    way, step, walks = under_way(data, shape)
    mirrored_way, mirrored_step, _ = under_way(other, shape)
    assert len(way) > 500
    assert torch.equal(step, Scripted._step_towards(way[:, 0], way[:, 1]))
    assert torch.equal(mirrored_step, Scripted._step_towards(*mirrored_way.T))
    same = (way == mirrored_way).all(-1).float().mean()
    assert 0.15 < same < 0.5  # each of four mirrors is as likely; a straight way has two the same
    # Who and where to stay where they were: on the map, a place and the goal.
    size = torch.tensor([shape.width - 1.0, shape.height - 1.0])
    here = [shape.self_names.index(name) for name in "xy"]
    target = (other["f_known_state"][walks][:, here] * size + mirrored_way).round()
    assert bool(((target >= 0) & (target <= size)).all())
    unchanged = data.keys() - {"f_mean", "f_known_state", "f_moved", "expert_action"}
    assert all(torch.equal(data[name], other[name]) for name in unchanged)


def test_nothing_of_a_goals_worth_depends_on_the_side_it_is_on(lives):
    """Places' facts in a mirror differ in the way to them only; the last move led nearer still."""
    shape, policy, data = lives
    other = data.clone().update(mirrored(data, shape, torch.Generator().manual_seed(1)))
    with torch.no_grad():
        facts, mirrored_facts = (policy.place_facts(features_of(x)) for x in (data, other))
    torch.testing.assert_close(facts[..., 2:], mirrored_facts[..., 2:])
    torch.testing.assert_close(facts[..., :2].abs(), mirrored_facts[..., :2].abs())
    assert not torch.allclose(facts, mirrored_facts)


def test_an_actions_mirror_image_is_another_step_and_its_own_mirror_image(lives):
    shape, _, _ = lives
    table = mirrored_actions(shape)
    names = [[shape.action_names[a] for a in row] for row in table.tolist()]
    assert names[0] == list(shape.action_names)
    left, up = shape.action_names.index("LEFT"), shape.action_names.index("UP")
    assert [row[left] for row in names] == ["LEFT", "RIGHT", "LEFT", "RIGHT"]
    assert [row[up] for row in names] == ["UP", "UP", "DOWN", "DOWN"]
    assert (table[:, WAIT] == WAIT).all()
    assert torch.equal(table.gather(1, table), torch.arange(shape.num_actions).repeat(4, 1))
    assert len(MIRRORS) == 4


def test_where_goals_are_actions_they_are_mirrored_as_actions(lives):
    shape, _, data = lives
    acting = data.clone()
    acting["expert_goal"] = data["expert_action"]
    rng = torch.Generator().manual_seed(2)
    changed = mirrored(acting, shape, rng, goals_are_actions=True)
    assert torch.equal(changed["expert_goal"], changed["expert_action"])
    assert not torch.equal(changed["expert_goal"], acting["expert_goal"])
    first = data["f_pursued"] == shape.num_goals
    assert bool((changed["f_pursued"][first] == shape.num_goals).all())
