"""The rivals' learning curves: who they are, and how long they learn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from benchmarks.curves_ours import WORKED, Judge, Meter, point
from benchmarks.end_to_end import EndToEndLearner, EndToEndPlayer, Settings
from benchmarks.study import HELD_OUT_WORLDS, begun
from benchmarks.study_players import RivalLives
from hamlet.artifacts import HamletError
from hamlet.town import Scripted, Town
from stages.common import progress


class Length(NamedTuple):
    """How long a rival learns: until it has had both."""

    steps: int
    cpu_seconds: float


LENGTHS = {
    "end_to_end": Length(10_890_000, 3600.0),
    "recurrent_ppo": Length(13_900_000, 1076.0),
    "lstm_ppo": Length(10_890_000, 1076.0),
}
"""Not measured by ours, so that a change of ours draws no rival anew: the report asks whether it is
long enough (`curves_report.TIMES`)."""
FIRST = 10.0
"""Seconds of processor time before a rival's first point."""
TRIALS = {
    "on lives of the teacher with a fifth of random turns; loss of the action, 30 s each": {
        "a GRU of 256, places on the map as numbers": 1.180,
        "a gated linear recurrence of 384, places as one of many": 1.337,
        "the same, places as numbers": 1.095,
        "and nothing but the encoder writes to the memory": 1.151,
        "rate 6e-3 for 3e-3": 1.117,
        "three times the weight for what is decoded": 1.199,
        "no slots for goals": 1.097,
        "chunks of 24 ticks for 48": 1.070,
        "16 lives for 32": 1.057,
    },
    "the same, 55 s, gates of four times their logits, 16 lives of 48 ticks": {
        "as above": 0.958,
        "no slots for goals": 0.976,
        "two layers of 256": 1.039,
        "rate 1.5e-3": 1.002,
        "only as seen from the agent, nothing on the map": 0.734,
        "both": 0.756,
    },
    "in the town; return after 76 s and 114 s": {
        "rate 3e-3": [37.4, 51.7],
        "the same, actions drawn by twice the logits": [51.4, 71.9],
        "the same, the likeliest actions": [42.0, 65.2],
        "rate 2e-3, averaged over twice as many updates, twice the logits": [48.8, 67.0],
    },
}
"""What the settings of the end-to-end network were chosen by, in processor time."""
PEERS = {"worlds": 64, "rollout": 32, "epochs": 2, "minibatches": 8, "hidden": 128}
"""Of the rivals that learn from reward alone."""


class Rival(Protocol):
    """Who learns, an iteration at a time."""

    settings: dict[str, Any]

    @property
    def steps(self) -> int:
        """Agents' ticks played so far."""
        ...

    def learn(self) -> None: ...
    def seated(self, where: Town) -> tuple[Any, Any]: ...


class Imitator:
    """The end-to-end network, with the teacher of module D."""

    def __init__(self, town: Town, teacher: str, seed: int, settings: Settings | None = None):
        scripted = Scripted(town, [teacher], seed)
        if "seen" not in scripted.reset(town.reset(seed, 1)):
            raise HamletError(
                f"end_to_end: {teacher} keeps no map of what it saw, which the network is taught",
                "set policy.teacher to one that does, as expert_watching",
            )
        self.learner = EndToEndLearner(town, scripted, seed, settings)
        told = self.learner.settings._asdict()
        self.settings = {**told, "teacher": teacher, "precision": self.learner.precision}
        self.settings["trials"] = TRIALS

    @property
    def steps(self) -> int:
        return self.learner.steps

    def learn(self) -> None:
        self.learner.learn()

    def seated(self, where: Town) -> tuple[Any, Any]:
        made = self.learner
        player = EndToEndPlayer(where, made.shape, made.average, None, made.precision)
        return begun(player, where.reset(0, HELD_OUT_WORLDS))


class Rewarded:
    """One of `benchmarks.learning_peers` in all places of our batched worlds."""

    def __init__(self, town: Town, name: str, seed: int, sizes: dict[str, int]) -> None:
        try:
            from benchmarks.learning_peers import PEERS as KINDS
            from benchmarks.learning_peers import Clock
            from benchmarks.learning_peers import Everyone as Lanes
        except ImportError as error:
            raise HamletError(
                f"{name}: the `bench` extra is not installed",
                'pip install -c constraints.txt -e ".[bench]"',
            ) from error
        self.settings: dict[str, Any] = dict(sizes)
        how = {key: value for key, value in sizes.items() if key != "worlds"}
        self.lanes = Lanes(sizes["worlds"], Clock(), town)
        self.learner = KINDS[name](self.lanes, **how, seed=seed)
        self.each = self.lanes.num_envs * sizes["rollout"]
        self.steps = 0

    def learn(self) -> None:
        self.learner.learn(1)
        self.steps += self.each

    def seated(self, where: Town) -> tuple[Any, Any]:
        return begun(RivalLives(where, self.learner, self.settings["hidden"]))


def rivals_points(
    rival: Rival, length: Length, judge: Judge, meter: Meter, bar: bool = True
) -> Iterator[dict[str, Any]]:
    """Let a rival learn for that long; its points."""
    following = FIRST

    def over() -> bool:
        return rival.steps >= length.steps and meter.seconds >= length.cpu_seconds

    def iterations() -> Iterator[None]:
        while not over():
            yield None

    last: dict[str, Any] | None = None
    shown: Any = progress(iterations(), "iterations") if bar else iterations()
    for _ in shown:
        with meter.counting():
            rival.learn()
        if meter.seconds >= following or over():
            last = point(rival.steps, meter.seconds, judge(rival.seated))
            following = max(following, meter.seconds) * WORKED
            yield last
        if bar and last:
            shown.note(ticks=rival.steps, seconds=meter.seconds, R=last["mean_return"])
