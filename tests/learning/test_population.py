"""Learning among strangers: who plays whom, who is met, what the matches say, who has children."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from hamlet.learning.checkpoint import Checkpoint
from hamlet.learning.learner import Learner, RolloutCarry
from hamlet.learning.population import (
    Characters,
    Everyone,
    Match,
    Selves,
    Strangers,
    chances,
    elo,
    play,
    play_alone,
    standing,
)
from hamlet.learning.rollout import fused_step
from hamlet.learning.train_policy import train_policy
from hamlet.modules.agent import Mind
from hamlet.modules.contracts import TownShape
from hamlet.modules.critic import Critic
from hamlet.modules.policy import Policy
from hamlet.params import load_params
from hamlet.town import Scripted, Town, load_pack
from hamlet.town.evolution import GENES, founders, next_generation
from hamlet.town.personalities import AgentDNA
from tests.learning.interrupted import Stopped, StoppedLog
from tests.learning.minds import new_mind

PARAMS = load_params(Path(__file__).parents[2] / "params.yaml", "tiny")
SIZES = PARAMS.policy.model_copy(
    update={
        "imitation_iterations": 0, "critic_iterations": 1, "ppo_iterations": 4, "worlds": 8,
        "rollout": 4, "minibatches": 2,
    }
)  # fmt: skip


@pytest.fixture(scope="module")
def town():
    pack = load_pack("l4_contention").model_copy(update={"lifespan": 12})
    return Town(pack, num_layouts=8)


def another(policy: Policy, seed: int) -> Policy:
    """A module D of the same sizes with other weights."""
    torch.manual_seed(seed)
    other = copy.deepcopy(policy)
    for layer in other.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.reset_parameters()
    return other.requires_grad_(False)


def seat(mind: Mind, town: Town, blank, policy: Policy, first: int, last: int) -> Selves:
    its = Mind(mind.perceive, mind.imagine_tick, mind.read_others, policy, 2, 2)
    return Selves(its, TownShape.of(town), blank, first, last, imagines=True)


def strangers(town, mind, blank, chance):
    visitor = another(mind.policy, 1)
    past = [another(mind.policy, seed) for seed in (2, 3)]
    return Strangers(
        Characters(Scripted(town, None, 0), 2, 4),
        seat(mind, town, blank, visitor, 2, 4),
        past,
        torch.tensor(chance),
    )


def test_the_first_half_learns_and_strangers_play_the_rest(town):
    shape = TownShape.of(town)
    mind, blank = new_mind(town, SIZES)
    co_players = strangers(town, mind, blank, [1.0, 0.0])
    co_players.meet(torch.Generator().manual_seed(0))
    learner = Learner(town, shape, mind, Critic(shape, 8), None, co_players)
    world = town.reset(3, 8)
    seen, thinking = town.observe(world), torch.arange(2) * 4
    memory = RolloutCarry(blank(8, 2), None, co_players.start(8))
    acted, after, record = learner.act(world, seen, memory, thinking, None)
    assert acted.shape == (8, 4)
    assert record["action"].shape == record["value"].shape == (16,)
    assert torch.equal(acted[:, :2].flatten(), record["action"])
    scripted = Scripted(town, None, 0)
    assert torch.equal(acted[:4, 2:], scripted.act(world, scripted.reset(world))[0][:4, 2:])
    # In the other worlds the past self, which nothing of the learner's has changed.
    alone = seat(mind, town, blank, co_players.past[0], 2, 4)
    alone.imagines = False
    theirs, _ = alone.act(world[4:], seen[4:], alone.start(4))
    assert torch.equal(acted[4:, 2:], theirs)
    _, answer = learner.outcome(world, town.step_and_reset_core(world, acted), after)
    assert answer["reward"].shape == answer["active"].shape == (16,)


def test_a_stranger_forgets_at_the_end_of_its_life(town):
    mind, blank = new_mind(town, SIZES)
    co_players = strangers(town, mind, blank, [1.0, 0.0])
    lived = co_players.start(8)._replace(belief=torch.ones_like(co_players.start(8).belief))
    over = torch.tensor([True, False] * 4)
    left = co_players.forget(lived, over).belief.unflatten(0, (4, 2))  # of the last four worlds
    assert bool((left[0] == 0).all())
    assert bool((left[1] == 1).all())


def test_who_is_beaten_less_comes_more_often(town):
    mind, blank = new_mind(town, SIZES)
    odds = chances(torch.tensor([0.9, 0.5, 0.5]))
    assert odds.sum() == pytest.approx(1)
    assert (odds / odds[0]).tolist() == pytest.approx([1, 25, 25])
    assert bool((chances(torch.ones(3)) == 1 / 3).all())  # who beats all still meets all
    co_players = strangers(town, mind, blank, [0.2, 0.8])
    rng, met = torch.Generator().manual_seed(0), 0
    for _ in range(200):
        co_players.meet(rng)
        weight = co_players.selves.mind.policy.controller[0].weight
        is_second = torch.equal(weight, co_players.past[1].controller[0].weight)
        assert is_second or torch.equal(weight, co_players.past[0].controller[0].weight)
        met += is_second
    assert 140 < met < 180


def test_matches_seat_who_they_say_and_leave_the_town_as_it_was():
    """Two experts beside two who always rest: as if each half had been played by its own script."""
    pack = load_pack("l4_contention").model_copy(update={"lifespan": 200})
    town = Town(pack, num_layouts=8)
    rest, expert = Scripted(town, ["rest"]), Scripted(town, ["expert"])
    returns = play(town, Characters(expert, 0, 2), Characters(rest, 2, 4), 6, 5)
    again = play(town, Characters(rest, 0, 2), Characters(expert, 2, 4), 6, 5)
    assert returns.shape == (6, 4)
    assert returns[:, :2].mean() > returns[:, 2:].mean()
    assert again[:, 2:].mean() > again[:, :2].mean()
    assert "next_case" not in town.reset(0, 2).keys()  # noqa: SIM118


def test_equal_members_fare_equally_and_their_noise_differs(town):
    mind, blank = new_mind(town, SIZES)
    seats = seat(mind, town, blank, mind.policy, 0, 2), seat(mind, town, blank, mind.policy, 2, 4)
    step = fused_step(town, Match(*seats))
    world = town.reset(0, 64)
    state, _, _ = step(world, tuple(s.start(64) for s in seats))
    acts = state["last_action"]
    assert not torch.equal(acts[:, :2], acts[:, 2:])
    returns = play(town, *seats, 64, 0)
    gap = returns[:, :2].mean(1) - returns[:, 2:].mean(1)
    assert gap.mean().abs() < 4 * gap.std() / 64**0.5


def test_alone_all_places_are_played_by_the_same():
    """Characters among themselves get what they get in the town, each place its own return."""
    pack = load_pack("l4_contention").model_copy(update={"lifespan": 12})
    town = Town(pack, num_layouts=8)
    scripted = Scripted(town, ["expert"], 3)
    returns = play_alone(town, Characters(scripted, 0, town.num_agents), 6, 4)
    town.eval(6)
    world = town.reset(4, 6)
    expected = torch.zeros(6, town.num_agents, dtype=torch.float64)
    nothing = TensorDict({}, batch_size=[6])
    for _ in range(12):
        world = town.step_core(world, scripted.act(world, nothing)[0])
        expected += world["reward"]
    town.train()
    torch.testing.assert_close(returns, expected)
    assert returns.std() > 0


def test_whoever_plays_alone_forgets_where_its_world_is_over_and_only_there():
    forgotten = []

    class Seat:
        def forget(self, memory, over):
            forgotten.append(over.tolist())
            return memory

    flags = {"episode_over": [True, False, False], "over": [False] * 3, "done": [True, True, False]}
    after = TensorDict({k: torch.tensor(x) for k, x in flags.items()}, batch_size=[3])
    after["reward"] = torch.arange(6.0).view(3, 2)
    _, told = Everyone(Seat()).outcome(after, after, ())
    assert forgotten == [[True, False, False]]
    assert told["returns"].tolist() == [[0, 1], [2, 3], [4, 5]]


def test_a_match_that_nobody_wins_is_half_a_win():
    table = torch.zeros(2, 2, 10, 2, dtype=torch.float64)
    table[0, 1, :2, 0] = table[0, 1, 6:, 1] = 1.0  # of ten it wins two, and four are even
    table[1, 0, :5, 0] = table[1, 0, 5:, 1] = 1.0  # the other one wins five, and none is even
    wins = standing(table).wins
    assert wins.tolist() == [[0.5, pytest.approx(0.45)], [pytest.approx(0.55), 0.5]]


def test_what_a_table_of_matches_says():
    """The first of three loses to both, the others are equal; all do better among weak ones."""
    table = torch.zeros(3, 3, 10, 2, dtype=torch.float64)
    strength = [1.0, 3.0, 3.0]
    for i in range(3):
        for j in range(3):
            table[i, j] = torch.tensor([strength[i] + 1 / (1 + strength[j]),
                                        strength[j] + 1 / (1 + strength[i])])  # fmt: skip
    found = standing(table)
    assert found.payoff[1].tolist() == pytest.approx([3.5, 3.25, 3.25])
    assert found.wins.tolist() == [[0.5, 0.0, 0.0], [1.0, 0.5, 0.5], [1.0, 0.5, 0.5]]
    assert found.exploitability.tolist() == pytest.approx([3.5 - 1.5, 0.0, 0.0])
    assert found.elo[0] == 0
    assert found.elo[1] == found.elo[2] > 400


def test_ratings_are_those_whose_odds_fit():
    """Odds made from ratings give the ratings back, but for the half win added to both sides."""
    true = torch.tensor([0.0, 120.0, -200.0], dtype=torch.float64)
    wins = 1 / (1 + 10 ** ((true.unsqueeze(0) - true.unsqueeze(1)) / 400))
    assert elo(wins).tolist() == pytest.approx(true.tolist(), abs=6.0)


def test_a_member_that_is_interrupted_ends_the_same(town, tmp_path, monkeypatch):
    """Its strangers' minds and who came are part of what is kept."""

    def train(file, stop=None):
        mind, blank = new_mind(town, SIZES)
        torch.manual_seed(4)
        critic = Critic(TownShape.of(town), 8)
        co_players = strangers(town, mind, blank, [0.5, 0.5])
        train_policy(
            town, TownShape.of(town), mind, blank, SIZES, PARAMS.compile, 0, tmp_path / file,
            StoppedLog(stop), critic, co_players,
        )  # fmt: skip
        return mind.policy.state_dict() | critic.state_dict()

    torch.set_num_threads(1)
    whole = train("whole.pt")
    always = partial(Checkpoint, interval=0.0)
    monkeypatch.setattr("hamlet.learning.train_policy.Checkpoint", always)
    with pytest.raises(Stopped):
        train("cut.pt", 3)
    assert torch.load(tmp_path / "cut.pt", weights_only=True)["step"] == 3
    resumed = train("cut.pt")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_children_resemble_their_parents_and_the_fit_live_on():
    people = founders()
    fitness = torch.arange(8.0)
    rng = torch.Generator().manual_seed(0)
    after = next_generation(people, fitness, rng)
    assert after[:4] == people[:3:-1]
    for child in after[4:]:
        assert child.generation == 1
        assert all(parent >= 4 for parent in child.parent_ids)
        mother, father = (people[k] for k in child.parent_ids)
        assert child.family_id == mother.family_id
        for gene in GENES:
            value = getattr(child, gene)
            assert 0 <= value <= 1
            assert min(abs(value - getattr(p, gene)) for p in (mother, father)) < 0.5
    assert next_generation(people, fitness, torch.Generator().manual_seed(0)) == after


def test_selection_moves_the_genes_towards_what_is_fit():
    people, rng = founders(), torch.Generator().manual_seed(0)
    for _ in range(30):
        people = next_generation(people, torch.tensor([p.greed for p in people]), rng)
    assert min(p.greed for p in people) > 0.9
    assert max(p.generation for p in people) > 1


def test_anybody_can_be_played_by_dna(town):
    world = town.reset(0, 6)
    named = Scripted(town, ["hustler"])
    known = Scripted(town, [AgentDNA(0.8, 0.9, 0.0, 0.4)])
    other = Scripted(town, [AgentDNA(0.0, 0.1, 1.0, 1.0)])
    differs = False
    for _ in range(12):
        actions = [p.act(world, p.reset(world))[0] for p in (named, known, other)]
        assert torch.equal(actions[0], actions[1])
        differs |= not torch.equal(actions[0], actions[2])
        world = town.step_core(world, actions[0])
    assert differs
