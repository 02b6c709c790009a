"""Stage `evaluate`: the ONNX file itself plays held-out episodes; so does random play."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from hamlet.artifacts import atomic_path, read_json
from hamlet.own import paths
from hamlet.own.running import Running
from hamlet.serving.agent import OnnxAgent
from hamlet.worlds.contract import MASK, World
from hamlet.worlds.lanes import HELD_OUT, Lanes, Now, legal_at_random

DRAWS = 2000
RNG = 2**31 - 2
CONSTANT = 1e-5  # a trivial error below it: there is nothing to tell


class Player:
    """The exported agent in lanes: one life in each slot, begun with random numbers of its case."""

    def __init__(self, agent: OnnxAgent, agents: int) -> None:
        self.agent, self.agents = agent, agents
        self.state: dict[str, np.ndarray] = {}

    def act(self, now: Now, cases: np.ndarray) -> np.ndarray:
        """int64 [S] actions; `cases` int64 [S] says which episode each slot is in."""
        if not self.state:
            self.state = self.agent.start(len(now.alive))
        begins = np.flatnonzero(now.first)
        for name in self.state:
            self.state[name][begins] = 0
        numbers = (cases * self.agents + np.arange(len(cases)) % self.agents) * 7919
        self.state["state_rng"][begins] = numbers[begins] % RNG
        fields = dict(now.fields)
        if MASK in self.agent.inputs:
            fields[MASK] = now.mask | ~now.alive[:, None]
        decision = self.agent.act(fields, self.state)
        self.state = {name: x.copy() for name, x in decision.state.items()}
        return decision.action


class AtRandom:
    """Uniform over the legal actions, by chances that belong to the case."""

    def __init__(self, agents: int) -> None:
        self.agents = agents
        self.chances: dict[int, np.random.Generator] = {}

    def act(self, now: Now, cases: np.ndarray) -> np.ndarray:
        """int64 [S] actions."""
        actions = []
        for lane, case in enumerate(cases[:: self.agents]):
            if case not in self.chances:
                self.chances[case] = np.random.default_rng((1, int(case)))
            own = slice(lane * self.agents, (lane + 1) * self.agents)
            actions.append(legal_at_random(now.mask[own], self.chances[case]))
        return np.concatenate(actions)


def play_cases(
    make: Callable[[], World], player: Player | AtRandom, episodes: int, lanes: int, longest: int
) -> tuple[np.ndarray, np.ndarray]:
    """Play the held-out episodes, each exactly once.

    Returns:
        returns float [E, N] and lengths int [E], by case; whatever the number of lanes.
    """
    lanes = min(lanes, episodes)
    begun: list[int] = []

    def seeds() -> Iterator[int]:
        case = 0
        while True:
            begun.append(case)
            yield HELD_OUT + case
            case += 1

    side = Lanes(make, lanes, seeds(), longest)
    n = side.shape.num_agents
    case = np.arange(lanes)
    returns, lengths = np.full((episodes, n), np.nan), np.zeros(episodes, int)
    left, finished = episodes, 0
    while left:
        row = side.step(player.act(side.now, np.repeat(case, n)))
        for lane in np.flatnonzero(row.over):
            if case[lane] < episodes:
                returns[case[lane]] = side.returns[finished]
                lengths[case[lane]] = side.lengths[finished]
                left -= 1
            finished += 1
            case[lane] = finished + lanes - 1
    side.close()
    return returns, lengths


def interval(values: np.ndarray) -> list[float]:
    """The 95 % interval of a mean, by bootstrap over episodes [E]."""
    rng = np.random.default_rng(0)
    means = values[rng.integers(len(values), size=(DRAWS, len(values)))].mean(1)
    return [float(x) for x in np.quantile(means, [0.025, 0.975])]


def evaluate(s: Running) -> None:
    """Scores of the file beside random play, and a report of all modules."""
    params, longest = s.params.evaluate, s.params.world.longest
    agent = OnnxAgent(paths.AGENT)
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    players: dict[str, Player | AtRandom] = {
        "agent": Player(agent, s.shape.num_agents), "random": AtRandom(s.shape.num_agents)
    }  # fmt: skip
    for name, player in players.items():
        found[name] = play_cases(s.maker(), player, params.episodes, params.lanes, longest)
    returns = {name: x.mean(1) for name, (x, _) in found.items()}
    above = returns["agent"] - returns["random"]
    numbers: dict[str, Any] = {
        "agent_sha256": agent.sha,
        "episodes": params.episodes,
        "mean_return": float(returns["agent"].mean()),
        "mean_return_ci95": interval(returns["agent"]),
        "mean_length": float(found["agent"][1].mean()),
        "random_return": float(returns["random"].mean()),
        "above_random": float(above.mean()),
        "above_random_ci95": interval(above),
        "by_agent": dict(zip(s.shape.agents, found["agent"][0].mean(0).tolist(), strict=True)),
        "random_by_agent": dict(
            zip(s.shape.agents, found["random"][0].mean(0).tolist(), strict=True)
        ),
    }
    if params.best is not None and params.best != numbers["random_return"]:
        span = params.best - numbers["random_return"]
        numbers["normalised_score"] = numbers["above_random"] / span
    with atomic_path(paths.RETURNS) as temporary, temporary.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["case", "player", "return", "length"])
        for name in found:
            for case, (value, length) in enumerate(zip(returns[name], found[name][1])):
                writer.writerow([case, name, f"{value:.6g}", length])
    s.write(numbers)
    write_report(s, numbers)
    s.run.artifact(paths.REPORT)


TOLD = {
    "perception": (
        ("what is observed next", "next_error", "next_error_nothing_changes", "nothing changes"),
        ("reward", "reward_error", "reward_error_mean", "the mean"),
        ("life goes on", "going_on_loss", "going_on_loss_mean", "the mean chance"),
        ("what was observed earlier", "recall_error", "recall_error_mean", "the mean"),
    ),
    "world_model": (
        ("what changes", "change_error", "change_error_nothing_changes", "nothing changes"),
        ("reward", "reward_error", "reward_error_mean", "the mean"),
        ("life goes on", "going_on_loss", "going_on_loss_mean", "the mean chance"),
        ("return", "value_error", "value_error_mean", "the mean"),
    ),
    "social": (("others' next actions, nats", "nats", "nats_commonest", "their odds"),),
}


def write_report(s: Running, numbers: Mapping[str, Any]) -> None:
    """`artifacts/report.md`: scores, and each module beside who knows nothing."""
    low, high = numbers["mean_return_ci95"]
    lines = [
        f"# {s.shape.name}",
        "",
        f"{numbers['episodes']} held-out episodes: mean return {numbers['mean_return']:.4g} (95 % "
        f"from {low:.4g} to {high:.4g}), random play {numbers['random_return']:.4g}.",
        "",
        "Held-out errors (lower is better) beside who knows nothing:",
        "",
        "| module | what it tells | error | trivial | which is |",
        "| --- | --- | --- | --- | --- |",
    ]
    for stage, rows in TOLD.items():
        if not paths.metrics(stage).exists():
            continue
        told = read_json(paths.metrics(stage))
        for what, own, trivial, which in rows:
            if told.get(own) is not None and told.get(trivial) is not None:
                a, b = told[own], told[trivial]
                if b < CONSTANT:
                    lines.append(f"| {stage} | {what} | {a:.4g} | | always the same |")
                    continue
                lines.append(f"| {stage} | {what} | {a:.4g} | {b:.4g} | {which} |")
    with atomic_path(paths.REPORT) as temporary:
        temporary.write_text("\n".join([*lines, ""]), encoding="utf-8")
