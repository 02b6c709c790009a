"""evaluate: the ONNX file itself plays held-out worlds; its score stands beside its baselines'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from tensordict import TensorDict
from torch import Tensor

from pipeline.files import atomic_path, read_json, write_json
from pipeline.serving.agent import OnnxAgent
from pipeline.town import Scripted, Town, render_png
from stages import paths
from stages.collect import make_town
from stages.common import progress, stage, threads
from stages.report import write_report

EVALUATION_SEED = 5  # added to the seed: worlds that no other stage plays
BASELINES = ("random", "rest", "expert")
BOOTSTRAPS = 2000

Player = Callable[[TensorDict], Tensor]


def onnx_player(agent: OnnxAgent, town: Town) -> Player:
    """All agents of all worlds as one batch of the exported graph, its state carried along."""
    state: dict[str, np.ndarray] = {}

    def play(world: TensorDict) -> Tensor:
        nonlocal state
        obs = town.observe(world)
        fields = {
            name: obs[name].flatten(0, 1).numpy()
            for name in agent.inputs
            if not name.startswith("state_")
        }
        state = state or agent.start(len(fields["action_mask"]), EVALUATION_SEED)
        decision = agent.act(fields, state)
        state = decision.state
        return torch.from_numpy(decision.action).unflatten(0, (-1, town.num_agents))

    return play


def scripted_player(town: Town, name: str, seed: int, world: TensorDict) -> Player:
    players = Scripted(town, [name], seed)
    memory = players.reset(world)

    def play(world: TensorDict) -> Tensor:
        nonlocal memory
        actions, _, memory = players.act(world, memory)
        return actions

    return play


class Lives(NamedTuple):
    """One life of every agent of every world."""

    returns: Tensor
    """float32 [B, N] sum of rewards."""
    ticks: Tensor
    """float32 [B, N] ticks lived."""
    retired: Tensor
    """bool [B, N]."""
    frames: list[TensorDict]
    """The first world at every tick, for the picture."""


def play_lives(town: Town, world: TensorDict, play: Player, name: str) -> Lives:
    """Play every world from its first tick until nobody can be alive."""
    returns = torch.zeros(world["alive"].shape)
    ticks, retired = returns.clone(), returns.bool()
    frames = [world[:1]]
    for _ in progress(town.lifespan, f"evaluate: {name}"):
        ticks += world["alive"].float()
        world = town.step_core(world, play(world))
        returns += world["reward"]
        retired |= world["retired"]
        frames.append(world[:1])
    return Lives(returns, ticks, retired, frames)


def bootstrap_ratio(a: Tensor, b: Tensor, seed: int) -> tuple[float, float]:
    """95 % interval of mean(a) / mean(b), resampling paired worlds."""
    rng = torch.Generator().manual_seed(seed)
    index = torch.randint(len(a), (BOOTSTRAPS, len(a)), generator=rng)
    ratios = a[index].mean(1) / b[index].mean(1)
    low, high = ratios.quantile(torch.tensor([0.025, 0.975])).tolist()
    return low, high


def save_gif(town: Town, frames: list[TensorDict], path: Any) -> None:
    images = [render_png(town, frame, 0).quantize(64, dither=Image.Dither.NONE) for frame in frames]
    with atomic_path(path) as temporary:
        images[0].save(temporary, save_all=True, append_images=images[1:], duration=180, loop=0)


def main() -> None:
    with stage("evaluate") as s:
        params = s.params.evaluate
        town = make_town(s.params, held_out=True)
        agent = OnnxAgent(paths.AGENT, threads=threads())
        seed = s.params.seed + EVALUATION_SEED
        world = town.reset(seed, params.worlds)
        lives = {}
        for name in (*BASELINES, "agent"):
            player = (
                onnx_player(agent, town)
                if name == "agent"
                else scripted_player(town, name, seed, world)
            )
            lives[name] = play_lives(town, world, player, name)
        by_world = {name: played.returns.mean(1) for name, played in lives.items()}
        mean = {name: values.mean().item() for name, values in by_world.items()}
        low, high = bootstrap_ratio(by_world["agent"], by_world["rest"], seed)
        span = mean["expert"] - mean["rest"]
        normalised = (by_world["agent"] - mean["rest"]) / span
        margin = 1.96 * normalised.std().item() / len(normalised) ** 0.5
        score = normalised.mean().item()
        numbers = {
            "agent_sha256": agent.card["sha256"],
            "mean_return": mean["agent"],
            "rest_return": mean["rest"],
            "ratio_over_rest": mean["agent"] / mean["rest"],
            "ratio_over_rest_ci95": [low, high],
            "normalised_score": score,
            "normalised_score_ci95": [score - margin, score + margin],
            "retired_fraction": lives["agent"].retired.float().mean().item(),
            "survival": lives["agent"].ticks.mean().item(),
            "scores": {
                name: {
                    "mean_return": mean[name],
                    "survival": played.ticks.mean().item(),
                    "retired_fraction": played.retired.float().mean().item(),
                }
                for name, played in lives.items()
            },
        }
        write_json(paths.metrics("evaluate"), numbers)
        s.run.metrics(
            {k: v for k, v in numbers.items() if isinstance(v, float)}
            | {f"return_{name}": value for name, value in mean.items()}
        )
        rows = ["player,world,return"] + [
            f"{name},{i},{value:.6g}"
            for name, values in by_world.items()
            for i, value in enumerate(values.tolist())
        ]
        with atomic_path(paths.curve("returns")) as temporary:
            temporary.write_text("\n".join(rows) + "\n")
        save_gif(town, lives["agent"].frames[: params.gif_ticks], paths.EPISODE)
        write_report(
            paths.REPORT,
            {
                name: read_json(paths.metrics(name))
                for name in (
                    "perception", "freeze_perception", "world_model", "social", "policy", "agent",
                    "evaluate",
                )
            },
        )  # fmt: skip
        s.run.artifact(paths.EPISODE)
        s.run.artifact(paths.REPORT)


if __name__ == "__main__":
    main()
