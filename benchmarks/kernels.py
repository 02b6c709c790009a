"""How many kernels a GPU would be asked to start for one tick of training, without a GPU.

    python -m benchmarks.kernels            # compare with results/kernels.json
    python -m benchmarks.kernels --write    # take today's counts as the new ones

A fused tick of the town (observe, think, act, step, reset), with the expert that is asked and the
critic, is lowered by inductor with the rules by which it fuses for a GPU (Triton's), and the
scheduler's list is counted before any code is written: fused kernels and calls of libraries. The
sizes are those of params.yaml, the weights nobody's, fp32. A test fails when a count has grown by
more than a tenth. Nothing is said of time: no kernel runs.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor
from torch._inductor import scheduler
from torch._inductor.scheduler import ForeachKernelSchedulerNode, Scheduler

from benchmarks.counts import Untrained, default_params, grown
from hamlet.learning.compiling import compiled
from hamlet.learning.learner import thinking_in
from hamlet.learning.rollout import fused_step
from hamlet.params import Params

RESULTS = Path(__file__).parent / "results" / "kernels.json"
WORLDS = 64


class Counted(Exception):
    """The list is complete: no code need be written."""


def in_groups(lowered: Any) -> list[list[Any]]:
    """What may run side by side in one kernel: inductor's grouping, which leaves the CPU out."""
    most = inductor.combo_kernel_max_num_nodes
    levels = [[n for n in level if n.get_device()] for level in lowered._topological_sort_nodes()]
    return [level[i : i + most] for level in levels for i in range(0, len(level), most)]


def kernels_of(function: Any, *inputs: Any) -> dict[str, int]:
    """Kernels of a function of a world's state as `compiled` would have a GPU run it: `fused`, and
    `library`, the calls of a library for a matrix product, a sort or a scatter.

    Changes what inductor does in this process: for a process of its own.
    """
    found: dict[str, int] = {}

    def count(lowered: Any) -> None:
        kinds = {"fused": 0, "library": 0}
        for node in lowered.nodes:
            if isinstance(node, scheduler.ExternKernelSchedulerNode):
                kinds["library"] += type(node.node).__name__ != "MultiOutput"
            elif not isinstance(node, scheduler.NopKernelSchedulerNode):
                kinds["fused"] += 1
        found.update(kinds)
        raise Counted

    patched: Any = Scheduler
    patched.codegen = count
    ForeachKernelSchedulerNode.set_group_algorithm_for_combo_kernels(in_groups)
    with inductor.patch(cpu_backend="triton", force_disable_caches=True):
        try:
            compiled(function)(*inputs)
        except torch._inductor.exc.InductorError as error:
            if not isinstance(error.inner_exception, Counted):
                raise
    return found


def measure(params: Params) -> dict[str, dict[str, int]]:
    """The kernels of a tick of PPO and of the town alone."""
    new = Untrained(params)
    world, carry = new.start(WORLDS)
    thinking = thinking_in(0, WORLDS, params.policy)[0]
    waiting = torch.zeros(WORLDS, new.shape.num_agents, dtype=torch.int64)
    tick = fused_step(new.town, new.learner)
    return {
        "town": kernels_of(new.town.step_and_reset_core, world, waiting),
        "tick of PPO": kernels_of(tick, world, carry, thinking, None),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--write", action="store_true", help="take today's counts as the new ones")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:  # for what inductor leaves behind
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        now = measure(default_params())
    for part, counts in now.items():
        print(f"{part:12} {counts['fused']:4} fused kernels, {counts['library']:3} of libraries")
    if given.write:
        RESULTS.write_text(json.dumps(now, indent=2) + "\n", encoding="utf-8")
    elif lines := grown(now, json.loads(RESULTS.read_text(encoding="utf-8"))):
        raise SystemExit("\n".join(lines))


if __name__ == "__main__":
    main()
