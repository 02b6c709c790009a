"""What the study's cells say: every variant's return, what lacking a module costs, a plot.

Intervals are over seeds (Student's t), costs paired by seed with the whole agent.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from scipy.special import stdtrit

from benchmarks.shifts import SHIFTS
from benchmarks.study_changes import CHANGES, HABITS
from hamlet.artifacts import atomic_path

VARIANTS = {
    "full": "the whole agent",
    "no_memory": "beliefs from what is in view only",
    "no_imagination": "nothing is imagined: no menu, no futures",
    "no_social": "nobody's goals are guessed",
    "random_goals": "goals drawn at random",
    "flat": "no goals: actions chosen at once",
    "alone": "learned while all others rested",
    "imitated": "imitation only: no lives are tried, no PPO",
    "reinforced": "then much PPO without the teacher, each for itself",
    "reinforced_long": "the same in rollouts of 96 ticks, not 8",
    "reinforced_sharing": "the same, for the mean reward of all",
    "no_rule": "not given: the bias of the broke",
    "no_emergency": "not given: which goals to drop in an emergency",
    "no_targets": "not given: when a goal is reached",
    "no_rules": "not given: any of these three rules",
    "no_prospects": "not given: what a place is worth per tick",
    "no_timetable": "not given: hours and prices",
    "no_look": "not given: where most can be newly seen",
    "nothing_given": "none of these six",
    "plain": "the plain modules of any world, from reward alone",
    "plain_time": "the same for as much processor time",
    "monolith": "a rival: one recurrent network, end to end",
    "sb3_recurrent_ppo": "a rival: RecurrentPPO of Stable-Baselines3",
    "lstm_ppo": "a rival: PPO with an LSTM in one file",
    "recurrent_dqn": "a rival: a recurrent DQN",
}
SEATED = ("full", "alone")
"""Also judged alone among characters that nobody trained with: is learning together worth it?"""

SHIFTED = ("full", "monolith")
"""Also judged after changes of the town that nobody tuned on (`benchmarks.shifts`)."""


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half of its 95 % interval (Student's t); infinite for one value."""
    mean, count = statistics.fmean(values), len(values)
    if count < 2:
        return mean, float("inf")
    half = stdtrit(count - 1, 0.975) * statistics.stdev(values) / count**0.5
    return mean, float(half)


def stale(names: Sequence[str]) -> list[str]:
    """Of the cells `variant-seed` those that other code, parameters or modules made, by DVC.

    Of a module that is not there nothing is known.
    """
    asked = [sys.executable, "-m", "dvc", "status", "--json"]
    told = json.loads(subprocess.check_output(asked, cwd=Path(__file__).parent, text=True))
    found = []
    for stage, changes in told.items():
        kind, _, item = stage.partition("@")
        name = item if "-" in item else f"{kind}-{item}"
        if name in names and changed(changes):
            found.append(name)
    return sorted(found)


def changed(what: Any) -> bool:
    """Whether DVC names something that is other than it was, and not only missing."""
    if isinstance(what, dict):
        return any(changed(part) for part in what.values())
    if isinstance(what, list):
        return any(changed(part) for part in what)
    return what != "deleted"


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
        if all("changed" in c and "without" in c for c in of_seed.values()):
            found[variant] |= decided(list(of_seed.values()))
        if variant in SHIFTED and all("shifted" in c for c in of_seed.values()):
            found[variant]["kept"] = kept(list(of_seed.values()))
        if variant in SEATED and all("focal" in c for c in [*of_seed.values(), *whole.values()]):
            mean, width = interval([c["focal"] for c in of_seed.values()])
            found[variant] |= {"focal": mean, "focal_ci95": width}
            if variant != "full" and both:
                cost, width = interval([whole[s]["focal"] - of_seed[s]["focal"] for s in both])
                found[variant] |= {"focal_cost": cost, "focal_cost_ci95": width}
    return found


