"""The study: each variant lacks what it says, and only that; what the report makes of cells."""

from __future__ import annotations

import json
import shutil
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks import plain_town
from benchmarks.monolith import Monolith, MonolithPlayer, train_monolith
from benchmarks.study import (
    REWARDED,
    Flat,
    RandomGoals,
    Shown,
    StudiedMind,
    plain_ticks,
    trained_rival,
)
from benchmarks.study_changes import CHANGES, HABITS
from benchmarks.study_players import ActingExpert, Resting, Sharing
from benchmarks.study_report import VARIANTS, report, table
from hamlet.artifacts import HamletError, write_json
from hamlet.learning.buffer import RolloutBuffer
from hamlet.learning.checkpoint import Checkpoint
from hamlet.learning.learner import Learner, RolloutCarry, led
from hamlet.learning.rollout import collect, evaluate, fused_step
from hamlet.learning.train_policy import goal_targets, train_policy
from hamlet.modules.categorical import log_prob_of, masked_logits
from hamlet.modules.contracts import Features, TownShape, observation_from
from hamlet.modules.critic import Critic
from hamlet.modules.policy import LOGIT_CAP, Policy
from hamlet.own.params import PerceptionParams
from hamlet.params import load_params
from hamlet.plain.perception import Perception
from hamlet.plain.policy import Policy as PlainPolicy
from hamlet.plain.senses import statistics_of
from hamlet.town import Scripted, Town, load_pack
from hamlet.town.tables import menu, timetable
from tests.learning.interrupted import Stopped, StoppedLog
from tests.learning.minds import new_mind

SIZES = load_params(Path(__file__).parents[1] / "params.yaml", "tiny").policy
TOWN = Town(load_pack("l4_contention"), num_layouts=8)
SHAPE = TownShape.of(TOWN)


def studied(variant: str, policy: Policy | None = None) -> tuple[StudiedMind, object]:
    whole, blank = new_mind(TOWN, SIZES)
    mind = StudiedMind(
        whole.perceive, whole.imagine_tick, whole.read_others, policy or whole.policy, 2, 2
    )
    mind.variant = variant
    return mind, blank


def of_kind(kind: type[Policy]) -> Policy:
    torch.manual_seed(1)
    told = goal_targets(TOWN), timetable(TOWN.pack), menu(TOWN.pack), SIZES.meta_period, 0.2
    belief = new_mind(TOWN, SIZES)[0].perceive.belief_dim
    return kind(SHAPE, belief, 24, *told)


@torch.no_grad()
def sensed(variant: str) -> tuple[Features, torch.Tensor, torch.Tensor]:
    """Features after some ticks, then what was imagined of two candidates."""
    mind, blank = studied(variant)
    world, state = TOWN.reset(3, 6), blank(6)
    for _ in range(6):
        obs = observation_from(TOWN.observe(world), 2)
        f, log_std, belief, social = mind.sense_features(obs, state)
        state = state._replace(belief=belief, social=social)
        world = TOWN.step_core(world, torch.randint(4, (6, 4), generator=RNG.manual_seed(1)))
    candidates = torch.tensor([[0, 1]]).expand(24, 2)
    _, returns = mind.imagine(log_std, f, obs.action_mask, candidates)
    return f, belief, returns


RNG = torch.Generator()


def test_each_variant_lacks_what_it_says_and_nothing_else():
    full, remembered, imagined = sensed("full")
    assert full.rivals.any()
    assert imagined.any()

    f, memory, returns = sensed("no_social")
    assert not torch.cat([f.rivals, f.ahead.flatten(1)], -1).any()
    assert torch.equal(f.mean, full.mean)
    assert torch.equal(memory, remembered)
    assert returns.any()

    f, memory, returns = sensed("no_memory")
    assert f.rivals.any()
    seen, known = (x[:, 16:].count_nonzero(1) for x in (memory, remembered))
    assert (seen <= 25).all()
    assert (known > seen).any()

    f, _, returns = sensed("no_imagination")
    assert not returns.any()
    for ours, theirs in zip(f, full, strict=True):
        assert torch.equal(ours, theirs)


def test_the_flat_agents_goal_is_its_action():
    policy = of_kind(Flat)
    f = sensed("flat")[0]
    logits = policy.prior_logits(f)
    assert (logits[:, SHAPE.num_actions :] == -LOGIT_CAP).all()
    assert logits[:, : SHAPE.num_actions].std() > 0
    logits.square().sum().backward()
    both = [*policy.goal_prior.parameters(), *policy.controller.parameters()]
    assert all(x.grad is not None and x.grad.any() for x in both)
    for goal in range(SHAPE.num_actions):
        chosen = torch.full((24,), goal)
        assert (policy.action_logits(f, chosen).argmax(-1) == goal).all()
    world, scripted = TOWN.reset(3, 6), Scripted(TOWN, ["expert"])
    memory = scripted.reset(world)
    action, goal, _ = ActingExpert(scripted).act(world, memory)
    assert torch.equal(action, goal)
    assert torch.equal(action, scripted.act(world, memory)[0])
    told, meant, odds = ActingExpert(scripted).tell(world, memory)
    assert torch.equal(told, action)
    assert torch.equal(meant, action)
    assert torch.equal(odds, torch.nn.functional.one_hot(action, TOWN.num_goals).float())


