"""Which one-line faults the quick tests notice.

    python -m tests.mutation --count 100 --seed 7

plants one fault at a time in a copy of the committed tree (a sign, an index, an order, a dropped
term, ...), runs the tests closest to the changed file there, and writes what was noticed to
`benchmarks/results/mutation.json`. A file's tests are the quick ones that reach it by imports;
those that import it themselves and name the changed function come first. A fault counts as noticed
if a test fails that passes without it, or if the tests never end although they end without it. The
share is therefore a lower bound of what the whole quick suite notices.

Faults are drawn by line, one of each line, so that a long formula does not weigh more than a short
one. Lines that only say something to a reader (docstrings, messages, annotations) have none.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "modules": ["pipeline/modules"],
    "learning": ["pipeline/learning"],
    "proofs": ["pipeline/proofs"],
    "serving": ["pipeline/serving/engine.py", "pipeline/serving/protocol.py"],
    "town": ["pipeline/town"],
}
RESULT = ROOT / "benchmarks" / "results" / "mutation.json"
FILES_PER_FAULT = 8
"""Test files run for a fault; those of a file that half the suite imports would take minutes."""
LIMIT_S = 240.0


class Fault(NamedTuple):
    """One change of the source.

    Attributes:
        file: path from the root; line: 1-based; function: the innermost one around the line.
        what: the operator's name; old, new: source before and after.
        span: byte offsets of `old` in the file.
    """

    file: str
    line: int
    function: str
    what: str
    old: str
    new: str
    span: tuple[int, int]


# ------------------------------------------------------------------------------------------------
# Faults


COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.FloorDiv: ast.Mod, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.Pow: ast.Mult,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitXor: ast.BitAnd,
}  # fmt: skip
PARTNERS = {
    name: other
    for pair in [
        ("max", "min"), ("amax", "amin"), ("maximum", "minimum"), ("any", "all"), ("sum", "mean"),
        ("argmax", "argmin"), ("clamp_min", "clamp_max"), ("ceil", "floor"), ("zeros", "ones"),
        ("zeros_like", "ones_like"),
    ]
    for name, other in (pair, pair[::-1])
}  # fmt: skip
DROPPED_CALLS = {
    "abs", "exp", "log", "square", "sqrt", "sigmoid", "softmax", "log_softmax", "clamp", "cumsum",
    "clamp_min", "clamp_max", "flip", "sort", "detach", "float", "round", "reversed", "sorted", "t",
}  # fmt: skip
SILENT_CALLS = {"HamletError", "warn", "region", "info", "print", "Field", "TypeVar"}


def changed(node: ast.AST, **fields: object) -> ast.AST:
    other = copy.copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


def faults_of(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """(operator, what takes the node's place) of every fault in this node itself."""
    match node:
        case ast.Compare(ops=[op], left=left, comparators=[right]):
            yield "comparison", changed(node, ops=[COMPARISONS[type(op)]()])
            if isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE):
                yield "sides of a comparison", changed(node, left=right, comparators=[left])
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            yield "operator", changed(node, op=OPERATORS[type(op)]())
            yield "dropped term", left
            yield "dropped term", right
            if isinstance(op, ast.Sub | ast.Div | ast.FloorDiv | ast.Mod):
                yield "order", changed(node, left=right, right=left)
        case ast.UnaryOp(op=ast.USub() | ast.Not() | ast.Invert(), operand=operand):
            yield "sign", operand
        case ast.BoolOp(op=op, values=values):
            yield "and/or", changed(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
            yield (
                "dropped condition",
                changed(node, values=values[:-1]) if values[2:] else values[0],
            )
            yield "dropped condition", changed(node, values=values[1:]) if values[2:] else values[1]
        case ast.Constant(value=bool(value)):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield "constant", ast.Constant(value + 1)
        case ast.Constant(value=float(value)):
            yield "constant", ast.Constant(value * 2 if value else 1.0)
        case ast.Slice(lower=lower, upper=upper, step=None):
            if lower is not None:
                yield "slice", changed(node, lower=None)
            if upper is not None:
                yield "slice", changed(node, upper=None)
        case ast.IfExp(body=body, orelse=orelse):
            yield "branches", changed(node, body=orelse, orelse=body)
        case ast.comprehension(ifs=[*_, _]):
            yield "dropped filter", changed(node, ifs=[])
        case ast.Call():
            yield from faults_of_a_call(node)


def faults_of_a_call(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    called, args = node.func, node.args
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    plain = not any(isinstance(x, ast.Starred) for x in args)
    if name in PARTNERS:
        swapped = PARTNERS[name]
        if isinstance(called, ast.Attribute):
            yield "function", changed(node, func=changed(called, attr=swapped))
        elif name in ("max", "min", "any", "all"):
            yield "function", changed(node, func=ast.Name(swapped, ast.Load()))
    if name in DROPPED_CALLS:
        if isinstance(called, ast.Attribute) and not (
            isinstance(called.value, ast.Name) and called.value.id in ("torch", "math", "np", "F")
        ):
            yield "dropped call", called.value
        elif len(args) >= 1:
            yield "dropped call", args[0]
    if name == "where" and len(args) == 3:
        yield "branches", changed(node, args=[args[0], args[2], args[1]])
    elif len(args) >= 2 and plain and not any(isinstance(x, ast.Constant) for x in args[:2]):
        yield "arguments", changed(node, args=[args[1], args[0], *args[2:]])


def faults_of_a_statement(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    match node:
        case ast.If(test=test):
            yield "negated condition", ast.UnaryOp(ast.Not(), test)
        case ast.AugAssign(target=target, value=value):
            yield "dropped update", ast.Pass()
            yield "dropped term", ast.Assign([target], value, lineno=node.lineno)
        case ast.Expr(value=ast.Call()):
            yield "dropped statement", ast.Pass()
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            if any(isinstance(x, ast.Name) and x.id == name for x in ast.walk(value)):
                yield "dropped statement", ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "dropped statement", ast.Pass()
        case ast.Break() | ast.Continue():
            yield "dropped statement", ast.Pass()


def silent(node: ast.AST) -> bool:
    """Whether all in it is said to a reader or a type checker, so that no test could notice."""
    match node:
        case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
            return True
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
            return name in SILENT_CALLS
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
    return False


def faults_in(file: str) -> list[Fault]:
    """Every fault of a source file."""
    source = (ROOT / file).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: list[Fault] = []

    def add(node: ast.AST, what: str, other: ast.AST, function: str) -> None:
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        old, new = source[begin:end].decode(), ast.unparse(ast.fix_missing_locations(other))
        if isinstance(node, ast.expr) and not isinstance(node, ast.Slice):
            new = f"({new})"
        found.append(Fault(file, node.lineno, function, what, old, new, (begin, end)))

    def visit(node: ast.AST, function: str) -> None:
        if silent(node):
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for child in [*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body]:
                visit(child, node.name)
            return
        if isinstance(node, ast.AnnAssign):
            if node.value is not None:
                visit(node.value, function)
            return
        for what, other in faults_of_a_statement(node):
            if isinstance(node, ast.If):
                add(node.test, what, other, function)
            else:
                add(node, what, other, function)
        if isinstance(node, ast.comprehension):
            for what, _ in faults_of(node):  # a condition that always holds
                add(node.ifs[0], what, ast.Constant(True), function)
        else:
            for what, other in faults_of(node):
                add(node, what, other, function)
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(ast.parse(source), "")
    return [x for x in found if x.old.strip() != x.new.strip("()")]


def sample(packages: list[str], count: int, seed: int) -> list[Fault]:
    """`count` faults of different lines, spread over packages by their lines."""
    by_line: dict[tuple[str, int], list[Fault]] = {}
    for package in packages:
        for place in PACKAGES[package]:
            paths = (
                [ROOT / place] if place.endswith(".py") else sorted((ROOT / place).rglob("*.py"))
            )
            for path in paths:
                for fault in faults_in(path.relative_to(ROOT).as_posix()):
                    by_line.setdefault((fault.file, fault.line), []).append(fault)
    rng = random.Random(seed)
    lines = rng.sample(sorted(by_line), min(count, len(by_line)))
    return [rng.choice(by_line[line]) for line in lines]


def package_of(file: str) -> str:
    return next(p for p, places in PACKAGES.items() if any(file.startswith(x) for x in places))


# ------------------------------------------------------------------------------------------------
# The tests of a file


def module_of(file: str) -> str:
    return re.sub(r"^pipeline\.", "hamlet.", file.removesuffix(".py").replace("/", "."))


@cache
def imported(path: Path) -> frozenset[str]:
    """Names of modules that a file imports: hamlet's, the stages' and helpers beside the tests."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(names)


@cache
def distances(test: Path) -> dict[str, int]:
    """Module -> how many imports it is away from a test file."""
    seen = dict.fromkeys(imported(test), 1)
    for helper in test.parent.glob("*.py"):
        if helper.stem == "conftest" or any(name.split(".")[-1] == helper.stem for name in seen):
            seen |= {name: 1 for name in imported(helper) if name not in seen}
    waiting = list(seen)
    while waiting:
        name = waiting.pop(0)
        path = ROOT.joinpath(*re.sub(r"^hamlet\b", "pipeline", name).split("."))
        file = next(
            (x for x in (path.with_suffix(".py"), path / "__init__.py") if x.is_file()), None
        )
        for other in imported(file) if file else ():
            if other not in seen:
                seen[other] = seen[name] + 1
                waiting.append(other)
    return seen


def closest_tests(fault: Fault) -> list[str]:
    """Test files that reach the fault, the most specific first."""
    module, stem = module_of(fault.file), Path(fault.file).stem
    scored = []
    for test in sorted((ROOT / "tests").rglob("test_*.py")):
        away = distances(test).get(module)
        if away is None:
            continue
        text = test.read_text(encoding="utf-8")
        if not re.search(r"^def test_|^async def test_", text, re.M):
            continue
        names_it = bool(fault.function) and re.search(rf"\b{re.escape(fault.function)}\b", text)
        same = test.parent.name == package_of(fault.file) or stem in test.stem
        score = away - 2 * bool(names_it) - (test.stem == f"test_{stem}") - same
        scored.append((score, test.relative_to(ROOT).as_posix()))
    return [name for _, name in sorted(scored)][:FILES_PER_FAULT]


# ------------------------------------------------------------------------------------------------
# Running them


class Outcome(NamedTuple):
    """state: passed, failed, broken (no test ran) or endless; test: the first that failed."""

    state: str
    test: str
    seconds: float


def run_tests(tree: Path, tests: list[str]) -> Outcome:
    """Run tests in a fork of this process, which has the large libraries loaded already."""
    import pytest

    began = time.monotonic()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os.setsid()
        silence = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(silence, stream)
        os.chdir(tree)
        sys.path[:] = [str(tree), *(p for p in sys.path if Path(p or ".").resolve() != ROOT)]
        os.environ["PYTHONPATH"] = str(tree)
        sys.dont_write_bytecode = True
        first: list[str] = []

        class First:
            def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
                if report.failed and not first:
                    first.append(report.nodeid)

            def pytest_collectreport(self, report: pytest.CollectReport) -> None:
                if report.failed and not first:
                    first.append(report.nodeid)

        code = 3
        try:
            code = int(
                pytest.main(
                    ["-x", "-q", "-n0", "-p", "no:cacheprovider", *tests], plugins=[First()]
                )
            )
        finally:
            os.write(writing, json.dumps([code, first[:1]]).encode())
            os._exit(0)
    os.close(writing)
    try:
        os.set_blocking(reading, False)
        while time.monotonic() - began < LIMIT_S:
            if os.waitpid(child, os.WNOHANG)[0]:
                break
            time.sleep(0.1)
        else:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return Outcome("endless", "", time.monotonic() - began)
        told = os.read(reading, 1 << 16)
    finally:
        os.close(reading)
    seconds = time.monotonic() - began
    if not told:  # the process itself died
        return Outcome("failed", "", seconds)
    code, names = json.loads(told)
    state = {0: "passed", 5: "passed"}.get(code, "failed" if names else "broken")
    return Outcome(state, names[0] if names else "", seconds)


class Judge:
    """Plants faults in one copy of the tree and says which were noticed."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        self.sound: dict[tuple[str, ...], Outcome] = {}

    def without_fault(self, tests: list[str]) -> Outcome:
        if tuple(tests) not in self.sound:
            self.sound[tuple(tests)] = run_tests(self.tree, tests)
        return self.sound[tuple(tests)]

    def judge(self, fault: Fault) -> dict:
        """The fault, whether it was `noticed` (None: undecided) and by which test."""
        tests = closest_tests(fault)
        path = self.tree / fault.file
        source = path.read_bytes()
        begin, end = fault.span
        noticed: bool | None = False
        outcome = Outcome("passed", "", 0.0)
        if tests:
            path.write_bytes(source[:begin] + fault.new.encode() + source[end:])
            try:
                outcome = run_tests(self.tree, tests)
            finally:
                path.write_bytes(source)
            if outcome.state == "failed":
                noticed = (
                    self.without_fault([outcome.test] if outcome.test else tests).state == "passed"
                )
                noticed = noticed or None
            elif outcome.state in ("endless", "broken"):
                noticed = self.without_fault(tests).state == "passed" or None
        return {
            "file": fault.file, "line": fault.line, "function": fault.function, "what": fault.what,
            "old": fault.old, "new": fault.new, "noticed": noticed, "by": outcome.test,
            "state": outcome.state, "tests": tests, "seconds": round(outcome.seconds, 1),
        }  # fmt: skip


def copy_tree(to: Path) -> None:
    """The tracked files as they are committed."""
    with subprocess.Popen(["git", "archive", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE) as archive:
        subprocess.run(["tar", "-x", "-C", to], stdin=archive.stdout, check=True)
    shared = ROOT.parent / "shared"
    if shared.exists():
        (to.parent / "shared").symlink_to(shared.resolve())


def summary(rows: list[dict]) -> dict[str, dict[str, float]]:
    """Per package: faults decided, noticed, and the share."""
    decided = [row for row in rows if row["noticed"] is not None]
    count = Counter(package_of(row["file"]) for row in decided)
    seen = Counter(package_of(row["file"]) for row in decided if row["noticed"])
    count["all"], seen["all"] = count.total(), seen.total()
    return {
        name: {"faults": n, "noticed": seen[name], "share": round(seen[name] / n, 3)}
        for name, n in sorted(count.items())
        if n
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=100, help="faults to plant")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--packages", nargs="+", choices=list(PACKAGES), default=list(PACKAGES))
    parser.add_argument("--out", type=Path, default=RESULT, help="where the result is written")
    args = parser.parse_args()
    dirty = subprocess.run(
        ["git", "status", "--porcelain", "-uno"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    if dirty:
        sys.exit(f"commit first: the faults are planted in what is committed\n{dirty}")
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    import hypothesis  # noqa: F401  loaded once, before the forks
    import numpy  # noqa: F401
    import tensordict  # noqa: F401
    import torch

    torch.set_num_threads(1)
    rows: list[dict] = []
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        tree = Path(folder) / "hamlet"
        tree.mkdir()
        copy_tree(tree)
        judge = Judge(tree)
        for fault in sample(args.packages, args.count, args.seed):
            row = judge.judge(fault)
            rows.append(row)
            mark = {True: "noticed ", False: "SURVIVED", None: "undecided"}[row["noticed"]]
            print(
                f"{mark} {row['seconds']:6.1f} s {fault.file}:{fault.line} {fault.what}", flush=True
            )
            if row["noticed"] is not True:
                print(f"    - {fault.old}\n    + {fault.new}\n    {row['tests']}", flush=True)
            result = {
                "commit": commit,
                "seed": args.seed,
                "count": len(rows),
                "packages": summary(rows),
            }
            text = json.dumps(result | {"faults": rows}, indent=1)
            args.out.write_text(text + "\n", encoding="utf-8")
    for name, row in summary(rows).items():
        print(f"{name:10} {row['noticed']:4} of {row['faults']:4}  {row['share']:.0%}")


if __name__ == "__main__":
    main()
