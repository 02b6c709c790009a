"""What a GPU makes of all this, in one run and one JSON.

    python -m benchmarks.gpu [--seconds 2] [--repro]

Without a usable GPU it says so and exits with 2. Everything has the sizes of params.yaml but for
the number of worlds; minds are new, so nothing else must have run. `--repro` also runs every stage
with the preset gpu, in a copy of this repository, and tells its seconds.

- `parity`: the largest difference between three updates of every trainer here and on the CPU, in
  fp32 without TF32, with the same noise.
- `town`, `rollout`: agent-steps per second, eager, compiled and as one CUDA graph of 16 ticks. A
  graph that was not captured is an error, not a slower number.
- `learning`: agent-steps per second of PPO, updates included, eager and compiled, as one graph.
- `update`: milliseconds of an update of module D in fp32, TF32 and bf16; of fp8, why it is not.
- `launches`: what the host starts for one tick: kernels, or graphs.

The last line is JSON, also written to benchmarks/results/gpu.json, part by part. Where there is no
number stands why, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tensordict import TensorDict
from torch.profiler import ProfilerActivity, profile

from benchmarks import device_work
from benchmarks.counts import Untrained, default_params
from benchmarks.town import make_step, rate
from hamlet.artifacts import HamletError, in_one_line, write_json
from hamlet.device import chosen, take
from hamlet.learning import distributed, train_world_model
from hamlet.learning.buffer import RolloutBuffer
from hamlet.learning.captured import Captured
from hamlet.learning.compiling import compiled
from hamlet.learning.float8 import too_small
from hamlet.learning.learner import RolloutCarry, thinking_in
from hamlet.learning.policy_losses import PolicyLosses
from hamlet.learning.rollout import collect, fused_step
from hamlet.learning.train_policy import add_advantages, train_policy
from hamlet.learning.update import Update
from hamlet.moving import moved
from stages.common import prepare_torch

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "gpu.json"
TOWNS = (1024, 4096, 16384, 65536)
MINDS = (1024, 4096)
ROWS = (8192, 65536)
TICKS = 16
WAYS = ("eager", "compiled", "graph")


def rollout(
    setting: Untrained, way: str, worlds: int, ticks: int = TICKS
) -> tuple[Callable[[], Any], Any]:
    """What plays so many ticks and works out the advantages; and its graph, if it is one."""
    step = fused_step(setting.town, setting.learner, way != "eager")
    sizes = setting.params.policy.model_copy(update={"rollout": ticks})
    thinking = [moved(now, setting.device) for now in thinking_in(0, worlds, sizes)]
    contexts, buffer = [(now, None) for now in thinking], RolloutBuffer(ticks)

    def played(world: TensorDict, carry: RolloutCarry) -> tuple[TensorDict, RolloutCarry]:
        world, carry = collect(step, world, carry, buffer, contexts)
        add_advantages(buffer, world, setting.learner, sizes)
        return world, carry

    work: Any = Captured(played) if way == "graph" else played
    holder = [setting.start(worlds)]

    def advance() -> None:
        holder[0] = work(*holder[0])

    return advance, work if way == "graph" else None


def replayed(graph: Captured | None) -> None:
    """Raises where a graph was asked for and something ran outside of it."""
    if graph is not None and (graph.outside or not graph.replays):
        raise RuntimeError(f"not captured: {graph.replays} replays, {graph.outside} calls outside")


def or_reason(measure: Callable[[], Any]) -> Any:
    """The measure, or in one line why there is none: full memory, a compiler or a graph that
    failed. What would run slower instead is no measure."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="compiling|no CUDA graph")
            return measure()
    except (RuntimeError, UserWarning) as error:
        torch.cuda.empty_cache()
        return in_one_line(error)


@torch.no_grad()
def town_speed(setting: Untrained, way: str, worlds: int, seconds: float) -> float:
    """Agent-steps per second of the town with random actions."""
    step = make_step(setting.town)
    if way != "eager":
        step = compiled(step, fixed=True)

    def played(state: TensorDict) -> TensorDict:
        for _ in range(TICKS):
            state, _ = step(state)
        return state

    work: Any = Captured(played) if way == "graph" else played
    holder = [setting.town.reset(0, worlds)]

    def advance() -> None:
        holder[0] = work(holder[0])

    steps = worlds * setting.shape.num_agents * TICKS
    found = rate(advance, steps, seconds, setting.device.type)
    replayed(work if way == "graph" else None)
    return round(found)


