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

Every measure has a process of its own. Those of a part compile side by side, and wait; then each
measures alone, one after the other.

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
from contextlib import contextmanager, redirect_stdout
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

Turn = Callable[[], None]
"""Called when everything is compiled and warm; returns when nothing else runs."""


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
def town_speed(setting: Untrained, way: str, worlds: int, seconds: float, turn: Turn) -> float:
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
    found = rate(advance, steps, seconds, setting.device.type, turn)
    replayed(work if way == "graph" else None)
    return round(found)


@torch.no_grad()
def mind_speed(setting: Untrained, way: str, worlds: int, seconds: float, turn: Turn) -> float:
    """Agent-steps per second of a rollout with the whole mind, the expert asked beside it."""
    advance, graph = rollout(setting, way, worlds)
    steps = worlds * setting.shape.num_agents * TICKS
    found = rate(advance, steps, seconds, setting.device.type, turn)
    replayed(graph)
    return round(found)


class Clock:
    """A trainer's log that waits for its turn after the first `warm` iterations, and keeps how long
    the others took."""

    def __init__(self, warm: int, turn: Turn) -> None:
        self.warm, self.turn = warm, turn
        self.seconds = 0.0

    def steps(self, total: int, start: int) -> Iterator[int]:
        began = 0.0
        for step in range(start, total):
            yield step
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if step + 1 == start + self.warm:
                self.turn()
                began = time.perf_counter()
        self.seconds = time.perf_counter() - began

    def record(self, step: int, metrics: Any) -> None:
        pass


def learning_speed(setting: Untrained, way: str, worlds: int, seconds: float, turn: Turn) -> float:
    """Agent-steps per second of PPO, over some seconds, without its first four iterations."""
    params, compile, warm = setting.params, way != "eager", 4
    iterations = warm + max(1, round(seconds * (64 if compile else 4)))
    clock = Clock(warm, turn)
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
    steps = (iterations - warm) * worlds * setting.shape.num_agents * TICKS
    return round(steps / clock.seconds)


def update_ms(setting: Untrained, precision: str, rows: int, seconds: float, turn: Turn) -> float:
    """Milliseconds of an update of imitation, compiled."""
    device, shape = setting.device, setting.shape
    world, carry = setting.start(rows // shape.num_agents)
    with torch.no_grad():
        step = fused_step(setting.town, setting.learner)
        every = torch.arange(len(world), device=device)
        record = step(world, carry, every, None)[2]
    batch = TensorDict(record, batch_size=len(record["active"]))
    batch["returns"] = torch.zeros(len(batch), device=device)
    batch["expert_action"], batch["expert_goal"] = batch["action"], batch["goal"]
    policy: Any = setting.mind.policy
    losses = PolicyLosses(policy, setting.critic, setting.params.policy)
    trained = [*policy.parameters(), *setting.critic.parameters()]
    update = Update(
        losses.imitate, trained, learning_rate=1e-4, compile=device.type == "cuda",
        precision="bf16" if precision == "bf16" else "fp32",
    )  # fmt: skip
    with tensor_float(precision == "tf32"):
        return round(1e3 / rate(partial(update, batch), 1, seconds, device.type, turn), 3)


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
def launches(
    setting: Untrained, way: str, worlds: int, seconds: float, turn: Turn
) -> dict[str, float]:
    """Calls of the driver that start something, for each tick of a rollout with the mind."""
    ticks = 4
    advance, graph = rollout(setting, way, worlds, ticks)
    advance(), advance()
    turn()
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
            places = torch.device("cpu"), device
            told = [dict(device_work.done_on(place, given)) for place in places]
        finally:
            os.chdir(home)
    for name, here in told[0].items():
        pairs = zip(device_work.numbers(here), device_work.numbers(told[1][name]), strict=True)
        found[name] = max(abs(a - b) / max(abs(a), 1.0) for (_, a), (_, b) in pairs)
    return found


def repro() -> dict[str, Any]:
    """Seconds of every stage of one `dvc repro` with the preset gpu, in a copy of this repository,
    and what the agent scores."""
    began: dict[str, float] = {}
    with TemporaryDirectory() as folder:
        copy = Path(folder) / "hamlet"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(copy)], check=True)
        hamlet = [sys.executable, "-c", "from hamlet.cli import app; app()"]
        env = {**os.environ, "PYTHONPATH": str(copy), "PYTHONUNBUFFERED": "1"}
        subprocess.run([*hamlet, "preset", "gpu"], cwd=copy, env=env, check=True)
        ran = subprocess.Popen(
            [sys.executable, "-m", "dvc", "repro"], cwd=copy, env=env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        for line in ran.stdout or ():
            print(line, end="", flush=True)
            if line.startswith("Running stage "):
                began[line.split("'")[1]] = time.perf_counter()
        began["end"] = time.perf_counter()
        if ran.wait():
            raise HamletError(f"dvc repro ended with {ran.returncode}")
        score = json.loads((copy / "artifacts/metrics/evaluate.json").read_text())
    ends = [*began.values()][1:]
    seconds = {name: round(end - began[name], 1) for name, end in zip(began, ends)}
    return {"seconds": seconds, "all": round(sum(seconds.values()), 1), "score": score}


MEASURES: dict[str, Callable[..., Any]] = {
    "town": town_speed,
    "rollout": mind_speed,
    "learning": learning_speed,
    "update": update_ms,
    "launches": launches,
}
PLANS: tuple[dict[str, tuple[tuple[str, ...], tuple[int, ...]]], ...] = (
    {"town": (WAYS, TOWNS)},
    {"rollout": (WAYS, MINDS), "launches": (WAYS, MINDS[:1])},
    {"learning": (WAYS[:2], MINDS), "update": (("fp32", "tf32", "bf16"), ROWS)},
)
"""What is compiled side by side: name of a measure -> its ways and sizes."""


def one_measure(name: str, way: str, size: int, seconds: float) -> Any:
    """One measure in this process: prints `ready` when it is compiled, waits for a line, measures.
    Where it fails, the reason."""

    def turn() -> None:
        print("ready", file=sys.__stdout__, flush=True)
        sys.stdin.readline()

    def measured() -> Any:
        found = chosen()
        take(found.device)
        if name == "parity":
            return parity(found.device)
        params = default_params()
        prepare_torch(params.seed)
        return MEASURES[name](Untrained(params, found.device), way, size, seconds, turn)

    with redirect_stdout(sys.stderr):
        return or_reason(measured)


class Asked:
    """A measure in a process of its own."""

    def __init__(self, name: str, way: str, size: int, seconds: float) -> None:
        self.name, self.way, self.size = name, way, size
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu", "--seconds", str(seconds),
             "--one", name, way, str(size)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "2"},  # many of these run at once
        )  # fmt: skip
        self.line = ""

    def wait(self) -> None:
        """Until it is ready, or has failed."""
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()

    def answer(self) -> Any:
        """What it measures, now that nothing else runs; or why there is nothing."""
        told = self.line
        if told == "ready\n":
            told, _ = self.process.communicate("go\n")
        self.process.wait()
        return json.loads(told) if told else f"ended with {self.process.returncode}"


