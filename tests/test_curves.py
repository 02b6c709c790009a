"""Learning curves: what is counted, and where lines cross."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import yaml

from benchmarks import curves, curves_ours
from benchmarks.curves_ours import STAGES, JudgedLog, Meter, chosen, collected, ours
from benchmarks.curves_report import (
    LINES,
    OURS,
    STRONGEST,
    TIMES,
    crossings,
    plot,
    report,
    stages_of,
    table,
    too_short,
)
from benchmarks.curves_rivals import LENGTHS, Length, rivals_points
from hamlet.artifacts import HamletError, write_json
from hamlet.params import load_params
from hamlet.town import Town, load_pack

ROOT = Path(__file__).parents[1]
PARAMS = load_params(ROOT / "params.yaml", "tiny")


pytestmark = pytest.mark.usefixtures("one_thread")


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


def test_a_rival_that_had_too_little_is_refused_unless_it_met_us():
    def short(name: str, *points: tuple[float, float]) -> list[str]:
        return too_short(report(told(**{name: line(*points)})))

    assert short("lstm_ppo", (10, -1), (3000, 5)) == []
    assert short("lstm_ppo", (10, -1), (2990, 5)) == [
        "lstm_ppo had 2.99 times our ticks, not 3",
        "lstm_ppo had 2.99 times our processor time, not 3",
    ]
    assert short("end_to_end", (10, -1), (10_000, 5)) == []
    assert short("end_to_end", (10, -1), (9_000, 5)) == [
        "end_to_end had 9.00 times our processor time, not 10"
    ]
    assert short("end_to_end", (10, -1), (20, 100)) == []


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
    monkeypatch.setattr(curves, "stale", lambda names: [])
    with pytest.raises(HamletError, match=r"end_to_end had 3\.00 times our processor time, not"):
        curves.main(["report"])
    assert not (tmp_path / "curves.json").exists()
    long_enough = line((10, 20), (10_000, 90))
    for name, found in told(end_to_end=long_enough).items():
        write_json(tmp_path / "curves" / f"{name}.json", found)
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

    def __init__(self, watch: Watch) -> None:
        self.watch, self.steps, self.settings = watch, 0, {}

    def learn(self) -> None:
        self.steps += 10
        self.watch.now += 4

    def seated(self, where: object) -> float:
        return self.steps / 10


def test_a_rival_has_its_ticks_and_its_time_and_is_judged_for_nothing(monkeypatch):
    watch = Watch(monkeypatch)

    def points_of(steps, seconds):
        def judge(seated):
            watch.now += 1000  # judging is not counted
            return torch.full((4,), seated(None), dtype=torch.float64)

        return list(rivals_points(Growing(watch), Length(steps, seconds), judge, Meter(), False))

    points = points_of(100, 300.0)
    assert points[-1]["cpu_seconds"] == 4 * 75  # 300 s, at 4 s an iteration
    assert points[-1]["steps"] == 750
    assert points[-1]["mean_return"] == 75
    assert points[0]["cpu_seconds"] == 12  # the first iteration that ends after 10 s
    assert all(
        b["cpu_seconds"] > 1.3 * a["cpu_seconds"] for a, b in itertools.pairwise(points[:-1])
    )
    assert points_of(3000, 3.0)[-1]["steps"] == 3000


def test_every_rival_has_a_length_and_who_gets_more_is_one_of_them():
    assert set(LENGTHS) == set(LINES) - {OURS}
    assert set(STRONGEST) < set(LENGTHS)
    assert all(times > TIMES for times in STRONGEST.values())


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

    def try_habits(town, shape, mind, first, worlds, seed):
        assert worlds == PARAMS.policy.worlds
        watch.now += 3

    def make_mind(params, town):
        watch.now += 5
        return None, None, []

    def judge(seated):
        watch.now += 1000
        return torch.ones(4, dtype=torch.float64)

    for name, fake in (
        ("run_stage", run_stage), ("train_policy", train_policy), ("make_mind", make_mind),
        ("try_habits", try_habits),
    ):  # fmt: skip
        monkeypatch.setattr(curves_ours, name, fake)
    points: list[dict] = []
    ours(PARAMS, judge, Meter(), points.append)
    assert ran == ["world", *STAGES]
    assert {"collect", "perception", "freeze_perception", "world_model", "social"} == set(STAGES)
    assert [p["cpu_seconds"] for p in points] == [57, 59, 61, 63, 66]
    sizes, town = PARAMS.policy, Town(load_pack(PARAMS.town.pack))
    recorded = collected(PARAMS, town.num_agents)
    each = sizes.worlds * sizes.rollout * town.num_agents
    assert sizes.worlds == 8  # a half of them for the second habit, a quarter for both ways after
    lives = (8 + 8 + 4 + 2 * 2) * town.lifespan * town.num_agents
    assert [p["steps"] for p in points] == [
        recorded + each * n + lives * more for n, more in ((1, 0), (2, 0), (3, 0), (4, 0), (4, 1))
    ]


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