@torch.no_grad()
def mind_speed(setting: Untrained, way: str, worlds: int, seconds: float) -> float:
    """Agent-steps per second of a rollout with the whole mind, the expert asked beside it."""
    advance, graph = rollout(setting, way, worlds)
    steps = worlds * setting.shape.num_agents * TICKS
    found = rate(advance, steps, seconds, setting.device.type)
    replayed(graph)
    return round(found)


class Clock:
    """A trainer's log that keeps when every iteration ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def steps(self, total: int, start: int) -> Iterator[int]:
        for step in range(start, total):
            yield step
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.ends.append(time.perf_counter())

    def record(self, step: int, metrics: Any) -> None:
        pass


def learning_speed(setting: Untrained, compile: bool, worlds: int, iterations: int = 20) -> float:
    """Agent-steps per second of PPO, without its first two iterations."""
    params, clock = setting.params, Clock()
    compiling = params.compile.model_copy(update={"rollout": compile, "update": compile})
    sizes = params.policy.model_copy(update={
        "worlds": worlds, "rollout": TICKS, "imitation_iterations": 0, "critic_iterations": 0,
        "ppo_iterations": iterations, "algorithm": "ppo",
    })  # fmt: skip
    with TemporaryDirectory() as folder:
        train_policy(
            setting.town, setting.shape, setting.mind, setting.blank, sizes, compiling,
            params.seed, Path(folder) / "checkpoint.pt", clock,
        )  # fmt: skip
    steps = (iterations - 2) * worlds * setting.shape.num_agents * TICKS
    return round(steps / (clock.ends[-1] - clock.ends[1]))


def update_ms(setting: Untrained, precision: str, rows: int, seconds: float) -> float:
    """Milliseconds of an update of imitation, compiled."""
    device, shape = setting.device, setting.shape
    world, carry = setting.start(rows // shape.num_agents)
    with torch.no_grad():
        step = fused_step(setting.town, setting.learner)
        every = torch.arange(len(world), device=device)
        record = step(world, carry, every, None)[2]
    batch = TensorDict(record, batch_size=len(record["active"]))
    batch["returns"] = torch.zeros(len(batch), device=device)
    batch["expert_action"] = batch["action"]
    policy: Any = setting.mind.policy
    losses = PolicyLosses(policy, setting.critic, setting.params.policy)
    trained = [*policy.parameters(), *setting.critic.parameters()]
    update = Update(
        losses.imitate, trained, learning_rate=1e-4, compile=device.type == "cuda",
        precision="bf16" if precision == "bf16" else "fp32",
    )  # fmt: skip
    with tensor_float(precision == "tf32"):
        return round(1e3 / rate(partial(update, batch), 1, seconds, device.type), 3)


@contextmanager
def tensor_float(on: bool) -> Iterator[None]:
    """Whether float32 products may be TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = on
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@torch.no_grad()
def launches(setting: Untrained, way: str) -> dict[str, float]:
    """Calls of the driver that start something, for each tick of a rollout with the mind."""
    ticks = 4
    advance, graph = rollout(setting, way, MINDS[0], ticks)
    advance(), advance()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as watched:
        advance()
        torch.cuda.synchronize()
    replayed(graph)
    started = {e.key: e.count for e in watched.key_averages() if "Launch" in e.key}
    return {name: count / ticks for name, count in sorted(started.items())}


def noise_of_the_cpu(like: torch.Tensor, dim: int) -> torch.Tensor:
    """`distributed.noise` of one process, from the CPU's generator: a GPU's draws other numbers."""
    return torch.randn(like.shape, dtype=like.dtype).to(like.device)


