"""What a second process is worth: every stage trained by two ranks beside one.

    python -m benchmarks.scaling

Needs the data set and the frozen modules (`dvc repro`) and two cores. Two processes stay for the
whole run and take turns: one rank with one thread, two ranks with one thread each (gloo over
localhost), one rank with two threads, all with the batch of `params.yaml`; and two ranks with twice
that batch. Ratios are of throughput, the efficiency is half of it: strong scaling where the batch
stays, weak where it grows with the ranks. The policy plays and learns uncompiled, in the precision
of `params.yaml`. The last line is JSON, also written to `results/scaling.json`.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, multiprocessing

from hamlet.artifacts import HamletError
from hamlet.export.frozen import load_frozen
from hamlet.learning.beliefs import believe
from hamlet.learning.distributed import process_group
from hamlet.learning.train_perception import train_perception
from hamlet.learning.train_policy import train_policy
from hamlet.learning.train_prover import TrainConfig, build_prover, train_prover
from hamlet.learning.train_social import train_social, with_labels
from hamlet.learning.train_world_model import experience, train_world_model
from hamlet.modules.agent import IMAGINED_DISCOUNT
from hamlet.modules.contracts import TownShape
from hamlet.params import CompileParams, Params, load_params
from hamlet.proofs import build_world, open_graph
from stages import paths
from stages.collect import make_town
from stages.data import load_dataset
from stages.policy import make_mind

RESULTS = Path(__file__).parent / "results" / "scaling.json"
TICKS = 128  # of the data set: enough to read from, and soon believed
ROUNDS = 3
WARM_UP = 1
STEPS = {"perception": 4, "world_model": 20, "social": 8, "policy": 1, "prove": 2}
MODES = {  # ranks, threads of each, batch
    "one": (1, 1, 1),
    "two_ranks": (2, 1, 1),
    "two_threads": (1, 2, 1),
    "two_ranks_twice": (2, 1, 2),
}
Training = Callable[["Clock", Path], None]


class Clock:
    """A trainer's log that times its steps after the first ones."""

    def __init__(self, steps: int) -> None:
        self.count, self.seconds = steps, 0.0

    def steps(self, total: int, start: int) -> Iterator[int]:
        for step in range(WARM_UP + self.count):
            if step == WARM_UP:
                began = time.perf_counter()
            yield step
        self.seconds = time.perf_counter() - began

    def record(self, step: int, metrics: dict[str, Tensor]) -> None:
        """Nobody reads it here; stages do."""


def larger(params: Params, times: int) -> Params:
    """With so many times the rows in every batch."""
    sizes = {
        "perception": "sequences",
        "social": "sequences",
        "world_model": "batch",
        "policy": "worlds",
    }
    sections = {}
    for name, field in (sizes | {"proofs": "slots"}).items():
        section = getattr(params, name)
        sections[name] = section.model_copy(update={field: times * getattr(section, field)})
    return params.model_copy(update=sections)


