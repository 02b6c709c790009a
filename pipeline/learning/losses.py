"""Pure losses: tensors in, a scalar and its diagnostics out. Coefficients that anneal are tensors.

Every loss takes log-probabilities, so that a flat policy, a hierarchical one (one call per level)
and a scorer of proof states share it. `weight` [.] is 1 where a row counts, else 0.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from hamlet.learning.distributed import all_reduce_sum
from hamlet.modules.categorical import log_prob_of


def entropy_of(logits: Tensor) -> Tensor:
    """float [.] entropy in nats; entries of probability 0 contribute 0."""
    log_prob = logits.log_softmax(-1)
    probability = log_prob.exp()
    return -torch.where(probability > 0, probability * log_prob, 0.0).sum(-1)


def cross_entropy(logits: Tensor, index: Tensor) -> Tensor:
    """float [.] nats of `index` int64 [.] under `logits` [., C].

    On the CPU PyTorch's own; of that CUDA has no deterministic kernel for more than one dimension.
    """
    if logits.device.type == "cpu":
        return F.cross_entropy(logits.movedim(-1, 1), index, reduction="none")
    return -log_prob_of(logits.float(), index)


def weighted_mean(x: Tensor, weight: Tensor) -> Tensor:
    """Mean of x [.] over the rows of all ranks (see `distributed`)."""
    summed, count = all_reduce_sum((x * weight).sum(), weight.sum())
    return summed / count.clamp_min(1.0)


def weighted_means(terms: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """`weighted_mean` of each (x, weight), for all of which ranks send one message."""
    sums = all_reduce_sum(
        *(s for x, weight in terms.values() for s in ((x * weight).sum(), weight.sum()))
    )
    pairs = zip(terms, sums[::2], sums[1::2], strict=True)
    return {name: summed / count.clamp_min(1.0) for name, summed, count in pairs}


def weighted_terms(losses: Mapping[str, Tensor], weights: Mapping[str, float]) -> dict[str, Tensor]:
    """The terms of a loss, each times its weight; the loss is their sum.

    Raises:
        ValueError: a loss without a weight, or a weight without a loss.
    """
    if losses.keys() != weights.keys():
        unknown = sorted(losses.keys() ^ weights.keys())
        raise ValueError(f"loss terms and their weights differ in {', '.join(unknown)}")
    return {name: loss * weights[name] for name, loss in losses.items()}


def normalise(advantages: Tensor, weight: Tensor) -> Tensor:
    """Zero mean and unit deviation over the rows that count."""
    mean = weighted_mean(advantages, weight)
    variance = weighted_mean((advantages - mean).square(), weight)
    return (advantages - mean) * (variance + 1e-8).rsqrt()


def ppo_policy_loss(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, weight: Tensor, clip: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate (Schulman et al. 2017, eq. 7) with approximate KL (Schulman 2020, k3)."""
    log_ratio = log_prob - old_log_prob
    ratio = log_ratio.exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    with torch.no_grad():
        divergence, clipped = ratio - 1 - log_ratio, ((ratio - 1).abs() > clip).float()
    means = weighted_means(
        {
            "approx_kl": (divergence, weight),
            "clip_fraction": (clipped, weight),
            "surrogate": (surrogate, weight),
        }
    )
    return -means.pop("surrogate"), means


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, weight: Tensor, clip: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Half squared error, pessimistic over a clipped change (OpenAI baselines, ppo2)."""
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    error = torch.maximum((values - returns).square(), (clipped - returns).square())
    with torch.no_grad():
        mean = weighted_mean(returns, weight)
        spread, missed = (returns - mean).square(), (returns - values).square()
    means = weighted_means(
        {"variance": (spread, weight), "unexplained": (missed, weight), "error": (error, weight)}
    )
    explained = 1 - means["unexplained"] / means["variance"].clamp_min(1e-8)
    return 0.5 * means["error"], {"explained_variance": explained}


def unit_size(advantages: Tensor, weight: Tensor, least: Tensor | float = 1e-6) -> Tensor:
    """Advantages divided by their root mean square over the rows that count, at least `least`.

    Of one size whatever the rewards' unit, and not centred: V-trace has its baseline.
    """
    return advantages / weighted_mean(advantages.square(), weight).sqrt().clamp(min=least)


def impala_loss(log_prob: Tensor, advantages: Tensor, weight: Tensor) -> Tensor:
    """Policy gradient on V-trace advantages (Espeholt et al. 2018, section 4.2)."""
    return -weighted_mean(log_prob * advantages, weight)


def imitation_loss(
    logits: Tensor, index: Tensor, weight: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Behavioural cloning: cross-entropy with the expert's choice, and the agreement with it."""
    with torch.no_grad():
        agrees = (logits.argmax(-1) == index).float()
    means = weighted_means(
        {"loss": (-log_prob_of(logits, index), weight), "agreement": (agrees, weight)}
    )
    return means.pop("loss"), means


def told_loss(logits: Tensor, odds: Tensor, weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Distillation: cross-entropy with the teacher's odds float32 [., G], and how often the
    likeliest choice is the teacher's (Hinton, Vinyals and Dean 2015, at one temperature)."""
    with torch.no_grad():
        agrees = (logits.argmax(-1) == odds.argmax(-1)).float()
    missed = -(odds * logits.log_softmax(-1)).sum(-1)
    means = weighted_means({"loss": (missed, weight), "agreement": (agrees, weight)})
    return means.pop("loss"), means