def decided(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the parts of the agents in the cells change of what they decide, and what their habits
    are worth to them, each with its interval."""
    changed = {part: interval([c["changed"][part] for c in cells]) for part in CHANGES}
    worth = {
        name: interval([c["mean_return"] - c["without"][name] for c in cells]) for name in HABITS
    }
    return {
        "changed": {part: {"share": mean, "ci95": half} for part, (mean, half) in changed.items()},
        "habits": {name: {"worth": mean, "ci95": half} for name, (mean, half) in worth.items()},
    }


def decisions(found: dict[str, dict[str, Any]]) -> list[str]:
    """The same as Markdown; nothing where nobody was asked."""
    if "changed" not in found.get("full", {}):
        return []
    lines = [
        "",
        "# What each part changes of what is decided",
        "",
        "Of the deliberations of the whole agent, the share of which a part that it was trained",
        "with changes the goal, asked at each with the part taken away; and what a habit is worth",
        "to it, by lives in the same worlds without.",
        "",
        "| part | changes, of 100 deliberations |",
        "| --- | --- |",
    ]
    for part, row in found["full"]["changed"].items():
        lines.append(f"| {CHANGES[part]} | {100 * row['share']:.1f} ± {100 * row['ci95']:.1f} |")
    lines += ["", "| habit | is worth | |", "| --- | --- | --- |"]
    for name, row in found["full"]["habits"].items():
        clear = "clear of zero" if row["worth"] > row["ci95"] else "not clear of zero"
        lines.append(f"| {HABITS[name]} | {row['worth']:.1f} ± {row['ci95']:.1f} | {clear} |")
    return lines


def kept(cells: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of every player in the cells and every shift, the share of its return that it keeps, by seed;
    and each share's interval. The cells' own player is called `self`."""
    shares: dict[str, dict[str, Any]] = {}
    for shift in SHIFTS:
        by_player = {"self": [c["shifted"][shift] / c["mean_return"] for c in cells]}
        for name in cells[0].get("scripted", {}):
            told = [c["scripted"][name] for c in cells]
            by_player[name] = [each[shift] / each["none"] for each in told]
        for name, values in by_player.items():
            mean, width = interval(values)
            shares.setdefault(name, {})[shift] = {"share": mean, "ci95": width, "by_seed": values}
    return shares


def shifts(found: dict[str, dict[str, Any]]) -> list[str]:
    """What is kept of a return after the shifts, as Markdown; nothing where nobody was asked."""
    if "kept" not in found.get("full", {}):
        return []
    of = {VARIANTS["full"]: found["full"]["kept"]["self"]}
    for name, shares in found["full"]["kept"].items():
        if name != "self":
            of["the teacher, " + name if name != "expert" else "the expert with the map"] = shares
    if "kept" in found.get("monolith", {}):
        of[VARIANTS["monolith"]] = found["monolith"]["kept"]["self"]
    lines = [
        "",
        "# What is kept of it when the town changes",
        "",
        "The share of its return that a player keeps, in the same worlds. The scripted players",
        "plan by the changed rules; the others know only those that they learned.",
        "",
        f"| player | {' | '.join(SHIFTS.values())} |",
        f"| --- |{' --- |' * len(SHIFTS)}",
    ]
    for who, shares in of.items():
        parts = [f"{shares[s]['share']:.3f} ± {shares[s]['ci95']:.3f}" for s in SHIFTS]
        lines.append(f"| {who} | {' | '.join(parts)} |")
    ours = of.pop(VARIANTS["full"])
    lines.append("")
    for who, shares in of.items():
        for shift, what in SHIFTS.items():
            both = zip(ours[shift]["by_seed"], shares[shift]["by_seed"])
            more, width = interval([mine - theirs for mine, theirs in both])
            verdict = (
                "more than" if more > width else "less than" if more < -width else "as much as"
            )
            lines.append(
                f"- When {what}, the agent keeps {verdict} {who.split(',')[0]} "
                f"({more:+.3f} ± {width:.3f})."
            )
    return lines


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
    return "\n".join([*lines, *decisions(found), *shifts(found)]) + "\n"


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
