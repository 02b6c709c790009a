"""A strong end-to-end rival: one recurrent network that imitates the teacher of module D.

What a good engineer would do without modules, in one network from observation to action:

- **Dataset aggregation** (DAgger, Ross et al. 2011). Every iteration plays whole lives in new
  worlds. At first the teacher acts, then for the most part the network, with the teacher taking
  over for some ticks here and there, so that all ages are seen. The teacher, who watches and
  searches as that of module D does (`policy.teacher`), says at every tick what it would do. The
  lives of many iterations are kept and learned from several times.
- **Memory over a whole life.** Lives are learned from beginning to end, in chunks; the memory is
  handed from chunk to chunk, so it is never stale and never blank. It is a gated linear recurrence
  (minGRU, Feng et al. 2024), whose gates ask only the input: one tick costs no matrix product that
  waits for the tick before, and what was written stays exactly until it is overwritten.
- **Auxiliary decoding** (Jaderberg et al. 2017). From the memory are decoded where each place is
  that was seen or heard of, which these are, and which cells of the map were seen; from the
  features before the action, the teacher's goal.
- **Inputs that make it easy.** Own column, row, hour and day as one of many, the last action, and
  the position on the map of what is in view or shown by somebody's cues now. No memory is given.

`benchmarks.curves_rivals.TRIALS` has the short trainings by which settings were chosen. No PPO
follows: it adds nothing to module D either, and alone undoes imitation (`benchmarks.study`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn import functional as F

from hamlet.learning.buffer import RolloutBuffer
from hamlet.learning.learner import ACTION_STREAM, Teacher, gumbel
from hamlet.learning.precision import Precision, autocast
from hamlet.learning.rollout import Record, collect, fused_step
from hamlet.learning.update import fused_adam
from hamlet.modules.categorical import masked_logits
from hamlet.modules.contracts import OFFSET_UNIT, TownShape, observation_from
from hamlet.modules.perception import view_offsets
from hamlet.town import Town
from stages.evaluate import life_of

OBSERVED = ("view", "occupancy", "self_state", "cues", "visible", "others_offset", "others_action")
BYTES = ("cues", "others_action")
"""Kept as whole numbers of one byte."""
HOURS, OTHERS_WIDTH, SLOT, ASKED = 24, 64, 16, 32
CELLS = 4.0
"""Positions are told in so many cells, from the middle of the map."""
GATE_SCALE, GATE_BIAS = 4.0, -0.5
"""Of the gates' logits: a memory that is kept for a life needs large ones, far for small steps."""
MAX_NORM, SHARPNESS = 1.0, 2.0
"""Actions are drawn by so many times their logits: better than by once, and than the likeliest."""


class Settings(NamedTuple):
    """How it is trained."""

    width: int = 256
    """Of the encoder and of the layers before the heads."""
    memory: int = 384
    worlds: int = 64
    """In which one iteration plays one life each."""
    kept: int = 40
    """Iterations whose lives are kept."""
    passes: float = 3.0
    """Times that a life is learned from, for each that is played."""
    lives: int = 16
    """Agents' lives of an update,"""
    chunk: int = 48
    """and ticks of each."""
    learning_rate: float = 2e-3
    steady: int = 1000
    """Updates after which the rate falls with the square root of their number."""
    averaged: float = 0.1
    """The weights that act are an average over about this part of all updates so far."""
    led: int = 20
    """Iterations in which the teacher acts less and less,"""
    least_led: float = 0.1
    """and the part of the ticks in which it still acts then."""
    turns: int = 16
    """Ticks for which an agent acts, or is led, on the average."""
    every: int = 4
    """Ticks of which one is decoded: neighbours say nearly the same."""


