"""What `benchmarks.device_work` measures on the CPU and on an emulated GPU.

    python -m tests.emulated FILE

writes down what both measured, and what the GPU was waited for. A process of its own: `fake_gpu`
changes PyTorch.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.device_work import SEED, crossed, done_on, recorded, watchers
from hamlet.learning import train_world_model
from stages.common import prepare_torch
from tests import fake_gpu

seen: dict[str, dict[str, int]] = {}


def watch(over: bool) -> None:
    """Count what is waited for and sent within trainers."""
    if over:
        for kind, counted in (("waits", fake_gpu.waits), ("uploads", fake_gpu.uploads)):
            for place, count in counted.items():
                seen.setdefault(kind, {})[place] = seen.get(kind, {}).get(place, 0) + count
    fake_gpu.waits.clear()
    fake_gpu.uploads.clear()


def main(path: str) -> None:
    fake_gpu.install()  # before autograd counts the devices
    watchers.append(watch)
    prepare_torch(SEED)
    train_world_model.REPORT_TICKS = (1, 5)
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        given = recorded()
        cpu = done_on(torch.device("cpu"), given)
        with fake_gpu.Gpu():
            seen.clear()
            one, other = torch.device("cpu"), torch.device("gpu:0")
            gpu = done_on(other, given)
            told = {"crossed": [crossed(one, other, given), crossed(other, one, given)]}
    Path(path).write_text(json.dumps({"cpu": cpu, "gpu": gpu, "seen": seen} | told))


if __name__ == "__main__":
    main(str(Path(sys.argv[1]).absolute()))
