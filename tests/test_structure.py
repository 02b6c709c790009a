"""Rules of the house, read from the source: arrows of imports, sizes, private names, lost tests."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {"hamlet": "pipeline", "stages": "stages", "benchmarks": "benchmarks", "tests": "tests"}
LONGEST_FILE, LONGEST_FUNCTION = 500, 80

# Who may not import whom, of this repository's packages.
FORBIDDEN = {
    "hamlet": ("stages", "benchmarks", "tests"),
    "hamlet.artifacts": ("hamlet.modules", "hamlet.learning", "hamlet.town", "hamlet.proofs"),
    "hamlet.params": ("hamlet.modules", "hamlet.learning", "hamlet.serving"),
    "hamlet.town": ("hamlet.learning", "hamlet.modules", "hamlet.serving", "hamlet.export"),
    "hamlet.proofs": ("hamlet.modules", "hamlet.serving"),
    "hamlet.modules": ("hamlet.learning", "hamlet.serving", "hamlet.export", "hamlet.proofs"),
    "hamlet.serving": ("hamlet.learning", "hamlet.modules", "hamlet.town", "hamlet.proofs"),
    "hamlet.export": ("hamlet.learning",),
    "hamlet.worlds": (
        "hamlet.town",
        "hamlet.proofs",
        "hamlet.modules",
        "hamlet.learning",
        "hamlet.export",
        "hamlet.serving",
        "hamlet.plain",
        "hamlet.own",
    ),
    "hamlet.plain": (
        "hamlet.town",
        "hamlet.proofs",
        "hamlet.learning",
        "hamlet.export",
        "hamlet.serving",
        "hamlet.own",
    ),
    "hamlet.own": ("hamlet.town", "hamlet.proofs"),
    "hamlet.learning": ("hamlet.own", "hamlet.plain"),
    "stages": ("benchmarks", "tests"),
    "benchmarks": ("tests",),
    "tests": (),
}
# A function that is longer than a screen, and why it stays one.
LONG_FUNCTIONS: dict[str, str] = {
    "benchmarks/town_numba.py::_advance": "one compiled loop over worlds is what is compared with",
    "pipeline/serving/openapi.py::document": "a description, line by line, without a branch",
    "pipeline/serving/server.py::serve": "what begins and ends, in its order, around one state",
    "tests/learning/test_windows.py::test_the_world_models_loss_by_hand": (
        "the whole loss is written out once more, term by term"
    ),
    "tests/town/oracle.py::tick_world": "the rules of a tick as they are read, one after another",
}
DYNAMO = "PyTorch counts graphs and breaks, and forgets them, under this private name only"
ENGINE = "MLflow has no public way to close its connections to a database file"
# Private names of other people's code: (name, file) -> why.
LOWERED = "PyTorch shows what it would have a GPU run nowhere else"
HEADERS = "PyTorch says nowhere else how its precompiled headers are named, or where they are"
FOREACH = "PyTorch works on lists of tensors, as its optimizers do, under such names only"
PYTREE = "PyTorch has its nests of tensors under this private name only"
BORROWED: dict[tuple[str, str], str] = {
    ("_dynamo", "benchmarks/learning.py"): DYNAMO,
    ("_dynamo", "benchmarks/town.py"): DYNAMO,
    ("_dynamo", "tests/learning/test_rollout.py"): DYNAMO,
    ("_dynamo", "tests/learning/test_update.py"): DYNAMO,
    ("_dynamo", "tests/town/test_rules.py"): DYNAMO,
    ("_python_dispatch", "benchmarks/counts.py"): (
        "PyTorch documents the mode that sees every operation under this private name only"
    ),
    ("_dynamo", "pipeline/export/onnx.py"): (
        "PyTorch documents the settings of tracing under this private name only"
    ),
    ("_export", "pipeline/export/frozen.py"): (
        "PyTorch has no public way to have a file's classes asked for their types once"
    ),
    ("_inductor", "benchmarks/kernels.py"): LOWERED,
    ("_inductor", "pipeline/learning/compiling.py"): HEADERS,
    ("_inductor", "tests/learning/test_update.py"): HEADERS,
    ("_HEADER_DIR", "tests/learning/test_update.py"): HEADERS,
    ("_topological_sort_nodes", "benchmarks/kernels.py"): LOWERED,
    ("_pytree", "pipeline/learning/captured.py"): PYTREE,
    ("_pytree", "tests/learning/test_captured.py"): PYTREE,
    ("_foreach_lerp_", "benchmarks/end_to_end.py"): FOREACH,
    ("_foreach_mul_", "benchmarks/end_to_end.py"): FOREACH,
    ("_is_avx512_bf16_supported", "benchmarks/end_to_end.py"): (
        "PyTorch tells what a processor can do under such names only"
    ),
    ("_exit", "pipeline/learning/actors.py"): "os._exit is public: an actor dies with its learner",
    ("_exit", "pipeline/learning/engines.py"): "os._exit is public: a worker dies with its parent",
    ("_exit", "pipeline/tracking/processes.py"): "os._exit is public: the last word to a process",
    ("_exit", "tests/mutation.py"): "os._exit is public: a fork must not run its parent's endings",
    ("_exit", "tests/conftest.py"): "os._exit is public: nothing is left to be freed by hand",
    ("_exit", "tests/warm/server.py"): "os._exit is public: a fork must not end as its parent does",
    ("_shutdown", "tests/warm/server.py"): "what Python does at its end, done in a fork",
    ("_registry", "tests/warm/server.py"): "what PyTorch would have Python do at its end, left out",
    ("_run_exitfuncs", "tests/warm/server.py"): "what Python does at its end, done in a fork",
    ("_get_registry_client", "pipeline/serving/source.py"): ENGINE,
    ("_start_asgi_task", "pipeline/serving/connection.py"): (
        "uvicorn has no public way to answer the next of several requests sent at once"
    ),
    ("_subclasses", "tests/learning/test_train_policy.py"): (
        "PyTorch documents its fake tensors under this private name only"
    ),
    ("_tracking_client", "tests/serving/test_registry.py"): ENGINE,
    ("_tracking_client", "pipeline/tracking/store.py"): ENGINE,
    ("_tracking_client", "tests/registry/conftest.py"): ENGINE,
}
FAKED = "PyTorch lets a device be written in Python under its private names only"
BORROWED |= {
    (name, "tests/fake_gpu.py"): FAKED
    for name in (
        "_C", "_disabled_torch_function_impl", "_make_wrapper_subclass", "_opname",
        "_python_dispatch", "_schema", "_set_only_lift_cpu_tensors",
        "_setup_privateuseone_for_python_backend",
    )
}  # fmt: skip
NAMED_TUPLE = {"_asdict", "_fields", "_make", "_replace"}  # public, underlined against clashes


# ------------------------------------------------------------------------------------------------
# The source


@cache
def sources() -> dict[str, Path]:
    """Module name -> file, of every Python file of the repository."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            inside = path.relative_to(ROOT / folder).with_suffix("").parts
            names = [package, *inside]
            found[".".join(names[:-1] if names[-1] == "__init__" else names)] = path
    return found


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(sources()[module].read_text(encoding="utf-8"))


