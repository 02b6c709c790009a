"""What `benchmarks.device_work` measures on the CPU and on an emulated GPU.

    python -m tests.emulated

prints a line of JSON for every piece of work, as it is done: `[name, told]`, of a trainer what it
measured on each device; at last `seen`, what the GPU was waited for. A process of its own:
`fake_gpu` changes PyTorch.
"""

from __future__ import annotations

import json
import os
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.device_work import SEED, WORK, crossed, done_on, recorded, watchers
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


def main() -> None:
    fake_gpu.install()  # before autograd counts the devices
    watchers.append(watch)
    prepare_torch(SEED)
    train_world_model.REPORT_TICKS = (1, 5)
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        given, one, other = recorded(), torch.device("cpu"), torch.device("gpu:0")
        on_cpu, on_gpu = done_on(one, given), done_on(other, given)
        for name in WORK:
            torch.manual_seed(SEED)
            _, told = next(on_cpu)
            torch.manual_seed(SEED)
            with fake_gpu.Gpu():
                say(name, {"cpu": told, "gpu": next(on_gpu)[1]})
                if name == "social":
                    say("crossed", [crossed(one, other, given), crossed(other, one, given)])
        say("seen", seen)


def say(name: str, told: Any) -> None:
    print(json.dumps([name, told]), flush=True)


if __name__ == "__main__":
    main()
