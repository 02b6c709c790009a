"""Train module B on the frozen perception's outputs, fed its own predictions over a few ticks."""

from __future__ import annotations

from pathlib import Path

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn import functional as F

from pipeline.learning.checkpoint import Checkpoint
from pipeline.learning.log import Log
from pipeline.learning.losses import weighted_mean
from pipeline.learning.returns import discounted
from pipeline.learning.update import Update
from pipeline.modules.contracts import METERS, TownShape
from pipeline.modules.world_model import Prediction, WorldModel
from pipeline.params import WorldModelParams
from pipeline.profiling import region

REPORT_TICKS = (1, 5, 15)


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


def windows(experience: TensorDict, length: int, count: int, worlds: Tensor, rng: torch.Generator):
    """TensorDict [length + 1, count]: random windows that begin with a living agent."""
    ticks, _, agents = experience.shape
    start = torch.randint(ticks - length, (count,), generator=rng)
    world = worlds[torch.randint(len(worlds), (count,), generator=rng)]
    agent = torch.randint(agents, (count,), generator=rng)
    t = start.unsqueeze(0) + torch.arange(length + 1).unsqueeze(1)
    return experience[t, world.expand_as(t), agent.expand_as(t)]


def targets(window: TensorDict, t: int) -> Prediction:
    """What came of the action at row t."""
    return Prediction(
        mean=window["mean"][t + 1],
        log_std=window["log_std"][t + 1],
        known_state=window["known_state"][t + 1],
        reward=window["reward"][t],
        continue_logit=(~window["done"][t]).float(),
        value=window["value"][t],
        legal_logit=window["legal"][t + 1].float(),
    )


