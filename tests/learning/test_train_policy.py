"""What training draws, counts and is told: noise, returns of whole lives, the expert's goals."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torch._subclasses.fake_tensor import FakeTensorMode

from hamlet.artifacts import HamletError
from hamlet.learning.buffer import RolloutBuffer
from hamlet.learning.checkpoint import Checkpoint
from hamlet.learning.learner import (
    ACTION_STREAM,
    GOAL_STREAM,
    TOLD,
    Learner,
    RolloutCarry,
    deliberating,
    gumbel,
    led,
    observation_of,
)
from hamlet.learning.policy_losses import IMITATING
from hamlet.learning.rollout import fused_step
from hamlet.learning.train_policy import (
    Rollouts,
    driven_worlds,
    episode_scores,
    goal_targets,
    train_policy,
)
from hamlet.modules.contracts import TownShape
from hamlet.modules.critic import Critic
from hamlet.params import load_params
from hamlet.town import Scripted, Town, load_pack
from tests.learning.interrupted import Stopped, StoppedLog
from tests.learning.minds import new_mind

TINY = load_params(Path(__file__).parents[2] / "params.yaml", "tiny")
SHORT = TINY.policy.model_copy(
    update={
        "imitation_iterations": 2, "critic_iterations": 1, "ppo_iterations": 3, "worlds": 8,
        "rollout": 4, "minibatches": 2, "imitation_minibatches": 2,
    }
)  # fmt: skip

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


class Agreement:
    """A trainer's log that keeps how often the goals are the expert's."""

    def steps(self, total, start):
        self.values = []
        return range(start, total)

    def record(self, step, metrics):
        self.values.append(float(metrics["goal_agreement"]))


def class_of_twelve():
    """A learner beside its expert, its blank memory, and twelve worlds."""
    town, sizes = Town(load_pack("l4_contention"), num_layouts=8), TINY.policy
    shape = TownShape.of(town)
    mind, blank = new_mind(town, sizes)
    expert = Scripted(town, ["expert"], 0)
    learner = Learner(town, shape, mind, Critic(shape, 8), expert)
    world = town.reset(3, 12)
    return learner, RolloutCarry(blank(12), expert.reset(world)), world


def test_in_ppo_the_expert_says_what_it_would_pursue_where_agents_deliberate():
    learner, memory, world = class_of_twelve()
    town, expert = learner.town, learner.expert
    for _ in range(20):  # until it wants different things in different worlds
        world = town.step_core(world, expert.act(world, memory.expert)[0])
    seen, (_, means, odds) = town.observe(world), expert.tell(world, memory.expert)
    assert means.unique().numel() > 3
    for clock in range(4):
        thinking = deliberating(12, 4, clock)
        due = memory.agent.clock.unflatten(0, (12, -1)) + clock
        assert bool((due[thinking] % 4 == 0).all())
        assert len(thinking) == 3
        record = learner.act(world, seen, memory, thinking, None)[2]
        told = record["expert_odds"].unflatten(0, (12, -1))
        assert torch.equal(told[thinking], odds[thinking])
        assert torch.equal(told[thinking].argmax(-1), means[thinking])


@pytest.mark.parametrize("share", [1.0, 0.3, 0.0])
def test_the_expert_is_asked_where_it_acts_or_agents_deliberate_and_says_what_it_would_anyway(
    share,
):
    """Though where it does not act it is asked after the last tick, when the worlds have moved."""
    learner = class_of_twelve()[0]
    learner.expert = Scripted(learner.town, ["expert_watching"], 0)  # it remembers what it saw
    sizes = TINY.policy.model_copy(update={"worlds": 12, "meta_period": 4, "rollout": 8})
    blank = new_mind(learner.town, sizes)[1]
    rollouts = Rollouts(learner, blank, sizes, 3, torch.Generator().manual_seed(0))
    driven = driven_worlds(12, share)
    assert driven.any() == (share > 0)
    assert driven.all() == (share == 1)
    plain, would = fused_step(learner.town, learner), []

    def step(world, carry, *context):
        would.append(learner.expert.tell(world, carry.expert))
        return plain(world, carry, *context)

    buffer = RolloutBuffer(8)
    for iteration in range(6):
        would.clear()
        thinking = rollouts.thinking(iteration)
        rollouts.play(step, buffer, thinking, share)
        for tick, answers in enumerate(would):
            asked = driven.index_fill(0, thinking[tick], True)
            assert asked.sum() >= 3
            for name, all_of_it in zip(TOLD, answers, strict=True):
                told = buffer.data[name][tick].unflatten(0, (12, -1))
                assert torch.equal(told[asked], all_of_it[asked]), name
                assert not told[~asked].any()
    assert torch.stack([goals for _, goals, _ in would]).unique().numel() > 3


def test_where_the_expert_acts_its_goal_is_the_one_that_is_pursued():
    """Else an agent would learn what to pursue next from goals that nobody pursued."""
    learner, memory, world = class_of_twelve()
    town, shape, driven = learner.town, learner.shape, torch.arange(12) < 6
    assert not memory.agent.goal_age.any()
    shown, pursued = driven.repeat_interleave(4), torch.full((48,), shape.num_goals)
    for clock in range(3):
        thinking, seen = deliberating(12, 4, clock), town.observe(world)
        action, after, record = learner.act(world, seen, memory, thinking, led(driven))
        assert torch.equal(record["f_pursued"], pursued)
        pursued = after.agent.goal
        assert torch.equal(pursued[shown], record["expert_goal"][shown])
        assert torch.equal(action.flatten()[shown], record["expert_action"][shown])
        assert torch.equal(after.agent.moved, action.flatten() + 1)
        meant = learner.told(world, memory.expert)["expert_goal"].flatten()
        assert torch.equal(meant[shown], record["expert_goal"][shown])
        assert (pursued != meant)[~shown].any()
        assert torch.equal(after.agent.clock, memory.agent.clock + 1)
        world, memory = town.step_core(world, action), after


@pytest.mark.parametrize(("period", "all_asked"), [(8, False), (3, False), (3, True)])
def test_where_nobody_leads_the_learner_acts_as_in_ppo_without_imagination(
    period, all_asked, monkeypatch
):
    """Imitation's cheaper tick is the same decision: by the prior, with the same noise. But at
    three ticks of four nobody turns to what looks better, unless the pursued goal has ended or it
    is time to deliberate; whether only those who may are asked or, as on a GPU, all."""
    if all_asked:
        monkeypatch.setattr("hamlet.modules.agent.asked_of", lambda due: torch.arange(len(due)))
    monkeypatch.setattr("hamlet.modules.agent.SWITCH_MARGIN", 0.02)  # of who has learned nothing
    learner, memory, world = class_of_twelve()
    town, mind, n = learner.town, learner.mind, learner.agents
    mind.policy.meta_period = period
    nobody, kept, ends = torch.zeros(12, dtype=torch.bool), 0, 0
    for _ in range(12):
        obs = observation_of(town.observe(world), 0, n)
        noise = [
            gumbel(world, n, size, stream)
            for size, stream in (
                (learner.shape.num_goals, GOAL_STREAM),
                (learner.shape.num_actions, ACTION_STREAM),
            )
        ]
        before = memory.agent
        expected, agent, record = mind.sample_step(obs, before, None, *noise)
        seen = town.observe(world)
        nowhere = torch.tensor([], dtype=torch.int64)
        action, after, found = learner.act(world, seen, memory, nowhere, led(nobody))
        ended = mind.policy.goal_ended(record["f_known_state"], before.goal, before.goal_age)
        due = ended | (before.clock % 4 == 0) | (before.clock % period == 0)
        same = after.agent.goal == agent.goal
        assert same[due].all()
        assert torch.equal(after.agent.goal[~due], before.goal[~due])
        assert torch.equal(after.agent.goal_age[~due], before.goal_age[~due] + 1)
        assert torch.equal(after.agent.goal_age[due], agent.goal_age[due])
        assert torch.equal(action.flatten()[same], expected[same])
        for name in ("belief", "social", "clock", "foreseen", "surprise"):
            assert torch.equal(getattr(after.agent, name), getattr(agent, name)), name
        for name in IMITATING[:7]:
            assert torch.equal(found[name], record[name]), name
        kept, ends = kept + (~same).sum(), ends + (ended & (before.clock % 4 > 0)).sum()
        world, memory = town.step_core(world, action), after
    assert kept > 5
    assert ends > 5


def test_the_expert_hands_over_world_by_world_evenly():
    """Who was taken over stays so; every rank's and every clock's worlds have their share."""
    before = torch.ones(128, dtype=torch.bool)
    for share in torch.linspace(1, 0, 21).tolist():
        driven = driven_worlds(128, share)
        assert not (driven & ~before).any()
        assert abs(int(driven.sum()) - share * 128) <= 2
        for part in (driven[:64], driven[64:], *(driven[clock::4] for clock in range(4))):
            assert abs(float(part.float().mean()) - share) <= 0.1
        before = driven
    assert not driven.any()


@pytest.mark.slow
def test_the_expert_goes_on_teaching_while_ppo_runs(tmp_path):
    """PPO that is told the expert's goals comes to choose them; PPO alone does not."""
    town = Town(load_pack("l4_contention"), num_layouts=8)
    shape, params = TownShape.of(town), TINY
    agreement = {}
    for kickstart_coef in (0.0, 3.0):
        sizes = params.policy.model_copy(
            update={
                "imitation_iterations": 0, "critic_iterations": 0, "ppo_iterations": 24,
                "worlds": 16, "rollout": 8, "minibatches": 2, "learning_rate": 3e-3,
                "max_kl": 100.0, "kickstart_coef": kickstart_coef,
            }
        )  # fmt: skip
        mind, blank = new_mind(town, sizes)
        before = {name: p.clone() for name, p in mind.policy.named_parameters()}
        log = Agreement()
        train_policy(
            town,
            shape,
            mind,
            blank,
            sizes,
            params.compile,
            0,
            tmp_path / f"{kickstart_coef}.pt",
            log,
        )
        agreement[kickstart_coef] = sum(log.values[-5:]) / 5
        for name, p in mind.policy.named_parameters():  # PPO leaves the controller as it was
            if name.startswith(("controller.", "goal_prior.")):
                assert torch.equal(p, before[name]) == name.startswith("controller."), name
    assert agreement[3.0] > agreement[0.0] + 0.1, agreement


