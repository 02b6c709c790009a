"""Several worlds side by side, begun anew when they are over, with nothing lost at the border."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from hamlet.artifacts import HamletError
from hamlet.worlds.contract import Field, Moved, Seen, World, WorldShape

HELD_OUT = 1 << 30
"""Seeds from here on are of evaluation, below of everything else."""


class Now(NamedTuple):
    """What all slots see: slot l * N + n is agent n of lane l.

    Attributes:
        fields: each [S, ...]. mask: bool [S, A]. alive: bool [S].
        first: bool [S] a life begins here: memory begins anew.
    """

    fields: dict[str, np.ndarray]
    mask: np.ndarray
    alive: np.ndarray
    first: np.ndarray


class Row(NamedTuple):
    """What a step led to, [S].

    Attributes:
        last: fields after the step and before any reset.
        reward: float32. terminated, truncated: bool. acted: bool, who was alive before the step.
        over: bool [L] the worlds that began anew.
    """

    last: dict[str, np.ndarray]
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    acted: np.ndarray
    over: np.ndarray


class Lanes:
    """Worlds that step together.

    Args:
        make: makes one; called `count` times.
        seeds: of the episodes, in the order in which they begin.
        longest: ticks after which an episode is cut (truncated).

    Attributes:
        now: what is seen.
        returns: of every finished episode its agents' undiscounted returns float [N], in order.
        lengths: ticks of each.
        begun: episodes, and with them seeds, so far.
    """

    def __init__(
        self, make: Callable[[], World], count: int, seeds: Iterator[int], longest: int
    ) -> None:
        self.worlds = [make() for _ in range(count)]
        self.shape = self.worlds[0].shape
        self.longest, self._seeds = longest, seeds
        self.returns: list[np.ndarray] = []
        self.lengths: list[int] = []
        self.begun = 0
        self._begin_all()

    def _begin_all(self) -> None:
        count, n = len(self.worlds), self.shape.num_agents
        self._sums, self._ticks = np.zeros((count, n)), np.zeros(count, int)
        self._seen = [self._begun(world) for world in self.worlds]
        self._first = np.stack([seen.alive for seen in self._seen])
        self.now = self._all()

    def state(self) -> dict[str, Any]:
        """Plain data: what `go_on` needs."""
        returns = [one.tolist() for one in self.returns]
        return {"returns": returns, "lengths": list(self.lengths), "begun": self.begun}

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Begin all worlds anew, as the next episodes after those of another process.

        What was under way there is lost: no world can be asked for all of its state.
        """
        self.returns = [np.array(one) for one in state["returns"]]
        self.lengths = list(state["lengths"])
        while self.begun < state["begun"]:
            next(self._seeds)
            self.begun += 1
        self._begin_all()

    def _begun(self, world: World) -> Seen:
        seen = world.reset(next(self._seeds))
        self.begun += 1
        if not seen.alive.any():
            raise HamletError(
                f"{self.shape.name}: nobody is alive after a reset", "mend the world's reset"
            )
        return seen

    def step(self, actions: np.ndarray) -> Row:
        """Let all slots act, int64 [S]; worlds that are over begin anew.

        Raises:
            HamletError: as `World.step`, or the action of a living agent is illegal.
        """
        n = self.shape.num_agents
        before = self.now
        wrong = before.alive & ~np.take_along_axis(before.mask, actions[:, None], 1)[:, 0]
        if wrong.any():
            slot = int(wrong.argmax())
            raise HamletError(
                f"{self.shape.name}: action {actions[slot]} of {self.shape.agents[slot % n]} is "
                "illegal"
            )
        moved = [
            self._cut(lane, world.step(actions[lane * n : (lane + 1) * n]))
            for lane, world in enumerate(self.worlds)
        ]
        for lane, one in enumerate(moved):
            was = self._seen[lane].alive
            self._sums[lane] += one.reward
            self._seen[lane], self._first[lane] = one.seen, one.seen.alive & ~was
            if one.over:
                self.returns.append(self._sums[lane].copy())
                self.lengths.append(int(self._ticks[lane]))
                self._sums[lane], self._ticks[lane] = 0.0, 0
                self._seen[lane] = self._begun(self.worlds[lane])
                self._first[lane] = self._seen[lane].alive
        self.now = self._all()
        return Row(
            {f.name: np.concatenate([m.seen.fields[f.name] for m in moved]) for f in self._fields},
            np.concatenate([m.reward for m in moved]),
            np.concatenate([m.terminated for m in moved]),
            np.concatenate([m.truncated for m in moved]),
            before.alive,
            np.array([m.over for m in moved]),
        )

    def _cut(self, lane: int, moved: Moved) -> Moved:
        """The same, truncated if the episode is as long as it may be."""
        self._ticks[lane] += 1
        if moved.over or self._ticks[lane] < self.longest:
            return moved
        left = moved.seen.alive
        return moved._replace(
            seen=moved.seen._replace(alive=np.zeros_like(left)),
            truncated=moved.truncated | left,
            over=True,
        )

    @property
    def _fields(self) -> tuple[Field, ...]:
        return self.shape.fields

    def _all(self) -> Now:
        fields = {
            f.name: np.concatenate([seen.fields[f.name] for seen in self._seen])
            for f in self._fields
        }
        return Now(
            fields,
            np.concatenate([seen.mask for seen in self._seen]),
            np.concatenate([seen.alive for seen in self._seen]),
            self._first.reshape(-1).copy(),
        )

    def close(self) -> None:
        """Close all worlds."""
        for world in self.worlds:
            world.close()


def training_seeds(seed: int, stream: int) -> Iterator[int]:
    """Seeds of episodes below `HELD_OUT`, others for every seed and stream."""
    rng = np.random.default_rng((seed, stream))
    while True:
        yield int(rng.integers(HELD_OUT))


def held_out_seeds() -> Iterator[int]:
    """Seeds that no training meets; the same for every agent, so that agents can be compared."""
    seed = HELD_OUT
    while True:
        yield seed
        seed += 1


def legal_at_random(mask: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """int64 [S] uniform over the legal actions bool [S, A]; 0 where nothing is legal."""
    chances = rng.random(mask.shape)
    return np.where(mask, chances, -1.0).argmax(-1)


def maker(opened: Callable[[], World], expected: WorldShape) -> Callable[[], World]:
    """`opened`, refused where the world has another shape than it was described with.

    Raises:
        HamletError: naming what differs.
    """

    def make() -> World:
        world = opened()
        if differs := world.shape.same_as(expected):
            raise HamletError(
                f"{world.shape.name}: its {differs} are not those of artifacts/world.json",
                "run `dvc repro`; a world must keep its spaces",
            )
        return world

    return make