def trainings() -> dict[tuple[str, int], Training]:
    """By stage and batch, the training of every stage, as the stage itself starts it."""
    params = load_params()
    seed, shape = params.seed, TownShape.of(make_town(params))
    recorded = load_dataset(params)
    data, worlds = recorded.data[:TICKS].to_tensordict(), recorded.training
    perceive, card = load_frozen(paths.PERCEPTION, shape.pack_hash)
    beliefs = believe(perceive, card["recurrent_dim"], data)
    lived, labelled = experience(data, beliefs, IMAGINED_DISCOUNT), with_labels(data, beliefs)
    graph = open_graph(params.proofs.data, seed)
    world = build_world(graph, params.proofs.rounds)

    def policy(params: Params, log: Clock, file: Path) -> None:
        town = make_town(params)
        mind, blank, _ = make_mind(params, town)
        sizes = params.policy.model_copy(
            update={"imitation_iterations": 0, "critic_iterations": 0, "ppo_iterations": 99}
        )
        how = CompileParams(rollout=False, update=False, precision=params.compile.precision)
        train_policy(town, shape, mind, blank, sizes, how, seed, file, log)

    def prove(params: Params, log: Clock, file: Path) -> None:
        """PPO only, timed from step to step; choosing by the validation split is no part of it."""
        steps = WARM_UP + log.count
        config = TrainConfig(slots=params.proofs.slots, imitation_steps=0, ppo_steps=100 * steps)
        ticking = iter(log.steps(steps, 0))

        def report(phase: str, step: int, steps: int, numbers: dict[str, Tensor]) -> None:
            if next(ticking, None) is None:
                raise StopIteration

        next(ticking)
        try:
            train_prover(
                world, build_prover(world, hidden=params.proofs.hidden), config, seed, report
            )
        except StopIteration:
            return

    def perception(params: Params, log: Clock, file: Path) -> None:
        train_perception(data, worlds, shape, params.perception, seed, file, log)

    def world_model(params: Params, log: Clock, file: Path) -> None:
        latent = card["latent"]
        train_world_model(lived, worlds, shape, latent, params.world_model, seed, file, log)

    def social(params: Params, log: Clock, file: Path) -> None:
        train_social(labelled, worlds, shape, params.social, seed, file, log)

    return {
        (training.__name__, times): partial(training, larger(params, times))
        for training in (perception, world_model, social, policy, prove)
        for times in (1, 2)
    }


def serve(rank: int, asked: Any, told: Any) -> None:
    """A process that trains what it is asked to and tells the seconds it took."""
    made = trainings()
    told.put(("ready", 0.0))
    while True:
        stage, ranks, threads, times, port = asked.get()
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        torch.set_num_threads(threads)
        clock = Clock(STEPS[stage])
        with process_group(), tempfile.TemporaryDirectory() as folder:
            made[stage, times](clock, Path(folder) / "checkpoint.pt")
        told.put((stage, clock.seconds))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def main() -> int:
    if len(os.sched_getaffinity(0)) < 2:
        raise HamletError("two ranks need two cores", "run it on a larger machine")
    context = multiprocessing.get_context("spawn")
    told = context.SimpleQueue()
    asked = [context.SimpleQueue() for _ in range(2)]
    processes = [
        context.Process(target=serve, args=(rank, asked[rank], told), daemon=True)
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for _ in processes:
        told.get()
    seconds: dict[str, dict[str, list[float]]] = {s: {m: [] for m in MODES} for s in STEPS}
    for stage in STEPS:
        for _ in range(ROUNDS):
            for mode, (ranks, threads, times) in MODES.items():
                port = free_port()
                for queue in asked[:ranks]:
                    queue.put((stage, ranks, threads, times, port))
                seconds[stage][mode].append(max(told.get()[1] for _ in range(ranks)))
    rows = {}
    for stage, by_mode in seconds.items():
        step = {mode: 1e3 * min(taken) / STEPS[stage] for mode, taken in by_mode.items()}
        rows[stage] = {
            "two_ranks_over_one": step["one"] / step["two_ranks"],
            "two_ranks_over_two_threads": step["two_threads"] / step["two_ranks"],
            "strong_efficiency": step["one"] / step["two_ranks"] / 2,
            "weak_efficiency": step["one"] / step["two_ranks_twice"],
            **{f"{mode}_step_ms": value for mode, value in step.items()},
        }
        print(f"  {stage}: {rows[stage]}", flush=True)
    means = {
        name: statistics.geometric_mean(row[name] for row in rows.values())
        for name in ("two_ranks_over_one", "two_ranks_over_two_threads", "weak_efficiency")
    }
    result = {**means, "cores": len(os.sched_getaffinity(0)), "stages": rows}
    rounded = json.loads(json.dumps(result), parse_float=lambda text: float(f"{float(text):.4g}"))
    RESULTS.write_text(json.dumps(rounded, indent=1) + "\n")
    print(f"ratio of two ranks over one, mean of all stages: {rounded['two_ranks_over_one']}")
    print(json.dumps(rounded))
    return 0


if __name__ == "__main__":
    sys.exit(main())
