"""world: what the params name but do not hold, as one file on which every stage depends.

DVC sees the name of a town pack, of a folder of facts or of a preset; this stage writes what they
hold: the pack with all that it extends, the facts' hash, the preset's values, the versions of the
libraries. It always runs, in about a second, so an edit of any of them reaches the stages that it
concerns and no other.

So that `dvc status` sees such edits too, `inputs/` gets a link to each file that was read outside
the built-in packs: DVC hashes what a link points to.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hamlet.artifacts import HamletError, sha256_path, write_json
from hamlet.params import CHOSEN, PRESETS, Params, chosen_preset, load_params, read_overlay
from hamlet.town import load_pack
from stages.common import one_line_errors
from stages.overall import timed

WORLD = Path("artifacts/world.json")
INPUTS = Path("inputs")
PINS = Path("constraints.txt")
KINSHIP = "kinship"  # the facts that are made from the seed
# Libraries that compute what stages make, by the name they are imported by -> their distributions.
LIBRARIES = {
    "numpy": ("numpy",),
    "onnx": ("onnx",),
    "onnxruntime": ("onnxruntime-gpu", "onnxruntime"),
    "onnxscript": ("onnxscript",),
    "scipy": ("scipy",),
    "tensordict": ("tensordict",),
    "torch": ("torch",),
}


def main() -> None:
    with one_line_errors("world"), timed("world"):
        params, preset = load_params(), chosen_preset(Path())
        if preset:
            refuse_masked(preset)
        read: list[Path] = []
        pack = _traced(read, lambda: load_pack(params.town.pack))
        overlay = read_overlay(Path(), preset) if preset else {}
        world = {
            "town": {
                "name": pack.name,
                "sha256": pack.content_hash,
                "pack": pack.model_dump(mode="json"),
            },
            "proofs": {"data": params.proofs.data, "sha256": facts(params, read)},
            "preset": {name: overlay.get(name, {}) for name in sorted(Params.model_fields)},
            "libraries": {name: library(name) for name in LIBRARIES},
        }
        write_json(WORLD, world)
        link(read)
        for name, found in world["libraries"].items():
            if "pinned" in str(found):
                print(f"world: {name} is {found}: results will differ", file=sys.stderr)
        print(f"world: town {pack.name}, preset {preset or 'default'}, facts {params.proofs.data}")


def facts(params: Params, read: list[Path]) -> str:
    """sha256 of the folder of facts, or what says that they are made from the seed.

    Raises:
        HamletError: there is no such folder.
    """
    if params.proofs.data == KINSHIP:
        return KINSHIP
    folder = Path(params.proofs.data)
    if not folder.is_dir():
        raise HamletError(
            f"params.yaml: proofs.data is {folder}, which is not a folder",
            f"give a folder that holds train.txt, or {KINSHIP}",
        )
    read.append(folder)
    return sha256_path(folder)


def library(name: str) -> str:
    """The installed version, without its build; what constraints.txt pins where that is another."""
    installed = "missing"
    for distribution in LIBRARIES[name]:
        with suppress(PackageNotFoundError):
            installed = version(distribution).partition("+")[0]
            break
    pins = PINS.read_text(encoding="utf-8") if PINS.is_file() else ""
    names = "|".join(map(re.escape, LIBRARIES[name]))
    pinned = re.search(rf"(?mi)^(?:{names})==([^\s;+]+)", pins)
    if pinned and pinned[1] != installed:
        return f"{installed} ({PINS} has pinned {pinned[1]})"
    return installed


def _traced(read: list[Path], load: Any) -> Any:
    """The result of `load`; the files that it opened are added to `read`."""
    tracing = True

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if tracing and event == "open" and isinstance(arguments[0], str | os.PathLike):
            path = Path(arguments[0])
            if path.suffix not in (".py", ".pyc") and path.is_file():
                read.append(path)

    sys.addaudithook(hook)  # for good: one cannot be removed, but this process ends soon
    try:
        return load()
    finally:
        tracing = False


def link(read: list[Path]) -> None:
    """Make the links in `inputs/` those of the files read, and no other."""
    packs = Path(load_pack.__code__.co_filename).resolve().parent
    wanted: dict[str, Path] = {}
    for path in read:
        if packs not in path.resolve().parents:
            name = re.sub(r"[^\w.-]+", "_", path.as_posix().strip("./"))
            wanted[name] = Path(os.path.relpath(path.absolute(), INPUTS.absolute()))
    INPUTS.mkdir(exist_ok=True)
    for old in INPUTS.iterdir():
        if old.is_symlink() and wanted.get(old.name) != Path(os.readlink(old)):
            old.unlink()
    for name, target in wanted.items():
        place = INPUTS / name
        with suppress(OSError):  # where the system has no links, only `dvc status` knows less
            if not place.is_symlink():
                place.symlink_to(target)


def refuse_masked(preset: str) -> None:
    """Refuse an experiment that sets a value in params.yaml which the preset sets too.

    Raises:
        HamletError: it would have been ignored without a word.
    """
    base = os.environ.get("DVC_EXP_BASELINE_REV")
    if not base:
        return
    shown = subprocess.run(
        ["git", "show", f"{base}:./params.yaml"], capture_output=True, text=True, check=False
    )
    if shown.returncode:
        return
    import yaml

    before, now = yaml.safe_load(shown.stdout), yaml.safe_load(Path("params.yaml").read_text())
    for section, values in read_overlay(Path(), preset).items():
        keys = values if isinstance(values, dict) else [None]
        for key in keys:
            old, new = ((x[section] if key is None else x[section].get(key)) for x in (before, now))
            if json.dumps(old) != json.dumps(new):
                field = section if key is None else f"{section}.{key}"
                raise HamletError(
                    f"{field} is set to {new} in params.yaml, the preset {preset} overrules it",
                    f"give --set-param {PRESETS}/{preset}.yaml:{field}={new} (or remove "
                    f"{PRESETS}/{CHOSEN})",
                )


if __name__ == "__main__":
    main()
