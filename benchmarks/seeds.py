"""Does it hold for other seeds? What several checkouts' pipelines measured, side by side.

    python -m benchmarks.seeds                     # take in this checkout's run, then the table
    python -m benchmarks.seeds ../other ../third   # take in those instead

A checkout's run is `seed` and `town.pack` of its params.yaml and what `dvc repro` left in its
artifacts/metrics. Of each, the numbers that are asked for are kept as
benchmarks/results/seeds/PACK-SEED.json; the table, results/seeds.md, shows every number of every
seed beside what is asked, and their mean with its 95 % interval over seeds (Student's t).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.study_report import interval
from hamlet.artifacts import HamletError, atomic_path, read_json, write_json
from hamlet.params import load_params

RESULTS = Path(__file__).parent / "results" / "seeds"
STAGES = ("perception", "world_model", "social", "population", "evaluate")
HEAD = """# Other seeds

By `python -m benchmarks.seeds`, of runs of `dvc repro` that differ in `seed`. Bold is what is not
as asked. ± is half the 95 % interval over seeds.

On the easy pack, l4_contention, both that are asked for return were set with an expert that got
426 there: 441 is 1.05 of it, counted from always-REST's 134. Tuned since, it gets 468. 1.05 of that
is 485, and nobody has come near: with the world to itself it gets 477.
"""
# what it says, the stage whose metric it is, the metric, what is asked of it ("" : nothing)
ROWS = (
    ("mean return R of a life", "evaluate", "mean_return", ""),
    ("the same, of the full-map expert", "evaluate", "expert_return", ""),
    ("share of the full-map expert's", "evaluate", "share_of_expert", ">= 0.95"),
    ("normalised (0 = always-REST, 1 = that expert)", "evaluate", "normalised_score", ""),
    ("retired", "evaluate", "retired_fraction", ">= 0.96"),
    ("R above the own-sightings expert's", "evaluate", "over_expert_sightings", "> 0"),
    ("R above the searching expert's", "evaluate", "over_expert_searching", "> 0"),
    ("R above its teacher's", "evaluate", "over_expert_watching", "> 0"),
    ("what reinforcement adds to imitation", "population", "reinforcement_gain", ">= 8"),
    ("map, cells seen before", "perception", "map_seen_accuracy", ">= 0.9"),
    ("calibration error of the map", "perception", "map_ece", "<= 0.05"),
    ("meter error, 1 tick / persistence", "world_model", "meter_error_1_over_persistence",
     "<= 0.25"),
    ("meter error, 15 ticks / persistence", "world_model", "meter_error_15_over_persistence",
     "<= 0.5"),
    ("reward, R2", "world_model", "reward_r2", ">= 0.9"),
    ("survival, AUROC", "world_model", "continue_auroc", ">= 0.95"),
    ("imagined return, rank correlation", "world_model", "return_rank_correlation_15", ">= 0.7"),
    ("1 - confidence against error, correlation", "world_model", "doubt_error_correlation_1",
     ">= 0.4"),
    ("others' goal, prior", "social", "goal_accuracy_prior", ""),
    ("others' goal after 1 tick in sight", "social", "goal_accuracy_after_1", ""),
    ("others' goal after 5 ticks", "social", "goal_accuracy_after_5", ""),
    ("others' goal after 20 ticks", "social", "goal_accuracy_after_20", ">= 0.6"),
)  # fmt: skip
OF_THE_EASY_PACK = {
    "mean_return": ">= 441", "normalised_score": ">= 1.05", "retired_fraction": ">= 0.99",
    "share_of_expert": "", "over_expert_sightings": "", "over_expert_searching": "",
    "over_expert_watching": "", "reinforcement_gain": "",
}  # fmt: skip


def holds(value: float, asked: str) -> bool:
    """Whether `value` is what `asked`, as ">= 0.9", says."""
    sign, limit = asked.split()
    bound = float(limit)
    return {">=": value >= bound, "<=": value <= bound, ">": value > bound}[sign]


def taken(checkout: Path) -> dict[str, Any]:
    """What a checkout's run measured, by stage and metric; and its pack and seed.

    Raises:
        HamletError: where a stage has not run there.
    """
    params = load_params(checkout / "params.yaml")
    numbers: dict[str, Any] = {}
    for stage in STAGES:
        path = checkout / "artifacts" / "metrics" / f"{stage}.json"
        if not path.is_file():
            raise HamletError(f"{path} is not there", f"run `dvc repro` in {checkout} first")
        numbers[stage] = read_json(path)
    scores = numbers["evaluate"].pop("scores")
    numbers["evaluate"]["expert_return"] = scores["expert"]["mean_return"]
    for name, score in scores.items():
        numbers["evaluate"][f"over_{name}"] = score["agent_leads"]
    kept = {stage: {key: numbers[stage][key] for _, s, key, _ in ROWS if s == stage}
            for stage in STAGES}  # fmt: skip
    return {"pack": Path(params.town.pack).stem, "seed": params.seed, **kept}


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """The kept report of the runs of one pack as Markdown; what is not as asked is bold."""
    seeds = [run["seed"] for run in runs]
    lines = [
        f"## {runs[0]['pack']}",
        "",
        "| what | asked | " + " | ".join(f"seed {seed}" for seed in seeds) + " | mean |",
        "| --- | --- |" + " --- |" * (len(seeds) + 1),
    ]
    for what, stage, key, asked in ROWS:
        if runs[0]["pack"] == "l4_contention":
            asked = OF_THE_EASY_PACK.get(key, asked)
        if any(key not in run.get(stage, {}) for run in runs):
            continue  # of a run that was taken in before this was asked
        values = [run[stage][key] for run in runs]
        mean, half = interval(values)

        def told(value: float, asked: str = asked) -> str:
            shown = f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}"
            return f"**{shown}**" if asked and not holds(value, asked) else shown

        summary = told(mean) + (f" ± {half:.2g}" if len(runs) > 1 else "")
        lines.append(f"| {what} | {asked} | {' | '.join(map(told, values))} | {summary} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkouts", nargs="*", type=Path, default=[Path()])
    for checkout in parser.parse_args(arguments).checkouts:
        run = taken(checkout)
        write_json(RESULTS / f"{run['pack']}-{run['seed']}.json", run)
    runs = [read_json(path) for path in sorted(RESULTS.glob("*-*.json"))]
    packs = dict.fromkeys(run["pack"] for run in runs)
    tables = [table([run for run in runs if run["pack"] == pack]) for pack in packs]
    text = "\n".join([HEAD, *tables])
    print(text)
    with atomic_path(RESULTS.with_suffix(".md")) as path:
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except HamletError as error:
        sys.exit(f"seeds: {error}")
