"""Do agents that never met get on? Agents of several checkouts' pipelines share worlds.

    python -m benchmarks.crossplay ../seed7 ../seed8 ../seed9

Focal score: one agent of a kind among characters that nobody trained with, on held-out maps; beside
the agents, in the same place of the same worlds, the expert that knows the map and one that always
rests. Cross-play: half of the agents of every world are of one checkout and half of another, in
both seatings; the table shows what the row's agents get beside the column's.

Needs what `dvc repro` left in each checkout, trained for the same pack. Keeps the numbers as
benchmarks/results/crossplay/PACK.json and the tables beside it; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

from hamlet.artifacts import HamletError, atomic_path, write_json
from hamlet.export.frozen_policy import load_policy
from hamlet.learning.population import Characters, Seat, Selves, play
from hamlet.modules.agent import Mind
from hamlet.modules.contracts import TownShape
from hamlet.params import Params, load_params
from hamlet.town import Scripted
from hamlet.town.personalities import HELD_OUT
from stages import paths
from stages.collect import make_town
from stages.policy import make_mind

RESULTS = Path(__file__).parent / "results" / "crossplay"
YARDSTICKS = ("expert", "rest")
Seating = Callable[[int, int], Seat]
"""Whoever it is, in the places first..last - 1 of every world."""


def resident(checkout: Path) -> tuple[Params, Seating]:
    """The agent that a checkout's pipeline made, as frozen graphs, and the params that made it.

    Raises:
        HamletError: where the pipeline has not run there, or ran for another pack.
    """
    with chdir(checkout):
        params = load_params()
        town = make_town(params)
        shape = TownShape.of(town)
        for path in (paths.PERCEPTION, paths.WORLD_MODEL, paths.SOCIAL, paths.WINNER):
            if not path.exists():
                raise HamletError(f"{checkout / path} is not there", f"`dvc repro` in {checkout}")
        mind, blank, _ = make_mind(params, town)
        policy: Any = load_policy(paths.WINNER, shape)[0]
    sizes = params.policy
    whole = Mind(
        mind.perceive, mind.imagine_tick, mind.read_others, policy, sizes.candidates, sizes.horizon
    )
    return params, lambda first, last: Selves(whole, shape, blank, first, last, imagines=True)


def of_worlds(values: Tensor) -> dict[str, float]:
    """Mean of float64 [worlds], and half of its 95 % interval over worlds."""
    margin = 1.96 * values.std() / len(values) ** 0.5
    return {"mean": values.mean().item(), "ci95": margin.item()}


def measure(agents: Mapping[str, Seating], params: Params, worlds: int, seed: int) -> Any:
    """Focal scores and matches of all `agents`, by name."""
    town, unknown = make_town(params), make_town(params, held_out=True)
    strangers = Characters(Scripted(unknown, HELD_OUT, seed), 1, unknown.num_agents)
    seats = {name: seat(0, 1) for name, seat in agents.items()}
    for name in YARDSTICKS:
        seats[name] = Characters(Scripted(unknown, [name], seed), 0, 1)
    focal = {
        name: play(unknown, seat, strangers, worlds, seed)[:, 0]
        for name, seat in track(seats.items(), "focal score")
    }
    half, everyone = town.num_agents // 2, town.num_agents
    pairs = [(row, column) for row in agents for column in agents]
    met = {
        pair: play(
            town, agents[pair[0]](0, half), agents[pair[1]](half, everyone), worlds, seed + 1
        )
        for pair in track(pairs, "cross-play")
    }
    # What the row's agents get: in the first places of their match, in the last of its reverse.
    payoff = {
        (row, column): (met[row, column][:, :half].mean(1) + met[column, row][:, half:].mean(1)) / 2
        for row, column in pairs
    }
    apart = [payoff[pair] for pair in pairs if pair[0] != pair[1]]
    alike = [payoff[name, name] for name in agents]
    found: dict[str, Any] = {
        "worlds": worlds,
        "focal": {name: of_worlds(values) for name, values in focal.items()},
        "payoff": {
            row: {column: of_worlds(payoff[row, column]) for column in agents} for row in agents
        },
    }
    best = focal["expert"].mean() - focal["rest"].mean()
    for name in agents:
        normalised = (focal[name].mean() - focal["rest"].mean()) / best
        found["focal"][name]["normalised"] = normalised.item()
    if apart:
        gap = torch.stack(apart).mean(0) - torch.stack(alike).mean(0)
        found["strangers_minus_own_kind"] = of_worlds(gap)
    return found


def told(value: Mapping[str, float]) -> str:
    return f"{value['mean']:.1f} ± {value['ci95']:.1f}"


def table(found: Mapping[str, Any], pack: str) -> str:
    """The report as Markdown."""
    names = list(found["payoff"])
    lines = [
        f"# {pack}: among strangers",
        "",
        f"By `python -m benchmarks.crossplay`, {found['worlds']} worlds a match.",
        "± is half the 95 % interval over worlds.",
        "",
        "## One among characters that nobody trained with, on held-out maps",
        "",
        "| who | R | normalised (0 = always-REST, 1 = the full-map expert there) |",
        "| --- | --- | --- |",
    ]
    for name, value in found["focal"].items():
        share = f"{value['normalised']:.3f}" if "normalised" in value else ""
        lines.append(f"| {name} | {told(value)} | {share} |")
    lines += [
        "",
        "## Half of the agents of the row, half of the column: R of the row's",
        "",
        f"| | {' | '.join(names)} |",
        "| --- |" + " --- |" * len(names),
    ]
    for row, of_row in found["payoff"].items():
        lines.append(f"| {row} | {' | '.join(told(of_row[name]) for name in names)} |")
    if "strangers_minus_own_kind" in found:
        lines += [
            "",
            "Beside agents of another training they get "
            f"{found['strangers_minus_own_kind']['mean']:+.1f} ± "
            f"{found['strangers_minus_own_kind']['ci95']:.1f} more than among their own.",
        ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkouts", nargs="*", type=Path, default=[Path()])
    parser.add_argument("--worlds", type=int, default=256, help="of every match")
    parser.add_argument("--seed", type=int, default=100)
    args = parser.parse_args(arguments)
    if args.worlds < 2:
        raise HamletError(f"--worlds is {args.worlds}: an interval needs at least 2", "give more")
    runs = [(checkout, *resident(checkout)) for checkout in args.checkouts]
    params = runs[0][1]
    agents: dict[str, Seating] = {}
    for checkout, theirs, seat in runs:
        name = f"seed {theirs.seed}"
        if name in agents:
            raise HamletError(f"{checkout}: a second agent of {name}", "give each seed once")
        if theirs.town != params.town:
            raise HamletError(f"{checkout}: params.yaml: town differs", "give runs of one town")
        agents[name] = seat
    found = measure(agents, params, args.worlds, args.seed)
    pack = Path(params.town.pack).stem
    write_json(RESULTS / f"{pack}.json", found)
    text = table(found, pack)
    print(text)
    with atomic_path(RESULTS / f"{pack}.md") as path:
        path.write_text(text, encoding="utf-8")
    last = {name: round(value["mean"], 2) for name, value in found["focal"].items()}
    print(json.dumps({"pack": pack, "focal": last}))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except HamletError as error:
        sys.exit(f"crossplay: {error}")
