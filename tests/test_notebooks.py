"""The notebooks run from top to bottom on what the tiny pipeline made."""

from __future__ import annotations

from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def test_there_is_one_of_each_world():
    assert [path.stem for path in NOTEBOOKS] == ["prover", "town"]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tiny, monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    for name, value in tiny.env.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": tiny.path}}
    ).execute()
    printed = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    assert sum(map(bool, printed)) >= 3
