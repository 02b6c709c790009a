"""What each stage depends on, from what it imports; written into dvc.yaml.

    python -m stages.dependencies            # rewrite the dependencies in dvc.yaml
    python -m stages.dependencies --check    # name the stages where dvc.yaml says something else

A stage's dependencies in dvc.yaml are

- the source files that it imports, directly or not, but for those of NEUTRAL; a folder where all of
  its files are among them;
- the artifacts that it reads, which are kept as they stand in dvc.yaml: a test traces what every
  stage opens;
- its sections of params.yaml, and the same sections of the chosen preset in artifacts/world.json;
- from there too: the content of the town pack or of the proofs' data, and the versions of the
  libraries that it imports.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from stages.world import LIBRARIES, WORLD

ROOT = Path(__file__).resolve().parents[1]
OWN = {"hamlet": "pipeline", "stages": "stages"}  # package -> its folder
# Code that stages import and that changes nothing they make; all else is a dependency.
NEUTRAL = {
    "stages/beside.py": "runs other stages meanwhile",
    "stages/common.py": "progress, endings and the tracked run around a stage's own work",
    "stages/log.py": "tells what a training reports",
    "stages/meanwhile.py": "does a stage's work in another process",
    "stages/overall.py": "tells how far a whole run is",
    "stages/paths.py": "names of files, which dvc.yaml names too",
    "stages/ranks.py": "starts a stage in several processes",
    "stages/world.py": "its result, artifacts/world.json, is the dependency",
    "pipeline/artifacts.py": "how files are written, hashed and checked",
    "pipeline/device.py": "where a stage computes, which is the machine's affair",
    "pipeline/driver.py": "whether there is a GPU, which is the machine's affair too",
    "pipeline/params.py": "how params.yaml is checked; its values are dependencies",
    "pipeline/profiling.py": "measures where time goes",
    "pipeline/tracking": "MLflow is told what a stage did",
    "pipeline/learning/checkpoint.py": "an interrupted training goes on to the same bytes",
    "pipeline/learning/log.py": "what a training reports to",
    "pipeline/town/render.py": "pictures, which only DRAWN show",
}
STATEMENTS = (ast.stmt, ast.ExceptHandler, ast.match_case)
DRAWN = {"evaluate"}  # stages that make pictures of the town


# ------------------------------------------------------------------------------------------------
# Imports


def file_of(module: str) -> Path | None:
    """The source file of one of this repository's modules, below its real folder; else None."""
    package, *rest = module.split(".")
    if package not in OWN:
        return None
    path = ROOT.joinpath(OWN[package], *rest)
    for candidate in (path.with_suffix(".py") if rest else None, path / "__init__.py"):
        if candidate and candidate.is_file():
            return candidate
    return None


def name_of(path: Path) -> str:
    """pipeline/town/town.py -> hamlet.town.town"""
    package = {folder: name for name, folder in OWN.items()}
    first, *rest = path.resolve().relative_to(ROOT).with_suffix("").parts
    names = [package[first], *rest]
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


def _for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def _imported(module: str, node: ast.AST) -> Iterator[tuple[str, str | None]]:
    """(module, name taken from it) of every import below a node, in functions too."""
    path = file_of(module)
    assert path is not None, module
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, None) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            package = module if path.name == "__init__.py" else module.rpartition(".")[0]
            above = package.split(".")[: len(package.split(".")) - child.level + 1]
            base = ".".join([*(above if child.level else []), *filter(None, [child.module])])
            yield from ((base, alias.name) for alias in child.names)
        # No expression holds one, and most of a tree is expressions.
        elif isinstance(child, STATEMENTS) and not _for_types(child):
            yield from _imported(module, child)


@cache
def _tree(module: str) -> ast.Module:
    path = file_of(module)
    assert path is not None, module
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def _on_demand(package: str) -> dict[str, str]:
    """Names that a package loads when they are first used: those it imports for type checkers."""
    blocks = [node for node in _tree(package).body if _for_types(node)]
    return {name: base for block in blocks for base, name in _imported(package, block) if name}


def _resolved(base: str, name: str | None) -> set[str]:
    """The modules that run when `name` is taken from `base`."""
    if name is None or file_of(base) is None:
        return {base}
    if file_of(f"{base}.{name}"):
        return {base, f"{base}.{name}"}
    home = _on_demand(base).get(name)
    return {base} | (_resolved(home, name) if home else set())


