"""Config packs of the public Hamlet, read unchanged.

A Hamlet pack is a directory of YAML files (bars, cascades, affordances, training, substrate,
drive_as_code) with `global_actions.yaml` beside it. Its rules map onto `mode: hamlet`: effects in
file order, clamped one after another. What our town has no rule for is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import yaml

from hamlet.artifacts import parse_yaml
from hamlet.town.check import build_pack
from hamlet.town.schema import BASE_ACTIONS, Pack, PackError

CATEGORIES = ("primary_to_pivotal", "secondary_to_primary", "secondary_to_pivotal_weak")
FILES = (
    "affordances.yaml", "bars.yaml", "cascades.yaml", "drive_as_code.yaml", "substrate.yaml",
    "training.yaml",
)  # fmt: skip
ENVIRONMENT = {
    "partial_observability", "vision_range", "enabled_affordances", "randomize_affordances",
    "enable_temporal_mechanics", "enabled_actions",
}  # fmt: skip
AFFORDANCE = {
    "name", "duration_ticks", "operating_hours", "costs", "costs_per_tick", "effect_pipeline",
    "capabilities", "capacity",
    # words about it, and where it stands if it were not drawn at random
    "id", "category", "interaction_type", "description", "teaching_note", "design_intent",
    "position",
}  # fmt: skip
CAPABILITIES = ("multi_tick", "instant")


def load_hamlet_pack(folder: Path) -> Pack:
    """A Hamlet pack directory as a Pack of mode `hamlet`.

    Raises PackError naming the file and the field for anything missing, malformed or unsupported.
    """
    folder = Path(folder).resolve()
    _known_layout(folder)
    training = _read(folder / "training.yaml")
    environment, taught = training.section("environment"), training.optional("training")
    environment.only(ENVIRONMENT)
    if not environment.flag("randomize_affordances"):
        environment.fail("randomize_affordances", "places are drawn at random here; set it to true")
    grid = _grid(_read(folder / "substrate.yaml"))
    size = grid["width"], grid["height"]
    sees_all = not environment.flag("partial_observability")
    whole = max((n for n in size if isinstance(n, int)), default=2) - 1
    enabled = taught if "enabled_actions" in taught else environment
    content = {
        "name": folder.name,
        "mode": "hamlet",
        "width": size[0],
        "height": size[1],
        "agents": training.section("population")["num_agents"],
        "lifespan": training.section("curriculum")["max_steps_per_episode"],
        "temporal": environment.flag("enable_temporal_mechanics"),
        "vision": whole if sees_all else environment["vision_range"],
        **_bars(_read(folder / "bars.yaml")),
        "actions": _actions(folder, enabled),
        "affordances": _affordances(_read(folder / "affordances.yaml"), environment),
        **_couplings(_read(folder / "cascades.yaml")),
        "reward": _reward(_read(folder / "drive_as_code.yaml").section("drive_as_code")),
    }
    may_fail = "allow_unfeasible_universe" in taught and taught.flag("allow_unfeasible_universe")
    return build_pack(content, folder.name, feasible=not may_fail)


class _Fields(dict[str, Any]):
    """The fields of a mapping in a file; `where` says which, for errors."""

    def __init__(self, content: Any, where: str) -> None:
        if not isinstance(content, dict):
            raise PackError(f"{where}: must be a mapping of fields, got {content!r:.60}")
        super().__init__(content)
        self.where = where

    def fail(self, name: object, message: str) -> NoReturn:
        raise PackError(f"{self.where}: {name}: {message}")

    def __missing__(self, name: str) -> NoReturn:
        self.fail(name, "this field is required; add it")

    def only(self, known: Iterable[str]) -> None:
        """Refuse what no rule of ours would hear of."""
        for name in self:
            if name not in known and self[name]:
                self.fail(name, "not supported here; remove it")

    def of(self, name: str, kind: type | tuple[type, ...], what: str) -> Any:
        value = self[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            self.fail(name, f"must be {what}, got {value!r:.60}")
        return value

    def text(self, name: str) -> str:
        return self.of(name, str, "a name")

    def number(self, name: str) -> float:
        return self.of(name, (int, float), "a number")

    def flag(self, name: str) -> bool:
        return self.of(name, bool, "true or false")

    def section(self, name: str) -> _Fields:
        return _Fields(self[name], f"{self.where}: {name}")

    def optional(self, name: str) -> _Fields:
        return _Fields(self.get(name) or {}, f"{self.where}: {name}")

    def rows(self, name: str) -> list[_Fields]:
        """The mappings of a list; none where there is no such field."""
        rows = self.get(name) or []
        if not isinstance(rows, list):
            self.fail(name, f"must be a list, got {rows!r:.60}")
        return [_Fields(row, f"{self.where}: {name}.{i}") for i, row in enumerate(rows)]

    def names(self, name: str, known: Iterable[str], what: str) -> list[str]:
        """A list of names of something."""
        known = list(known)
        for each in self.of(name, list, "a list of names"):
            if each not in known:
                self.fail(name, f"unknown {what} {each!r}; use some of {', '.join(known)}")
        return self[name]


def _known_layout(folder: Path) -> None:
    for newer in ("experiment.yaml", "levels"):
        if (folder / newer).exists():
            raise PackError(
                f"{folder.name}: {newer}: this layout of a Hamlet pack is not read here; give a "
                f"directory with {', '.join(FILES)}"
            )
    if not any((folder / name).is_file() for name in FILES):
        raise PackError(
            f"{folder.name}: no Hamlet pack is in this directory; one has {', '.join(FILES)}"
        )


def _read(path: Path) -> _Fields:
    if not path.is_file():
        raise PackError(f"{path.parent.name}: {path.name} is missing; a Hamlet pack needs it")
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:
        raise PackError(f"{path.name}: not readable: {' '.join(str(error).split())}") from None
    return _Fields(content, path.name)


def _grid(substrate: _Fields) -> _Fields:
    if substrate.get("type", "grid") != "grid":
        substrate.fail("type", f"there is only a grid here, got {substrate['type']!r:.60}")
    grid = substrate.section("grid")
    for name, only in (("topology", "square"), ("boundary", "clamp")):
        if grid[name] != only:
            grid.fail(name, f"only {only} exists here, got {grid[name]!r:.60}")
    return grid


def _bars(content: _Fields) -> dict[str, Any]:
    """Meters by their index, what ends a life, and what acting costs."""
    bars = sorted(content.rows("bars"), key=lambda bar: bar.number("index"))
    if [bar["index"] for bar in bars] != list(range(len(bars))):
        content.fail("bars", "index must number the bars 0, 1, 2, ... without gaps")
    for bar in bars:
        if bar.get("range", [0, 1]) != [0, 1]:
            bar.fail("range", f"meters are in [0, 1] here, got {bar['range']!r:.60}; rescale it")
    return {
        "meters": [
            {"name": b["name"], "initial": b["initial"], "depletion": b["base_depletion"]}
            for b in bars
        ],
        "terminal": [
            {"meter": end["meter"], "op": end["operator"], "value": end["value"]}
            for end in content.rows("terminal_conditions")
        ],
        "move_price": _nonzero(bars, "base_move_depletion"),
        "interact_price": _nonzero(bars, "base_interaction_cost"),
    }


def _nonzero(bars: list[_Fields], field: str) -> dict[str, float]:
    return {bar.text("name"): bar[field] for bar in bars if bar.get(field)}


def _amounts(fields: _Fields, name: str) -> dict[str, float]:
    """[{meter, amount}] as a mapping; two entries for one meter would round differently."""
    found: dict[str, float] = {}
    for entry in fields.rows(name):
        meter = entry.text("meter")
        if meter in found:
            fields.fail(name, f"two entries for {meter}; merge them")
        found[meter] = entry.number("amount")
    return found


def _actions(folder: Path, enabled: _Fields) -> list[dict[str, Any]]:
    """Custom actions that are enabled; a negative cost restores."""
    places = (folder / "global_actions.yaml", folder.parent / "global_actions.yaml")
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise PackError(f"{folder.name}: global_actions.yaml is missing; put it beside the pack")
    actions: list[dict[str, Any]] = []
    for action in _read(path).rows("custom_actions"):
        costs, effects = action.optional("costs"), action.optional("effects")
        both = [meter for meter in costs if meter in effects]
        if both:
            action.fail("effects", f"{both[0]} is in costs, too; merge them")
        amounts = {meter: -costs.number(meter) for meter in costs} | effects
        actions.append({"name": action.text("name"), "effects": amounts})
    if enabled.get("enabled_actions") is None:
        return actions
    names = [*BASE_ACTIONS, *(action["name"] for action in actions)]
    wanted = enabled.names("enabled_actions", names, "action")
    for name in BASE_ACTIONS:
        if name not in wanted:
            enabled.fail("enabled_actions", f"{name} cannot be taken away here; add it")
    return [action for action in actions if action["name"] in wanted]


def _affordances(content: _Fields, environment: _Fields) -> list[dict[str, Any]]:
    """The affordances that are enabled, by name or by id."""
    rows, wanted = content.rows("affordances"), None
    if environment["enabled_affordances"] is not None:
        known = [row.text("name") for row in rows]
        known += [row["id"] for row in rows if isinstance(row.get("id"), str)]
        wanted = environment.names("enabled_affordances", known, "affordance")
    return [
        _affordance(row)
        for row in rows
        if wanted is None or row["name"] in wanted or row.get("id") in wanted
    ]


def _affordance(row: _Fields) -> dict[str, Any]:
    row.where = f"affordances.yaml: {row.text('name')}"
    row.only(AFFORDANCE)
    for capability in row.rows("capabilities"):
        if capability["type"] not in CAPABILITIES:
            capability.fail("type", f"{capability['type']!r:.60} is not supported here; remove it")
    effects = row.optional("effect_pipeline")
    effects.only({"per_tick", "on_completion"})
    return {
        "name": row["name"],
        "duration": row.get("duration_ticks") or 1,
        "hours": row.of("operating_hours", list, "[open, close]"),
        "capacity": row.get("capacity"),
        "price": _amounts(row, "costs"),
        "price_per_tick": _amounts(row, "costs_per_tick"),
        "effects_per_tick": _amounts(effects, "per_tick"),
        "effects_on_completion": _amounts(effects, "on_completion"),
    }


def _couplings(content: _Fields) -> dict[str, Any]:
    """Modulations, and the cascades in the order the environment executes them.

    That order is by category, within one by the target's index; `execution_order` is ignored there.
    """
    cascades = content.rows("cascades")
    for cascade in cascades:
        if cascade["category"] not in CATEGORIES:
            cascade.fail(
                "category",
                f"unknown {cascade['category']!r} would be dropped silently; use one of "
                f"{', '.join(CATEGORIES)}",
            )
    ordered = sorted(
        cascades, key=lambda c: (CATEGORIES.index(c["category"]), c.number("target_index"))
    )
    return {
        "modulations": [
            {
                "source": m["source"],
                "target": m["target"],
                "rate": m["baseline_depletion"],
                "base": m["base_multiplier"],
                "range": m["range"],
            }
            for m in content.rows("modulations")
        ],
        "cascades": [
            {key: c[key] for key in ("source", "target", "threshold", "strength")} for c in ordered
        ],
    }


def _reward(drive: _Fields) -> dict[str, Any]:
    extrinsic = drive.section("extrinsic")
    if extrinsic["type"] != "multiplicative":
        extrinsic.fail("type", f"only multiplicative exists here, got {extrinsic['type']!r:.60}")
    for name in ("shaping", "modifiers"):
        if drive.get(name):
            drive.fail(name, "does not exist here; leave it empty")
    return {"base": extrinsic["base"], "meters": extrinsic["bars"], "retirement_bonus": 1.0}
