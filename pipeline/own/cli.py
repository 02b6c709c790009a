"""`hamlet new` and `hamlet own STAGE`: the pipeline of a world of one's own."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from hamlet.artifacts import HamletError

NEEDED = ("torch", "tensordict", "onnx", "onnxscript", "dvc", "mlflow", "yaml")


def add_commands(app: typer.Typer, told_in_one_line: Callable[[Any], Any]) -> None:
    """Add both commands to `app`."""
    for command in (new, own):
        app.command()(told_in_one_line(command))


def new(
    folder: Annotated[Path, typer.Argument(help="A new folder for the project.")],
    world: Annotated[
        str,
        typer.Option(help="gymnasium:ID, pettingzoo:MODULE or python:module.function."),
    ],
) -> None:
    """Begin a project for a world of your own; then `dvc repro` in its folder."""
    _needs_packages("new")
    from hamlet.own.project import write_project
    from hamlet.own.running import in_words, try_out
    from hamlet.worlds.opening import open_world

    opened = open_world(world)
    try:
        try_out(opened)
    finally:
        opened.close()
    lines = in_words(opened.shape)
    write_project(folder, world, opened.shape, lines)
    for line in lines:
        print(line)
    print(f"{folder} written; next: cd {folder} && dvc repro")


def own(
    stage: Annotated[str, typer.Argument(help="A stage of the project's dvc.yaml.")],
) -> None:
    """Run one stage of an own world's project, as its dvc.yaml does."""
    _needs_packages(f"own {stage}")
    from hamlet.own.stages import run

    run(stage)


def _needs_packages(command: str) -> None:
    for package in NEEDED:
        if find_spec(package) is None:
            raise HamletError(
                f"`hamlet {command}` needs {package}",
                'run `pip install -c constraints.txt -e ".[train]"`',
            )
