"""Module C: what do the others want, and what will they do next?

One GRU reads each other agent's public cues and actions. A goal that is a place is scored by what
the GRU knows of the agent and by where the place lies for it: how far, how surely, whether it is
there and whether it has been walking towards it. The score is linear in these facts, with weights
that the GRU chooses for each agent; what one place teaches holds for the others. It is trained with
the true goals (privileged, as labels only); it acts on public information and on the agent's own
belief.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hamlet.modules.contracts import LEADS, OFFSET_UNIT, STEPS, SocialPrediction, TownShape
from hamlet.moving import columns

AGE_UNIT = 32.0  # the state's last number counts ticks since an agent was visible, in this unit
HEADING_KEPT = 0.8  # per tick, of the steps towards a place
UNSEEN_AFTER = 16.0  # ticks out of sight after which the reason is `unseen`, and all is forgotten
CONFLICT_ENTROPY = 0.6  # share of the maximal entropy at which visible cues conflict
FACTS = 7  # of a place for an agent: offset (2), doubt (2), distance, being there, heading for it
CLOCK = ("sin_hour", "cos_hour", "age")  # of the agent's own state: the same for all in a world
REACH, FAR = 8.0, 32.0  # cells after which an offset says no more; unit of distances


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
        f, goals, actions = shape.num_affordances, shape.num_goals, shape.num_actions
        self.places = 2 * f
        # The encoder's first layer, cut by what it reads: of a pair of agents, of the agent itself
        # (once for all the others), of the other's last action (a row of a table).
        self.pair = nn.Linear(self.places + shape.num_cues + 3, hidden, bias=False)
        self.own = nn.Linear(self.places + len(CLOCK), hidden)
        self.action = nn.Embedding(actions + 1, hidden)
        self.gru = nn.GRUCell(hidden, hidden)
        self.sizes = [f, FACTS, goals - f, actions]
        self.heads = nn.Linear(2 * hidden, sum(self.sizes))
        steps = [STEPS.get(name, (0.0, 0.0)) for name in (*shape.action_names, "unknown")]
        self.register_buffer("steps", torch.tensor(steps), persistent=False)
        self.clock = [shape.self_names.index(name) for name in CLOCK]

    @property
    def recurrent_dim(self) -> int:
        return self.hidden + self.shape.num_affordances + 1

    def offsets(self, mean: Tensor, others_offset: Tensor) -> tuple[Tensor, Tensor]:
        """float32 [., M, F] x and y, in cells, of every place as seen from every other agent."""
        x, y = mean[:, 0 : self.places : 2], mean[:, 1 : self.places : 2]
        theirs_x, theirs_y = (others_offset * OFFSET_UNIT).split(1, -1)
        width, height = float(self.shape.width), float(self.shape.height)
        return (x * width).unsqueeze(1) - theirs_x, (y * height).unsqueeze(1) - theirs_y

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
        if not m:
            sizes = self.shape.num_goals, self.shape.num_actions
            goal, action = (mean.new_zeros(mean.shape[0], 0, size) for size in sizes)
            return goal, action, recurrent_state.clone()
        seen = visible.unsqueeze(-1).to(mean.dtype)
        x, y = self.offsets(mean, others_offset)
        doubt_x, doubt_y = log_std[:, 0 : self.places : 2], log_std[:, 1 : self.places : 2]
        near = seen / (2 * REACH)
        pair = self.pair(torch.cat([x * near, y * near, cues, seen, others_offset], -1))
        own = self.own(torch.cat([doubt_x, doubt_y, columns(known_state, self.clock)], -1))
        encoded = (pair + own.unsqueeze(1) + self.action(others_action)).relu()

        hidden, heading, age = recurrent_state.split([self.hidden, f, 1], -1)
        # Left to itself for long, a GRU may pass a point from which roundings grow, and it knows
        # nothing any more: who is out of sight for so long is read anew.
        hidden = hidden * (age < UNSEEN_AFTER / AGE_UNIT)
        hidden = self.gru(encoded.flatten(0, 1), hidden.flatten(0, 1)).unflatten(0, (-1, m))
        age = torch.where(visible.unsqueeze(-1), torch.zeros_like(age), age + 1 / AGE_UNIT)
        step_x, step_y = F.embedding(others_action, self.steps).split(1, -1)
        distance = x.abs() + y.abs()
        before = (x + step_x).abs() + (y + step_y).abs()
        heading = HEADING_KEPT * heading + seen * (before - distance)

        said = self.heads(torch.cat([hidden, encoded], -1))
        score, weights, elsewhere, action = said.split(self.sizes, -1)
        to_x, to_y, for_doubt_x, for_doubt_y, for_far, for_there, for_heading = weights.split(1, -1)
        score = score + seen * (
            x.clamp(-REACH, REACH) * (to_x / 4)
            + y.clamp(-REACH, REACH) * (to_y / 4)
            + distance * (for_far / FAR)
            + (1 - distance).clamp_min(0) * for_there
        )
        # The doubts are the agent's own: one row for all the others.
        score = score + doubt_x.unsqueeze(1) * for_doubt_x + doubt_y.unsqueeze(1) * for_doubt_y
        score = score + heading * for_heading
        return torch.cat([score, elsewhere], -1), action, torch.cat([hidden, heading, age], -1)

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
        if not self.shape.num_others:
            nobody = mean.new_zeros(mean.shape[0], 0)
            ahead = mean.new_zeros(mean.shape[0], self.shape.num_affordances, len(LEADS))
            return goal, action, nobody, nobody.long(), ahead, state
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
        x, y = self.offsets(mean, others_offset)
        theirs = x.abs() + y.abs()
        own_x, own_y = self.offsets(mean, torch.zeros_like(others_offset[:, :1]))
        own = (own_x.abs() + own_y.abs()).squeeze(1)
        shows = columns(cues, self.shape.telling_cues).sum(-1, keepdim=True) > 0.5
        uses = shows & (theirs < 0.5)
        progress = known_state[:, self.shape.self_names.index("progress"), None]
        mine = (progress > 0.05) & (own < 0.5)
        sooner = (own - mine.to(mean.dtype) + 0.5).unsqueeze(1) - theirs + uses.to(mean.dtype)
        wants = goal_dist[..., : self.shape.num_affordances] * visible.unsqueeze(-1)
        return torch.stack([(wants * (sooner - lead).clamp(0.0, 1.0)).sum(1) for lead in LEADS], -1)
