"""Replay recorded runs of the reference environment and compare every array.

    python -m benchmarks.town_parity PACK_DIR TRACE.npz [--compile]

Prints the largest absolute difference of each recorded array; the last line is
`max_abs_diff=<x>`. Exit status 0 only if that is 0 (with --compile: discrete arrays equal and
floats within 1e-5), 2 if the pack or the trace cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

from hamlet.learning.compiling import compiled as fast
from hamlet.town import PackError, Town, load_pack
from hamlet.town.hamlet_observation import reference_mask, reference_observation

NEEDED = (
    "obs", "meters", "positions", "actions", "masks", "rewards", "dones", "hour",
    "interaction_progress", "interacted", "last_affordance", "affordance_positions",
    "depletion_multiplier", "lifespan", "affordance_names",
)  # fmt: skip
FLOATS = ("obs", "meters", "rewards")


def replay(
    pack_dir: Path, trace: dict[str, np.ndarray], compiled: bool = False
) -> dict[str, float]:
    """Largest absolute difference per array between a trace and our replay of it.

    Raises PackError when the pack cannot be read, ValueError when the trace does not fit it.
    """
    pack = load_pack(pack_dir)
    partial = pack.vision < max(pack.width, pack.height) - 1
    # The recorded scalar is a float32; the run was given the decimal number it prints as.
    multiplier = float(str(np.float32(trace["depletion_multiplier"])))
    lifespan = int(trace["lifespan"])
    pack = pack.model_copy(
        update={"depletion_multiplier": multiplier, "lifespan": lifespan, "agents": 1}
    )
    names = [str(name) for name in trace["affordance_names"]]
    missing = set(pack.affordance_names) - set(names)
    if missing:
        raise ValueError(f"affordance_names: the trace has no {min(missing)!r} of the pack")
    columns = [names.index(n) for n in pack.affordance_names]
    spots = torch.from_numpy(trace["affordance_positions"][:, columns].astype(np.int64))
    town = Town(pack, layouts=spots[..., 1] * pack.width + spots[..., 0])
    ticks, worlds = trace["actions"].shape
    state = town.rearrange(
        town.reset(0, worlds),
        layout=torch.arange(worlds),
        meters=torch.from_numpy(trace["meters"][0])[:, None],
        position=torch.from_numpy(trace["positions"][0])[:, None],
        hour=torch.from_numpy(trace["hour"][0]),
    )
    step = fast(town.step_reference, fixed=True) if compiled else town.step_reference
    number = {i: names.index(name) for i, name in enumerate(pack.affordance_names)} | {-1: -1}

    def in_trace_order(code: torch.Tensor) -> np.ndarray:
        return np.array([number[int(c)] for c in code.flatten()])

    diffs: dict[str, float] = {}

    def compare(name: str, ours: np.ndarray | torch.Tensor, theirs: np.ndarray) -> None:
        ours = np.asarray(ours, dtype=np.float64)
        gap = np.abs(ours.reshape(theirs.shape) - theirs.astype(np.float64)).max()
        diffs[name] = max(diffs.get(name, 0.0), float("inf") if np.isnan(gap) else float(gap))

    def compare_state(t: int, before: torch.Tensor) -> None:
        compare("obs", reference_observation(town, state, before, partial), trace["obs"][t])
        compare("meters", state["meters"], trace["meters"][t])
        compare("positions", state["position"], trace["positions"][t])
        compare("masks", reference_mask(town, state), trace["masks"][t])
        compare("dones", state["done"], trace["dones"][t])
        compare("hour", state["hour"], trace["hour"][t])
        compare("interaction_progress", state["progress"], trace["interaction_progress"][t])

    compare_state(0, state["position"])
    for t in range(ticks):
        before = state["position"]
        state = step(state, torch.from_numpy(trace["actions"][t].astype(np.int64))[:, None])
        compare_state(t + 1, before)
        compare("rewards", state["reward"], trace["rewards"][t])
        compare("interacted", in_trace_order(state["used"]), trace["interacted"][t])
        compare("last_affordance", in_trace_order(state["last_affordance"]),
                trace["last_affordance"][t])  # fmt: skip
    return diffs


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pack_dir", type=Path, help="Hamlet pack directory, unchanged")
    parser.add_argument("trace", type=Path, help="recorded trace (.npz)")
    parser.add_argument("--compile", action="store_true", help="replay with the compiled step")
    args = parser.parse_args(arguments)
    try:
        with np.load(args.trace, allow_pickle=False) as file:
            trace = {name: file[name] for name in file.files}
        absent = [name for name in NEEDED if name not in trace]
        if absent:
            raise ValueError(f"{args.trace.name}: array {absent[0]!r} is missing")
        diffs = replay(args.pack_dir, trace, args.compile)
    except (PackError, ValueError, OSError) as error:
        print(f"town_parity: {error}", file=sys.stderr)
        return 2
    for name, diff in diffs.items():
        print(f"{name:22s} {diff}")
    worst = max(diffs.values())
    print(f"max_abs_diff={worst}")
    if args.compile:
        return int(any(diff > (1e-5 if name in FLOATS else 0.0) for name, diff in diffs.items()))
    return int(worst != 0.0)


if __name__ == "__main__":
    sys.exit(main())
