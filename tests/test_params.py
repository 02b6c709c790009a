"""A wrong params.yaml is one line that names the field and the fix."""

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from hamlet.artifacts import HamletError
from hamlet.params import (
    CHOSEN,
    Params,
    Section,
    choose_preset,
    chosen_preset,
    load_model,
    load_params,
    preset_names,
    read_overlay,
)

ROOT = Path(__file__).parents[1]


class Inner(Section):
    steps: int = Field(ge=1, le=100)
    rate: float = Field(gt=0)


class Outer(Section):
    name: Literal["small", "large"]
    inner: Inner
    sizes: tuple[int, ...]
    parts: tuple[Inner, ...] = ()
    maybe: Inner | None = None

    @model_validator(mode="after")
    def _sizes_fit(self) -> "Outer":
        if len(self.sizes) > self.inner.steps:
            raise ValueError("`sizes` must not be longer than `inner.steps`")
        return self


GOOD: dict[str, Any] = {"name": "small", "inner": {"steps": 3, "rate": 0.1}, "sizes": [1, 2]}


def load(tmp_path: Path, data: Any) -> Outer:
    path = tmp_path / "p.yaml"
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
    return load_model(str(path), Outer)


def fails(tmp_path: Path, data: Any) -> str:
    with pytest.raises(HamletError) as caught:
        load(tmp_path, data)
    text = str(caught.value)
    assert "\n" not in text
    assert "p.yaml" in text
    return text


def test_a_good_file_loads_and_is_frozen(tmp_path):
    params = load(tmp_path, GOOD)
    assert params.sizes == (1, 2)
    assert load(tmp_path, GOOD | {"inner": {"steps": 3, "rate": 1}}).inner.rate == 1.0
    with pytest.raises(ValidationError):
        params.name = "large"


@pytest.mark.parametrize("number", ["1e-3", "1E-3", "1.0e-3", ".1e-2", "0.001", "+1e-3"])
def test_scientific_notation_is_a_number(tmp_path, number):
    text = f"name: small\ninner: {{steps: 3, rate: {number}}}\nsizes: []\n"
    assert load(tmp_path, text).inner.rate == 0.001


def test_text_that_looks_like_hex_or_a_version_stays_text(tmp_path):
    class Text(Section):
        a: str
        b: str

    path = tmp_path / "t.yaml"
    path.write_text("a: 1e5f\nb: 1.2.3\n")
    assert load_model(path, Text).a == "1e5f"


def test_an_unknown_key_names_the_nearest_valid_one(tmp_path):
    text = fails(tmp_path, GOOD | {"inner": {"stepz": 3, "rate": 0.1}})
    assert "unknown key `inner.stepz`" in text
    assert "did you mean `steps`? valid keys: steps, rate" in text
    assert "(and 1 more)" in text  # `steps` is missing as well
    text = fails(tmp_path, GOOD | {"zzz": 1})
    assert "unknown key `zzz`: valid keys: name, inner, sizes" in text
    text = fails(tmp_path, GOOD | {"parts": [{"steps": 1, "rate": 1.0, "rat": 2}]})
    assert "unknown key `parts.0.rat`: did you mean `rate`?" in text
    text = fails(tmp_path, GOOD | {"maybe": {"steps": 1, "rate": 1.0, "rat": 2}})
    assert "did you mean `rate`?" in text


def test_missing_keys_and_sections(tmp_path):
    assert "`inner.rate` is missing" in fails(tmp_path, GOOD | {"inner": {"steps": 1}})
    assert "`inner` is missing" in fails(tmp_path, {k: GOOD[k] for k in ("name", "sizes")})


@pytest.mark.parametrize(
    ("inner", "says"),
    [
        ({"steps": "3", "rate": 0.1}, '`inner.steps` is "3": it must be a valid integer'),
        ({"steps": 2.5, "rate": 0.1}, "`inner.steps` is 2.5"),
        ({"steps": True, "rate": 0.1}, "`inner.steps` is true"),
        ({"steps": 0, "rate": 0.1}, "`inner.steps` is 0: it must be greater than or equal to 1"),
        ({"steps": 3, "rate": None}, "`inner.rate` is null"),
        ({"steps": 3, "rate": float("nan")}, "`inner.rate` is NaN: it must be a finite number"),
        ([], "`inner` is []"),
    ],
)
def test_wrong_values_are_named_with_what_was_given_and_expected(tmp_path, inner, says):
    assert says in fails(tmp_path, GOOD | {"inner": inner})


def test_choices_and_rules_between_fields(tmp_path):
    text = fails(tmp_path, GOOD | {"name": "medium"})
    assert "`name` is \"medium\": it must be 'small' or 'large'" in text
    assert "`sizes` must not be longer" in fails(tmp_path, GOOD | {"sizes": [1, 2, 3, 4]})


def test_files_that_are_not_params(tmp_path):
    with pytest.raises(HamletError, match=r"none\.yaml is missing"):
        load_model(tmp_path / "none.yaml", Outer)
    assert "not valid YAML at line 2, column 10" in fails(tmp_path, "name: small\ninner: [1}\n")
    assert "valid keys: name, inner" in fails(tmp_path, "- a\n")
    assert "valid keys" in fails(tmp_path, "")
    assert "key `name` is given twice" in fails(tmp_path, "name: small\nname: large\n")


