"""Train module B on the frozen perception's outputs, fed its own predictions over a few ticks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn import functional as F

from hamlet.learning import distributed
from hamlet.learning.checkpoint import Checkpoint
from hamlet.learning.float8 import in_precision
from hamlet.learning.log import Log
from hamlet.learning.losses import weighted_means, weighted_terms
from hamlet.learning.returns import discounted
from hamlet.learning.sequences import sent
from hamlet.learning.sharded import Shared, shard
from hamlet.learning.update import Update
from hamlet.modules.contracts import TownShape
from hamlet.modules.world_model import ERROR_UNIT, WorldModel
from hamlet.params import WorldModelParams
from hamlet.profiling import region

REPORT_TICKS = (1, 5, 15, 50)
INPUTS = ("mean", "log_std", "known_state", "action")
IMPORTANCE = {
    "mean": 1.0, "log_std": 1.0, "known_state": 4.0, "reward": 10.0, "continue": 1.0, "value": 1.0,
    "legal": 1.0, "free": 0.3, "error": 0.3,
}  # fmt: skip
"""Weights of the terms of the loss."""
SCALED = ("mean", "log_std", "known_state", "continue", "value", "legal", "free", "log_error")


def experience(data: TensorDict, beliefs: TensorDict, gamma: float) -> TensorDict:
    """What the world model learns from, [T, B, N]: beliefs, own state, actions and outcomes.

    `value` is the discounted return that the recorded behaviour went on to get; the record's end
    is continued at each agent's mean reward.
    """
    reward, done = data["reward"], data["done"]
    mean_reward = (reward * data["alive"]).sum() / data["alive"].sum().clamp_min(1)
    last = mean_reward / (1 - gamma) * (~done[-1])
    returns = discounted(reward, done, gamma, last)
    following = torch.cat([returns[1:], last.unsqueeze(0)]) * ~done
    return TensorDict(
        {
            "mean": beliefs["mean"],
            "log_std": beliefs["log_std"],
            "known_state": data["self_state"],
            "action": data["action"],
            "legal": data["action_mask"],
            "reward": reward,
            "done": done,
            "alive": data["alive"],
            "value": following,
        },
        batch_size=data["action"].shape,
    )


def windows(
    experience: TensorDict,
    length: int,
    count: int,
    worlds: Tensor,
    rng: torch.Generator,
    which: Tensor | None = None,
) -> TensorDict:
    """TensorDict [length + 1, count]: random windows that begin with a living agent.

    Args:
        which: int64 [.] read only these of the windows that were drawn.
    """
    ticks, _, agents = experience.shape
    start = torch.randint(ticks - length, (count,), generator=rng)
    world = worlds[torch.randint(len(worlds), (count,), generator=rng)]
    agent = torch.randint(agents, (count,), generator=rng)
    if which is not None:
        start, world, agent = start[which], world[which], agent[which]
    t = start.unsqueeze(0) + torch.arange(length + 1).unsqueeze(1)
    rows = (t, world.expand_as(t), agent.expand_as(t))
    return experience[sent(rows, experience["action"].device)]


def targets(window: TensorDict, t: int) -> dict[str, Tensor]:
    """What came of the action at row t, by the names of `Prediction`."""
    return {
        "mean": window["mean"][t + 1],
        "log_std": window["log_std"][t + 1],
        "known_state": window["known_state"][t + 1],
        "reward": window["reward"][t],
        "continue_logit": (~window["done"][t]).float(),
        "value": window["value"][t],
        "legal_logit": window["legal"][t + 1].float(),
    }


def world_model_loss(model: WorldModel, window: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of all members over windows [H + 1, E, count], each fed its own predictions.

    Whether a place that is used is free for the agent is often as good as a coin's toss. The rules
    are learned from how it fell; its odds, and the error to be expected without knowing it, apart.
    """
    blocked = model.shape.self_names.index("blocked")
    interact = model.shape.action_names.index("INTERACT")
    unit = dict(zip(SCALED, model.scale.split(model.sizes), strict=True))
    known_unit = unit["known_state"].clamp_min(ERROR_UNIT)
    mean, log_std = window["mean"][0], window["log_std"][0]
    known = window["known_state"][0]
    weight = window["alive"][0].float()
    sums: dict[str, Tensor] = {}
    horizon = window.shape[0] - 1
    bce = F.binary_cross_entropy_with_logits
    for t in range(horizon):
        truth = targets(window, t)
        free = 1 - truth["known_state"][..., blocked]
        p, blind = model.members_step(mean, log_std, known, window["action"][t], free)
        survived = weight * truth["continue_logit"]
        places, latent = (((p.mean - truth["mean"]) / unit["mean"]).square()).split(
            [model.places, model.latent], -1
        )
        spread = (p.log_std - truth["log_std"])[..., : model.places] / unit["log_std"]
        off = (p.known_state - truth["known_state"]).abs()
        before = (known - window["known_state"][t]).abs()
        after = (blind.known_state - truth["known_state"]).abs()
        added = (after - before)[..., : model.shape.num_meters].mean(-1).detach().clamp_min(0)
        tries = weight * (window["action"][t] == interact)
        # The likelihood of an error that is distributed exponentially.
        likelihood = added / ERROR_UNIT * (-p.log_error).exp() + p.log_error
        survival = bce(p.continue_logit, truth["continue_logit"], reduction="none")
        legality = bce(p.legal_logit, truth["legal_logit"], reduction="none").mean(-1)
        parts = {
            # what the latent holds is mostly noise of the moment
            "mean": (places.mean(-1) + 0.1 * latent.mean(-1), survived),
            "log_std": (spread.square().mean(-1), survived),
            "known_state": ((off / known_unit).mean(-1), survived),
            "reward": ((p.reward - truth["reward"]).abs(), weight),
            "continue": (survival, weight),
            "value": (((p.value - truth["value"]) / unit["value"]).square(), weight),
            "legal": (legality, survived),
            "free": (bce(p.free_logit, free, reduction="none"), tries),
            "error": (likelihood, survived),
        }
        for name, value in weighted_means(parts).items():
            sums[name] = sums.get(name, 0.0) + value / horizon
        mean, log_std, known, weight = p.mean, p.log_std, p.known_state, survived
    sums = weighted_terms(sums, IMPORTANCE)
    return torch.stack(list(sums.values())).sum(), sums


