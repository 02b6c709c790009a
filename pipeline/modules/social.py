"""Module C: what do the others want, and what will they do next?

One GRU reads each other agent's public cues and actions. A goal that is a place is scored by what
the GRU knows of the agent and by where the place lies for it: how far, how surely, whether it is
there and whether it has been walking towards it. What one place teaches holds for the others. It is
trained with the true goals (privileged, as labels only); it acts on public information and on the
agent's own belief.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hamlet.modules.contracts import LEADS, OFFSET_UNIT, STEPS, SocialPrediction, TownShape

AGE_UNIT = 32.0  # the state's last number counts ticks since an agent was visible, in this unit
HEADING_KEPT = 0.8  # per tick, of the steps towards a place
PLACE_WIDTH = 16
UNSEEN_AFTER = 16.0  # ticks out of sight after which the reason is `unseen`, and all is forgotten
CONFLICT_ENTROPY = 0.6  # share of the maximal entropy at which visible cues conflict


class Social(nn.Module):
    """One tick of reading the other agents.

    Args:
        shape: sizes of the town.
        hidden: width of the GRU, per other agent. The state has more numbers: for each place the
            steps made towards it less those made away, fading; then the ticks since the agent was
            last visible, / 32.
    """

    steps: Tensor

    def __init__(self, shape: TownShape, hidden: int) -> None:
        super().__init__()
        self.shape, self.hidden = shape, hidden
        self.places = 2 * shape.num_affordances
        inputs = self.places * 2 + shape.num_cues + 1 + 2 + shape.num_actions + 1 + 3
        self.encoder = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU())
        self.gru = nn.GRUCell(hidden, hidden)
        f = shape.num_affordances
        self.needs = nn.Linear(2 * hidden, f * PLACE_WIDTH)
        self.offers = nn.Linear(7, PLACE_WIDTH, bias=False)
        self.score = nn.Sequential(
            nn.SiLU(), nn.Linear(PLACE_WIDTH, PLACE_WIDTH), nn.SiLU(), nn.Linear(PLACE_WIDTH, 1)
        )
        self.elsewhere = nn.Linear(2 * hidden, shape.num_goals - f)
        steps = [STEPS.get(name, (0.0, 0.0)) for name in (*shape.action_names, "unknown")]
        self.register_buffer("steps", torch.tensor(steps), persistent=False)
        self.next_action = nn.Linear(2 * hidden, shape.num_actions)

    @property
    def recurrent_dim(self) -> int:
        return self.hidden + self.shape.num_affordances + 1

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
        """goal logits [., M, G], next action logits [., M, A], state [., M, recurrent_dim]."""
        m, f = self.shape.num_others, self.shape.num_affordances
        seen = visible.unsqueeze(-1).to(mean.dtype)
        size = mean.new_tensor([self.shape.width, self.shape.height])
        mine = mean[:, : self.places].unflatten(-1, (-1, 2)).unsqueeze(1)
        apart = mine - (others_offset * OFFSET_UNIT / size).unsqueeze(2)
        theirs = apart.flatten(2)
        spread = log_std[:, None, : self.places].expand(-1, m, -1)
        action = F.one_hot(others_action, self.shape.num_actions + 1).to(mean.dtype)
        clock = known_state[:, None, 10:13].expand(-1, m, -1)
        encoded = self.encoder(
            torch.cat([theirs * seen, spread, cues, seen, others_offset, action, clock], -1)
        )
        hidden, heading, age = recurrent_state.split([self.hidden, f, 1], -1)
        # Left to itself for long, a GRU may pass a point from which roundings grow, and it knows
        # nothing any more: who is out of sight for so long is read anew.
        hidden = hidden * (age < UNSEEN_AFTER / AGE_UNIT)
        hidden = self.gru(encoded.flatten(0, 1), hidden.flatten(0, 1)).unflatten(0, (-1, m))
        age = torch.where(visible.unsqueeze(-1), torch.zeros_like(age), age + 1 / AGE_UNIT)

        x, y = (apart * size).unbind(-1)
        step_x, step_y = F.embedding(others_action, self.steps).split(1, -1)
        distance = x.abs() + y.abs()
        before = (x + step_x).abs() + (y + step_y).abs()
        heading = HEADING_KEPT * heading + seen * (before - distance)
        there = seen * (-4 * (x.square() + y.square())).exp()
        far = seen * distance / (self.shape.width + self.shape.height)
        offset_x, offset_y = (seen * along.clamp(-8, 8) / 4 for along in (x, y))
        spread_x, spread_y = spread.unflatten(-1, (-1, 2)).unbind(-1)
        # Compiled code is as wide as its innermost dimension: that of the places, not of the facts.
        facts = torch.stack([offset_x, offset_y, spread_x, spread_y, far, there, heading])
        offers = self.offers(facts.flatten(1).t()).unflatten(0, heading.shape)
        # Read from the state, the hidden one is not worked out again by all who use it.
        state = torch.cat([hidden, heading, age], -1)
        both = torch.cat([state[..., : self.hidden], encoded], -1)
        heads = self.needs, self.elsewhere, self.next_action
        weight, bias = torch.cat([h.weight for h in heads]), torch.cat([h.bias for h in heads])
        said = F.linear(both, weight, bias).split([h.out_features for h in heads], -1)
        needs = said[0].unflatten(-1, (f, PLACE_WIDTH))
        score = self.score(needs + offers).squeeze(-1)
        return torch.cat([score, said[1]], -1), said[2], state

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
    ) -> tuple[Tensor, ...]:
        """`SocialPrediction` fields, then the new state [., M, recurrent_dim]."""
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
            goal_dist,
            action.softmax(-1),
            goal_dist.amax(-1),
            reason.long(),
            self.ahead(goal_dist, mean, known_state, cues, visible, others_offset),
        )
        return (*prediction, state)

    def ahead(
        self,
        goal_dist: Tensor,
        mean: Tensor,
        known_state: Tensor,
        cues: Tensor,
        visible: Tensor,
        others_offset: Tensor,
    ) -> Tensor:
        """`ahead` of `SocialPrediction`: who arrives together is half ahead, who is seen using the
        place a whole, and nobody where the agent itself is using it."""
        size = mean.new_tensor([self.shape.width, self.shape.height])
        cells = mean[:, : self.places].unflatten(-1, (-1, 2)) * size
        theirs = cells.unsqueeze(1) - (others_offset * OFFSET_UNIT).unsqueeze(2)
        shows = cues[..., list(self.shape.telling_cues)].sum(-1, keepdim=True) > 0.5
        uses = shows & (theirs.abs().sum(-1) < 0.5)
        progress = known_state[:, self.shape.self_names.index("progress"), None]
        mine = (progress > 0.05) & (cells.abs().sum(-1) < 0.5)
        sooner = cells.abs().sum(-1).unsqueeze(1) - theirs.abs().sum(-1)
        sooner = sooner + uses.to(mean.dtype) - mine.unsqueeze(1).to(mean.dtype)
        wants = goal_dist[..., : self.shape.num_affordances] * visible.unsqueeze(-1)
        first = [(wants * (sooner - lead + 0.5).clamp(0.0, 1.0)).sum(1) for lead in LEADS]
        return torch.stack(first, -1)
