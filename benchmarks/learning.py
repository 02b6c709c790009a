"""Speed of learning in the town: the policy's PPO against two recurrent PPOs made elsewhere.

    python -m benchmarks.learning [--small]

Needs the frozen modules (`dvc repro`) and, for the peers, `pip install -e ".[bench]"`. Learning
runs in one process on the cores it may use; ours and the peers take turns, the peers as their users
run them and once more with our batched worlds (see `learning_peers`). They live in the town of
preset `easy`: there work is equal. An agent-step is one agent's tick: observed, believed, decided,
played, and learned from `epochs` times (by the critic; by the choice of goals where the agent
deliberates). Ticks of play are timed by `learning_ticks`. The last line is JSON, also written to
`results/learning/PACK.json`; the ratios are between rows of that run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import learning_peers as peers
from benchmarks.learning_ticks import Greedy, Setting, Ticks, rollouts
from hamlet.artifacts import HamletError
from hamlet.learning.learner import Learner
from hamlet.learning.precision import Precision, best_precision
from hamlet.learning.train_policy import train_policy
from hamlet.params import CompileParams, load_params
from hamlet.profiling import Watch, profiled
from stages.common import cores, keep_memory

RESULTS = Path(__file__).parent / "results" / "learning"
MANY = 4  # times the worlds of params.yaml, where the batch is what is measured
EVERYONE = "_everyone"  # after the name of a peer to whom our batched worlds are lent


class Window:
    """A trainer's log that watches a window of its steps and then ends the training."""

    class Over(Exception):
        pass

    def __init__(self, skip: int, count: int, folder: Path) -> None:
        self.skip, self.count, self.folder = skip, count, folder
        self.first = 0.0

    def steps(self, total: int, start: int) -> Iterator[int]:
        began = time.perf_counter()
        for item in profiled(range(total), self.skip, self.count, self.folder / "trace.json"):
            if isinstance(item, Watch):
                self.watch = item
                raise Window.Over
            yield item
            self.first = self.first or time.perf_counter() - began

    def record(self, step: int, metrics: dict[str, Tensor]) -> None:
        """Nobody reads it here; stages do."""


