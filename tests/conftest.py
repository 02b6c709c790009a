"""The whole pipeline, run once at its smallest size, shared by every slow test."""

from __future__ import annotations

import shutil

import pytest
from copied_repo import Repo, tail, working_tree


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Repo:
    """The repository after one `dvc repro` with tiny.yaml. Tests that change it take a `copy`."""
    path = tmp_path_factory.mktemp("tiny") / "hamlet"
    path.mkdir()
    working_tree(path)
    repo = Repo(path)
    (path / "dvc.lock").unlink(missing_ok=True)
    done = repo.run("dvc", "repro", check=False)
    if done.returncode:
        pytest.fail(f"dvc repro ended with {done.returncode}\n{tail(done)}", pytrace=False)
    (path / "repro.log").write_text(done.stdout + done.stderr)
    return repo


@pytest.fixture
def copy(tiny, tmp_path) -> Repo:
    """A copy of the tiny repository, to be changed at will."""
    shutil.copytree(tiny.path, tmp_path / "hamlet", symlinks=True)
    return Repo(tmp_path / "hamlet")
