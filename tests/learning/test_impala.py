"""IMPALA: targets of older rollouts, who acts when, and what an uncorrected learner misses."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import pytest
import torch

from hamlet.learning.buffer import RolloutBuffer
from hamlet.learning.checkpoint import Checkpoint
from hamlet.learning.impala import Behind, add_traces, goal_log_probs
from hamlet.learning.learner import packed, thinking_in, unpacked
from hamlet.learning.losses import impala_loss, unit_size
from hamlet.learning.returns import gae, vtrace
from hamlet.learning.rollout import collect, fused_step
from hamlet.learning.train_policy import train_policy
from hamlet.modules.contracts import TownShape
from hamlet.params import load_params
from hamlet.town import Town, load_pack
from tests.learning.interrupted import Stopped, StoppedLog
from tests.learning.minds import new_mind
from tests.learning.test_train_policy import class_of_twelve

TINY = load_params(Path(__file__).parents[2] / "params.yaml", "tiny")
PARAMS = TINY.policy.model_copy(update={"algorithm": "impala", "lag": 2, "worlds": 12})


# ------------------------------------------------------------------------------------------------
# In the town


def rollout():
    """A learner, a full buffer of what it did, and the worlds that follow."""
    learner, memory, world = class_of_twelve()
    buffer = RolloutBuffer(PARAMS.rollout)
    contexts = [(now, None) for now in thinking_in(0, 12, PARAMS)]
    world, _ = collect(fused_step(learner.town, learner), world, memory, buffer, contexts)
    return learner, buffer, world


def moved(policy, size=0.3):
    rng = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if not name.startswith("controller."):
                p += size * torch.randn(p.shape, generator=rng)


def test_without_a_lag_the_targets_are_those_of_the_policy_that_acted():
    learner, buffer, world = rollout()
    told = add_traces(buffer, learner, world, PARAMS, "fp32")
    assert told["importance"].item() == pytest.approx(1, abs=1e-5)
    data, reward = buffer.data, buffer.data["reward"] * 3 * (1 - PARAMS.gamma)
    values = learner.critic(data["privileged"])
    last = learner.critic(learner.privileged(world)).unsqueeze(0)
    expected = gae(
        reward, values, torch.cat([values[1:], last]), data["done"], data["done"],
        PARAMS.gamma, PARAMS.lam,
    ).returns  # fmt: skip
    following = torch.cat([expected[1:], last]) * ~data["done"]
    advantages = reward + PARAMS.gamma * following - values
    assert PARAMS.lam < 1
    assert advantages.abs().max() > 0.01
    torch.testing.assert_close(data["returns"], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(data["advantages"], advantages, rtol=1e-4, atol=1e-5)


def test_the_odds_of_older_goals_are_asked_of_the_policy_as_it_is_now():
    learner, buffer, _ = rollout()
    data, policy = buffer.data, learner.mind.policy
    torch.testing.assert_close(goal_log_probs(policy, data, "fp32"), data["goal_log_prob"])
    moved(policy)
    now = goal_log_probs(policy, data, "fp32")
    changed, drawn = now != data["goal_log_prob"], data["decide"]
    assert not changed[~drawn].any()  # who only went on had no choice
    assert changed[drawn & data["deliberate"]].float().mean() > 0.9
    assert changed[drawn & ~data["deliberate"]].float().mean() > 0.9
    assert bool((drawn & ~data["deliberate"]).any())


def test_what_the_policy_would_no_longer_do_counts_less():
    learner, buffer, world = rollout()
    add_traces(buffer, learner, world, PARAMS, "fp32")
    before = {name: buffer.data[name].clone() for name in ("returns", "advantages")}
    moved(learner.mind.policy)
    told = add_traces(buffer, learner, world, PARAMS, "fp32")
    assert told["importance"].item() < 0.95
    assert not torch.equal(buffer.data["returns"], before["returns"])
    ratio = goal_log_probs(learner.mind.policy, buffer.data, "fp32") - buffer.data["goal_log_prob"]
    # In the last tick nothing follows that differs: its advantage shrinks by its ratio alone.
    shrunk = before["advantages"][-1] * ratio[-1].exp().clamp(max=1)
    torch.testing.assert_close(buffer.data["advantages"][-1], shrunk, rtol=1e-3, atol=1e-5)


def test_worlds_go_through_the_pipe_as_they_are():
    learner, memory, world = class_of_twelve()
    again, carry = unpacked(packed(world, memory._replace(co_players=())))
    assert (again == world).all()
    assert all(torch.equal(a, b) for a, b in zip(carry.agent, memory.agent, strict=True))
    assert learner.expert.act(again, carry.expert)[0].shape == (12, 4)


class Lags(StoppedLog):
    """A log that keeps how old the weights were that acted."""

    def __init__(self, stop=None):
        super().__init__(stop)
        self.lags = []

    def record(self, step, metrics):
        super().record(step, metrics)
        if "lag" in metrics:
            self.lags.append(int(metrics["lag"]))


def train(folder, log, **changes):
    town = Town(load_pack("l4_contention"), num_layouts=8)
    sizes = PARAMS.model_copy(
        update={
            "imitation_iterations": 1, "critic_iterations": 1, "ppo_iterations": 5,
            "worlds": 8, "rollout": 4, "minibatches": 2, "learning_rate": 3e-3,
        } | changes
    )  # fmt: skip
    mind, blank = new_mind(town, sizes)
    train_policy(
        town, TownShape.of(town), mind, blank, sizes, TINY.compile, 0, folder / "checkpoint.pt", log
    )  # fmt: skip
    return mind.policy.state_dict()


def test_the_weights_that_act_are_those_of_two_updates_before(tmp_path, monkeypatch):
    acted, learned = [], []
    play, went_on = Behind.play, Behind.learned

    def spied(self, *args):
        told = play(self, *args)
        acted.append(torch.cat([p.flatten() for p in self.acting.parameters()]).detach().clone())
        return told

    def noted(self):
        went_on(self)
        learned.append(torch.cat([p.flatten() for p in self.policy.parameters()]).detach().clone())

    monkeypatch.setattr(Behind, "play", spied)
    monkeypatch.setattr(Behind, "learned", noted)
    log = Lags()
    train(tmp_path, log)
    assert log.lags == [0, 0, 1, 2, 2, 2]
    # Iteration 0 here is the critic's: after it the policy is as it was.
    for i in (3, 4, 5):
        assert torch.equal(acted[i], learned[i - 3])
        assert not torch.equal(acted[i], learned[i - 1])


def test_a_stopped_training_goes_on_with_the_same_older_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(Checkpoint.__init__, "__defaults__", (0.0,))
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    whole = train(tmp_path / "whole", Lags())
    for stop in (3, 5):
        with pytest.raises(Stopped):
            train(tmp_path / "cut", Lags(stop))
    resumed = train(tmp_path / "cut", Lags())
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


# ------------------------------------------------------------------------------------------------
# Where the optimum is known

STAY, GO = 0, 1
GAMMA, SAFE, LENGTH = 0.95, 0.4, 3


class Corridor:
    """In the first cell STAY ends with SAFE; three times GO ends with 1; STAY later ends with 0.

    GO is best: 0.95^2 > 0.4. But who tosses a coin after it gets 0.95^2 / 4 < 0.4.
    """

    def __init__(self, lanes, seed):
        self.rng = torch.Generator().manual_seed(seed)
        self.cell = torch.zeros(lanes, dtype=torch.int64)

    def play(self, logits, ticks):
        """[ticks, lanes] of what the policy float32 [LENGTH, 2] does."""
        rows = []
        for _ in range(ticks):
            odds = logits[self.cell].log_softmax(-1)
            action = odds.exp().multinomial(1, generator=self.rng).squeeze(1)
            go = action == GO
            home = go & (self.cell == LENGTH - 1)
            reward = home.float() + SAFE * (~go & (self.cell == 0)).float()
            done = home | ~go
            rows.append((self.cell, action, odds.gather(1, action[:, None])[:, 0], reward, done))
            self.cell = torch.where(done, 0, self.cell + 1)
        return [torch.stack(x) for x in zip(*rows, strict=True)]


def learned(lag, updates=120, corrected=True, frozen=False, seed=0):
    """Policy and values after so many updates on rollouts of a policy `lag` updates older."""
    logits = torch.zeros(LENGTH, 2, requires_grad=True)
    values = torch.zeros(LENGTH, requires_grad=True)
    optimizer = torch.optim.Adam([logits, values], lr=0.1)
    corridor = Corridor(64, seed)
    acting = deque([logits.detach().clone()] * (lag + 1))
    for _ in range(updates):
        cell, action, then, reward, done = corridor.play(acting[0], 12)
        now = logits.log_softmax(-1)[cell].gather(-1, action[..., None]).squeeze(-1)
        guess = values[cell].detach()
        after = torch.cat([guess[1:], values[corridor.cell].detach()[None]])
        told = now.detach() if corrected else then  # uncorrected: as if it had acted itself
        traced = vtrace(told, then, reward, guess, after, done, done, GAMMA)
        weight = torch.ones_like(now)
        loss = impala_loss(now, unit_size(traced.advantages, weight), weight)
        loss = loss + 0.5 * (values[cell] - traced.targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not frozen:
            acting.popleft()
            acting.append(logits.detach().clone())
    return logits.detach().softmax(-1), values.detach()


@pytest.mark.parametrize("lag", [0, 2, 4])
def test_with_a_lag_the_corridor_is_walked_to_its_end(lag):
    policy, values = learned(lag)
    assert (policy[:, GO] > 0.9).all(), policy
    torch.testing.assert_close(values, GAMMA ** torch.tensor([2.0, 1, 0]), atol=0.1, rtol=0)


def test_from_one_who_tosses_coins_only_the_corrected_learner_finds_the_end():
    """The planted fault: without the ratios, values are those of the coins, and GO seems worse."""
    policy, values = learned(0, frozen=True)
    assert (policy[:, GO] > 0.9).all(), policy
    assert values[1] > 0.8
    policy, values = learned(0, frozen=True, corrected=False)
    assert policy[0, GO] < 0.1, policy
    assert values[1] < 0.6
