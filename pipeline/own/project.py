"""What `hamlet new` writes: a small project whose `dvc repro` runs every stage."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from hamlet.artifacts import HamletError, atomic_dir
from hamlet.worlds.contract import WorldShape
from hamlet.worlds.opening import REGISTER

# What each stage reads and makes, beside its own section of params.yaml and its metrics.
STAGES: dict[str, tuple[str, list[str], list[str]]] = {
    "world": ("the world, tried out and described as data", [], ["world.json"]),
    "collect": ("random legal actions", ["world.json"], ["dataset.pt", "dataset.pt.json"]),
    "perception": (
        "module A learns what to believe",
        ["world.json", "dataset.pt", "dataset.pt.json"],
        ["perception.pt", "perception.pt.json"],
    ),
    "freeze_perception": (
        "one tick of A as a frozen graph, proved equal to the module",
        ["world.json", "perception.pt", "perception.pt.json"],
        ["perception.pt2", "perception.pt2.json"],
    ),
    "policy": (
        "module D learns what to do, on the frozen A",
        ["world.json", "perception.pt2", "perception.pt2.json"],
        ["policy.pt2", "policy.pt2.json", "played.pt", "played.pt.json"],
    ),
    "world_model": (
        "module B learns what actions lead to, from random play and D's, on the frozen A",
        [
            "world.json", "dataset.pt", "dataset.pt.json", "perception.pt2", "perception.pt2.json",
            "played.pt", "played.pt.json",
        ],
        ["world_model.pt2", "world_model.pt2.json"],
    ),
    "social": (
        "module C learns what the others do next, from how they play now",
        ["world.json", "perception.pt2", "perception.pt2.json", "played.pt", "played.pt.json"],
        ["social.pt2", "social.pt2.json"],
    ),
    "agent": (
        "the four frozen modules as one ONNX file",
        [
            "world.json", "perception.pt2", "perception.pt2.json", "world_model.pt2",
            "world_model.pt2.json", "policy.pt2", "policy.pt2.json",
        ],
        ["agent.onnx", "agent.onnx.json"],
    ),
    "evaluate": (
        "the file plays held-out episodes, beside random play",
        ["world.json", "agent.onnx", "agent.onnx.json"],
        ["report.md"],
    ),
    "register": (
        "MLflow's registry; the alias champion goes to what passes its gate and is no worse",
        ["agent.onnx", "agent.onnx.json", "plots/returns.csv", "metrics/evaluate.json"],
        [],
    ),
}  # fmt: skip
SECTIONS = {
    "collect": ["collect"],
    "perception": ["perception"],
    "world_model": ["world_model", "policy.gamma"],
    "policy": ["policy"],
    "social": ["social"],
    "evaluate": ["evaluate"],
    "register": ["register"],
}
PLAYS = ("world", "collect", "policy", "evaluate")  # stages that open the world
TRAINS = ("perception", "world_model", "policy", "social")
CURVES = {
    "perception": ("perception: losses", "step", "[next, reward, going_on]"),
    "policy": ("policy: mean return while learning", "step", "trailing_return"),
    "world_model": ("world model: losses", "step", "[change, reward, going_on]"),
    "social": ("social model: loss in nats", "step", "nats"),
    "returns": ("return of every held-out episode", "case", "return"),
}
"""Of each file of artifacts/plots what `dvc plots show` draws: the title, x and y."""
PLAYERS_PLOT = """\
{
  "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
  "data": {"values": "<DVC_METRIC_DATA>"},
  "title": {"text": "<DVC_METRIC_TITLE>", "anchor": "middle"},
  "width": "<DVC_METRIC_PLOT_WIDTH>",
  "height": "<DVC_METRIC_PLOT_HEIGHT>",
  "mark": {"type": "point", "tooltip": {"content": "data"}},
  "params": ["<DVC_METRIC_ZOOM_AND_PAN>"],
  "encoding": {
    "x": {"field": "<DVC_METRIC_X>", "type": "quantitative", "title": "<DVC_METRIC_X_LABEL>"},
    "y": {"field": "<DVC_METRIC_Y>", "type": "quantitative", "title": "<DVC_METRIC_Y_LABEL>"},
    "color": {"field": "player", "type": "nominal"},
    "shape": {"field": "rev", "type": "nominal"}
  }
}
"""
"""DVC's template `scatter` (.dvc/plots/players.json), but that it tells the players apart."""
GYMNASIUM = '''\
"""The world of this project: change it as you like, `dvc repro` sees it.

Return a Gymnasium environment with discrete actions. `render_mode` is given by `hamlet play --gif`.
"""

from __future__ import annotations

import gymnasium
{extra}

def make(render_mode: str | None = None) -> gymnasium.Env:
    """One new environment; Hamlet makes as many as it needs."""
    return gymnasium.make("{name}", render_mode=render_mode)
'''
PETTINGZOO = '''\
"""The world of this project: change it as you like, `dvc repro` sees it.

Return a PettingZoo parallel environment with discrete actions. `render_mode` is given by
`hamlet play --gif`.
"""

from __future__ import annotations

from typing import Any

from {package} import {module}


def make(render_mode: str | None = None) -> Any:
    """One new environment; Hamlet makes as many as it needs."""
    return {module}.parallel_env(render_mode=render_mode)
'''
PYTHON = '''\
"""The world of this project: what `make` returns, a Gymnasium environment or a PettingZoo parallel
environment with discrete actions."""

from {module} import {function} as make

__all__ = ["make"]
'''
DVC_CONFIG = """\
[core]
    analytics = false
    check_update = false
    no_scm = true
"""
IGNORED = """\
/artifacts/
/checkpoints/
/mlflow.db*
/mlartifacts/
/dvc_plots/
/.dvc/cache/
/.dvc/tmp/
__pycache__/
*.tmp
"""
IGNORED_BY_DVC = ".git\ncheckpoints\nmlflow.db*\nmlartifacts\n__pycache__\n*.tmp\n"
README = """\
# {title}

An agent of four modules for `{source}`: {facts}.

```bash
dvc repro                                   # train, evaluate and register
hamlet act --example | hamlet act           # one observation in, one action and its thoughts out
hamlet play                                 # watch it
hamlet serve artifacts/agent.onnx           # over HTTP
hamlet doctor                               # what is stale, what is missing
```

`world.py` makes the world, `params.yaml` holds every number, `artifacts/report.md` says how good
each module is beside who knows nothing, `artifacts/agent.onnx` is the agent.
"""


