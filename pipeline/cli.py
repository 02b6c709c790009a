"""The command `hamlet`: watch the agent play, ask it for one action, see what is wrong here.

Heavy packages are imported inside the commands: `act` runs without PyTorch.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hamlet.artifacts import HamletError, atomic_path
from hamlet.cli_registry import add_commands
from hamlet.offline.cli import app as offline_app
from hamlet.own.cli import add_commands as add_own_commands
from hamlet.serving.command import card, serve

AGENT = Path("artifacts/agent.onnx")
PROVER = Path("artifacts/prover")
UNSEEN_MAPS = 2_000_003  # added to a world's number: maps that no stage has played
P = ParamSpec("P")

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_show_locals=False, help="Agents that live in the town."
)
app.add_typer(offline_app, name="offline")
AgentFile = Annotated[Path, typer.Option(help="The exported agent; its card stands beside it.")]


def told_in_one_line(command: Callable[P, None]) -> Callable[P, None]:
    """A user's error is one red line and exit code 1, Ctrl-C is exit code 130."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except HamletError as error:
            Console(stderr=True).print(
                str(error), style="red", markup=False, highlight=False, soft_wrap=True
            )
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None

    return wrapped


def trained(agent: Path) -> Path:
    """The same path.

    Raises:
        HamletError: nothing is there.
    """
    if not agent.exists():
        raise HamletError(
            f"{agent} is missing, nothing has been trained here",
            "run `dvc repro`, smaller after `hamlet preset quick`; or `dvc pull agent` where a "
            "remote holds it",
        )
    return agent


def _needs_training_packages(command: str) -> None:
    for package in ("torch", "tensordict", "PIL", "yaml"):
        if find_spec(package) is None:
            raise HamletError(
                f"`hamlet {command}` runs a world, which needs {package}",
                'run `pip install -c constraints.txt -e ".[train]"` in a virtual environment of its'
                " own (`hamlet act` needs neither)",
            )


# ------------------------------------------------------------------------------------------------
# play


@app.command()
@told_in_one_line
def play(
    world: Annotated[
        int, typer.Option(min=0, max=2**31 - 1, help="Seed of the world: its map and its chances.")
    ] = 0,
    ticks: Annotated[int, typer.Option(min=1, help="Ticks to play at most.")] = 120,
    agent: AgentFile = AGENT,
    gif: Annotated[Path | None, typer.Option(help="Write a GIF instead of showing it.")] = None,
    speed: Annotated[float, typer.Option(min=0.1, help="Ticks per second on a terminal.")] = 8.0,
) -> None:
    """Watch the agent live in a world it has never seen; it plays every inhabitant."""
    _needs_training_packages("play")
    from rich.progress import track

    from hamlet.serving.agent import OnnxAgent
    from hamlet.town import Town, pack_of_card, render_ascii, render_png

    player = OnnxAgent(trained(agent))
    if "world" in player.card:
        from hamlet.own.playing import play_own

        play_own(player, world, ticks, gif, speed)
        return
    town = Town(pack_of_card(player.card, agent), num_layouts=1, layout_seed=world + UNSEEN_MAPS)
    console = Console(highlight=False)
    returns = [0.0] * town.num_agents
    lived = [0] * town.num_agents

    def moments() -> Iterator[tuple[Any, list[str]]]:
        """The world at every tick, and the goal of every inhabitant."""
        alive = [False] * town.num_agents
        for state, goals in _episode(town, player, world, ticks):
            for i in range(town.num_agents):
                returns[i] += float(state["reward"][0, i])
                lived[i] += alive[i]
            alive = state["alive"][0].tolist()
            yield state, goals

    if gif is not None:
        pictures = (
            render_png(town, state, 0).quantize(64)
            for state, _ in track(
                moments(), "play", total=ticks + 1, console=Console(stderr=True), transient=True
            )
        )
        with atomic_path(gif) as temporary:
            first = next(pictures)
            first.save(
                temporary,
                format="GIF",
                save_all=True,
                append_images=pictures,
                duration=180,
                loop=0,
            )
        console.print(f"{gif} written", soft_wrap=True)
    elif console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            for state, goals in moments():
                live.update(Text(_scene(render_ascii(town, state, 0), goals)), refresh=True)
                time.sleep(1 / speed)
    else:
        for state, goals in moments():
            print(_scene(render_ascii(town, state, 0), goals), end="\n\n")
    for i, (total, age) in enumerate(zip(returns, lived, strict=True)):
        console.print(f"agent {i}: return {total:.1f}, lived {age} ticks")


