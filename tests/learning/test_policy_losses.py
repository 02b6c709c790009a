"""Each loss of module D and its critic, against sums written out row by row."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from hamlet.learning.policy_losses import (
    FEATURES,
    IMITATING,
    JUDGING,
    PLACES,
    THINKING,
    VALUING,
    PolicyLosses,
)

ROWS, GOALS, ACTIONS, CANDIDATES = 9, 4, 3, 2
CLIP, KICKSTART, ENTROPY = 0.2, 0.3, 0.05


class Choosing:
    """A policy whose logits are read from the features; no two of them are the same tensor."""

    worth = torch.tensor(0.0, requires_grad=True)

    def place_facts(self, f):
        """[facts, ., places]"""
        return torch.stack([f.mean, f.mean.square()]) * self.worth

    def learned_logits(self, f, places=None):
        places = self.place_facts(f) if places is None else places
        return f.mean + places[0] + 2 * places[1].roll(1, -1)

    def low_money_bias(self, known_state):
        return known_state

    def goal_logits(self, prior, candidates, returns, confidence):
        return prior.scatter_add(-1, candidates, returns * confidence)

    def action_logits(self, f, goal):
        return f.log_std * (1 + goal.unsqueeze(-1))


class Summing(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, privileged):
        return privileged.sum(-1) * self.scale


def losses(algorithm: str = "ppo") -> PolicyLosses:
    params = SimpleNamespace(
        algorithm=algorithm, clip=CLIP, kickstart_coef=KICKSTART, entropy=ENTROPY
    )
    return PolicyLosses(Choosing(), Summing(), params)


def batch(names, seed: int = 3) -> TensorDict:
    """Everything random; a third of the rows do not count."""
    rng = torch.Generator().manual_seed(seed)

    def numbers(*size):
        return torch.randn(ROWS, *size, generator=rng)

    def choices(count, *size):
        return torch.randint(count, (ROWS, *size), generator=rng)

    first = torch.arange(ROWS)
    content = dict.fromkeys(FEATURES, torch.zeros(ROWS, 1)) | {
        "f_mean": numbers(GOALS), "f_known_state": numbers(GOALS), "f_log_std": numbers(ACTIONS),
        "active": torch.arange(ROWS) % 3 != 1, "expert_goal": choices(GOALS),
        "expert_action": choices(ACTIONS), "expert_odds": numbers(GOALS).softmax(-1),
        "privileged": numbers(2), "returns": numbers(),
        "value": numbers(), "goal": choices(GOALS), "advantages": numbers(),
        "goal_log_prob": -1.4 + 0.3 * numbers(),
        "candidates": torch.stack([first % GOALS, (first + 1) % GOALS], 1),
        "imagined_return": numbers(CANDIDATES), "imagined_confidence": numbers(CANDIDATES) / 2,
    }  # fmt: skip
    return TensorDict({name: content[name] for name in names}, batch_size=[ROWS])


def odds(logits) -> list[float]:
    total = sum(math.exp(x) for x in logits)
    return [math.exp(x) / total for x in logits]


def mean(values) -> float:
    return sum(values) / len(values)


def counting(data) -> list[dict]:
    """The rows that count, as plain numbers."""
    return [row.to_dict(convert_tensors=True) for row in data if bool(row["active"])]


def critic_error(row: dict) -> float:
    """Half the squared error, pessimistic over a clipped change."""
    value, before, target = sum(row["privileged"]), row["value"], row["returns"]
    near = before + max(-CLIP, min(CLIP, value - before))
    return 0.5 * max((value - target) ** 2, (near - target) ** 2)


def missed(row: dict) -> float:
    """Cross-entropy of what was learned with the expert's odds."""
    learned = odds(row["f_mean"])
    return -sum(p * math.log(q) for p, q in zip(row["expert_odds"], learned, strict=True))


def agreement(rows: list[dict]) -> float:
    """How often the likeliest goal is the expert's."""
    return mean([likeliest(row["f_mean"]) == likeliest(row["expert_odds"]) for row in rows])


def likeliest(values: list[float]) -> int:
    return values.index(max(values))


def test_imitation_learns_the_odds_of_the_experts_goals():
    data = batch(IMITATING)
    loss, told = losses().imitate_goals(data)
    rows = counting(data)
    assert loss.item() == pytest.approx(mean([missed(row) for row in rows]), rel=1e-5)
    assert told["goal_agreement"].item() == pytest.approx(agreement(rows))


