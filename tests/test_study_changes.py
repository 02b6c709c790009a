"""What a trained agent's parts change, counted; and what habits are worth."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.study_changes import (
    CHANGES,
    HABITS,
    WITHOUT,
    Counting,
    changes,
    goals_without,
    set_to,
    without_habits,
)
from benchmarks.study_players import Everyone
from benchmarks.study_report import decided, report, table
from hamlet.learning.rollout import evaluate, fused_step
from hamlet.learning.trials import habits
from hamlet.modules.contracts import observation_from
from tests.learning.minds import new_mind
from tests.test_study import RNG, SHAPE, SIZES, TOWN, cells

WORLDS = 6


@pytest.fixture
def mind_and_first() -> tuple[Any, Any]:
    """A mind that knows a place when it sees it, goes where most is to be had, and heeds what it
    imagines."""
    mind, first = new_mind(TOWN, SIZES)
    kinds = torch.arange(SHAPE.num_affordances)
    with torch.no_grad():
        table = mind.perceive.location_table.weight.fill_(-1.0)
        table[kinds + 2, kinds] = 1.0
        mind.policy.goal_prior.sharpness.fill_(5.0)
        mind.policy.future_weight[-1].weight.normal_(0.0, 1e4, generator=RNG.manual_seed(2))
    mind.policy.stays = habits(TOWN.lifespan)["stays"].ways
    return mind, first


def later(mind, first):
    world, state = TOWN.reset(3, WORLDS), first(WORLDS)
    for _ in range(6):
        obs = observation_from(TOWN.observe(world), 2)
        _, _, belief, social = mind.sense_features(obs, state)
        state = state._replace(belief=belief, social=social, clock=state.clock + 1)
        moves = torch.randint(4, (WORLDS, SHAPE.num_agents), generator=RNG.manual_seed(1))
        world = TOWN.step_core(world, moves)
    return world, observation_from(TOWN.observe(world), 2), state


def test_the_whole_agents_goals_are_those_that_it_deliberates(mind_and_first):
    mind, first = mind_and_first
    _, obs, state = later(mind, first)
    everybody = torch.arange(WORLDS * SHAPE.num_agents)
    noise = [torch.zeros(len(everybody), n) for n in (SHAPE.num_goals, SHAPE.num_actions)]
    state = state._replace(clock=torch.zeros_like(state.clock))
    with torch.no_grad():
        _, after, _ = mind.sample_step(obs, state, everybody, *noise)
    assert torch.equal(goals_without(mind, obs, state, "nothing"), after.goal)


def test_each_part_is_taken_away_alone_and_given_back(mind_and_first):
    mind, first = mind_and_first
    _, obs, state = later(mind, first)
    kept = {name: x.clone() for name, x in mind.policy.state_dict().items()}
    whole = goals_without(mind, obs, state, "nothing")
    found = {part: goals_without(mind, obs, state, part) for part in CHANGES}
    assert all(torch.equal(x, mind.policy.state_dict()[name]) for name, x in kept.items())
    with torch.no_grad():
        f = mind.sense_features(obs, state)[0]
        prior = mind.policy.prior_logits(f)
        assert torch.equal(found["futures"], prior.argmax(-1))
        with set_to(mind.policy, stays=torch.tensor([[1.0]])):
            assert torch.equal(found["imagination"], mind.policy.prior_logits(f).argmax(-1))
        mind.policy.prospects.menu.zero_()
        assert torch.equal(found["world_model"], mind.policy.prior_logits(f).argmax(-1))
    assert (found["futures"] != whole).any()
    assert (found["memory"] != whole).any()
    fresh = mind.sense_features(obs, state._replace(belief=torch.zeros_like(state.belief)))[0]
    mind.policy.prospects.menu.copy_(kept["prospects.menu"])

    def sense(obs, state):
        return fresh, None, None, None

    mind.sense_features, mind.imagine = sense, lambda *_: pytest.fail("imagines")
    assert torch.equal(
        goals_without(mind, obs, state, "futures"), mind.policy.prior_logits(fresh).argmax(-1)
    )


def test_without_the_social_model_nobody_is_expected_anywhere(mind_and_first):
    mind, first = mind_and_first
    _, obs, state = later(mind, first)
    sensed, asked = mind.sense_features(obs, state), []
    mind.sense_features = lambda *_: sensed
    believed = mind.policy.prior_logits
    mind.policy.prior_logits = lambda f: asked.append(f) or believed(f)
    goals_without(mind, obs, state, "nothing")
    goals_without(mind, obs, state, "social")
    whole, alone = asked
    assert whole.rivals.any()
    assert not alone.rivals.any()
    assert not alone.ahead.any()
    same = ("mean", "log_std", "known_state", "pursued", "moved")
    assert all(torch.equal(getattr(whole, name), getattr(alone, name)) for name in same)


def lived(everyone: Everyone, first: Any) -> Any:
    TOWN.eval(WORLDS)
    return evaluate(TOWN, fused_step(TOWN, everyone), first(WORLDS), WORLDS, WORLDS, 3)


def test_changes_are_shares_of_the_deliberations_of_who_lives(mind_and_first, monkeypatch):
    mind, first = mind_and_first
    seen: list[int] = []

    def goals(mind, obs, state, part):
        assert (state.clock % mind.policy.meta_period == 0).all()
        whole = torch.zeros(len(state.clock), dtype=torch.int64)
        if part == "futures":
            seen.append(len(whole))
            return whole.index_fill(0, torch.arange(0, len(whole), 2), 1)
        return whole + (part == "memory")

    monkeypatch.setattr("benchmarks.study_changes.goals_without", goals)
    everyone = Everyone(TOWN, SHAPE, mind, False, first)
    plain = lived(everyone, first)["returns"]
    shares = changes(everyone, lambda player: lived(player, first))
    assert shares.keys() == CHANGES.keys()
    assert shares["memory"] == 1.0
    assert shares["social"] == shares["world_model"] == shares["imagination"] == 0.0
    assert 0.4 < shares["futures"] < 0.6
    # Who counts lives as who does not; each while it lives, once in a period.
    counting = Counting(TOWN, SHAPE, mind, False, first)
    record = lived(counting, first)
    assert torch.equal(record["returns"], plain)
    assert counting.deliberations * 2 == sum(seen)
    periods = record["ticks"] / SIZES.meta_period
    assert periods.floor().sum() <= counting.deliberations <= periods.ceil().sum()
    assert record["ticks"].mean() < TOWN.lifespan - SIZES.meta_period


def test_a_habit_is_left_out_and_given_back(mind_and_first):
    policy = mind_and_first[0].policy
    policy.scouts, policy.countdown = torch.tensor([[True]]), torch.tensor([[50.0]])
    kept = {name: getattr(policy, name) for name in HABITS}
    found = iter(range(10))
    asked = []

    def returns() -> float:
        asked.append({name: getattr(policy, name) for name in HABITS})
        return float(next(found))

    assert without_habits(mind_and_first[0], returns) == {"scouts": 0, "stays": 1, "countdown": 2}
    for name, held in zip(HABITS, asked, strict=True):
        assert held == {**kept, name: WITHOUT[name]}
    assert {name: getattr(policy, name) for name in HABITS} == kept
    untried = new_mind(TOWN, SIZES)[0].policy
    assert all(torch.equal(getattr(untried, name), value) for name, value in WITHOUT.items())


def test_the_report_says_what_changes_and_what_habits_are_worth():
    made = cells({"full": [100, 110, 120], "flat": [90, 101, 110]})
    for cell in made:
        if cell["variant"] == "full":
            cell["changed"] = dict.fromkeys(CHANGES, 0.25) | {"memory": 0.5 + cell["seed"] / 100}
            cell["without"] = dict.fromkeys(HABITS, cell["mean_return"] - 2.0)
            cell["without"]["scouts"] += 2.0 * (-1) ** cell["seed"]
    found = decided([cell for cell in made if cell["variant"] == "full"])
    assert found["changed"]["social"] == {"share": 0.25, "ci95": 0.0}
    assert found["changed"]["memory"]["share"] > 0.5
    assert found["habits"]["stays"]["worth"] == pytest.approx(2.0)
    told = table(report(made), "l4_contention")
    assert f"| {CHANGES['futures']} | 25.0 ± 0.0 |" in told
    assert f"| {HABITS['stays']} | 2.0 ± 0.0 | clear of zero |" in told
    assert "not clear of zero |" in told.split(HABITS["scouts"])[1].splitlines()[0]