def _episode(town: Any, player: Any, seed: int, ticks: int) -> Iterator[tuple[Any, list[str]]]:
    """States of one world and the goals of its living inhabitants, until the episode is over."""
    import torch

    names = player.card["town"]["goal_names"]
    state = town.reset(seed, 1)
    mind = player.start(town.num_agents)
    goals = ["" for _ in range(town.num_agents)]
    yield state, goals
    for _ in range(ticks):
        if not bool(state["alive"].any()) or bool(state["over"].all()):
            return
        seen = town.observe(state)
        fields = {name: seen[name][0].numpy() for name in player.inputs if name in seen.keys()}  # noqa: SIM118
        decision = player.act(fields, mind)
        mind = decision.state
        alive = state["alive"][0].tolist()
        goals = [
            names[goal] if living else ""
            for goal, living in zip(mind["state_goal"].tolist(), alive, strict=True)
        ]
        state = town.step_core(state, torch.from_numpy(decision.action).unsqueeze(0))
        yield state, goals


def _scene(picture: str, goals: list[str]) -> str:
    wishes = ", ".join(f"{i} {goal}" for i, goal in enumerate(goals) if goal)
    return f"{picture}\ngoals: {wishes}" if wishes else picture


# ------------------------------------------------------------------------------------------------
# act


@app.command()
@told_in_one_line
def act(
    observation: Annotated[
        Path | None,
        typer.Argument(help="JSON file with one observation; without it, standard input."),
    ] = None,
    agent: AgentFile = AGENT,
    state: Annotated[
        Path | None,
        typer.Option(
            help="File that carries the agent's memory from one call to the next; a missing one "
            "begins a life."
        ),
    ] = None,
    example: Annotated[
        bool, typer.Option("--example", help="Print a valid observation and end.")
    ] = False,
) -> None:
    """One JSON observation in; the action and the thoughts behind it out, as JSON."""
    from hamlet.serving.agent import OnnxAgent

    player = OnnxAgent(trained(agent))
    if example:
        print(json.dumps(_example(player), indent=1))
        return
    given = _read_observation(observation, player)
    fields = player.check(_as_batch(given, player))
    memory = _read_memory(state, player) if state and state.exists() else player.start(1)
    decision = player.act(fields, memory)
    if state:
        _write_memory(state, player, decision.state)
    print(json.dumps(player.readable(decision), indent=2, ensure_ascii=False))


def _as_batch(given: dict[str, Any], player: Any) -> dict[str, Any]:
    """An observation as a batch of one, which stands where the graph wants it."""
    import numpy as np

    inputs = player.signature.inputs
    batch = {}
    for name, value in given.items():
        axis = inputs[name].axis if name in inputs else 0
        if axis is None:
            batch[name] = value
        elif axis == 0:
            batch[name] = [value]
        else:
            batch[name] = np.expand_dims(np.asarray(value, dtype=object), axis).tolist()
    return batch


def _read_observation(path: Path | None, player: Any) -> dict[str, Any]:
    name = str(path) if path else "standard input"
    if path is None and sys.stdin.isatty():
        raise HamletError(
            "no observation was given",
            "name a file or pipe one in: `hamlet act --example | hamlet act`",
        )
    try:
        text = path.read_text(encoding="utf-8") if path else sys.stdin.read()
        data = json.loads(text)
    except OSError as error:
        raise HamletError(f"{name} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise HamletError(
            f"{name} is not valid JSON ({error})", "see `hamlet act --example`"
        ) from None
    if not isinstance(data, dict):
        fields = ", ".join(player.signature.observation)
        raise HamletError(f"{name} is not a JSON object", f"its fields are {fields}")
    return data


def _example(player: Any) -> dict[str, Any]:
    """An observation of nobody around, on open ground, with every action legal."""
    import numpy as np

    signature = player.signature
    values: dict[str, Any] = {}
    if "town" in player.card:
        town = player.card["town"]
        own = dict.fromkeys(town["meter_names"], 0.6) | {"cos_hour": 1.0}
        values = {
            "self_state": [own.get(name, 0.0) for name in town["self_names"]],
            "others_action": [town["num_actions"]] * (town["num_agents"] - 1),
        }
    if signature.mask:
        values[signature.mask] = np.ones(signature.inputs[signature.mask].shape, bool).tolist()
    fields = {name: signature.inputs[name] for name in signature.observation}
    return {
        name: values[name] if name in values else np.zeros(field.shape, field.dtype).tolist()
        for name, field in fields.items()
    }


def _read_memory(path: Path, player: Any) -> dict[str, Any]:
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as file:
            saved = {name: file[name] for name in file.files}
    except (OSError, ValueError) as error:
        raise HamletError(
            f"{path} does not hold an agent's memory ({type(error).__name__})", "name another file"
        ) from None
    if str(saved.pop("agent", "")) != player.sha:
        raise HamletError(f"{path} is the memory of another agent", "delete it to begin a new life")
    return saved


