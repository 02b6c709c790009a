"""Speed of the town: agent-steps per second, eager and compiled, against a numba twin.

    python -m benchmarks.town [--worlds 256,1024,4096,16384] [--threads 1,2] [--seconds 2]

A step is: legal mask, random legal actions, the tick, auto-reset, and the observation. Warm-up and
compilation are not timed; the best of three runs counts. The numba twin (optional extra) is first
checked to play the same lives. The last line is JSON and is also written to
benchmarks/results/town.json: speeds and ratios at the largest number of threads, bytes of state and
observation per agent, and by how many GiB a process grows that steps 16,384 worlds. Without numba
the ratio to it is null. `TORCHINDUCTOR_CACHE_DIR` keeps what was compiled for the next time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import reduce
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import psutil
import torch
from tensordict import TensorDict

from hamlet.artifacts import write_json
from hamlet.learning.compiling import compiled
from hamlet.town import PackError, Town, load_pack
from hamlet.town.counter import tick_hash

RESULTS = Path(__file__).parent / "results" / "town.json"
STREAM_ACTIONS = 9000


def make_step(town: Town) -> Callable[[TensorDict], tuple[TensorDict, TensorDict]]:
    """state -> (next state, observation), random legal actions by the counter hash."""
    stream = STREAM_ACTIONS + torch.arange(town.num_agents, device=town.device)[:, None]

    def step(state: TensorDict) -> tuple[TensorDict, TensorDict]:
        bits = town.legal_bits(state).t()
        legal = [(bits >> number) & 1 for number in range(town.num_actions)]
        draw = (tick_hash(state["key"], state["tick"], stream) >> 16) & 0xFFFF
        left = (draw * reduce(torch.add, legal)) >> 16  # legal actions before the chosen one
        action = torch.zeros_like(left)
        for number, one in enumerate(legal):
            action = torch.where((one > 0) & (left == 0), number, action)
            left = left - one
        state = town.step_and_reset_core(state, action.t())
        return state, town.observe(state)

    return step


def rate(
    advance: Callable[[], object],
    agent_steps: int,
    seconds: float,
    device: str,
    warm: Callable[[], None] = lambda: None,
) -> float:
    """Best agent-steps per second of three runs, of about `seconds` together; `warm` is called
    between the first calls, which compile, and the timing."""

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    for _ in range(3):
        advance()
    wait()
    warm()
    best = 0.0
    for _ in range(3):
        steps, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds / 3:
            for _ in range(5):
                advance()
            steps += 5
        wait()
        best = max(best, steps * agent_steps / (time.perf_counter() - start))
    return best


def check_twin(town: Town, worlds: int = 16, ticks: int = 300) -> None:
    """Play the same lives in both and compare. Raises AssertionError where they differ."""
    from benchmarks.town_numba import Twin

    step, state, twin = make_step(town), town.reset(7, worlds), Twin(town, 7, worlds)
    for tick in range(ticks):
        state, seen = step(state)
        twin.step()
        names = {"view": "o_view", "occupancy": "o_occupancy", "self_state": "o_self",
                 "cues": "o_cues", "visible": "o_visible", "others_offset": "o_offset",
                 "others_action": "o_action", "action_mask": "o_mask"}  # fmt: skip
        for ours, theirs in names.items():
            theirs_value = torch.from_numpy(twin.state[theirs]).reshape(seen[ours].shape)
            gap = (seen[ours].double() - theirs_value.double()).abs().max().item()
            assert gap <= (1e-5 if seen[ours].is_floating_point() else 0), (tick, ours, gap)
        gap = (state["reward"] - torch.from_numpy(twin.state["reward"])).abs().max().item()
        assert gap <= 1e-5, (tick, "reward", gap)


def bytes_per_agent(town: Town, worlds: int = 256) -> float:
    """State and observation, per agent."""
    state = town.reset(0, worlds)
    tensors: Any = (*state.values(), *town.observe(state).values())
    return sum(t.numel() * t.element_size() for t in tensors) / (worlds * town.num_agents)


def growth(pack: str, worlds: int = 16384) -> float:
    """GiB by which this process grows at most while it steps so many worlds (eager)."""
    before = psutil.Process().memory_info().rss
    town = Town(load_pack(pack))
    step = make_step(town)
    state = town.reset(0, worlds)
    for _ in range(20):
        state, seen = step(state)
    assert len(seen) == worlds
    return (getrusage(RUSAGE_SELF).ru_maxrss * 1024 - before) / 2**30


def measure(town: Town, worlds: int, seconds: float, fast: bool) -> float:
    step = make_step(town)
    if fast:
        torch._dynamo.reset()
        step = compiled(step, fixed=True)
    holder = [town.reset(0, worlds)]

    def advance() -> None:
        holder[0], _ = step(holder[0])

    with torch.no_grad():
        return rate(advance, worlds * town.num_agents, seconds, town.device.type)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pack", default="l4_contention")
    parser.add_argument("--worlds", default="256,1024,4096,16384", help="batch sizes")
    parser.add_argument("--threads", default="1,2", help="CPU thread counts")
    parser.add_argument("--seconds", type=float, default=2.0, help="per measurement")
    args = parser.parse_args(arguments)
    try:
        pack = load_pack(args.pack)
    except PackError as error:
        print(f"town: {error}", file=sys.stderr)
        return 2
    sizes = [int(w) for w in args.worlds.split(",")]
    threads = [int(t) for t in args.threads.split(",")]
    numba: Any = import_module("numba") if find_spec("numba") else None
    if numba is None:
        print("numba is not installed: no physical reference", flush=True)
    rows: list[dict] = []

    def note(kind: str, device: str, count: int, worlds: int, speed: float) -> None:
        rows.append({"kind": kind, "device": device, "threads": count, "worlds": worlds,
                     "agent_steps_per_s": round(speed)})  # fmt: skip
        print(f"{kind:9s} {device} {count} threads {worlds:6d} worlds {speed / 1e6:8.3f} M/s",
              flush=True)  # fmt: skip

    town = Town(pack)
    if numba:
        check_twin(Town(pack, num_layouts=64))
        print("numba twin plays the same lives", flush=True)
    for count in threads:
        torch.set_num_threads(count)
        for worlds in sizes:
            for kind, fast in (("eager", False), ("compiled", True)):
                note(kind, "cpu", count, worlds, measure(town, worlds, args.seconds, fast))
            if numba:
                from benchmarks.town_numba import Twin

                numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))
                twin = Twin(town, 0, worlds)
                speed = rate(twin.step, worlds * town.num_agents, args.seconds, "cpu")
                note("numba", "cpu", count, worlds, speed)
    if torch.cuda.is_available():
        gpu = Town(pack, device="cuda")
        for worlds in sizes:
            for kind, fast in (("eager", False), ("compiled", True)):
                note(kind, "cuda", 0, worlds, measure(gpu, worlds, args.seconds, fast))

    def best(kind: str, **only: object) -> float:
        found = [r["agent_steps_per_s"] for r in rows if r["kind"] == kind
                 and all(r[key] == value for key, value in only.items())]  # fmt: skip
        return float(max(found, default=0))

    code = f"from benchmarks.town import growth; print(growth({args.pack!r}))"
    grown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    most = max(threads)
    reference = best("numba", threads=most)
    eager = best("eager", device="cpu", worlds=1024, threads=most)
    summary = {
        "pack": pack.name,
        "best_agent_steps_per_s": best("compiled"),
        "bytes_per_agent": round(bytes_per_agent(town)),
        "gib_16384_worlds": round(float(grown), 3),
        "best_compiled_over_numba": (
            round(best("compiled", device="cpu", threads=most) / reference, 3)
            if reference else None
        ),
        "compiled_over_eager_1024": (
            round(best("compiled", device="cpu", worlds=1024, threads=most) / eager, 2)
            if eager else None
        ),
        "rows": rows,
    }  # fmt: skip
    write_json(RESULTS, summary)
    print(f"ratio compiled / numba: {summary['best_compiled_over_numba']}")
    print(json.dumps({key: value for key, value in summary.items() if key != "rows"}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