def parity(device: torch.device) -> dict[str, float]:
    """Of every trainer, the largest difference to the CPU in what three updates and its report
    tell, relative where a number is above 1."""
    device_work.UPDATES = 3
    anywhere: Any = distributed
    anywhere.noise = noise_of_the_cpu
    report: Any = train_world_model
    report.REPORT_TICKS = (1, 5)  # its data is 32 ticks long
    found = {}
    home = Path.cwd()
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            given = device_work.recorded()
            told = [device_work.done_on(place, given) for place in (torch.device("cpu"), device)]
        finally:
            os.chdir(home)
    for name, here in told[0].items():
        pairs = zip(device_work.numbers(here), device_work.numbers(told[1][name]), strict=True)
        found[name] = max(abs(a - b) / max(abs(a), 1.0) for (_, a), (_, b) in pairs)
    return found


def repro() -> dict[str, float]:
    """Seconds of every stage with the preset gpu, in a copy of this repository."""
    found = {}
    with TemporaryDirectory() as folder:
        copy = Path(folder) / "hamlet"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(copy)], check=True)
        hamlet = [sys.executable, "-c", "from hamlet.cli import app; app()"]
        env = {**os.environ, "PYTHONPATH": str(copy)}
        subprocess.run([*hamlet, "preset", "gpu"], cwd=copy, env=env, check=True)
        dvc = [sys.executable, "-m", "dvc"]
        listed = subprocess.run(
            [*dvc, "stage", "list", "--name-only"],
            cwd=copy, env=env, check=True, capture_output=True, text=True,
        )  # fmt: skip
        for stage in listed.stdout.split():
            began = time.perf_counter()
            subprocess.run([*dvc, "repro", stage], cwd=copy, env=env, check=True)
            found[stage] = round(time.perf_counter() - began, 1)
        found["score"] = json.loads((copy / "artifacts/metrics/evaluate.json").read_text())
    return found


def measure(device: torch.device, seconds: float) -> Iterator[tuple[str, Any]]:
    """Everything but `repro`, part by part."""
    yield "device", torch.cuda.get_device_name(device)
    yield "torch", torch.__version__
    yield "parity", or_reason(partial(parity, device))
    params = default_params()
    yield "precision", prepare_torch(params.seed)  # from here on as in a stage
    setting = Untrained(params, device)
    plan: list[tuple[str, Callable[..., float], tuple[int, ...]]] = [
        ("town", town_speed, TOWNS),
        ("rollout", mind_speed, MINDS),
    ]
    for name, speed, sizes in plan:
        yield (
            name,
            {
                way: {n: or_reason(partial(speed, setting, way, n, seconds)) for n in sizes}
                for way in WAYS
            },
        )
    yield (
        "learning",
        {
            way: {n: or_reason(partial(learning_speed, setting, compile, n)) for n in MINDS}
            for way, compile in (("eager", False), ("compiled", True))
        },
    )
    policy: Any = setting.mind.policy
    update: dict[str, Any] = {
        precision: {n: or_reason(partial(update_ms, setting, precision, n, seconds)) for n in ROWS}
        for precision in ("fp32", "tf32", "bf16")
    }
    yield "update", update | {"fp8": {"none": too_small(policy.parameters())}}
    yield "launches", {way: or_reason(partial(launches, setting, way)) for way in WAYS}


def failed(part: Any) -> bool:
    """Whether a reason stands in the place of a number."""
    if isinstance(part, dict):
        return any(failed(each) for name, each in part.items() if name != "none")
    return isinstance(part, str)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=2.0, help="per measurement")
    parser.add_argument("--repro", action="store_true", help="also run every stage, preset gpu")
    given = parser.parse_args(arguments)
    try:
        found = chosen()
        if found.device.type == "cpu":
            print(f"benchmarks.gpu: {found.why}: nothing is measured", file=sys.stderr)
            return 2
        take(found.device)
    except HamletError as error:
        print(f"benchmarks.gpu: {error}", file=sys.stderr)
        return 2
    told: dict[str, Any] = {}
    for name, part in measure(found.device, given.seconds):
        told[name] = part
        print(name, part, flush=True)
        write_json(RESULTS, told)
    if given.repro:
        told["repro_seconds"] = repro()
        write_json(RESULTS, told)
    print(json.dumps(told))
    measured = ("parity", "town", "rollout", "learning", "update", "launches")
    return int(any(failed(told[name]) for name in measured))


if __name__ == "__main__":
    raise SystemExit(main())
