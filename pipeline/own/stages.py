"""The stages of an own world's pipeline, in their order. Each reads params.yaml and what the stages
before it made, and knows their modules only as frozen files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from hamlet.artifacts import HamletError, atomic_path, check_card, write_card, write_json
from hamlet.export.frozen import freeze, load_frozen, prove_parity
from hamlet.own import paths
from hamlet.own.data import (
    Believed,
    Recorder,
    believe,
    loaded,
    of_this_world,
    read_data,
    write_data,
)
from hamlet.own.running import Running, describe, in_words, running
from hamlet.own.train_perception import judge_perception, train_perception
from hamlet.own.train_policy import train_policy
from hamlet.own.train_social import train_social
from hamlet.own.train_world_model import train_world_model
from hamlet.plain.agent import example_inputs
from hamlet.plain.perception import Perception
from hamlet.plain.senses import width
from hamlet.plain.social import Odds
from hamlet.worlds.contract import WorldShape
from hamlet.worlds.lanes import Lanes, legal_at_random, training_seeds

TOLERANCE = 1e-4
COLLECTING, LEARNING = 1, 2  # streams of training seeds


def world(s: Running) -> None:
    """Describe the world as data, after trying it out."""
    described = describe(s.params)
    write_json(paths.WORLD, described)
    for line in in_words(WorldShape.from_dict(described["world"])):
        print(f"world: {line}")


def collect(s: Running) -> None:
    """Record random legal actions."""
    params, rng = s.params.collect, np.random.default_rng((s.params.seed, COLLECTING))
    seeds = training_seeds(s.params.seed, COLLECTING)
    lanes = Lanes(s.maker(), params.lanes, seeds, s.params.world.longest)
    recorder = Recorder()
    for _ in s.steps(max(1, params.ticks // params.lanes), 0):
        recorder.step(lanes, legal_at_random(lanes.now.mask, rng))
    lanes.close()
    data = recorder.data()
    write_data(paths.DATASET, data, s.world, {"world": s.world})
    returns = [float(np.mean(x)) for x in lanes.returns]
    s.write(
        {
            "ticks": len(recorder.rows) * params.lanes,
            "episodes": len(returns),
            "mean_return": float(np.mean(returns)) if returns else None,
            "mean_length": float(np.mean(lanes.lengths)) if returns else None,
        }
    )


def perception(s: Running) -> None:
    """Train module A."""
    data, card = read_data(paths.DATASET, s.world)
    file = s.checkpoint(s.params.perception, card["sha256"])
    module, heads = train_perception(s.shape, data, s.params.perception, s.params.seed, file, s)
    with atomic_path(paths.PERCEPTION_WEIGHTS) as temporary:
        torch.save(module.state_dict(), temporary)
    write_card(
        paths.PERCEPTION_WEIGHTS, "perception weights", {}, {"dataset": card["sha256"]}, s.world,
        {"hidden": s.params.perception.hidden},
    )  # fmt: skip
    s.write(judge_perception(s.shape, data, module, heads))


def freeze_perception(s: Running) -> None:
    """One tick of A as a frozen graph, proved equal to the module."""
    card = check_card(paths.PERCEPTION_WEIGHTS)
    of_this_world(paths.PERCEPTION_WEIGHTS, card, s.world)
    weights = torch.load(paths.PERCEPTION_WEIGHTS, weights_only=True)
    blank = {
        f.name: {"mean": torch.zeros(width(f)), "std": torch.ones(width(f))}
        for f in s.shape.fields
        if f.kind != "codes"
    }
    module = Perception(s.shape, blank, card["hidden"]).eval()
    module.load_state_dict(weights)
    names = [*(f.name for f in s.shape.fields), "acted", "belief"]

    def draw(batch: int, rng: torch.Generator) -> tuple[torch.Tensor, ...]:
        tensors = example_inputs(s.shape, card["hidden"], batch, rng)
        fields, state = tensors[: len(s.shape.fields)], tensors[-3:]
        acted = torch.randint(s.shape.num_actions + 1, (batch,), generator=rng)
        return (*fields, acted, state[0])

    parity = _frozen(
        s, module, dict(zip(names, draw(4, torch.Generator().manual_seed(0)), strict=True)),
        ["features", "new_belief"], paths.PERCEPTION, "perception",
        {"weights": card["sha256"], **card["upstream"]},
        {"features": module.senses.width, "hidden": card["hidden"]}, draw,
        {len(names) - 1: 1},
    )  # fmt: skip
    s.write(parity)


def policy(s: Running) -> None:
    """Train module D on the frozen A, and freeze it; its last play is kept for B and C."""
    perceive, card = loaded(paths.PERCEPTION, s.world)
    seeds = training_seeds(s.params.seed, LEARNING)
    lanes = Lanes(s.maker(), s.params.policy.lanes, seeds, s.params.world.longest)
    sizes = (card["features"], card["hidden"])
    file = s.checkpoint(s.params.policy, card["sha256"])
    learned = train_policy(lanes, perceive, sizes, s.params.policy, s.params.seed, file, s)
    lanes.close()
    write_data(paths.PLAYED, learned.played, s.world, {"perception": card["sha256"]})
    extra = {"value_scale": learned.scale}
    names = ["logits", "value"]
    parity = _frozen_head(s, learned.policy, card, names, paths.POLICY, "policy", extra)
    s.write(learned.numbers | parity)


def world_model(s: Running) -> None:
    """Train module B on the frozen A, with random play and D's, and freeze it."""
    data, _ = read_data(paths.DATASET, s.world)
    perceive, card = loaded(paths.PERCEPTION, s.world)
    collected = (data, believe(perceive, s.shape, data, card["hidden"]))
    last = read_played(s, card)
    played = (last, Believed(*(last[name] for name in Believed._fields)))
    gamma = s.params.policy.gamma
    file = s.checkpoint(
        s.params.world_model,
        str(gamma),
        *(check_card(p)["sha256"] for p in (paths.DATASET, paths.PLAYED)),
    )
    module, numbers = train_world_model(
        s.shape, collected, played, s.params.world_model, gamma, s.params.seed, file, s
    )
    names = ["reward", "going_on", "value", "uncertainty"]
    parity = _frozen_head(s, module, card, names, paths.WORLD_MODEL, "world_model")
    s.write(numbers | parity)