def _write_memory(path: Path, player: Any, memory: dict[str, Any]) -> None:
    import numpy as np

    with atomic_path(path) as temporary, temporary.open("wb") as file:
        np.savez(file, agent=np.array(player.sha), **memory)


# ------------------------------------------------------------------------------------------------
# serve


app.command()(told_in_one_line(serve))
app.command()(told_in_one_line(card))


# ------------------------------------------------------------------------------------------------
# prove


@app.command()
@told_in_one_line
def prove(
    question: Annotated[str, typer.Argument(help='For example "grandparent(ann_1, X)".')],
    prover: Annotated[Path, typer.Option(help="The folder that `dvc repro prove` makes.")] = PROVER,
    limit: Annotated[int, typer.Option(min=1, help="At most so many answers.")] = 10,
) -> None:
    """Answer a question about the knowledge graph, with proofs and scores."""
    _needs_training_packages("prove")
    from hamlet.proofs import ask, load_prover

    answers = ask(question, *load_prover(prover), limit=limit)
    for answer in answers:
        print(answer)
    if not answers:
        print(f"nothing that can be proven answers {question}")


# ------------------------------------------------------------------------------------------------
# profile


class Trained(StrEnum):
    """Stages that train a module step by step."""

    perception = "perception"
    world_model = "world_model"
    social = "social"
    policy = "policy"


@app.command()
@told_in_one_line
def profile(
    stage: Annotated[Trained, typer.Argument(help="The stage whose training is watched.")],
    skip: Annotated[int, typer.Option(min=1, help="Steps before the window, to warm up.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Steps in the window.")] = 5,
    out: Annotated[Path, typer.Option(help="Folder for the table and the trace.")] = Path(
        "profiles"
    ),
) -> None:
    """Where a training's time goes: a table, and a trace for chrome://tracing.

    Runs the stage's first steps on the outputs of those before it; changes no output.
    """
    _needs_training_packages("profile")
    folder = out / stage.value
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", f"stages.{stage.value}"],
        env=os.environ | {"HAMLET_PROFILE": f"{skip}:{steps}:{folder}"},
        check=False,
    )
    if done.returncode:
        raise typer.Exit(done.returncode)
    print((folder / "profile.txt").read_text(), end="")
    print(f"the trace is {folder / 'trace.json.gz'}: open it in chrome://tracing or Perfetto")


# ------------------------------------------------------------------------------------------------
# tune


class Engine(StrEnum):
    """Where the members of a population run."""

    processes = "processes"
    ray = "ray"


@app.command()
@told_in_one_line
def tune(
    engine: Annotated[
        Engine, typer.Option(help="ray: on the cluster that RAY_ADDRESS names, else a local one.")
    ] = Engine.processes,
) -> None:
    """Population-based training of module C, as `tune` in params.yaml says.

    Both engines give the same result. Interrupted or killed, the same command goes on.
    """
    _needs_training_packages("tune")
    done = subprocess.run(
        [sys.executable, "-m", "stages.tune", "--engine", engine.value], check=False
    )
    if done.returncode:
        raise typer.Exit(done.returncode)


# ------------------------------------------------------------------------------------------------
# preset

DEFAULT = "default"


@app.command()
@told_in_one_line
def preset(
    name: Annotated[
        str | None, typer.Argument(help="A file of presets/, or `default`: params.yaml alone.")
    ] = None,
) -> None:
    """Choose sizes by name, in a file that Git ignores. Without a name: list them."""
    _needs_training_packages("preset")
    from hamlet.params import choose_preset, chosen_preset, preset_names, read_overlay

    here = Path()
    if name is not None:
        choose_preset(here, None if name == DEFAULT else name)
    chosen = chosen_preset(here) or DEFAULT
    for known in (DEFAULT, *preset_names(here)):
        overlay = {} if known == DEFAULT else read_overlay(here, known)
        differs = sum(len(v) if isinstance(v, dict) else 1 for v in overlay.values())
        what = f"{differs} values differ from params.yaml" if differs else "params.yaml as it is"
        print(f"{'*' if known == chosen else ' '} {known:<8} {what}")


add_commands(app, told_in_one_line)
add_own_commands(app, told_in_one_line)


# ------------------------------------------------------------------------------------------------
# doctor


@app.command()
@told_in_one_line
def doctor() -> None:
    """What is installed, what really runs, what is stale, and the command that mends it."""
    from hamlet.doctor import report

    console = Console()
    with console.status("looking"):
        checks = report()
    table = Table("", "check", "finding", "what to do", box=None, pad_edge=False)
    colours = {"ok": "green", "warn": "yellow", "fail": "red"}
    for check in checks:
        word = Text(check.status, style=colours[check.status])
        table.add_row(word, check.name, Text(check.detail), Text(check.fix))
    console.print(table)
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(1)


if __name__ == "__main__":
    app(prog_name="hamlet")
