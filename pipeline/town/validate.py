"""Checks of a pack that types cannot express, each with a message a student can act on."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.town.config import Pack, PackError


def check_names(pack: Pack, source: str) -> None:
    """Raise PackError when the pack names something it does not define."""

    def known(names: Iterable[str], allowed: Iterable[str], where: str, what: str) -> None:
        options = list(allowed)
        for name in names:
            if name not in options:
                raise PackError(f"{source}: {where}: unknown {what} {name!r}; use one of {options}")

    meters, affordances = pack.meter_names, pack.affordance_names
    for what, names in (
        ("meter", meters),
        ("affordance", affordances),
        ("action", pack.action_names),
        ("cue", [cue.name for cue in pack.cues]),
    ):
        twice = sorted({name for name in names if list(names).count(name) > 1})
        if twice:
            raise PackError(f"{source}: {what} {twice[0]!r} is defined twice; rename one")
    for cascade in pack.cascades:
        known((cascade.source, cascade.target), meters, "cascades", "meter")
    for modulation in pack.modulations:
        known((modulation.source, modulation.target), meters, "modulations", "meter")
    known((c.meter for c in pack.terminal), meters, "terminal", "meter")
    known(pack.move_price, meters, "move_price", "meter")
    known(pack.interact_price, meters, "interact_price", "meter")
    known(pack.reward.meters, meters, "reward.meters", "meter")
    for action in pack.actions:
        known(action.effects, meters, f"actions.{action.name}.effects", "meter")
    for a in pack.affordances:
        here = f"affordances.{a.name}"
        known(a.price, meters, f"{here}.price", "meter")
        known(a.price_per_tick, meters, f"{here}.price_per_tick", "meter")
        known(a.effects_per_tick, meters, f"{here}.effects_per_tick", "meter")
        known(a.effects_on_completion, meters, f"{here}.effects_on_completion", "meter")
        known((c.meter for c in a.preconditions), meters, f"{here}.preconditions", "meter")
        tags = sorted({tag for other in pack.affordances for tag in other.tags})
        known((t.tag for t in a.on_completion), tags, f"{here}.on_completion", "tag")
        if a.exclusive and a.capacity not in (None, 1):
            raise PackError(
                f"{source}: {here}: exclusive means one user at a time; set capacity to 1"
            )
    for cue in pack.cues:
        for test in (*cue.all_of, *cue.any_of):
            here = f"cues.{cue.name}"
            known([test.meter] if test.meter else [], meters, here, "meter")
            known(test.using or (), affordances, here, "affordance")
            known(test.at or (), affordances, here, "affordance")
            known(test.action or (), pack.action_names, here, "action")
    for change in pack.schedule:
        here = f"schedule at tick {change.tick}"
        known(change.hours, affordances, f"{here}: hours", "affordance")
        known(change.price_factor, affordances, f"{here}: price_factor", "affordance")
        known(change.quality, affordances, f"{here}: quality", "affordance")
        known(change.depletion, meters, f"{here}: depletion", "meter")
    if len(affordances) > pack.width * pack.height:
        raise PackError(
            f"{source}: width x height: {len(affordances)} affordances need as many cells, the map "
            f"has {pack.width * pack.height}; enlarge it"
        )
