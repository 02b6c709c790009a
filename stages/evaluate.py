"""evaluate: the ONNX file itself plays held-out worlds; its score stands beside its baselines'."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from hamlet.artifacts import atomic_path, read_json, write_json
from hamlet.learning.rollout import Record, evaluate, fused_step
from hamlet.modules.contracts import UNCERTAINTY_REASONS
from hamlet.params import Params
from hamlet.serving.agent import STATE, Arrays, OnnxAgent
from hamlet.town import Scripted, Town, render_png, save_gif
from stages import paths
from stages.collect import make_town
from stages.common import cores, prepare_torch, progress, stage
from stages.meanwhile import meanwhile
from stages.report import write_report

EVALUATION_SEED = 5  # added to the seed: worlds that no other stage plays
BASELINES = (
    "random", "rest", "expert_sightings", "expert_searching", "expert_watching", "expert",
)  # fmt: skip
SCORE = (  # what DVC shows of an experiment; all else is in evaluate.json
    "normalised_score", "mean_return", "share_of_expert", "ratio_over_rest", "retired_fraction",
    "survival",
)  # fmt: skip
BOOTSTRAPS = 2000
NOVEL = UNCERTAINTY_REASONS.index("novel_state")
CHANGED_WORLDS = 16
APART = 16  # worlds from which on the scripted players live in a process of their own


def other_towns(town: Town, layouts: int, seed: int) -> dict[str, Town]:
    """Towns like `town` but of rules that the agent never met, which it should notice."""
    pack = town.pack
    changes: dict[str, dict[str, Any]] = {
        "needs_doubled": {"depletion_multiplier": 2 * pack.depletion_multiplier},
        "uses_halved": {
            "affordances": tuple(
                place.model_copy(update={"quality": place.quality / 2})
                for place in pack.affordances
            )
        },
    }
    return {
        name: Town(pack.model_copy(update=change), num_layouts=layouts, layout_seed=seed)
        for name, change in changes.items()
    }


class OnnxPlayers:
    """All agents of all worlds as one batch of the exported graph, as a `Player`.

    Its memory is the graph's state, each case beginning with random numbers of its own.
    """

    def __init__(self, agent: OnnxAgent, town: Town, cases: int) -> None:
        self.agent, self.town = agent, town
        self.first = agent.start(cases * town.num_agents, EVALUATION_SEED)

    def start(self, slots: int) -> Arrays:
        return {name: value[: slots * self.town.num_agents] for name, value in self.first.items()}

    def act(
        self, world: TensorDict, seen: TensorDict, memory: Arrays
    ) -> tuple[Tensor, Arrays, Record]:
        fields = {
            name: seen[name].flatten(0, 1).numpy()
            for name in self.agent.inputs
            if not name.startswith(STATE)
        }
        decision = self.agent.act(fields, memory)
        thinks = (decision.thoughts["imagination_confidence"] > 0).any(1)
        novel = thinks & (decision.thoughts["uncertainty_reason"] == NOVEL).all(1)

        def by_world(each: np.ndarray) -> Tensor:
            return torch.from_numpy(each).unflatten(0, (-1, self.town.num_agents))

        seen_by = {"thinks": thinks, "novel": novel}
        record = {name: by_world(each) & world["alive"] for name, each in seen_by.items()}
        return by_world(decision.action), decision.state, record

    def outcome(
        self, before: TensorDict, after: TensorDict, memory: Arrays
    ) -> tuple[Arrays, Record]:
        begun = after["episode_over"] & ~after["over"]
        if bool(begun.any()):
            agents = torch.arange(self.town.num_agents)
            to = (begun.nonzero() * self.town.num_agents + agents).flatten().numpy()
            cases = after["world"][begun].unsqueeze(-1)
            first = (cases * self.town.num_agents + agents).flatten().numpy()
            memory = {name: value.copy() for name, value in memory.items()}
            for name, value in memory.items():
                value[to] = self.first[name][first]
        return memory, life_of(before, after)


class ScriptedPlayers:
    """A scripted character in every place, as a `Player`."""

    def __init__(self, scripted: Scripted) -> None:
        self.scripted = scripted

    def act(
        self, world: TensorDict, seen: TensorDict, memory: TensorDict
    ) -> tuple[Tensor, TensorDict, Record]:
        actions, _, memory = self.scripted.act(world, memory)
        return actions, memory, {}

    def outcome(
        self, before: TensorDict, after: TensorDict, memory: TensorDict
    ) -> tuple[TensorDict, Record]:
        return memory, life_of(before, after)


def life_of(before: TensorDict, after: TensorDict) -> Record:
    """What is added up over a life, each [B, N]: reward, ticks lived, and whether it retired."""
    return {"returns": after["reward"], "ticks": before["alive"], "retired": after["retired"]}


def bootstrap_ratio(a: Tensor, b: Tensor, seed: int) -> tuple[float, float]:
    """95 % interval of mean(a) / mean(b), resampling paired worlds."""
    rng = torch.Generator().manual_seed(seed)
    index = torch.randint(len(a), (BOOTSTRAPS, len(a)), generator=rng)
    ratios = a[index].mean(1) / b[index].mean(1)
    low, high = ratios.quantile(torch.tensor([0.025, 0.975], dtype=ratios.dtype)).tolist()
    return low, high


def live(
    town: Town,
    player: Any,
    memory: Any,
    worlds: int,
    seed: int,
    name: str | None,
    watch: Callable[[TensorDict], None] | None = None,
) -> dict[str, Tensor]:
    """What a player records of one life in each of the worlds of a town in `eval` mode.

    Args:
        name: of the player or the town, for the progress bar; None: there is none.
        watch: told the state before every tick.
    """
    bar: Any = iter(progress(town.lifespan, f"evaluate: {name}") if name else ())

    def tick(world: TensorDict) -> None:
        next(bar, None)
        if watch:
            watch(world)

    lived = evaluate(town, fused_step(town, player), memory, worlds, worlds, seed, tick)
    next(bar, None)
    return lived


def novel_share(lived: Mapping[str, Tensor]) -> float:
    """Of the deliberations of alive agents, those in which every future was of a novel state."""
    return (lived["novel"].sum() / lived["thinks"].sum().clamp_min(1)).item()


def lead(agent: Tensor, player: Tensor) -> dict[str, float]:
    """How much more the agent got than somebody else in the same worlds, and half of the 95 %
    interval of it."""
    more = agent - player
    half = 1.96 * more.std().item() / len(more) ** 0.5
    return {"agent_leads": more.mean().item(), "agent_leads_ci95": half}


def scores(lives: dict[str, dict[str, Tensor]], seed: int) -> dict[str, Any]:
    """What the players' lives say about the agent; `lives` by player, as `live` returns them."""
    by_world = {name: played["returns"].mean(1) for name, played in lives.items()}
    mean = {name: values.mean().item() for name, values in by_world.items()}
    low, high = bootstrap_ratio(by_world["agent"], by_world["rest"], seed)
    span = mean["expert"] - mean["rest"]
    normalised = (by_world["agent"] - mean["rest"]) / span
    margin = 1.96 * normalised.std().item() / len(normalised) ** 0.5
    score = normalised.mean().item()
    return {
        "mean_return": mean["agent"],
        "rest_return": mean["rest"],
        "ratio_over_rest": mean["agent"] / mean["rest"],
        "ratio_over_rest_ci95": [low, high],
        "normalised_score": score,
        "normalised_score_ci95": [score - margin, score + margin],
        "retired_fraction": lives["agent"]["retired"].mean().item(),
        "survival": lives["agent"]["ticks"].mean().item(),
        "share_of_expert": mean["agent"] / mean["expert"],
        "share_of_expert_ci95": bootstrap_ratio(by_world["agent"], by_world["expert"], seed),
        "scores": {
            name: {
                "mean_return": mean[name],
                **lead(by_world["agent"], by_world[name]),
                "survival": played["ticks"].mean().item(),
                "retired_fraction": played["retired"].mean().item(),
            }
            for name, played in lives.items()
        },
    }