def world_file(source: str) -> tuple[str, str, list[Path]]:
    """The text of world.py, `params.world.make`, and files of this folder that it imports.

    Raises:
        HamletError: no such kind of world.
    """
    kind, _, name = source.partition(":")
    if kind == "gymnasium":
        extra = ""
        for begin, package in REGISTER.items():
            if name.startswith(begin):
                extra = f"import {package}\n\ngymnasium.register_envs({package})\n"
        return GYMNASIUM.format(name=name, extra=extra), "python:world.make", []
    if kind == "pettingzoo":
        package, _, module = name.rpartition(".")
        if not package:
            raise HamletError(f"{source} names no module of a package", "pettingzoo:PACKAGE.MODULE")
        return PETTINGZOO.format(package=package, module=module), "python:world.make", []
    module, _, function = name.rpartition(".")
    file = Path(f"{module}.py")
    if module == "world" and file.is_file():
        return file.read_text(encoding="utf-8"), f"python:world.{function}", []
    own = [file] if file.is_file() else []
    return PYTHON.format(module=module, function=function), "python:world.make", own


def params_text(make: str, shape: WorldShape, model: str) -> str:
    """params.yaml: the numbers that one changes first; all others are documented defaults."""
    several = shape.num_agents > 1
    wide = any(f.kind == "picture" for f in shape.fields)
    social = "social: {steps: 600, hidden: 128}\n" if several else ""
    return f"""\
# What is not said here is as in docs/how-to/own-world.md.
seed: 0
world:
  make: {make}
  kwargs: {{}}
  longest: 10000      # ticks after which an episode is cut
collect: {{ticks: 4000, lanes: 8}}
perception: {{hidden: {128 if wide else 64}, steps: 600, chunk: 32, recall: 1.0}}
world_model: {{members: 3, hidden: 128, steps: 600}}
policy:
  ticks: 36000        # of all worlds together
  lanes: 8
  rollout: 64
  minibatch: {256 if several else 128}
  epochs: 10
  learning_rate: {"0.0005" if several else "0.001"}
  gamma: 0.99
  entropy: 0.01
{social}evaluate: {{episodes: 200, best: null}}   # best: the best return known, to normalise
register: {{model: {model}, min_return: null, beats_random: true}}
"""


