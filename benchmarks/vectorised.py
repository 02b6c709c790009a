"""Is a population faster in one batch, its weights stacked, than one member after the other?

    python -m benchmarks.vectorised [--members 8]

Needs the data set and the frozen perception (`dvc repro`). Members are copies of module C with
weights and data of their own, as `hamlet tune` trains them; an update is loss, gradients and AdamW.
Both ways take turns, in one thread: a process of its own per core, as `hamlet tune` starts them,
has no more. First both take the same steps, and the weights are compared. The last line is JSON,
also written to `results/vectorised.json`: how many times as many updates per second stacked
members make, the median over the turns. Nothing is compiled: the stage `social` is not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.progress import track
from tensordict import TensorDict
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from benchmarks.pbt import shared
from hamlet.artifacts import HamletError, write_json
from hamlet.learning.sequences import SequenceReader
from hamlet.learning.train_social import social_loss
from hamlet.learning.tune_social import opened
from hamlet.learning.update import fused_adam
from hamlet.modules.social import Social
from hamlet.params import load_params

RESULTS = Path(__file__).parent / "results" / "vectorised.json"
TURNS = 12
CLOSE = 1e-4  # weights after STEPS steps
STEPS = 3


class Losing(nn.Module):
    """Module C, called for its loss."""

    def __init__(self, social: Social) -> None:
        super().__init__()
        self.social = social

    def forward(self, chunk: TensorDict, state: Tensor) -> Tensor:
        parts, _ = social_loss(self.social, chunk, state)
        return parts["goal"] + parts["next_action"]


Update = Callable[[TensorDict, Tensor], None]


def separately(members: list[Losing], rate: float) -> Update:
    """One update of every member in turn, on chunks [M, T, S] and states [M, S, ...]."""
    optimizers = [fused_adam(member.parameters(), rate) for member in members]

    def update(chunks: TensorDict, states: Tensor) -> None:
        for member, optimizer, chunk, state in zip(members, optimizers, chunks, states):
            optimizer.zero_grad(set_to_none=True)
            member(chunk, state).backward()
            optimizer.step()

    return update


def stacked(members: list[Losing], rate: float) -> tuple[Update, dict[str, Tensor]]:
    """The same of all members at once; and their weights, each [M, ...]."""
    weights, buffers = stack_module_state(members)
    optimizer = fused_adam(weights.values(), rate)
    blank = members[0]

    def one(weights: dict[str, Tensor], chunk: TensorDict, state: Tensor) -> Tensor:
        steps = {name: buffer[0] for name, buffer in buffers.items()}
        return functional_call(blank, weights | steps, (chunk, state))

    def update(chunks: TensorDict, states: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        vmap(one)(weights, chunks, states).sum().backward()
        optimizer.step()

    return update, weights


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=int, default=8)
    given = parser.parse_args(arguments)
    try:
        params = load_params("params.yaml")
        with TemporaryDirectory() as folder:
            data, worlds, shape = opened(shared(params, Path(folder)))
            data = data.clone()  # into memory: the folder goes
    except HamletError as error:
        print(f"vectorised: {error}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    of_c = params.social
    rngs = [torch.Generator().manual_seed(seed) for seed in range(given.members)]
    lanes = [SequenceReader(data, worlds["learn"], of_c.sequences, of_c.chunk, rng) for rng in rngs]

    def read() -> TensorDict:
        return TensorDict.stack([each.read() for each in lanes])

    def population() -> list[Losing]:
        torch.manual_seed(params.seed)
        return [Losing(Social(shape, of_c.hidden)) for _ in range(given.members)]

    slots = of_c.sequences * shape.num_agents
    recurrent_dim = population()[0].social.recurrent_dim
    states = torch.zeros(given.members, slots, shape.num_others, recurrent_dim)
    members = population()
    apart = separately(members, of_c.learning_rate)
    together, weights = stacked(population(), of_c.learning_rate)
    for _ in range(STEPS):  # of warm-up, too
        chunks = read()
        apart(chunks, states)
        together(chunks, states)
    for name, each in weights.items():
        own = torch.stack([dict(member.named_parameters())[name] for member in members])
        off = (own - each).abs().max().item()
        assert off < CLOSE, f"{name} is {off} off after {STEPS} steps"
    ratios = []
    for _ in track(range(TURNS), "updates"):
        chunks, seconds = read(), []
        for update in (apart, together):
            began = time.perf_counter()
            update(chunks, states)
            seconds.append(time.perf_counter() - began)
        ratios.append(seconds[0] / seconds[1])
    faster = round(statistics.median(ratios), 3)
    result = {"members": given.members, "stacked_over_separate": faster}
    write_json(RESULTS, result)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