def played(params: Params, shown: bool) -> dict[str, Any]:
    """The `lives` of the scripted players, by name, in the worlds that the agent plays too; and
    what the agent `noticed` in `other_towns`, the share of its thoughts that were of a novel state.

    Args:
        shown: whether there is a progress bar.
    """
    prepare_torch(params.seed)
    town, worlds = make_town(params, held_out=True), params.evaluate.worlds
    seed = params.seed + EVALUATION_SEED
    town.eval(worlds)
    lives, noticed = {}, {}
    for name in BASELINES:
        player: Any = ScriptedPlayers(Scripted(town, [name], seed))
        memory = player.scripted.reset(town.reset(seed, worlds))
        lives[name] = live(town, player, memory, worlds, seed, name if shown else None)
    agent, few = OnnxAgent(paths.AGENT), min(CHANGED_WORLDS, worlds)
    for name, other in other_towns(town, worlds, seed).items():
        other.eval(few)
        player = OnnxPlayers(agent, other, few)
        lived = live(other, player, player.start(few), few, seed, name if shown else None)
        noticed[f"novel_fraction_{name}"] = novel_share(lived)
    return {"lives": lives, "noticed": noticed}


def scripted_lives(params: Params) -> Callable[[], dict[str, Any]]:
    """Begin `played`, in a process of its own where that is worth the seconds that one takes to
    start; call what is returned for its result."""
    if params.evaluate.worlds < APART:
        return partial(played, params, True)
    return meanwhile(played, params)


