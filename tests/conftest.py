"""The whole pipeline, run once at its smallest size, shared by every slow test."""

from __future__ import annotations

import atexit
import gc
import os
import random
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from copied_repo import Repo, tail, working_tree
from filelock import FileLock
from hypothesis import settings

os.environ["HAMLET_DEVICE"] = "cpu"  # whatever the machine has
os.environ["DVC_NO_ANALYTICS"] = "true"  # to send them starts a process
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else every process compiles all that it imports
settings.register_profile("any machine", deadline=None)  # a slow moment is no failure
settings.load_profile("any machine")
gc.disable()  # while the tests are collected: what they import stays

WORKER = os.environ.get("PYTEST_XDIST_WORKER")
if WORKER:  # side by side, processes that each take all cores wait for one another
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    atexit.register(os._exit, 0)  # runs last: to free what a worker has imported takes ten seconds


APART = ("tests/test_torchrun.py", "tests/test_pipeline.py")
"""Their tests share no more than the tiny pipeline: any worker takes any of them, in this order."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, but those that need the tiny pipeline last, all but one of them: while a
    worker makes it, the others need not wait for it. The end is for the tests that any worker
    takes: all finish together."""
    tests = Counter(item.path for item in items)
    needing = {item.path for item in items if {"tiny", "copy"} & set(item.fixturenames)}  # type: ignore[attr-defined]
    apart = {path for path in needing if f"tests/{path.name}" in APART}
    first = max(needing - apart, key=lambda path: (tests[path], path), default=None)

    def place(item: pytest.Item) -> tuple[bool, bool, int, int, Path]:
        path = item.path
        spread = 1 + APART.index(f"tests/{path.name}") if path in apart else 0
        return path != first, path in needing, spread, -tests[path], path

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """What was imported is never garbage: to look through it again and again was a quarter of the
    time that collecting takes, and goes on while tests run."""
    gc.freeze()
    gc.set_threshold(20_000)  # as in a stage
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than cores: now and then a test waits for a server, a process or a clock."""
    from stages.common import cores

    return cores() + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """A worker takes a whole file, or one test of those `APART`."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return nodeid if file in APART else file

    return ByFile(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """A test and the fixtures that it makes draw the same numbers, whatever ran before it."""
    random.seed(1)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(1)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(1)


@pytest.fixture(autouse=True)
def own_mlflow() -> Iterator[None]:
    """MLflow keeps a URI that it is told in the environment: not for the next test."""
    before = {name: text for name, text in os.environ.items() if name.startswith("MLFLOW_")}
    yield
    if "mlflow" in sys.modules:
        import mlflow

        mlflow.set_tracking_uri(None)
        mlflow.set_registry_uri(None)
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch computes in one thread, so that sums are added up in one order."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Repo:
    """The repository after one `dvc repro` of the preset tiny. Tests that change it `copy`."""
    base = tmp_path_factory.getbasetemp()
    if not WORKER:
        return pipeline(base / "tiny")
    with FileLock(base.parent / "tiny.lock"):
        made = pipeline(base.parent / "tiny")
    shutil.copytree(made.path, base / "tiny", symlinks=True)
    return Repo(base / "tiny")


def pipeline(path: Path) -> Repo:
    """What `dvc repro` made at `path`; made now, unless another worker has."""
    repo, log = Repo(path), path / "repro.log"
    if log.exists():
        return repo
    path.mkdir()
    working_tree(path)
    (path / "dvc.lock").unlink(missing_ok=True)
    done = traced(repo, path / "opened").run("dvc", "repro", check=False)
    if done.returncode:
        pytest.fail(f"dvc repro ended with {done.returncode}\n{tail(done)}", pytrace=False)
    log.write_text(done.stdout + done.stderr)
    return repo


def traced(repo: Repo, folder: Path) -> Repo:
    """The same repository; its stages write down in `folder` which files they open."""
    folder.mkdir()
    seen = Repo(repo.path)
    hook = Path(__file__).parent / "traced"
    seen.env |= {"TRACED": str(folder), "PYTHONPATH": f"{hook}{os.pathsep}{repo.env['PYTHONPATH']}"}
    return seen


@pytest.fixture
def copy(tiny, tmp_path) -> Repo:
    """A copy of the tiny repository, to be changed at will."""
    shutil.copytree(tiny.path, tmp_path / "hamlet", symlinks=True)
    return Repo(tmp_path / "hamlet")
