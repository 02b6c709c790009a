"""What each stage does around its own work: params, seeds, one MLflow run, progress, a curve."""

from __future__ import annotations

import csv
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor

from hamlet.artifacts import (
    HamletError,
    atomic_path,
    read_json,
    sha256_json,
    sha256_path,
    write_json,
)
from hamlet.learning.precision import set_precision
from hamlet.own import paths
from hamlet.own.params import OwnParams, load_own_params
from hamlet.tracking import StageRun, stage_run
from hamlet.worlds.contract import World, WorldShape
from hamlet.worlds.lanes import maker
from hamlet.worlds.opening import open_world

TOLD_SECONDS = 10.0
CURVE = "curve.json"  # beside a checkpoint
CODE = ("worlds", "plain", "own", "learning", "export")
PACKAGES = ("hamlet", "torch", "gymnasium", "pettingzoo", "minigrid", "mpe2", "ale-py")


class Running:
    """A stage at work.

    Attributes:
        name: of the stage. params: all of params.yaml. run: of MLflow.
        rows: of the curve.
    """

    def __init__(self, name: str, params: OwnParams, run: StageRun) -> None:
        self.name, self.params, self.run = name, params, run
        self.rows: list[dict[str, float]] = []
        self._shape: WorldShape | None = None
        self._every = 1
        self._kept: Path | None = None

    # -- The world

    @property
    def world(self) -> str:
        """The hash of artifacts/world.json, which stands on every card."""
        return sha256_json(read_json(paths.WORLD))

    @property
    def shape(self) -> WorldShape:
        """What artifacts/world.json describes."""
        if self._shape is None:
            self._shape = read_shape()
        return self._shape

    def maker(self) -> Callable[[], World]:
        """Makes worlds of that shape."""
        given = self.params.world
        return maker(lambda: open_world(given.make, given.kwargs), self.shape)

    # -- What an interrupted training goes on from

    def checkpoint(self, params: BaseModel, *made_from: str) -> Path:
        """The file of this training's checkpoint; what is there is of the same work, stopped.

        Args:
            params: the stage's section of params.yaml.
            made_from: hashes of what it is trained on. That of the world is added.
        """
        work = [params.model_dump(mode="json"), self.params.seed, self.world, *made_from]
        self._kept = paths.CHECKPOINTS / f"{self.name}-{sha256_json(work)[:16]}"
        self._kept.mkdir(parents=True, exist_ok=True)
        return self._kept / "checkpoint.pt"

    def forget(self) -> None:
        """The stage has done its work: nothing need go on."""
        if self._kept:
            shutil.rmtree(self._kept, ignore_errors=True)

    def tell_what_is_kept(self) -> None:
        if self._kept and (self._kept / "checkpoint.pt").exists():
            print(
                f"{self.name} was interrupted: {self._kept} is kept, `dvc repro` goes on from it",
                file=sys.stderr, flush=True,
            )  # fmt: skip

    # -- `hamlet.learning.log.Log`

    def steps(self, total: int, start: int) -> Iterable[int]:
        """See `Log`; tells every 10 seconds how far it is."""
        self._every = max(1, total // 100)
        if start:
            print(f"{self.name} goes on from step {start} of {total}", flush=True)
            if self._kept and (self._kept / CURVE).exists():
                self.rows = [row for row in read_json(self._kept / CURVE) if row["step"] < start]
        began = told = time.monotonic()
        for step in range(start, total):
            yield step
            now = time.monotonic()
            if now - told > TOLD_SECONDS:
                told = now
                left = (now - began) / (step + 1 - start) * (total - step - 1)
                note = " ".join(f"{k} {v:.3g}" for k, v in list(self._last().items())[:3])
                print(f"{self.name}: {step + 1} of {total}, {left:.0f} s left {note}", flush=True)

    def _last(self) -> dict[str, float]:
        return {k: v for k, v in self.rows[-1].items() if k != "step"} if self.rows else {}

    def record(self, step: int, metrics: dict[str, Tensor]) -> None:
        """See `Log`; about a hundred rows are kept."""
        if step % self._every:
            return
        values = {name: float(x) for name, x in metrics.items()}
        known = {name: x for name, x in values.items() if np.isfinite(x)}
        self.run.metrics(known, step)
        self.rows.append({"step": step, **values})
        if self._kept:
            write_json(self._kept / CURVE, self.rows)

    # -- What is left behind

    def write(self, numbers: dict[str, Any]) -> None:
        """The stage's metrics, and its curve if it has one."""
        write_json(paths.metrics(self.name), numbers)
        self.run.metrics({k: v for k, v in numbers.items() if isinstance(v, int | float)})
        if not self.rows:
            return
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        with atomic_path(paths.curve(self.name)) as temporary, temporary.open("w", newline="") as f:
            writer = csv.DictWriter(f, names, lineterminator="\n")
            writer.writeheader()
            for row in self.rows:
                writer.writerow({k: f"{v:.6g}" for k, v in row.items() if np.isfinite(v)})
        self.run.artifact(paths.curve(self.name))


@contextmanager
def running(name: str) -> Iterator[Running]:
    """Run the body as a stage of the project in this folder, on one thread, deterministic."""
    os.environ.setdefault("MLFLOW_EXPERIMENT_NAME", "hamlet")
    params = load_own_params()
    torch.manual_seed(params.seed)
    np.random.seed(params.seed)  # noqa: NPY002  worlds may draw from it
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1") or 1))
    torch.use_deterministic_algorithms(True)
    set_precision()
    with stage_run(name, params) as run:
        s = Running(name, params, run)
        try:
            yield s
        except KeyboardInterrupt:
            s.tell_what_is_kept()
            raise
        s.forget()


# ------------------------------------------------------------------------------------------------
# artifacts/world.json


def read_shape() -> WorldShape:
    """What artifacts/world.json describes.

    Raises:
        HamletError: it is missing or describes no world.
    """
    described = read_json(paths.WORLD)
    if not isinstance(described, dict) or "world" not in described:
        raise HamletError(f"{paths.WORLD} describes no world", "run `dvc repro world`")
    return WorldShape.from_dict(described["world"])


def describe(params: OwnParams) -> dict[str, Any]:
    """What artifacts/world.json holds: the world's shape, where it comes from, and the versions of
    packages and code by which all that follows is made.

    Raises:
        HamletError: the world cannot be made, stepped or taken.
    """
    given = params.world
    world = open_world(given.make, given.kwargs)
    try:
        try_out(world)
    finally:
        world.close()
    here = Path(__file__).parents[1]
    return {
        "world": world.shape.to_dict(),
        "make": given.make,
        "kwargs": given.kwargs,
        "files": own_files(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "code": {name: sha256_path(here / name) for name in CODE},
    }


def own_files() -> dict[str, str]:
    """Hashes of the Python files below this folder that were imported: what makes the world."""
    here, found = Path.cwd().resolve(), {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and here in (path := Path(file).resolve()).parents and path.is_file():
            name = path.relative_to(here)
            if not {".venv", "venv", "site-packages"} & set(name.parts):
                found[name.as_posix()] = sha256_path(path)
    return dict(sorted(found.items()))


def try_out(world: World, ticks: int = 50) -> None:
    """Play a few random ticks, twice from one seed: a world that breaks is told of before anything
    is made.

    Raises:
        HamletError: it raises, changes its spaces or gives numbers that are not finite.
    """
    from hamlet.worlds.lanes import Lanes, legal_at_random

    firsts = []
    for _ in range(2):
        lanes = Lanes(lambda: world, 1, iter(range(7, 7 + 10 * ticks)), 10 * ticks)
        firsts.append(lanes.now.fields)
        rng = np.random.default_rng(0)
        for _ in range(ticks):
            lanes.step(legal_at_random(lanes.now.mask, rng))
    for name, first in firsts[0].items():
        if not np.array_equal(first, firsts[1][name]):
            print(
                f"warning: {world.shape.name}: two resets with one seed show another `{name}`: "
                "runs cannot be repeated and agents are compared on different episodes",
                file=sys.stderr,
            )
            break


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def in_words(shape: WorldShape) -> list[str]:
    """Lines on a world, for people."""
    fields = [
        f"{f.name} ({f.kind} {'x'.join(map(str, f.shape)) or '1'}"
        f"{f', {f.count} codes' if f.count else ''})"
        for f in shape.fields
    ]
    lines = [
        f"{shape.num_agents} agent{'s' if shape.num_agents > 1 else ''}, "
        f"{shape.num_actions} actions"
        f"{', some illegal at times' if shape.masked else ''}",
        f"observes {', '.join(fields)}",
    ]
    if shape.ignored:
        lines.append(f"left out, as no network reads text: {', '.join(shape.ignored)}")
    return lines
