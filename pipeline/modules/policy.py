"""Module D: the meta-controller picks a readable goal, the controller picks every tick's action.

D1 deliberates on a fixed clock (every `meta_period` ticks): it imagines the futures of its few
likeliest goals in the world model and weighs them. Between those ticks a goal that has ended
(target reached, too old, emergency), or to which another one is now clearly preferred, is replaced
at once by D1's first thought, without imagination.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hamlet.modules.contracts import LEADS, STEPS, WAY, Features, TownShape
from hamlet.moving import columns, constant, one_hot

LOGIT_CAP = 15.0
PLACE_WIDTH = 16
POSTED = ("opens_in", "open_for", "price")
"""What the timetable says of each place."""
HOUR_UNITS = (1 / 12, 1 / 12, 10.0)
PLACE_FACTS = 16
DOUBT = -3.5
"""log_std in map sizes from which on a place is not known; it is surely unknown 1 above it."""
BROKE, FRESH, IDLING, EARNING = 0.12, 0.9, -3.0, 2.0
"""With money under the first and energy under the second, resting and what earns money are thought
so much likelier (nats) than imitation says."""


class Policy(nn.Module):
    """Meta-controller and controller.

    Args:
        shape: sizes of the town.
        belief_dim: D.
        width: hidden units.
        goal_targets: float32 [G, N] meter levels at which each goal counts as reached (0 = not
            asked for).
        timetable: float32 [lifespan + 1, F, 3] of every tick of a life: ticks until each place
            opens, ticks it then stays open, what a tick of using it costs.
        menu: float32 [F, 2N + 1] what a use of each place gives: to each of the N meters per tick,
            to each on completion, the ticks it takes.
        meta_period: ticks between deliberations, and the maximal age of a goal.
        emergency: level of a vital meter under which a goal that does not serve it is dropped.
    """

    goal_targets: Tensor
    reached_at: Tensor
    urgent_under: Tensor
    steps: Tensor
    low_money_biases: Tensor
    scouts: Tensor
    """bool [1, 1], or [., 1] while it is tried: whether it explores where nobody whom it saw has
    looked. A habit, which its teacher has not; `learning.trials` finds out whether it pays."""
    stays: Tensor
    """float32 [1, K], or [., K] while it is tried: parts of what is left of a use after which it
    may leave, the last being 1; only that where it never leaves early. A habit, too."""
    countdown: Tensor
    """float32 [1, 1], or [., 1] while it is tried: ticks before the end of its life from which on
    the meters that it does not live by are worth the less, the less is left of it; 0 for never. A
    habit, too."""
    apart = True
    """Whether goals are chosen without the controller: then either can be learned by itself."""

    def __init__(
        self,
        shape: TownShape,
        belief_dim: int,
        width: int,
        goal_targets: Tensor,
        timetable: Tensor,
        menu: Tensor,
        meta_period: int,
        emergency: float,
    ) -> None:
        super().__init__()
        self.shape, self.meta_period, self.emergency = shape, meta_period, emergency
        self.num_meters = shape.num_meters
        self.places = 2 * shape.num_affordances
        self.exploring = shape.goal_names.index("explore")
        self.age = shape.self_names.index("age")
        self.progress = shape.self_names.index("progress")
        base = belief_dim - WAY + self.places + shape.self_dim + shape.num_goals
        elsewhere = shape.num_goals - shape.num_affordances
        self.goal_prior = GoalScores(
            base + elsewhere, shape.num_affordances, shape.num_goals, width
        )
        self.money, self.vital = shape.paid_in, shape.vital_meters
        names, costs = shape.meter_names, bool(timetable[..., 2].any())
        self.energy = None
        if "energy" in names and (costs or "money" in names):
            self.energy = names.index("energy")
        self.prospects = Prospects(menu, self.money, self.vital)
        self.controller = mlp(base + shape.num_goals + 8, width, shape.num_actions)
        # How much an imagined advantage speaks for a goal: starts at no influence.
        self.future_weight = mlp(3, 16, 1)
        for parameter in self.future_weight[-1].parameters():
            nn.init.zeros_(parameter)
        steps = [(0.0, 0.0), *(STEPS.get(name, (0.0, 0.0)) for name in shape.action_names)]
        self.register_buffer("steps", torch.tensor(steps), persistent=False)
        self.register_buffer("goal_targets", goal_targets)
        # Of each goal the level of every meter at which it is reached, and of every vital one that
        # under which it is to be dropped; levels that are never met where it says nothing.
        asked = goal_targets > 0
        reached_at = goal_targets.masked_fill(~asked.any(-1, keepdim=True), math.inf)
        served = asked[:, list(self.vital)]
        urgent_under = torch.where(served, -math.inf, emergency)
        self.register_buffer("reached_at", reached_at, persistent=False)
        self.register_buffer("urgent_under", urgent_under, persistent=False)
        low_money_biases = EARNING * (goal_targets[:, self.money] > 0)
        low_money_biases[shape.goal_names.index("rest")] = IDLING
        self.register_buffer("low_money_biases", low_money_biases, persistent=False)
        self.register_buffer("scouts", torch.tensor([[False]]))
        self.register_buffer("stays", torch.tensor([[1.0]]))
        self.register_buffer("countdown", torch.tensor([[0.0]]))
        for name, column in zip(POSTED, timetable.unbind(-1), strict=True):
            self.register_buffer(name, column.contiguous())

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """As many `stays` as were kept."""
        kept = state_dict.get(f"{prefix}stays", self.stays)
        self.stays = self.stays.new_empty(kept.shape)
        super()._load_from_state_dict(state_dict, prefix, *others)

    def map_size(self, like: Tensor) -> Tensor:
        return constant((self.shape.width, self.shape.height), like.dtype, like.device)

    def own_facts(self, f: Features) -> list[Tensor]:
        before, _, _, after = self._around_ways(f)
        return [before, self.way(f), after, f.log_std, f.known_state, f.rivals]

    def _around_ways(self, f: Features) -> list[Tensor]:
        """The belief before its two ways to look, these, and what is after them."""
        rest = f.mean.shape[-1] - self.places - 2 * WAY
        return list(f.mean.split([self.places, WAY, WAY, rest], -1))

    def way(self, f: Features) -> Tensor:
        """float32 [., WAY] the one of the two that is taken, in map sizes."""
        _, looking, scouting, _ = self._around_ways(f)
        return torch.where(self.scouts, scouting, looking)

    # Facts of the places lie with the kind first and the places innermost: sums over a first axis
    # are the same wherever in the batch a row stands, and compiled code is as wide as the last one.

    def cell_offsets(self, f: Features) -> Tensor:
        """float32 [2, ., F] believed offsets in cells."""
        offsets = f.mean[..., : self.places].unflatten(-1, (-1, 2)).movedim(-1, 0)
        return offsets * along_first(self.map_size(offsets), offsets[0])

    def offset_spread(self, f: Features) -> Tensor:
        """float32 [2, ., F] how unsure those are."""
        return f.log_std.unflatten(-1, (-1, 2)).movedim(-1, 0)

    def posted_now(self, f: Features) -> list[Tensor]:
        """float32 [., F] each: the columns of the timetable now."""
        tick = (f.known_state[..., self.age] * self.shape.lifespan).round().long()
        tick = tick.clamp(0, self.shape.lifespan)
        return [F.embedding(tick, getattr(self, name)) for name in POSTED]

    def posted_hours(self, f: Features) -> Tensor:
        """float32 [3, ., F] the same in HOUR_UNITS."""
        now = torch.stack(self.posted_now(f))
        return now * along_first(constant(HOUR_UNITS, now.dtype, now.device), now[0])

    def _pursued(self, f: Features) -> Tensor:
        """float32 [., G] one where a goal was pursued until now; zero in a life's first tick."""
        return one_hot(f.pursued, self.shape.num_goals, f.mean.dtype)

    def place_facts(self, f: Features) -> Tensor:
        """float32 [PLACE_FACTS, ., F] of every place: its offset, its doubt, how far it is, whether
        the agent is there, how many others are expected to want it, to be there before, and to be
        waited for, whether it is the goal pursued until now, whether the last step led to it, the
        timetable, and what going there would be worth, or, where it is not known, looking for
        it."""
        offsets, spread = self.cell_offsets(f), self.offset_spread(f)
        step = F.embedding(f.moved, self.steps).movedim(-1, 0).unsqueeze(-1)
        steps = offsets.abs().sum(0)
        nearer = ((offsets + step).abs().sum(0) - steps).clamp(0.0, 1.0)
        there = (-4 * offsets.square().sum(0)).exp()
        doubt = (spread.amax(0) - DOUBT).clamp(0.0, 1.0)
        sure = 1 - doubt
        look = self.way(f)
        search = (look * self.map_size(look)).abs().sum(-1, True)
        walk = steps * sure + (search + self.prospects.search) * doubt
        count = self.shape.num_affordances
        pursued, posted = self._pursued(f)[..., :count], self.posted_now(f)
        progress = 10 * f.known_state[..., self.progress : self.progress + 1] * there * sure
        meters = f.known_state[..., : self.num_meters]
        ahead = f.ahead.movedim(-1, 0)
        wait = self.prospects.wait(ahead) * sure
        counts = self.means_count(f.known_state)
        rate = self.prospects(
            meters, walk, progress, wait, pursued, nearer, *posted, counts, self.stays
        )
        others = f.rivals[..., :count], ahead[0], wait
        facts = torch.stack(
            [steps, there, *others, pursued, nearer, *posted, rate * sure, rate * doubt]
        )
        far = 1 / (self.shape.width + self.shape.height)
        units = (far, 1.0, 1.0, 1.0, 1 / 8, 1.0, 1.0, *HOUR_UNITS, 10.0, 10.0)
        facts = facts * along_first(constant(units, facts.dtype, facts.device), steps)
        return torch.cat([offsets / 4, spread, facts])

    def means_count(self, known_state: Tensor) -> Tensor:
        """float32 [., 1] what a meter that it does not live by is still worth, as a share."""
        left = self.shape.lifespan * (1 - known_state[..., self.age : self.age + 1])
        share = (left / self.countdown.clamp_min(1.0)).clamp(0.0, 1.0)
        return torch.where(self.countdown > 0, share, 1.0)

    def prior_logits(self, f: Features) -> Tensor:
        """float32 [., G] D1's first thought, before imagination."""
        return self.learned_logits(f) + self.low_money_bias(f.known_state)

    def low_money_bias(self, known_state: Tensor) -> Tensor:
        """float32 [., G]: who has no money must not wait for better times.

        Nearly all ends late in life that a trained agent had without this rule, and its teacher had
        not, began so: without money, resting. Not a part of what imitation fits, which would only
        learn to make up for it. In a town without money or energy it says nothing.
        """
        if self.energy is None:
            return known_state.new_zeros(self.shape.num_goals)
        limits = constant([BROKE, FRESH], known_state.dtype, known_state.device)
        low = columns(known_state, [self.money, self.energy]) < limits
        return torch.where(low.all(-1, keepdim=True), self.low_money_biases, 0.0)

    def learned_logits(self, f: Features, places: Tensor | None = None) -> Tensor:
        """float32 [., G] the goals as imitation and PPO taught them.

        Args:
            places: `place_facts` of the same, where they are known.
        """
        elsewhere = self._pursued(f)[..., self.shape.num_affordances :]
        base = torch.cat([*self.own_facts(f), elsewhere], -1)
        places = self.place_facts(f) if places is None else places
        return soft_cap(self.goal_prior(base, places))

    def goal_logits(
        self, prior: Tensor, candidates: Tensor, returns: Tensor, confidence: Tensor
    ) -> Tensor:
        """float32 [., G]: the prior, moved by the imagined futures of the candidates.

        Args:
            prior: float32 [., G]; candidates: int64 [., C]; returns: float32 [., C] imagined
            discounted return; confidence: float32 [., C].
        """
        advantage = returns - returns.mean(-1, keepdim=True)
        log_prior = prior.log_softmax(-1).gather(-1, candidates)
        weight = self.future_weight(torch.stack([advantage, confidence, log_prior], -1)).squeeze(-1)
        chosen = one_hot(candidates, prior.shape[-1], prior.dtype)
        return prior + torch.einsum("...c,...cg->...g", weight, chosen)

    def action_logits(self, f: Features, goal: Tensor) -> Tensor:
        """float32 [., A] of the controller pursuing `goal` int64 [.], before the mask."""
        chosen = one_hot(goal, self.shape.num_goals, f.mean.dtype)
        facts = [self.cell_offsets(f), self.offset_spread(f), self.posted_hours(f)]
        is_place = (goal < self.shape.num_affordances).unsqueeze(-1)
        # Of the place that is pursued; zero if the goal is no place.
        here = torch.cat(facts) * chosen[..., : self.shape.num_affordances]
        offset, spread, hours = here.sum(-1).movedim(0, -1).split([2, 2, 3], -1)
        look = self.way(f)
        look = look * self.map_size(look)
        explores = (goal == self.exploring).unsqueeze(-1)
        offset = torch.where(explores, look, offset)
        there = torch.where(is_place, (-4 * offset.square().sum(-1, True)).exp(), 0.0)
        target = [offset.clamp(-4, 4) / 4, spread, there, hours]
        return soft_cap(self.controller(torch.cat([*self.own_facts(f), chosen, *target], -1)))

    def goal_ended(self, known_state: Tensor, goal: Tensor, age: Tensor) -> Tensor:
        """bool [.]: there is none yet (age 0), its target is reached, it is too old, or there is an
        emergency.

        An emergency is a vital meter under the limit while the goal does not ask for it; it gives
        every goal two ticks, so that a way out can begin.
        """
        meters = known_state[..., : self.num_meters]
        reached = (meters >= F.embedding(goal, self.reached_at)).all(-1)
        low = columns(meters, self.vital) < F.embedding(goal, self.urgent_under)
        emergency = low.any(-1) & (age >= 2)
        return reached | emergency | (age >= self.meta_period) | (age == 0)