@contextmanager
def compiling_in(folder: str) -> Iterator[None]:
    """What was compiled is looked for, and kept, in this folder instead of the user's own."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    own = os.environ.get(name)
    os.environ[name] = folder
    try:
        yield
    finally:
        del os.environ[name]
        if own is not None:
            os.environ[name] = own


def learning(
    setting: Setting, compile: bool, precision: Precision, count: int, worlds: int
) -> dict[str, float]:
    """`count` iterations of PPO as the stage `policy` runs them, after two of warm-up."""
    stage = setting.params.policy
    only_ppo = {
        "imitation_iterations": 0, "critic_iterations": 0, "ppo_iterations": count + 4,
        "max_kl": 1e9, "worlds": worlds,
    }  # fmt: skip
    sizes = stage.model_copy(update=only_ppo)
    how = CompileParams(rollout=compile, update=compile, precision=precision)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        log = Window(2, count, Path(folder))
        with suppress(Window.Over):
            train_policy(
                setting.town, setting.shape, setting.mind, setting.blank, sizes, how,
                setting.params.seed, Path(folder) / "checkpoint.pt", log,
            )  # fmt: skip
    watch = log.watch
    steps = count * sizes.rollout * setting.slots(sizes.worlds)
    shares = watch.shares()
    updates = count * sizes.epochs * sizes.minibatches
    return {
        "agent_steps_per_s": steps / watch.total,
        "update_ms": 1e3 * watch.total * (shares["loss"] + shares["optimizer"]) / updates,
        "data_share": shares["data"],
        "accounted_share": 1 - shares["other"],
        "first_iteration_s": log.first,
    }


def recompilations(setting: Setting, iterations: int) -> dict[str, int]:
    """Graphs compiled after the first two of many iterations of a small PPO, and graph breaks."""
    small = {"worlds": 4, "rollout": 4, "minibatches": 1, "epochs": 1}
    policy = setting.params.policy.model_copy(
        update=small | {"imitation_iterations": 0, "critic_iterations": 0,
                        "ppo_iterations": iterations, "max_kl": 1e9}
    )  # fmt: skip
    stats = torch._dynamo.utils.counters

    class Count:
        def steps(self, total: int, start: int) -> Iterator[int]:
            for step in range(total):
                if step == 2:
                    self.warm = stats["stats"]["unique_graphs"]
                yield step

        def record(self, step: int, metrics: dict[str, Tensor]) -> None:
            """Only the counters matter."""

    torch._dynamo.reset()
    stats.clear()
    log = Count()
    with tempfile.TemporaryDirectory() as folder:
        train_policy(
            setting.town, setting.shape, setting.mind, setting.blank, policy,
            CompileParams(rollout=True, update=True, precision="auto"), 0,
            Path(folder) / "checkpoint.pt", log,
        )  # fmt: skip
    return {
        "graphs": log.warm,
        "recompiles": stats["stats"]["unique_graphs"] - log.warm,
        "graph_breaks": sum(stats["graph_break"].values()),
        "iterations": iterations,
    }


class Sizes(NamedTuple):
    """How much is measured: iterations of each training, seconds of each tick, rounds."""

    small: bool
    iterations: int
    seconds: float
    rounds: int


SMALL, WHOLE = Sizes(True, 1, 0.1, 1), Sizes(False, 5, 2.0, 2)


def end_to_end(setting: Setting, fast: Precision, sizes: Sizes) -> dict[str, Any]:
    """Trainings of module D and of its peers, each round all of them, and their ratios."""
    print("learning, end to end", flush=True)
    policy, small = setting.params.policy, sizes.small
    rows: dict[str, list[dict[str, float]]] = {}
    others: dict[str, list[peers.Peer]] = {
        peer + lent: [] for peer in ("recurrent_ppo", "lstm_ppo") for lent in ("", EVERYONE)
    }
    best, many = f"compiled_{fast}", MANY * policy.worlds
    with tempfile.TemporaryDirectory() as cold:
        for _ in range(sizes.rounds):
            both: list[Precision] = list(dict.fromkeys(("fp32", fast)))
            ways = [(compile, p, policy.worlds) for compile in (True, False) for p in both]
            for compile, precision, worlds in [*ways, *((True, p, many) for p in both)]:
                name = f"{'compiled' if compile else 'eager'}_{precision}"
                name += f"_{worlds}" if worlds != policy.worlds else ""
                torch._dynamo.reset()
                with compiling_in(cold) if name == best else nullcontext():
                    row = learning(setting, compile, precision, sizes.iterations, worlds)
                rows.setdefault(name, []).append(row)
                print(f"  {name:24} {row['agent_steps_per_s']:9,.0f} agent-steps/s", flush=True)
            for name, seen in others.items():
                everyone = name.endswith(EVERYONE)
                worlds = peers.EVERYONES_WORLDS if everyone and not small else peers.STOCK_WORLDS
                seen.append(
                    peers.measure(
                        name.removesuffix(EVERYONE), worlds=worlds, rollout=policy.rollout,
                        epochs=policy.epochs,
                        minibatches=min(worlds, policy.minibatches), hidden=policy.hidden,
                        iterations=1 if small else 3, threads=cores(), everyone=everyone,
                    )
                )  # fmt: skip
                speed = seen[-1].steps / seen[-1].seconds
                print(f"  {name:24} {speed:9,.0f} agent-steps/s", flush=True)
    return ratios(rows, others, fast, many)


def ratios(
    rows: dict[str, list[dict[str, float]]],
    others: dict[str, list[peers.Peer]],
    fast: Precision,
    many: int,
) -> dict[str, Any]:
    """Medians over the rounds, of our trainings and of the peers', and one over the other."""
    best = f"compiled_{fast}"

    def speed_of(name: str) -> float:
        return statistics.median(row["agent_steps_per_s"] for row in rows[name])

    def update_ms(name: str) -> float:
        return statistics.median(row["update_ms"] for row in rows[name])

    def peer_speed(name: str) -> float:
        return statistics.median(p.steps / p.seconds for p in others[name])

    return {
        "agent_steps_per_s": speed_of(best),
        "agent_steps_per_s_of_many": speed_of(f"{best}_{many}"),
        "over_sb3_recurrent": speed_of(best) / peer_speed("recurrent_ppo"),
        "over_lstm_ppo": speed_of(best) / peer_speed("lstm_ppo"),
        "over_sb3_recurrent_everyone": speed_of(best) / peer_speed(f"recurrent_ppo{EVERYONE}"),
        "over_lstm_ppo_everyone": speed_of(best) / peer_speed(f"lstm_ppo{EVERYONE}"),
        "compiled_over_eager": speed_of(best) / speed_of(f"eager_{fast}"),
        "compiled_over_eager_fp32": speed_of("compiled_fp32") / speed_of("eager_fp32"),
        "bf16_over_fp32_update": update_ms("compiled_fp32") / update_ms(best),
        "bf16_over_fp32_update_of_many": update_ms(f"compiled_fp32_{many}")
        / update_ms(f"{best}_{many}"),
        "cold_compile_s": rows[best][0]["first_iteration_s"],
        "warm_compile_s": rows[best][-1]["first_iteration_s"],
        "learning": {
            name: {k: statistics.median(r[k] for r in seen) for k in seen[0]}
            for name, seen in rows.items()
        },
        "peers": {name: [p._asdict() for p in seen] for name, seen in others.items()},
    }