def test_yaml_cannot_run_code(tmp_path):
    mark = tmp_path / "ran"
    text = fails(tmp_path, f"name: !!python/object/apply:os.mkdir ['{mark}']\n")
    assert "not valid YAML" in text
    assert not mark.exists()


# The repository's own file


def sections() -> dict[str, type[BaseModel]]:
    return {
        name: field.annotation
        for name, field in Params.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    }


def own_file() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "params.yaml").read_text())


def test_the_repository_file_loads_and_gives_every_number():
    params = load_params(str(ROOT / "params.yaml"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dumped = params.model_dump(mode="json")
    given = own_file()
    assert set(given) == set(dumped)
    for name in sections():
        assert set(given[name]) == set(dumped[name]), f"params.yaml leaves out keys of {name}"


@pytest.mark.parametrize("section", sorted(sections()))
def test_every_section_refuses_a_typo_and_a_gap(tmp_path, section):
    path = tmp_path / "params.yaml"
    for key in sections()[section].model_fields:
        data = own_file()
        data[section][key + "x"] = data[section].pop(key)
        path.write_text(yaml.safe_dump(data))
        with pytest.raises(HamletError, match=f"unknown key `{section}.{key}x`.*valid keys"):
            load_params(path)
        data = own_file()
        data[section][key] = object.__name__ if not isinstance(data[section][key], str) else 1
        path.write_text(yaml.safe_dump(data))
        with pytest.raises(HamletError, match=f"`{section}.{key}"):
            load_params(path)


# Presets


@pytest.fixture
def checkout(tmp_path):
    shutil.copy(ROOT / "params.yaml", tmp_path)
    shutil.copytree(ROOT / "presets", tmp_path / "presets", ignore=lambda *_: [CHOSEN])
    return tmp_path


@pytest.mark.parametrize("name", preset_names(ROOT))
def test_a_preset_is_valid_and_names_only_what_differs(name):
    base, overlay = own_file(), read_overlay(ROOT, name)
    merged = load_params(ROOT / "params.yaml", name).model_dump(mode="json")
    for section, given in overlay.items():
        values = given.items() if isinstance(given, dict) else [(None, given)]
        for key, value in values:
            assert (merged[section] if key is None else merged[section][key]) == value
            assert (base[section] if key is None else base[section][key]) != value
    untouched = set(base) - set(overlay)
    assert {key: merged[key] for key in untouched} == {key: base[key] for key in untouched}


def test_the_chosen_preset_holds_for_the_checkout_and_its_experiments(checkout):
    usual = load_params(checkout / "params.yaml")
    choose_preset(checkout, "tiny")
    assert load_params(checkout / "params.yaml").collect.worlds == 12
    assert load_params(checkout / "params.yaml").perception.hidden == usual.perception.hidden
    assert load_params(checkout / "params.yaml", "easy").collect.worlds == 160
    copy = checkout / ".dvc" / "tmp" / "exps" / "x1"
    shutil.copytree(checkout / "presets", copy / "presets", ignore=lambda *_: [CHOSEN])
    shutil.copy(checkout / "params.yaml", copy)
    assert load_params(copy / "params.yaml").collect.worlds == 12
    choose_preset(checkout, None)
    assert load_params(checkout / "params.yaml") == usual
    assert load_params(copy / "params.yaml") == usual


def test_a_wrong_preset_is_one_line_that_names_its_file(checkout):
    def says(text: str) -> str:
        (checkout / "presets" / "mine.yaml").write_text(text)
        with pytest.raises(HamletError) as caught:
            choose_preset(checkout, "mine")
        assert "\n" not in str(caught.value)
        assert "presets/mine.yaml" in str(caught.value)
        return str(caught.value)

    assert "unknown key `social.stepz`: did you mean `steps`?" in says("social: {stepz: 3}")
    assert "unknown key `socal`" in says("socal: {steps: 3}")
    assert "`social.steps` is 0: it must be greater" in says("social: {steps: 0}")
    assert "`social` is 3" in says("social: 3")
    assert "must hold keys and values" in says("")
    assert chosen_preset(checkout) is None  # nothing wrong is ever chosen
    with pytest.raises(HamletError, match=r"no preset is called `tinny`: .*easy.*tiny"):
        choose_preset(checkout, "tinny")
    (checkout / "presets" / CHOSEN).write_text("gone\n")
    with pytest.raises(HamletError, match="no preset is called `gone`"):
        load_params(checkout / "params.yaml")


def test_the_command_chooses_without_touching_what_git_tracks(checkout):
    git = ["git", "-C", str(checkout), "-c", "user.name=t", "-c", "user.email=t@t"]
    shutil.copy(ROOT / ".gitignore", checkout)
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *command], check=True)

    def hamlet(*arguments: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-m", "hamlet.cli", "preset", *arguments],
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        return [line.split()[1] for line in done.stdout.splitlines() if line.startswith("*")]

    assert hamlet() == ["default"]
    assert hamlet("quick") == ["quick"]
    assert load_params(checkout / "params.yaml").town.pack == "l4_contention"
    status = subprocess.run([*git, "status", "--porcelain"], capture_output=True, check=True)
    assert status.stdout == b""
    assert hamlet("default") == ["default"]
