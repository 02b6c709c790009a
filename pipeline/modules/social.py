"""Module C: what do the others want, and what will they do next?

One GRU reads each other agent's public cues and actions. It is trained with the true goals
(privileged, as labels only); it acts on public information and on the agent's own belief.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.modules.contracts import SocialPrediction, TownShape

OFFSET_UNIT = 4.0  # others_offset is in units of 4 cells
AGE_UNIT = 32.0  # the state's last number counts ticks since an agent was visible, in this unit
UNSEEN_AFTER = 16.0  # ticks out of sight after which the reason is `unseen`
CONFLICT_ENTROPY = 0.6  # share of the maximal entropy at which visible cues conflict


class Social(nn.Module):
    """One tick of reading the other agents.

    Args:
        shape: sizes of the town.
        hidden: width of the GRU, per other agent. The state has one more number: ticks since the
            agent was last visible, / 32.
    """

    def __init__(self, shape: TownShape, hidden: int) -> None:
        super().__init__()
        self.shape, self.hidden = shape, hidden
        self.places = 2 * shape.num_affordances
        inputs = self.places * 2 + shape.num_cues + 1 + 2 + shape.num_actions + 1 + 3
        self.encoder = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU())
        self.gru = nn.GRUCell(hidden, hidden)
        self.goal = nn.Linear(2 * hidden, shape.num_goals)
        self.next_action = nn.Linear(2 * hidden, shape.num_actions)

    @property
    def recurrent_dim(self) -> int:
        return self.hidden + 1

    def logits(
        self,
        mean: Tensor,
        log_std: Tensor,
        known_state: Tensor,
        cues: Tensor,
        visible: Tensor,
        others_offset: Tensor,
        others_action: Tensor,
        recurrent_state: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """goal logits [., M, G], next action logits [., M, A], state [., M, hidden + 1]."""
        m = self.shape.num_others
        seen = visible.unsqueeze(-1).to(mean.dtype)
        size = mean.new_tensor([self.shape.width, self.shape.height])
        mine = mean[:, : self.places].unflatten(-1, (-1, 2)).unsqueeze(1)
        theirs = (mine - (others_offset * OFFSET_UNIT / size).unsqueeze(2)).flatten(2)
        spread = log_std[:, None, : self.places].expand(-1, m, -1)
        action = F.one_hot(others_action, self.shape.num_actions + 1).to(mean.dtype)
        clock = known_state[:, None, 10:13].expand(-1, m, -1)
        encoded = self.encoder(
            torch.cat([theirs * seen, spread, cues, seen, others_offset, action, clock], -1)
        )
        hidden, age = recurrent_state.split([self.hidden, 1], -1)
        hidden = self.gru(encoded.flatten(0, 1), hidden.flatten(0, 1)).unflatten(0, (-1, m))
        age = torch.where(visible.unsqueeze(-1), torch.zeros_like(age), age + 1 / AGE_UNIT)
        both = torch.cat([hidden, encoded], -1)
        return self.goal(both), self.next_action(both), torch.cat([hidden, age], -1)

    def forward(
        self,
        mean: Tensor,
        log_std: Tensor,
        known_state: Tensor,
        cues: Tensor,
        visible: Tensor,
        others_offset: Tensor,
        others_action: Tensor,
        recurrent_state: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """`SocialPrediction` fields, then the new state [., M, hidden + 1]."""
        goal, action, state = self.logits(
            mean,
            log_std,
            known_state,
            cues,
            visible,
            others_offset,
            others_action,
            recurrent_state,
        )
        goal_dist = goal.softmax(-1)
        entropy = -(goal_dist * goal_dist.clamp_min(1e-9).log()).sum(-1)
        conflicting = visible & (entropy > CONFLICT_ENTROPY * math.log(goal.shape[-1]))
        unseen = state[..., -1] >= UNSEEN_AFTER / AGE_UNIT
        reason = torch.where(unseen, 1, torch.where(conflicting, 2, 0))
        prediction = SocialPrediction(
            goal_dist, action.softmax(-1), goal_dist.amax(-1), reason.long()
        )
        return (*prediction, state)
