"""Returns and advantages from logged time-major [T, ...] experience."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Advantages(NamedTuple):
    advantages: Tensor
    returns: Tensor


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    ended: Tensor,
    gamma: float,
    lam: float,
    known: Tensor | None = None,
) -> Advantages:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16).

    Args:
        rewards: float [T, ...] reward of the tick.
        values: float [T, ...] value of the state before the tick.
        next_values: float [T, ...] value of the state after the tick and before any reset; it
            bootstraps a truncated episode and is ignored where `terminated`.
        terminated: bool [T, ...] the episode ended by its own rules (no bootstrap).
        ended: bool [T, ...] terminated or truncated: nothing flows back over this boundary.
        gamma: discount per tick.
        lam: trace decay.
        known: bool [T, ...] whether what followed the tick is known; all, if None. Nothing can be
            learned from a row of which it is not: its advantage is 0, its return its own value,
            and nothing but that value flows back from it.

    Returns:
        advantages [T, ...] and returns = advantages + values.
    """
    delta = rewards + gamma * next_values * ~terminated - values
    if known is not None:
        delta, ended = torch.where(known, delta, 0.0), ended | ~known
    decay = gamma * lam * (~ended).to(delta.dtype)
    advantages = torch.empty_like(delta)
    carried = torch.zeros_like(delta[0])
    for t in range(delta.shape[0] - 1, -1, -1):
        carried = delta[t] + decay[t] * carried
        advantages[t] = carried
    return Advantages(advantages, advantages + values)


class VTrace(NamedTuple):
    targets: Tensor
    advantages: Tensor


@torch.no_grad()
def vtrace(
    log_prob: Tensor,
    behaviour_log_prob: Tensor,
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    ended: Tensor,
    gamma: float,
    lam: float = 1.0,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
    known: Tensor | None = None,
) -> VTrace:
    """V-trace targets and policy-gradient advantages (Espeholt et al. 2018, IMPALA, eq. 1).

    Shapes and meaning as in `gae`; `log_prob` is of the current policy, `behaviour_log_prob` of
    the one that acted; `lam` as in remark 2 there: below 1, less noise and more of the critic.
    """
    ratio = (log_prob - behaviour_log_prob).exp()
    rho, c = ratio.clamp(max=rho_clip), lam * ratio.clamp(max=c_clip)
    bootstrap = next_values * ~terminated
    delta = rho * (rewards + gamma * bootstrap - values)
    if known is not None:
        delta, ended = torch.where(known, delta, 0.0), ended | ~known
    correction = torch.empty_like(delta)
    carried = torch.zeros_like(delta[0])
    flows = (~ended).to(delta.dtype)
    for t in range(delta.shape[0] - 1, -1, -1):
        carried = delta[t] + gamma * c[t] * flows[t] * carried
        correction[t] = carried
    targets = values + correction
    following = torch.cat([targets[1:], next_values[-1:]])
    next_targets = torch.where(ended, bootstrap, following)
    advantages = rho * (rewards + gamma * next_targets - values)
    return VTrace(targets, advantages if known is None else torch.where(known, advantages, 0.0))


@torch.no_grad()
def discounted(rewards: Tensor, ended: Tensor, gamma: float, last: Tensor) -> Tensor:
    """Discounted sum of rewards [T, ...] inside each episode; `last` continues the final row."""
    out = torch.empty_like(rewards)
    carried = last
    for t in range(rewards.shape[0] - 1, -1, -1):
        carried = rewards[t] + gamma * carried * ~ended[t]
        out[t] = carried
    return out