@cache
def imports(module: str) -> frozenset[str]:
    """What a module imports, anywhere in it; importing a.b.c runs a and a.b too."""
    found: set[str] = set()
    for base, name in _imported(module, _tree(module)):
        found |= _resolved(base, name)
    for name in list(found):
        if file_of(name):
            parts = name.split(".")
            found |= {".".join(parts[:i]) for i in range(1, len(parts))}
    return frozenset(found)


def reached(module: str) -> dict[str, str]:
    """Everything imported, directly or not -> the module that imports it."""
    seen: dict[str, str] = {}
    waiting = [module]
    while waiting:
        current = waiting.pop()
        for name in imports(current):
            if name not in seen:
                seen[name] = current
                if file_of(name):
                    waiting.append(name)
    return seen


# ------------------------------------------------------------------------------------------------
# Dependencies


def module_of(command: str) -> str:
    """The module that a stage's command runs: `python -m stages.ranks auto social` runs social, and
    `python -m stages.beside prove_evaluate -- python -m stages.agent` runs agent."""
    words = command.split(" -- ")[-1].split()
    module = words[words.index("-m") + 1]
    return f"stages.{words[-1]}" if module == "stages.ranks" else module


def sources(stage: str, module: str) -> list[str]:
    """The files, or whole folders, of code that shapes what a stage makes; relative, sorted."""
    neutral = {path for path in NEUTRAL if stage not in DRAWN or not path.endswith("render.py")}
    files = {file_of(name) for name in (module, *reached(module))} - {None}
    paths = {file.relative_to(ROOT).as_posix() for file in files if file}
    kept = {
        path
        for path in paths
        if not path.endswith("__init__.py")  # they only name what is elsewhere
        and not any(_below(path, known) for known in neutral)
    }
    return sorted(_by_folder(kept))


def _below(path: str, known: str) -> bool:
    return path in (known, f"{known}.py") or path.startswith(f"{known}/")


def _by_folder(paths: set[str]) -> set[str]:
    """The same with a folder in place of its files where nothing else is in it."""
    folders = {str(Path(path).parent) for path in paths} - {"pipeline", "stages"}
    for folder in folders:
        inside = [p for p in (ROOT / folder).rglob("*") if p.is_file() and p.suffix != ".pyc"]
        names = {p.relative_to(ROOT).as_posix() for p in inside if p.name != "__init__.py"}
        if names <= paths:
            paths = (paths - names) | {folder}
    return paths


def libraries(module: str) -> list[str]:
    """Those of LIBRARIES that a stage's code imports, for what they compute."""
    names = {name.split(".")[0] for name in reached(module)}
    names |= {"onnxscript"} if "onnx" in names else set()  # PyTorch writes ONNX files through it
    return sorted(names & set(LIBRARIES))


def named_params(sections: Sequence[str], module: str) -> list[str]:
    """The keys of artifacts/world.json that a stage depends on."""
    contents = [f"{name}.sha256" for name in ("town", "proofs") if name in sections]
    preset = [f"preset.{section}" for section in sections]
    return [*contents, *preset, *(f"libraries.{name}" for name in libraries(module))]


def derive(stages: CommentedMap) -> None:
    """Put the dependencies of every stage of dvc.yaml where they belong, in place."""
    for name, stage in stages.items():
        module = module_of(stage["cmd"])
        made = [dep for dep in stage.get("deps", []) if not _is_code(dep)]
        if name == "world":
            continue
        stage["deps"] = CommentedSeq([*sources(name, module), *made])
        sections = [entry for entry in stage.get("params", []) if isinstance(entry, str)]
        world = CommentedMap({WORLD.as_posix(): CommentedSeq(named_params(sections, module))})
        stage["params"] = CommentedSeq([*sections, world])


def _is_code(dep: str) -> bool:
    return dep.split("/")[0] in OWN.values()


def _yaml() -> YAML:
    yaml = YAML()
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.width = 100
    return yaml


def differing(path: Path) -> list[str]:
    """The stages of a dvc.yaml whose dependencies are not the derived ones."""
    given, derived = _yaml().load(path), _yaml().load(path)
    derive(derived["stages"])
    return [name for name, stage in derived["stages"].items() if stage != given["stages"][name]]


def _wants(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args(arguments).check
    path = ROOT / "dvc.yaml"
    stale = differing(path)
    if check:
        if stale:
            print(
                f"dvc.yaml: other dependencies than the code has: {_wants(stale)}: run "
                "`python -m stages.dependencies`",
                file=sys.stderr,
            )
        return 1 if stale else 0
    content = _yaml().load(path)
    derive(content["stages"])
    with path.open("w", encoding="utf-8") as file:
        _yaml().dump(content, file)
    print(f"dvc.yaml: {_wants(stale)} written anew" if stale else "dvc.yaml is as it should be")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
