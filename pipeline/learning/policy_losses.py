"""What module D and its critic learn from: imitation, values, and PPO or IMPALA on goals."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from hamlet.learning.learner import TOLD
from hamlet.learning.losses import (
    entropy_of,
    imitation_loss,
    impala_loss,
    normalise,
    ppo_policy_loss,
    told_loss,
    unit_size,
    value_loss,
    weighted_mean,
)
from hamlet.modules.categorical import log_prob_of
from hamlet.modules.contracts import Features
from hamlet.modules.critic import Critic
from hamlet.params import PolicyParams

FEATURES = tuple(f"f_{name}" for name in Features._fields)
IMITATING = (*FEATURES, "active", *TOLD)
"""Of the agents that deliberate, what imitation learns from,"""
PLACES = "places"
"""what is worked out of these for all epochs but the first,"""
JUDGING = ("privileged", "returns")
"""and what values are learned from beside it, in its last part."""
VALUING = ("active", "privileged", "value", "returns")
"""Of a tick's experience, what values are learned from while goals improve."""
THINKING = (*FEATURES, "candidates", "imagined_return", "imagined_confidence", "goal",
            "goal_log_prob", "active", "advantages", "expert_odds")  # fmt: skip
"""And what its goals are learned from, of the agents that deliberate."""

Told = tuple[Tensor, dict[str, Tensor]]


def features_of(batch: TensorDict) -> Features:
    return Features(*(batch[name] for name in FEATURES))


class PolicyLosses:
    """The losses of one training, each a function of minibatches of experience.

    `entropy_coef` float32 [] is read at every call: fill it to anneal the entropy bonus.
    """

    def __init__(self, policy: Any, critic: Critic, params: PolicyParams) -> None:
        self.policy, self.critic, self.params = policy, critic, params
        device = next(critic.parameters()).device
        self.entropy_coef = torch.tensor(params.entropy, device=device)

    @torch.no_grad()
    def settle_places(self, data: TensorDict) -> dict[str, Tensor]:
        """The facts of the places as the policy works them out now, for `imitate_goals`.

        The few numbers by which it weighs what a place is worth learn from the first epoch; then
        they stand still, as to take their gradient is half of the work of an update.
        """
        facts = self.policy.place_facts(features_of(data))
        return {PLACES: facts.movedim(0, -2).contiguous()}

    def imitate_goals(self, batch: TensorDict) -> Told:
        """Cross-entropy with the odds that the teacher gives its goals."""
        places = batch[PLACES].movedim(-2, 0) if PLACES in batch.keys() else None  # noqa: SIM118
        loss, told = told_loss(
            self.policy.learned_logits(features_of(batch), places),
            batch["expert_odds"],
            batch["active"].float(),
        )
        return loss, {"goal_agreement": told["agreement"]}

    def imitate_actions(self, batch: TensorDict) -> Told:
        """Cross-entropy with the teacher's actions, given its goals; and where there are `returns`
        in the batch, half the squared error of the values."""
        weight, given = batch["active"].float(), batch.keys()
        # Without the mask: the policy must know what is illegal when it imagines.
        loss, metrics = imitation_loss(
            self.policy.action_logits(features_of(batch), batch["expert_goal"]),
            batch["expert_action"],
            weight,
        )
        told = {"action_agreement": metrics["agreement"]}
        if "returns" in given:
            values = self.critic(batch["privileged"])
            told["value_loss"] = 0.5 * weighted_mean((values - batch["returns"]).square(), weight)
            loss = loss + told["value_loss"]
        return loss, told

    def imitate(self, batch: TensorDict) -> Told:
        """The sum of both."""
        (goals, of_goals), (actions, of_actions) = (
            part(batch) for part in (self.imitate_goals, self.imitate_actions)
        )
        return goals + actions, of_goals | of_actions

    def fit_critic(self, batch: TensorDict) -> Told:
        """Squared error of the values alone."""
        weight, values = batch["active"].float(), self.critic(batch["privileged"])
        return value_loss(values, batch["value"], batch["returns"], weight, 1e9)

    def improve(self, ticks: TensorDict, thoughts: TensorDict) -> Told:
        """PPO or IMPALA: values from every tick, goals from the agents that deliberate."""
        params, policy = self.params, self.policy
        active, deciding = ticks["active"].float(), thoughts["active"].float()
        fit, value_diagnostics = value_loss(
            self.critic(ticks["privileged"]), ticks["value"], ticks["returns"], active, params.clip
        )
        f = features_of(thoughts)
        learned = policy.learned_logits(f)
        logits = policy.goal_logits(
            learned + policy.low_money_bias(f.known_state),
            thoughts["candidates"],
            thoughts["imagined_return"],
            thoughts["imagined_confidence"],
        ).float()
        log_prob, advantages = log_prob_of(logits, thoughts["goal"]), thoughts["advantages"]
        if params.algorithm == "impala":
            surrogate = impala_loss(log_prob, unit_size(advantages, deciding), deciding)
            log_ratio = (log_prob.detach() - thoughts["goal_log_prob"]).clamp(-20, 20)
            divergence = weighted_mean(log_ratio.exp() - 1 - log_ratio, deciding)
            diagnostics = {"behaviour_kl": divergence}
        else:
            surrogate, diagnostics = ppo_policy_loss(
                log_prob,
                thoughts["goal_log_prob"],
                normalise(advantages, deciding),
                deciding,
                params.clip,
            )
        kept, told = told_loss(learned, thoughts["expert_odds"], deciding)
        entropy = weighted_mean(entropy_of(logits), deciding)
        loss = surrogate + 0.5 * fit
        loss = loss + params.kickstart_coef * kept - self.entropy_coef * entropy
        return loss, {
            **diagnostics,
            **value_diagnostics,
            "value_loss": fit,
            "goal_agreement": told["agreement"],
            "goal_entropy": entropy,
        }
