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
from hamlet.moving import columns, constant

AGE_UNIT = 32.0  # the state's last number counts ticks since an agent was visible, in this unit
HEADING_KEPT = 0.8  # per tick, of the steps towards a place
UNSEEN_AFTER = 16.0  # ticks out of sight after which the reason is `unseen`, and all is forgotten
CONFLICT_ENTROPY = 0.6  # share of the maximal entropy at which visible cues conflict
FACTS = 7  # of a place for an agent: offset (2), doubt (2), distance, being there, heading for it
# Units of these while the agent is visible, and always.
FACT_UNITS = ((1 / 4, 1 / 4, 0.0, 0.0, 1 / 32, 1.0, 0.0), (0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0))
CLOCK = ("sin_hour", "cos_hour", "age")  # of the agent's own state: the same for all in a world
REACH = 8.0  # cells after which an offset says no more


def length(way: Tensor) -> Tensor:
    """float32 [...] the cells to walk on ways [2, ...]: in ONNX Runtime two nodes more than a sum
    over the first axis, and for many rows faster."""
    x, y = way.abs().unbind(0)
    return x + y


class Social(nn.Module):
    """One tick of reading the other agents.

    Args:
        shape: sizes of the town.
        hidden: width of the GRU, per other agent. The state has more numbers: for each place the
            steps made towards it less those made away, fading; then the ticks since the agent was
            last visible, / 32.
    """

    steps: Tensor
    telling: Tensor

    def __init__(self, shape: TownShape, hidden: int) -> None:
        super().__init__()
        self.shape, self.hidden = shape, hidden
        f, goals, actions = shape.num_affordances, shape.num_goals, shape.num_actions
        self.places = 2 * f
        # The encoder's first layer, cut by what it reads: of a pair of agents; of the agent itself,
        # once for all the others (where the places lie for those it sees, and how surely); of the
        # other's last action (a row of a table).
        self.pair = nn.Linear(shape.num_cues + 3, hidden, bias=False)
        self.near = nn.Linear(self.places, hidden, bias=False)
        self.own = nn.Linear(self.places + len(CLOCK), hidden)
        self.action = nn.Embedding(actions + 1, hidden)
        self.gru = nn.GRUCell(hidden, hidden)
        self.sizes = [f, FACTS, goals - f, actions]
        self.heads = nn.Linear(2 * hidden, sum(self.sizes))
        steps = [STEPS.get(name, (0.0, 0.0)) for name in (*shape.action_names, "unknown")]
        self.register_buffer("steps", torch.tensor(steps), persistent=False)
        self.clock = [shape.self_names.index(name) for name in CLOCK]
        telling = torch.zeros(shape.num_cues, 1)
        telling[list(shape.telling_cues)] = 1
        self.register_buffer("telling", telling, persistent=False)

    @property
    def recurrent_dim(self) -> int:
        return self.hidden + self.shape.num_affordances + 1

    def places_of(self, mean: Tensor) -> Tensor:
        """float32 [2, ., F] x and y, in cells, of every place as seen from the agent itself."""
        places = mean[:, : self.places].unflatten(1, (-1, 2)).movedim(-1, 0)
        size = constant((self.shape.width, self.shape.height), mean.dtype, mean.device)
        return places * size[:, None, None]

    def offsets(self, mean: Tensor, others_offset: Tensor) -> Tensor:
        """float32 [2, ., M, F] the same as seen from every other agent."""
        theirs = (others_offset * OFFSET_UNIT).movedim(-1, 0)
        return self.places_of(mean).unsqueeze(2) - theirs.unsqueeze(-1)

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
        offsets = self.offsets(mean, others_offset)
        unsure = log_std[:, : self.places]
        doubt = unsure.unflatten(1, (-1, 2)).movedim(-1, 0)
        pair = self.pair(torch.cat([cues, seen, others_offset], -1))
        near = self.near(mean[:, : self.places])
        own = self.own(torch.cat([unsure, columns(known_state, self.clock)], -1))
        alike = seen * near.unsqueeze(1) + own.unsqueeze(1)
        encoded = (pair + alike + self.action(others_action)).relu().flatten(0, 1)

        hidden, heading, age = recurrent_state.split([self.hidden, f, 1], -1)
        # Left to itself for long, a GRU may pass a point from which roundings grow, and it knows
        # nothing any more: who is out of sight for so long is read anew.
        hidden = torch.where(age < UNSEEN_AFTER / AGE_UNIT, hidden, 0.0)
        hidden = self.gru(encoded, hidden.flatten(0, 1))
        age = torch.where(visible.unsqueeze(-1), 0.0, age + 1 / AGE_UNIT)
        step = F.embedding(others_action, self.steps).movedim(-1, 0).unsqueeze(-1)
        distance = length(offsets)
        before = (offsets + step).abs().sum(0)
        heading = HEADING_KEPT * heading + seen * (before - distance)

        said = self.heads(torch.cat([hidden, encoded], -1)).unflatten(0, (-1, m))
        score, weights, elsewhere, action = said.split(self.sizes, -1)
        units, always = constant(FACT_UNITS, seen.dtype, seen.device).unbind(0)
        weights = (weights * (units * seen + always)).movedim(-1, 0).unsqueeze(-1)
        facts = [
            offsets.clamp(-REACH, REACH),
            doubt.unsqueeze(2).expand(-1, -1, m, -1),  # the agent's own: the same for all others
            distance.unsqueeze(0),
            (1 - distance).clamp_min(0).unsqueeze(0),
            heading.unsqueeze(0),
        ]
        score = score + (weights * torch.cat(facts)).sum(0)
        hidden = hidden.unflatten(0, (-1, m))
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
        log_odds = goal.log_softmax(-1)
        goal_dist = log_odds.exp()
        entropy = -(goal_dist * log_odds).sum(-1)
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
        theirs = length(self.offsets(mean, others_offset))
        own = self.places_of(mean).abs().sum(0)
        shows = cues @ self.telling > 0.5
        uses = shows & (theirs < 0.5)
        progress = self.shape.self_names.index("progress")
        mine = (known_state[:, progress : progress + 1] > 0.05) & (own < 0.5)
        later = own + torch.where(mine, -0.5, 0.5)
        sooner = later.unsqueeze(1) - theirs + uses.to(mean.dtype)
        seen = visible.unsqueeze(-1).to(mean.dtype)
        wants = goal_dist[..., : self.shape.num_affordances] * seen
        leads = constant(LEADS, mean.dtype, mean.device).unsqueeze(-1)
        reached = (sooner.unsqueeze(2) - leads).clamp(0.0, 1.0) * wants.unsqueeze(2)
        return reached.sum(1).transpose(1, 2)
