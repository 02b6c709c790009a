"""Packs: the shipped ones load, their hash is stable, and nonsense gets a clear error."""

from __future__ import annotations

import copy

import pytest
import yaml

from hamlet.town import PackError, Town, load_pack, schema
from hamlet.town.load import PACKS
from hamlet.town.validate import check_survivable

LEVELS = (
    "l0_full_view", "l1_economy", "l2_fog", "l3_hours", "l4_contention", "l5_changing", "l6_family",
    "l7_scarce",
)  # fmt: skip
BASE = yaml.safe_load((PACKS / "l4_contention.yaml").read_text())


def place(pack, name):
    return next(a for a in pack["affordances"] if a["name"] == name)


def edit_unknown_meter(p):
    place(p, "Bed")["effects_per_tick"] = {"enrgy": 0.1}


def edit_nowhere_to_go(p):
    p |= {"affordances": [], "cues": []}


def edit_unknown_place(p):
    p["cues"][0]["any_of"] = [{"using": ["Office"]}]


def edit_misspelt_field(p):
    place(p, "Bed")["capacty"] = 1


def edit_out_of_range(p):
    p["meters"][0]["initial"] = 1.5


def edit_missing_field(p):
    del p["terminal"]


def edit_twice(p):
    p["affordances"].append(copy.deepcopy(p["affordances"][0]))


def edit_exclusive_crowd(p):
    place(p, "Bed").update(exclusive=True, capacity=3)


def edit_tiny_map(p):
    p.update(width=3, height=3)


def edit_teleport_nowhere(p):
    place(p, "Bed")["on_completion"] = [{"effect": "teleport", "tag": "moon"}]


def edit_short_hours(p):
    place(p, "Job")["hours"] = [8, 12]


def edit_unaffordable_cycle(p):
    # everything that earns must first be paid for with what nobody has
    p["meters"][3]["initial"] = 0.0
    for name in ("Job", "Labor"):
        place(p, name)["price_per_tick"] = {"money": 0.01}


def edit_too_dear(p):
    place(p, "Hospital")["price_per_tick"] = {"money": 0.3}


def edit_stillborn(p):
    p["meters"][0]["initial"] = 0.0


def edit_late_change(p):
    p["schedule"] = [{"tick": 900, "cascade_factor": 2.0}]


def edit_odd_family(p):
    p["families"] = {"size": 3, "messages": 2}


def edit_impossible_precondition(p):
    place(p, "Doctor")["preconditions"] = [{"meter": "health", "op": ">", "value": 1.0}]


def edit_far_cue(p):
    p["cues"][0]["distance_limit"] = 5


def edit_unknown_effect(p):
    place(p, "Bed")["on_completion"] = [{"effect": "explode", "tag": "home"}]


def edit_never_below_zero(p):
    place(p, "Doctor")["preconditions"] = [{"meter": "health", "op": "<", "value": 0.0}]


def edit_never_at_most(p):
    place(p, "Doctor")["preconditions"] = [{"meter": "health", "op": "<=", "value": -0.1}]


def edit_refund_of_nothing(p):
    place(p, "Park")["refund"] = 0.5
    place(p, "Park").pop("price_per_tick", None)


def edit_own_drain(p):
    p["cascades"][0]["target"] = p["cascades"][0]["source"]


def edit_no_kin(p):
    p["cues"][0]["visibility"] = "family"


def edit_many_cues(p):
    p["cues"] = [p["cues"][0] | {"name": f"cue_{i}"} for i in range(31)]


def edit_two_changes(p):
    p["schedule"] = [{"tick": 9, "cascade_factor": 2.0}, {"tick": 9, "cascade_factor": 3.0}]


NONSENSE = {
    edit_never_below_zero: ("Doctor.preconditions", "health < 0.0 never holds"),
    edit_never_at_most: ("Doctor.preconditions", "health <= -0.1 never holds"),
    edit_refund_of_nothing: ("Park.refund", "nothing to refund", "set price_per_tick"),
    edit_own_drain: ("cascades", "cannot drain itself"),
    edit_nowhere_to_go: ("affordances", "there is none; add one"),
    edit_no_kin: ("cues.is_working.visibility", "needs a families section"),
    edit_many_cues: ("cues", "at most 30 cues fit, found 31"),
    edit_two_changes: ("schedule.9", "two changes at one tick"),
    edit_unknown_meter: ("Bed.effects_per_tick", "unknown meter 'enrgy'", "energy"),
    edit_unknown_place: ("cues.is_working", "unknown affordance 'Office'", "Job"),
    edit_misspelt_field: ("capacty", "Extra inputs"),
    edit_out_of_range: ("meters.0.initial", "less than or equal to 1", "1.5"),
    edit_missing_field: ("terminal", "required"),
    edit_twice: ("affordances", "'Bed' is defined twice", "rename"),
    edit_exclusive_crowd: ("affordances.Bed", "capacity 3", "set capacity to 1"),
    edit_tiny_map: ("width, height", "14 affordances", "enlarge"),
    edit_teleport_nowhere: ("Bed.on_completion", "'moon'", "add the tag"),
    edit_short_hours: ("Job.hours", "takes 8 ticks", "widen hours"),
    edit_unaffordable_cycle: ("price", "nothing it can use earns any", "add work that pays"),
    edit_too_dear: ("Hospital.price", "more than an agent can ever own", "lower the price"),
    edit_stillborn: ("meters.energy.initial", "already death"),
    edit_late_change: ("schedule.900", "after the lifespan", "earlier tick"),
    edit_odd_family: ("families.size", "do not split", "divisor"),
    edit_impossible_precondition: ("Doctor.preconditions", "never holds"),
    edit_far_cue: ("cues.is_working.distance_limit", "nobody is visible"),
    edit_unknown_effect: ("on_completion.0.effect", "teleport"),
}


