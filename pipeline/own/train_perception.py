"""Train module A: what comes next, and what was seen earlier in this life."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hamlet.learning.checkpoint import Checkpoint
from hamlet.learning.log import Log
from hamlet.learning.losses import weighted_mean
from hamlet.learning.update import Update
from hamlet.own.data import before_of, fields_of, held_out
from hamlet.own.params import PerceptionParams
from hamlet.plain.perception import Heads, Perception
from hamlet.plain.senses import PART, statistics_of
from hamlet.worlds.contract import WorldShape

FIRST_SHARE = 0.25  # of the questions of recall are about the first tick of a life
LEAST_RATE = 0.1  # the learning rate ends at this share


class Lessons(NamedTuple):
    """Experience [T, S] as A learns from it.

    Attributes:
        fields: in order. features, next_features: float32 [T, S, F].
        before: int64, see `before_of`. age: int64, ticks since this life began.
        reward: float32 in units of its deviation. weight: float32, 1 of whoever is alive.
    """

    fields: list[Tensor]
    features: Tensor
    next_features: Tensor
    before: Tensor
    action: Tensor
    reward: Tensor
    terminated: Tensor
    first: Tensor
    age: Tensor
    weight: Tensor


def lessons_of(shape: WorldShape, data: Mapping[str, Tensor], perception: Perception) -> Lessons:
    """Experience as lessons; features are fixed, they do not learn."""
    t, s = data["action"].shape

    def features(last: bool) -> Tensor:
        parts = [x.flatten(0, 1).split(PART) for x in fields_of(shape, data, last)]
        return torch.cat([perception.senses(*x) for x in zip(*parts, strict=True)]).unflatten(
            0, (t, s)
        )

    alive = data["alive"]
    reward = data["reward"]
    mean, std = reward_scale(reward[alive])
    return Lessons(
        fields_of(shape, data), features(False), features(True),
        before_of(data["action"], data["first"]), data["action"], (reward - mean) / std,
        data["terminated"], data["first"], ages(data["first"]), alive.float(),
    )  # fmt: skip


def reward_scale(reward: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of rewards; a deviation of 0 becomes 1."""
    std = reward.std(correction=0)
    return reward.mean(), torch.where(std > 1e-6, std, 1.0)


def ages(first: Tensor) -> Tensor:
    """int64 [T, S]: ticks since the row at which this life began (or the record)."""
    age = torch.zeros_like(first, dtype=torch.int64)
    for t in range(1, first.shape[0]):
        age[t] = torch.where(first[t], 0, age[t - 1] + 1)
    return age


def unroll(perception: Perception, lessons: Lessons, at: slice, belief: Tensor) -> Tensor:
    """Beliefs float32 [C, S, H] of some ticks, from the belief before them; with gradients."""
    fields = [x[at] for x in lessons.fields]
    c, s = fields[0].shape[:2]
    _, encoded = perception.encode([x.flatten(0, 1) for x in fields])
    encoded = encoded.unflatten(0, (c, s))
    begins, before = lessons.first[at], lessons.before[at]
    beliefs = []
    for t in range(c):
        belief = torch.where(begins[t].unsqueeze(-1), 0.0, belief)
        belief = perception.remember(encoded[t], before[t], belief)
        beliefs.append(belief)
    return torch.stack(beliefs)


