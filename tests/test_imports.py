"""Who may know whom: the import graph of the source, and processes in which a part is absent."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from stages import dependencies
from stages.dependencies import file_of, imports, name_of, reached

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


EVERYWHERE = """
import at_first
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import for_types
try:
    import tried
except ImportError:
    import caught
finally:
    import at_last
for _ in ():
    with open(""):
        import within
match 1:
    case 1:
        import matched
class Some:
    async def work(self):
        import late
"""


def test_an_import_is_seen_wherever_a_statement_may_be(tmp_path, monkeypatch):
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages" / "everywhere.py").write_text(EVERYWHERE)
    monkeypatch.setattr(dependencies, "ROOT", tmp_path)
    seen = imports("stages.everywhere")
    words = ["at_first", "tried", "caught", "at_last", "within", "matched", "late"]
    assert seen >= set(words), set(words) - seen
    assert "for_types" not in seen


@pytest.mark.parametrize("stage", STAGES)
def test_no_stage_can_reach_the_class_of_another_stages_module(stage):
    seen = reached(f"stages.{stage}")
    bad = [name for name, owners in CLASSES.items() if name in seen and stage not in owners]
    assert not bad, [chain(seen, name) for name in bad]


def test_every_stage_is_looked_at():
    others = {"world", "prove", "prove_evaluate"}  # no module of the agent's is theirs
    assert set(stages()) == set(STAGES) | others


def stages() -> dict:
    return yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]


def test_the_dependencies_in_dvc_yaml_are_those_of_the_code():
    """Else DVC would keep what changed code no longer makes: `python -m stages.dependencies`."""
    assert dependencies.differing(ROOT / "dvc.yaml") == []


def test_a_dependency_that_is_left_out_or_too_many_is_noticed(tmp_path):
    text = (ROOT / "dvc.yaml").read_text()
    for line in ("      - stages/data.py\n", "          - preset.social\n"):
        assert line in text
        path = tmp_path / "dvc.yaml"
        path.write_text(text.replace(line, "", 1))
        assert len(dependencies.differing(path)) == 1
    path.write_text(text.replace("    deps:\n", "    deps:\n      - pipeline/cli.py\n"))
    assert len(dependencies.differing(path)) == len(stages()) - 1


def test_what_is_neutral_exists_and_is_said_to_be_so_for_a_reason():
    for path, reason in dependencies.NEUTRAL.items():
        assert (ROOT / path).exists() or (ROOT / f"{path}.py").exists(), path
        assert len(reason.split()) > 1, path
    for path in (*ROOT.glob("pipeline/**/__init__.py"), *ROOT.glob("stages/**/__init__.py")):
        defined = {node.name for node in ast.parse(path.read_text()).body if hasattr(node, "name")}
        assert defined <= {"__getattr__", "__dir__"}, f"{path} must only name what is elsewhere"


def test_names_that_are_loaded_on_demand_are_followed_to_their_file():
    seen = reached("stages.collect")  # `from hamlet.town import Scripted`
    assert "hamlet.town.players" in seen
    assert "hamlet.town.render" not in seen
    assert "hamlet.town.render" in reached("stages.evaluate")
    assert "hamlet.artifacts" in imports("hamlet.town.schema")


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("hamlet", "stages"),
        ("hamlet/town", "hamlet.learning"),
        ("hamlet/proofs", "hamlet.learning"),
        ("hamlet/worlds", "torch"),
        ("hamlet/plain", "hamlet.learning.update"),
        ("hamlet/own", "hamlet.town"),
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


def test_a_policy_is_trained_without_what_writes_onnx_files():
    """Every rank would import it, for nothing."""
    done = without({"onnxscript", "onnx_ir"}, "import stages.policy")
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


OWN = ("stages", "cli", "running", "registering", "evaluating", "playing", "project")
TOWNS_WORDS = re.compile(r"\b(meters?|energy|affordances?|money|vision)\b", re.IGNORECASE)
ALSO_THE_TOWNS = {"hamlet.params"}  # the town's own params, beside what all params are checked by


def test_an_own_world_goes_through_nothing_that_knows_the_town():
    """From `hamlet new` to a served agent: what has the town's words in it is only the town's."""
    starts = [f"hamlet.own.{name}" for name in OWN] + modules_of("pipeline/serving")
    seen = {name: start for start in starts for name in reached(start)}
    assert "hamlet.learning.update" in seen
    assert "hamlet.export.onnx" in seen
    town = {name for name in seen if name.startswith("hamlet.town") or name == "stages"}
    assert not town, {name: seen[name] for name in town}
    words = {
        name: TOWNS_WORDS.findall(path.read_text())
        for name in {*seen, *starts} - ALSO_THE_TOWNS
        if name.startswith("hamlet") and (path := file_of(name))
    }
    assert not {name: found for name, found in words.items() if found}
