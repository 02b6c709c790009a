"""Train module B on the frozen perception's beliefs, and judge it beside who knows nothing."""

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
from hamlet.learning.returns import discounted
from hamlet.learning.update import Update
from hamlet.own.data import Believed, held_out
from hamlet.own.params import WorldModelParams
from hamlet.own.train_perception import reward_scale
from hamlet.plain.world_model import WorldModel
from hamlet.worlds.contract import WorldShape

Experience = tuple[Mapping[str, Tensor], Believed]
"""action, alive, reward, terminated, truncated [T, S], and what A makes of what was seen."""


class Outcomes(NamedTuple):
    """Rows [R] of experience: what was known, what was done, what came of it.

    Attributes:
        change: float32 [R, K] of [features, belief]. going_on: float32, 0 if it terminated.
        value: float32 discounted return from here to the end of the life; known: bool, whether the
            record reaches that end.
    """

    features: Tensor
    belief: Tensor
    action: Tensor
    change: Tensor
    reward: Tensor
    going_on: Tensor
    value: Tensor
    known: Tensor


def outcomes_of(
    data: Mapping[str, Tensor], believed: Believed, gamma: float, lanes: Tensor
) -> Outcomes:
    """The rows of whoever is alive, of some lanes bool [S] of experience [T, S]."""
    data = {k: data[k][:, lanes] for k in ("action", "alive", "reward", "terminated", "truncated")}
    believed = Believed(*(x[:, lanes] for x in believed))
    ended = data["terminated"] | data["truncated"]
    value = discounted(data["reward"], ended, gamma, torch.zeros_like(data["reward"][0]))
    # Known where an end follows in the record.
    known = ended.flip(0).int().cummax(0).values.flip(0).bool()
    alive = data["alive"]
    state = torch.cat([believed.features, believed.belief], -1)[alive]
    after = torch.cat([believed.next_features, believed.next_belief], -1)[alive]
    return Outcomes(
        believed.features[alive], believed.belief[alive], data["action"][alive], after - state,
        data["reward"][alive], (~data["terminated"][alive]).float(), value[alive], known[alive],
    )  # fmt: skip


def errors(model: WorldModel, rows: Outcomes) -> dict[str, Tensor]:
    """Of every member and row, float32 [E, R]: each in squared deviations, or nats."""
    told = model.told(rows.features, rows.belief, rows.action)
    change = rows.change / model.spread
    reward = (rows.reward - model.reward[0]) / model.reward[1]
    value = (rows.value - model.value[0]) / model.value[1]
    going_on = rows.going_on.expand(told.shape[:2])
    return {
        "change": (told[..., : model.known] - change).square().mean(-1),
        "reward": (told[..., -3] - reward).square(),
        "going_on": F.binary_cross_entropy_with_logits(told[..., -2], going_on, reduction="none"),
        "value": (told[..., -1] - value).square() * rows.known,
    }


def rows_of(
    shape: WorldShape, collected: Experience, played: Experience, gamma: float, judged: bool
) -> Outcomes:
    """Rows of both, of the lanes that are held out (`judged`) or of all others.

    Returns are those of D's play: what follows after random play says nothing of the agent's life.
    """
    parts = []
    for data, believed in (collected, played):
        out = held_out(shape, data["action"].shape[1])
        parts.append(outcomes_of(data, believed, gamma, out if judged else ~out))
    parts[0] = parts[0]._replace(known=torch.zeros_like(parts[0].known))
    return Outcomes(*(torch.cat(x) for x in zip(*parts, strict=True)))


def train_world_model(
    shape: WorldShape,
    collected: Experience,
    played: Experience,
    params: WorldModelParams,
    gamma: float,
    seed: int,
    checkpoint: Path,
    log: Log,
) -> tuple[WorldModel, dict[str, float]]:
    """A new world model, and its errors on the held-out lanes beside the trivial ones.

    Args:
        collected: random play, which tries every action; played: D's, which is where rewards are.
    """
    torch.manual_seed(seed)
    rows, judged = (rows_of(shape, collected, played, gamma, part) for part in (False, True))
    spread = rows.change.std(0, correction=0)
    value = rows.value[rows.known] if rows.known.any() else rows.value
    model = WorldModel(
        rows.change.shape[1], shape.num_actions, params.hidden, params.members,
        torch.where(spread > 1e-4, spread, 1.0), torch.stack(reward_scale(rows.reward)),
        torch.stack(reward_scale(value)),
    )  # fmt: skip

    def loss(chosen: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        terms = errors(model, Outcomes(*(x[chosen] for x in rows)))
        means = {name: x.mean() for name, x in terms.items()}
        return sum(means.values(), torch.zeros(())), {k: x.detach() for k, x in means.items()}

    update = Update(loss, model.parameters(), learning_rate=params.learning_rate)
    generator = torch.Generator().manual_seed(seed)
    saved = Checkpoint(checkpoint, {"model": model, "update": update, "generator": generator})
    for step in log.steps(params.steps, saved.load()[0]):
        update.set_learning_rate(params.learning_rate * (1 - 0.9 * step / params.steps))
        chosen = torch.randint(len(rows.action), (params.batch,), generator=generator)
        log.record(step, update(chosen))
        saved.save(step + 1)
    return model.eval(), judge_world_model(model, judged)


@torch.no_grad()
def judge_world_model(model: WorldModel, rows: Outcomes) -> dict[str, float]:
    """The ensemble's mean errors beside: nothing changes, the mean reward, chance and value."""
    everyone = torch.ones(len(rows.action))
    terms = {
        name: weighted_mean(x.mean(0), everyone).item() for name, x in errors(model, rows).items()
    }
    chance = rows.going_on.mean().clamp(1e-6, 1 - 1e-6)
    base = -(rows.going_on * chance.log() + (1 - rows.going_on) * (1 - chance).log()).mean()
    reward = (rows.reward - rows.reward.mean()) / model.reward[1]
    value = (rows.value - rows.value[rows.known].mean()) / model.value[1] if rows.known.any() else (
        torch.zeros_like(rows.value)
    )  # fmt: skip
    return {
        "change_error": terms["change"],
        "change_error_nothing_changes": (rows.change / model.spread).square().mean().item(),
        "reward_error": terms["reward"],
        "reward_error_mean": reward.square().mean().item(),
        "going_on_loss": terms["going_on"],
        "going_on_loss_mean": base.item(),
        "value_error": terms["value"],
        "value_error_mean": (value.square() * rows.known).mean().item(),
    }
