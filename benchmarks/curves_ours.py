"""Our own learning curve: the whole pipeline, counted from the first tick that is recorded."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml
from torch import Tensor

from benchmarks.study import HELD_OUT_WORLDS, Seated
from benchmarks.study_players import Everyone
from hamlet.artifacts import HamletError
from hamlet.learning.train_policy import train_policy
from hamlet.learning.trials import try_habits, worlds_lived
from hamlet.modules.contracts import TownShape
from hamlet.params import Params
from hamlet.town import Town
from stages.collect import make_town
from stages.common import progress
from stages.policy import make_mind

ROOT = Path(__file__).parents[1]
STAGES = ("collect", "perception", "freeze_perception", "world_model", "social")
"""What has to be there before a policy can be trained; `world` only writes down what is asked."""
LINKED = ("constraints.txt", "hamlet", "pipeline", "stages")
WORKED = 1.35
"""Times as much processor time between two points of a rival, and iterations of ours."""

Judge = Callable[[Seated], Tensor]
"""The mean return of each held-out world, float64 [worlds], of who is seated in all places."""


class Meter:
    """Seconds of processor time of this process, and of stages that it started, while it counts."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def counting(self) -> Iterator[None]:
        before = spent()
        try:
            yield
        finally:
            self.seconds += spent() - before


def spent() -> float:
    """Seconds of processor time of this process and of those it started that have ended."""
    done = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + done.ru_utime + done.ru_stime


def point(steps: int, seconds: float, returns: Tensor) -> dict[str, Any]:
    """One point of a line; `returns` float64 [worlds] are of each held-out world."""
    return {
        "steps": steps,
        "cpu_seconds": round(seconds, 2),
        "mean_return": returns.mean().item(),
        "mean_return_ci95": 1.96 * returns.std().item() / len(returns) ** 0.5,
    }


def collected(params: Params, agents: int) -> int:
    """Agents' ticks that `collect` plays: known worlds, held-out ones, and half as many again."""
    sizes = params.collect
    worlds = sizes.worlds + sizes.held_out_worlds + -(-sizes.held_out_worlds // 2)
    return sizes.ticks * worlds * agents


def chosen(total: int) -> set[int]:
    """Numbers of finished iterations after which ours is judged: ever further apart, and all."""
    found, following = {total}, 1.0
    while following < total:
        found.add(round(following))
        following *= WORKED
    return found


class JudgedLog:
    """A trainer's log that has the present policy judged at chosen iterations.

    Args:
        judged: returns of each held-out world, of the policy as it is.
        before: ticks and each: those played before, and of an iteration.
        points: that are added to.
    """

    def __init__(
        self, judged: Callable[[], Tensor], before: int, each: int, meter: Meter,
        points: Callable[[dict[str, Any]], None],
    ) -> None:  # fmt: skip
        self.judged, self.before, self.each = judged, before, each
        self.meter, self.points = meter, points
        self.began, self.steps_done = 0.0, before

    def steps(self, total: int, start: int) -> Iterable[int]:
        self.chosen = chosen(total)
        self.began = spent()
        return progress(total, "ours: policy", start)

    def record(self, step: int, metrics: dict[str, Tensor]) -> None:
        if step + 1 not in self.chosen:
            return
        self.meter.seconds += spent() - self.began
        drawn = torch.get_rng_state()
        self.steps_done = self.before + (step + 1) * self.each
        self.points(point(self.steps_done, self.meter.seconds, self.judged()))
        torch.set_rng_state(drawn)
        self.began = spent()


def run_stage(name: str, folder: Path) -> None:
    """Run a stage of the pipeline as `dvc repro` does, in a folder.

    Raises:
        HamletError: it failed; with its own last line.
    """
    ours = ("HAMLET_BESIDE", "HAMLET_EXECUTION", "HAMLET_LAUNCHER", "HAMLET_PROFILE")
    drop = ("DVC_", "MLFLOW_", "PYTHONPATH", *ours)  # as in a shell that has just begun
    env = {key: value for key, value in os.environ.items() if not key.startswith(drop)}
    env |= {"DVC_ROOT": str(folder), "HAMLET_DEVICE": "cpu"}
    command = [sys.executable, "-m", f"stages.{name}"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        raise HamletError(f"ours: the stage {name} failed: {said[-1]}", "run `dvc repro` to see it")


def ours(params: Params, judge: Judge, meter: Meter, add: Callable[[dict[str, Any]], None]) -> None:
    """Train all modules in a folder of their own; tell the points while module D learns.

    Args:
        judge: of the town of these parameters.
        add: is told each point.
    """
    with TemporaryDirectory() as name, chdir(name):
        folder = Path(name)
        for linked in LINKED:
            (folder / linked).symlink_to(ROOT / linked)
        (folder / "inputs").mkdir()
        asked = yaml.safe_dump(params.model_dump(mode="json"), sort_keys=False)
        (folder / "params.yaml").write_text(asked, encoding="utf-8")
        run_stage("world", folder)
        for stage in progress(STAGES, "ours: modules A, B and C"):
            with meter.counting():
                run_stage(stage, folder)
        town = make_town(params)
        shape, sizes = TownShape.of(town), params.policy
        with meter.counting():
            mind, blank, _ = make_mind(params, town)

        def seated(where: Town) -> tuple[Any, Any]:
            return Everyone(where, shape, mind, False, blank), blank(HELD_OUT_WORLDS)

        each = sizes.worlds * sizes.rollout * shape.num_agents
        before = collected(params, shape.num_agents)
        log = JudgedLog(lambda: judge(seated), before, each, meter, add)
        train_policy(
            town, shape, mind, blank, sizes, params.compile, params.seed,
            folder / "checkpoint.pt", log,
        )  # fmt: skip
        with meter.counting():
            try_habits(town, shape, mind, blank, sizes.worlds, params.seed)
        lived = worlds_lived(sizes.worlds, town.lifespan) * town.lifespan * shape.num_agents
        add(point(log.steps_done + lived, meter.seconds, judge(seated)))
