"""What reinforcement added is the difference of two policies in the same worlds, and its error."""

from __future__ import annotations

import pytest
import torch

from hamlet.learning.learner import weights_of
from stages import policy


class Seat:
    """A policy of one number; a world's return is the number times the world, plus a whim."""

    class mind:
        policy = torch.nn.Linear(1, 1, bias=False)


def returns(town, seat, worlds: int, seed: int) -> torch.Tensor:
    number = torch.arange(worlds, dtype=torch.float64).unsqueeze(1)
    strength = seat.mind.policy.weight.item()
    return (strength + number / 100 + (number % 7) * strength).expand(-1, 3) + seed


def test_the_gain_is_paired_and_the_trained_weights_stay(monkeypatch):
    monkeypatch.setattr(policy, "play_alone", returns)
    seat = Seat()
    with torch.no_grad():
        seat.mind.policy.weight.fill_(2.0)
    imitated = weights_of(seat.mind.policy)
    with torch.no_grad():
        seat.mind.policy.weight.fill_(5.0)
    told = policy.reinforced(None, seat, imitated, 10)
    number = torch.arange(policy.JUDGED_WORLDS, dtype=torch.float64)
    gain = 3 + 3 * (number % 7)
    assert told["reinforced_return"] - told["imitated_return"] == pytest.approx(
        told["reinforcement_gain"]
    )
    assert told["reinforcement_gain"] == pytest.approx(gain.mean().item())
    half = 1.96 * gain.std().item() / policy.JUDGED_WORLDS**0.5
    assert told["reinforcement_gain_ci95"] == pytest.approx(half)
    seeds = 10 + policy.JUDGED_SEED
    assert told["imitated_return"] == pytest.approx(
        (2 + number / 100 + (number % 7) * 2).mean().item() + seeds
    )
    assert seat.mind.policy.weight.item() == 5.0


def test_of_two_ranks_each_plays_one_and_both_keep_what_was_trained(monkeypatch):
    played = []

    def returns_of(town, seat, worlds, seed):
        played.append(seat.mind.policy.weight.item())
        return returns(town, seat, worlds, seed)

    monkeypatch.setattr(policy, "play_alone", returns_of)
    monkeypatch.setattr(policy.distributed, "ranks", lambda: 2)
    monkeypatch.setattr(policy.distributed, "all_reduce_sum", lambda *sums: sums)
    for rank, strength in ((0, 2.0), (1, 5.0)):
        monkeypatch.setattr(policy.distributed, "rank", lambda rank=rank: rank)
        seat, imitated = Seat(), {"weight": torch.tensor([[2.0]])}
        with torch.no_grad():
            seat.mind.policy.weight.fill_(5.0)
        policy.reinforced(None, seat, imitated, 10)
        assert played.pop() == strength
        assert not played
        assert seat.mind.policy.weight.item() == 5.0