def output_scale(model: WorldModel, window: TensorDict) -> Tensor:
    """Deviation of every number the networks say, over the first ticks of windows [2, count]."""
    truth = targets(window, 0)
    ok = (window["alive"][0] & ~window["done"][0]).nonzero().squeeze(1)
    spreads = (truth["log_std"] - window["log_std"][0])[:, : model.places]
    found = {
        "mean": (truth["mean"] - window["mean"][0])[ok].std(0),
        "log_std": spreads[ok].std(0),
        "known_state": (truth["known_state"] - window["known_state"][0])[ok].std(0),
        "value": window["value"][0][ok].std().unsqueeze(0),
    }
    parts = [
        found.get(name, torch.ones(size, device=ok.device))
        for name, size in zip(SCALED, model.sizes, strict=True)
    ]
    return torch.cat(parts).clamp_min(1e-3)


def train_world_model(
    experience: TensorDict,
    worlds: Tensor,
    shape: TownShape,
    latent: int,
    params: WorldModelParams,
    seed: int,
    checkpoint: Path,
    log: Log,
) -> WorldModel:
    """Train on the given worlds of `experience` [T, B, N]."""
    torch.manual_seed(seed)
    device = experience["action"].device
    model = WorldModel(shape, latent, params.hidden, params.members)
    rng = torch.Generator().manual_seed(seed)
    model.scale.copy_(output_scale(model, windows(experience, 1, 8192, worlds, rng)))
    shared = params.shard and distributed.ranks() > 1
    model = shard(model, model.layers, "members_step", device) if shared else model.to(device)

    distributed.local_count(params.batch, "params.yaml: world_model.batch")
    drawn = torch.arange(params.members * params.batch).view(params.members, params.batch)
    own = distributed.local_shard(drawn, 1)

    def loss(window: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        return world_model_loss(model, window)

    loss_to_take, precision = in_precision(loss, params.precision, model.parameters(), str(device))
    update = Update(
        loss_to_take,
        model.parameters(),
        learning_rate=params.learning_rate,
        max_grad_norm=10.0,
        precision=precision,
    )
    kept = Shared(model) if shared else model
    saved = Checkpoint(checkpoint, {"model": kept, "update": update, "rng": rng})
    start, _ = saved.load()
    for step in log.steps(params.steps, start):
        update.set_learning_rate(params.learning_rate * (1 - step / params.steps))
        with region("data"):
            # Fed its own predictions before it knows the rules of one tick, it would learn wrong
            # ones: what it thinks is the second tick of a use is the third.
            horizon = params.horizon if 5 * step >= 4 * params.steps else 1
            batch = windows(experience, horizon, drawn.numel(), worlds, rng, own.flatten())
            batch = TensorDict(
                {k: v.unflatten(1, own.shape) for k, v in batch.items()},
                batch_size=[horizon + 1, *own.shape],
            )
        log.record(step, update(batch))
        saved.save(step + 1)
    if shared:
        state = kept.state_dict()
        model = WorldModel(shape, latent, params.hidden, params.members).to(device)
        model.load_state_dict(state)
    return model.eval()


def calibrate(model: WorldModel, experience: TensorDict, worlds: Tensor, seed: int) -> None:
    """Set the unit of confidence and the limit of novelty on held-out worlds."""
    rng = torch.Generator().manual_seed(seed)
    window = windows(experience, 1, 8192, worlds, rng)
    window = window[:, window["alive"][0]]
    model.error_scale.fill_(ERROR_UNIT)
    with torch.no_grad():
        *_, disagreement, confidence, _ = model(
            window["mean"][0], window["log_std"][0], window["known_state"][0], window["action"][0]
        )
    expected_error = -ERROR_UNIT * confidence.log()
    model.error_scale.copy_(4 * expected_error.mean())
    model.novel_threshold.copy_(disagreement.quantile(0.995))


def auroc(score: Tensor, positive: Tensor) -> float:
    """Probability that a positive outranks a negative (Mann-Whitney U); 0.5 if one is absent."""
    ranks = score.argsort().argsort().double() + 1
    p = positive.sum().item()
    n = positive.numel() - p
    if not p or not n:
        return 0.5
    return ((ranks[positive].sum().item() - p * (p + 1) / 2) / (p * n)) if p and n else 0.5


def r_squared(predicted: Tensor, truth: Tensor) -> float:
    residual = (truth - predicted).square().mean()
    return (1 - residual / truth.var(unbiased=False).clamp_min(1e-12)).item()


def correlation(a: Tensor, b: Tensor) -> float:
    return torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1].nan_to_num().item()


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's, ties in any order."""
    return correlation(a.argsort().argsort(), b.argsort().argsort())


