"""Which one-line faults the quick tests notice.

    python -m tests.mutation --count 100 --seed 7

plants one fault at a time (`tests.faults`) in a copy of the committed tree, runs there the quick
tests that run the changed line (`tests.coverage_map`, once a commit), and writes what was noticed
to `benchmarks/results/mutation.json`. Of a line that very many tests run, those of WATCHFUL and of
the quickest files that fit into BUDGET_S are run; a line that only runs in processes that tests
start gets the tests closest to its file by imports. What they let pass meets the slow tests of
those files too, which continuous integration runs, and a fault of the server all quick tests of
servers. A fault counts as noticed if a test fails that passes without it, or if the tests never end
although they end without it. The share is therefore a lower bound of what all tests notice.

A survivor keeps the `reason` that was written beside it in the result file, for as long as the same
fault is drawn.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.faults import PACKAGES, ROOT, Fault, package_of, sample

RESULT = ROOT / "benchmarks" / "results" / "mutation.json"
BUDGET_S = 90.0
"""Of tests for one fault, by the time they took when the lines were mapped."""
CLOSEST_FILES, QUICK_USERS = 4, 60
"""Of a line that no test's own process runs: files of tests, and the quickest tests of its file."""
ALL = ["-m", "slow or not slow"]
WATCHFUL = "tests/test_golden.py"
"""Fails for most changes of a number, within seconds."""


# ------------------------------------------------------------------------------------------------
# The tests of a fault


class Chosen(NamedTuple):
    """tests: ids or files, in the order they are run; seconds: what they took without a fault;
    left_out: how many more tests run the line."""

    tests: list[str]
    seconds: float
    left_out: int


def chosen_tests(fault: Fault, mapped: dict) -> Chosen:
    """The tests that run the fault's line, by files, the watchful one first, then the quickest."""
    lines = mapped["lines"].get(fault.file, {})
    if fault.function:
        touched = range(fault.line, fault.line + fault.old.count("\n") + 1)
        found = {test for line in touched for test in lines.get(str(line), ())}
    else:  # runs when the file is imported: whatever uses the file may notice
        found = {test for tests in lines.values() for test in tests}
    if not found:  # in a process that tests start, or a default, which is read at the import
        users = {test for tests in lines.values() for test in tests}
        quick = sorted(users, key=lambda test: mapped["seconds"][test])[:QUICK_USERS]
        return Chosen([*closest_tests(fault), *quick], BUDGET_S, max(0, len(users) - QUICK_USERS))
    by_file: dict[str, list[str]] = defaultdict(list)
    for test in sorted(found, key=lambda test: mapped["seconds"][test]):
        by_file[test.split("::")[0]].append(test)
    cost = {file: sum(mapped["seconds"][test] for test in tests) for file, tests in by_file.items()}
    kept: list[str] = []
    spent = 0.0
    for file in sorted(by_file, key=lambda file: (file != WATCHFUL, cost[file])):
        for test in by_file[file]:
            if kept and spent + mapped["seconds"][test] > BUDGET_S:
                continue
            kept.append(test)
            spent += mapped["seconds"][test]
    return Chosen(kept, spent, len(found) - len(kept))


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
    """Test files that reach the fault's file by imports, the most specific first."""
    module, stem = module_of(fault.file), Path(fault.file).stem
    scored = []
    for test in sorted((ROOT / "tests").rglob("test_*.py")):
        away = distances(test).get(module)
        if away is None:
            continue
        text = test.read_text(encoding="utf-8")
        names_it = bool(fault.function) and re.search(rf"\b{re.escape(fault.function)}\b", text)
        same = test.parent.name == package_of(fault.file) or stem in test.stem
        score = away - 2 * bool(names_it) - (test.stem == f"test_{stem}") - same
        scored.append((score, test.relative_to(ROOT).as_posix()))
    return [name for _, name in sorted(scored)][:CLOSEST_FILES]


# ------------------------------------------------------------------------------------------------
# Running them


class Outcome(NamedTuple):
    """state: passed, failed, broken (no test ran) or endless; test: the first that failed."""

    state: str
    test: str
    seconds: float


