"""The pages and the public names: what they point at exists, and importing costs nothing."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

import hamlet
from hamlet.town import schema

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_a_link_leads_to_a_file(page):
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    missing = [x for x in links if "://" not in x and not (page.parent / x).exists()]
    assert not missing


def test_every_page_is_in_the_menu():
    menu = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    assert menu == {p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")}


def test_a_newcomer_reads_the_readme_in_one_sitting():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1000


def test_the_site_asks_no_other_host():
    settings = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in settings
    assert "://" not in settings


def test_the_page_of_packs_has_every_field():
    page = (ROOT / "docs" / "how-to" / "own-pack.md").read_text(encoding="utf-8")
    models = [m for m in vars(schema).values() if isinstance(m, type) and issubclass(m, BaseModel)]
    fields = {field for model in models for field in model.model_fields}
    assert len(fields) > 60
    assert {field for field in fields if f"`{field}`" not in page} == set()


@pytest.mark.parametrize("name", hamlet.__all__)
def test_a_public_name_is_there_and_documented(name):
    value = getattr(hamlet, name)
    assert value.__doc__
    assert value is getattr(importlib.import_module(value.__module__), name)


def test_importing_hamlet_loads_nothing_heavy():
    code = (
        "import sys, hamlet; print({'torch', 'numpy', 'onnxruntime', 'mlflow'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "set()", done.stderr


def test_an_unknown_name_is_said():
    with pytest.raises(AttributeError, match="nobody"):
        _ = hamlet.nobody


def test_what_the_reference_describes_exists():
    named = re.findall(
        r"^::: ([\w.]+)$", "\n".join(p.read_text(encoding="utf-8") for p in PAGES), re.M
    )
    assert len(named) >= 10
    for name in named:
        home, _, last = name.rpartition(".")
        if not home or not hasattr(importlib.import_module(home), last):
            importlib.import_module(name)
