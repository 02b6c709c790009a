"""Learning curves: return against agents' ticks and against processor time, ours beside rivals.

    dvc --cd benchmarks repro curves_report         # every line, then table and plot
    python -m benchmarks.curves line end_to_end     # one line, as JSON in `results/curves`
    python -m benchmarks.curves report              # table and plot of all lines

`ours` is the whole pipeline of `params.yaml`, in a folder of its own: all ticks that `collect` and
the policy's training play are counted, and the processor time of the stages `collect`,
`perception`, `freeze_perception`, `world_model` and `social`, each with its start, and of the
policy's training. The rivals: `end_to_end` (`benchmarks.end_to_end`, which imitates the same
teacher), and `recurrent_ppo` and `lstm_ppo` (`benchmarks.learning_peers`), which learn from reward
alone, in all places of as many of our batched worlds.

Every now and then the present agent plays the held-out worlds of `evaluate`; that time is not
counted. A rival learns for as long as `curves_rivals.LENGTHS` says; the report refuses one that had
less than TIMES our ticks or our processor time (the end-to-end network STRONGEST times that time),
unless it got as much as ours. A line that was stopped begins anew, and says so. One thread. The
rivals need the `bench` extra, but for the end-to-end network.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.curves_ours import Meter, ours
from benchmarks.curves_report import LINES, OURS, RESULTS, plot, report, stages_of, table, too_short
from benchmarks.curves_rivals import (
    LENGTHS,
    PEERS,
    Imitator,
    Length,
    Rewarded,
    Rival,
    rivals_points,
)
from benchmarks.study import Seated, judged, scripted
from benchmarks.study_report import stale
from hamlet.artifacts import HamletError, atomic_path, read_json, write_json
from hamlet.params import Params, load_params
from stages.collect import make_town
from stages.common import prepare_torch
from stages.evaluate import EVALUATION_SEED

SHOWN = ("expert_watching", "expert", "rest")
"""Scripted players in the same worlds: the teacher, who knows the map, who never does anything."""


def processor() -> str:
    """The processor's name where the system tells it, and what its vectors can do."""
    named = ""
    told = Path("/proc/cpuinfo")
    if told.exists():
        lines = [x for x in told.read_text().splitlines() if x.startswith("model name")]
        named = lines[0].partition(":")[2].strip() + ", " if lines else ""
    return named + torch.backends.cpu.get_cpu_capability()


def line(params: Params, name: str, seed: int, share: float = 1.0) -> dict[str, Any]:
    """Train and judge one line; it is written after every point, to go on being drawn.

    Args:
        share: part of its length that a rival gets.
    """
    evaluated = params.seed + EVALUATION_SEED
    params = params.model_copy(update={"seed": seed})
    prepare_torch(seed)
    town, held_out = make_town(params), make_town(params, held_out=True)
    unfinished = RESULTS / f"{name}.unfinished.json"
    if unfinished.exists():
        print(f"{name}: was stopped; begins anew", file=sys.stderr)
    found: dict[str, Any] = {
        "line": name, "seed": seed, "pack": town.pack.name, "processor": processor(), "points": [],
    }  # fmt: skip

    def judge(seated: Seated) -> Tensor:
        return judged(held_out, seated, evaluated)["returns"].mean(1)

    def add(one: dict[str, Any]) -> None:
        found["points"].append(one)
        write_json(unfinished, found)

    meter = Meter()
    if name == OURS:
        found["settings"] = params.model_dump(mode="json")
        found["scripted"] = {who: judge(scripted(who, evaluated)).mean().item() for who in SHOWN}
        ours(params, judge, meter, add)
    else:
        rival: Rival = (
            Imitator(town, params.policy.teacher, seed)
            if name == "end_to_end"
            else Rewarded(town, name, seed, PEERS)
        )
        found["settings"] = rival.settings
        whole = LENGTHS[name]
        length = Length(round(share * whole.steps), share * whole.cpu_seconds)
        for one in rivals_points(rival, length, judge, meter):
            add(one)
    write_json(RESULTS / f"{name}.json", found)
    unfinished.unlink(missing_ok=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_subparsers(dest="what", required=True)
    one = what.add_parser("line", help="train one line and judge it as it learns")
    one.add_argument("name", choices=LINES)
    one.add_argument("--seed", type=int, help="default: that of params.yaml")
    one.add_argument("--share", type=float, default=1.0, help="part of its length for a rival")
    what.add_parser("report", help="table and plot of the lines there are")
    args = parser.parse_args(arguments)
    if args.what == "line":
        params = load_params()
        seed = params.seed if args.seed is None else args.seed
        found = line(params, args.name, seed, args.share)
        print(json.dumps({"line": args.name, **found["points"][-1]}))
        return 0
    lines = {name: read_json(path) for name in LINES if (path := RESULTS / f"{name}.json").exists()}
    if OURS not in lines or len(lines) < 2:
        print(f"curves: {RESULTS} holds too few lines; run `dvc --cd benchmarks repro`")
        return 1
    if old := stale([stages_of(name) for name in lines]):
        raise HamletError(
            f"made by other code or parameters than these: {', '.join(old)}",
            "run `dvc --cd benchmarks repro curves_report`",
        )
    rows = report(lines)
    if short := too_short(rows):
        raise HamletError(
            f"shorter than they must be beside ours: {'; '.join(short)}",
            "raise them in LENGTHS of benchmarks/curves_rivals.py and run "
            "`dvc --cd benchmarks repro curves_report`",
        )
    write_json(RESULTS.with_suffix(".json"), rows)
    with atomic_path(RESULTS.with_suffix(".md")) as path:
        path.write_text(table(rows), encoding="utf-8")
    plot(lines, RESULTS.with_suffix(".svg"))
    print(RESULTS.with_suffix(".md").read_text())
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except HamletError as error:
        sys.exit(f"curves: {error}")
