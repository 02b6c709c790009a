"""Train a policy on a log: PPO, IMPALA or imitation, window by window, in constant memory."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import Field as Option
from tensordict import TensorDict
from torch import Tensor

from hamlet.artifacts import HamletError
from hamlet.device import chosen, take
from hamlet.learning.checkpoint import Checkpoint
from hamlet.learning.log import Log
from hamlet.learning.losses import (
    entropy_of,
    imitation_loss,
    impala_loss,
    normalise,
    ppo_policy_loss,
    unit_size,
    weighted_mean,
)
from hamlet.learning.returns import gae, vtrace
from hamlet.learning.update import Update, to_device
from hamlet.modules.categorical import log_prob_of
from hamlet.offline.log_store import LogStore, Windows
from hamlet.offline.model import LogPolicy
from hamlet.params import Section

Objective = Literal["ppo", "impala", "imitation"]


class OfflineParams(Section):
    """Learning from a log."""

    seed: int = Option(default=0, ge=0)
    objective: Objective = "ppo"
    recurrent: bool = Option(default=False, description="carry memory from row to row")
    hidden: int = Option(default=64, ge=4, description="width of the policy")
    steps: int = Option(default=300, ge=1, description="batches of windows")
    window: int = Option(default=64, ge=1, description="rows of an episode learned from at once")
    windows: int = Option(default=64, ge=1, description="windows in a batch")
    minibatches: int = Option(default=4, ge=1, description="parts of a batch; must divide windows")
    learning_rate: float = Option(default=1e-3, gt=0, lt=1)
    gamma: float = Option(default=0.99, ge=0, le=1)
    lam: float = Option(default=0.95, ge=0, le=1)
    clip: float = Option(default=0.2, gt=0, description="of PPO's ratio to the behaviour")
    max_kl: float = Option(
        default=0.2,
        gt=0,
        description="nats from the behaviour, of a batch; beyond it the policy is drawn back",
    )
    entropy: float = Option(default=0.003, ge=0)
    behaviour_steps: int = Option(
        default=300, ge=1, description="batches that fit the behaviour policy, where the log has "
        "no log-probabilities",
    )  # fmt: skip
    compile: bool = False
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"


def train_policy_on_log(
    store: LogStore, policy: LogPolicy, params: OfflineParams, checkpoint: Path, log: Log
) -> None:
    """Train `policy` in place on the episodes that are not held out.

    Targets never cross an episode. A window that ends within an episode is continued by the value
    of the row after it.

    Raises:
        HamletError: PPO or IMPALA without log-probabilities; windows that cannot be divided.
    """
    if params.objective != "imitation" and store.log_prob is None:
        raise HamletError(
            f"{params.objective} needs the behaviour's log-probabilities, which the log lacks",
            "estimate them first (see `estimate_behaviour`), or take `imitation`",
        )
    if params.windows % params.minibatches:
        raise HamletError(
            f"windows is {params.windows}, not a multiple of minibatches ({params.minibatches})",
            "change either",
        )
    chosen_device = chosen().device
    take(chosen_device)
    device = str(chosen_device)
    policy.to(device)
    loss = Loss(policy, params)
    update = Update(
        loss, policy.parameters(), learning_rate=params.learning_rate, compile=params.compile,
        precision=params.precision,
    )  # fmt: skip
    length = min(params.window, store.facts["lengths"]["max"])
    windows = store.windows(length, ~store.held_out())
    # Which of a batch's windows meet in a minibatch: drawn from this, so that it can go on.
    generator = torch.Generator().manual_seed(params.seed)
    saved = Checkpoint(checkpoint, {"policy": policy, "update": update, "generator": generator})
    start, _ = saved.load()
    for step in log.steps(params.steps, start):
        which = batch_of(step, params.windows, len(windows.start), params.seed)
        rows = on_device(store.read(windows, which, length), device)
        batch = targets(policy, rows, params)
        for part in torch.randperm(params.windows, generator=generator).chunk(params.minibatches):
            told = update(batch[:, part.to(device)])
        log.record(step, told)
        saved.save(step + 1)
    policy.cpu().eval()


def new_policy(store: LogStore, params: OfflineParams) -> LogPolicy:
    """An untrained policy for a log, drawn from the seed."""
    torch.manual_seed(params.seed)
    statistics, scale = store.facts["statistics"], return_scale(store, params.gamma)
    return LogPolicy(store.schema, statistics, params.hidden, params.recurrent, scale)


def return_scale(store: LogStore, gamma: float) -> float:
    """How large a return may be: the rewards' size over the steps that the discount looks ahead."""
    rows, square = store.facts["rows"], 0.0
    for at in range(0, len(store.reward), 1_000_000):
        # A final row's reward is 0.
        square += float(np.square(store.reward[at : at + 1_000_000], dtype=np.float64).sum())
    ahead = min(1 / max(1 - gamma, 1e-9), store.facts["lengths"]["mean"])
    return max((square / rows) ** 0.5 * ahead, 1e-6)


