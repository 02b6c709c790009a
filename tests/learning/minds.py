"""Untrained modules, for tests of what is done with them."""

import torch

from hamlet.learning.learner import first_state
from hamlet.learning.train_policy import goal_targets
from hamlet.modules.agent import Mind
from hamlet.modules.contracts import TownShape
from hamlet.modules.perception import Perception
from hamlet.modules.policy import Policy
from hamlet.modules.social import Social
from hamlet.modules.world_model import WorldModel
from hamlet.town.tables import menu, timetable


def new_mind(town, sizes):
    """Untrained modules together, and their blank minds."""
    shape = TownShape.of(town)
    torch.manual_seed(0)
    perception, world_model = Perception(shape, 16, 4), WorldModel(shape, 4, 24, 2)
    told = goal_targets(town), timetable(town.pack), menu(town.pack)
    policy = Policy(shape, perception.belief_dim, 24, *told, sizes.meta_period, 0.2)
    social = Social(shape, 8)
    for module in (perception, world_model, social):
        module.requires_grad_(False)
    mind = Mind(perception, world_model, social, policy, sizes.candidates, sizes.horizon)
    recurrent = perception.recurrent_dim, shape.num_others, social.recurrent_dim
    dims = *recurrent, shape.num_meters
    return mind, lambda worlds, agents=shape.num_agents: first_state(worlds, agents, *dims)
