"""On paper: every stage on 8, 64 and 1,024 ranks, from what two ranks on this machine do.

    python -m benchmarks.estimate

Needs what `benchmarks.scaling` needs, and its results. Counts the messages and bytes that a rank
sends per step, by training each stage for some steps on two ranks, and reads the step's time from
`results/scaling.json`. Every rank keeps the batch of `params.yaml`, so the batch of all grows with
them. Assumed of the network between machines, and not measured: LATENCY and BANDWIDTH below.

    step(n) = work + messages * hops(n) * LATENCY + bytes * 2 (n - 1) / n / BANDWIDTH

where `work` is the step of one of two busy ranks, their messages on this machine included, and
hops(n) is 2 (n - 1) in a ring, as gloo sends, or 2 log2 n in a tree, as NCCL can (Thakur et al.
2005). The last line is
JSON, also written to `results/estimate.json`.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from benchmarks.scaling import RESULTS as MEASURED
from benchmarks.scaling import STEPS, WARM_UP, Clock, free_port, trainings
from hamlet.artifacts import HamletError
from hamlet.learning.distributed import process_group

RESULTS = Path(__file__).parent / "results" / "estimate.json"
RANKS = (8, 64, 1024)
LATENCY = 30e-6  # seconds of a small message between two machines, TCP in one data centre
BANDWIDTH = 10e9 / 8  # bytes per second: 10 Gbit/s
HOPS: dict[str, Callable[[int], float]] = {
    "ring": lambda n: 2 * (n - 1),
    "tree": lambda n: 2 * math.log2(n),
}


class Counter(Clock):
    """Counts what is sent from the first step after the warm-up on."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self.messages, self.bytes = 0, 0

    def steps(self, total: int, start: int) -> Iterator[int]:
        for step in super().steps(total, start):
            if step == WARM_UP:
                self.messages, self.bytes = 0, 0
            yield step

    def counted(self, function: Callable[..., Any], which: int) -> Callable[..., Any]:
        """A function of `torch.distributed` whose argument number `which` is sent."""

        def call(*arguments: Any, **options: Any) -> Any:
            self.messages += 1
            self.bytes += arguments[which].nbytes
            return function(*arguments, **options)

        return call


def serve(rank: int, port: int, told: Any) -> None:
    """Train every stage for some steps and tell what was sent per step."""
    torch.set_num_threads(1)
    made = trainings()
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    sent = {}
    with process_group():
        for stage, steps in STEPS.items():
            log = Counter(steps)
            functions = {"all_reduce": 0, "broadcast": 0, "all_gather": 1}
            before = {name: getattr(dist, name) for name in functions}
            for name, which in functions.items():
                setattr(dist, name, log.counted(before[name], which))
            with tempfile.TemporaryDirectory() as folder:
                made[stage, 1](log, Path(folder) / "checkpoint.pt")
            for name, function in before.items():
                setattr(dist, name, function)
            sent[stage] = (log.messages / steps, log.bytes / steps)
    if not rank:
        told.put(sent)


def main() -> int:
    if not MEASURED.exists():
        raise HamletError(f"{MEASURED} is missing", "run `python -m benchmarks.scaling`")
    measured = json.loads(MEASURED.read_text())["stages"]
    context = multiprocessing.get_context("spawn")
    told, port = context.SimpleQueue(), free_port()
    processes = [context.Process(target=serve, args=(rank, port, told)) for rank in range(2)]
    for process in processes:
        process.start()
    sent = told.get()
    for process in processes:
        process.join()
    rows: dict[str, Any] = {}
    for stage, (messages, size) in sent.items():
        work = measured[stage]["two_ranks_twice_step_ms"] / 1e3
        rows[stage] = {
            "messages_per_step": messages,
            "bytes_per_step": round(size),
            "work_ms": 1e3 * work,
        }
        for kind, hops in HOPS.items():
            for n in RANKS:
                waiting = messages * hops(n) * LATENCY
                moving = size * 2 * (n - 1) / n / BANDWIDTH
                parts = {"work": work, "latency": waiting, "bandwidth": moving}
                total = sum(parts.values())
                rows[stage][f"{kind}_{n}"] = {
                    "step_ms": 1e3 * total,
                    "efficiency": work / total,
                    "largest": max(parts, key=lambda name: parts[name]),
                }
        print(f"  {stage}: {rows[stage]}", flush=True)
    result = {
        "assumed": {"latency_us": 1e6 * LATENCY, "gigabits": 8 * BANDWIDTH / 1e9},
        "stages": rows,
    }
    rounded = json.loads(json.dumps(result), parse_float=lambda text: float(f"{float(text):.4g}"))
    RESULTS.write_text(json.dumps(rounded, indent=1) + "\n")
    print(json.dumps(rounded))
    return 0


if __name__ == "__main__":
    sys.exit(main())