def read_played(s: Running, perception: dict[str, Any]) -> dict[str, torch.Tensor]:
    """D's play, as `policy` kept it.

    Args:
        perception: the card of the frozen A.

    Raises:
        HamletError: it is missing, corrupt or was seen through another A.
    """
    data, card = read_data(paths.PLAYED, s.world)
    if card["upstream"]["perception"] != perception["sha256"]:
        raise HamletError(
            f"{paths.PLAYED} was seen through another {paths.PERCEPTION}", "run `dvc repro`"
        )
    return data


def social(s: Running) -> None:
    """Train module C on the policy's last play, and freeze it: how the others play now.

    While they play at random there is nothing to tell of them.
    """
    perceive_card = loaded(paths.PERCEPTION, s.world)[1]
    data = read_played(s, perceive_card)
    file = s.checkpoint(s.params.social, check_card(paths.PLAYED)["sha256"])
    module, numbers = train_social(s.shape, data, s.params.social, s.params.seed, file, s)
    names = ["next_action_of_others"]
    parity = _frozen_head(s, Odds(module), perceive_card, names, paths.SOCIAL, "social")
    s.write(numbers | parity)


def _frozen_head(
    s: Running,
    module: nn.Module,
    card: dict[str, Any],
    outputs: list[str],
    path: Path,
    kind: str,
    extra: dict[str, Any] | None = None,
) -> dict[str, float]:
    """Freeze what reads features and belief."""

    def draw(batch: int, rng: torch.Generator) -> tuple[torch.Tensor, ...]:
        sizes = (card["features"], card["hidden"])
        return tuple(torch.randn(batch, size, generator=rng) for size in sizes)

    inputs = dict(zip(("features", "belief"), draw(4, torch.Generator().manual_seed(0))))
    upstream = {"perception": card["sha256"]}
    return _frozen(s, module, inputs, outputs, path, kind, upstream, extra or {}, draw, {})


def _frozen(
    s: Running,
    module: nn.Module,
    inputs: dict[str, torch.Tensor],
    outputs: list[str],
    path: Path,
    kind: str,
    upstream: dict[str, str],
    extra: dict[str, Any],
    draw: Callable[[int, torch.Generator], tuple[torch.Tensor, ...]],
    states: dict[int, int],
) -> dict[str, float]:
    """Freeze a module and prove that the file is the module; returns the differences."""
    freeze(module, inputs, outputs, path, kind=kind, pack=s.world, upstream=upstream, extra=extra)
    graph, _ = load_frozen(path)
    parity = prove_parity(module.eval(), graph, draw, states, ticks=8, seed=s.params.seed)
    if max(parity.values()) > TOLERANCE:
        path.unlink()
        raise HamletError(
            f"the frozen {kind} differs from the module by {max(parity.values()):.2g}",
            "run `hamlet doctor`: this torch build exports a wrong graph",
        )
    return {f"parity_{name}": value for name, value in parity.items()}


def stages() -> dict[str, Callable[[Running], None]]:
    """All stages by name, in their order."""
    from hamlet.own.assembling import agent
    from hamlet.own.evaluating import evaluate
    from hamlet.own.registering import register

    return {
        "world": world, "collect": collect, "perception": perception,
        "freeze_perception": freeze_perception, "policy": policy, "world_model": world_model,
        "social": social, "agent": agent, "evaluate": evaluate, "register": register,
    }  # fmt: skip


def run(name: str) -> None:
    """Run one stage of the project in this folder.

    Raises:
        HamletError: no such stage, or what it says.
    """
    known = stages()
    if name not in known:
        raise HamletError(f"there is no stage `{name}`", f"it is one of {', '.join(known)}")
    with running(name) as s:
        known[name](s)