def below(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """What is directly below and may hold statements: not what is in expressions, which is most."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield child


def import_nodes(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports anywhere below, in functions too, but for those made only for type checkers."""
    for child in statements(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)):
            yield from import_nodes(child)


@cache
def homes(package: str) -> dict[str, str]:
    """Names that a package loads on demand -> the module each is in (`_HOMES` of `__init__.py`)."""
    for node in tree(package).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="_HOMES")], value=value):
                inside = ast.literal_eval(value)
                return {
                    name: home if home.startswith("hamlet") else f"{package}.{home}"
                    for name, home in inside.items()
                }
    return {}


def resolved(base: str, name: str) -> str:
    """The module that `from base import name` takes from."""
    if f"{base}.{name}" in sources():
        return f"{base}.{name}"
    return homes(base).get(name, base) if base in sources() else base


@cache
def imports(module: str) -> frozenset[str]:
    """The repository's modules that a module takes something from.

    A package that is only passed through, as `a` in `from a.b import c`, is not among them.
    """
    found = set()
    for node in import_nodes(tree(module)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            assert not node.level, f"{module} imports relatively"
            found |= {resolved(node.module or "", alias.name) for alias in node.names}
    return frozenset(name for name in found if name in sources() and name != module)


def functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for child in statements(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        yield from functions(child)


def where(module: str) -> str:
    return sources()[module].relative_to(ROOT).as_posix()


# ------------------------------------------------------------------------------------------------
# Arrows


def circle(graph: dict[str, frozenset[str]]) -> list[str]:
    """The names along a circle of a graph; empty if there is none."""
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        return error.args[1]
    return []


def test_no_module_imports_itself_through_others():
    assert circle({module: imports(module) for module in sources()}) == []


@pytest.mark.parametrize("package", FORBIDDEN)
def test_no_arrow_points_back(package):
    wrong = [
        f"{module} imports {name}"
        for module in sources()
        if below(module, package)
        for name in imports(module)
        if any(below(name, forbidden) for forbidden in FORBIDDEN[package])
    ]
    assert wrong == []


OF_THE_TOWN = re.compile(r"\b(meters?|energy|affordances?|money|towns?)\b", re.I)


def test_what_is_made_for_any_world_knows_no_word_of_the_town():
    found = [
        f"{where(module)}: {line.strip()}"
        for module in sources()
        if below(module, "hamlet.worlds") or below(module, "hamlet.plain")
        or below(module, "hamlet.own")
        for line in sources()[module].read_text(encoding="utf-8").splitlines()
        if OF_THE_TOWN.search(line)
    ]  # fmt: skip
    assert found == []


# ------------------------------------------------------------------------------------------------
# Sizes


def test_no_file_is_longer_than_one_can_hold_in_mind():
    lengths = {
        path: len(path.read_text(encoding="utf-8").splitlines()) for path in sources().values()
    }
    assert {str(p.relative_to(ROOT)): n for p, n in lengths.items() if n > LONGEST_FILE} == {}


def long_functions() -> dict[str, int]:
    lengths = {
        f"{where(module)}::{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for module in sources()
        for node in functions(tree(module))
    }
    return {name: n for name, n in lengths.items() if n > LONGEST_FUNCTION}


def test_functions_fit_a_screen_but_for_those_that_say_why_not():
    found = long_functions()
    assert {name: n for name, n in found.items() if name not in LONG_FUNCTIONS} == {}
    assert set(LONG_FUNCTIONS) <= set(found), "an exception that is not needed any more"


# ------------------------------------------------------------------------------------------------
# Private names


def private(name: str) -> bool:
    return bool(re.match(r"_[^_]", name)) and name not in NAMED_TUPLE


def own_names(module: str) -> set[str]:
    """What a file defines itself: functions, classes, variables, attributes that it assigns."""
    found = set()
    for node in ast.walk(tree(module)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                found.add(name)
    return found


def borrowed(module: str) -> set[str]:
    """Private names that a file takes from another."""
    own, found = own_names(module), set()
    for node in ast.walk(tree(module)):
        match node:
            case ast.ImportFrom(module=base, names=names):
                parts = [*(base or "").split("."), *(alias.name for alias in names)]
                found |= {name for name in parts if private(name)}
            case ast.Attribute(attr=name) if private(name) and name not in own:
                found.add(name)
    return found


def test_nothing_private_is_used_across_files():
    found = {(name, where(module)) for module in sources() for name in borrowed(module)}
    assert found - set(BORROWED) == set()
    assert set(BORROWED) <= found, "an exception that is not needed any more"


def test_exceptions_have_reasons():
    assert all(len(reason.split()) > 3 for reason in (*LONG_FUNCTIONS.values(), *BORROWED.values()))


# ------------------------------------------------------------------------------------------------
# Tests


def redefined(body: list[ast.stmt]) -> list[str]:
    """Names of functions and classes that a later one of the same body overwrites."""
    made = [
        node.name
        for node in body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not any(re.search(r"overload|setter", ast.unparse(x)) for x in node.decorator_list)
    ]
    inner = [redefined(node.body) for node in body if isinstance(node, ast.ClassDef)]
    return [name for name, n in Counter(made).items() if n > 1] + list(chain(*inner))


def test_no_test_is_overwritten_by_the_next_of_its_name():
    found = {where(module): redefined(tree(module).body) for module in sources()}
    assert {file: names for file, names in found.items() if names} == {}


def test_no_test_file_hides_another_of_its_name():
    """Beside a file of the same name in another folder, neither a package, pytest collects none."""
    files = (ROOT / "tests").rglob("test_*.py")
    found = Counter(f.name for f in files if not (f.parent / "__init__.py").exists())
    assert [name for name, count in found.items() if count > 1] == []


# ------------------------------------------------------------------------------------------------
# The rules themselves


def test_a_circle_is_seen():
    assert circle({"a": frozenset("b"), "b": frozenset("c"), "c": frozenset()}) == []
    assert set(circle({"a": frozenset("b"), "b": frozenset("c"), "c": frozenset("a")})) == {*"abc"}


def test_an_import_in_a_function_and_one_on_demand_are_seen():
    assert "hamlet.town.players" in imports("stages.collect")  # `from hamlet.town import Scripted`
    assert "hamlet.serving.source" in imports("hamlet.serving.client")  # inside a method
    assert "hamlet.town.town" not in imports("hamlet")  # for type checkers only


def test_a_test_that_is_overwritten_is_seen():
    twice = "def test_a(): ...\ndef test_a(): ...\nclass C:\n def b(self): ...\n def b(self): ..."
    assert redefined(ast.parse(twice).body) == ["test_a", "b"]
