"""Every trainer for two updates, a match and the ranking of proofs, on any device.

What each measures is the same on every device but for rounding. `tests/emulated.py` does it on the
CPU and on a GPU that is emulated, `benchmarks/gpu.py` on a real one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from hamlet.export.frozen import freeze, load_frozen
from hamlet.learning import train_world_model
from hamlet.learning.beliefs import believe
from hamlet.learning.learner import first_state
from hamlet.learning.population import Characters, Selves, play
from hamlet.learning.train_perception import evaluate_perception, train_perception
from hamlet.learning.train_policy import goal_targets, train_policy
from hamlet.learning.train_prover import TrainConfig, build_prover, rank, train_prover
from hamlet.learning.train_social import evaluate_social, train_social, with_labels
from hamlet.learning.train_world_model import evaluate_world_model, experience
from hamlet.modules.agent import Mind
from hamlet.modules.contracts import BeliefDistribution, SocialPrediction, TownShape
from hamlet.modules.menu import imagined_menu
from hamlet.modules.policy import Policy
from hamlet.moving import moved
from hamlet.params import load_params
from hamlet.proofs import build_world
from hamlet.proofs.kinship import kinship_graph
from hamlet.proofs.ranking import pose, sampled_negatives
from hamlet.town import Scripted, Town, load_pack
from hamlet.town.tables import timetable
from stages.collect import PLAYERS, make_town, record
from stages.freeze_perception import example_inputs
from stages.world_model import OUTPUTS

ROOT = Path(__file__).parents[1]
PARAMS = load_params(ROOT / "params.yaml", "tiny")
WORLDS, TICKS, LIFE, SEED = 4, 32, 12, 7
UPDATES = 2
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
    told: Told
    params = PARAMS.perception.model_copy(update={"steps": UPDATES})
    module, heads = train_perception(data, given.training, shape, params, SEED, Path("a.pt"), log)
    note()
    told = {"rows": log.rows}
    told["report"] = evaluate_perception(module, heads, data, given.held_out, 16)
    if device.type != "cpu":  # its file is that of the CPU's training, which loads on either
        return told
    module.cache_odds()
    sizes = {"belief_dim": module.belief_dim, "recurrent_dim": module.recurrent_dim}
    frozen(module, example_inputs(shape, module.recurrent_dim, 4, generator()), PERCEPTION, sizes)
    return told


def world_model(device: torch.device, given: Recorded) -> Told:
    shape, data = TownShape.of(make_town(PARAMS)), moved(given.data, device)
    perceive, card = load_frozen(PERCEPTION, device=device)
    lived = experience(data, believe(perceive, card["recurrent_dim"], data), 0.97)
    log, params = Kept(), PARAMS.world_model.model_copy(update={"steps": UPDATES})
    begin()
    model = train_world_model.train_world_model(
        lived, given.training, shape, PARAMS.perception.latent, params, SEED, Path("b.pt"), log
    )
    note()
    report = evaluate_world_model(
        model, lived, given.held_out, given.training, shape.num_meters, 0.97, SEED
    )
    if device.type != "cpu":
        return {"rows": log.rows, "report": report}
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
    log, params = Kept(), PARAMS.social.model_copy(update={"steps": UPDATES})
    begin()
    model = train_social(labelled, given.training, shape, params, SEED, Path("c.pt"), log)
    note()
    m, d = shape.num_others, card["belief_dim"]
    report = evaluate_social(model, labelled, given.held_out, 16) if m else {}
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


def crossed(first: torch.device, then: torch.device, given: Recorded) -> list[Any]:
    """What module C's second update tells on one device, where the first was on another."""
    shape, log = TownShape.of(make_town(PARAMS)), Kept()
    perceive, card = load_frozen(PERCEPTION)
    labelled = with_labels(given.data, believe(perceive, card["recurrent_dim"], given.data))
    params, file = PARAMS.social.model_copy(update={"steps": 2}), Path(f"to_{then.type}.pt")
    for device, until in ((first, 1), (then, 2)):
        data = moved(labelled, device)
        train_social(data, given.training, shape, params, SEED, file, log, until)
    return plain(log.rows)


