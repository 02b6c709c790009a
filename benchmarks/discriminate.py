"""Does a pack tell apart who knows what? Scripted experts with one thing hidden from each.

    python -m benchmarks.discriminate [--packs l4_contention,l7_scarce] [--worlds 512]

In each pack the tuned full-map expert lives beside the same planner without one kind of knowledge:
it knows only the places that it has seen, or does not count on where others are and want to go, or
believes the prices and hours of the schedule's previous phase. All agents of a world are of one
kind. Everybody plays the same worlds (layouts that tuning never saw, starts, ties); a kind plays by
its own tuned parameters where the pack has any, else by the expert's. What is lost is told in % of
the expert's return R and of R - R_REST, R_REST being the return of always resting, each with the
95 % interval over worlds. The last line is JSON; `holds` says whether on the last pack every loss
of R is, with its whole interval, as large as it must be. It is written with all numbers to
benchmarks/results/discriminate.json, and as a table to discriminate.md beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from rich.progress import Progress
from torch import Tensor

from hamlet.artifacts import atomic_path, write_json
from hamlet.town import PackError, Scripted, Town, load_pack
from hamlet.town.lives import HELD_OUT_LAYOUTS, play
from hamlet.town.schema import Pack

RESULTS = Path(__file__).parent / "results" / "discriminate.json"
REQUIRED = {
    "expert_sightings": 0.15, "expert_searching": 0.15, "expert_ignoring": 0.10,
    "expert_yesterday": 0.10,
}  # fmt: skip
KINDS = {
    "expert": "the full-map expert",
    "expert_sightings": "acts on own sightings only",
    "expert_searching": "the same, but looks where most is new and weighs what it may find",
    "expert_watching": "the same, and learns of places from those it sees use them",
    "expert_ignoring": "ignores where others are and are going",
    "expert_yesterday": "assumes the previous phase's prices and hours",
    "rest": "always rests",
}


def loss(full: Tensor, less: Tensor, floor: Tensor) -> tuple[float, float]:
    """Mean of `full - less` as a share of the mean of `full - floor`, and its 95 % half-width.

    All three are f32 [worlds], paired; the interval is the delta method's for a ratio of means.
    """
    scale = (full - floor).mean()
    share = (full - less).mean() / scale
    error = ((full - less) - share * (full - floor)).std() / len(full) ** 0.5 / scale
    return share.item(), 1.96 * error.item()


def measure(pack: Pack, worlds: int, seed: int, progress: Progress) -> dict:
    """All kinds on one pack: R, interval, life, share retired, losses."""
    town = Town(pack, layout_seed=HELD_OUT_LAYOUTS)
    task = progress.add_task(pack.name, total=len(KINDS))
    lives = {}
    for kind in KINDS:
        progress.update(task, description=f"{pack.name}: {kind}")
        lives[kind] = play(town, Scripted(town, [kind]), seed, worlds)
        progress.advance(task)
    returns = {kind: found["returns"].mean((1, 2)) for kind, found in lives.items()}
    rows = {}
    for kind, found in lives.items():
        mine, nothing = returns[kind], torch.zeros(worlds)
        share, width = loss(returns["expert"], mine, nothing)
        normal, normal_width = loss(returns["expert"], mine, returns["rest"])
        rows[kind] = {
            "return": mine.mean().item(),
            "return_ci95": 1.96 * mine.std().item() / worlds**0.5,
            "life": found["life"].mean().item(),
            "retired": found["retired"].mean().item(),
            "loss": share,
            "loss_ci95": width,
            "normalised_loss": normal,
            "normalised_loss_ci95": normal_width,
        }
    holds = all(rows[kind]["loss"] - rows[kind]["loss_ci95"] >= least
                for kind, least in REQUIRED.items())  # fmt: skip
    return {
        "description": f"{pack.width}x{pack.height}, {pack.agents} agents. {pack.description}",
        "content_hash": pack.content_hash,
        "worlds": worlds,
        "holds": holds,
        "kinds": rows,
    }


def table(found: dict[str, dict]) -> str:
    """The kept report: one Markdown table per pack."""
    lines = [
        "# What it costs not to know",
        "",
        "By `python -m benchmarks.discriminate`: scripted experts on layouts that tuning never",
        "saw, each kind in the same worlds and, where the pack says so, tuned for what it knows.",
        "± is half the 95 % interval over worlds. Required: the least loss of R, with the whole",
        "interval, that a pack must show in which learning can be told from not learning.",
    ]
    for name, pack in found.items():
        verdict = "holds" if pack["holds"] else "does not hold"
        lines += [
            "",
            f"## {name}: {verdict}",
            "",
            f"{pack['description']} {pack['worlds']} worlds, one life each.",
            "",
            "| player | R | life | retired | loss of R | loss of R - R_REST | required |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        for kind, row in pack["kinds"].items():
            cells = [
                KINDS[kind],
                f"{row['return']:.1f} ± {row['return_ci95']:.1f}",
                f"{row['life']:.0f}",
                f"{row['retired']:.1%}",
            ]
            for share in ("loss", "normalised_loss"):
                known = kind != "expert"
                text = f"{100 * row[share]:.1f} ± {100 * row[f'{share}_ci95']:.1f} %"
                cells.append(text if known else "")
            cells.append(f"{REQUIRED[kind]:.0%}" if kind in REQUIRED else "")
            lines.append(f"| {' | '.join(cells)} |".replace("  ", " "))
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--packs", default="l4_contention,l7_scarce", help="names or files")
    parser.add_argument("--worlds", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, default=RESULTS, help="file that keeps the numbers")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    if args.worlds < 2:
        sys.exit("discriminate: --worlds: an interval needs at least 2; give more")
    found = {}
    with Progress() as progress:
        for name in args.packs.split(","):
            try:
                found[name] = measure(load_pack(name), args.worlds, args.seed, progress)
            except PackError as error:
                print(f"discriminate: {error}", file=sys.stderr)
                return 2
    write_json(args.json, found)
    text = table(found)
    with atomic_path(args.json.with_suffix(".md")) as path:
        path.write_text(text, encoding="utf-8")
    print(text)
    name, last = list(found.items())[-1]
    summary = {"pack": name, "holds": last["holds"], "return": last["kinds"]["expert"]["return"]}
    for kind in REQUIRED:
        row = last["kinds"][kind]
        summary |= {f"{kind}_{key}": row[key] for key in ("loss", "loss_ci95", "normalised_loss")}
    summary["expert_retired"] = last["kinds"]["expert"]["retired"]
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in summary.items()}))
    return 0 if last["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
