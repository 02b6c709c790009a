"""Who may know whom: the import graph of the source, and processes in which a part is absent."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CLASSES = {
    "hamlet.modules.perception": {"perception", "freeze_perception"},
    "hamlet.modules.world_model": {"world_model"},
    "hamlet.modules.social": {"social"},
    "hamlet.modules.policy": {"policy", "population"},
}
STAGES = (
    "collect", "perception", "freeze_perception", "world_model", "social", "policy",
    "population", "agent", "evaluate", "register",
)  # fmt: skip


def file_of(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


@cache
def imports(module: str) -> frozenset[str]:
    """What a module imports, anywhere in it; of this repository's own, the modules themselves."""
    path = file_of(module)
    assert path is not None, module
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.update(alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                package = module if path.name == "__init__.py" else module.rpartition(".")[0]
                above = package.split(".")[: len(package.split(".")) - child.level + 1]
                base = ".".join([*(above if child.level else []), *filter(None, [child.module])])
                found.add(base)
                found.update(f"{base}.{alias.name}" for alias in child.names)
            if not (isinstance(child, ast.stmt) and is_for_types(child)):
                visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    own = {name for name in found if name.split(".")[0] in ("hamlet", "stages")}
    modules = {name for name in own if file_of(name)}
    for name in list(modules):  # importing a.b.c runs a and a.b
        parts = name.split(".")
        modules |= {".".join(parts[:i]) for i in range(1, len(parts))}
    return frozenset(modules | (found - own))


def reached(module: str) -> dict[str, str]:
    """Everything imported, directly or not -> the module that imports it."""
    seen: dict[str, str] = {}
    waiting = [module]
    while waiting:
        current = waiting.pop()
        for name in imports(current):
            if name not in seen:
                seen[name] = current
                if name.split(".")[0] in ("hamlet", "stages"):
                    waiting.append(name)
    return seen


def chain(seen: dict[str, str], name: str) -> str:
    path = [name]
    while path[-1] in seen and seen[path[-1]] not in path:
        path.append(seen[path[-1]])
    return " <- ".join(path)


def modules_of(package: str) -> list[str]:
    return sorted(name_of(path) for path in (ROOT / package).rglob("*.py"))


def test_the_walk_sees_what_is_there():
    seen = reached("stages.perception")
    assert "hamlet.modules.perception" in seen
    assert "torch" in {name.split(".")[0] for name in seen}
    assert "hamlet.ort" in reached("hamlet.cli")  # imported inside a function, two steps away


@pytest.mark.parametrize("stage", STAGES)
def test_no_stage_can_reach_the_class_of_another_stages_module(stage):
    seen = reached(f"stages.{stage}")
    bad = [name for name, owners in CLASSES.items() if name in seen and stage not in owners]
    assert not bad, [chain(seen, name) for name in bad]


def test_every_stage_is_looked_at():
    import yaml

    stages = set(yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"])
    assert set(STAGES) <= stages
    assert stages - set(STAGES) <= {
        "prove",
        "prove_evaluate",
    }  # the second world has its own modules


@pytest.mark.parametrize("stage", [*STAGES, "prove", "prove_evaluate"])
def test_a_stage_depends_on_all_the_code_that_shapes_its_result(stage):
    """Else DVC would keep a result that changed code no longer makes.

    The town reaches most stages only through the data set; logging and saving change no result, and
    `distributed` does nothing in the one process that DVC starts.
    """
    import yaml

    deps = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"][stage]["deps"]
    shaping = {"learning", "modules", "export", "proofs"}
    neutral = {"__init__.py", "log.py", "checkpoint.py", "distributed.py"}
    files = [file_of(name) for name in reached(f"stages.{stage}") if name.startswith("hamlet.")]
    paths = [file.resolve().relative_to(ROOT) for file in files if file]
    missing = [
        path.as_posix()
        for path in paths
        if path.parts[1] in shaping
        and path.name not in neutral
        and not any(path.as_posix() == dep or path.as_posix().startswith(f"{dep}/") for dep in deps)
    ]
    assert not missing


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("hamlet", "stages"),
        ("hamlet/town", "hamlet.learning"),
        ("hamlet/proofs", "hamlet.learning"),
        ("hamlet/serving", "torch"),
        ("hamlet/serving", "tensordict"),
        ("hamlet/serving", "hamlet.modules"),
    ],
)
def test_a_package_never_reaches(package, forbidden):
    found = []
    for module in modules_of(package):
        seen = reached(module)
        for name in seen:
            if name == forbidden or name.startswith(f"{forbidden}."):
                found.append(f"{module}: {chain(seen, name)}")
    assert not found


WITHOUT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
{code}
"""


def without(absent: set[str], code: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT.format(absent=absent, code=code)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_serving_and_the_command_load_where_torch_is_absent():
    names = [*modules_of("hamlet/serving"), "hamlet.cli", "hamlet.doctor", "hamlet.ort"]
    train_only = {"torch", "tensordict", "mlflow", "dvc", "onnx", "onnxscript", "PIL", "yaml"}
    done = without(train_only, "\n".join(f"import {name}" for name in names))
    assert done.returncode == 0, done.stderr
    assert (
        without({"torch"}, "from hamlet.town import Town").returncode == 1
    )  # torch is really absent


def test_register_loads_where_torch_is_absent():
    done = without({"torch", "tensordict"}, "import stages.register")
    assert done.returncode == 0, done.stderr


def test_ray_and_torchao_are_imported_where_they_are_used_and_not_before():
    files = [*modules_of("hamlet"), *modules_of("stages")]
    owners = {"ray": "hamlet.learning.engines", "torchao": "hamlet.learning.float8"}
    for package, owner in owners.items():
        users = {name for name in files if any(x.split(".")[0] == package for x in imports(name))}
        assert users == {owner}
        file = file_of(owner)
        assert file is not None
        loaded = ast.parse(file.read_text(encoding="utf-8")).body
        at_once = [ast.dump(x) for x in loaded if isinstance(x, ast.Import | ast.ImportFrom)]
        assert not [x for x in at_once if f"'{package}" in x]