def test_random_goals_are_as_likely_as_each_other_and_are_still_pursued():
    policy, f = of_kind(RandomGoals), sensed("full")[0]
    assert not policy.prior_logits(f).any()
    one, other = (policy.action_logits(f, torch.full((24,), goal)) for goal in (0, 5))
    assert not torch.equal(one, other)


def test_who_shares_gets_the_mean_reward_of_its_world():
    shared = Sharing(TOWN.pack, layouts=TOWN.affordance_cells)
    actions = torch.randint(5, (6, SHAPE.num_agents), generator=RNG.manual_seed(2))
    world = TOWN.reset(3, 6)
    worn = world["meters"] * torch.linspace(0.1, 1, SHAPE.num_agents)[:, None]
    world = TOWN.rearrange(world, meters=worn)
    own, given = (town.step_and_reset_core(world, actions) for town in (TOWN, shared))
    assert own["reward"].std(1).min() > 0
    for agent in range(SHAPE.num_agents):
        torch.testing.assert_close(given["reward"][:, agent], own["reward"].mean(1))
    rest = {name: value for name, value in own.items() if name != "reward"}
    assert all(torch.equal(value, given[name]) for name, value in rest.items())


def test_who_learns_alone_is_led_in_its_own_place_while_the_others_rest():
    mind, blank = new_mind(TOWN, SIZES)
    co_players = Resting(SHAPE, SHAPE.num_agents - 1)
    expert = Scripted(TOWN, ["expert"])
    learner = Learner(TOWN, SHAPE, mind, Critic(SHAPE, 8), expert, co_players)
    world, driven = TOWN.reset(3, 12), torch.arange(12) < 6
    thinking = torch.tensor([1, 5, 9])
    memory = RolloutCarry(blank(12, 1), expert.reset(world), co_players.start(12))
    for _ in range(20):  # until they want different things
        world = TOWN.step_core(world, expert.act(world, memory.expert)[0])
    shown, meant, _ = expert.act(world, memory.expert)
    assert (meant[:, :1] != meant[:, -1:]).sum() > 3
    seen = TOWN.observe(world)
    action, after, record = learner.act(world, seen, memory, thinking, led(driven))
    assert torch.equal(action[driven, 0], shown[driven, 0])
    assert torch.equal(after.agent.goal[driven], meant[driven, 0])
    assert (action[:, 1:] == SHAPE.action_names.index("WAIT")).all()
    assert torch.equal(record["expert_action"], torch.where(driven, shown[:, 0], 0))
    assert torch.equal(record["expert_goal"], torch.where(driven, meant[:, 0], 0))
    told = learner.told(world, memory.expert)
    assert torch.equal(told["expert_goal"], meant[:, :1])
    assert torch.equal(told["expert_odds"].argmax(-1), meant[:, :1])


def test_an_interrupted_training_alone_ends_the_same(tmp_path, monkeypatch):
    few = {"imitation_iterations": 3, "critic_iterations": 1, "ppo_iterations": 2, "rollout": 4}
    sizes = SIZES.model_copy(update=few)
    compiling = load_params(Path(__file__).parents[1] / "params.yaml", "tiny").compile

    def train(file, stop=None):
        mind, blank = new_mind(TOWN, sizes)
        train_policy(
            TOWN, SHAPE, mind, blank, sizes, compiling, 0, tmp_path / file, StoppedLog(stop),
            co_players=Resting(SHAPE, SHAPE.num_agents - 1),
        )  # fmt: skip
        return mind.policy.state_dict()

    torch.set_num_threads(1)
    whole = train("whole.pt")
    always = partial(Checkpoint, interval=0.0)
    monkeypatch.setattr("hamlet.learning.train_policy.Checkpoint", always)
    for stop in (2, 5):  # while it imitates, and in PPO
        with pytest.raises(Stopped):
            train("cut.pt", stop)
    resumed = train("cut.pt")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_self_play_is_told_where_it_was_measured():
    made = cells({"full": [100, 110, 120], "alone": [90, 101, 110]})
    assert "Self-play" not in table(report(made), "x")
    for c in made:
        c["focal"] = c["mean_return"] + 50
    found = report(made)
    assert found["alone"]["focal_cost"] == pytest.approx(29 / 3)
    assert "150.3" in table(found, "x")


