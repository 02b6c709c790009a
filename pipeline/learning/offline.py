"""Learning from logged experience: PPO, IMPALA or imitation, by the update step of all trainers.

A log is a TensorDict [T, S], ticks of S actors side by side: whatever the model reads, and

- `action` int64, `log_prob` float: what was done, and how likely the behaviour policy made it;
- `reward` float, `done` bool: the answer, and whether the episode ended with it;
- `truncated` bool (optional): it ended by a limit only; `action_mask` bool [T, S, A] (optional).

Returns never cross the end of an episode. What followed a truncated row, or the last row of an
unfinished episode, is not in the log: nothing is learned from such a row, and only its value flows
back.
"""

from __future__ import annotations

from typing import Literal

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from hamlet.artifacts import HamletError
from hamlet.learning.buffer import RolloutBuffer
from hamlet.learning.log import Log
from hamlet.learning.losses import (
    entropy_of,
    imitation_loss,
    impala_loss,
    normalise,
    ppo_policy_loss,
    value_loss,
    weighted_mean,
)
from hamlet.learning.precision import Precision
from hamlet.learning.returns import gae, vtrace
from hamlet.learning.rollout import learn
from hamlet.learning.update import Update
from hamlet.modules.categorical import log_prob_of, masked_logits

Objective = Literal["ppo", "impala", "imitation"]
NEEDED = ("action", "log_prob", "reward", "done")


