"""`hamlet promote` and `hamlet rollback`: the champion is the user's to hold."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from hamlet.artifacts import HamletError

Name = Annotated[str, typer.Argument(metavar="NAME", help="A model, for example hamlet-agent.")]


def add_commands(app: typer.Typer, told_in_one_line: Callable[[Any], Any]) -> None:
    """Add both commands to `app`."""
    for command in (promote, rollback):
        app.command()(told_in_one_line(command))


def promote(
    name: Name,
    version: Annotated[
        int | None, typer.Argument(metavar="[VERSION]", min=1, help="By default the newest.")
    ] = None,
) -> None:
    """Make a registered version champion, whatever its gate says."""
    print(_registry().promote(name, version))


def rollback(
    name: Name,
    version: Annotated[
        int | None,
        typer.Argument(metavar="[VERSION]", min=1, help="By default the champion before."),
    ] = None,
) -> None:
    """Make the version champion that was it before; no run of the pipeline undoes that."""
    print(_registry().rollback(name, version))


def _registry() -> Any:
    for package in ("mlflow", "filelock", "psutil", "yaml"):
        if find_spec(package) is None:
            raise HamletError(
                f"the registry needs {package}",
                'run `pip install -c constraints.txt -e ".[train]"`',
            )
    from hamlet import registry

    return registry
