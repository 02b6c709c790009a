"""Judge a policy on the held-out episodes of its log, and say whether it may be published."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from pydantic import Field as Option

from hamlet.artifacts import HamletError
from hamlet.learning.losses import entropy_of
from hamlet.modules.categorical import log_prob_of
from hamlet.offline.estimates import DRAWS, LeastSquaresQ, ReturnSums, draws_of, estimates
from hamlet.offline.log_store import LogStore
from hamlet.offline.model import LogPolicy
from hamlet.offline.train import whole_episodes
from hamlet.params import Section

Q_BLOCKS, RETURN_BLOCKS, Q_DRAWS = 40, 1_000, 100
Q_FEATURES = 32  # at most; the main directions of the policy's own features


class GateParams(Section):
    """What a policy must show before it is published."""

    min_improvement: float | None = Option(
        default=0.0, description="over the behaviour's return: the lower end of the interval",
    )  # fmt: skip
    min_effective_episodes: float = Option(
        default=10.0, description="that the importance weights leave of the held-out ones"
    )
    min_entropy: float = Option(default=0.0, ge=0, description="nats, mean over the states")
    max_behaviour_kl: float = Option(default=1.0, gt=0, description="nats from the behaviour")
    max_loss: float = Option(default=3.0, gt=0, description="cross-entropy of what was done, nats")


@torch.no_grad()
def judge(store: LogStore, policy: LogPolicy, gamma: float, seed: int) -> dict[str, Any]:
    """Estimates of the policy's return and what else the gate asks, from held-out episodes.

    Q is fitted on the episodes that the policy learned from, the estimates are of the others. An
    episode that was cut counts until there, for the behaviour as for the policy.

    Raises:
        HamletError: too few episodes, or no log-probabilities.
    """
    held_out = store.held_out()
    if held_out.sum() < 2:
        raise HamletError(
            f"the log has {store.episodes} episodes, of which {held_out.sum()} are held out",
            "log at least 10 episodes",
        )
    if store.log_prob is None:
        raise HamletError(
            "the log has no log-probabilities", "train on it first: they are estimated"
        )
    policy.eval()
    project = _projection(store, policy, ~held_out)
    fitted = _fit_q(store, policy, ~held_out, project, gamma)
    weights = fitted.solve()
    lengths = store.lengths()[held_out]
    order = np.cumsum(held_out) - 1
    sums = ReturnSums(min(RETURN_BLOCKS, len(lengths)), int(lengths.max()), gamma)
    firsts: list[np.ndarray] = []
    totals = dict.fromkeys(("rows", "entropy", "kl", "loss", "agreement"), 0.0)
    cut = 0
    for windows, rows in whole_episodes(store, held_out):
        phi, logits = _seen(policy, rows, project)
        odds = logits.softmax(-1).double().numpy()
        acted = rows["acted"].numpy()
        q_all = phi @ weights.T
        value = (odds * q_all).sum(-1)
        action = rows["action"].numpy()
        q = np.take_along_axis(q_all, action[..., None], -1)[..., 0]
        log_prob = log_prob_of(logits, rows["action"]).double().numpy()
        ratio = log_prob - rows["log_prob"].double().numpy()
        cut += int((~rows["terminated"].numpy().any(0)).sum())
        sums.add(
            order[windows.episode] % sums.blocks, ratio[:-1], rows["reward"].double().numpy()[:-1],
            q[:-1], value[:-1], acted[:-1],
        )  # fmt: skip
        firsts.append(phi[0][:, None, :] * odds[0][:, :, None])
        clipped = np.clip(ratio, -20, 20)
        agrees = logits.argmax(-1).numpy() == action
        for name, x in (
            ("rows", np.ones_like(ratio)), ("entropy", entropy_of(logits).numpy()),
            ("kl", np.exp(clipped) - 1 - clipped), ("loss", -log_prob), ("agreement", agrees),
        ):  # fmt: skip
            totals[name] += float((x * acted).sum())
    generator = np.random.default_rng(seed)
    found = estimates(sums, generator, _refits(fitted, np.concatenate(firsts), generator))
    rows = totals.pop("rows")
    return {
        **{name: estimate.told() for name, estimate in found.items()},
        "entropy": totals["entropy"] / rows,
        "behaviour_kl": totals["kl"] / rows,
        "loss": totals["loss"] / rows,
        "agreement": totals["agreement"] / rows,
        "effective_episodes": sums.effective_episodes(),
        "held_out_episodes": len(lengths),
        "cut_episodes": cut,
        "log_prob_estimated": store.estimated,
    }


def _seen(policy: LogPolicy, rows: Any, project: np.ndarray) -> tuple[np.ndarray, torch.Tensor]:
    """Features float64 [T, W, F] for Q, a constant last, and logits [T, W, A]."""
    features = policy.features(rows)
    logits, _ = policy.heads(features, rows.get("action_mask", None))
    found = features.double().numpy() @ project
    return np.concatenate([found, np.ones((*found.shape[:-1], 1))], -1), logits


def _projection(store: LogStore, policy: LogPolicy, episodes: np.ndarray) -> np.ndarray:
    """float64 [hidden, F] main directions of the policy's features (uncentred)."""
    moment = np.zeros((policy.hidden, policy.hidden))
    for _, rows in whole_episodes(store, episodes):
        x = policy.features(rows)[rows["acted"]].double().numpy()
        moment += x.T @ x
    values, vectors = np.linalg.eigh(moment)
    keep = min(Q_FEATURES, policy.hidden)
    scale = np.sqrt(np.maximum(values[-keep:], 1e-12) / max(store.facts["rows"], 1))
    useful = scale > 1e-4 * scale.max()
    return vectors[:, -keep:][:, useful] / scale[useful]


