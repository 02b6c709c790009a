"""What float8 costs modules A and B: their losses in fp32, bf16 and emulated float8.

    python -m benchmarks.float8 [--seeds 3] [--perception-steps 40] [--world-model-steps 120]

Needs the data set and the frozen perception (`dvc repro`). Trainings are those of the stages but
for the precision and fewer steps, all decayed to nothing, from the same seeds and on the same data.
Float8 is rounded as a GPU would round it (see `pipeline/learning/float8.py`), so losses are told
here, and no times. Each training is kept in `results/float8.json` when it ends; one that is there
for the same parameters is not run again. The last line is JSON: the mean loss over the last quarter
of each training, and its ratio to bf16's, beside that of fp32 as a measure of what is noise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

from hamlet.artifacts import HamletError
from hamlet.export.frozen import load_frozen
from hamlet.learning.train_perception import train_perception
from hamlet.learning.train_world_model import experience, train_world_model
from hamlet.modules.agent import IMAGINED_DISCOUNT
from hamlet.params import load_params
from stages import paths
from stages.common import threads
from stages.data import load_beliefs, load_dataset

RESULTS = Path(__file__).parent / "results" / "float8.json"
PRECISIONS = ("fp32", "bf16", "fp8-emulated")
POINTS = 12  # of each curve
Training = Callable[[dict[str, Any], int, "Losses", Path], Any]


class Losses:
    """A trainer's log that keeps the loss."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.losses: list[float] = []

    def steps(self, total: int, start: int) -> Iterator[int]:
        yield from track(range(start, total), self.title)

    def record(self, step: int, metrics: dict[str, Tensor]) -> None:
        self.losses.append(float(metrics["loss"]))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--perception-steps", type=int, default=40)
    parser.add_argument("--world-model-steps", type=int, default=120)
    given = parser.parse_args(arguments)
    try:
        params = load_params("params.yaml")
        recorded = load_dataset(params)
        perceive, card = load_frozen(paths.PERCEPTION, recorded.shape.pack_hash)
    except HamletError as error:
        print(f"float8: {error}", file=sys.stderr)
        return 2
    torch.set_num_threads(threads())
    of_a = params.perception.model_copy(update={"steps": given.perception_steps})
    of_b = params.world_model.model_copy(update={"steps": given.world_model_steps})
    sizes = {"perception": of_a, "world_model": of_b}
    settings = {
        name: {k: v for k, v in json.loads(section.model_dump_json()).items() if k != "precision"}
        for name, section in sizes.items()
    }
    kept: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if kept.get("params") != settings:
        kept = {"params": settings, "curves": {n: {p: {} for p in PRECISIONS} for n in sizes}}

    def perception(changed: dict[str, Any], seed: int, log: Losses, file: Path) -> None:
        section = of_a.model_copy(update=changed)
        data, worlds = recorded.data, recorded.training
        train_perception(data, worlds, recorded.shape, section, seed, file, log)

    lived: list[Any] = []

    def world_model(changed: dict[str, Any], seed: int, log: Losses, file: Path) -> None:
        if not lived:
            beliefs = load_beliefs(recorded, perceive, card)
            lived.append(experience(recorded.data, beliefs, IMAGINED_DISCOUNT))
        section = of_b.model_copy(update=changed)
        shape, worlds = recorded.shape, recorded.training
        train_world_model(lived[0], worlds, shape, card["latent"], section, seed, file, log)

    trainings: tuple[Training, ...] = (perception, world_model)
    for seed in range(1, given.seeds + 1):
        for training, precision in product(trainings, PRECISIONS):
            curves = kept["curves"][training.__name__][precision]
            if str(seed) in curves:
                continue
            log = Losses(f"{training.__name__}, {precision}, seed {seed}")
            with tempfile.TemporaryDirectory() as folder:
                training({"precision": precision}, seed, log, Path(folder) / "checkpoint.pt")
            parts = torch.tensor(log.losses).tensor_split(POINTS)
            curves[str(seed)] = [float(f"{part.mean():.4g}") for part in parts]
            RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    seeds = [str(seed) for seed in range(1, given.seeds + 1)]
    for name in sizes:
        last = {
            precision: [statistics.fmean(curves[seed][-POINTS // 4 :]) for seed in seeds]
            for precision, curves in kept["curves"][name].items()
        }
        ratios = {
            f"{precision}_over_bf16": [
                round(a / b, 4) for a, b in zip(last[precision], last["bf16"], strict=True)
            ]
            for precision in ("fp8-emulated", "fp32")
        }
        kept[name] = {p: round(statistics.fmean(values), 4) for p, values in last.items()} | ratios
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    print(json.dumps({name: kept[name] for name in sizes}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
