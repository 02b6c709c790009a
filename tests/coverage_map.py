"""Which quick tests run which lines of the library, and how long each test takes.

    python -m tests.coverage_map FILE [pytest's arguments]

runs the quick tests once under `coverage` and writes FILE, a JSON of

    lines: {file: {line: [test]}}, for lines that a test's own call runs, or its fixtures
    seconds: {test: its call and fixtures}

A fixture of a whole file is made in the first test that asks for it: a line that runs while
fixtures are made therefore belongs to every test of the file.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest

ROOT = Path(__file__).parents[1]
SETUP, CALL = "setup", "call"


class Contexts:
    """Tells coverage which test runs, and which of its parts; keeps how long it took."""

    def __init__(self, measured: coverage.Coverage) -> None:
        self.measured = measured
        self.seconds: dict[str, float] = defaultdict(float)

    def begin(self, item: pytest.Item, part: str) -> None:
        self.measured.switch_context(f"{part} {item.nodeid}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        self.begin(item, SETUP)
        yield

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        self.begin(item, CALL)
        yield

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        self.begin(item, CALL)
        yield

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration


def tests_by_line(
    contexts: dict[int, list[str]], of_file: dict[str, list[str]]
) -> dict[int, list[str]]:
    """Line -> tests, from coverage's contexts of one source file."""
    found = {}
    for line, names in contexts.items():
        tests: set[str] = set()
        for name in filter(None, names):
            part, test = name.split(" ", 1)
            tests |= {test} if part == CALL else set(of_file[test.split("::")[0]])
        if tests:
            found[line] = sorted(tests)
    return found


def main() -> int:
    out, *arguments = sys.argv[1:]
    measured = coverage.Coverage(data_file=None, source=[str(ROOT / "pipeline")], config_file=False)
    contexts = Contexts(measured)
    measured.start()
    # In this process, not in workers: only here is it known which test runs.
    code = pytest.main(["-n0", "-p", "no:cacheprovider", *arguments], plugins=[contexts])
    measured.stop()
    data = measured.get_data()
    of_file: dict[str, list[str]] = defaultdict(list)
    for test in contexts.seconds:
        of_file[test.split("::")[0]].append(test)
    lines = {
        Path(file).relative_to(ROOT).as_posix(): tests_by_line(
            data.contexts_by_lineno(file), of_file
        )
        for file in data.measured_files()
    }
    assert any(lines.values()), "no line was measured"
    seconds = {test: round(value, 3) for test, value in contexts.seconds.items()}
    Path(out).write_text(json.dumps({"lines": lines, "seconds": seconds}), encoding="utf-8")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