def test_worlds_that_would_not_deliberate_evenly_are_refused_before_anything_is_made(tmp_path):
    town = Town(load_pack("l4_contention"), num_layouts=8)
    sizes = TINY.policy.model_copy(update={"worlds": 6, "meta_period": 4})
    mind, blank = new_mind(town, sizes)
    with pytest.raises(HamletError, match=r"policy\.worlds is 6, not a multiple of .* \(4\)"):
        train_policy(
            town, TownShape.of(town), mind, blank, sizes, TINY.compile, 0, tmp_path / "a.pt",
            StoppedLog(None),
        )  # fmt: skip


def test_the_critic_learns_in_the_last_quarter_of_imitation_and_after_it(tmp_path):
    town = Town(load_pack("l4_contention"), num_layouts=8)
    sizes = SHORT.model_copy(update={"imitation_iterations": 8, "ppo_iterations": 1})
    mind, blank = new_mind(town, sizes)
    critic = Critic(TownShape.of(town), sizes.hidden)
    before = [weight.clone() for weight in critic.parameters()]
    learns = []

    class Watching(StoppedLog):
        def record(self, step, metrics):
            moved = [not torch.equal(*pair) for pair in zip(before, critic.parameters())]
            assert all(moved) == any(moved)
            told = bool({"value_loss", "explained_variance"} & metrics.keys())
            learns.append((told, any(moved)))

    train_policy(
        town, TownShape.of(town), mind, blank, sizes, TINY.compile, 0, tmp_path / "a.pt",
        Watching(None), critic,
    )  # fmt: skip
    assert learns == [(False, False)] * 6 + [(True, True)] * 4


