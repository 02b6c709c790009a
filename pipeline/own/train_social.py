"""Train module C on how the agents play now: what each of the others does next."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from hamlet.learning.checkpoint import Checkpoint
from hamlet.learning.log import Log
from hamlet.learning.losses import weighted_mean
from hamlet.learning.update import Update
from hamlet.modules.categorical import log_prob_of
from hamlet.own.data import held_out
from hamlet.own.params import SocialParams
from hamlet.plain.social import Social
from hamlet.worlds.contract import WorldShape


def others_of(x: Tensor, agents: int) -> Tensor:
    """[T, L * N] -> [T, L * N, N - 1]: what the others of each slot's lane have, by their slots."""
    t, s = x.shape
    everyone = x.unflatten(1, (s // agents, agents))
    order = torch.tensor([[j for j in range(agents) if j != i] for i in range(agents)])
    return everyone[:, :, order].reshape(t, s, agents - 1)


def train_social(
    shape: WorldShape,
    data: Mapping[str, Tensor],
    params: SocialParams,
    seed: int,
    checkpoint: Path,
    log: Log,
) -> tuple[Social, dict[str, float]]:
    """A new module C, and how well it tells held-out lanes' next actions.

    Args:
        data: features, belief [T, S, .], action int64, alive bool [T, S] of the policy's own play.
    """
    torch.manual_seed(seed)
    n = shape.num_agents
    rows = {
        "features": data["features"],
        "belief": data["belief"],
        "does": others_of(data["action"], n),
        "there": others_of(data["alive"], n) & data["alive"].unsqueeze(-1),
    }
    out = held_out(shape, data["action"].shape[1])
    own, judged = ({k: x[:, part].flatten(0, 1) for k, x in rows.items()} for part in (~out, out))
    model = Social(
        own["features"].shape[1], own["belief"].shape[1], n - 1, shape.num_actions, params.hidden
    )

    def loss(chosen: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        part = {name: x[chosen] for name, x in own.items()}
        logits = model(part["features"], part["belief"])
        nats = weighted_mean(-log_prob_of(logits, part["does"]), part["there"].float())
        return nats, {"nats": nats.detach()}

    update = Update(loss, model.parameters(), learning_rate=params.learning_rate)
    generator = torch.Generator().manual_seed(seed)
    saved = Checkpoint(checkpoint, {"model": model, "update": update, "generator": generator})
    for step in log.steps(params.steps, saved.load()[0]):
        update.set_learning_rate(params.learning_rate * (1 - 0.9 * step / params.steps))
        chosen = torch.randint(len(own["does"]), (params.batch,), generator=generator)
        log.record(step, update(chosen))
        saved.save(step + 1)
    return model.eval(), judge_social(model.eval(), own, judged, shape.num_actions)


@torch.no_grad()
def judge_social(
    model: Social, known: Mapping[str, Tensor], judged: Mapping[str, Tensor], actions: int
) -> dict[str, float]:
    """Accuracy and nats on judged rows, beside each other agent's commonest action and its odds
    among the known rows."""
    there = judged["there"].float()
    logits = model(judged["features"], judged["belief"])
    right = (logits.argmax(-1) == judged["does"]).float()
    does = torch.nn.functional.one_hot(known["does"], actions).float()
    counts = (does * known["there"].unsqueeze(-1)).sum(0) + 1  # [M, A]
    odds = (counts / counts.sum(-1, keepdim=True)).log().expand(*judged["does"].shape, actions)
    return {
        "accuracy": weighted_mean(right, there).item(),
        "accuracy_commonest": weighted_mean(
            (odds.argmax(-1) == judged["does"]).float(), there
        ).item(),
        "nats": weighted_mean(-log_prob_of(logits, judged["does"]), there).item(),
        "nats_commonest": weighted_mean(-log_prob_of(odds, judged["does"]), there).item(),
    }