def dvc_text(several: bool, files: list[str]) -> str:
    """dvc.yaml, of the stages that such a world has.

    Args:
        several: whether there is more than one agent. files: what makes the world.
    """
    lines = [
        "# Written by `hamlet new`. Code and versions of packages are in artifacts/world.json.",
        "stages:",
    ]
    for name, (what, deps, outs) in STAGES.items():
        if name == "social" and not several:
            continue
        if name in ("agent", "evaluate") and several:
            deps = [*deps, *(["social.pt2", "social.pt2.json"] if name == "agent" else [])]
        lines += [f"  {name}:", f"    desc: {what}", f"    cmd: hamlet own {name}"]
        if name in ("world", "register"):
            lines.append("    always_changed: true")
        own = files if name in PLAYS else []
        if name == "evaluate":  # the report tells of all modules
            trained = [
                m for m in ("perception", "world_model", "social") if several or m != "social"
            ]
            deps = [*deps, *(f"metrics/{m}.json" for m in trained)]
        lines.append("    deps:")
        lines += [f"      - {dep}" for dep in (*own, *(f"artifacts/{dep}" for dep in deps))]
        sections = ["seed", *(["world"] if name in PLAYS else []), *SECTIONS.get(name, [])]
        lines.append(f"    params: [{', '.join(sections)}]")
        lines.append("    outs:")
        lines += [f"      - artifacts/{out}" for out in (*outs, f"runs/{name}.json")]
        if name in (*TRAINS, "evaluate"):
            curve = "returns" if name == "evaluate" else name
            lines.append(f"      - artifacts/plots/{curve}.csv: {{cache: false}}")
        if name != "world":
            lines += ["    metrics:", f"      - artifacts/metrics/{name}.json: {{cache: false}}"]
        lines.append("")
    lines.append("plots:")
    for curve, (title, x, y) in CURVES.items():
        if curve == "social" and not several:
            continue
        lines += [f"  - {curve}:", f"      title: '{title}'"]
        lines += ["      template: players"] if curve == "returns" else []
        lines += [f"      x: {x}", f"      y: {{artifacts/plots/{curve}.csv: {y}}}"]
    return "\n".join([*lines, ""])


def write_project(folder: Path, source: str, shape: WorldShape, facts: list[str]) -> None:
    """Write the project of a world; all of it or nothing.

    Raises:
        HamletError: the folder holds something already.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise HamletError(f"{folder} exists and is not empty", "name a new folder")
    text, make, own = world_file(source)
    model = re.sub(r"[^\w.-]+", "-", folder.absolute().name).strip("-") or "own-agent"
    with atomic_dir(folder) as fresh:
        (fresh / ".dvc" / "plots").mkdir(parents=True)
        (fresh / ".dvc" / "plots" / "players.json").write_text(PLAYERS_PLOT, encoding="utf-8")
        (fresh / ".dvc" / "config").write_text(DVC_CONFIG, encoding="utf-8")
        (fresh / ".gitignore").write_text(IGNORED, encoding="utf-8")
        (fresh / ".dvcignore").write_text(IGNORED_BY_DVC, encoding="utf-8")
        (fresh / "world.py").write_text(text, encoding="utf-8")
        for file in own:
            shutil.copyfile(file, fresh / file.name)
        files = ["world.py", *(file.name for file in own)]
        (fresh / "params.yaml").write_text(params_text(make, shape, model), encoding="utf-8")
        dvc = dvc_text(shape.num_agents > 1, files)
        (fresh / "dvc.yaml").write_text(dvc, encoding="utf-8")
        told = README.format(title=model, source=source, facts="; ".join(facts))
        (fresh / "README.md").write_text(told, encoding="utf-8")