def batch_of(step: int, size: int, count: int, seed: int) -> np.ndarray:
    """int64 [size] windows of a batch: all of `count` once, in random order, then all again."""
    at = np.arange(step * size, (step + 1) * size)
    orders = {
        turn: np.random.default_rng((seed, int(turn))).permutation(count)
        for turn in np.unique(at // count)
    }
    return np.array([orders[turn][place] for turn, place in zip(at // count, at % count)])


def on_device(rows: TensorDict, device: str) -> TensorDict:
    """Rows on the device; to a GPU by pinned memory, without waiting."""
    if device == "cpu":
        return rows
    names = list(rows.keys())
    moved = to_device([rows[name] for name in names], device)
    return TensorDict(dict(zip(names, moved)), batch_size=rows.batch_size)


@torch.no_grad()
def targets(policy: LogPolicy, rows: TensorDict, params: OfflineParams) -> TensorDict:
    """The rows with `targets` and `advantages` [T, W] of their values, and `allowed` [T, W].

    `allowed` is 1 if the policy may improve on these rows, 0 if it is too far from the behaviour
    and goes back: without a pull the optimizer's momentum would carry it on.
    """
    logits, values = policy(rows)
    following = torch.cat([values[1:], torch.zeros_like(values[:1])])
    known, terminated = rows["known"], rows["terminated"]
    log_prob = log_prob_of(logits, rows["action"])
    if params.objective == "impala":
        goals, advantages = vtrace(
            log_prob, rows["log_prob"], rows["reward"], values, following, terminated, terminated,
            params.gamma, known=known,
        )  # fmt: skip
    else:
        advantages, goals = gae(
            rows["reward"], values, following, terminated, terminated, params.gamma, params.lam,
            known,
        )  # fmt: skip
    if "log_prob" in rows.keys():  # noqa: SIM118
        near = (divergence(log_prob, rows["log_prob"], known.float()) <= params.max_kl).float()
    else:
        near = torch.ones((), device=values.device)
    extra = {"targets": goals, "advantages": advantages, "allowed": near.expand_as(values)}
    return rows.clone(recurse=False).update(extra)


def divergence(log_prob: Tensor, behaviour: Tensor, weight: Tensor) -> Tensor:
    """Estimate of KL(behaviour, policy) in nats from the behaviour's actions, never negative."""
    log_ratio = (log_prob - behaviour).clamp(-20, 20)
    return weighted_mean(log_ratio.exp() - 1 - log_ratio, weight)


class Loss:
    """The loss of one minibatch of windows [T, W], see `targets`."""

    def __init__(self, policy: LogPolicy, params: OfflineParams) -> None:
        self.policy, self.params = policy, params
        self.coefficient = torch.tensor(params.entropy)

    def __call__(self, batch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        params = self.params
        features = self.policy.features(batch)
        logits, values = self.policy.heads(features, batch.get("action_mask", None))
        if params.objective == "imitation":  # what is cloned must not give way to values
            values = self.policy.value_of(features.detach())
        log_prob = log_prob_of(logits, batch["action"])
        weight = batch["known"].float()
        spread = weighted_mean(entropy_of(logits), batch["acted"].float())
        fit = weighted_mean(((values - batch["targets"]) / self.policy.scale).square(), weight)
        told = {"value_loss": fit, "entropy": spread}
        if params.objective == "imitation":
            cloning, more = imitation_loss(logits, batch["action"], batch["acted"].float())
            return cloning + 0.5 * fit, told | more | {"imitation_loss": cloning}
        told["behaviour_kl"] = divergence(log_prob.detach(), batch["log_prob"], weight)
        told["moving"] = batch["allowed"].mean()
        moving = weight * batch["allowed"]
        back = weighted_mean(-log_prob, weight * (1 - batch["allowed"]))
        if params.objective == "impala":
            advantages = unit_size(batch["advantages"], weight, 1e-6 * self.policy.scale)
            improve = impala_loss(log_prob, advantages, moving)
        else:
            advantages = normalise(batch["advantages"], weight)
            improve, more = ppo_policy_loss(
                log_prob, batch["log_prob"], advantages, moving, params.clip
            )
            told["clip_fraction"] = more["clip_fraction"]
        chance = weighted_mean(entropy_of(logits), moving)
        loss = improve + back + 0.5 * fit - self.coefficient * chance
        return loss, told | {"policy_loss": improve}


def estimate_behaviour(store: LogStore, params: OfflineParams, checkpoint: Path, log: Log) -> None:
    """Fit a policy to what was done and keep its log-probabilities with the store."""
    fitted = params.model_copy(update={"objective": "imitation", "steps": params.behaviour_steps})
    policy = new_policy(store, fitted)
    train_policy_on_log(store, policy, fitted, checkpoint, log)
    found = np.zeros(len(store.action), np.float32)
    for windows, rows in whole_episodes(store, np.ones(store.episodes, bool)):
        with torch.no_grad():
            logits, _ = policy(rows)
        log_prob = log_prob_of(logits, rows["action"]).numpy()
        for w, (start, stop) in enumerate(zip(windows.start, windows.stop)):
            found[start:stop] = log_prob[: stop - start, w]
    store.save_estimate(found)


def whole_episodes(store: LogStore, episodes: np.ndarray, rows: int = 32_768):
    """Yield (windows, rows [T, W]) of whole episodes (bool [E]), about `rows` at a time."""
    longest = int(store.lengths().max())
    windows = store.windows(longest, episodes)
    lengths = windows.stop - windows.start
    order = np.argsort(lengths, kind="stable")
    at = 0
    while at < len(order):
        size = 1
        while at + size < len(order) and (lengths[order[at + size]] + 1) * (size + 1) <= rows:
            size += 1
        which = order[at : at + size]
        yield (
            Windows(*(x[which] for x in windows)),
            store.read(windows, which, int(lengths[which].max())),
        )
        at += size
