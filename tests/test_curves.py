"""Learning curves: what is counted, where lines cross, that the end-to-end network learns."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import yaml
from tensordict import TensorDict
from torch.nn import functional as F

from benchmarks import curves, curves_ours
from benchmarks.curves_ours import STAGES, JudgedLog, Meter, chosen, collected, ours
from benchmarks.curves_report import LINES, OURS, crossings, plot, report, stages_of, table
from benchmarks.curves_rivals import TIMES, Budget, rivals_points
from benchmarks.end_to_end import (
    OBSERVED,
    EndToEnd,
    EndToEndLearner,
    EndToEndPlayer,
    Scan,
    Settings,
    losses,
    map_targets,
    one_of_many,
)
from hamlet.artifacts import HamletError, write_json
from hamlet.learning.buffer import RolloutBuffer
from hamlet.learning.rollout import collect, fused_step
from hamlet.modules.contracts import TownShape
from hamlet.params import load_params
from hamlet.town import Scripted, Town, load_pack

ROOT = Path(__file__).parents[1]
PARAMS = load_params(ROOT / "params.yaml", "tiny")
TOWN = Town(load_pack("l4_contention"), num_layouts=8)
SHAPE = TownShape.of(TOWN)
SMALL = Settings(width=16, memory=16, worlds=2, kept=2, passes=1.0, lives=4, chunk=10, led=2)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ------------------------------------------------------------------ where lines cross


def line(*points: tuple[float, float]) -> list[dict]:
    """Points of (ticks, return); as many seconds."""
    return [
        {"steps": x, "cpu_seconds": x, "mean_return": r, "mean_return_ci95": 1.0} for x, r in points
    ]


MINE = line((10, 0), (100, 100), (1000, 100))


def test_a_line_that_stays_below_does_not_cross():
    assert crossings(MINE, line((10, -1), (5000, 99)), "steps") == [
        {"at": 10, "times": 0.01, "ahead": False}
    ]


def test_a_line_crosses_where_both_are_equal_on_a_logarithmic_axis():
    first, goes_ahead = crossings(MINE, line((10, -50), (100, 50), (1000, 150)), "steps")
    assert not first["ahead"]
    assert goes_ahead["ahead"]
    assert goes_ahead["at"] == pytest.approx(100 * 10**0.5)
    assert goes_ahead["times"] == pytest.approx(10**0.5 / 10)


def test_a_line_may_cross_back_and_again_after_ours_has_ended():
    other = line((10, 20), (100, 80), (1000, 80), (10000, 120))
    found = crossings(MINE, other, "steps")
    assert [one["ahead"] for one in found] == [True, False, True]
    assert found[1]["at"] == pytest.approx(10 * 10**0.5)  # 20 + 60 s = 100 s
    assert found[2]["at"] == pytest.approx(1000 * 10**0.5)
    assert found[2]["times"] == pytest.approx(10**0.5)


def test_until_ours_has_something_to_show_the_other_is_ahead():
    found = crossings(MINE, line((1, -90), (1000, -10)), "steps")
    assert found == [
        {"at": 1, "times": 0.001, "ahead": True},
        {"at": 10, "times": 0.01, "ahead": False},
    ]


def told(**others: list[dict]) -> dict:
    lines = {OURS: MINE, **others}
    about = {"seed": 7, "pack": "x", "processor": "y"}
    found = {name: {**about, "points": points} for name, points in lines.items()}
    found[OURS]["scripted"] = {"expert_watching": 110.0, "expert": 120.0, "rest": 5.0}
    return found


def test_the_report_says_in_words_where_a_rival_crosses_or_that_it_does_not():
    rows = report(
        told(end_to_end=line((10, 20), (100, 80), (3000, 90)), lstm_ppo=line((10, -1), (3000, 5)))
    )
    assert not rows["lines"]["end_to_end"]["meets_us"]
    assert rows["lines"]["lstm_ppo"]["at_our_budget"]["steps"] == pytest.approx(3.84, abs=0.01)
    words = table(rows)
    assert "is ahead at first, falls behind at" in words
    assert "and does not come back to 3.0 times our budget" in words
    assert "it does not cross ours: it is behind at every point, to 3.0 times our budget" in words
    rows = report(told(end_to_end=line((10, -1), (1000, 130))))
    assert rows["lines"]["end_to_end"]["meets_us"]
    assert "is behind at first, goes ahead at" in table(rows)
    assert "It meets ours (100.0)" in table(rows)
    assert "overlap" not in table(rows)
    assert "overlap" in table(report(told(end_to_end=line((10, -1), (1000, 98.5)))))


def test_equal_lines_give_a_plot_of_equal_bytes(tmp_path):
    lines = told(end_to_end=line((10, 20), (3000, 90)))
    for name in ("one.svg", "two.svg"):
        plot(lines, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert LINES["end_to_end"] in (tmp_path / "one.svg").read_text()


def test_every_line_has_a_stage_and_a_stale_one_is_refused(tmp_path, monkeypatch):
    stages = yaml.safe_load((ROOT / "benchmarks" / "dvc.yaml").read_text())["stages"]
    made = {
        f"{kind}-{name}": stages[kind]["outs"]
        for kind in ("line", "rival_line")
        for name in stages[kind]["matrix"]["line"]
    }
    assert set(made) == {stages_of(name) for name in LINES}
    assert "results/curves" in stages["curves_report"]["deps"]
    for name, found in told(end_to_end=line((10, 20), (3000, 90))).items():
        write_json(tmp_path / "curves" / f"{name}.json", found)
    monkeypatch.setattr(curves, "RESULTS", tmp_path / "curves")
    asked = []

    def stale(names):
        asked.extend(names)
        return [names[1]]

    monkeypatch.setattr(curves, "stale", stale)
    with pytest.raises(HamletError, match="other code or parameters than these: rival_line-end_to"):
        curves.main(["report"])
    assert asked == ["line-ours", "rival_line-end_to_end"]
    assert not (tmp_path / "curves.json").exists()
    monkeypatch.setattr(curves, "stale", lambda names: [])
    assert curves.main(["report"]) == 0
    assert {p.name for p in tmp_path.iterdir()} == {
        "curves", "curves.json", "curves.md", "curves.svg",
    }  # fmt: skip


# ------------------------------------------------------------------ what is counted


class Watch:
    """Processor time that passes only when it is told to."""

    def __init__(self, monkeypatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(curves_ours, "spent", lambda: self.now)


class Growing:
    """A rival whose return is the number of its iterations; 10 ticks and 4 seconds each."""

    def __init__(self, watch: Watch, most: float = float("inf")) -> None:
        self.watch, self.most, self.steps, self.settings = watch, most, 0, {}

    def learn(self) -> None:
        self.steps += 10
        self.watch.now += 4

    def seated(self, where: object) -> float:
        return min(self.steps / 10, self.most)


OURS_TOOK = Budget(100, 100.0, 1e9)


def points_of(watch, most=float("inf"), budget=OURS_TOOK, times=TIMES):
    def judge(seated):
        watch.now += 1000  # judging is not counted
        return torch.full((4,), seated(None), dtype=torch.float64)

    rival = Growing(watch, most)
    return list(rivals_points(rival, budget, times, judge, Meter(), bar=False))


def test_a_rival_has_three_times_our_ticks_and_our_time_and_is_judged_for_nothing(monkeypatch):
    watch = Watch(monkeypatch)
    points = points_of(watch)
    assert points[-1]["cpu_seconds"] == 4 * 75  # three times 100 s, at 4 s an iteration
    assert points[-1]["steps"] == 750
    assert points[0]["cpu_seconds"] == 12  # the first iteration that ends after 10 s
    assert all(
        b["cpu_seconds"] > 1.3 * a["cpu_seconds"] for a, b in itertools.pairwise(points[:-1])
    )
    assert points_of(watch, budget=Budget(1000, 1.0, 1e9))[-1]["steps"] == 3000
    assert points_of(watch, times=10.0)[-1]["cpu_seconds"] == 1000


def test_a_rival_that_gets_what_ours_gets_has_met_us(monkeypatch):
    watch = Watch(monkeypatch)
    points = points_of(watch, budget=Budget(100, 100.0, 20.0))
    assert points[-1]["mean_return"] >= 20
    assert all(p["mean_return"] < 20 for p in points[:-1])
    assert points[-1]["steps"] < 300
    assert points_of(watch, 19.0, Budget(100, 100.0, 20.0))[-1]["steps"] == 750


def test_ours_is_counted_from_the_first_recorded_tick_to_the_last_of_the_policy(monkeypatch):
    """All stages and all their ticks; what only writes down the parameters, and judging, not."""
    watch, ran = Watch(monkeypatch), []

    def run_stage(name, folder):
        assert load_params(folder / "params.yaml") == PARAMS
        ran.append(name)
        watch.now += 1 if name == "world" else 10

    def train_policy(town, shape, mind, blank, sizes, compiling, seed, file, log):
        for step in log.steps(4, 0):
            watch.now += 2
            log.record(step, {})

    def make_mind(params, town):
        watch.now += 5
        return None, None, []

    def judge(seated):
        watch.now += 1000
        return torch.ones(4, dtype=torch.float64)

    for name, fake in (
        ("run_stage", run_stage), ("train_policy", train_policy), ("make_mind", make_mind),
    ):  # fmt: skip
        monkeypatch.setattr(curves_ours, name, fake)
    points: list[dict] = []
    ours(PARAMS, judge, Meter(), points.append)
    assert ran == ["world", *STAGES]
    assert {"collect", "perception", "freeze_perception", "world_model", "social"} == set(STAGES)
    assert [p["cpu_seconds"] for p in points] == [55 + 2 * n for n in (1, 2, 3, 4)]
    sizes, agents = PARAMS.policy, TownShape.of(Town(load_pack(PARAMS.town.pack))).num_agents
    recorded = collected(PARAMS, agents)
    each = sizes.worlds * sizes.rollout * agents
    assert [p["steps"] for p in points] == [recorded + n * each for n in (1, 2, 3, 4)]


def test_recorded_ticks_are_those_of_all_worlds_that_are_recorded():
    sizes = PARAMS.collect.model_copy(update={"ticks": 10, "worlds": 6, "held_out_worlds": 3})
    assert collected(PARAMS.model_copy(update={"collect": sizes}), 4) == 10 * (6 + 3 + 2) * 4


def test_iterations_that_are_judged_lie_ever_further_apart_and_include_the_last():
    found = sorted(chosen(194))
    assert found[:3] == [1, 2, 3]
    assert found[-1] == 194
    assert len(found) < 25


def test_judging_draws_no_random_numbers_of_the_training(monkeypatch):
    Watch(monkeypatch)
    torch.manual_seed(3)
    log = JudgedLog(lambda: torch.rand(4).double(), 0, 1, Meter(), lambda one: None)
    list(log.steps(2, 0))
    log.record(0, {})
    told = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(told, torch.rand(3))


def test_without_our_line_a_rival_has_no_budget(tmp_path, monkeypatch):
    monkeypatch.setattr(curves, "RESULTS", tmp_path)
    with pytest.raises(HamletError, match=r"run `python -m benchmarks.curves line ours`"):
        curves.budget()


# ------------------------------------------------------------------ the end-to-end network


def played(town: Town, ticks: int) -> tuple[EndToEnd, TensorDict]:
    """A new network and what it played, with the teacher's word."""
    torch.manual_seed(2)
    shape = TownShape.of(town)
    model = EndToEnd(shape, 16, 24)
    player = EndToEndPlayer(town, shape, model, Scripted(town, ["expert_searching"]))
    world, buffer = town.reset(3, 6), RolloutBuffer(ticks)
    collect(fused_step(town, player), world, player.start(world), buffer)
    assert buffer.data is not None
    return model, buffer.data


