"""Our agent beside Stable-Baselines3 in worlds that are not the town, at equal steps.

    python -m benchmarks.own_worlds [--worlds cartpole t_maze ...] [--seeds 0 1 2] [--players ...]

A cell is a world, a player and a seed. `hamlet` is what `hamlet new` and `dvc repro` make, with the
parameters that `hamlet new` writes: stages `world` to `agent` run in an empty folder, and the ONNX
file plays. The others are in `benchmarks.own_worlds_peers`, and our own PPO without the stages in
`benchmarks.own_worlds_ours`. Everyone gets TICKS ticks of the world, our random ones counted, sees
the same scaled observations and plays the same 200 held-out episodes with actions drawn from its
odds.

Scores are from 0 (random play) to 1 (the best return known). In tag each side is judged against
random play of the other side, as a fixed opponent, and the score is the mean of both sides; its
best is the best that any player here got.

Finished cells are kept in benchmarks/results/own_worlds.json and are not run again, unless
`--again` asks for them; the table is own_worlds.md beside it. Needs the extras `bench`, `worlds`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from hamlet.artifacts import atomic_path, read_json, write_json

RESULTS = Path(__file__).parent / "results"
TICKS = 32_768  # of the world, for everyone: whole rollouts of every player
RANDOM_TICKS = 4096  # of them, that ours plays at random
EPISODES, LANES, LONGEST = 200, 16, 10_000
SEEDS = 3  # that the gate asks for
MARGIN = 0.05  # by which our mean may lie below another's
CLEARLY = 0.1  # by which it must lie above the feed-forward one where much is hidden
OURS, RANDOM = "hamlet", "random"
THEIRS = ("sb3_ppo", "sb3_recurrent_ppo")
FEED_FORWARD, STACKED = "hamlet_without_a", "hamlet_stacked"
END_TO_END = "hamlet_end_to_end"
WITHOUT_STAGES = (FEED_FORWARD, STACKED, END_TO_END)
PLAYERS = (OURS, *WITHOUT_STAGES, *THEIRS)


class Game(NamedTuple):
    """A world of the comparison.

    Attributes:
        what: for people.
        best: the best return known; None: the best of this table.
        hidden: whether much of it is hidden, so that memory must pay.
        sides: slots that are judged together, against random play of all others.
    """

    what: str
    best: float | None
    hidden: bool
    sides: tuple[tuple[int, ...], ...] = ((0,),)


GAMES = {
    "cartpole": Game("CartPole without its velocities", 500.0, True),
    "t_maze": Game("T-maze, the sign at the first tick (examples/own_gymnasium)", 0.92, True),
    "late_sign": Game("T-maze, the sign at a random tick from 2 to 5", 0.92, True),
    "tag": Game("simple_tag (examples/own_pettingzoo)", None, False, ((0, 1, 2), (3,))),
}


# ------------------------------------------------------------------------------------------------
# A cell


class Untracked:
    """In place of MLflow's run: keeps nothing."""

    def metrics(self, *_: Any) -> None:
        pass

    def artifact(self, *_: Any) -> None:
        pass


