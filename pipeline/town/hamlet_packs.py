"""Config packs of the public Hamlet, read unchanged.

A Hamlet pack is a directory of YAML files (bars, cascades, affordances, training, substrate,
drive_as_code) with `global_actions.yaml` beside it. Its rules map onto `mode: hamlet`: effects in
file order, clamped one after another. What our town has no rule for is refused by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from hamlet.town.check import build_pack
from hamlet.town.schema import Pack, PackError

CATEGORIES = ("primary_to_pivotal", "secondary_to_primary", "secondary_to_pivotal_weak")


def load_hamlet_pack(folder: Path) -> Pack:
    """A Hamlet pack directory as a Pack of mode `hamlet`.

    Raises PackError naming the file and the field for anything missing, malformed or unsupported.
    """
    folder = Path(folder)
    training = _read(folder / "training.yaml")
    environment = _field(training, "environment", "training.yaml")
    temporal = bool(_field(environment, "enable_temporal_mechanics", "training.yaml: environment"))
    bars = sorted(
        _field(_read(folder / "bars.yaml"), "bars", "bars.yaml"), key=lambda bar: bar["index"]
    )
    if [bar["index"] for bar in bars] != list(range(len(bars))):
        raise PackError("bars.yaml: index: must number the bars 0, 1, 2, ... without gaps")
    grid = _field(_read(folder / "substrate.yaml"), "grid", "substrate.yaml")
    if grid.get("topology") != "square" or grid.get("boundary") != "clamp":
        raise PackError(
            "substrate.yaml: grid: only topology square with boundary clamp exists here"
        )
    partial = bool(environment["partial_observability"])
    content = {
        "name": folder.name,
        "mode": "hamlet",
        "width": grid["width"],
        "height": grid["height"],
        "agents": _field(training, "population", "training.yaml")["num_agents"],
        "lifespan": _field(training, "curriculum", "training.yaml")["max_steps_per_episode"],
        "temporal": temporal,
        "vision": environment["vision_range"]
        if partial
        else max(grid["width"], grid["height"]) - 1,
        "meters": [
            {"name": b["name"], "initial": b["initial"], "depletion": b["base_depletion"]}
            for b in bars
        ],
        "terminal": [
            {"meter": t["meter"], "op": t["operator"], "value": t["value"]}
            for t in _read(folder / "bars.yaml")["terminal_conditions"]
        ],
        "move_price": _nonzero(bars, "base_move_depletion"),
        "interact_price": _nonzero(bars, "base_interaction_cost"),
        "actions": _actions(folder),
        "affordances": _affordances(folder, environment.get("enabled_affordances")),
        **_couplings(_read(folder / "cascades.yaml")),
        "reward": _reward(_read(folder / "drive_as_code.yaml")),
    }
    return build_pack(content, folder.name)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise PackError(f"{path.parent.name}: {path.name} is missing; a Hamlet pack needs it")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise PackError(f"{path.name}: not readable: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise PackError(f"{path.name}: must be a mapping of fields")
    return content


def _field(content: dict[str, Any], name: str, where: str) -> Any:
    if name not in content:
        raise PackError(f"{where}: {name}: this field is required")
    return content[name]


def _nonzero(bars: list[dict[str, Any]], field: str) -> dict[str, float]:
    return {bar["name"]: bar[field] for bar in bars if bar.get(field)}


def _sum_free(entries: list[dict[str, Any]], where: str) -> dict[str, float]:
    """[{meter, amount}] as a mapping; two entries for one meter would round differently."""
    found: dict[str, float] = {}
    for entry in entries or []:
        if entry["meter"] in found:
            raise PackError(
                f"affordances.yaml: {where}: two entries for {entry['meter']}; merge them"
            )
        found[entry["meter"]] = entry["amount"]
    return found


def _actions(folder: Path) -> list[dict[str, Any]]:
    """Custom actions; a negative cost restores."""
    places = (folder / "global_actions.yaml", folder.parent / "global_actions.yaml")
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise PackError(f"{folder.name}: global_actions.yaml is missing; put it beside the pack")
    actions = []
    for action in _read(path).get("custom_actions") or []:
        costs, effects = action.get("costs") or {}, action.get("effects") or {}
        if set(costs) & set(effects):
            raise PackError(f"{path.name}: {action['name']}: a meter is in both costs and effects")
        amounts = {meter: -amount for meter, amount in costs.items()} | effects
        actions.append({"name": action["name"], "effects": amounts})
    return actions


def _affordances(folder: Path, enabled: list[str] | None) -> list[dict[str, Any]]:
    found = []
    for a in _field(_read(folder / "affordances.yaml"), "affordances", "affordances.yaml"):
        if enabled is not None and a["name"] not in enabled and a["id"] not in enabled:
            continue
        pipeline = a.get("effect_pipeline") or {}
        extra = {k for k, v in pipeline.items() if v} - {"per_tick", "on_completion"}
        if extra:
            raise PackError(
                f"affordances.yaml: {a['name']}.effect_pipeline.{min(extra)}: not supported; "
                "use per_tick and on_completion"
            )
        found.append(
            {
                "name": a["name"],
                "duration": a.get("duration_ticks") or 1,
                "hours": tuple(a["operating_hours"]),
                "price": _sum_free(a["costs"], f"{a['name']}.costs"),
                "price_per_tick": _sum_free(a["costs_per_tick"], f"{a['name']}.costs_per_tick"),
                "effects_per_tick": _sum_free(
                    pipeline.get("per_tick", []), f"{a['name']}.per_tick"
                ),
                "effects_on_completion": _sum_free(
                    pipeline.get("on_completion", []), f"{a['name']}.on_completion"
                ),
            }
        )
    return found


def _couplings(content: dict[str, Any]) -> dict[str, Any]:
    """Modulations, and the cascades in the order the environment executes them.

    That order is by category, within one by the target's index; `execution_order` is ignored there.
    """
    cascades = content.get("cascades") or []
    for cascade in cascades:
        if cascade["category"] not in CATEGORIES:
            raise PackError(
                f"cascades.yaml: {cascade['name']}.category: unknown {cascade['category']!r} would "
                f"be dropped silently; use one of {', '.join(CATEGORIES)}"
            )
    ordered = sorted(cascades, key=lambda c: (CATEGORIES.index(c["category"]), c["target_index"]))
    return {
        "modulations": [
            {
                "source": m["source"],
                "target": m["target"],
                "rate": m["baseline_depletion"],
                "base": m["base_multiplier"],
                "range": m["range"],
            }
            for m in content.get("modulations") or []
        ],
        "cascades": [
            {key: c[key] for key in ("source", "target", "threshold", "strength")} for c in ordered
        ],
    }


def _reward(content: dict[str, Any]) -> dict[str, Any]:
    drive = _field(content, "drive_as_code", "drive_as_code.yaml")
    extrinsic = _field(drive, "extrinsic", "drive_as_code.yaml: drive_as_code")
    if extrinsic.get("type") != "multiplicative" or drive.get("shaping") or drive.get("modifiers"):
        raise PackError(
            "drive_as_code.yaml: only extrinsic type multiplicative without shaping and modifiers "
            "exists here"
        )
    return {"base": extrinsic["base"], "meters": extrinsic["bars"], "retirement_bonus": 1.0}
