"""What the learning curves say: where a rival's line crosses ours, a table, a plot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from hamlet.artifacts import atomic_path

RESULTS = Path(__file__).parent / "results" / "curves"
OURS = "ours"
LINES = {
    OURS: "the whole agent, all stages",
    "end_to_end": "one network end to end, the same teacher",
    "recurrent_ppo": "RecurrentPPO of Stable-Baselines3",
    "lstm_ppo": "PPO with an LSTM in one file",
}
TIMES, STRONGEST = 3.0, {"end_to_end": 10.0}
"""How often our budget a rival must have had, of ticks and of time; and of time, who gets more."""
AXES = {"steps": "agents' ticks", "cpu_seconds": "processor time, s"}
SCRIPTED = {
    "expert": "the expert with the map", "expert_watching": "the teacher", "rest": "always REST",
}  # fmt: skip

Points = Sequence[Mapping[str, Any]]


def stages_of(name: str) -> str:
    """What `benchmarks.study_report.stale` calls the DVC stage of a line."""
    return f"line-{name}" if name == OURS else f"rival_line-{name}"


def value_at(points: Points, key: str, x: float) -> float | None:
    """The return of a line at x, linear in log x between its points; the last one's after it, and
    None before the first."""
    if x < points[0][key]:
        return None
    for before, after in pairwise(points):
        if x < after[key]:
            share = math.log(x / before[key]) / math.log(after[key] / before[key])
            return before["mean_return"] + share * (after["mean_return"] - before["mean_return"])
    return points[-1]["mean_return"]


def crossings(ours: Points, other: Points, key: str) -> list[dict[str, Any]]:
    """Where another line crosses ours, along `key`, in the range of the other line.

    Before our first point we have nothing to show, and the other is ahead. After our last point
    ours stays what it is.

    Returns:
        of each crossing, in order: `at` of the axis, `times` our last point's, and whether the
        other is `ahead` from there on. The first entry is where the other line begins.
    """
    first, last, whole = other[0][key], other[-1][key], ours[-1][key]
    grid = sorted({p[key] for p in [*ours, *other] if first <= p[key] <= last})
    found: list[dict[str, Any]] = []
    before: tuple[float, float] | None = None  # where, and by how much the other was ahead
    for x in grid:
        mine, theirs = value_at(ours, key, x), value_at(other, key, x)
        assert theirs is not None  # x is in its range
        lead = math.inf if mine is None else theirs - mine
        at = x
        if before and math.isfinite(before[1]) and (lead >= 0) != (before[1] >= 0):
            share = before[1] / (before[1] - lead)
            at = before[0] * (x / before[0]) ** share
        if not found or found[-1]["ahead"] != (lead >= 0):
            found.append({"at": at, "times": at / whole, "ahead": lead >= 0})
        before = x, lead
    return found


def report(lines: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Of every line its last point, and of every rival where it crosses ours.

    Args:
        lines: what each line's JSON holds.
    """
    ours = lines[OURS]["points"]
    told: dict[str, Any] = {"pack": lines[OURS]["pack"], "scripted": lines[OURS]["scripted"]}
    rows: dict[str, Any] = {}
    for name, line in lines.items():
        points = line["points"]
        last, best = points[-1], max(points, key=lambda p: p["mean_return"])
        rows[name] = {
            "what": LINES[name],
            "seed": line["seed"],
            "processor": line["processor"],
            "last": last,
            "best_return": best["mean_return"],
            "points": [{key: round(value, 3) for key, value in point.items()} for point in points],
        }
        if name == OURS:
            continue
        rows[name] |= {
            "times": {key: last[key] / ours[-1][key] for key in AXES},
            "at_our_budget": {key: value_at(points, key, ours[-1][key]) for key in AXES},
            "meets_us": best["mean_return"] >= ours[-1]["mean_return"],
            "crossings": {key: crossings(ours, points, key) for key in AXES},
        }
    return {**told, "lines": rows}


def too_short(found: Mapping[str, Any]) -> list[str]:
    """In words, which rivals neither met ours nor learned for long enough not to."""
    told = []
    for name, row in found["lines"].items():
        if name == OURS or row["meets_us"]:
            continue
        least = {"steps": TIMES, "cpu_seconds": STRONGEST.get(name, TIMES)}
        for key, what in (("steps", "ticks"), ("cpu_seconds", "processor time")):
            if row["times"][key] < least[key]:
                had = f"{name} had {row['times'][key]:.2f} times our {what}"
                told.append(f"{had}, not {least[key]:g}")
    return told


def amount(key: str, value: float) -> str:
    """A number of the axis in words."""
    if key == "steps":
        return f"{value / 1e6:.2f} M ticks"
    return f"{value:.0f} s" if value < 120 else f"{value / 60:.1f} min"