def train_offline(
    model: nn.Module,
    logged: TensorDict,
    objective: Objective,
    log: Log,
    *,
    iterations: int,
    seed: int,
    learning_rate: float = 1e-3,
    minibatches: int = 4,
    epochs: int = 2,
    gamma: float = 0.99,
    lam: float = 0.95,
    clip: float = 0.2,
    max_kl: float = 0.05,
    entropy: float = 0.01,
    compile: bool = False,
    precision: Precision = "fp32",
) -> None:
    """Train `model` in place on a log.

    Args:
        model: maps the log's rows, TensorDict [R], to logits float [R, A] and values float [R].
        objective: `ppo` clips the ratio to the behaviour policy, so it stays within reach of the
            log and ends early at `max_kl`; `impala` corrects by V-trace and may go further;
            `imitation` clones the actions.
        iterations: passes over the log; targets are computed anew before each.

    Raises:
        HamletError: a needed entry is missing or misshapen.
    """
    check(logged)
    ended = logged["done"]
    truncated = logged.get("truncated", torch.zeros_like(ended))
    terminated = ended & ~truncated
    known = ~truncated
    known[-1] &= ended[-1]
    weight = known.float()
    generator = torch.Generator().manual_seed(seed)
    coefficient = torch.tensor(entropy)

    def judged(rows: TensorDict) -> tuple[Tensor, Tensor]:
        logits, values = model(rows)
        mask = rows.get("action_mask", None)
        return (logits.float() if mask is None else masked_logits(logits, mask)), values.float()

    def loss(batch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        logits, values = judged(batch)
        weight, log_prob = batch["weight"], log_prob_of(logits, batch["action"])
        if objective == "imitation":
            cloning, told = imitation_loss(logits, batch["action"], weight)
            fit = weighted_mean((values - batch["targets"]).square(), weight)
            return cloning + 0.5 * fit, told | {"value_loss": fit}
        if objective == "impala":
            with torch.no_grad():
                kl = weighted_mean(batch["log_prob"] - log_prob, weight)
            total, told = impala_loss(
                log_prob, values, batch["targets"], batch["advantages"], entropy_of(logits),
                weight, 0.5, coefficient,
            )  # fmt: skip
            return total, told | {"behaviour_kl": kl}
        advantages = normalise(batch["advantages"], weight)
        policy, told = ppo_policy_loss(log_prob, batch["log_prob"], advantages, weight, clip)
        fit, more = value_loss(values, batch["value"], batch["targets"], weight, clip)
        spread = weighted_mean(entropy_of(logits), weight)
        return policy + 0.5 * fit - coefficient * spread, told | more | {"entropy": spread}

    update = Update(
        loss, model.parameters(), learning_rate=learning_rate, compile=compile, precision=precision
    )
    ticks, slots = logged.batch_size
    buffer = RolloutBuffer(ticks)
    for iteration in log.steps(iterations, 0):
        with torch.no_grad():
            logits, values = (x.unflatten(0, (ticks, slots)) for x in judged(logged.flatten()))
            following = torch.cat([values[1:], torch.zeros_like(values[:1])])
            if objective == "impala":
                targets, advantages = vtrace(
                    log_prob_of(logits, logged["action"]), logged["log_prob"], logged["reward"],
                    values, following, terminated, ended, gamma, known=known,
                )  # fmt: skip
            else:
                advantages, targets = gae(
                    logged["reward"], values, following, terminated, ended, gamma, lam, known
                )
        buffer.reset()
        extra = {"weight": weight, "value": values, "targets": targets, "advantages": advantages}
        for t in range(ticks):
            row = {name: logged[name][t] for name in logged.keys()}  # noqa: SIM118
            buffer.add(row | {name: x[t] for name, x in extra.items()})
        log.record(iteration, learn(update, [buffer], epochs, minibatches, generator, max_kl))


def check(logged: TensorDict) -> None:
    """Raises HamletError, naming the entry, for a log that cannot be learnt from."""
    if len(logged.batch_size) != 2:
        raise HamletError(
            f"the log has batch size {list(logged.batch_size)}", "it must be [ticks, actors]"
        )
    for name in NEEDED:
        if name not in logged.keys():  # noqa: SIM118
            reason = " (without it no ratio to the behaviour policy is known)"
            raise HamletError(f"the log has no `{name}`{reason if name == 'log_prob' else ''}")
        if logged[name].shape != logged.batch_size:
            raise HamletError(
                f"`{name}` of the log has shape {list(logged[name].shape)}",
                f"it must be {list(logged.batch_size)}",
            )


def decisions(
    features: Tensor,
    metric_sequence: Tensor,
    seed_idx: Tensor,
    blueprint_idx: Tensor,
    returns: Tensor,
    log_prob: Tensor,
) -> TensorDict:
    """A log [1, R] of single decisions: which blueprint was given to which seed, and what it paid.

    Args:
        features: float [R, F]; metric_sequence: float [R, L, M], the L last measurements;
        seed_idx: int64 [R]; blueprint_idx: int64 [R], the action; returns: float [R], discounted
            inside the episode it came from; log_prob: float [R] of the choice when it was made.
    """
    rows = TensorDict(
        {
            "features": features,
            "metric_sequence": metric_sequence,
            "seed_idx": seed_idx,
            "action": blueprint_idx,
            "reward": returns,
            "log_prob": log_prob,
            "done": torch.ones_like(blueprint_idx, dtype=torch.bool),
        },
        batch_size=[len(blueprint_idx)],
    )
    return rows.unsqueeze(0)


class DecisionModel(nn.Module):
    """Logits over blueprints and a value, from features, a metric sequence (GRU) and the seed."""

    def __init__(self, features: int, metrics: int, seeds: int, blueprints: int, hidden: int = 64):
        super().__init__()
        self.sequence = nn.GRU(metrics, hidden, batch_first=True)
        self.seed = nn.Embedding(seeds, hidden)
        self.body = nn.Sequential(nn.Linear(features + 2 * hidden, hidden), nn.SiLU())
        self.head = nn.Linear(hidden, blueprints + 1)

    def forward(self, rows: TensorDict) -> tuple[Tensor, Tensor]:
        """Logits float [R, blueprints] and values float [R] of the rows of `decisions`."""
        _, last = self.sequence(rows["metric_sequence"])
        joined = torch.cat([rows["features"], last[0], self.seed(rows["seed_idx"])], -1)
        out = self.head(self.body(joined))
        return out[:, :-1], out[:, -1]
