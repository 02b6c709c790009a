"""What bf16 costs: the policy trained in both precisions from the same seeds.

    python -m benchmarks.learning_precision [--seeds 3] [--ppo-iterations 120]
                                            [--imitation-iterations 200]

Needs the frozen modules (`dvc repro`). Everything but the precision is as the stage `policy` has
it, so the figure is the return of the whole team in training, over the last tenth of PPO. Each
training has a core of its own and is kept in `results/learning_precision.json` when it ends; one
that is there for the same settings is not run again: the benchmark can be stopped and gone on with.
The last line is JSON: the returns, the mean of their differences, bf16 less fp32, and its standard
error.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Literal

import torch
from rich.progress import track
from torch import Tensor

from benchmarks.learning_ticks import Setting
from hamlet.artifacts import HamletError
from hamlet.learning.train_policy import train_policy
from hamlet.params import Params, load_params
from stages.common import cores, prepare_torch

RESULTS = Path(__file__).parent / "results" / "learning_precision.json"
PHASES = ("imitation_iterations", "ppo_iterations")
PRECISIONS: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16")


class Returns:
    """A trainer's log that keeps the training return."""

    def __init__(self) -> None:
        self.returns: list[float] = []

    def steps(self, total: int, start: int) -> Iterator[int]:
        yield from range(start, total)

    def record(self, step: int, metrics: dict[str, Tensor]) -> None:
        self.returns.append(float(metrics["mean_return"]))


def training(params: Params, precision: Literal["fp32", "bf16"]) -> float:
    """The return over the last tenth of a training of the policy with `params.seed`."""
    torch.manual_seed(params.seed)
    setting = Setting(params)
    log = Returns()
    how = params.compile.model_copy(update={"precision": precision})
    with tempfile.TemporaryDirectory() as folder:
        train_policy(
            setting.town, setting.shape, setting.mind, setting.blank, params.policy, how,
            params.seed, Path(folder) / "checkpoint.pt", log,
        )  # fmt: skip
    return statistics.fmean(log.returns[-max(1, params.policy.ppo_iterations // 10) :])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    for phase in PHASES:
        parser.add_argument(
            f"--{phase.replace('_', '-')}", type=int, help="default: as in params.yaml"
        )
    given = parser.parse_args(arguments)
    try:
        params = load_params("params.yaml")
    except HamletError as error:
        print(f"learning_precision: {error}", file=sys.stderr)
        return 2
    changed = {phase: value for phase in PHASES if (value := getattr(given, phase))}
    policy = params.policy.model_copy(update=changed)
    settings = json.loads(policy.model_dump_json())
    kept: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if kept.get("policy") != settings:
        kept = {"policy": settings, "returns": {p: {} for p in PRECISIONS}}
    missing = [
        (seed, precision)
        for seed in range(1, given.seeds + 1)
        for precision in PRECISIONS
        if str(seed) not in kept["returns"][precision]
    ]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(cores(), context, initializer=prepare_torch, initargs=(0,)) as pool:
        running = {
            pool.submit(
                training, params.model_copy(update={"seed": seed, "policy": policy}), precision
            ): (seed, precision)
            for seed, precision in missing
        }
        for done in track(as_completed(running), "trainings", total=len(running)):
            seed, precision = running[done]
            kept["returns"][precision][str(seed)] = round(done.result(), 2)
            print(f"{precision} {seed}: {kept['returns'][precision][str(seed)]}")
            RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    fp32, bf16 = (kept["returns"][p] for p in PRECISIONS)
    seeds = [str(seed) for seed in range(1, given.seeds + 1)]
    differences = [bf16[seed] - fp32[seed] for seed in seeds]
    kept["bf16_less_fp32"] = round(statistics.fmean(differences), 2)
    if len(differences) > 1:
        spread = statistics.stdev(differences) / len(differences) ** 0.5
        kept["standard_error"] = round(spread, 2)
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    print(json.dumps(kept))
    return 0


if __name__ == "__main__":
    sys.exit(main())