def run_tests(tree: Path, tests: list[str], limit: float) -> Outcome:
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
        while time.monotonic() - began < limit:
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

    def __init__(self, tree: Path, mapped: dict) -> None:
        self.tree, self.mapped = tree, mapped
        self.sound: dict[tuple[str, ...], Outcome] = {}

    def without_fault(self, tests: list[str], limit: float) -> Outcome:
        if tuple(tests) not in self.sound:
            self.sound[tuple(tests)] = run_tests(self.tree, tests, limit)
        return self.sound[tuple(tests)]

    def judge(self, fault: Fault) -> dict:
        """The fault, whether it was `noticed` (None: undecided) and by which test."""
        tests, seconds, left_out = chosen_tests(fault, self.mapped)
        limit, asked = 60 + 4 * seconds, len(tests)
        path = self.tree / fault.file
        source = path.read_bytes()
        begin, end = fault.span
        noticed: bool | None = False
        outcome = Outcome("passed", "", 0.0)
        if tests:
            path.write_bytes(source[:begin] + fault.new.encode() + source[end:])
            try:
                outcome = run_tests(self.tree, tests, limit)
                if outcome.state == "passed":
                    # A server is a process of its own, of which the map knows nothing.
                    serving = package_of(fault.file) == "serving"
                    tests = ["tests/serving"] if serving else [*ALL, *closest_tests(fault)]
                    limit = 4 * BUDGET_S
                    outcome = run_tests(self.tree, tests, limit)
            finally:
                path.write_bytes(source)
            if outcome.state != "passed":
                again = [*ALL, outcome.test] if outcome.test else tests
                noticed = self.without_fault(again, limit).state == "passed" or None
        return {
            "file": fault.file, "line": fault.line, "function": fault.function, "what": fault.what,
            "old": fault.old, "new": fault.new, "noticed": noticed, "by": outcome.test,
            "state": outcome.state, "tests": asked, "left_out": left_out,
            "seconds": round(outcome.seconds, 1),
        }  # fmt: skip


def map_of(tree: Path, commit: str) -> dict:
    """Tests by line of the committed tree; made once a commit, kept in the temporary folder."""
    kept = Path(tempfile.gettempdir()) / f"hamlet-coverage-{commit}.json"
    if not kept.exists():
        print("mapping which test runs which line: all quick tests, once", flush=True)
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        made = tree.parent / "map.json"
        command = [sys.executable, "-m", "tests.coverage_map", str(made)]
        done = subprocess.run(command, cwd=tree, env=environment, check=False)
        if done.returncode:
            sys.exit("the quick tests do not all pass: mend them first")
        kept.write_bytes(made.read_bytes())
    return json.loads(kept.read_text(encoding="utf-8"))


def copy_tree(to: Path) -> None:
    """The tracked files as they are committed."""
    with subprocess.Popen(["git", "archive", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE) as archive:
        subprocess.run(["tar", "-x", "-C", to], stdin=archive.stdout, check=True)
    # Slow tests copy what git would list.
    subprocess.run(["git", "init", "--quiet", to], check=True)
    shared = ROOT.parent / "shared"
    if shared.exists():
        (to.parent / "shared").symlink_to(shared.resolve())


def key_of(row: dict) -> tuple[str, str, str, str]:
    """What makes two rows the same fault though lines have moved."""
    return row["file"], row["function"], row["old"], row["new"]


def written_reasons(path: Path) -> dict[tuple[str, str, str, str], str]:
    """Why faults survive, as somebody wrote it into an earlier result."""
    if not path.exists():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))["faults"]
    return {key_of(row): row["reason"] for row in rows if row.get("reason")}


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
    reasons = written_reasons(args.out)
    rows: list[dict] = []
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        tree = Path(folder) / "hamlet"
        tree.mkdir()
        copy_tree(tree)
        judge = Judge(tree, map_of(tree, commit))
        for fault in sample(args.packages, args.count, args.seed):
            row = judge.judge(fault)
            if row["noticed"] is False:
                row["reason"] = reasons.get(key_of(row), "")
            rows.append(row)
            mark = {True: "noticed ", False: "SURVIVED", None: "undecided"}[row["noticed"]]
            print(
                f"{mark} {row['seconds']:6.1f} s {fault.file}:{fault.line} {fault.what}", flush=True
            )
            if row["noticed"] is not True:
                print(f"    - {fault.old}\n    + {fault.new}", flush=True)
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
