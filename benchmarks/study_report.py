"""What the study's cells say: every variant's return, what lacking a module costs, a plot.

Intervals are over seeds (Student's t), costs paired by seed with the whole agent.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from scipy.stats import t as student

from hamlet.artifacts import atomic_path

VARIANTS = {
    "full": "the whole agent",
    "no_memory": "beliefs from what is in view only",
    "no_imagination": "nothing is imagined: no menu, no futures",
    "no_social": "nobody's goals are guessed",
    "random_goals": "goals drawn at random",
    "flat": "no goals: actions chosen at once",
    "alone": "learned while all others rested",
    "plain": "the plain modules of any world, from reward alone",
    "plain_time": "the same for as much processor time",
    "monolith": "a rival: one recurrent network, end to end",
    "sb3_recurrent_ppo": "a rival: RecurrentPPO of Stable-Baselines3",
    "lstm_ppo": "a rival: PPO with an LSTM in one file",
    "recurrent_dqn": "a rival: a recurrent DQN",
}
SEATED = ("full", "alone")
"""Also judged alone among characters that nobody trained with: is learning together worth it?"""


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half of its 95 % interval (Student's t); infinite for one value."""
    mean, count = statistics.fmean(values), len(values)
    if count < 2:
        return mean, float("inf")
    half = student.ppf(0.975, count - 1) * statistics.stdev(values) / count**0.5
    return mean, float(half)


def report(cells: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Per variant: returns by seed, their interval, and what lacking the module costs."""
    found: dict[str, dict[str, Any]] = {}
    by_variant = {v: {c["seed"]: c for c in cells if c["variant"] == v} for v in VARIANTS}
    whole = by_variant["full"]
    for variant, of_seed in by_variant.items():
        if not of_seed:
            continue
        mean, width = interval([c["mean_return"] for c in of_seed.values()])
        both = sorted(of_seed.keys() & whole.keys())
        costs = [whole[s]["mean_return"] - of_seed[s]["mean_return"] for s in both]
        found[variant] = {
            "what": VARIANTS[variant],
            "seeds": sorted(of_seed),
            "mean_return": mean,
            "mean_return_ci95": width,
            "retired_fraction": statistics.fmean(c["retired_fraction"] for c in of_seed.values()),
        }
        of_whole = [
            of_seed[s]["cpu_seconds"] / whole[s]["cpu_seconds"]
            for s in both
            if of_seed[s]["cpu_seconds"]
            and whole[s]["cpu_seconds"]
            and of_seed[s].get("processor") == whole[s].get("processor")
        ]
        if of_whole:
            found[variant]["cpu"] = statistics.fmean(of_whole)
        if variant != "full" and costs:
            cost, width = interval(costs)
            found[variant] |= {"cost": cost, "cost_ci95": width, "matters": cost - width > 0}
        if variant in SEATED and all("focal" in c for c in [*of_seed.values(), *whole.values()]):
            mean, width = interval([c["focal"] for c in of_seed.values()])
            found[variant] |= {"focal": mean, "focal_ci95": width}
            if variant != "full" and both:
                cost, width = interval([whole[s]["focal"] - of_seed[s]["focal"] for s in both])
                found[variant] |= {"focal_cost": cost, "focal_cost_ci95": width}
    return found


def table(found: dict[str, dict[str, Any]], pack: str) -> str:
    """The kept report as Markdown."""
    lines = [
        "# What each module is worth",
        "",
        f"By `dvc --cd benchmarks repro`, on {pack}: module D trained anew without one of the",
        "modules, for as many ticks as the whole agent; mean return in held-out worlds. ± is half",
        "the 95 % interval over seeds (Student's t), the cost being paired by seed; CPU is the",
        "processor time of this training as a multiple of the whole agent's on a like processor.",
        "The plain modules have no map, rules of meters, menu or teacher; their A, and the data",
        "that all modules learn from, are counted. The first rival is told what the whole agent is",
        "told; the others learn from reward alone.",
        "",
        "| variant | seeds | R | retired | CPU | costs | |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]

    def told(mean: float, width: float) -> str:
        """One seed has no interval."""
        return f"{mean:.1f} ± {width:.1f}" if math.isfinite(width) else f"{mean:.1f}"

    for row in found.values():
        cost = told(row["cost"], row["cost_ci95"]) if "cost" in row else ""
        cpu, verdict = f"{row['cpu']:.2f}" if "cpu" in row else "", ""
        if "matters" in row:
            verdict = "clear of zero" if row["matters"] else "not clear of zero"
        lines.append(
            f"| {row['what']} | {len(row['seeds'])} | "
            f"{told(row['mean_return'], row['mean_return_ci95'])} | "
            f"{row['retired_fraction']:.3f} | {cpu} | {cost} | {verdict} |"
        )
    if "focal_cost" in found.get("alone", {}):
        together, alone = found["full"], found["alone"]
        lines += [
            "",
            "Self-play, the focal score: one agent among characters that nobody trained with gets",
            f"{told(together['focal'], together['focal_ci95'])} if it learned in all places of its "
            "worlds, and",
            f"{told(alone['focal'], alone['focal_ci95'])} if it learned in as many ticks alone: "
            f"{told(alone['focal_cost'], alone['focal_cost_ci95'])} less.",
        ]
    return "\n".join(lines) + "\n"


def plot(found: dict[str, dict[str, Any]], path: Path) -> None:
    rows = list(found.values())[::-1]
    figure, axes = plt.subplots(figsize=(7, 0.5 + 0.45 * len(rows)), layout="constrained")
    widths = [row["mean_return_ci95"] if len(row["seeds"]) > 1 else 0.0 for row in rows]
    axes.barh([r["what"] for r in rows], [r["mean_return"] for r in rows], xerr=widths, height=0.6)
    axes.set_xlabel("mean return of a life (95 % over seeds)")
    axes.spines[["top", "right"]].set_visible(False)
    equal_bytes = plt.rc_context({"svg.hashsalt": "study"})  # of equal cells
    with atomic_path(path) as temporary, equal_bytes:
        figure.savefig(temporary, format="svg", metadata={"Date": None})
    plt.close(figure)