@torch.no_grad()
def evaluate_world_model(
    model: Callable[..., Sequence[Tensor]],
    experience: TensorDict,
    worlds: Tensor,
    mortal: Tensor,
    meters: int,
    gamma: float,
    seed: int,
) -> dict[str, float]:
    """Report on held-out worlds, one tick and open-loop: predictions fed back, recorded actions.

    Whether survival is foreseen is measured in the worlds `mortal`, where agents do die; `meters`
    is how many there are.
    """
    rng = torch.Generator().manual_seed(seed)
    result: dict[str, float] = {}
    now = windows(experience, 1, 16384, worlds, rng)[0]
    now = now[now["alive"]]
    _, _, _, reward, _, value, *_ = model(*(now[key] for key in INPUTS))
    result["reward_r2"] = r_squared(reward, now["reward"])
    result["reward_error"] = (reward - now["reward"]).abs().mean().item()
    result["value_explained_variance"] = r_squared(value, now["value"])
    end = windows(experience, 1, 16384, mortal, rng)[0]
    end = end[end["alive"]]
    *_, novel = outcome = model(*(end[key] for key in INPUTS))
    cont = outcome[4]
    result["continue_auroc"] = auroc(cont, ~end["done"])
    result["continue_brier"] = (cont - (~end["done"]).float()).square().mean().item()

    result["novel_fraction_mortal"] = novel.float().mean().item()

    window = windows(experience, max(REPORT_TICKS), 4096, worlds, rng)
    window = window[:, window["alive"][0]]
    mean, log_std, known = (window[key][0] for key in ("mean", "log_std", "known_state"))
    alive = torch.ones_like(window["alive"][0])
    start = known[:, :meters]
    drift = (window["known_state"][1] - window["known_state"][0])[~window["done"][0]]
    drift = drift[:, :meters].mean(0)
    trust = torch.ones(len(alive), device=alive.device)
    lives, imagined, real = trust, torch.zeros_like(trust), torch.zeros_like(trust)
    for t in range(max(REPORT_TICKS)):
        mean, log_std, known, reward, cont, _, _, _, confidence, _ = model(
            mean, log_std, known, window["action"][t]
        )
        imagined = imagined + gamma**t * lives * reward
        real = real + gamma**t * alive * window["reward"][t]
        trust, lives, alive = trust * confidence, lives * cont, alive & ~window["done"][t]
        k = t + 1
        if k in REPORT_TICKS:
            truth = window["known_state"][k][alive][:, :meters]
            error = (known[alive][:, :meters] - truth).abs().mean(-1)
            persistence = (start[alive] - truth).abs().mean()
            drifted = ((start[alive] + k * drift).clamp(0, 1) - truth).abs().mean()
            result[f"meter_error_{k}"] = error.mean().item()
            result[f"meter_error_{k}_over_persistence"] = (error.mean() / persistence).item()
            result[f"meter_error_{k}_over_drift"] = (error.mean() / drifted).item()
            doubt = 1 - trust ** (1 / k)
            result[f"doubt_error_correlation_{k}"] = correlation(doubt[alive], error)
            result[f"return_rank_correlation_{k}"] = rank_correlation(imagined, real)
            first = window["reward"][0]
            result[f"return_rank_correlation_{k}_persistence"] = rank_correlation(first, real)
    return result