def _fit_q(
    store: LogStore, policy: LogPolicy, episodes: np.ndarray, project: np.ndarray, gamma: float
) -> LeastSquaresQ:
    blocks = min(Q_BLOCKS, int(episodes.sum()))
    fitted = LeastSquaresQ(project.shape[1] + 1, store.schema.num_actions, blocks, gamma, ridge=1.0)
    order = np.cumsum(episodes) - 1
    for windows, rows in whole_episodes(store, episodes):
        phi, logits = _seen(policy, rows, project)
        odds = logits.softmax(-1).double().numpy()
        acted = rows["acted"].numpy()
        block = np.broadcast_to(order[windows.episode] % blocks, acted[:-1].shape)
        parts = {
            "phi": phi[:-1], "action": rows["action"].numpy()[:-1],
            "reward": rows["reward"].double().numpy()[:-1], "phi_next": phi[1:],
            "odds_next": odds[1:], "goes_on": acted[1:],
        }  # fmt: skip
        for b in np.unique(block):
            chosen = acted[:-1] & (block == b)
            fitted.add(int(b), **{name: x[chosen] for name, x in parts.items()})
    return fitted


def _refits(
    fitted: LeastSquaresQ, firsts: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """float [DRAWS] mean value of the first states [E, A, F] under Q refitted on drawn blocks."""
    mean = firsts.mean(0)
    found = [
        float((fitted.solve(counts) * mean).sum())
        for counts in draws_of(fitted.blocks, generator, Q_DRAWS)
    ]
    return generator.choice(np.array(found), DRAWS)


def gate(judged: Mapping[str, Any], limits: GateParams, objective: str) -> list[str]:
    """Why the policy may not be published; empty if it may.

    A clone is to equal the behaviour: of `imitation` no improvement is asked.
    """
    reasons = []
    low, high = judged["improvement"]["ci95"]
    wanted = limits.min_improvement
    if wanted is not None and objective != "imitation" and not low > wanted:
        reasons.append(
            f"improvement over the behaviour is {judged['improvement']['value']:.4g} (95 % from "
            f"{low:.4g} to {high:.4g}), the gate asks for more than {wanted:g}"
        )
    for name, limit, below in (
        ("effective_episodes", limits.min_effective_episodes, True),
        ("entropy", limits.min_entropy, True),
        ("behaviour_kl", limits.max_behaviour_kl, False),
        ("loss", limits.max_loss, False),
    ):
        value = judged[name]
        if not np.isfinite(value) or (value < limit if below else value > limit):
            asks = "at least" if below else "at most"
            reasons.append(f"{name} is {value:.4g}, the gate asks {asks} {limit:g}")
    return reasons