def test_what_imitation_left_is_kept_though_reinforcement_goes_on_after_an_interrupt(
    tmp_path, monkeypatch
):
    """As a training that ends with imitation leaves it."""
    town = Town(load_pack("l4_contention"), num_layouts=8)
    torch.set_num_threads(1)

    def trained(file: str, changes: dict, stop: int | None = None):
        mind, blank = new_mind(town, SHORT)
        found = train_policy(
            town, TownShape.of(town), mind, blank, SHORT.model_copy(update=changes), TINY.compile,
            0, tmp_path / file, StoppedLog(stop),
        )  # fmt: skip
        return mind.policy.state_dict(), found.imitated

    expected, same = trained("a.pt", {"critic_iterations": 0, "ppo_iterations": 0})
    assert all(torch.equal(expected[name], same[name]) for name in expected)
    monkeypatch.setattr("hamlet.learning.train_policy.Checkpoint", partial(Checkpoint, interval=0))
    with pytest.raises(Stopped):
        trained("b.pt", {}, 4)
    learned, imitated = trained("b.pt", {})
    # The rate of imitation falls to its own end, so both imitated alike.
    assert all(torch.equal(expected[name], imitated[name]) for name in expected)
    assert any(not torch.equal(learned[name], imitated[name]) for name in learned)


def test_a_place_is_for_the_meter_that_a_whole_use_restores_most():
    pack = load_pack("l4_contention")

    def target(duration, **effects):
        place = pack.affordances[0].model_copy(update={"duration": duration, **effects})
        changed = pack.model_copy(update={"affordances": (place, *pack.affordances[1:])})
        targets = goal_targets(Town(changed, num_layouts=8))[0]
        (meter,) = targets.nonzero().flatten().tolist()
        assert targets[meter] == pytest.approx(0.95)
        return pack.meter_names[meter]

    mood, energy = {"mood": 0.3}, {"energy": 0.05}
    assert target(4, effects_per_tick=energy, effects_on_completion=mood) == "mood"
    assert target(7, effects_per_tick=energy, effects_on_completion=mood) == "energy"
    both = mood | {"energy": 0.15}
    assert target(4, effects_per_tick=energy, effects_on_completion=both) == "energy"