class GoalScores(nn.Module):
    """A score for every goal: of a place, by the whole state and by what is believed of the place.

    The last layers are shared by all places: what one place teaches about distance, doubt or
    rivals holds for the others. They give each place a second number, what finding it would be
    worth; together these speak for exploring, the last of the goals.
    """

    def __init__(self, base: int, places: int, goals: int, width: int) -> None:
        super().__init__()
        self.context = nn.Sequential(
            nn.Linear(base, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()
        )
        self.needs = nn.Linear(width, places * PLACE_WIDTH)
        self.offers = nn.Linear(PLACE_FACTS, PLACE_WIDTH, bias=False)
        self.score = nn.Sequential(nn.SiLU(), *mlp(PLACE_WIDTH, PLACE_WIDTH, 2))
        self.elsewhere = nn.Linear(width, goals - places)
        self.sharpness = nn.Parameter(torch.tensor(2.7))
        """Logarithm of how much the rates, the last two of the facts, speak for a place."""

    def forward(self, base: Tensor, places: Tensor) -> Tensor:
        """float32 [., G].

        Args:
            base: float32 [., base]; places: float32 [PLACE_FACTS, ., F].
        """
        context = self.context(base)
        needs = self.needs(context).unflatten(-1, (-1, PLACE_WIDTH))
        offers = self.offers(places.flatten(1).t()).unflatten(0, places.shape[1:])
        scores = self.score((needs + offers).flatten(0, -2)).t().unflatten(1, places.shape[1:])
        using, finding = (scores + self.sharpness.exp() * places[-2:]).unbind(0)
        other, exploring = self.elsewhere(context).split([self.elsewhere.out_features - 1, 1], -1)
        exploring = exploring + finding.logsumexp(-1, keepdim=True) - math.log(finding.shape[-1])
        return torch.cat([using, other, exploring], -1)


class Prospects(nn.Module):
    """What it would be worth per tick to go to a place and use it, by a readable rule.

    The meters that would follow are worked out from the menu, the timetable and the way, for each
    time that it might stay. How much they are worth, `worth x - fear max(0, comfort - x)^2` of
    each meter, what they drain, and what a plan, a rival or a search costs in ticks is learned. The
    value gained per tick is the rate that a forager maximises (Stephens and Krebs 1986), who also
    chooses when to leave (Charnov 1976); the network beside it (`GoalScores`) learns what this
    rule misses.
    """

    menu: Tensor
    """float32 [2N + 1, F], as `Policy` is given it but with the places innermost."""
    paid_in: Tensor
    is_means: Tensor
    """float32 [N] one for meters that nobody lives by."""

    def __init__(self, menu: Tensor, money: int, vital: Sequence[int]) -> None:
        super().__init__()
        self.money, self.meters = money, menu.shape[1] // 2
        self.register_buffer("menu", menu.t().contiguous())
        self.register_buffer("paid_in", torch.eye(self.meters)[money])
        is_means = torch.ones(self.meters).index_fill(0, torch.tensor(vital), 0.0)
        self.register_buffer("is_means", is_means, persistent=False)
        self.worth = nn.Parameter(torch.full((self.meters,), 0.3))
        self.fear = nn.Parameter(torch.ones(self.meters))
        self.comfort = nn.Parameter(torch.full((self.meters,), 0.5))
        self.drain = nn.Parameter(torch.full((self.meters,), 0.3))
        """In hundredths per tick."""
        self.overhead = nn.Parameter(torch.ones(()))
        self.queue = nn.Parameter(torch.ones(()))
        self.search = nn.Parameter(torch.full((), 6.0))
        self.habit = nn.Parameter(torch.zeros(()))
        self.heading = nn.Parameter(torch.zeros(()))

    def wait(self, ahead: Tensor) -> Tensor:
        """float32 [., F] ticks until those who are there before are done, were each use whole.

        Args:
            ahead: float32 [3, ., F] of `SocialPrediction`: who is ahead by one of the leads and not
                by the next is counted in the middle between them.
        """
        leads = constant(LEADS, ahead.dtype, ahead.device)
        left = F.relu(self.menu[-1] - leads.unsqueeze(-1) - 1)
        less = torch.cat([left[:1], left[1:] - left[:-1]])
        return (ahead * along_first(less, ahead[0])).sum(0)

    def gained(self, meters: Tensor, change: Tensor, counts: Tensor) -> Tensor:
        """float32 [K, ., F]: what a `change` of `meters`, both [N, K, ., F], is worth, where those
        that nobody lives by count as much as `counts` float32 [., 1] says.

        Worked out from the change, meter by meter: the difference of two values, each some hundred
        times what is gained, would be mostly rounding.
        """
        given = self.worth, self.fear, self.comfort
        worth, fear, comfort = (along_first(x, meters[0]) for x in given)
        scale = 1 - along_first(self.is_means, meters[0]) * (1 - counts)
        worth, fear = worth * scale, fear * scale
        short = F.relu(comfort - meters)
        then_short = F.relu(comfort - meters - change)
        return (worth * change + fear * (short - then_short) * (short + then_short)).sum(0)

    def forward(
        self,
        meters: Tensor,
        walk: Tensor,
        progress: Tensor,
        wait: Tensor,
        pursued: Tensor,
        nearer: Tensor,
        opens_in: Tensor,
        open_for: Tensor,
        price: Tensor,
        counts: Tensor,
        stays: Tensor,
    ) -> Tensor:
        """float32 [., F] of the best time to stay.

        Args:
            meters: float32 [., N]; of each place float32 [., F]: walk, steps to it; progress, ticks
            of its use that are done; wait, ticks to wait there for others; pursued, 1 where it is
            the goal; nearer, 1 where the last step led to it; opens_in, open_for, price: ticks,
            ticks, and money per tick, of the timetable now. counts: of `gained`. stays: of
            `Policy`.
        """
        n = self.meters
        remaining = (self.menu[-1] - progress).clamp_min(1.0)
        money = meters[..., self.money : self.money + 1]
        affordable = torch.where(price > 0, money / price.clamp_min(1e-3), remaining)
        # [K, ., F]
        stay = (along_first(stays.t().unsqueeze(-1), remaining) * remaining).ceil()
        stay = stay.minimum(remaining.minimum(open_for).minimum(affordable))
        per_tick, finished = (along_first(x, stay) for x in (self.menu[:n], self.menu[n : 2 * n]))
        completes = (stay - remaining + 1).clamp(0.0, 1.0)
        begin = walk.maximum(opens_in) + F.softplus(self.queue) * wait
        ticks = begin + stay
        drained = 0.01 * along_first(self.drain, stay) * ticks
        idle = (meters.movedim(-1, 0)[:, None, ..., None] - drained).clamp(0.0, 1.0)
        paid = price * stay * along_first(self.paid_in, stay)
        gain = per_tick * stay + finished * completes - paid
        change = gain.clamp(min=-idle, max=1 - idle)
        rate = self.gained(idle, change, counts) / (ticks + F.softplus(self.overhead))
        return rate.amax(0) * (1 + self.habit * pursued + self.heading * nearer)


def along_first(values: Tensor, like: Tensor) -> Tensor:
    """Values [n] or [n, F] with as many dimensions between as `like` [., F] needs for them to lie
    along a new first one of it."""
    shape = values.shape[:1] + (1,) * (like.ndim + 1 - values.ndim) + values.shape[1:]
    return values.reshape(shape)


def soft_cap(logits: Tensor) -> Tensor:
    """Logits kept within +-LOGIT_CAP: odds of e^30 say enough, and small numbers stay exact."""
    return LOGIT_CAP * (logits.float() / LOGIT_CAP).tanh()


def mlp(inputs: int, width: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(),
        nn.Linear(width, outputs),
    )  # fmt: skip


class _Question(nn.Module):
    """One of the policy's questions as a module of its own, to be frozen."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy


class PolicyPrior(_Question):
    def forward(
        self, mean: Tensor, log_std: Tensor, known_state: Tensor, rivals: Tensor, ahead: Tensor,
        pursued: Tensor, moved: Tensor,
    ):  # fmt: skip
        f = Features(mean, log_std, known_state, rivals, ahead, pursued, moved)
        return (self.policy.prior_logits(f),)


class PolicyEnded(_Question):
    def forward(self, known_state: Tensor, goal: Tensor, age: Tensor):
        return (self.policy.goal_ended(known_state, goal, age),)


class PolicyWeigh(_Question):
    def forward(self, prior: Tensor, candidates: Tensor, returns: Tensor, confidence: Tensor):
        return (self.policy.goal_logits(prior, candidates, returns, confidence),)


class PolicyAct(_Question):
    def forward(
        self, mean: Tensor, log_std: Tensor, known_state: Tensor, rivals: Tensor, ahead: Tensor,
        pursued: Tensor, moved: Tensor, goal: Tensor,
    ):  # fmt: skip
        f = Features(mean, log_std, known_state, rivals, ahead, pursued, moved)
        return (self.policy.action_logits(f, goal),)