def cells(costs: dict[str, list[float]]) -> list[dict]:
    return [
        {
            "variant": v,
            "seed": s,
            "mean_return": r,
            "retired_fraction": 1.0,
            "pack": "x",
            "cpu_seconds": 10.0 * s,
            "processor": "AVX2",
        }
        for v, returns in costs.items()
        for s, r in enumerate(returns, 1)
    ]


def test_a_module_matters_when_its_cost_is_clear_of_zero():
    found = report(
        cells({"full": [100, 110, 120], "no_social": [90, 101, 110], "flat": [101, 100, 125]})
    )
    assert list(found) == ["full", "no_social", "flat"]
    assert found["no_social"]["cost"] == pytest.approx(29 / 3)
    assert found["no_social"]["cost_ci95"] == pytest.approx(4.303 * 0.57735 / 3**0.5, rel=1e-3)
    assert found["no_social"]["matters"]
    assert not found["flat"]["matters"]
    assert found["no_social"]["cpu"] == 1.0
    assert "cost" not in found["full"]


def test_times_of_unlike_processors_are_not_compared():
    faster = cells({"full": [100, 110], "flat": [90, 101]})
    faster[2] |= {"processor": "AVX512", "cpu_seconds": 1.0}
    assert report(faster)["flat"]["cpu"] == 1.0  # that of the second seed
    faster[3] |= {"processor": "AVX512", "cpu_seconds": 1.0}
    assert "cpu" not in report(faster)["flat"]


def test_one_seed_proves_nothing():
    found = report(cells({"full": [100], "no_social": [1]}))
    assert found["no_social"]["cost_ci95"] == float("inf")
    assert not found["no_social"]["matters"]
    assert "| 99.0 | not clear of zero |" in table(found, "x")
    assert "inf" not in table(found, "x")


def test_a_rival_without_its_library_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "benchmarks.learning_peers", raising=False)
    # A part that another test had imported would still be found without the whole.
    for name in [*sys.modules, "gymnasium"]:
        if name.partition(".")[0] == "gymnasium":
            monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(HamletError, match="lstm_ppo: the `bench` extra is not installed"):
        trained_rival(TOWN, "lstm_ppo", SIZES, 0, Shown("lstm_ppo"))


def test_the_plain_modules_get_as_many_ticks_or_as_much_processor_time(tmp_path, monkeypatch):
    params = load_params(Path(__file__).parents[1] / "params.yaml", "tiny")
    counts = {"worlds": 4, "rollout": 8, "imitation_iterations": 3, "critic_iterations": 1}
    sizes = params.policy.model_copy(update={**counts, "ppo_iterations": 2})
    data = params.collect.model_copy(update={"worlds": 5, "held_out_worlds": 1, "ticks": 10})
    params = params.model_copy(update={"policy": sizes, "collect": data})
    assert plain_ticks(params, "plain", 7) == 6 * 8 * 4 + 60
    monkeypatch.setattr("benchmarks.study.RESULTS", tmp_path)
    with pytest.raises(HamletError, match=r"are not known: run `python -m .* cell full 7`"):
        plain_ticks(params, "plain_time", 7)
    for name, seconds in (("full", 300.0), ("plain", 200.0)):
        write_json(tmp_path / f"{name}-7.json", {"cpu_seconds": seconds})
    assert plain_ticks(params, "plain_time", 7) == round(1.5 * 252)
    write_json(tmp_path / "full-7.json", {"cpu_seconds": 300.0, "processor": "another"})
    with pytest.raises(HamletError, match="on one kind of processor"):
        plain_ticks(params, "plain_time", 7)


def test_the_plain_modules_learn_in_the_town_and_live_in_it(monkeypatch):
    """Lives end and begin within the training; what was learned lives in every place."""
    rollout = 64 * plain_town.LANES
    monkeypatch.setattr(plain_town, "RANDOM_TICKS", rollout)
    monkeypatch.setattr(plain_town, "PerceptionParams", partial(PerceptionParams, steps=4))
    town = Town(load_pack("l4_contention").model_copy(update={"lifespan": 30}), num_layouts=8)
    torch.set_num_threads(1)
    perception, policy, taken = plain_town.train_plain(town, 3 * rollout, 0, Shown)
    assert taken == 3 * rollout
    player = plain_town.PlainPlayers(plain_town.shape_of(town), perception, policy, 0)
    town.eval(3)
    lived = evaluate(town, fused_step(town, player), player.start(2), 3, 2, 1)
    assert lived["returns"].shape == (3, town.num_agents)
    assert (lived["ticks"] > 0).all()


