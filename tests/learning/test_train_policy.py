"""What training draws and what it counts: noise of its own generator, returns of whole lives."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch._subclasses.fake_tensor import FakeTensorMode

from pipeline.learning.buffer import RolloutBuffer
from pipeline.learning.train_policy import ACTION_STREAM, GOAL_STREAM, episode_scores, gumbel

AGENTS, CHOICES = 3, 5


def worlds(count, tick=0):
    number = torch.arange(count)
    state = {"seed": number * 0 + 7, "world": number, "episode": number % 3, "tick": number * 0}
    return TensorDict(state, batch_size=[count]).set("tick", number * 0 + tick)


def test_choices_are_drawn_by_their_odds():
    logits = torch.tensor([1.5, 0.5, 0.0, -1.0, -3.4e38])
    count = 20_000
    drawn = (logits + gumbel(worlds(count // AGENTS), AGENTS, CHOICES, ACTION_STREAM)).argmax(-1)
    odds = logits.softmax(-1)
    seen = torch.bincount(drawn, minlength=CHOICES) / len(drawn)
    assert ((seen - odds).abs() <= 4 * (odds * (1 - odds) / len(drawn)).sqrt()).all()
    assert seen[-1] == 0


def test_the_same_moment_draws_the_same_and_no_other_does():
    noise = gumbel(worlds(40), AGENTS, CHOICES, ACTION_STREAM)
    assert torch.equal(gumbel(worlds(40)[10:30], AGENTS, CHOICES, ACTION_STREAM), noise[30:90])
    for other in (
        gumbel(worlds(40, tick=1), AGENTS, CHOICES, ACTION_STREAM),
        gumbel(worlds(40), AGENTS, CHOICES, GOAL_STREAM),
        noise.roll(AGENTS, 0),  # another world
        noise.roll(1, 0),  # another agent
    ):
        assert not (other == noise).any()


def lives(ticks, slots):
    """Random rewards, and lives that end at random, the second slot's agent being dead at times."""
    rng = torch.Generator().manual_seed(1)
    buffer = RolloutBuffer(ticks)
    for _ in range(ticks):
        done = torch.rand(slots, generator=rng) < 0.2
        active = torch.ones(slots, dtype=torch.bool)
        active[1] = torch.rand((), generator=rng) < 0.5
        reward = torch.rand(slots, generator=rng)
        buffer.add({"reward": reward, "done": done, "active": active})
    return buffer


def test_the_mean_return_is_that_of_lives_that_ended():
    """With fewer than 256 lives a tick, each moves the mean by one part in 256 of its distance."""
    buffer = lives(40, 4)
    score, scores = torch.zeros(2, 2), torch.zeros(2)
    for _ in range(2):  # what is unfinished is carried into the next 40 ticks
        score, scores = episode_scores(buffer, score, scores)

    running, mean, ended = [0.0] * 4, None, 0
    for t in list(range(40)) * 2:
        over = []
        for slot in range(4):
            running[slot] += float(buffer.data["reward"][t, slot])
            if buffer.data["done"][t, slot]:
                over += [running[slot]] if buffer.data["active"][t, slot] else []
                running[slot] = 0.0
        if over:
            new = sum(over) / len(over)
            mean = new if mean is None else mean + len(over) / 256 * (new - mean)
            ended += len(over)
    assert float(scores[0]) == pytest.approx(mean, rel=1e-5)
    assert int(scores[1]) == ended > 10
    assert score.flatten().tolist() == pytest.approx(running, rel=1e-5)


def test_counting_returns_never_waits_for_the_device():
    buffer = lives(8, 4)
    with FakeTensorMode() as fake:  # raises where a tensor's value is asked for
        buffer.data = TensorDict(
            {name: fake.from_tensor(value) for name, value in buffer.data.items()},
            batch_size=[8, 4],
        )
        score, scores = episode_scores(buffer, torch.zeros(2, 2), torch.zeros(2))
    assert (score.shape, scores.shape) == ((2, 2), (2,))
