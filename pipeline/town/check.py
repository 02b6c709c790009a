"""Checks of a pack that types cannot express, each with a message a student can act on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from pydantic import ValidationError

from hamlet.town.schema import GOALS, SENSED, Affordance, Pack, PackError


def build_pack(content: dict[str, Any], source: str, feasible: bool = True) -> Pack:
    """A checked pack from its fields; `feasible`: whether its economy must add up.

    Raises PackError, see `load_pack`.
    """
    try:
        pack = Pack.model_validate(content)
    except ValidationError as error:
        raise PackError(one_line(error, source)) from None
    checker = Checker(pack, source)
    checker.run()
    if feasible:
        checker.economy()
    return pack


def one_line(error: ValidationError, source: str) -> str:
    """The first problem pydantic found, as `source: field: what is wrong`."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"]) or "pack"
    got = "" if first["type"] in ("missing", "value_error") else f", got {first['input']!r:.60}"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    message = first["msg"].removeprefix("Value error, ")
    return f"{source}: {where}: {message}{got}{more}"


class Checker:
    """Raises PackError for names that do not exist and for rules that make no sense."""

    def __init__(self, pack: Pack, source: str):
        self.pack, self.source = pack, source

    def fail(self, where: str, message: str) -> NoReturn:
        raise PackError(f"{self.source}: {where}: {message}")

    def run(self) -> None:
        self.unique_names()
        self.known_names()
        for affordance in self.pack.affordances:
            self.affordance(affordance)
        self.beginning()
        self.others()

    # ------------------------------------------------------------------ names

    def known(self, names: Iterable[str], options: Iterable[str], where: str, what: str) -> None:
        options = list(options)
        for name in names:
            if name not in options:
                self.fail(where, f"unknown {what} {name!r}; use one of {', '.join(options)}")

    def unique_names(self) -> None:
        pack = self.pack
        for what, taken, names in (
            ("meters", SENSED, pack.meter_names),
            ("affordances", GOALS, pack.affordance_names),
        ):
            for name in names:
                if name in taken:
                    self.fail(what, f"{name!r} is already a name of ours; use another one")
        for what, names in (
            ("meters", pack.meter_names),
            ("affordances", pack.affordance_names),
            ("actions", pack.action_names),
            ("cues", tuple(cue.name for cue in pack.cues)),
        ):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                self.fail(what, f"{twice[0]!r} is defined twice; rename one")

    def known_names(self) -> None:
        pack = self.pack
        meters, affordances = pack.meter_names, pack.affordance_names
        for cascade in pack.cascades:
            self.known((cascade.source, cascade.target), meters, "cascades", "meter")
        for modulation in pack.modulations:
            self.known((modulation.source, modulation.target), meters, "modulations", "meter")
        self.known((c.meter for c in pack.terminal), meters, "terminal", "meter")
        self.known(pack.move_price, meters, "move_price", "meter")
        self.known(pack.interact_price, meters, "interact_price", "meter")
        self.known(pack.reward.meters, meters, "reward.meters", "meter")
        for action in pack.actions:
            self.known(action.effects, meters, f"actions.{action.name}.effects", "meter")
        tags = sorted({tag for a in pack.affordances for tag in a.tags})
        for a in pack.affordances:
            here = f"affordances.{a.name}"
            for field in ("price", "price_per_tick", "effects_per_tick", "effects_on_completion"):
                self.known(getattr(a, field), meters, f"{here}.{field}", "meter")
            self.known((c.meter for c in a.preconditions), meters, f"{here}.preconditions", "meter")
            for named in a.on_completion:
                others = {tag for o in pack.affordances if o is not a for tag in o.tags}
                if named.tag not in others:
                    self.fail(
                        f"{here}.on_completion",
                        f"no other affordance is tagged {named.tag!r}; add the tag to one "
                        f"(known tags: {', '.join(tags) or 'none'})",
                    )
        for cue in pack.cues:
            for test in (*cue.all_of, *cue.any_of):
                here = f"cues.{cue.name}"
                self.known([test.meter] if test.meter else [], meters, here, "meter")
                self.known(test.using or (), affordances, here, "affordance")
                self.known(test.at or (), affordances, here, "affordance")
                self.known(test.action or (), pack.action_names, here, "action")
        for change in pack.schedule:
            here = f"schedule.{change.tick}"
            self.known(change.hours, affordances, f"{here}.hours", "affordance")
            self.known(change.price_factor, affordances, f"{here}.price_factor", "affordance")
            self.known(change.quality, affordances, f"{here}.quality", "affordance")
            self.known(change.depletion, meters, f"{here}.depletion", "meter")

    # ------------------------------------------------------------------ sense

    def affordance(self, a: Affordance) -> None:
        here = f"affordances.{a.name}"
        if a.exclusive and a.capacity not in (None, 1):
            self.fail(here, f"exclusive allows one user, capacity {a.capacity}; set capacity to 1")
        hours = sum(a.is_open(hour) for hour in range(24))
        if self.pack.temporal and a.duration > hours and hours < 24:
            self.fail(
                f"{here}.hours",
                f"open {hours} hours a day but a use takes {a.duration} ticks, so it can never be "
                "finished; widen hours or shorten duration",
            )
        for test in a.preconditions:
            possible = test.value <= 1.0 if test.op in (">=", "<=") else 0.0 <= test.value < 1.0
            if test.op == "<":
                possible = test.value > 0.0
            if not possible or (test.op in ("<=", ">=") and test.value < 0.0):
                self.fail(
                    f"{here}.preconditions",
                    f"{test.meter} {test.op} {test.value} never holds for a meter in 0..1; "
                    "change the value",
                )
        if a.refund and not a.price_per_tick:
            self.fail(f"{here}.refund", "there is nothing to refund; set price_per_tick or drop it")

    def full_price(self, a: Affordance) -> dict[str, float]:
        if self.pack.temporal:
            return {meter: v * a.duration for meter, v in a.price_per_tick.items()}
        return dict(a.price)

    def net(self, a: Affordance, meter: str) -> float:
        """What a full use changes in a meter, price included."""
        return (
            (a.effects_per_tick.get(meter, 0.0) * a.duration) * a.quality
            + a.effects_on_completion.get(meter, 0.0) * a.quality
            - self.full_price(a).get(meter, 0.0)
        )

    def beginning(self) -> None:
        pack = self.pack
        for what in ("meters", "affordances"):
            if not getattr(pack, what):
                self.fail(what, "there is none; add one")
        for meter in pack.meters:
            for end in pack.terminal:
                if end.meter != meter.name:
                    continue
                dead = {
                    "<": meter.initial < end.value,
                    "<=": meter.initial <= end.value,
                    ">": meter.initial > end.value,
                    ">=": meter.initial >= end.value,
                }[end.op]
                if dead:
                    self.fail(
                        f"meters.{meter.name}.initial",
                        f"{meter.initial} is already death ({end.meter} {end.op} {end.value}); "
                        "start it on the living side",
                    )
        cells = pack.width * pack.height
        if len(pack.affordances) > cells:
            self.fail(
                "width, height",
                f"{len(pack.affordances)} affordances need as many cells, the map has {cells}; "
                "enlarge it",
            )

    def economy(self) -> None:
        """A meter that runs down and can only be bought back needs an income that pays for it."""
        pack = self.pack
        for a in pack.affordances:
            for meter, cost in self.full_price(a).items():
                if cost > 1.0:
                    self.fail(
                        f"affordances.{a.name}.price",
                        f"a full use costs {cost:.2f} {meter}, more than an agent can ever own "
                        "(1.0); lower the price",
                    )
        start = {meter.name: meter.initial for meter in pack.meters}
        usable: list[Affordance] = []
        funds = dict(start)
        grown = True
        while grown:  # what can be paid from the start or from what is usable already
            grown = False
            for a in pack.affordances:
                price = self.full_price(a)
                if a not in usable and all(funds[m] >= v for m, v in price.items()):
                    usable.append(a)
                    grown = True
                    for meter in pack.meter_names:
                        if self.net(a, meter) > 0.0:
                            funds[meter] = 1.0
        for a in pack.affordances:
            if a not in usable:
                meter, cost = max(self.full_price(a).items(), key=lambda item: item[1])
                self.fail(
                    f"affordances.{a.name}.price",
                    f"a full use costs {cost:.2f} {meter}, an agent starts with "
                    f"{start[meter]:.2f} and nothing it can use earns any; lower the price or add "
                    "work that pays",
                )
        for end in pack.terminal:
            meter = end.meter
            drained = next(m.depletion for m in pack.meters if m.name == meter) > 0.0
            restoring = [a for a in pack.affordances if self.net(a, meter) > 0.0]
            free = any(not self.full_price(a) for a in restoring)
            payers = {m for a in restoring for m in self.full_price(a)}
            earned = all(any(self.net(a, m) > 0.0 for a in pack.affordances) for m in payers)
            if drained and pack.lifespan >= 200 and restoring and not free and not earned:
                names = ", ".join(a.name for a in restoring)
                self.fail(
                    "affordances",
                    f"{meter} can only be bought back ({names}) and nothing earns "
                    f"{min(payers)}; make one free or add work that pays",
                )

    def others(self) -> None:
        pack = self.pack
        for cascade in pack.cascades:
            if cascade.source == cascade.target:
                self.fail("cascades", f"{cascade.source} cannot drain itself; name another target")
        for cue in pack.cues:
            if cue.distance_limit is not None and cue.distance_limit > pack.cue_distance:
                self.fail(
                    f"cues.{cue.name}.distance_limit",
                    f"{cue.distance_limit} is beyond cue_distance {pack.cue_distance}, where "
                    "nobody is visible; lower it or raise cue_distance",
                )
            if cue.visibility == "family" and pack.families is None:
                self.fail(f"cues.{cue.name}.visibility", "family needs a families section; add one")
        if len(pack.cues) > 30:
            self.fail("cues", f"at most 30 cues fit, found {len(pack.cues)}; remove some")
        if pack.families and pack.agents % pack.families.size:
            self.fail(
                "families.size",
                f"{pack.agents} agents do not split into families of {pack.families.size}; "
                "use a divisor",
            )
        ticks = [change.tick for change in pack.schedule]
        for tick in ticks:
            if tick >= pack.lifespan:
                self.fail(
                    f"schedule.{tick}",
                    f"comes after the lifespan of {pack.lifespan} ticks and never happens; "
                    "use an earlier tick",
                )
            if ticks.count(tick) > 1:
                self.fail(f"schedule.{tick}", "two changes at one tick; merge them")
