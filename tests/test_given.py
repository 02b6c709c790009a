"""The study's variants without what is given by hand, and its changed towns."""

import json
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import yaml

from benchmarks.given import GIVEN, NOTHING, not_looking, policy_without
from benchmarks.shifts import FASTER, MISSING, SHIFTS, shifted
from benchmarks.study import REINFORCED, REINFORCED_TICKS, trained
from benchmarks.study_players import Sharing
from benchmarks.study_report import changed, report, table
from hamlet.learning.train_policy import Trained
from hamlet.modules.contracts import LOOK
from hamlet.modules.policy import EARNING, IDLING, Policy
from hamlet.params import load_params
from hamlet.town import Scripted, Town, load_pack
from hamlet.town.schema import INTERACT
from tests.learning.minds import new_mind
from tests.test_study import SHAPE, TOWN, cells, of_kind, sensed

ROOT = Path(__file__).parents[1]

PRICED = 2  # of the timetable's columns


def poor(policy: Policy) -> torch.Tensor:
    """A known state with neither money nor energy."""
    known = torch.full((1, SHAPE.self_dim), 0.5)
    known[0, [policy.money, policy.energy]] = 0.05
    return known


def ended(policy: Policy, level: float, age: int) -> torch.Tensor:
    """Which goals end, so old, with all meters at one level: bool [G]."""
    known, goals = (
        torch.full((SHAPE.num_goals, SHAPE.self_dim), level),
        torch.arange(SHAPE.num_goals),
    )
    return policy.goal_ended(known, goals, torch.full_like(goals, age))


def test_each_lacks_what_it_says_and_nothing_else():
    whole = of_kind(Policy)
    f = sensed("full")[0]
    told = {
        "no_rule": lambda p: p.low_money_bias(poor(p)),
        "no_prospects": lambda p: p.place_facts(f)[-2:],
        "no_timetable": lambda p: torch.stack(p.posted_now(f)),
        "no_targets": lambda p: ended(p, 1.0, 1),
        "no_emergency": lambda p: ended(p, 0.1, 2),
    }
    combined = {"no_rules": ["no_rule", "no_emergency", "no_targets"], NOTHING: [*told]}
    for variant in GIVEN:
        other = policy_without(variant)
        made = of_kind(other)
        made.load_state_dict(whole.state_dict())
        for part, ask in told.items():
            same = torch.equal(ask(made).float(), ask(whole).float())
            # Prospects reckon with the timetable.
            follows = part == "no_prospects" and variant == "no_timetable"
            lacks = part in combined.get(variant, [variant])
            assert same == (not lacks and not follows), (variant, part)


def test_what_is_left_without_each():
    f = sensed("full")[0]
    without = {name: of_kind(policy_without(name)) for name in GIVEN}
    whole = of_kind(Policy)
    assert not without["no_rule"].low_money_bias(poor(without["no_rule"])).any()
    assert {EARNING, IDLING} <= set(whole.low_money_bias(poor(whole)).flatten().tolist())
    # Half of the places are known, half are looked for.
    spread = torch.full_like(f.log_std, -6.0).index_fill(-1, torch.arange(8), 0.0)
    known = f._replace(log_std=spread)
    assert all(fact.any() for fact in whole.place_facts(known)[-2:])
    assert not without["no_prospects"].place_facts(known)[-2:].any()
    opens, left, price = without["no_timetable"].posted_now(f)
    assert not opens.any()
    assert (left == 24).all()
    assert not price.any()
    assert ended(whole, 1.0, 1)[:-2].any()
    assert not ended(without["no_targets"], 1.0, 1).any()
    assert ended(whole, 0.1, 2).any()
    assert not ended(without["no_emergency"], 0.1, 2).any()
    assert not ended(without["no_emergency"], 0.1, 1).any()
    for name in ("no_targets", "no_emergency", "no_rules"):
        assert ended(without[name], 0.5, 100).all()
    # With both gone a goal ends by age alone.
    assert not any(ended(without["no_rules"], level, 2).any() for level in (0.1, 1.0))


def test_without_where_to_look_only_the_way_there_is_gone():
    full, places = sensed("full")[0], 2 * SHAPE.num_affordances
    for variant in ("no_look", NOTHING):
        f = sensed(variant)[0]
        way = slice(places, places + LOOK - 1)
        assert full.mean[:, way].any()
        assert not f.mean[:, way].any()
        kept = torch.ones(f.mean.shape[1], dtype=torch.bool)
        kept[way] = False
        assert torch.equal(f.mean[:, kept], full.mean[:, kept])
        assert torch.equal(f.mean, not_looking(full, places).mean)
        assert all(torch.equal(a, b) for a, b in zip(f[1:], full[1:], strict=True))


