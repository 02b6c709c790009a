"""Losses against their formulas, and what a row that does not count may not change."""

from __future__ import annotations

import math

import pytest
import torch

from hamlet.learning.losses import (
    entropy_of,
    imitation_loss,
    impala_loss,
    normalise,
    ppo_policy_loss,
    unit_size,
    value_loss,
    weighted_terms,
)
from hamlet.modules.categorical import log_prob_of, masked_logits


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(0)


def test_an_illegal_action_has_probability_exactly_zero(rng):
    logits = torch.randn(500, 8, generator=rng) * 50
    mask = torch.rand(500, 8, generator=rng) > 0.5
    mask[:, 3] = True
    for dtype in (torch.float32, torch.bfloat16):
        masked = masked_logits(logits.to(dtype), mask)
        probability = masked.softmax(-1)
        assert (probability[~mask] == 0).all()
        torch.testing.assert_close(probability.sum(-1), torch.ones(500))
        assert mask.gather(1, masked.argmax(-1, keepdim=True)).all()
        gumbel = -(-torch.rand(500, 8, generator=rng).clamp(1e-9).log()).log()
        assert mask.gather(1, (masked + gumbel).argmax(-1, keepdim=True)).all()
        assert entropy_of(masked).isfinite().all()


def test_one_legal_action_is_certain():
    mask = torch.tensor([[False, True, False]])
    masked = masked_logits(torch.tensor([[5.0, -200.0, 3.0]]), mask)
    assert log_prob_of(masked, torch.tensor([1])).item() == 0.0
    assert entropy_of(masked).item() == 0.0


def test_illegal_logits_get_no_gradient(rng):
    logits = torch.randn(4, 6, generator=rng, requires_grad=True)
    mask = torch.tensor([[True, False, True, True, False, True]]).expand(4, 6)
    masked = masked_logits(logits, mask)
    (log_prob_of(masked, torch.tensor([0, 2, 3, 5])).sum() + entropy_of(masked).sum()).backward()
    assert logits.grad.isfinite().all()
    assert (logits.grad[~mask] == 0).all()
    assert (logits.grad[mask] != 0).any()


def test_entropy_is_that_of_torch(rng):
    logits = torch.randn(30, 7, generator=rng)
    expected = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(entropy_of(logits), expected)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "moves"),
    [
        (1.1, 2.0, -2.2, True),
        (1.5, 2.0, -2.4, False),  # clipped: no more pull upwards
        (0.5, 2.0, -1.0, True),
        (1.5, -2.0, 3.0, True),  # pessimistic: a bad move is never clipped away
        (0.5, -2.0, 1.6, False),
    ],
)
def test_ppo_clips_on_one_side(ratio, advantage, expected, moves):
    log_prob = torch.tensor([math.log(ratio)], requires_grad=True)
    one = torch.ones(1)
    loss, told = ppo_policy_loss(log_prob, torch.zeros(1), torch.tensor([advantage]), one, 0.2)
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert (log_prob.grad.abs().item() > 0) == moves
    assert told["clip_fraction"].item() == float(abs(ratio - 1) > 0.2)
    assert told["approx_kl"].item() == pytest.approx(ratio - 1 - math.log(ratio), rel=1e-4)


def test_the_value_may_not_jump(rng):
    values, old, returns = (torch.randn(200, generator=rng) * 2 for _ in range(3))
    loss, told = value_loss(values, old, returns, torch.ones(200), 0.3)
    expected = 0.0
    for v, o, r in zip(values.tolist(), old.tolist(), returns.tolist(), strict=True):
        clipped = o + max(-0.3, min(0.3, v - o))
        expected += max((v - r) ** 2, (clipped - r) ** 2) / 200
    assert loss.item() == pytest.approx(0.5 * expected, rel=1e-4)
    explained = 1 - (returns - values).square().mean() / returns.var(unbiased=False)
    torch.testing.assert_close(told["explained_variance"], explained)


def test_impala_is_the_policy_gradient_of_the_rows_that_count(rng):
    log_prob, advantages = torch.randn(50, generator=rng), torch.randn(50, generator=rng)
    weight = (torch.rand(50, generator=rng) > 0.3).float()
    on = weight.bool()
    loss = impala_loss(log_prob, advantages, weight)
    torch.testing.assert_close(loss, -(log_prob * advantages)[on].mean())


def test_advantages_are_brought_to_one_size_but_not_centred(rng):
    advantages = 30 + 20 * torch.randn(50, generator=rng)
    weight = (torch.rand(50, generator=rng) > 0.3).float()
    scaled = unit_size(advantages, weight)
    on = weight.bool()
    assert scaled[on].square().mean().item() == pytest.approx(1, rel=1e-5)
    torch.testing.assert_close(scaled / scaled[0], advantages / advantages[0])
    assert not unit_size(torch.zeros(50), weight).any()


def test_imitation_is_cross_entropy(rng):
    logits = torch.randn(60, 9, generator=rng)
    index = torch.randint(9, (60,), generator=rng)
    weight = (torch.rand(60, generator=rng) > 0.5).float()
    loss, told = imitation_loss(logits, index, weight)
    on = weight.bool()
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits[on], index[on]))
    assert told["agreement"].item() == pytest.approx(
        (logits.argmax(-1) == index)[on].float().mean().item()
    )


def test_rows_of_weight_zero_change_nothing(rng):
    def loss(junk: float) -> torch.Tensor:
        weight = torch.tensor([1.0, 1.0, 1.0, 0.0])
        log_prob = torch.tensor([-0.1, -0.5, -1.0, junk])
        advantages = normalise(torch.tensor([1.0, -2.0, 0.5, junk]), weight)
        policy, _ = ppo_policy_loss(log_prob, torch.zeros(4), advantages, weight, 0.2)
        old, returns = torch.zeros(4), torch.tensor([1.0, 0.0, 2.0, -junk])
        value, _ = value_loss(log_prob, old, returns, weight, 0.2)
        return policy + value

    torch.testing.assert_close(loss(0.0), loss(7.0))


def test_normalised_advantages_have_mean_zero_and_deviation_one(rng):
    weight = (torch.rand(300, generator=rng) > 0.4).float()
    advantages = torch.randn(300, generator=rng) * 30 + 5
    got = normalise(advantages, weight)[weight.bool()]
    assert got.mean().item() == pytest.approx(0, abs=1e-5)
    assert got.std(unbiased=False).item() == pytest.approx(1, rel=1e-4)


def test_a_loss_without_a_weight_is_an_error_and_so_is_a_weight_without_a_loss():
    losses = {"one": torch.tensor(2.0), "two": torch.tensor(3.0)}
    assert weighted_terms(losses, {"one": 0.5, "two": 2.0}) == {"one": 1.0, "two": 6.0}
    with pytest.raises(ValueError, match=r"differ in two$"):
        weighted_terms(losses, {"one": 1.0})
    with pytest.raises(ValueError, match=r"differ in three$"):
        weighted_terms(losses, {"one": 1.0, "two": 1.0, "three": 1.0})
