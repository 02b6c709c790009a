"""Packs from their files: our own YAML, or a directory of the public Hamlet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from hamlet.artifacts import HamletError, card_path, how_to_make, parse_yaml
from hamlet.town.check import build_pack, one_line
from hamlet.town.hamlet_packs import load_hamlet_pack
from hamlet.town.schema import Pack, PackError

PACKS = Path(__file__).parent / "packs"


def load_pack(source: str | Path) -> Pack:
    """Read a pack by name (`l4_contention`), from a YAML file, or from a Hamlet pack directory.

    A YAML pack may name another as `extends`: its own fields replace or, where they are mappings
    or lists of named things, amend the other's; null restores the schema's default.

    Raises PackError with one line that names the file, the field and the fix.
    """
    path = Path(source)
    if path.is_dir():
        return load_hamlet_pack(path)
    if not path.suffix and not path.exists():
        path = PACKS / f"{source}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in PACKS.glob("*.yaml")))
        raise PackError(
            f"{source}: no such pack; give a file, a Hamlet directory or one of {known}"
        )
    return build_pack(_read_with_parents(path), path.name)


def pack_of_card(card: Mapping[str, Any], agent: str | Path) -> Pack:
    """The pack that an agent was trained in, from its card; `agent` is its file, for errors.

    Raises HamletError where the card has none, or another than it says.
    """
    if "resolved_pack" not in card:
        raise HamletError(f"{agent}: its card has no town pack", how_to_make(agent))
    try:
        pack = Pack.model_validate(card["resolved_pack"])
    except ValidationError as error:
        raise HamletError(one_line(error, f"{card_path(agent)}: resolved_pack")) from None
    if pack.content_hash != card["pack"]:
        raise HamletError(
            f"{agent}: the town pack on its card is not the one it was trained in: "
            f"{pack.content_hash} instead of {card['pack']}",
            how_to_make(agent),
        )
    return pack


def _read_with_parents(path: Path, depth: int = 0) -> dict[str, Any]:
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:
        raise PackError(
            f"{path.name}: not readable as YAML: {' '.join(str(error).split())}"
        ) from None
    if not isinstance(content, dict):
        raise PackError(
            f"{path.name}: a pack is a mapping of fields, found {type(content).__name__}"
        )
    parent = content.pop("extends", None)
    if parent is None:
        return content
    candidates = (path.parent / f"{parent}.yaml", PACKS / f"{parent}.yaml")
    found = next((file for file in candidates if file.is_file()), None)
    if found is None or depth > 8:
        raise PackError(f"{path.name}: extends: no pack named {parent!r} beside it or built in")
    base = _read_with_parents(found, depth + 1)
    for settings in (base.get("experts") or {}).values():  # measured in another town
        settings.pop("contended", None)
        settings.pop("alone", None)
    return _amend(base, content)


def _amend(base: Any, change: Any) -> Any:
    """`change` on top of `base`: mappings by key, lists of named things by name."""
    if isinstance(base, dict) and isinstance(change, dict):
        merged = base | {key: _amend(base.get(key), value) for key, value in change.items()}
        return {key: value for key, value in merged.items() if value is not None}
    named = [base, change]
    if all(isinstance(x, list) and x and all(isinstance(i, dict) and "name" in i for i in x)
           for x in named):  # fmt: skip
        mine = {item["name"]: item for item in change}
        amended = [_amend(item, mine.pop(item["name"], {})) for item in base]
        return amended + list(mine.values())
    return change