def rollouts_by_size(setting: Setting, fast: Precision, sizes: Sizes) -> dict[str, Any]:
    """Perception's rollout in one process and in one per core."""
    worlds = setting.params.policy.worlds
    by_size = {}
    for size in [worlds] if sizes.small else [MANY * worlds, 2 * MANY * worlds]:
        for ranks in sorted({1, cores()}):
            name = f"{size}_worlds_{ranks}_processes"
            by_size[name] = rollouts(setting.params, size, fast, sizes.seconds, ranks)
            print(f"  perception's rollout, {name}: {by_size[name]}", flush=True)
    top = max(by_size.values(), key=lambda row: row["agent_steps_per_s"])
    return {
        "rollout": by_size,
        "rollout_agent_steps_per_s": top["agent_steps_per_s"],
        "rollout_over_its_parts": top["over_its_parts"],
    }


def ticks_of_play(setting: Setting, fast: Precision, sizes: Sizes) -> dict[str, Any]:
    print("a tick of play", flush=True)
    worlds = setting.params.policy.worlds
    with torch.no_grad():
        torch._dynamo.reset()
        ticks = Ticks(setting, worlds, fast, sizes.seconds)
        row = {
            "eager": ticks.whole(Learner, False),
            "separately": ticks.separately(),
            "fused": ticks.whole(Learner, True),
            "evaluation_fused": ticks.whole(Greedy, True),
            "copies": ticks.copies(),
        }
        print("  " + "  ".join(f"{k} {v:.2f} ms" for k, v in row.items()), flush=True)
        torch._dynamo.reset()
        resets = Ticks(setting, worlds, "fp32", sizes.seconds).resets()
        print(f"  resets {resets}", flush=True)
    return {"tick_ms": row, "reset_ms": resets}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    told = "small sizes, most of it compiling; nothing is written"
    parser.add_argument("--small", action="store_true", help=told)
    sizes = SMALL if parser.parse_args(arguments).small else WHOLE
    warnings.simplefilter("ignore")
    try:
        setting = Setting(load_params("params.yaml"))
    except HamletError as error:
        print(f"learning: {error}", file=sys.stderr)
        return 2
    keep_memory()
    torch.set_num_threads(cores())
    policy = setting.params.policy
    if sizes.small:
        policy = policy.model_copy(update={"worlds": 16, "rollout": 8})
        setting.params = setting.params.model_copy(update={"policy": policy})
    fast = best_precision("cpu")
    result: dict[str, Any] = {
        "pack": setting.town.pack.name, "threads": cores(), "worlds": policy.worlds, "best": fast
    }  # fmt: skip

    def counted() -> dict[str, Any]:
        found = recompilations(setting, 5 if sizes.small else 1000)
        renamed = {"iterations": "counted_iterations"}
        return {renamed.get(k, k): found[k] for k in ("recompiles", "graph_breaks", "iterations")}

    rounded = result
    for measure in (
        lambda: end_to_end(setting, fast, sizes),
        lambda: rollouts_by_size(setting, fast, sizes),
        counted,
        lambda: ticks_of_play(setting, fast, sizes),
    ):
        result |= measure()
        # In four digits, written as far as it goes: a stop loses one section.
        text = json.dumps(result)
        rounded = json.loads(text, parse_float=lambda number: float(f"{float(number):.4g}"))
        if not sizes.small:
            RESULTS.mkdir(exist_ok=True)
            file = RESULTS / f"{setting.town.pack.name}.json"
            file.write_text(json.dumps(rounded, indent=1) + "\n")
    print(f"ratio over RecurrentPPO: {rounded['over_sb3_recurrent']}")
    print(json.dumps(rounded))
    return 0


if __name__ == "__main__":
    sys.exit(main())