def world_model_loss(model: WorldModel, window: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of all members over windows [H + 1, E, count], each fed its own predictions."""
    scale = dict(
        zip(
            ("mean", "log_std", "known_state", "reward", "_", "value"),
            model.scale[: -model.sizes[-1]].split(model.sizes[:-1]),
            strict=True,
        )
    )
    mean, log_std = window["mean"][0], window["log_std"][0]
    known = window["known_state"][0]
    weight = window["alive"][0].float()
    sums: dict[str, Tensor] = {}
    horizon = window.shape[0] - 1
    for t in range(horizon):
        p = model.members_step(mean, log_std, known, window["action"][t])
        truth = targets(window, t)
        survived = weight * truth.continue_logit

        def squared(name: str, p: Prediction = p, truth: Prediction = truth) -> Tensor:
            error = getattr(p, name) - getattr(truth, name)
            if name == "log_std":
                error = error[..., : model.places]
            error = (error / scale[name]).square()
            if name == "mean":  # what the latent holds is mostly noise of the moment
                places, latent = error.split([model.places, model.latent], -1)
                return places.mean(-1) + 0.1 * latent.mean(-1)
            return error if name in ("reward", "value") else error.mean(-1)

        bce = F.binary_cross_entropy_with_logits
        parts = {
            "mean": weighted_mean(squared("mean"), survived),
            "log_std": weighted_mean(squared("log_std"), survived),
            "known_state": weighted_mean(squared("known_state"), survived) * 4,
            "reward": weighted_mean(squared("reward"), weight),
            "continue": weighted_mean(
                bce(p.continue_logit, truth.continue_logit, reduction="none"), weight
            ),
            "value": weighted_mean(squared("value"), weight),
            "legal": weighted_mean(
                bce(p.legal_logit, truth.legal_logit, reduction="none").mean(-1), survived
            ),
        }
        for name, value in parts.items():
            sums[name] = sums.get(name, torch.zeros(())) + value / horizon
        mean, log_std, known, weight = p.mean, p.log_std, p.known_state, survived
    return torch.stack(list(sums.values())).sum(), sums


def output_scale(model: WorldModel, window: TensorDict) -> Tensor:
    """Deviation of every predicted number over the first ticks of windows [2, count]."""
    truth = targets(window, 0)
    ok = (window["alive"][0] & ~window["done"][0]).nonzero().squeeze(1)
    parts = [
        (truth.mean - window["mean"][0])[ok].std(0),
        (truth.log_std - window["log_std"][0])[ok][:, : model.places].std(0),
        (truth.known_state - window["known_state"][0])[ok].std(0),
        window["reward"][0][ok].std().unsqueeze(0),
        torch.ones(1),
        window["value"][0][ok].std().unsqueeze(0),
        torch.ones(model.sizes[-1]),
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
    model = WorldModel(shape, latent, params.hidden, params.members)
    rng = torch.Generator().manual_seed(seed)
    model.scale.copy_(output_scale(model, windows(experience, 1, 8192, worlds, rng)))

    def loss(window: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        return world_model_loss(model, window)

    update = Update(loss, model.parameters(), learning_rate=params.learning_rate)
    saved = Checkpoint(checkpoint, {"model": model, "update": update, "rng": rng})
    start, _ = saved.load()
    for step in log.steps(params.steps, start):
        update.set_learning_rate(params.learning_rate * (1 - step / params.steps))
        with region("data"):
            batch = windows(experience, params.horizon, params.batch * params.members, worlds, rng)
            per_member = (params.members, params.batch)
            batch = TensorDict(
                {k: v.unflatten(1, per_member) for k, v in batch.items()},
                batch_size=[params.horizon + 1, *per_member],
            )
        log.record(step, update(batch))
        saved.save(step + 1)
    return model.eval()


def calibrate(model: WorldModel, experience: TensorDict, worlds: Tensor, seed: int) -> None:
    """Set the unit of confidence and the limit of novelty from disagreement on held-out worlds."""
    rng = torch.Generator().manual_seed(seed)
    window = windows(experience, 1, 8192, worlds, rng)
    window = window[:, window["alive"][0]]
    with torch.no_grad():
        disagreement = model(
            window["mean"][0], window["log_std"][0], window["known_state"][0], window["action"][0]
        )[7]
    model.disagreement_scale.copy_(4 * disagreement.median())
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


@torch.no_grad()
def evaluate_world_model(
    model: WorldModel, experience: TensorDict, worlds: Tensor, mortal: Tensor, seed: int
) -> dict[str, float]:
    """Open-loop report on held-out worlds: predictions fed back over 1, 5 and 15 ticks.

    Whether survival is foreseen is measured in the worlds `mortal`, where agents do die.
    """
    rng = torch.Generator().manual_seed(seed)
    window = windows(experience, max(REPORT_TICKS), 4096, worlds, rng)
    mean, log_std, known = (window[key][0] for key in ("mean", "log_std", "known_state"))
    alive = window["alive"][0]
    start = known[:, :METERS]
    drift = (window["known_state"][1] - window["known_state"][0])[alive & ~window["done"][0]]
    drift = drift[:, :METERS].mean(0)
    result: dict[str, float] = {}
    doubt = torch.zeros(len(alive))
    for t in range(max(REPORT_TICKS)):
        mean, log_std, known, reward, cont, value, _, disagreement, _, _ = model(
            mean, log_std, known, window["action"][t]
        )
        doubt = doubt + disagreement
        if t == 0:
            here = alive
            result["reward_r2"] = r_squared(reward[here], window["reward"][0][here])
            result["value_explained_variance"] = r_squared(value[here], window["value"][0][here])
        alive = alive & ~window["done"][t]
        k = t + 1
        if k in REPORT_TICKS:
            truth = window["known_state"][k][alive][:, :METERS]
            error = (known[alive][:, :METERS] - truth).abs().mean(-1)
            persistence = (start[alive] - truth).abs().mean()
            drifted = ((start[alive] + k * drift).clamp(0, 1) - truth).abs().mean()
            result[f"meter_error_{k}"] = error.mean().item()
            result[f"meter_error_{k}_over_persistence"] = (error.mean() / persistence).item()
            result[f"meter_error_{k}_over_drift"] = (error.mean() / drifted).item()
            result[f"doubt_error_correlation_{k}"] = correlation(doubt[alive], error)
    end = windows(experience, 1, 16384, mortal, rng)[0]
    end = end[end["alive"]]
    cont = model(end["mean"], end["log_std"], end["known_state"], end["action"])[4]
    result["continue_auroc"] = auroc(cont, ~end["done"])
    result["continue_brier"] = (cont - (~end["done"]).float()).square().mean().item()
    return result