def measure(seconds: float) -> Iterator[tuple[str, Any]]:
    """Everything but `repro`, part by part."""
    checked = Asked("parity", "", 0, seconds)
    for plan in PLANS:
        asked = [
            Asked(name, way, size, seconds)
            for name, (ways, sizes) in plan.items()
            for way in ways
            for size in sizes
        ]
        for each in [*asked, checked] if plan is PLANS[0] else asked:
            each.wait()
        if plan is PLANS[0]:
            yield "parity", checked.answer()
        told: dict[str, dict[str, Any]] = {name: {} for name in plan}
        for each in asked:
            told[each.name].setdefault(each.way, {})[each.size] = each.answer()
        yield from told.items()


def no_float8() -> dict[str, str]:
    """Why module D is not trained in fp8."""
    policy: Any = Untrained(default_params()).mind.policy
    return {"none": too_small(policy.parameters())}


def failed(part: Any) -> bool:
    """Whether a reason stands in the place of a number."""
    if isinstance(part, dict):
        return any(failed(each) for name, each in part.items() if name != "none")
    return isinstance(part, str)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=2.0, help="per measurement")
    parser.add_argument("--repro", action="store_true", help="also run every stage, preset gpu")
    parser.add_argument("--one", nargs=3, metavar=("NAME", "WAY", "SIZE"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.one:
        name, way, size = given.one
        print(json.dumps(one_measure(name, way, int(size), given.seconds)))
        return 0
    try:
        found = chosen()
        if found.device.type == "cpu":
            print(f"benchmarks.gpu: {found.why}: nothing is measured", file=sys.stderr)
            return 2
        take(found.device)
    except HamletError as error:
        print(f"benchmarks.gpu: {error}", file=sys.stderr)
        return 2
    told: dict[str, Any] = {
        "device": torch.cuda.get_device_name(found.device),
        "torch": torch.__version__,
        "precision": prepare_torch(default_params().seed),
    }
    for name, part in measure(given.seconds):
        told[name] = part
        print(name, part, flush=True)
        write_json(RESULTS, told)
    told["update"]["fp8"] = no_float8()
    if given.repro:
        told["repro"] = repro()
    write_json(RESULTS, told)
    print(json.dumps(told))
    return int(any(failed(told[name]) for name in ("parity", *MEASURES)))


if __name__ == "__main__":
    raise SystemExit(main())