@pytest.mark.parametrize("edit", NONSENSE, ids=lambda edit: edit.__name__)
def test_nonsense_gets_one_clear_line(edit, tmp_path):
    content = copy.deepcopy(BASE)
    edit(content)
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(PackError) as caught:
        load_pack(file)
    message = str(caught.value)
    assert message.startswith("mine.yaml: ")
    assert "\n" not in message
    for part in NONSENSE[edit]:
        assert part in message


NAMES_METERS = {
    "cascades": lambda p: p["cascades"][0].update(source="enrgy"),
    "modulations": lambda p: p["modulations"][0].update(target="enrgy"),
    "terminal": lambda p: p["terminal"][0].update(meter="enrgy"),
    "move_price": lambda p: p.update(move_price={"enrgy": 0.1}),
    "interact_price": lambda p: p.update(interact_price={"enrgy": 0.1}),
    "reward.meters": lambda p: p.update(reward={"meters": ["enrgy"]}),
    "actions.SING.effects": lambda p: p.update(
        actions=[{"name": "SING", "effects": {"enrgy": 0.1}}]
    ),
    "affordances.Bed.price": lambda p: place(p, "Bed").update(price={"enrgy": 0.1}),
    "affordances.Bed.price_per_tick": lambda p: place(p, "Bed").update(
        price_per_tick={"enrgy": 0.1}
    ),
    "affordances.Bed.effects_on_completion": lambda p: place(p, "Bed").update(
        effects_on_completion={"enrgy": 0.1}
    ),
    "affordances.Bed.preconditions": lambda p: place(p, "Bed").update(
        preconditions=[{"meter": "enrgy", "op": "<", "value": 0.5}]
    ),
    "cues.is_working": lambda p: next(c for c in p["cues"] if c["name"] == "is_working").update(
        any_of=[{"meter": "enrgy", "below": 0.5}]
    ),
    "schedule.9.depletion": lambda p: p.update(
        schedule=[{"tick": 9, "depletion": {"enrgy": 0.01}}]
    ),
}


@pytest.mark.parametrize("where", NAMES_METERS)
def test_a_meter_that_is_none_is_told_by_the_field_that_names_it(where, tmp_path):
    content = copy.deepcopy(BASE)
    NAMES_METERS[where](content)
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(PackError) as caught:
        load_pack(file)
    assert str(caught.value).startswith(f"mine.yaml: {where}: unknown meter 'enrgy'; use one of ")


def test_what_lies_on_a_limit_is_a_pack(tmp_path):
    """The last values before the ones that are refused."""
    content = copy.deepcopy(BASE)
    place(content, "Doctor")["preconditions"] = [
        {"meter": "health", "op": "<=", "value": 0.0}, {"meter": "mood", "op": ">=", "value": 1.0},
        {"meter": "mood", "op": ">", "value": 0.0}, {"meter": "social", "op": "<", "value": 0.001},
    ]  # fmt: skip
    content["cues"][0]["distance_limit"] = content.get("cue_distance", 2)
    content["cues"] += [content["cues"][0] | {"name": f"cue_{i}"} for i in range(30)]
    content["cues"] = content["cues"][:30]
    content["schedule"] = [{"tick": content["lifespan"] - 1, "cascade_factor": 2.0}]
    content["families"] = {"size": content["agents"], "messages": 2}
    file = tmp_path / "limit.yaml"
    file.write_text(yaml.safe_dump(content))
    assert len(load_pack(file).cues) == 30


def test_unreadable_files_are_named(tmp_path):
    broken = tmp_path / "broken.yaml"
    broken.write_text("name: [")
    with pytest.raises(PackError, match=r"broken\.yaml: not readable as YAML"):
        load_pack(broken)
    with pytest.raises(PackError, match="l4_contention"):
        load_pack("l9_nowhere")
    orphan = tmp_path / "orphan.yaml"
    orphan.write_text("extends: nobody\nname: orphan\n")
    with pytest.raises(PackError, match="extends: no pack named 'nobody'"):
        load_pack(orphan)


def test_what_experts_reach_was_measured_in_another_town_and_is_not_taken_over(tmp_path):
    parent = load_pack("l7_scarce").experts["expert"]
    assert parent.contended > 0
    assert parent.alone > 0
    (tmp_path / "child.yaml").write_text("extends: l7_scarce\nname: child\n")
    child = load_pack(tmp_path / "child.yaml").experts["expert"]
    assert (child.contended, child.alone) == (None, None)
    assert child.parameters == parent.parameters
    (tmp_path / "child.yaml").write_text(
        "extends: l7_scarce\nname: child\nexperts: {expert: {alone: 40.0}}\n"
    )
    child = load_pack(tmp_path / "child.yaml").experts["expert"]
    assert (child.contended, child.alone) == (None, 40.0)


