"""`hamlet offline`: check a log, train on it, judge what was learned."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console

from hamlet.artifacts import HamletError

app = typer.Typer(no_args_is_help=True, help="Learn from logged experience.")
MOST_SHOWN = 20
OUT = Path("artifacts/offline")
Data = Annotated[
    Path, typer.Argument(help="Parquet or Arrow file, a folder of them, or a Minari data set.")
]
SchemaFile = Annotated[
    Path | None,
    typer.Option("--schema", help="The columns; default: DATA.yaml, or schema.yaml in a folder."),
]
Out = Annotated[Path, typer.Option(help="Folder for the policy and all that belongs to it.")]
ParamsFile = Annotated[
    Path | None, typer.Option("--params", help="YAML with the sections `offline` and `gate`.")
]


class Objective(StrEnum):
    """What is learned."""

    ppo = "ppo"
    impala = "impala"
    imitation = "imitation"


def _in_one_line(command: Callable[[], None]) -> None:
    try:
        command()
    except HamletError as error:
        Console(stderr=True).print(
            str(error), style="red", markup=False, highlight=False, soft_wrap=True
        )
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _needs_packages() -> None:
    for package in ("torch", "pyarrow", "minari"):
        if find_spec(package) is None:
            raise HamletError(
                f"`hamlet offline` needs {package}",
                'run `pip install -c constraints.txt -e ".[offline]"`',
            )


@app.command()
def check(data: Data, schema: SchemaFile = None) -> None:
    """Print what a log holds and what is wrong with it, by row. Exit code 1 if anything is."""

    def run() -> None:
        _needs_packages()
        from hamlet.offline.open_log import open_log

        problems: list[HamletError] = []
        count = 0

        def keep(problem: HamletError) -> None:
            nonlocal count
            count += 1
            if count <= MOST_SHOWN:
                problems.append(problem)

        with TemporaryDirectory() as cache:
            store = open_log(data, schema, Path(cache), keep)
            for line in described(store.facts, store.schema.action_names):
                print(line)
        for problem in problems:
            print(problem)
        if count > MOST_SHOWN:
            print(f"and {count - MOST_SHOWN} more")
        if problems:
            raise typer.Exit(1)
        print("nothing is wrong")

    _in_one_line(run)


def described(facts: dict[str, Any], actions: list[str]) -> list[str]:
    """Lines about a log: what `LogStore.facts` holds."""
    lengths, reward, rows = facts["lengths"], facts["reward"], max(facts["rows"], 1)
    counts = facts["action_counts"]
    shares = ", ".join(f"{name} {100 * n / rows:.1f} %" for name, n in zip(actions, counts))
    unseen = [name for name, n in zip(actions, counts) if not n]
    lines = [
        f"{facts['rows']} decisions in {facts['episodes']} episodes of {lengths['min']} to "
        f"{lengths['max']} steps, {lengths['mean']:.1f} on average",
        f"{facts['terminated']} episodes terminated; the observation after the last action is "
        f"known of {facts['final_observations']}",
        f"actions: {shares}",
        f"rewards: {reward['min']:.4g} to {reward['max']:.4g}, {reward['mean']:.4g} on average",
    ]
    if unseen:
        lines.append(f"never taken, so nothing can be learned of them: {', '.join(unseen)}")
    cut = facts["episodes"] - facts["terminated"] - facts["final_observations"]
    if cut > 0:
        lines.append(
            f"up to {cut} episodes neither terminated nor have a final observation: nothing is "
            "learned from their last row"
        )
    if not facts["log_prob"]:
        lines.append(
            "no behaviour log-probabilities: `ppo` and `impala` will estimate them from a fitted "
            "policy; log them if you can"
        )
    return lines


def _stage(*arguments: object) -> None:
    _needs_packages()
    command = [sys.executable, "-m", "stages.offline", *map(str, arguments)]
    asked = shlex.join(["hamlet", *sys.argv[1:]])
    process = subprocess.Popen(command, env=os.environ | {"HAMLET_COMMAND": asked})
    try:
        code = process.wait()
    except KeyboardInterrupt:  # the stage ends by itself, and says how to go on
        process.send_signal(signal.SIGINT)
        code = process.wait()
    if code:
        raise typer.Exit(code)


def _options(**given: object) -> list[object]:
    return [x for name, value in given.items() if value for x in (f"--{name}", value)]


@app.command()
def train(
    data: Data,
    objective: Annotated[
        Objective | None, typer.Option(help="What is learned; default: as --params says, or ppo.")
    ] = None,
    schema: SchemaFile = None,
    out: Out = OUT,
    params: ParamsFile = None,
) -> None:
    """Train a policy on a log. Interrupted or killed, the same command goes on."""
    chosen = objective.value if objective else None
    options = _options(schema=schema, params=params, objective=chosen)
    _in_one_line(lambda: _stage(data, "--out", out, *options))


@app.command()
def judge(
    data: Data,
    schema: SchemaFile = None,
    out: Out = OUT,
    params: ParamsFile = None,
    register: Annotated[
        bool, typer.Option("--register", help="Make it champion of hamlet-logged-policy.")
    ] = False,
) -> None:
    """Estimate what the policy would earn, from held-out episodes; export it as ONNX."""
    options = [*_options(schema=schema, params=params), "--judge"]
    options += ["--register"] if register else []
    _in_one_line(lambda: _stage(data, "--out", out, *options))


@app.command("from-town")
def from_town(
    out: Annotated[Path, typer.Argument(help="Folder of the new Minari data set.")],
    dataset: Annotated[Path, typer.Option(help="Made by the stage `collect`.")] = Path(
        "artifacts/dataset"
    ),
) -> None:
    """Make a Minari data set of the town's own data set, to learn from like from any other."""

    def run() -> None:
        _needs_packages()
        from hamlet.offline.town_data import from_town

        print(f"{out}: {from_town(dataset, out)} episodes")

    _in_one_line(run)


@app.command("to-town")
def to_town(
    data: Annotated[Path, typer.Argument(help="Minari data set made by `from-town`.")],
    out: Annotated[Path, typer.Argument(help="Folder of the data set as `collect` makes it.")],
) -> None:
    """Make the town's data set again of what `from-town` made of it, to the same bytes."""

    def run() -> None:
        _needs_packages()
        from hamlet.offline.town_data import to_town

        print(f"{out}: {to_town(data, out)} ticks of worlds")

    _in_one_line(run)
