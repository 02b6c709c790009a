"""Every trainer for two updates, a match and the ranking of proofs, on any device.

    python -m tests.device_work FILE

does all of it on the CPU and on the GPU of `fake_gpu`, and writes down what both measured, and what
the GPU was waited for. A process of its own: `fake_gpu` changes PyTorch.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from hamlet.device import moved
from hamlet.export.frozen import freeze, load_frozen
from hamlet.learning.beliefs import believe
from hamlet.learning.learner import first_state
from hamlet.learning.population import Characters, Selves, play
from hamlet.learning.train_perception import evaluate_perception, train_perception
from hamlet.learning.train_policy import goal_targets, train_policy
from hamlet.learning.train_prover import TrainConfig, build_prover, rank, train_prover
from hamlet.learning.train_social import evaluate_social, train_social, with_labels
from hamlet.learning.train_world_model import evaluate_world_model, experience, train_world_model
from hamlet.modules.agent import Mind
from hamlet.modules.contracts import BeliefDistribution, SocialPrediction, TownShape
from hamlet.modules.menu import imagined_menu
from hamlet.modules.policy import Policy
from hamlet.params import load_params
from hamlet.proofs import build_world
from hamlet.proofs.kinship import kinship_graph
from hamlet.proofs.ranking import pose, sampled_negatives
from hamlet.town import Scripted
from hamlet.town.tables import timetable
from stages.collect import PLAYERS, make_town, record
from stages.common import prepare_torch
from stages.freeze_perception import example_inputs
from stages.world_model import OUTPUTS
from tests import fake_gpu

ROOT = Path(__file__).parents[1]
PARAMS = load_params(ROOT / "params.yaml", "tiny")
WORLDS, TICKS, SEED = 4, 64, 7
PERCEPTION, WORLD_MODEL, SOCIAL = Path("a.pt2"), Path("b.pt2"), Path("c.pt2")


class Kept:
    """A trainer's log that keeps what it is told."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Tensor]] = []

    def steps(self, total: int, start: int) -> range:
        return range(start, total)

    def record(self, step: int, metrics: Mapping[str, Tensor]) -> None:
        self.rows.append(dict(metrics))


class Recorded(NamedTuple):
    data: TensorDict
    training: Tensor
    held_out: Tensor


def recorded() -> Recorded:
    """Worlds [TICKS, WORLDS] of the scripted characters, on the CPU."""
    town = make_town(PARAMS)
    players = Scripted(town, PLAYERS, SEED)
    state, ticks = town.reset(SEED, WORLDS), []
    memory = players.reset(state)
    for _ in range(TICKS):
        state, memory, tick = record(town, state, players, memory)
        ticks.append(tick)
    data: Any = torch.stack(ticks)
    return Recorded(data, torch.arange(WORLDS - 2), torch.arange(WORLDS - 2, WORLDS))


Told = dict[str, Any]


def perception(device: torch.device, given: Recorded) -> Told:
    log, data, shape = Kept(), moved(given.data, device), TownShape.of(make_town(PARAMS))
    params = PARAMS.perception.model_copy(update={"steps": 2})
    module, heads = train_perception(data, given.training, shape, params, SEED, Path("a.pt"), log)
    yield_training()
    told = {
        "rows": log.rows,
        "report": evaluate_perception(module, heads, data, given.held_out, 16),
    }
    module.to("cpu").cache_odds()
    sizes = {"belief_dim": module.belief_dim, "recurrent_dim": module.recurrent_dim}
    frozen(module, example_inputs(shape, module.recurrent_dim, 4, generator()), PERCEPTION, sizes)
    return told


def world_model(device: torch.device, given: Recorded) -> Told:
    shape, data = TownShape.of(make_town(PARAMS)), moved(given.data, device)
    perceive, card = load_frozen(PERCEPTION, device=device)
    lived = experience(data, believe(perceive, card["recurrent_dim"], data), 0.97)
    log, params = Kept(), PARAMS.world_model.model_copy(update={"steps": 2})
    begin_training()
    model = train_world_model(
        lived, given.training, shape, PARAMS.perception.latent, params, SEED, Path("b.pt"), log
    )
    yield_training()
    report = evaluate_world_model(model, lived, given.held_out, given.training, 0.97, SEED)
    d = card["belief_dim"]
    inputs = {
        "mean": torch.zeros(4, d),
        "log_std": torch.zeros(4, d),
        "known_state": torch.rand(4, shape.self_dim, generator=generator()),
        "action": torch.arange(4),
    }
    frozen(model, inputs, WORLD_MODEL, {})
    return {"rows": log.rows, "report": report}


def social(device: torch.device, given: Recorded) -> Told:
    shape, data = TownShape.of(make_town(PARAMS)), moved(given.data, device)
    perceive, card = load_frozen(PERCEPTION, device=device)
    labelled = with_labels(data, believe(perceive, card["recurrent_dim"], data))
    log, params = Kept(), PARAMS.social.model_copy(update={"steps": 2})
    begin_training()
    model = train_social(labelled, given.training, shape, params, SEED, Path("c.pt"), log)
    yield_training()
    report = evaluate_social(model, labelled, given.held_out, 16)
    m, d = shape.num_others, card["belief_dim"]
    inputs = {
        "mean": torch.zeros(4, d),
        "log_std": torch.zeros(4, d),
        "known_state": torch.rand(4, shape.self_dim, generator=generator()),
        "cues": torch.zeros(4, m, shape.num_cues),
        "visible": torch.ones(4, m, dtype=torch.bool),
        "others_offset": torch.zeros(4, m, 2),
        "others_action": torch.zeros(4, m, dtype=torch.int64),
        "recurrent_state": torch.zeros(4, m, model.recurrent_dim),
    }
    frozen(model, inputs, SOCIAL, {"recurrent_dim": model.recurrent_dim})
    return {"rows": log.rows, "report": report}


