"""The page on own worlds names every parameter with its default, and every stage."""

from __future__ import annotations

from pathlib import Path

from hamlet.own.params import OwnParams
from hamlet.own.project import STAGES
from hamlet.own.stages import stages

PAGE = (Path(__file__).parents[2] / "docs/how-to/own-world.md").read_text(encoding="utf-8")


def default_of(field):
    if field.is_required():
        return ""
    if field.default_factory:
        return "{}"
    if field.default is None:
        return "none"
    return str(field.default).lower() if isinstance(field.default, bool) else field.default


def test_the_page_names_every_parameter_with_its_default_and_meaning():
    for name, section in OwnParams.model_fields.items():
        if name == "seed":
            assert "`seed`" in PAGE
            continue
        for key, field in section.annotation.model_fields.items():
            row = f"| `{name}` | `{key}` | {default_of(field)} | {field.description} |"
            assert row in PAGE, row


def test_the_page_and_the_written_project_have_every_stage():
    assert set(STAGES) == set(stages())
    for stage in STAGES:
        assert f"| `{stage}` |" in PAGE