class Beside:
    """A player in some slots of every world, random play in the others."""

    def __init__(self, player: Any, slots: Sequence[int], agents: int) -> None:
        from hamlet.own.evaluating import AtRandom

        self.player, self.others = player, AtRandom(agents)
        self.own = np.isin(np.arange(agents), slots)

    def act(self, now: Any, cases: np.ndarray) -> np.ndarray:
        """int64 [S] actions."""
        theirs, own = self.others.act(now, cases), self.player.act(now, cases)
        return np.where(np.tile(self.own, len(cases) // len(self.own)), own, theirs)


def project(world: str, seed: int) -> Any:
    """Write params.yaml in this folder as `hamlet new` would, for TICKS in all; returns them."""
    from hamlet.own.params import load_own_params
    from hamlet.own.project import params_text
    from hamlet.worlds.opening import open_world

    make = f"python:benchmarks.own_worlds_made.{world}"
    opened = open_world(make)
    text = params_text(make, opened.shape, "benchmark")
    opened.close()
    Path("params.yaml").write_text(text, encoding="utf-8")
    params = load_own_params()
    lengths = {"collect": RANDOM_TICKS, "policy": TICKS - RANDOM_TICKS}
    return params.model_copy(
        update={"seed": seed}
        | {
            name: getattr(params, name).model_copy(update={"ticks": ticks})
            for name, ticks in lengths.items()
        }
    )


def run_stages(names: Sequence[str], params: Any) -> None:
    """Run stages in this folder as `hamlet own` does, without MLflow."""
    import torch

    from hamlet.learning.precision import set_precision
    from hamlet.own.running import Running
    from hamlet.own.stages import stages

    known = stages()
    for name in names:
        torch.manual_seed(params.seed)
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        set_precision()
        run: Any = Untracked()
        known[name](Running(name, params, run))


def trained(player: str, params: Any, several: bool) -> tuple[Callable[[], Any], int]:
    """Train a player in this folder, after the stage `world`.

    Returns:
        what makes it anew for an evaluation, and the ticks of the world that it took.
    """
    from hamlet.own import paths
    from hamlet.own.evaluating import Player
    from hamlet.serving.agent import OnnxAgent

    run_stages(["collect"], params)
    taken = int(read_json(paths.metrics("collect"))["ticks"])
    if player == OURS:
        social = ["social"] if several else []
        names = ["perception", "freeze_perception", "policy", "world_model", *social, "agent"]
        run_stages(names, params)
        agent = OnnxAgent(paths.AGENT)
        agents = len(agent.card["world"]["agents"])
        taken += int(read_json(paths.metrics("policy"))["ticks"])
        return lambda: Player(agent, agents), taken
    return trained_peer(player, params, taken)


def trained_peer(player: str, params: Any, random_ticks: int) -> tuple[Callable[[], Any], int]:
    """As `trained`, of the others: they see the world scaled by the random data. It is lent to
    Stable-Baselines3 and counts for our own."""
    from benchmarks import own_worlds_ours as ours
    from hamlet.own import paths
    from hamlet.own.data import held_out, read_data
    from hamlet.own.running import Running
    from hamlet.own.stages import LEARNING
    from hamlet.plain.senses import Senses, statistics_of
    from hamlet.worlds.lanes import Lanes, training_seeds

    run: Any = Untracked()
    s = Running("peers", params, run)
    data, _ = read_data(paths.DATASET, s.world)
    own = {name: x[:, ~held_out(s.shape, x.shape[1])].flatten(0, 1) for name, x in data.items()}
    statistics = statistics_of(s.shape, own, own["alive"])
    senses, seed = Senses(s.shape, statistics), params.seed

    def lanes(count: int) -> Lanes:
        return Lanes(s.maker(), count, training_seeds(seed, LEARNING), params.world.longest)

    if player in THEIRS:
        from benchmarks import own_worlds_peers as peers

        theirs, ticks = peers.train_theirs(player, lanes, senses, TICKS, seed)
        model = theirs.model
        return lambda: peers.Theirs(model, senses), ticks
    side = lanes(params.policy.lanes)
    if player == END_TO_END:
        fresh, ticks = ours.train_end_to_end(side, senses, statistics, params.policy, seed)
    else:
        fresh, ticks = ours.train_alone(player == STACKED, side, senses, params.policy, seed)
    side.close()
    return fresh, random_ticks + ticks


def run_cell(world: str, player: str, seed: int) -> dict[str, Any]:
    """Train in an empty folder and play the held-out episodes.

    Returns:
        ticks; cpu_seconds of the training, from the first tick to the file that plays;
        returns: of each side, the mean of its agents; all_together: of each agent when one player
        is in all slots.
    """
    from hamlet.own.evaluating import AtRandom, play_cases
    from hamlet.own.running import Running

    game = GAMES[world]
    with TemporaryDirectory() as folder, chdir(folder):
        params = project(world, seed)
        run_stages(["world"], params)
        run: Any = Untracked()
        s = Running("evaluate", params, run)
        agents = s.shape.num_agents
        began, ticks = time.process_time(), 0
        fresh: Callable[[], Any] = lambda: AtRandom(agents)  # noqa: E731
        if player != RANDOM:
            fresh, ticks = trained(player, params, agents > 1)
        seconds = time.process_time() - began
        together, lengths = play_cases(s.maker(), fresh(), EPISODES, LANES, LONGEST)
        sides = []
        for side in game.sides:
            returns = together
            if len(side) < agents:
                one: Any = Beside(fresh(), side, agents)
                returns, _ = play_cases(s.maker(), one, EPISODES, LANES, LONGEST)
            sides.append(float(returns[:, list(side)].mean()))
    return {
        "world": world, "player": player, "seed": seed, "ticks": ticks, "cpu_seconds": seconds,
        "returns": sides, "all_together": together.mean(0).tolist(),
        "mean_length": float(lengths.mean()),
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------
# All cells


def wanted(
    worlds: Sequence[str], players: Sequence[str], seeds: Sequence[int]
) -> list[tuple[str, str, int]]:
    """The cells of these worlds, random play first, which has one seed."""
    cells = []
    for world in worlds:
        cells.append((world, RANDOM, 0))
        cells += [(world, player, seed) for player in players for seed in seeds]
    return cells


def key(world: str, player: str, seed: int) -> str:
    """How a cell is called in the JSON."""
    return f"{world}/{player}/{seed}"


def in_a_child(cell: tuple[str, str, int]) -> dict[str, Any]:
    """Run a cell in a process of its own, so that its CPU time is its own."""
    world, player, seed = cell
    command = [sys.executable, "-m", "benchmarks.own_worlds", "--cell", key(world, player, seed)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def run_all(
    path: Path,
    cells: Sequence[tuple[str, str, int]],
    again: bool,
    run: Callable[[tuple[str, str, int]], dict[str, Any]] = in_a_child,
) -> dict[str, Any]:
    """Run the cells that the JSON at `path` has not yet, writing each when it is done.

    Args:
        again: run also those that it has.
    """
    for cell in cells:
        if key(*cell) in kept(path)["cells"] and not again:
            continue
        made = run(cell)
        found = kept(path)  # once more: another run may have added its cells meanwhile
        found["cells"][key(*cell)] = made
        write_json(path, found)
        print(key(*cell), made["returns"], flush=True)
    return kept(path)


def kept(path: Path) -> dict[str, Any]:
    """What the JSON at `path` holds; no cells, if there is none."""
    return read_json(path) if path.exists() else {"cells": {}}


# ------------------------------------------------------------------------------------------------
# What it says


def normalised(cells: Mapping[str, dict[str, Any]], world: str) -> dict[str, dict[int, float]]:
    """Scores of every player and seed of a world: 0 is random play, 1 the best known."""
    game = GAMES[world]
    of_world = [cell for cell in cells.values() if cell["world"] == world]
    low = next(cell["returns"] for cell in of_world if cell["player"] == RANDOM)
    scores: dict[str, dict[int, float]] = {}
    for cell in of_world:
        parts = []
        for side, value in enumerate(cell["returns"]):
            best = game.best
            if best is None:
                best = max(other["returns"][side] for other in of_world)
            parts.append((value - low[side]) / (best - low[side]))
        scores.setdefault(cell["player"], {})[cell["seed"]] = sum(parts) / len(parts)
    return scores


def verdict(scores: Mapping[str, Mapping[int, float]], hidden: bool) -> list[str]:
    """What does not hold of the gate, of what has run, in words; empty if all of it holds."""
    if OURS not in scores:
        return []
    means = {name: float(np.mean(list(values.values()))) for name, values in scores.items()}
    wrong = [
        f"{means[name] - means[OURS]:.3f} below {name}"
        for name in THEIRS
        if name in means and means[OURS] < means[name] - MARGIN
    ]
    wrong += [
        f"seed {seed} is below random play" for seed, score in scores[OURS].items() if score < 0
    ]
    if hidden and "sb3_ppo" in means and means[OURS] < means["sb3_ppo"] + CLEARLY:
        wrong.append(f"not {CLEARLY} above the feed-forward sb3_ppo")
    return wrong


def missing(scores: Mapping[str, Mapping[int, float]]) -> list[str]:
    """Players of the gate that have not run with each of three seeds."""
    return [
        f"{name} has {len(scores.get(name, ()))} of {SEEDS} seeds"
        for name in (OURS, *THEIRS)
        if len(scores.get(name, ())) < SEEDS
    ]


NAMES = {
    OURS: "our agent", FEED_FORWARD: "our PPO without A (feed-forward; not gated)",
    STACKED: "our PPO on the last four observations (not gated)",
    END_TO_END: "our PPO, A and D end to end (not gated)",
    "sb3_ppo": "SB3 PPO", "sb3_recurrent_ppo": "sb3-contrib RecurrentPPO",
}  # fmt: skip


def table(found: Mapping[str, Any]) -> str:
    """The committed page."""
    lines = [
        "# Own worlds, beside Stable-Baselines3", "",
        f"By `python -m benchmarks.own_worlds`: {TICKS:,} ticks of the world for everyone, the "
        f"{RANDOM_TICKS:,} random ones of ours counted (they scale everyone's observations; lent "
        "to Stable-Baselines3, which learns for all of its ticks), paired seeds, the defaults of "
        "Stable-Baselines3, the parameters that `hamlet new` writes. Scores are means of "
        f"{EPISODES} held-out episodes with drawn actions, 0 being random play and 1 the best "
        "known. CPU seconds are of all of a player's training, of ours with B, C and the export; "
        "others used the machine too. Seeds differ: three decide nothing near a line.", "",
    ]  # fmt: skip
    for world, game in GAMES.items():
        if not any(cell["world"] == world for cell in found["cells"].values()):
            continue
        scores = normalised(found["cells"], world)
        lines += [f"## {game.what}", "", "| | score | by seed | return | CPU s |"]
        lines.append("| --- | --- | --- | --- | --- |")
        for name in PLAYERS:
            if name in scores:
                lines.append(row(found["cells"], world, name, scores[name]))
        low = found["cells"][key(world, RANDOM, 0)]["returns"]
        lines.append(f"| random play | 0 | | {told(low)} | |")
        if len(game.sides) > 1:
            lines += ["", all_together(found["cells"], world, scores)]
        lines += ["", f"The gate {standing(scores, game.hidden)}.", ""]
    return "\n".join(lines)


def standing(scores: Mapping[str, Mapping[int, float]], hidden: bool) -> str:
    """How the gate stands."""
    wrong, open_yet = verdict(scores, hidden), missing(scores)
    if wrong:
        return f"does not hold: {'; '.join(wrong)}"
    return f"holds of what has run; {', '.join(open_yet)}" if open_yet else "holds"


def all_together(
    cells: Mapping[str, dict[str, Any]], world: str, scores: Mapping[str, Mapping[int, float]]
) -> str:
    """Returns of each player where it is in all slots: against itself, so of no fixed scale."""
    means = {
        name: np.mean([cells[key(world, name, seed)]["all_together"] for seed in by_seed])
        for name, by_seed in scores.items()
    }
    told = ", ".join(f"{NAMES.get(name, name)} {mean:.2f}" for name, mean in means.items())
    return (
        "Returns above are of each side against random play of the other. Where one player is in "
        f"all places, the mean return of an agent is: {told}."
    )


def row(
    cells: Mapping[str, dict[str, Any]], world: str, name: str, scores: Mapping[int, float]
) -> str:
    """A line of the table."""
    own = [cells[key(world, name, seed)] for seed in scores]
    by_seed = ", ".join(f"{score:.3f}" for score in scores.values())
    returns = np.mean([cell["returns"] for cell in own], 0)
    seconds = np.mean([cell["cpu_seconds"] for cell in own])
    mean = np.mean(list(scores.values()))
    return f"| {NAMES[name]} | {mean:.3f} | {by_seed} | {told(returns)} | {seconds:.0f} |"


def told(returns: Sequence[float]) -> str:
    """Returns of all sides."""
    return " / ".join(f"{value:.4g}" for value in returns)


def write_page(found: Mapping[str, Any]) -> str:
    """Write own_worlds.md; returns it."""
    text = table(found)
    with atomic_path(RESULTS / "own_worlds.md") as path:
        path.write_text(text, encoding="utf-8")
    return text


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--worlds", nargs="+", choices=GAMES, default=list(GAMES))
    parser.add_argument("--players", nargs="+", choices=PLAYERS, default=list(PLAYERS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(SEEDS)))
    parser.add_argument("--again", action="store_true", help="run also what has run")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.cell:
        world, player, seed = given.cell.split("/")
        print(json.dumps(run_cell(world, player, int(seed))))
        return 0
    found = run_all(
        RESULTS / "own_worlds.json", wanted(given.worlds, given.players, given.seeds), given.again
    )
    print(write_page(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