@torch.no_grad()
def test_its_sequences_are_its_ticks_with_lives_that_end_in_between():
    town = Town(load_pack("l4_contention").model_copy(update={"lifespan": 5}), num_layouts=8)
    model, data = played(town, 12)
    assert data["over"].sum() >= 48  # every life ended twice
    assert torch.equal(data["moved"][1:] == 0, data["over"][:-1])  # as if nothing had been done
    assert (data["moved"][0] == 0).all()
    hidden, stepwise = torch.zeros(data.shape[1], 24), []
    for tick in range(12):
        known, hidden = model.remember(data[tick : tick + 1], data["over"][tick : tick + 1], hidden)
        stepwise.append(known[0])
    whole, last = model.remember(data, data["over"], torch.zeros(data.shape[1], 24))
    torch.testing.assert_close(whole, torch.stack(stepwise), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(last, hidden, atol=1e-5, rtol=1e-5)
    first, rest = data[:7], data[7:]  # in two chunks
    one, between = model.remember(first, first["over"], torch.zeros(data.shape[1], 24))
    other, _ = model.remember(rest, rest["over"], between)
    torch.testing.assert_close(torch.cat([one, other]), whole, atol=1e-5, rtol=1e-5)


def test_what_is_remembered_ends_with_the_life_and_not_before():
    model, data = played(TOWN, 6)
    over = torch.zeros(6, data.shape[1], dtype=torch.bool)
    over[2, 1] = True  # of the second slot a life ends with the third tick
    hidden = torch.ones(data.shape[1], 24, requires_grad=True)
    known, _ = model.remember(data, over, hidden)
    (grad,) = torch.autograd.grad(known[5, :, -24:].sum(), hidden, retain_graph=True)
    assert (grad[0].abs() > 0).all()
    assert (grad[1] == 0).all()
    (grad,) = torch.autograd.grad(known[2, :, -24:].sum(), hidden)
    assert (grad[1].abs() > 0).all()


def test_the_recurrence_and_its_gradient():
    kept, added, hidden = (
        torch.rand(*size, dtype=torch.float64, requires_grad=True)
        for size in ((4, 2, 3), (4, 2, 3), (2, 3))
    )
    assert torch.autograd.gradcheck(Scan.apply, (kept, added, hidden))
    found = Scan.apply(kept, added, hidden)
    second = kept[1] * (kept[0] * hidden + added[0]) + added[1]
    torch.testing.assert_close(found[1], second)


def test_where_places_are_and_which_are_known():
    """On the 8x8 map the middle is at column and row 3.5; positions are in units of four cells."""
    places = torch.tensor([[0, 7, 8, 63]], dtype=torch.int16)
    seen = torch.zeros(1, 64, dtype=torch.bool)
    seen[0, [7, 8, 9]] = True
    at, known = map_targets(places, seen, SHAPE)
    middle = [[-3.5, -3.5], [3.5, -3.5], [-3.5, -2.5], [3.5, 3.5]]
    assert torch.equal(at[0] * 4, torch.tensor(middle))
    assert known.tolist() == [[False, True, True, False]]


def test_what_is_in_view_or_shown_is_told_by_its_place_on_the_map():
    model = EndToEnd(SHAPE, 8, 8)
    side = 2 * SHAPE.vision + 1
    view = torch.zeros(1, side, side, dtype=torch.int64)
    view[0, SHAPE.vision - 1, SHAPE.vision + 1] = 3  # the third place: one up, one to the right
    cues = torch.zeros(1, SHAPE.num_others, SHAPE.num_cues)
    cues[0, 0, 2] = cues[0, 1, 2] = 1
    away = torch.zeros(1, SHAPE.num_others, 2)
    away[0, 0] = torch.tensor([-0.5, 0.25])  # two to the left, one down
    x, y = torch.tensor([2]), torch.tensor([5])
    places, shown = model.sightings(x, y, view.flatten(1), cues, away)
    places, shown = places.view(-1, 3), shown.view(-1, 3)
    assert (places * 4)[2].tolist() == [3 - 3.5, 4 - 3.5, 4]
    assert places.any(1).nonzero().flatten().tolist() == [2]
    assert (shown * 4)[2].tolist() == [(0 + 2) / 2 - 3.5, (6 + 5) / 2 - 3.5, 4]
    assert shown.any(1).nonzero().flatten().tolist() == [2]


def test_one_of_many_side_by_side():
    told = one_of_many((torch.tensor([1, 0]), 2), (torch.tensor([2, 1]), 3))
    assert told.tolist() == [[0, 1, 0, 0, 1], [1, 0, 0, 1, 0]]


def test_the_map_it_is_taught_is_the_towns_and_what_it_saw():
    """What the recorded targets say, in the words of the town's own tables."""
    _, data = played(TOWN, 8)
    at, known = map_targets(data["places"], data["seen"], SHAPE)
    view, state = data["view"].long(), data["self_state"]
    x = (state[..., SHAPE.num_meters] * (SHAPE.width - 1)).round()
    y = (state[..., SHAPE.num_meters + 1] * (SHAPE.height - 1)).round()
    middle = SHAPE.vision
    stands_on = view[..., middle, middle]
    on_place = (stands_on > 0).nonzero()
    assert len(on_place)
    for t, slot in on_place.tolist():
        place = int(stands_on[t, slot]) - 1
        expected = torch.stack([x[t, slot], y[t, slot]]) - 3.5
        assert torch.allclose(at[t, slot, place] * 4, expected)
        assert known[t, slot, place]


def test_it_learns_what_needs_memory():
    """The last action of the first tick says what to do twelve ticks later; nothing else does."""
    model, data = played(TOWN, 13)
    one = data[:, :1].expand(13, 32).clone()
    one["moved"].zero_()
    over = torch.zeros(13, 32, dtype=torch.bool)
    answer = torch.arange(32) % 4
    one["moved"][0] = answer.to(torch.uint8) + 1
    optimizer = torch.optim.Adam(model.parameters(), 0.01)

    def told(batch):
        known, _ = model.remember(batch, over, torch.zeros(32, 24))
        return model.decide(known[-1])[0]

    for _ in range(150):
        optimizer.zero_grad()
        F.cross_entropy(told(one), answer).backward()
        optimizer.step()
    assert (told(one).argmax(-1) == answer).float().mean() == 1
    one["moved"][0] = 0
    assert (told(one).argmax(-1) == answer).float().mean() <= 0.25


def test_who_is_led_does_what_the_teacher_does_and_the_others_what_they_would():
    teacher = Scripted(TOWN, ["expert_searching"])
    player = EndToEndPlayer(TOWN, SHAPE, EndToEnd(SHAPE, 8, 8), teacher)
    world = TOWN.reset(3, 6)
    led = torch.zeros(6, SHAPE.num_agents, dtype=torch.bool)
    led[:3] = True
    with torch.no_grad():
        memory, seen = player.start(world), TOWN.observe(world)
        acted, after, record = player.act(world, seen, memory, led)
        own, _, _ = player.act(world, seen, memory)
    expert = teacher.act(world, teacher.reset(world))[0]
    assert torch.equal(record["expert_action"].view(6, -1).long(), expert)
    assert torch.equal(acted[:3], expert[:3])
    assert torch.equal(acted[3:], own[3:])
    assert not torch.equal(own[:3], expert[:3])
    assert torch.equal(after.moved.long(), acted.flatten() + 1)


def test_the_teacher_acts_less_and_less_in_turns():
    learner = EndToEndLearner(TOWN, Scripted(TOWN, ["expert_searching"]), 0, Settings(worlds=64))
    shares, changes = [], []
    for learner.iteration in (0, 10, 40):
        led = torch.stack([now for (now,) in learner.led()])
        shares.append(led.float().mean().item())
        changes.append((led[1:] != led[:-1]).float().mean().item())
    assert shares[0] == 1
    assert shares[1] == pytest.approx(0.5, abs=0.05)
    assert shares[2] == pytest.approx(0.1, abs=0.03)
    assert changes[1] == pytest.approx(0.5 / 16, abs=0.005)


def test_in_seconds_it_does_more_of_what_the_teacher_does():
    """On a small town in which a life is short; what it is judged by are the averaged weights."""
    pack = load_pack("l0_full_view").model_copy(update={"lifespan": 60})
    town = Town(pack, num_layouts=16)
    settings = Settings(width=48, memory=48, worlds=16, passes=6.0, lives=4, chunk=30, led=3)
    learner = EndToEndLearner(town, Scripted(town, ["expert_searching"], 0), 0, settings)

    learner.play()
    data = learner.kept[0]

    def wrong():
        with torch.no_grad():
            hidden = torch.zeros(data.shape[1], settings.memory)
            return losses(learner.average, data, hidden, settings.every)[0]

    before = wrong()
    for _ in range(3):
        learner.learn()
    assert learner.steps == 4 * 60 * 16 * town.num_agents
    after = wrong()
    assert all(after[name] < 0.6 * before[name] for name in ("action", "goal", "places", "known"))


def test_the_loss_asks_only_of_the_living():
    model, data = played(TOWN, 8)
    data = data.clone()
    data["active"][:, 0] = False
    hidden = torch.zeros(data.shape[1], 24)
    terms, _ = losses(model, data, hidden, 4)
    data["expert_action"][:, 0] = 0
    data["expert_goal"][:, 0] = 1
    data["seen"][:, 0] = ~data["seen"][:, 0]
    again, _ = losses(model, data, hidden, 4)
    assert terms.keys() == {"action", "goal", "places", "known", "seen"}
    for name, value in terms.items():
        assert torch.isfinite(value)
        torch.testing.assert_close(value, again[name])
    assert set(OBSERVED) <= set(data.keys())