def questions(lessons: Lessons, at: slice, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """For every row of some ticks, an earlier tick of its life int64 [C, S], and its features."""
    age = lessons.age[at]
    asked = (torch.rand(age.shape, generator=generator) * (age + 1)).long()
    of_first = torch.rand(age.shape, generator=generator) < FIRST_SHARE
    asked = torch.where(of_first, 0, asked)
    row = torch.arange(lessons.age.shape[0])[at].unsqueeze(-1) - age + asked
    return asked, lessons.features[row, torch.arange(age.shape[1])]


def losses(
    heads: Heads, lessons: Lessons, at: slice, beliefs: Tensor, generator: torch.Generator
) -> dict[str, Tensor]:
    """Every loss of some ticks, float32 [C, S]; the first two of deviations squared."""
    flat = beliefs.flatten(0, 1)
    features = lessons.features[at]
    told = heads(flat, features.flatten(0, 1), lessons.action[at].flatten())
    shape = beliefs.shape[:2]
    change = lessons.next_features[at] - features
    asked, then = questions(lessons, at, generator)
    recalled = heads.recall(flat, lessons.age[at].flatten(), asked.flatten())
    return {
        "next": (told.change.unflatten(0, shape) - change).square().mean(-1),
        "reward": (told.reward.unflatten(0, shape) - lessons.reward[at]).square(),
        "going_on": F.binary_cross_entropy_with_logits(
            told.going_on.unflatten(0, shape), (~lessons.terminated[at]).float(), reduction="none"
        ),
        "recall": (recalled.unflatten(0, shape) - then).square().mean(-1),
    }


def train_perception(
    shape: WorldShape,
    data: Mapping[str, Tensor],
    params: PerceptionParams,
    seed: int,
    checkpoint: Path,
    log: Log,
) -> tuple[Perception, Heads]:
    """A new perception, trained on the lanes that are not held out."""
    torch.manual_seed(seed)
    own = {name: x[:, ~held_out(shape, x.shape[1])] for name, x in data.items()}
    rows = own["alive"].flatten()
    statistics = statistics_of(shape, {k: x.flatten(0, 1) for k, x in own.items()}, rows)
    perception = Perception(shape, statistics, params.hidden)
    heads = Heads(perception.senses.width, params.hidden, shape.num_actions)
    lessons = lessons_of(shape, own, perception)
    weights = {"next": 1.0, "reward": 1.0, "going_on": 1.0, "recall": params.recall}
    generator = torch.Generator().manual_seed(seed)
    ticks, slots = lessons.age.shape
    carried, at = torch.zeros(slots, params.hidden), slice(0, 0)

    def loss(weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        nonlocal carried
        beliefs = unroll(perception, lessons, at, carried)
        carried = beliefs[-1].detach()
        terms = losses(heads, lessons, at, beliefs, generator)
        means = {name: weighted_mean(x, weight) for name, x in terms.items()}
        summed = sum((weights[name] * x for name, x in means.items()), torch.zeros(()))
        return summed, {name: x.detach() for name, x in means.items()}

    parameters = [*perception.parameters(), *heads.parameters()]
    update = Update(loss, parameters, learning_rate=params.learning_rate)
    saved = Checkpoint(
        checkpoint,
        {"module": perception, "heads": heads, "update": update, "generator": generator},
    )
    start, extra = saved.load()
    if start:
        carried, at = extra["carried"], slice(0, extra["stop"])
    for step in log.steps(params.steps, start):
        begin = 0 if at.stop >= ticks else at.stop
        if begin == 0:
            carried = torch.zeros(slots, params.hidden)
        at = slice(begin, min(begin + params.chunk, ticks))
        done = step / params.steps
        update.set_learning_rate(params.learning_rate * (1 - (1 - LEAST_RATE) * done))
        log.record(step, update(lessons.weight[at]))
        saved.save(step + 1, {"carried": carried, "stop": at.stop})
    return perception.eval(), heads.eval()


@torch.no_grad()
def judge_perception(
    shape: WorldShape, data: Mapping[str, Tensor], perception: Perception, heads: Heads
) -> dict[str, float]:
    """Errors on the held-out lanes beside those of who knows nothing: that nothing changes, the
    mean reward and chance of going on, the mean observation."""
    own = {name: x[:, held_out(shape, x.shape[1])] for name, x in data.items()}
    lessons = lessons_of(shape, own, perception)
    ticks, slots = lessons.age.shape
    beliefs = unroll(perception, lessons, slice(0, ticks), torch.zeros(slots, perception.hidden))
    generator = torch.Generator().manual_seed(0)
    terms = losses(heads, lessons, slice(0, ticks), beliefs, generator)
    weight = lessons.weight

    def mean(x: Tensor) -> float:
        return weighted_mean(x, weight).item()

    features = lessons.features
    middle = (features * weight.unsqueeze(-1)).sum((0, 1)) / weight.sum().clamp_min(1)
    chance = torch.tensor(mean((~lessons.terminated).float())).clamp(1e-6, 1 - 1e-6)
    going_on = (~lessons.terminated).float()
    base = -(going_on * chance.log() + (1 - going_on) * (1 - chance).log())
    return {
        "next_error": mean(terms["next"]),
        "next_error_nothing_changes": mean((lessons.next_features - features).square().mean(-1)),
        "reward_error": mean(terms["reward"]),
        "reward_error_mean": mean((lessons.reward - mean(lessons.reward)).square()),
        "going_on_loss": mean(terms["going_on"]),
        "going_on_loss_mean": mean(base),
        "recall_error": mean(terms["recall"]),
        "recall_error_mean": mean((features - middle).square().mean(-1)),
    }