def test_needs_grow_faster_by_as_much_as_it_says():
    other, still = shifted(TOWN, "needs_faster"), torch.full((3, 4), INTERACT)
    start, changed = TOWN.reset(1, 3), other.reset(1, 3)
    assert torch.equal(start["position"], changed["position"])
    # Away from any place, a meter that nothing else drains.
    meter = TOWN.meter_index["hygiene"]
    now, then = (town.step_core(s, still)["meters"][..., meter]
                 for town, s in ((TOWN, start), (other, changed)))  # fmt: skip
    free = start["place"] < 0
    lost, more = (start["meters"][..., meter] - x for x in (now, then))
    assert free.any()
    torch.testing.assert_close(more[free], FASTER * lost[free], rtol=1e-3, atol=1e-6)


def test_a_missing_place_is_nowhere_seen_used_or_planned_for():
    other, gone = shifted(TOWN, "place_missing"), TOWN.affordance_names.index(MISSING)
    assert torch.equal(other.affordance_cells, TOWN.affordance_cells)
    for town, there in ((TOWN, True), (other, False)):
        world = town.reset(1, 64)
        at = town.affordance_cells[world["layout"], gone][:, None]
        spot = torch.stack([at % town.width, at // town.width], -1).expand(-1, 4, -1)
        world = town.rearrange(world, position=spot)
        assert (town.observe(world)["view"] == gone + 1).any() == there
        assert (world["place"] == gone).all() if there else (world["place"] != gone).all()
        assert town.action_mask(world)[..., INTERACT].any() == there
        used = town.step_core(world, torch.full((64, 4), INTERACT))["used"]
        assert (used == gone).any() == there
        player, meant = Scripted(town, ["visitor"]), 0
        memory = player.reset(world)
        for _ in range(60):
            action, goal, memory = player.act(world, memory)
            world = town.step_core(world, action)
            meant += int(((goal == gone) & world["alive"]).sum())
        assert (meant > 0) == there
    others = [code for code in TOWN.view_table.view(torch.uint8).unique() if code != gone + 1]
    assert torch.equal(other.view_table.view(torch.uint8).unique(), torch.stack(others))


def test_the_report_says_who_keeps_more():
    made = cells({"full": [100, 110, 120], "monolith": [50, 40, 60]})
    assert "town changes" not in table(report(made), "x")
    for c in made:
        share = 0.9 if c["variant"] == "full" else 0.95
        c["shifted"] = dict(zip(SHIFTS, (share * c["mean_return"], 0.5 * c["mean_return"])))
        if c["variant"] == "full":
            c["scripted"] = {
                name: {"none": 200.0, "needs_faster": 160.0, "place_missing": 100.0}
                for name in ("expert_watching", "expert")
            }
    found = report(made)
    assert found["full"]["kept"]["self"]["needs_faster"]["share"] == pytest.approx(0.9)
    assert found["full"]["kept"]["expert_watching"]["needs_faster"]["share"] == pytest.approx(0.8)
    told = table(found, "x")
    assert "| the whole agent | 0.900 ± 0.000 | 0.500 ± 0.000 |" in told
    assert "faster, the agent keeps more than the teacher (+0.100 ± 0.000)" in told
    assert "faster, the agent keeps less than a rival" in told
    assert "HomeMeal, the agent keeps as much as the expert with the map" in told


def test_a_variant_is_trained_as_it_says(monkeypatch, tmp_path):
    """Which module D is made and in which town, with which sizes, it is trained; by spies, as the
    frozen modules of a whole pipeline would be needed."""
    params = load_params(ROOT / "params.yaml", "tiny")
    made: dict[str, type[Policy]] = {}
    told: dict[str, list[tuple]] = defaultdict(list)
    lived, sense, critic = [], object(), object()

    def make_mind(params, town, kind):
        made[variant] = kind
        mind, blank = new_mind(TOWN, params.policy)
        mind.policy, mind.fused_sense = of_kind(kind), sense
        return mind, blank, []

    def train_policy(town, shape, mind, blank, sizes, options, seed, file, log, given=None, **more):
        told[variant].append((town, sizes, mind, given, file))
        imitated = {name: torch.zeros_like(x) for name, x in mind.policy.state_dict().items()}
        return Trained(critic, imitated)

    def try_habits(town, shape, mind, first, worlds, seed):
        assert len(told[variant]) == 1  # after imitation, before PPO alone
        assert (town, mind, worlds) == (told[variant][0][0], told[variant][0][2], 8)
        lived.append(variant)

    monkeypatch.setattr("benchmarks.study.try_habits", try_habits)
    monkeypatch.setattr("benchmarks.study.make_mind", make_mind)
    monkeypatch.setattr("benchmarks.study.train_policy", train_policy)
    tried = ("full", *REINFORCED, *GIVEN)
    for variant in (*tried, "imitated", "alone"):
        trained(params, variant, 1, TOWN, tmp_path)
    assert lived == list(tried)
    left = {
        name: {bool(x.any()) for x in parts[0][2].policy.parameters()}
        for name, parts in told.items()
    }
    assert left.pop("imitated") == {False}
    assert all(True in some for some in left.values())
    del told["imitated"], told["alone"]
    assert {variant for variant, parts in told.items() if len(parts) == 2} == REINFORCED.keys()
    for variant, ((town, sizes, mind, _, file), *then) in told.items():
        shares, own = variant == "reinforced_sharing", params.policy
        assert sizes.kickstart_coef == own.kickstart_coef
        assert sizes.imitation_iterations == own.imitation_iterations
        assert (sizes.critic_iterations, sizes.ppo_iterations) == (
            (0, 0) if then else (own.critic_iterations, own.ppo_iterations)
        )
        for same_town, alone, same_mind, given, own_file in then:
            assert (same_town, same_mind, given) == (town, mind, critic)
            assert own_file != file
            assert alone.rollout == (8 if variant == "reinforced" else 96)
            assert (alone.kickstart_coef, alone.imitation_iterations) == (0.0, 0)
            assert alone.ppo_iterations * alone.rollout == REINFORCED_TICKS
            assert alone.critic_iterations * alone.rollout == 96
            assert alone.minibatches / alone.rollout == own.minibatches / own.rollout
        assert isinstance(town, Sharing) == shares
        assert torch.equal(town.affordance_cells, TOWN.affordance_cells)
        assert (mind.variant, mind.fused_sense) == (variant, sense)
        assert made[variant] is (policy_without(variant) if variant in GIVEN else Policy)


def test_what_is_only_missing_is_not_stale():
    gone = [{"changed deps": {"../artifacts/perception.pt2": "deleted"}}]
    assert not changed(gone)
    assert changed([*gone, {"changed outs": {"results/study/full-1.json": "modified"}}])
    assert changed([{"changed deps": {"a": "deleted", "../params.yaml": {"policy": "modified"}}}])
    assert changed(["changed command"])


def test_bytecode_makes_no_cell_stale(tmp_path):
    """By DVC, with the study's own settings: a folder is the code in it, and nothing else."""
    own, code = ROOT / "benchmarks", tmp_path / "pipeline" / "town"
    stages = yaml.safe_load((own / "dvc.yaml").read_text())["stages"]
    deps = {dep for stage in stages.values() for dep in stage["deps"]}
    assert ".code/town" in deps
    assert not [dep for dep in deps if dep.startswith("../") and (own / dep).is_dir()]
    code.mkdir(parents=True)
    (code / "town.py").write_text("one = 1\n")
    (tmp_path / "benchmarks").mkdir()
    for name in (".code", ".dvcignore"):
        shutil.copy(own / name, tmp_path / "benchmarks" / name, follow_symlinks=False)

    def dvc(*arguments):
        asked = [sys.executable, "-m", "dvc", "--cd", str(tmp_path / "benchmarks"), *arguments]
        return subprocess.check_output(asked, text=True)

    dvc("init", "--no-scm", "--quiet")
    (tmp_path / "benchmarks" / "dvc.yaml").write_text(
        "stages: {cell: {cmd: 'true', deps: [.code/town]}}"
    )
    dvc("repro", "--quiet")
    (code / "__pycache__").mkdir()
    (code / "__pycache__" / "town.pyc").write_text("x")
    assert json.loads(dvc("status", "--json")) == {}
    (code / "town.py").write_text("one = 2\n")
    assert list(json.loads(dvc("status", "--json"))) == ["cell"]


def test_a_town_without_that_place_loses_its_last_one():
    town = Town(load_pack("brief"), num_layouts=4)
    if MISSING not in town.affordance_names:
        other = shifted(town, "place_missing")
        assert (other.place_table != town.num_affordances - 1).all()