def test_settled_places_give_the_same_loss_and_no_gradient_to_what_weighs_them():
    policy, data = Choosing(), batch(IMITATING)
    policy.worth = torch.tensor(0.7, requires_grad=True)
    learning = PolicyLosses(policy, Summing(), SimpleNamespace(entropy=ENTROPY))
    fresh, told = learning.imitate_goals(data)
    assert fresh.requires_grad
    found = learning.settle_places(data)
    assert found.keys() == {PLACES}
    assert found[PLACES].shape == (ROWS, 2, GOALS)
    order = torch.arange(ROWS).flip(0)  # as minibatches take them
    settled, told_again = learning.imitate_goals(data.update(found)[order])
    assert not settled.requires_grad
    assert settled.item() == pytest.approx(fresh.item(), rel=1e-6)
    assert told_again == told
    policy.worth = torch.tensor(-3.0)
    assert learning.imitate_goals(data.select(*IMITATING))[0].item() != pytest.approx(fresh.item())
    assert learning.imitate_goals(data)[0].item() == pytest.approx(fresh.item(), rel=1e-6)


def test_imitation_learns_the_experts_action_for_its_goal_and_the_returns_where_there_are_any():
    data = batch((*IMITATING, *JUDGING))
    loss, told = losses().imitate_actions(data)
    rows = counting(data)
    action = mean(
        [
            -math.log(
                odds([x * (1 + r["expert_goal"]) for x in r["f_log_std"]])[r["expert_action"]]
            )
            for r in rows
        ]
    )
    fit = mean([0.5 * (sum(r["privileged"]) - r["returns"]) ** 2 for r in rows])
    assert loss.item() == pytest.approx(action + fit, rel=1e-5)
    assert told["value_loss"].item() == pytest.approx(fit, rel=1e-5)
    agree = [r["f_log_std"].index(max(r["f_log_std"])) == r["expert_action"] for r in rows]
    assert told["action_agreement"].item() == pytest.approx(mean(agree))
    alone, told_alone = losses().imitate_actions(data.select(*IMITATING))
    assert alone.item() == pytest.approx(action, rel=1e-5)
    assert told_alone.keys() == {"action_agreement"}
    both, told_both = losses().imitate(data)
    goals, told_goals = losses().imitate_goals(data)
    assert both.item() == pytest.approx(goals.item() + action + fit, rel=1e-5)
    assert told_both.keys() == told_goals.keys() | told.keys()


def test_the_critic_alone_is_not_held_near_what_it_said():
    data = batch(VALUING)
    loss, _ = losses().fit_critic(data)
    rows = counting(data)
    fit = mean([0.5 * (sum(r["privileged"]) - r["returns"]) ** 2 for r in rows])
    assert loss.item() == pytest.approx(fit, rel=1e-5)


def considered(row: dict) -> list[float]:
    """Logits of the goals: what was learned, the written bias, and the imagined futures."""
    logits = [a + b for a, b in zip(row["f_mean"], row["f_known_state"], strict=True)]
    for goal, gain, trust in zip(
        row["candidates"], row["imagined_return"], row["imagined_confidence"], strict=True
    ):
        logits[goal] += gain * trust
    return logits


@pytest.mark.parametrize("algorithm", ["ppo", "impala"])
def test_goals_improve_by_their_advantages_beside_the_teacher_and_the_entropy(algorithm):
    ticks, thoughts = batch(VALUING, 5), batch(THINKING, 3)
    loss, told = losses(algorithm).improve(ticks, thoughts)
    rows = counting(thoughts)
    size = math.sqrt(mean([r["advantages"] ** 2 for r in rows]))
    centre = mean([r["advantages"] for r in rows])
    spread = math.sqrt(mean([(r["advantages"] - centre) ** 2 for r in rows]))
    surrogate, divergence, entropy, teaching = [], [], [], []
    for row in rows:
        chosen = odds(considered(row))
        log_prob = math.log(chosen[row["goal"]])
        log_ratio = log_prob - row["goal_log_prob"]
        ratio = math.exp(log_ratio)
        if algorithm == "impala":
            surrogate.append(log_prob * row["advantages"] / size)
        else:
            gain = (row["advantages"] - centre) / spread
            surrogate.append(min(ratio * gain, max(1 - CLIP, min(1 + CLIP, ratio)) * gain))
        divergence.append(ratio - 1 - log_ratio)
        entropy.append(-sum(p * math.log(p) for p in chosen))
        teaching.append(missed(row))
    fit = mean([critic_error(row) for row in counting(ticks)])
    expected = -mean(surrogate) + 0.5 * fit + KICKSTART * mean(teaching) - ENTROPY * mean(entropy)
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    assert told["value_loss"].item() == pytest.approx(fit, rel=1e-5)
    assert told["goal_entropy"].item() == pytest.approx(mean(entropy), rel=1e-5)
    name = "behaviour_kl" if algorithm == "impala" else "approx_kl"
    assert told[name].item() == pytest.approx(mean(divergence), rel=1e-4)
    assert told["goal_agreement"].item() == pytest.approx(agreement(rows))


def test_an_annealed_entropy_bonus_is_read_at_every_call():
    ticks, thoughts, part = batch(VALUING, 5), batch(THINKING, 3), losses()
    first, told = part.improve(ticks, thoughts)
    part.entropy_coef.fill_(0.0)
    second, _ = part.improve(ticks, thoughts)
    assert (second - first).item() == pytest.approx(ENTROPY * told["goal_entropy"].item(), rel=1e-4)