def mind_of(town: Any) -> tuple[Mind, Callable[..., Any]]:
    """The frozen A, B and C with a new D, as `stages.policy.make_mind`, of the files made here."""
    shape, device = TownShape.of(town), town.device
    perceive, card = load_frozen(PERCEPTION, device=device)
    imagine, read = (load_frozen(path, device=device) for path in (WORLD_MODEL, SOCIAL))
    posted = timetable(town.pack)
    told = imagined_menu(imagine[0], shape, card["belief_dim"], posted.to(device), 6).cpu()
    torch.manual_seed(SEED)
    policy = Policy(shape, card["belief_dim"], 16, goal_targets(town), posted, told, 4, 0.2)
    mind = Mind(perceive, imagine[0], read[0], policy.to(device), 2, 2)
    dims = card["recurrent_dim"], shape.num_others, read[1]["recurrent_dim"], device
    return mind, lambda worlds, agents=shape.num_agents: first_state(worlds, agents, *dims)


def policy(device: torch.device, given: Recorded) -> Told:
    """Two updates each of imitation, of the critic and of PPO, then of IMPALA; and a match."""
    town, told = make_town(PARAMS, device=device), {}
    sizes: dict[str, Any] = {"worlds": 8, "rollout": 4, "hidden": 16, "minibatches": 2}
    sizes |= {"imitation_iterations": 2, "critic_iterations": 1, "imitation_minibatches": 1}
    sizes |= {"imitation_epochs": 1, "ppo_iterations": 1}
    for algorithm in ("ppo", "impala"):
        (mind, blank), log = mind_of(town), Kept()
        params = PARAMS.policy.model_copy(update=sizes | {"algorithm": algorithm})
        begin_training()
        train_policy(
            town, TownShape.of(town), mind, blank, params, PARAMS.compile, SEED,
            Path(f"{algorithm}.pt"), log,
        )  # fmt: skip
        yield_training()
        told[algorithm] = log.rows
        sizes |= {"imitation_iterations": 0}
    shape, half = TownShape.of(town), town.num_agents // 2
    mine = Selves(mind, shape, blank, 0, half, True)
    theirs = Characters(Scripted(town, None, SEED), half, town.num_agents)
    begin_training()
    returns = play(town, mine, theirs, 4, SEED)
    yield_training()
    return {**told, "returns": returns.mean(0).cpu().tolist()}


def prover(device: torch.device, given: Recorded) -> Told:
    world = build_world(kinship_graph(2, 3), 3, device=device)
    asked, rows = build_prover(world, hidden=16), []
    config = TrainConfig(slots=8, ticks=4, imitation_steps=2, ppo_steps=2, minibatches=1)

    def keep(phase: str, step: int, total: int, numbers: dict[str, Tensor]) -> None:
        rows.append(dict(numbers))

    begin_training()
    told = train_prover(world, asked, config, SEED, keep)
    yield_training()
    del told["training_seconds"]
    graph = world.graph
    questions = pose(graph, world.closure, graph.splits["test"][:8], graph.known())
    begin_training()
    found = rank(world, asked, questions, sampled_negatives(graph, questions, 10, 1), 8)
    yield_training()
    return {"rows": rows, "told": told, "metrics": found.metrics}


WORK: dict[str, Callable[[torch.device, Recorded], Told]] = {
    "perception": perception,
    "world_model": world_model,
    "social": social,
    "policy": policy,
    "prover": prover,
}


# ------------------------------------------------------------------------------------------------
# What is done around it


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


def frozen(module: Any, inputs: dict[str, Tensor], path: Path, extra: dict[str, Any]) -> None:
    """Freeze a module that may be on a device, as its stage does."""
    names = {PERCEPTION: BeliefDistribution._fields, WORLD_MODEL: OUTPUTS}
    outputs = names.get(path, (*SocialPrediction._fields, "recurrent_state"))
    freeze(module, inputs, outputs, path, kind="k", pack="p", upstream={}, extra=extra)


seen: dict[str, dict[str, int]] = {}


def begin_training() -> None:
    """From here on it counts what is waited for and sent."""
    fake_gpu.waits.clear()
    fake_gpu.uploads.clear()


def yield_training() -> None:
    """What was counted since `begin_training`."""
    for kind, counted in (("waits", fake_gpu.waits), ("uploads", fake_gpu.uploads)):
        for place, count in counted.items():
            seen.setdefault(kind, {})[place] = seen.get(kind, {}).get(place, 0) + count
    begin_training()


def plain(value: Any) -> Any:
    """The same with numbers in place of tensors."""
    if isinstance(value, Tensor):
        return value.detach().cpu().tolist()
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list) else value


def done_on(device: torch.device, given: Recorded) -> dict[str, Any]:
    told = {}
    Path(device.type).mkdir()
    os.chdir(device.type)
    for name, work in WORK.items():
        began = time.perf_counter()
        begin_training()
        told[name] = plain(work(device, given))
        print(
            device.type, name, f"{time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True
        )
    os.chdir("..")
    return told


def main(path: str) -> None:
    fake_gpu.install()  # before autograd counts the devices
    prepare_torch(SEED)
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        given = recorded()
        cpu = done_on(torch.device("cpu"), given)
        with fake_gpu.Gpu():
            seen.clear()
            gpu = done_on(torch.device("gpu:0"), given)
    Path(path).write_text(json.dumps({"cpu": cpu, "gpu": gpu, "seen": seen}))


if __name__ == "__main__":
    main(str(Path(sys.argv[1]).absolute()))
