"""REPORT.md: what each module learned, beside its trivial baseline, from the metrics files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hamlet.artifacts import atomic_path

# metric, what it says, the metric it must beat (None: stands alone)
MODULE_ROWS: dict[str, list[tuple[str, str, str | None]]] = {
    "perception": [
        ("map_seen_accuracy", "map, cells seen before", "map_seen_accuracy_last_view"),
        ("map_heard_accuracy", "map, cells that others' cues told of", None),
        ("map_unseen_accuracy", "map, cells never seen", "map_unseen_accuracy_prior"),
        ("view_accuracy", "this tick's view, from the belief", None),
        ("next_view_accuracy", "next tick's view", "next_view_accuracy_persistence"),
        ("others_meters_error", "others' hidden meters, mean error", "others_meters_error_mean"),
        ("map_ece", "calibration error of the map", None),
    ],
    "world_model": [
        ("meter_error_1_over_persistence", "meter error after 1 tick / persistence", None),
        ("meter_error_5_over_persistence", "meter error after 5 ticks / persistence", None),
        ("meter_error_15_over_persistence", "meter error after 15 ticks / persistence", None),
        ("meter_error_50_over_persistence", "meter error after 50 ticks / persistence", None),
        ("reward_r2", "reward, R2", None),
        ("continue_auroc", "survival, AUROC", None),
        ("value_explained_variance", "value, explained variance", None),
        (
            "return_rank_correlation_15",
            "imagined return of 15 ticks, rank correlation (baseline: the first reward)",
            "return_rank_correlation_15_persistence",
        ),
        ("doubt_error_correlation_1", "1 - confidence against error, 1 tick, correlation", None),
        ("doubt_error_correlation_5", "the same after 5 ticks", None),
    ],
    "social": [
        ("goal_accuracy", "others' hidden goal", "goal_accuracy_prior"),
        ("goal_accuracy_after_1", "after 1 tick in sight", "goal_accuracy_prior"),
        ("goal_accuracy_after_5", "after 5 ticks", "goal_accuracy_prior"),
        ("goal_accuracy_after_20", "after 20 ticks", "goal_accuracy_prior"),
        ("next_action_accuracy", "others' next action", "next_action_accuracy_prior"),
    ],
    "policy": [
        ("goal_agreement", "goals, agreement with the teacher", None),
        ("menu_error", "what a use gives, imagined: error as a share of it", None),
        ("explained_variance", "the critic's value, explained variance", None),
        ("scouts_gain", "what exploring where nobody else has looked brings in a life", None),
        ("scouts_gain_ci95", "half of the 95 % interval of that", None),
        ("stays_gain", "what leaving early, where the rest is worth less, brings", None),
        ("stays_gain_ci95", "half of the 95 % interval of that", None),
        ("countdown_gain", "what counting down to the end of a life brings", None),
        ("countdown_gain_ci95", "half of the 95 % interval of that", None),
    ],
    "population": [
        (
            "reinforced_return",
            "held-out return (baseline: after imitation, before reinforcement)",
            "imitated_return",
        ),
        ("reinforcement_gain", "what reinforcement added to it", None),
        ("reinforcement_gain_ci95", "half of the 95 % interval of that", None),
    ],
}


def society(found: Mapping[str, Any]) -> list[str]:
    """What the population's matches say."""
    members = range(len(found["payoff"]))
    low, high = found["focal_gain_ci95"]
    head = " | ".join(f"beside member {k}" for k in members)
    lines = [
        "",
        "### matches",
        "",
        f"| | {head} | beside characters | rating |",
        "| --- | --- | --- |" + " --- |" * len(members),
    ]
    for k in members:
        beside = " | ".join(f"{value:.1f}" for value in found["payoff"][k])
        among, rating = found["among_characters"][k], found["elo"][k]
        lines.append(f"| member {k} | {beside} | {among:.1f} | {rating:.0f} |")
    return [
        *lines,
        "",
        f"The winner is member {found['winner']}; member 0 is the policy as it came. One of the",
        "winner's kind among characters that nobody trained with gets "
        f"{found['focal_score']:.1f}, one of the policy's {found['focal_score_of_policy']:.1f}: "
        f"{found['focal_gain']:+.1f} (95 % from {low:.1f} to {high:.1f}).",
    ]


def write_report(path: Path, metrics: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the report; every number comes from `metrics`."""
    evaluate = metrics["evaluate"]
    lines = [
        "# Report",
        "",
        "Written by the `evaluate` stage from `artifacts/metrics`. All worlds, maps and co-players",
        "are held out.",
        "",
        "## The agent (agent.onnx in ONNX Runtime)",
        "",
        "| player | mean return | mean life, ticks | retired | the agent gets more (95 %) |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, score in sorted(evaluate["scores"].items(), key=lambda x: x[1]["mean_return"]):
        more = f"{score['agent_leads']:+.1f} ± {score['agent_leads_ci95']:.1f}"
        lines.append(
            f"| {name} | {score['mean_return']:.1f} | {score['survival']:.1f} | "
            f"{score['retired_fraction']:.3f} | {'' if name == 'agent' else more} |"
        )
    low, high = evaluate["ratio_over_rest_ci95"]
    score, share = evaluate["normalised_score"], evaluate["share_of_expert"]
    least, most = evaluate["share_of_expert_ci95"]
    lines += [
        "",
        f"Over always-REST: {evaluate['ratio_over_rest']:.2f} times (95 % {low:.2f}-{high:.2f}).",
        f"Of the expert's, who has the map: {share:.3f} (95 % {least:.3f}-{most:.3f}).",
        f"Normalised score (0 = always-REST, 1 = that expert): {score:.3f}.",
    ]
    home, needs, uses = (
        f"{100 * evaluate[name]:.1f} %"
        for name in ("novel_fraction", "novel_fraction_needs_doubled", "novel_fraction_uses_halved")
    )
    lines += [
        "",
        f"It takes {home} of what it imagines for novel; under rules that it never met, {needs}",
        f"where needs grow twice as fast and {uses} where all that is used gives half.",
    ]
    for name, possible in MODULE_ROWS.items():
        rows = [row for row in possible if row[0] in metrics[name]]
        if not rows:  # of others, where an agent is alone
            continue
        lines += ["", f"## {name}", "", "| what | value | baseline |", "| --- | --- | --- |"]
        for key, what, baseline in rows:
            beside = f"{metrics[name][baseline]:.3f}" if baseline else ""
            lines.append(f"| {what} | {metrics[name][key]:.3f} | {beside} |")
    if "focal_gain" in metrics["population"]:
        lines += society(metrics["population"])
    header = "| what | largest difference, relative beyond 1 | rows excused as ties |"
    lines += ["", "## Exactness", "", header, "| --- | --- | --- |"]
    for name, what in (("freeze_perception", "perception.pt2"), ("agent", "agent.onnx")):
        for key, value in metrics[name].items():
            if key.startswith("parity_"):
                batch = key.removeprefix("parity_")
                ties = metrics[name].get(f"split_ties_{batch}", 0)
                lines.append(f"| {what}, {batch} | {value:.1e} | {ties} |")
    with atomic_path(path) as temporary:
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