class Scan(torch.autograd.Function):
    """h[t] = kept[t] * h[t - 1] + added[t] over T ticks, and its gradient."""

    @staticmethod
    def forward(kept: Tensor, added: Tensor, hidden: Tensor) -> Tensor:
        """float32 [T, S, R] of kept and added float32 [T, S, R] and hidden [S, R] before."""
        found = torch.empty_like(added)
        for t in range(len(added)):
            torch.addcmul(added[t], kept[t], hidden, out=found[t])
            hidden = found[t]
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        kept, found, hidden = ctx.saved_tensors
        flow = grad.clone(memory_format=torch.contiguous_format)
        for t in range(len(flow) - 1, 0, -1):
            flow[t - 1].addcmul_(flow[t], kept[t])
        before = torch.cat([hidden.unsqueeze(0), found[:-1]])
        return flow * before, flow, flow[0] * kept[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        kept, _, hidden = inputs
        ctx.save_for_backward(kept, output, hidden)


def one_of_many(*choices: tuple[Tensor, int]) -> Tensor:
    """float32 [..., sum of sizes]: of each int64 [...] a one at its number."""
    before, numbers = 0, []
    for number, size in choices:
        numbers.append(number + before)
        before += size
    index = torch.stack(numbers, -1)
    marks = torch.zeros(*index.shape[:-1], before, device=index.device)
    return marks.scatter_(-1, index, 1.0)


class EndToEnd(nn.Module):
    """Observation and memory to action logits and memory.

    Args:
        shape: sizes of the town.
        width: of the encoder and of the layers before the heads.
        memory: R, numbers that are remembered.
    """

    view_x: Tensor
    view_y: Tensor

    def __init__(self, shape: TownShape, width: int, memory: int) -> None:
        super().__init__()
        self.shape, self.memory = shape, memory
        view_x, view_y = view_offsets(shape.vision)
        self.register_buffer("view_x", view_x, persistent=False)
        self.register_buffer("view_y", view_y, persistent=False)
        self.days = -(-shape.lifespan // HOURS) + 1
        reach_x, reach_y = 2 * shape.width - 1, 2 * shape.height - 1
        each = shape.num_cues + 1 + shape.num_actions + 1 + reach_x + reach_y
        self.others = nn.Sequential(
            nn.Linear(each, OTHERS_WIDTH), nn.ReLU(), nn.Linear(OTHERS_WIDTH, OTHERS_WIDTH),
            nn.ReLU(),
        )  # fmt: skip
        self.marks = shape.width + shape.height + HOURS + self.days + shape.num_actions + 1
        # Of the memory's inputs and, with what is told as seen from the agent, of the encoder's.
        lasting = shape.self_dim + self.marks + 3 * (shape.num_affordances + shape.num_cues)
        sensed = lasting + len(view_x) * (shape.num_cell_codes + 1) + OTHERS_WIDTH
        self.encoder = nn.Sequential(
            nn.Linear(sensed, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()
        )
        self.gate, self.written = (nn.Linear(lasting + width, memory) for _ in range(2))
        nn.init.constant_(self.gate.bias, GATE_BIAS)
        goals, known = shape.num_goals, width + memory
        self.trunk = nn.Sequential(
            nn.Linear(known, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()
        )
        self.slots = nn.Linear(known, goals * SLOT)
        self.names = nn.Parameter(0.3 * torch.randn(goals, SLOT))
        self.asked, self.intention = nn.Linear(width, ASKED), nn.Linear(width, goals)
        self.score = nn.Sequential(nn.Linear(SLOT + ASKED, 64), nn.SiLU(), nn.Linear(64, 1))
        self.actor = nn.Sequential(
            nn.Linear(width + SLOT + goals, 128), nn.SiLU(), nn.Linear(128, shape.num_actions)
        )
        self.places = nn.Linear(memory, 3 * shape.num_affordances)
        self.seen = nn.Linear(memory, shape.num_cells)

    def features(self, o: TensorDict) -> tuple[Tensor, Tensor]:
        """What is sensed now, of fields [M, ...] of OBSERVED and `moved`: float32 [M, lasting] of
        the agent and of places on the map, and float32 [M, .] all as it is seen from the agent."""
        shape, own = self.shape, o["self_state"]
        at = shape.num_meters
        x = (own[:, at] * (shape.width - 1)).round().long()
        y = (own[:, at + 1] * (shape.height - 1)).round().long()
        angle = torch.atan2(own[:, at + 2], own[:, at + 3])
        hour = (angle * (HOURS / (2 * math.pi))).round().long() % HOURS
        day = (own[:, at + 5] * shape.lifespan).round().long() // HOURS
        marks = one_of_many(
            (x, shape.width), (y, shape.height), (hour, HOURS), (day, self.days),
            (o["moved"].long(), shape.num_actions + 1),
        )  # fmt: skip
        cues, away, code = o["cues"].float(), o["others_offset"], o["view"].flatten(1).long()
        steps = (away * OFFSET_UNIT).round().long()
        there = one_of_many(
            (o["others_action"].long(), shape.num_actions + 1),
            (steps[..., 0] + shape.width - 1, 2 * shape.width - 1),
            (steps[..., 1] + shape.height - 1, 2 * shape.height - 1),
        )
        visible = o["visible"].unsqueeze(-1).float()
        others = self.others(torch.cat([cues, visible, there * visible], -1)).sum(-2).float()
        lasting = torch.cat([own, marks, *self.sightings(x, y, code, cues, away)], 1)
        view = F.one_hot(code, shape.num_cell_codes).flatten(1)
        return lasting, torch.cat([view, o["occupancy"].flatten(1), others], 1)

    def sightings(
        self, x: Tensor, y: Tensor, code: Tensor, cues: Tensor, away: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Where on the map is what is in view or shown now: of every affordance, and of every cue
        on the average of those who show it, column, row and 1; zeros if there is none.

        Args:
            x, y: int64 [M]; code: int64 [M, S * S] of the view; cues: float32 [M, O, C];
            away: float32 [M, O, 2].

        Returns:
            float32 [M, 3 F] and [M, 3 C].
        """
        shape = self.shape
        middle = away.new_tensor([(shape.width - 1) / 2, (shape.height - 1) / 2])
        here = (torch.stack([x, y], 1) - middle) / CELLS
        there = here.unsqueeze(1) + torch.stack([self.view_x, self.view_y], 1) / CELLS
        found = away.new_zeros(len(x), shape.num_cell_codes, 3)
        index = code.unsqueeze(-1).expand(-1, -1, 3)
        found.scatter_(1, index, F.pad(there, (0, 1), value=1.0))
        others = F.pad(here.unsqueeze(1) + away * (OFFSET_UNIT / CELLS), (0, 1), value=1.0)
        shown = cues.transpose(1, 2) @ others
        shown = shown / shown[..., 2:].clamp_min(1.0)
        return found[:, 1 : 1 + shape.num_affordances].flatten(1), shown.flatten(1)

    def remember(self, o: TensorDict, over: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What is encoded and remembered at each tick of sequences, and the memory after them.

        Args:
            o: fields [T, S, ...] of OBSERVED and `moved`.
            over: bool [T, S] a life ended with this tick: all is forgotten after it.
            hidden: float32 [S, R] remembered before.

        Returns:
            [T, S, width + R] and float32 [S, R].
        """
        lasting, around = self.features(o.flatten(0, 1))
        encoded = self.encoder(torch.cat([lasting, around], 1))
        both = torch.cat([lasting.to(encoded.dtype), encoded], 1)
        gate = (GATE_SCALE * self.gate(both).float()).sigmoid().unflatten(0, over.shape)
        written = self.written(both).float().unflatten(0, over.shape)
        goes_on = (~over).unsqueeze(-1)
        kept = 1 - gate
        kept = torch.cat([kept[:1], kept[1:] * goes_on[:-1]])
        remembered = Scan.apply(kept, gate * written, hidden)
        known = torch.cat([encoded.unflatten(0, over.shape), remembered.to(encoded.dtype)], -1)
        return known, remembered[-1] * goes_on[-1]

    def decide(self, known: Tensor) -> tuple[Tensor, Tensor]:
        """From what is encoded and remembered [..., width + R]: logits of actions [..., A] before
        the mask, and of the teacher's goal [..., G]. Goals are weighed slot by slot, and the action
        is told the mean of the slots by the goals' odds."""
        last, goals = self.trunk(known), self.shape.num_goals
        slots = self.slots(known).unflatten(-1, (goals, -1))
        asked = self.asked(last).unsqueeze(-2).expand(*slots.shape[:-1], -1)
        named = slots + self.names.to(slots.dtype)
        goal = self.intention(last) + self.score(torch.cat([named, asked], -1)).squeeze(-1)
        odds = goal.float().softmax(-1).to(slots.dtype)
        meant = (odds.unsqueeze(-2) @ slots).squeeze(-2)
        return self.actor(torch.cat([last, meant, odds], -1)), goal

    def decode(self, known: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the memory says of the map: float32 [..., F, 2] where each place is, [..., F] logits
        that it is known, and [..., cells] logits that the cell was seen."""
        remembered = known[..., -self.memory :]
        places = self.places(remembered).float().unflatten(-1, (-1, 3))
        return places[..., :2], places[..., 2], self.seen(remembered).float()


def tensors(data: TensorDict) -> Iterable[tuple[str, Tensor]]:
    """The entries of plain data by name."""
    return ((name, value) for name, value in data.items() if isinstance(value, Tensor))


def map_targets(places: Tensor, seen: Tensor, shape: TownShape) -> tuple[Tensor, Tensor]:
    """What the memory is to say of the places.

    Args:
        places: int [..., F] cells, row * width + column.
        seen: bool [..., cells] which cells are known to the teacher: were in view in this life, or
            hold a place that somebody was seen to use.

    Returns:
        float32 [..., F, 2] column and row from the middle of the map, in CELLS; bool [..., F]
        whether it is known.
    """
    at = places.long()
    across, down = at % shape.width, at // shape.width
    columns = (across - (shape.width - 1) / 2) / CELLS
    rows = (down - (shape.height - 1) / 2) / CELLS
    return torch.stack([columns, rows], -1), seen.gather(-1, at)


def losses(
    model: EndToEnd, batch: TensorDict, hidden: Tensor, every: int
) -> tuple[dict[str, Tensor], Tensor]:
    """Terms of the loss over sequences [T, S], means over the living; and the memory after them."""
    known, hidden = model.remember(batch, batch["over"], hidden)
    (action, goal), weight = model.decide(known), batch["active"].float()

    def mean(values: Tensor, weight: Tensor) -> Tensor:
        return (values * weight).sum() / weight.sum().clamp_min(1.0)

    def entropy(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(
            logits.float().flatten(0, 1), target.flatten().long(), reduction="none"
        ).view_as(weight)

    legal = masked_logits(action.float(), batch["mask"])
    few, living = batch[::every], weight[::every]
    at, is_known, is_seen = model.decode(known[::every])
    where, whether = map_targets(few["places"], few["seen"], model.shape)
    both = F.binary_cross_entropy_with_logits
    off = F.smooth_l1_loss(at, where, reduction="none", beta=0.1).sum(-1)
    terms = {
        "action": mean(entropy(legal, batch["expert_action"]), weight),
        "goal": mean(entropy(goal, batch["expert_goal"]), weight),
        "places": 3 * mean((off * whether).mean(-1), living),
        "known": mean(both(is_known, whether.float(), reduction="none").mean(-1), living),
        "seen": mean(both(is_seen, few["seen"].float(), reduction="none").mean(-1), living),
    }
    return terms, hidden


class Playing(NamedTuple):
    """What is carried from tick to tick."""

    hidden: Tensor
    """float32 [S, R]."""
    moved: Tensor
    """uint8 [S] the last action + 1; 0 at the beginning of a life."""
    expert: Any = None
    """The teacher's memory; None where nobody tells."""


class EndToEndPlayer:
    """The network in every place, as a `Player`; with a teacher, what it is told is recorded.

    Args:
        precision: of what it computes.
    """

    def __init__(
        self,
        town: Town,
        shape: TownShape,
        model: EndToEnd,
        teacher: Teacher | None = None,
        precision: Precision = "fp32",
    ) -> None:
        self.town, self.shape, self.model, self.teacher = town, shape, model, teacher
        self.precision = precision

    def start(self, world: TensorDict) -> Playing:
        slots = len(world) * self.shape.num_agents
        told = self.teacher.reset(world) if self.teacher else None
        moved = torch.zeros(slots, dtype=torch.uint8)
        return Playing(torch.zeros(slots, self.model.memory), moved, told)

    def act(
        self, world: TensorDict, seen: TensorDict, memory: Playing, led: Tensor | None = None
    ) -> tuple[Tensor, Playing, Record]:
        """Drawn actions int64 [B, N]; where `led` bool [B, N], the teacher's."""
        n = self.shape.num_agents
        obs: Any = observation_from(seen, 2)
        fields = {name: getattr(obs, name) for name in OBSERVED}
        fields |= {name: fields[name].to(torch.uint8) for name in BYTES}
        fields["moved"] = memory.moved
        one = TensorDict(fields, batch_size=[len(memory.moved)]).unsqueeze(0)
        goes_on = torch.zeros(one.shape, dtype=torch.bool)
        with autocast(self.precision, self.town.device):
            known, hidden = self.model.remember(one, goes_on, memory.hidden)
            logits = self.model.decide(known[0])[0]
        legal = masked_logits(SHARPNESS * logits.float(), obs.action_mask)
        noise = gumbel(world, n, self.shape.num_actions, ACTION_STREAM)
        acted = (legal + noise).argmax(-1).unflatten(0, (-1, n))
        record: Record = {}
        expert = memory.expert
        if self.teacher is not None:
            told, goal, expert = self.teacher.act(world, expert)
            cells = self.town.affordance_cells[world["layout"]].to(torch.int16)
            record = {
                **fields,
                "mask": obs.action_mask,
                "expert_action": told.flatten().to(torch.uint8),
                "expert_goal": goal.flatten().to(torch.uint8),
                "seen": expert["seen"].flatten(0, 1),
                "places": cells.repeat_interleave(n, 0),
            }
            if led is not None:
                acted = torch.where(led, told, acted)
        moved = (acted.flatten() + 1).to(torch.uint8)
        return acted, Playing(hidden, moved, expert), record

    def outcome(
        self, before: TensorDict, after: TensorDict, memory: Playing
    ) -> tuple[Playing, Record]:
        over = after["episode_over"].repeat_interleave(self.shape.num_agents)
        memory = memory._replace(
            hidden=memory.hidden * ~over.unsqueeze(-1), moved=memory.moved * ~over
        )
        if self.teacher is None:
            return memory, life_of(before, after)
        return memory, {"over": over, "active": before["alive"].flatten()}


class EndToEndLearner:
    """Plays, keeps and learns. The teacher needs a memory of cells `seen`, as those that search.

    Attributes:
        steps: agents' ticks played so far.
        average: the network whose weights are averaged; it acts and is judged.
    """

    def __init__(
        self, town: Town, teacher: Teacher, seed: int, settings: Settings | None = None
    ) -> None:
        torch.manual_seed(seed)
        self.town, self.shape, self.seed = town, TownShape.of(town), seed
        self.settings = settings = settings or Settings()
        self.precision: Precision = "bf16" if torch.cpu._is_avx512_bf16_supported() else "fp32"
        sizes = self.shape, settings.width, settings.memory
        self.model, self.average = EndToEnd(*sizes), EndToEnd(*sizes)
        self.average.load_state_dict(self.model.state_dict())
        self.average.requires_grad_(False)
        self.parameters = list(self.model.parameters())
        self.optimizer = fused_adam(self.parameters, settings.learning_rate, betas=(0.9, 0.99))
        self.player = EndToEndPlayer(town, self.shape, self.average, teacher, self.precision)
        self.step = fused_step(town, self.player)
        self.rng = torch.Generator().manual_seed(seed)
        self.kept: deque[TensorDict] = deque(maxlen=settings.kept)
        self.iteration = self.steps = self.updates = 0
        self.told: dict[str, float] = {}

    def learn(self) -> None:
        """Play a life in each of the worlds; learn from those that are kept."""
        self.play()
        slots = self.settings.worlds * self.shape.num_agents
        for _ in range(round(self.settings.passes * slots / self.settings.lives)):
            self.follow()
        self.iteration += 1

    def led_share(self) -> float:
        """Part of the ticks in which the teacher acts in this iteration."""
        settings = self.settings
        return max(settings.least_led, 1 - self.iteration / settings.led)

    def led(self) -> Iterable[tuple[Tensor]]:
        """bool [B, N] of each tick of an iteration, who is led: in turns."""
        count = self.settings.worlds, self.shape.num_agents
        share, now = self.led_share(), None
        for _ in range(self.town.lifespan):
            drawn = torch.rand(2, *count, generator=self.rng)
            new = drawn[0] < share
            now = new if now is None else torch.where(drawn[1] * self.settings.turns < 1, new, now)
            yield (now,)

    def play(self) -> None:
        world = self.town.reset(self.seed + 1 + self.iteration, self.settings.worlds)
        buffer = RolloutBuffer(self.town.lifespan)
        collect(self.step, world, self.player.start(world), buffer, self.led())
        assert buffer.data is not None
        self.kept.append(buffer.data)
        self.steps += buffer.rows

    def follow(self) -> None:
        """Learn from some lives of one iteration, from beginning to end."""
        settings = self.settings
        data = self.kept[int(torch.randint(len(self.kept), (), generator=self.rng))]
        rows = torch.randperm(data.shape[1], generator=self.rng)[: settings.lives]
        hidden = torch.zeros(len(rows), self.model.memory)
        for first in range(0, len(data), settings.chunk):
            part = data[first : first + settings.chunk]
            chosen = {name: value.index_select(1, rows) for name, value in tensors(part)}
            batch = TensorDict(chosen, batch_size=[len(part), len(rows)])
            with autocast(self.precision, self.town.device):
                terms, hidden = losses(self.model, batch, hidden, settings.every)
            hidden = hidden.detach()
            self.update(terms)

    def update(self, terms: dict[str, Tensor]) -> None:
        settings = self.settings
        rate = min(1.0, (self.updates + 1) / 20)
        rate *= min(1.0, (settings.steady / (self.updates + 1)) ** 0.5)
        for group in self.optimizer.param_groups:
            group["lr"].fill_(settings.learning_rate * rate)
        self.optimizer.zero_grad()
        torch.stack(list(terms.values())).sum().backward()
        gradients = [each.grad for each in self.parameters if each.grad is not None]
        norm = sum(torch.dot(g.flatten(), g.flatten()) for g in gradients) ** 0.5
        torch._foreach_mul_(gradients, min(1.0, MAX_NORM / (float(norm) + 1e-6)))
        self.optimizer.step()
        self.updates += 1
        share = max(1 / self.updates, 1 / (settings.averaged * self.updates + 10))
        now = [each.detach() for each in self.parameters]
        torch._foreach_lerp_(list(self.average.parameters()), now, share)
        for name, value in terms.items():
            self.told[name] = 0.99 * self.told.get(name, value.item()) + 0.01 * value.item()