def mind_of(town: Any) -> tuple[Callable[[], Mind], Callable[..., Any]]:
    """The frozen A, B and C with a new D, as `stages.policy.make_mind`, of the files made here."""
    shape, device = TownShape.of(town), town.device
    perceive, card = load_frozen(PERCEPTION, device=device)
    imagine, read = (load_frozen(path, device=device) for path in (WORLD_MODEL, SOCIAL))
    posted = timetable(town.pack)
    told = imagined_menu(imagine[0], shape, card["belief_dim"], posted.to(device), 6).cpu()
    recurrent = card["recurrent_dim"], shape.num_others, read[1]["recurrent_dim"]
    dims = *recurrent, shape.num_meters, device

    def new() -> Mind:
        torch.manual_seed(SEED)
        policy = Policy(shape, card["belief_dim"], 16, goal_targets(town), posted, told, 4, 0.2)
        return Mind(perceive, imagine[0], read[0], policy.to(device), 2, 2)

    return new, lambda worlds, agents=shape.num_agents: first_state(worlds, agents, *dims)


def policy(device: torch.device, given: Recorded) -> Told:
    """Two updates each of imitation, of the critic and of PPO, then of IMPALA; and a match."""
    pack = load_pack(PARAMS.town.pack).model_copy(update={"lifespan": LIFE})
    town, told = Town(pack, num_layouts=8, device=device), {}
    sizes: dict[str, Any] = {"worlds": 8, "rollout": 2, "hidden": 16, "minibatches": 2}
    sizes |= {"imitation_iterations": UPDATES, "critic_iterations": 1, "imitation_minibatches": 1}
    sizes |= {"imitation_epochs": 1, "ppo_iterations": 1}
    new, blank = mind_of(town)
    for algorithm in ("ppo", "impala"):
        mind, log = new(), Kept()
        params = PARAMS.policy.model_copy(update=sizes | {"algorithm": algorithm})
        begin()
        train_policy(
            town, TownShape.of(town), mind, blank, params, PARAMS.compile, SEED,
            Path(f"{algorithm}.pt"), log,
        )  # fmt: skip
        note()
        told[algorithm] = log.rows
        sizes |= {"imitation_iterations": 0}
    shape, half = TownShape.of(town), max(1, town.num_agents // 2)
    mine = Selves(mind, shape, blank, 0, half, True)
    theirs = Characters(Scripted(town, None, SEED), half, town.num_agents)
    begin()
    returns = play(town, mine, theirs, 4, SEED)
    note()
    return {**told, "returns": returns}


def prover(device: torch.device, given: Recorded) -> Told:
    world = build_world(kinship_graph(2, 3), 3, device=device)
    asked, rows = build_prover(world, hidden=16), []
    config = TrainConfig(
        slots=8, ticks=4, imitation_steps=UPDATES, ppo_steps=UPDATES, minibatches=1
    )

    def keep(phase: str, step: int, total: int, numbers: dict[str, Tensor]) -> None:
        rows.append(dict(numbers))

    begin()
    told = train_prover(world, asked, config, SEED, keep)
    note()
    del told["training_seconds"]
    graph = world.graph
    questions = pose(graph, world.closure, graph.splits["test"][:8], graph.known())
    begin()
    found = rank(world, asked, questions, sampled_negatives(graph, questions, 10, 1), 8)
    note()
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


watchers: list[Callable[[bool], None]] = []
"""Told False where a trainer begins, and True where it ends."""


def begin() -> None:
    for tell in watchers:
        tell(False)


def note() -> None:
    for tell in watchers:
        tell(True)


def plain(value: Any) -> Any:
    """The same with numbers in place of tensors."""
    if isinstance(value, Tensor):
        return value.detach().cpu().tolist()
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list) else value


def numbers(told: Any, where: str = "") -> Iterator[tuple[str, float]]:
    """Every number in what was told, by the way to it."""
    if isinstance(told, dict | list):
        for key, value in told.items() if isinstance(told, dict) else enumerate(told):
            yield from numbers(value, f"{where}/{key}")
    else:
        yield where, told


def done_on(device: torch.device, given: Recorded) -> Iterator[tuple[str, Any]]:
    """The name of each piece of work with what it told, as it is done."""
    for name, work in WORK.items():
        for file in Path().glob("*.pt"):
            file.unlink()  # a checkpoint of the other device
        began = time.perf_counter()
        begin()
        told = plain(work(device, given))
        print(
            device.type, name, f"{time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True
        )
        yield name, told
