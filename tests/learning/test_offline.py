"""What is learnt from logs, against what is known to be best."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from hamlet.artifacts import HamletError
from hamlet.learning.offline import DecisionModel, decisions, train_offline

SEEDS, BLUEPRINTS, ROWS = 5, 4, 1024


class Quiet:
    def __init__(self):
        self.last = {}

    def steps(self, total, start):
        return range(start, total)

    def record(self, step, metrics):
        self.last = metrics


def seed_batch(behaviour="uniform"):
    """The best blueprint depends on the seed and on whether the metrics rise."""
    rng = torch.Generator().manual_seed(0)
    features = torch.randn(ROWS, 3, generator=rng)
    rising = torch.randint(2, (ROWS,), generator=rng)
    slope = (2.0 * rising - 1)[:, None, None] * torch.arange(6.0)[None, :, None]
    metrics = slope + 0.3 * torch.randn(ROWS, 6, 2, generator=rng)
    seed_idx = torch.randint(SEEDS, (ROWS,), generator=rng)
    best = (seed_idx + rising) % BLUEPRINTS
    odds = torch.full((ROWS, BLUEPRINTS), 1 / BLUEPRINTS)
    if behaviour == "expert":
        odds = 0.05 / 3 + (0.95 - 0.05 / 3) * nn.functional.one_hot(best, BLUEPRINTS)
    action = odds.multinomial(1, generator=rng).squeeze(1)
    log_prob = odds.log().gather(1, action[:, None]).squeeze(1)
    paid = (action == best).float() + 0.1 * torch.randn(ROWS, generator=rng)
    return decisions(features, metrics, seed_idx, action, paid, log_prob), best


def chance_of(model, logged, best):
    with torch.no_grad():
        logits, _ = model(logged.flatten())
    return logits.softmax(-1).gather(1, best[:, None]).mean().item()


@pytest.mark.parametrize(
    ("objective", "behaviour", "least"),
    [("ppo", "uniform", 0.30), ("impala", "uniform", 0.8), ("imitation", "expert", 0.85)],
)
def test_every_objective_learns_from_the_batch_of_the_seed(objective, behaviour, least):
    logged, best = seed_batch(behaviour)
    torch.manual_seed(0)
    model = DecisionModel(3, 2, SEEDS, BLUEPRINTS)
    before = chance_of(model, logged, best)
    assert before < 0.3
    log = Quiet()
    options = {"max_kl": 10.0} if objective == "impala" else {}
    train_offline(
        model, logged, objective, log, iterations=20, seed=0, learning_rate=3e-3, **options
    )
    after = chance_of(model, logged, best)
    assert after > max(least, before + 0.05)
    if objective == "ppo":  # one log is good for one step of the policy: it stays within reach
        assert log.last["approx_kl"] < 0.5


class Table(nn.Module):
    """A row of logits and a value for every state."""

    def __init__(self, states, actions):
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(states, actions + 1))

    def forward(self, rows):
        found = self.rows[rows["state"]]
        return found[:, :-1], found[:, -1]


def corridor(ticks=40, actors=16):
    """Two ticks an episode: the first choice decides what the second tick pays, whatever is done.

    A return that crossed episodes, or rows that lost their order, would not tell which.
    """
    rng = torch.Generator().manual_seed(1)
    action = torch.randint(2, (ticks, actors), generator=rng)
    second = torch.arange(ticks)[:, None] % 2 == 1
    first_choice = action.roll(1, 0)
    reward = torch.where(second, 2.0 * first_choice - 1, 0.0)
    state = torch.where(second, 1 + first_choice, 0)
    return TensorDict(
        {
            "state": state,
            "action": action,
            "log_prob": torch.full((ticks, actors), 0.5).log(),
            "reward": reward,
            "done": second.expand(ticks, actors).clone(),
        },
        batch_size=[ticks, actors],
    )


@pytest.mark.parametrize("objective", ["ppo", "impala"])
def test_credit_goes_back_inside_an_episode_and_no_further(objective):
    model = Table(3, 2)
    train_offline(
        model, corridor(), objective, Quiet(), iterations=30, seed=0, learning_rate=0.03,
        gamma=0.9, entropy=0.001, max_kl=10.0,
    )  # fmt: skip
    odds = model.rows[:, :2].softmax(-1)
    assert odds[0, 1] > 0.55  # the first choice matters
    values = model.rows[:, 2].detach()
    assert values[1] == pytest.approx(-1.0, abs=0.1)
    assert values[2] == pytest.approx(1.0, abs=0.1)
    assert (odds[1:] - 0.5).abs().max() < odds[0, 1] - 0.5  # the second does not


@pytest.mark.parametrize("objective", ["ppo", "impala"])
def test_unknown_endings_teach_nothing(objective):
    """V = 10 is right everywhere, so nothing may move: no policy, no value."""
    shape = (12, 3)
    generator = torch.Generator().manual_seed(0)
    truncated = torch.zeros(shape, dtype=torch.bool)
    truncated[4, 1] = True
    reward = torch.ones(shape)
    reward[4, 1] = reward[-1] = 1e6  # were these rows like others, everything would follow them
    logged = TensorDict(
        {
            "state": torch.randint(3, shape, generator=generator),
            "action": torch.randint(2, shape, generator=generator),
            "log_prob": torch.full(shape, 0.5).log(),
            "reward": reward,
            "done": truncated,
            "truncated": truncated,
        },
        batch_size=shape,
    )
    model = Table(3, 2)
    with torch.no_grad():
        model.rows[:, 2] = 10.0
    train_offline(
        model, logged, objective, Quiet(), iterations=3, seed=0, gamma=0.9, entropy=0.0,
        learning_rate=0.01,
    )  # fmt: skip
    # A step in any direction that is not rounding would be about the learning rate.
    assert model.rows[:, :2].abs().max() < 2e-4
    assert (model.rows[:, 2] - 10).abs().max() < 2e-4


def test_an_illegal_action_is_never_learnt():
    logged = corridor()
    logged["action_mask"] = torch.stack([logged["action"] == 0, logged["action"] == 1], -1)
    model = Table(3, 2)
    train_offline(model, logged, "imitation", Quiet(), iterations=2, seed=0)
    assert model.rows[:, :2].abs().max() == 0.0  # one legal choice: nothing to learn


def test_the_same_seed_gives_the_same_bits():
    logged, _ = seed_batch()
    weights = []
    for _ in range(2):
        torch.manual_seed(3)
        model = DecisionModel(3, 2, SEEDS, BLUEPRINTS)
        train_offline(model, logged, "impala", Quiet(), iterations=2, seed=5)
        weights.append([p.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_a_log_that_cannot_be_learnt_from_is_refused_by_name():
    good = corridor()
    with pytest.raises(HamletError, match="no `log_prob`"):
        train_offline(Table(3, 2), good.exclude("log_prob"), "ppo", Quiet(), iterations=1, seed=0)
    bad = good.clone().set("reward", torch.zeros(40, 16, 2))
    with pytest.raises(HamletError, match="`reward` of the log has shape"):
        train_offline(Table(3, 2), bad, "ppo", Quiet(), iterations=1, seed=0)
    with pytest.raises(HamletError, match=r"must be \[ticks, actors\]"):
        train_offline(Table(3, 2), good[0], "ppo", Quiet(), iterations=1, seed=0)