def verdict(row: Mapping[str, Any], key: str) -> str:
    """In words, where a rival's line crosses ours along an axis, or that it does not."""
    first, *others = row["crossings"][key]
    far = f"{row['times'][key]:.1f} times our budget"
    by = "By agents' ticks" if key == "steps" else "By processor time"
    if not others:
        if first["ahead"]:
            return f"{by} it is ahead wherever it has points."
        return f"{by} it does not cross ours: it is behind at every point, to {far}."
    parts = [f"is {'ahead' if first['ahead'] else 'behind'} at first"]
    for one in others:
        where = f"{amount(key, one['at'])} ({one['times']:.2f} of our budget)"
        parts.append(f"{'goes ahead' if one['ahead'] else 'falls behind'} at {where}")
    last = others[-1]["ahead"]
    end = "" if last else f", and does not come back to {far}"
    return f"{by} it {', '.join(parts)}{end}."


def table(found: Mapping[str, Any]) -> str:
    """The kept report as Markdown."""
    rows = found["lines"]
    ours = rows[OURS]["last"]
    begins = " and ".join(amount(key, rows[OURS]["points"][0][key]) for key in AXES)
    lines = [
        "# Learning curves",
        "",
        f"By `dvc --cd benchmarks repro curves_report`, on {found['pack']}, one seed: mean return",
        "in the held-out worlds of `evaluate` while learning. Ticks are those of all agents that",
        "were played to learn from; processor time is of one thread, judging not counted. Ours is",
        "the whole pipeline: collecting, perception, world model, social model and policy. ± is",
        "half the 95 % interval over worlds.",
        "",
        "| line | ticks | processor time | R | at our ticks | at our time | meets ours |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in rows.items():
        last, more = row["last"], ["", "", ""]
        if name != OURS:
            at = [row["at_our_budget"][key] for key in AXES]
            more = [*(f"{x:.1f}" if x is not None else "" for x in at), "no"]
            more[2] = "yes" if row["meets_us"] else "no"
        lines.append(
            f"| {row['what']} | {last['steps'] / 1e6:.2f} M | "
            f"{last['cpu_seconds'] / 60:.1f} min | "
            f"{last['mean_return']:.1f} ± {last['mean_return_ci95']:.1f} | {' | '.join(more)} |"
        )
    lines += [
        "",
        "In the same worlds "
        + ", ".join(f"{SCRIPTED[who]} gets {x:.1f}" for who, x in found["scripted"].items())
        + ".",
        f"Ours has nothing that acts before {begins}: until then any rival is ahead.",
    ]
    for name, row in rows.items():
        if name == OURS:
            continue
        last = row["last"]
        end = "It meets ours" if row["meets_us"] else "It does not meet ours"
        both = last["mean_return_ci95"] + ours["mean_return_ci95"]
        near = abs(last["mean_return"] - ours["mean_return"]) < both
        lines += [
            "",
            f"**{row['what'][0].upper()}{row['what'][1:]}.** {verdict(row, 'steps')} "
            f"{verdict(row, 'cpu_seconds')} {end} ({ours['mean_return']:.1f}) within "
            f"{row['times']['steps']:.1f} times our ticks and {row['times']['cpu_seconds']:.1f} "
            f"times our processor time: {last['mean_return']:.1f} ± "
            f"{last['mean_return_ci95']:.1f} at last, {row['best_return']:.1f} at best."
            f"{' At last the two intervals overlap.' if near else ''}",
        ]
    return "\n".join(lines) + "\n"


def plot(lines: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    figure, both = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    for axes, (key, label) in zip(both, AXES.items(), strict=True):
        for name, line in lines.items():
            points = line["points"]
            axes.errorbar(
                [p[key] for p in points],
                [p["mean_return"] for p in points],
                yerr=[p["mean_return_ci95"] for p in points],
                label=LINES[name],
                marker=".",
                linewidth=2.5 if name == OURS else 1.2,
                elinewidth=0.8,
            )
        for (who, value), style in zip(lines[OURS]["scripted"].items(), ("--", ":", "-.")):
            axes.axhline(value, color="grey", linewidth=0.8, linestyle=style, label=SCRIPTED[who])
        axes.set_xscale("log")
        axes.set_xlabel(label)
        axes.spines[["top", "right"]].set_visible(False)
    both[0].set_ylabel("mean return of a life, held-out worlds")
    figure.legend(*both[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    equal_bytes = plt.rc_context({"svg.hashsalt": "curves"})  # of equal lines
    with atomic_path(path) as temporary, equal_bytes:
        figure.savefig(temporary, format="svg", metadata={"Date": None})
    plt.close(figure)
