"""Packs of the public Hamlet: what is read, what is honoured, and one line for all else."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hamlet.town import PackError, Town, load_pack

CONTENT: dict[str, Any] = {
    "training.yaml": {
        "environment": {
            "partial_observability": True,
            "vision_range": 2,
            "enabled_affordances": None,
            "randomize_affordances": True,
            "enable_temporal_mechanics": True,
        },
        "population": {"num_agents": 1},
        "curriculum": {"max_steps_per_episode": 300},
        "training": {"max_episodes": 5},
    },
    "substrate.yaml": {
        "type": "grid",
        "grid": {"topology": "square", "width": 5, "height": 4, "boundary": "clamp"},
    },
    "bars.yaml": {
        "bars": [
            {"name": "money", "index": 1, "range": [0.0, 1.0], "initial": 0.5, "base_depletion": 0},
            {
                "name": "energy", "index": 0, "initial": 1.0, "base_depletion": 0.01,
                "base_move_depletion": 0.005, "description": "gone, and so are you",
            },
        ],
        "terminal_conditions": [{"meter": "energy", "operator": "<=", "value": 0.0}],
    },
    "cascades.yaml": {
        "modulations": [],
        "cascades": [
            {
                "name": "poverty", "category": "primary_to_pivotal", "source": "money",
                "target": "energy", "target_index": 0, "threshold": 0.3, "strength": 0.001,
            }
        ],
    },
    "affordances.yaml": {
        "affordances": [
            {
                "id": "0", "name": "Bed", "operating_hours": [0, 24], "duration_ticks": 2,
                "costs": [{"meter": "money", "amount": 0.1}],
                "costs_per_tick": [{"meter": "money", "amount": 0.05}],
                "capabilities": [{"type": "multi_tick"}],
                "effect_pipeline": {"per_tick": [{"meter": "energy", "amount": 0.3}]},
            },
            {
                "id": "1", "name": "Job", "operating_hours": [8, 18], "costs": [],
                "effect_pipeline": {"on_completion": [{"meter": "money", "amount": 0.2}]},
            },
        ]
    },
    "drive_as_code.yaml": {
        "drive_as_code": {
            "extrinsic": {"type": "multiplicative", "base": 1.0, "bars": ["energy"]},
            "modifiers": {}, "shaping": [],
        }
    },
    "global_actions.yaml": {
        "custom_actions": [
            {"name": "REST", "costs": {"energy": -0.002}, "effects": {}},
            {"name": "SING", "costs": {}, "effects": {"energy": -0.001}},
        ]
    },
}  # fmt: skip


def written(folder: Path, content: dict[str, Any]) -> Path:
    pack = folder / "L9"
    pack.mkdir(parents=True)
    for name, fields in content.items():
        (pack / name).write_text(yaml.safe_dump(fields))
    return pack


def changed(*way: Any, to: Any = None, gone: bool = False) -> dict[str, Any]:
    """The pack with one field at `way` (file, keys ...) set, or deleted."""
    content = copy.deepcopy(CONTENT)
    holder: Any = content
    for key in way[:-1]:
        holder = holder[key]
    if gone:
        del holder[way[-1]]
    else:
        holder[way[-1]] = to
    return content


ENVIRONMENT = ("training.yaml", "environment")
BED = ("affordances.yaml", "affordances", 0)


def test_a_pack_is_read_with_its_meters_by_their_index(tmp_path):
    pack = load_pack(written(tmp_path, CONTENT))
    assert pack.name == "L9"
    assert pack.meter_names == ("energy", "money")
    assert (pack.width, pack.height, pack.vision, pack.lifespan) == (5, 4, 2, 300)
    assert pack.move_price == {"energy": 0.005}
    bed, job = pack.affordances
    assert (bed.price_per_tick, bed.duration) == ({"money": 0.05}, 2)
    assert (job.hours, job.effects_on_completion) == ((8, 18), {"money": 0.2})
    assert [a.effects for a in pack.actions] == [{"energy": 0.002}, {"energy": -0.001}]
    assert (pack.vital_meters, pack.paid_in) == ((0,), 1)
    Town(pack, num_layouts=4).reset(1, 2)


def test_all_is_seen_where_observability_is_not_partial(tmp_path):
    content = changed(*ENVIRONMENT, "partial_observability", to=False)
    assert load_pack(written(tmp_path, content)).vision == 4


def test_enabled_affordances_are_named_or_numbered(tmp_path):
    for number, wanted in enumerate((["Job"], ["1"])):
        content = changed(*ENVIRONMENT, "enabled_affordances", to=wanted)
        assert load_pack(written(tmp_path / str(number), content)).affordance_names == ("Job",)


def test_enabled_actions_and_capacity_are_honoured(tmp_path):
    moves = ["UP", "DOWN", "LEFT", "RIGHT", "INTERACT", "WAIT"]
    content = changed("training.yaml", "training", "enabled_actions", to=[*moves, "SING"])
    content["affordances.yaml"]["affordances"][0]["capacity"] = 1
    pack = load_pack(written(tmp_path, content))
    assert pack.action_names == (*moves, "SING")
    assert [a.capacity for a in pack.affordances] == [1, None]


def test_a_pack_that_says_that_it_may_be_infeasible_is_not_refused(tmp_path):
    dear = changed(*BED, "costs_per_tick", 0, "amount", to=0.9)
    with pytest.raises(PackError, match="more than an agent can ever own"):
        load_pack(written(tmp_path / "a", dear))
    dear["training.yaml"]["training"]["allow_unfeasible_universe"] = True
    assert load_pack(written(tmp_path / "b", dear)).affordances[0].price_per_tick["money"] == 0.9


REFUSED = {
    "misspelt affordance": (
        changed(*ENVIRONMENT, "enabled_affordances", to=["Bedd"]),
        "training.yaml: environment: enabled_affordances: unknown affordance 'Bedd'; use some of "
        "Bed, Job, 0, 1",
    ),
    "fixed places": (
        changed(*ENVIRONMENT, "randomize_affordances", to=False),
        "training.yaml: environment: randomize_affordances: places are drawn at random here; set "
        "it to true",
    ),
    "no moves": (
        changed("training.yaml", "training", "enabled_actions", to=["REST"]),
        "training.yaml: training: enabled_actions: UP cannot be taken away here; add it",
    ),
    "misspelt action": (
        changed("training.yaml", "training", "enabled_actions", to=["SNG"]),
        "training.yaml: training: enabled_actions: unknown action 'SNG'; use some of UP, DOWN, "
        "LEFT, RIGHT, INTERACT, WAIT, REST, SING",
    ),
    "another range": (
        changed("bars.yaml", "bars", 0, "range", to=[0, 100]),
        "bars.yaml: bars.0: range: meters are in [0, 1] here, got [0, 100]; rescale it",
    ),
    "a field is missing": (
        changed("bars.yaml", "bars", 1, "base_depletion", gone=True),
        "bars.yaml: bars.1: base_depletion: this field is required; add it",
    ),
    "a name is a number": (
        changed(*BED, "name", to=3),
        "affordances.yaml: affordances.0: name: must be a name, got 3",
    ),
    "a cost is a word": (
        changed(*BED, "costs", 0, "amount", to="much"),
        "affordances.yaml: Bed: costs.0: amount: must be a number, got 'much'",
    ),
    "a rule that is not known": (
        changed(*BED, "availability", to=[{"meter": "energy", "min": 0.2}]),
        "affordances.yaml: Bed: availability: not supported here; remove it",
    ),
    "a capability that is not known": (
        changed(*BED, "capabilities", 0, "type", to="cooldown"),
        "affordances.yaml: Bed: capabilities.0: type: 'cooldown' is not supported here; remove it",
    ),
    "another space": (
        changed("substrate.yaml", "grid", "boundary", to="wrap"),
        "substrate.yaml: grid: boundary: only clamp exists here, got 'wrap'",
    ),
    "another reward": (
        changed("drive_as_code.yaml", "drive_as_code", "shaping", to=[{"type": "approach"}]),
        "drive_as_code.yaml: drive_as_code: shaping: does not exist here; leave it empty",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_told_by_file_field_and_fix(what, tmp_path):
    content, line = REFUSED[what]
    with pytest.raises(PackError) as caught:
        load_pack(written(tmp_path, content))
    assert str(caught.value) == line


def test_newer_layouts_and_other_directories_are_told(tmp_path):
    pack = written(tmp_path, {"experiment.yaml": {}, "bars.yaml": {}})
    with pytest.raises(PackError, match=r"L9: experiment\.yaml: this layout .* is not read here"):
        load_pack(pack)
    pack = written(tmp_path / "b", {})
    with pytest.raises(PackError, match=r"L9: no Hamlet pack is in this directory; one has .*bars"):
        load_pack(pack)
    (pack / "levels").mkdir()
    with pytest.raises(PackError, match="L9: levels: this layout"):
        load_pack(pack)


def ways(content: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every field and entry."""
    items = content.items() if isinstance(content, dict) else enumerate(content)
    found = []
    for key, value in items:
        found.append((*way, key))
        if isinstance(value, dict | list):
            found += ways(value, (*way, key))
    return found


