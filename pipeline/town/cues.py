"""Public cues: what others can tell from looking at an agent, derived from what they cannot see."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from hamlet.town.counter import tick_hash, to_unit
from hamlet.town.schema import Cue, CueTest, Pack

STREAM = 256  # first stream of the counter hash; stream + cue * agents + agent


class CueRules:
    """The cues of a pack, evaluated for all agents of all worlds at once."""

    def __init__(self, pack: Pack, device: torch.device):
        self.pack, self.device = pack, device
        self.meters = {name: i for i, name in enumerate(pack.meter_names)}
        self.affordances = {name: i for i, name in enumerate(pack.affordance_names)}
        self.actions = {name: i for i, name in enumerate(pack.action_names)}
        # Raised cues are collected with the most important in the lowest bit; what is shown is
        # moved to the cues' own bits, those that move equally far together: (shift, which).
        order = sorted(range(len(pack.cues)), key=lambda i: (-pack.cues[i].priority, i))
        self.rank = [order.index(number) for number in range(len(pack.cues))]
        self.moves: dict[int, int] = {}
        for number, rank in enumerate(self.rank):
            self.moves[number - rank] = self.moves.get(number - rank, 0) | 1 << rank
        self.streaks = [i for i, cue in enumerate(pack.cues) if cue.streak > 1]
        self.decays = [i for i, cue in enumerate(pack.cues) if cue.decay]
        # State fields, int32 [rows, N, B], and their numbers of rows.
        self.counters = {"cue_streak": len(self.streaks), "cue_hold": len(self.decays)}
        self.counters = {name: rows for name, rows in self.counters.items() if rows}
        self.readable: dict[tuple[int, bool], int] = {}  # (distance limit, kin only): the cues
        for number, cue in enumerate(pack.cues):
            if cue.visibility != "private":
                limit = pack.cue_distance if cue.distance_limit is None else cue.distance_limit
                who = (limit, cue.visibility == "family")
                self.readable[who] = self.readable.get(who, 0) | 1 << number

    def update(
        self, s: dict[str, Tensor], meters: list[Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The cues each agent shows after a tick.

        Args:
            s: agent-major state fields; `used`, `place`, `last_action`, `key`, `tick`, counters.
            meters: one f32 [N, B] per meter.

        Returns:
            int32 [N, B], bit c set when cue c shows; and the new counters.
        """
        n = s["used"].shape[0]
        agent = torch.arange(n, device=s["used"].device)[:, None]
        streaks, holds = [], []
        waiting = torch.zeros_like(s["used"])
        for number, cue in enumerate(self.pack.cues):
            raised = self._tests(cue, s, meters)
            if cue.streak > 1:
                count = s["cue_streak"][self.streaks.index(number)]
                count = torch.where(raised, (count + 1).clamp(max=cue.streak), 0)
                streaks.append(count)
                raised = count >= cue.streak
            if cue.decay:
                left = s["cue_hold"][self.decays.index(number)]
                holds.append(torch.where(raised, cue.decay, (left - 1).clamp(min=0)))
                raised = raised | (left > 0)
            if cue.reliability < 1.0 or cue.false_positive > 0.0:
                stream = STREAM + number * n + agent
                draw = to_unit(tick_hash(s["key"], s["tick"], stream))
                raised = torch.where(raised, draw < cue.reliability, draw < cue.false_positive)
            waiting = torch.add(waiting, raised, alpha=1 << self.rank[number])
        rest = waiting
        for _ in range(self.pack.cues_broadcast):
            rest = rest & (rest - 1)  # without its lowest bit
        shown = waiting ^ rest
        bits = torch.zeros_like(shown)
        for shift, which in self.moves.items():
            some = shown & which
            bits = bits | (some << shift if shift >= 0 else some >> -shift)
        timers = {}
        if streaks:
            timers["cue_streak"] = torch.stack(streaks)
        if holds:
            timers["cue_hold"] = torch.stack(holds)
        return bits, timers

    def allowed(self, apart: Tensor, kin: Tensor) -> Tensor:
        """Bits an observer may read: by Chebyshev distance and kinship; int32 [N, B]."""
        bits = torch.zeros_like(apart)
        for (limit, family), some in self.readable.items():
            near = apart <= limit
            bits = torch.where(near & kin if family else near, bits | some, bits)
        return bits

    def _tests(self, cue: Cue, s: dict[str, Tensor], meters: list[Tensor]) -> Tensor:
        if cue.all_of:
            return reduce(torch.logical_and, [self._test(t, s, meters) for t in cue.all_of])
        return reduce(torch.logical_or, [self._test(t, s, meters) for t in cue.any_of])

    def _test(self, test: CueTest, s: dict[str, Tensor], meters: list[Tensor]) -> Tensor:
        if test.meter is not None:
            value = meters[self.meters[test.meter]]
            if test.below is not None:
                return value < test.below
            assert test.above is not None
            return value > test.above
        if test.using is not None:
            return self._among(s["used"], [self.affordances[name] for name in test.using])
        if test.at is not None:
            return self._among(s["place"], [self.affordances[name] for name in test.at])
        assert test.action is not None
        return self._among(s["last_action"], [self.actions[name] for name in test.action])

    @staticmethod
    def _among(code: Tensor, options: list[int]) -> Tensor:
        return reduce(torch.logical_or, [code == option for option in options])


def telling_cues(cues: Sequence[Cue]) -> tuple[int, ...]:
    """The cues that tell which place their bearer is at, those that leave least open last."""
    left_open = {}
    for number, cue in enumerate(cues):
        named = [len(test.using or test.at or ()) for test in cue.all_of or cue.any_of]
        if cue.all_of and any(named):
            left_open[number] = min(count for count in named if count)
        elif all(named):
            left_open[number] = sum(named)
    return tuple(sorted(left_open, key=lambda number: -left_open[number]))