def test_a_town_nobody_can_survive_is_refused():
    pack = load_pack("l3_hours").model_copy(update={"depletion_multiplier": 9.0})
    with pytest.raises(PackError, match="even an expert that knows the map lives only"):
        check_survivable(pack, "hard.yaml", worlds=4)


@pytest.mark.parametrize("level", LEVELS)
def test_levels_load_and_have_one_hash(level):
    pack = load_pack(level)
    assert pack.name == level
    assert pack.content_hash == load_pack(level).content_hash
    changed = pack.model_copy(update={"lifespan": pack.lifespan + 1})
    assert changed.content_hash != pack.content_hash
    town = Town(pack, num_layouts=4)
    state = town.reset(0, 2)
    side = 2 * pack.vision + 1
    assert town.observe(state)["view"].shape == (2, pack.agents, side, side)


def test_hashes_of_the_levels_differ():
    assert len({load_pack(level).content_hash for level in LEVELS}) == len(LEVELS)


# Least and most (open: the limit itself is refused), and what stands where nothing is said.
OPEN, NEEDED = "open", "needed"
LIMITS = {
    "Affordance.distance_limit": (0, 8, 0), "Affordance.duration": (1, 48, 1),
    "Affordance.quality": ((0.0, OPEN), 4.0, 1.0), "Affordance.refund": (0.0, 1.0, 0.0),
    "Cascade.strength": (0.0, 1.0, NEEDED), "Cascade.threshold": ((0.0, OPEN), 1.0, NEEDED),
    "Change.tick": (1, None, NEEDED), "Cue.decay": (0, 16, 0),
    "Cue.false_positive": (0.0, 1.0, 0.0), "Cue.reliability": (0.0, 1.0, 1.0),
    "Cue.streak": (1, 16, 1), "Families.messages": (2, 16, NEEDED),
    "Families.size": (1, None, NEEDED), "Meter.depletion": (0.0, 1.0, 0.0),
    "Meter.initial": (0.0, 1.0, NEEDED), "Modulation.base": (0.0, None, NEEDED),
    "Modulation.range": (0.0, None, NEEDED), "Modulation.rate": (0.0, 1.0, NEEDED),
    "Pack.agents": (1, 32, NEEDED), "Pack.cue_distance": (0, 64, 2),
    "Pack.cues_broadcast": (1, 32, 3), "Pack.depletion_multiplier": (0.0, 10.0, 1.0),
    "Pack.height": (2, 64, NEEDED), "Pack.lifespan": (1, 100_000, 500),
    "Pack.start_hour": (0, 23, 0), "Pack.vision": (1, 63, 2), "Pack.width": (2, 64, NEEDED),
}  # fmt: skip
DEFAULTS = {
    "Affordance.exclusive": False, "Affordance.interruptible": True, "Affordance.hours": (0, 24),
    "Affordance.capacity": None, "Cue.priority": 0, "Cue.visibility": "public",
    "Cue.distance_limit": None, "Pack.mode": "atomic", "Pack.temporal": True,
    "Reward.base": 1.0, "Reward.retirement_bonus": 0.0,
}  # fmt: skip


def test_every_number_has_the_limits_and_the_default_that_are_written_here():
    found = {}
    for name, model in vars(schema).items():
        if not (isinstance(model, type) and issubclass(model, schema.Model)):
            continue
        for field, info in model.model_fields.items():
            low = high = None
            for limit in info.metadata:
                low = getattr(limit, "ge", low) if not hasattr(limit, "gt") else (limit.gt, OPEN)
                high = getattr(limit, "le", high)
            default = NEEDED if info.is_required() else info.default
            found[f"{name}.{field}"] = (low, high, default)
    limited = {name: told for name, told in found.items() if told[:2] != (None, None)}
    assert limited == LIMITS
    for name, default in DEFAULTS.items():
        assert found[name][2] == default, name


def test_prices_are_in_the_meter_that_is_spent_else_in_money_else_in_the_last():
    pack = load_pack("l4_contention")
    free = [a.model_copy(update={"price": {}, "price_per_tick": {}}) for a in pack.affordances]

    def paid_in(**changes):
        changed = pack.model_copy(update=changes)
        return changed.meter_names[changed.paid_in]

    assert paid_in() == "money"
    assert paid_in(affordances=tuple(free)) == "money"
    mood = free[0].model_copy(update={"price_per_tick": {"money": 0.0, "mood": 0.1}})
    assert paid_in(affordances=(mood, *free[1:])) == "mood"
    once = free[0].model_copy(update={"price": {"energy": 0.1}})
    assert paid_in(affordances=(*free[1:], once)) == "energy"
    others = tuple(meter for meter in pack.meters if meter.name != "money")
    assert paid_in(affordances=tuple(free), meters=others) == others[-1].name
