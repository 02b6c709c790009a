"""Population-based training (Jaderberg et al. 2017) in generations, in which all members take part.

A generation is a number of gradient steps of every member with its own settings, then a score on
held-out data. The worst then take over weights, optimizer state and settings of one of the best
(exploit), and change these settings a little (explore). With nobody replaced it is random search.

What is drawn follows from the seed, the generation and the member, so equal scores give an equal
course, wherever the members run (see `engines`). `log.jsonl` tells all of it: who went on from
whom, with what settings, to what score. A member goes on from a file that nobody changes any more,
the checkpoint with which its parent ended the generation before, so that a member or a driver that
was killed starts again from its own last checkpoint and ends where it would have ended.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hamlet.artifacts import HamletError, atomic_path
from hamlet.params import TuneParams

FACTORS = (0.8, 1.25)  # explore: each setting times one of these
WORST = -sys.float_info.max  # the score of a member whose loss is no number


class Turn(NamedTuple):
    """One member's part of a generation."""

    generation: int
    member: int
    parent: int
    """The member whose weights it goes on from: itself, unless it was replaced."""
    settings: dict[str, float]
    score: float = 0.0
    """At the end of the generation; higher is better."""


Train = Callable[[Turn], float]
"""Trains a member through a generation, from `started`, and returns its score. Can be pickled."""
Engine = Callable[[Train, list[Turn]], list[float]]
"""Runs all turns of a generation somewhere, side by side, and returns their scores in order."""


def first_turns(population: TuneParams, seed: int) -> list[Turn]:
    """The first generation: settings drawn log-uniformly from the space."""
    turns = []
    for member in range(population.members):
        rng = random.Random(f"{seed}/begin/{member}")
        settings = {
            name: math.exp(rng.uniform(math.log(low), math.log(high)))
            for name, (low, high) in population.space.items()
        }
        turns.append(Turn(0, member, member, settings))
    return turns


def next_turns(population: TuneParams, done: list[Turn], seed: int) -> list[Turn]:
    """The generation after `done`: truncation selection, then perturbation within the space."""
    ranked = sorted(done, key=lambda turn: (-turn.score, turn.member))
    count = round(population.replaced * population.members)
    best, worst = ranked[:count], {turn.member for turn in ranked[len(ranked) - count :]}
    turns = []
    for turn in sorted(done, key=lambda turn: turn.member):
        parent, settings = turn.member, turn.settings
        if turn.member in worst:
            rng = random.Random(f"{seed}/{turn.generation}/{turn.member}")
            chosen = rng.choice(best)
            parent = chosen.member
            settings = {
                name: min(max(value * rng.choice(FACTORS), population.space[name][0]),
                          population.space[name][1])
                for name, value in chosen.settings.items()
            }  # fmt: skip
        turns.append(Turn(turn.generation + 1, turn.member, parent, settings))
    return turns


def evolve(
    population: TuneParams, seed: int, folder: Path, train: Train, run: Engine
) -> Iterator[list[Turn]]:
    """All generations, each when it is done; those that `folder` already holds at once.

    Args:
        folder: log and checkpoints; of this seed and population only.
        run: where the members run: `engines.processes` or `engines.ray_tune`.
    """
    log = folder / "log.jsonl"
    done = read_log(log)
    yield from done
    for generation in range(len(done), population.generations):
        turns = next_turns(population, done[-1], seed) if done else first_turns(population, seed)
        scores = run(train, turns)
        done.append(
            [
                turn._replace(score=score if math.isfinite(score) else WORST)
                for turn, score in zip(turns, scores, strict=True)
            ]
        )
        write_log(log, {"seed": seed, **population.model_dump(mode="json")}, done)
        shutil.rmtree(folder / f"generation-{generation - 1}", ignore_errors=True)
        yield done[-1]


def checkpoint_of(folder: Path, generation: int, member: int) -> Path:
    return folder / f"generation-{generation}" / f"member-{member}.pt"


def started(folder: Path, turn: Turn) -> Path:
    """The checkpoint from which a member goes on and into which it trains: its own, if it was
    interrupted in this generation, else a copy of what its parent ended the last one with."""
    path = checkpoint_of(folder, turn.generation, turn.member)
    if turn.generation and not path.exists():
        with atomic_path(path) as temporary:
            shutil.copyfile(checkpoint_of(folder, turn.generation - 1, turn.parent), temporary)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def winner(done: list[list[Turn]]) -> Turn:
    """The last turn of the member that scored best at the end."""
    return max(done[-1], key=lambda turn: (turn.score, -turn.member))


def lineage(done: list[list[Turn]], turn: Turn) -> list[Turn]:
    """The turns, from the first generation on, that made the weights with which `turn` ended.

    Trained alone, one after the other, they make them again.
    """
    turns = [turn]
    while turns[0].generation:
        before = done[turns[0].generation - 1]
        turns.insert(0, next(t for t in before if t.member == turns[0].parent))
    return turns


# ------------------------------------------------------------------------------------------------
# The log


def write_log(path: Path, header: Mapping[str, Any], done: list[list[Turn]]) -> None:
    """JSON lines: the population and its seed, then every turn."""
    rows = [dict(header), *(turn._asdict() for turns in done for turn in turns)]
    with atomic_path(path) as temporary:
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_log(path: Path) -> list[list[Turn]]:
    """The generations of a log, none if there is none.

    Raises:
        HamletError: it is not such a log.
    """
    if not path.exists():
        return []
    done: list[list[Turn]] = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines()[1:]:
            turn = Turn(**json.loads(line))
            if turn.generation == len(done):
                done.append([])
            done[turn.generation].append(turn)
    except (ValueError, TypeError, IndexError) as error:
        raise HamletError(f"{path} is not a log of a population ({error})", "delete it") from None
    return done