def test_what_the_plain_players_remember_is_of_one_life():
    town = Town(load_pack("l4_contention").model_copy(update={"lifespan": 5}), num_layouts=8)
    shape = plain_town.shape_of(town)
    seen = plain_town.fields_in(shape, town.observe(town.reset(0, 8)))
    rows = torch.ones(len(seen["view"]), dtype=torch.bool)
    perception = Perception(shape, statistics_of(shape, seen, rows), 8)
    policy = PlainPolicy(perception.senses.width, 8, shape.num_actions, 8)
    player = plain_town.PlainPlayers(shape, perception, policy, 0)
    world, memory = town.reset(0, 2), player.start(2)
    step, acted, believed = fused_step(town, player), [], []
    with torch.no_grad():
        for _ in range(6):
            world, memory, _ = step(world, memory)
            acted.append(memory["acted"].clone())
            believed.append(memory["belief"].abs().sum())
    assert (acted[3] > 0).all()
    assert (acted[4] == 0).all(), "a life has ended in every place"
    assert (acted[5] > 0).all()
    assert believed[3] > 0
    assert believed[4] == 0


@pytest.mark.slow
def test_a_cell_and_the_report_of_the_tiny_pipeline(copy):
    shutil.rmtree(copy.path / "benchmarks" / "results" / "study")
    needs = dict.fromkeys(REWARDED, "gymnasium")
    some = ("full", "flat", "alone", "monolith", "lstm_ppo")  # of every kind
    installed = [name for name in some if name not in needs or find_spec(needs[name])]
    all_cells = "import sys; from benchmarks.study import main\nfor name in sys.argv[1:]:"
    done = copy.run("python", "-c", f"{all_cells} main(['cell', name, '1'])", *installed)
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [cell["variant"] for cell in told] == installed
    assert min(cell["mean_return"] for cell in told) > 0
    assert told[0]["changed"].keys() == CHANGES.keys()
    assert told[0]["without"].keys() == HABITS.keys()
    assert not list((copy.path / "checkpoints").glob("study-*"))
    report = ("python", "-m", "benchmarks.study", "report")
    done = copy.run(*report, check=False)  # DVC knows nothing of these cells
    names = ", ".join(sorted(f"{name}-1" for name in installed))
    assert f"modules than these: {names}" in done.stderr
    assert done.stderr.strip().endswith("run `dvc --cd benchmarks repro`")
    kinds = {name: "cell" if name in ("full", "flat", "alone") else "rival" for name in installed}
    made = [f"{kind}@{name}-1" for name, kind in kinds.items()]
    copy.run("dvc", "--cd", "benchmarks", "commit", "--force", *made)
    done = copy.run(*report)
    results = copy.path / "benchmarks" / "results"
    assert set(json.loads((results / "study.json").read_text())) == set(installed)
    assert VARIANTS["flat"] in (results / "study.svg").read_text()
    assert done.stdout.strip() == (results / "study.md").read_text().strip()


def test_an_interrupted_rival_ends_the_same(tmp_path, monkeypatch):
    class Log(StoppedLog):
        def record(self, step, metrics):
            super().record(step, metrics)
            assert "agreement" in metrics or "approx_kl" in metrics

    few = {"imitation_iterations": 3, "critic_iterations": 1, "ppo_iterations": 2, "rollout": 4}
    sizes = SIZES.model_copy(update=few)

    def train(file, stop=None):
        teacher = Scripted(TOWN, ["expert_searching"], 0)
        return train_monolith(TOWN, SHAPE, teacher, sizes, 0, tmp_path / file, Log(stop))

    torch.set_num_threads(1)
    whole = train("whole.pt").state_dict()
    monkeypatch.setattr("benchmarks.monolith.Checkpoint", partial(Checkpoint, interval=0.0))
    for stop in (2, 5):  # while it imitates, and in PPO
        with pytest.raises(Stopped):
            train("cut.pt", stop)
    resumed = train("cut.pt").state_dict()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@torch.no_grad()
def test_the_rivals_sequences_are_its_ticks():
    """What is learned from is what was played: unrolled, with lives that end in between."""
    town = Town(load_pack("l4_contention").model_copy(update={"lifespan": 5}), num_layouts=8)
    torch.manual_seed(2)
    model = Monolith(SHAPE, 16)
    player = MonolithPlayer(town, SHAPE, model)
    world = town.reset(3, 6)
    memory, buffer = player.start(world), RolloutBuffer(12)
    world, memory = collect(fused_step(town, player), world, memory, buffer)
    data = buffer.data.transpose(0, 1)
    assert data["done"].sum() >= 48  # every life ended twice
    logits, values = model.decide(model.unroll(data))
    legal = masked_logits(logits, data["mask"])
    torch.testing.assert_close(values, data["value"])
    torch.testing.assert_close(log_prob_of(legal, data["action"]), data["log_prob"])
    assert values.std() > 0