def test_no_mangled_pack_is_met_with_a_python_error(tmp_path):
    """Each field in turn is dropped, or holds what it should not."""
    pack, told = written(tmp_path, CONTENT), []
    for way in ways(CONTENT):
        odd = [changed(*way, gone=True)]
        odd += [changed(*way, to=value) for value in (None, [], {}, [[1]], "x", -7, {"x": [1]})]
        for content in odd:
            if way[0] not in content:
                (pack / way[0]).unlink()
            else:
                (pack / way[0]).write_text(yaml.safe_dump(content[way[0]]))
            try:
                load_pack(pack)
            except PackError as error:
                told.append(str(error))
            (pack / way[0]).write_text(yaml.safe_dump(CONTENT[way[0]]))
    assert len(told) > 300
    assert [line for line in told if "\n" in line] == []


def test_a_world_of_two_begins_anew_when_both_are_gone(tmp_path):
    content = changed("training.yaml", "population", "num_agents", to=2)
    town = Town(load_pack(written(tmp_path, content)), num_layouts=2)
    state, wait = town.reset(0, 1), torch.full((1, 2), town.action_names.index("WAIT"))
    energy = town.meter_names.index("energy")
    for gone in ([True, False], [True, True]):
        meters = state["meters"].clone()
        meters[0, gone.index(True) if gone.count(True) == 1 else 1, energy] = 0.001
        state = town.step_and_reset_core(town.rearrange(state, meters=meters), wait)
        assert state["episode_over"].tolist() == [all(gone)]
        assert state["tick"].tolist() == [0 if all(gone) else 1]