def main() -> None:
    with stage("evaluate") as s:
        others = scripted_lives(s.params)
        params = s.params.evaluate
        town = make_town(s.params, held_out=True)
        agent = OnnxAgent(paths.AGENT, threads=max(1, cores() - 1))
        seed = s.params.seed + EVALUATION_SEED
        town.eval(params.worlds)
        frames: list[TensorDict] = []

        def film(world: TensorDict) -> None:
            frames.append(world[:1])

        player = OnnxPlayers(agent, town, params.worlds)
        of_agent = live(
            town, player, player.start(params.worlds), params.worlds, seed, "agent", film
        )
        shown = progress(frames[: params.gif_ticks], "evaluate: the episode's picture")
        save_gif([render_png(town, frame, 0) for frame in shown], paths.EPISODE)
        told = others()
        noticed = {"novel_fraction": novel_share(of_agent), **told["noticed"]}
        lives = {**told["lives"], "agent": of_agent}
        by_world = {name: lived["returns"].mean(1) for name, lived in lives.items()}
        numbers = {"agent_sha256": agent.card["sha256"], **scores(lives, seed), **noticed}
        write_json(paths.metrics("evaluate"), numbers)
        write_json(paths.metrics("score"), {name: numbers[name] for name in SCORE})
        s.run.metrics(
            {k: v for k, v in numbers.items() if isinstance(v, float)}
            | {f"return_{name}": values.mean().item() for name, values in by_world.items()}
        )
        rows = ["player,world,return"] + [
            f"{name},{i},{value:.6g}"
            for name, values in by_world.items()
            for i, value in enumerate(values.tolist())
        ]
        with atomic_path(paths.curve("returns")) as temporary:
            temporary.write_text("\n".join(rows) + "\n")
        write_report(
            paths.REPORT,
            {
                name: read_json(paths.metrics(name))
                for name in (
                    "perception", "freeze_perception", "world_model", "social", "policy",
                    "population", "agent", "evaluate",
                )
            },
        )  # fmt: skip
        s.run.artifact(paths.EPISODE)
        s.run.artifact(paths.REPORT)


if __name__ == "__main__":
    main()
