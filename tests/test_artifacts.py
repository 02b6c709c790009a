"""Writes replace whole files or nothing; cards refuse whatever differs from them."""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hamlet.artifacts import (
    HamletError,
    atomic_dir,
    atomic_path,
    card_path,
    check_card,
    how_to_make,
    in_one_line,
    read_json,
    require_space,
    sha256_file,
    sha256_path,
    write_card,
    write_json,
)

ROOT = Path(__file__).parents[1]
SCHEMA = {
    "inputs": [{"name": "view", "dtype": "uint8", "shape": ["batch", 5, 5]}],
    "outputs": [{"name": "action", "dtype": "int64", "shape": ["batch"]}],
}


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("no such table\n[SQL: SELECT 1]", "no such table"),
        ("inductor raised:\nAssertionError: twice\n\nSet X=1", "AssertionError: twice"),
        ("in a subprocess:\n\nRuntimeError: one\nValueError('two')", "ValueError('two')"),
        ("it said:", "it said:"),
        (" \n", "OSError"),
        ("x" * 300, "x" * 200),
    ],
)  # fmt: skip
def test_the_line_of_an_error_that_says_most(message, told):
    assert in_one_line(OSError(message)) == told


def test_atomic_path_replaces_and_leaves_nothing_else(tmp_path):
    target = tmp_path / "deep" / "a.pt2"
    for content in ("one", "two"):
        with atomic_path(target) as temporary:
            assert temporary.name == target.name
            temporary.write_text(content)
        assert target.read_text() == content
    assert names(target.parent) == ["a.pt2"]


def test_a_path_may_be_text(tmp_path):
    file, folder = str(tmp_path / "a" / "x.json"), str(tmp_path / "b")
    with atomic_path(file) as temporary:
        temporary.write_text('{"x": 1}')
    with atomic_dir(folder) as fresh:
        (fresh / "y").write_text("2")
    for path in (file, folder):
        write_card(path, "made", SCHEMA, {}, "pack")
        assert card_path(path) == Path(f"{path}.json")
        assert check_card(path)["sha256"] == sha256_path(path)
    assert read_json(file) == {"x": 1}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_atomic_path_keeps_the_old_file_on_failure(tmp_path, error):
    target = tmp_path / "a.bin"
    target.write_text("good")

    def write() -> None:
        with atomic_path(target) as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(error):
        write()
    assert target.read_text() == "good"
    assert names(tmp_path) == ["a.bin"]


def test_atomic_dir_replaces_the_whole_folder(tmp_path):
    target = tmp_path / "data"
    with atomic_dir(target) as fresh:
        (fresh / "old.bin").write_text("1")
    with pytest.raises(FileNotFoundError), atomic_dir(target) as fresh:
        (fresh / "missing" / "half.bin").write_text("2")
    assert names(target) == ["old.bin"]
    with atomic_dir(target) as fresh:
        (fresh / "sub").mkdir()
        (fresh / "sub" / "new.bin").write_text("3")
    assert names(target) == ["sub"]
    assert names(tmp_path) == ["data"]


def test_a_killed_writer_leaves_the_old_file_and_the_next_one_cleans_up(tmp_path):
    target = tmp_path / "a.json"
    write_json(target, {"good": 1})
    code = (
        "import os, signal, sys\nfrom hamlet.artifacts import atomic_path\n"
        "with atomic_path(sys.argv[1]) as t:\n"
        "    t.write_text('half')\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(target)], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    assert read_json(target) == {"good": 1}
    assert len(names(tmp_path)) == 2, "the kill should have left its temporary folder"
    write_json(target, {"good": 2})
    assert names(tmp_path) == ["a.json"]


def _limit_file_size():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))


FULL_DISK = """
import sys
from hamlet.artifacts import HamletError, atomic_path
try:
    with atomic_path(sys.argv[1]) as temporary:
        {write}
except HamletError as error:
    print(error)
"""


@pytest.mark.parametrize(
    "write",
    [
        "temporary.write_bytes(bytes(200_000))",
        pytest.param(
            "import torch; torch.save({'w': torch.zeros(100_000)}, temporary)",
            id="torch",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_write_beyond_the_limit_is_one_line_and_keeps_the_good_file(tmp_path, write):
    target = tmp_path / "module.pt2"
    target.write_text("good")
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK.format(write=write), str(target)],
        cwd=ROOT,
        preexec_fn=_limit_file_size,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.strip().splitlines()
    assert len(lines) == 1
    assert "disk is full" in lines[0]
    assert str(target) in lines[0]
    assert target.read_text() == "good"
    assert names(tmp_path) == ["module.pt2"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB; needs the right to mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_truly_full_disk(small_disk):
    target = small_disk / "data.bin"
    target.write_text("good")
    with pytest.raises(HamletError, match=r"disk is full.*data\.bin"), atomic_path(target) as t:
        t.write_bytes(bytes(1_000_000))
    with (
        pytest.raises(HamletError, match=r"disk is full.*set"),
        atomic_dir(small_disk / "set") as t,
    ):
        (t / "x.bin").write_bytes(bytes(1_000_000))
    assert target.read_text() == "good"
    assert names(small_disk) == ["data.bin"]
    with pytest.raises(HamletError, match="needs 10 MB"):
        require_space(small_disk / "a" / "b", 10_000_000)
    require_space(small_disk / "a" / "b", 10_000)


def test_a_read_only_place_is_one_line(tmp_path):
    if os.geteuid() == 0:
        target = Path("/proc/hamlet/a.json")  # root may write anywhere but here
        with pytest.raises((HamletError, FileNotFoundError)):
            write_json(target, {})
        return
    tmp_path.chmod(0o500)
    with pytest.raises(HamletError, match="permission denied"):
        write_json(tmp_path / "a.json", {})


def test_a_folder_swap_that_was_killed_half_way_is_undone(tmp_path):
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    old = tmp_path / f".data.{dead}.tmp" / "old"
    old.mkdir(parents=True)
    (old / "good.bin").write_text("1")
    with pytest.raises(FileNotFoundError), atomic_dir(tmp_path / "data"):
        (tmp_path / "none").unlink()
    assert names(tmp_path) == ["data"]
    assert names(tmp_path / "data") == ["good.bin"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(json_values)
def test_json_is_stable_under_rewriting(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("json") / "a.json"
    write_json(path, data)
    first = path.read_bytes()
    write_json(path, read_json(path))
    assert path.read_bytes() == first
    assert first.endswith(b"\n")


def test_json_rounds_floats_sorts_keys_and_takes_numpy(tmp_path):
    path = tmp_path / "m.json"
    write_json(path, {"b": np.float32(1 / 3), "a": [np.int64(2), np.arange(2)], "c": float("nan")})
    expected = '{"a": [2, [0, 1]], "b": 0.333333, "c": null}'
    assert path.read_text() == json.dumps(json.loads(expected), indent=2) + "\n"
    write_json(path, {"x": 1e-9 / 3, "y": 123456789.0})
    assert read_json(path) == {"x": 3.33333e-10, "y": 123457000.0}


def test_read_json_errors_name_the_file(tmp_path):
    with pytest.raises(HamletError, match=r"none\.json is missing"):
        read_json(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text('{"a": ')
    with pytest.raises(HamletError, match=r"bad\.json is not valid JSON"):
        read_json(tmp_path / "bad.json")


def test_hash_of_a_folder_sees_names_and_contents(tmp_path):
    folder = tmp_path / "d"
    folder.mkdir()
    (folder / "a").write_text("1")
    hashes = {sha256_path(folder)}
    (folder / "a").write_text("2")
    hashes.add(sha256_path(folder))
    (folder / "a").rename(folder / "b")
    hashes.add(sha256_path(folder))
    assert len(hashes) == 3
    assert sha256_path(folder / "b") == sha256_file(folder / "b")


@pytest.fixture
def artifact(tmp_path):
    path = tmp_path / "artifacts" / "perception.pt2"
    path.parent.mkdir()
    path.write_bytes(b"weights")
    write_card(path, "perception", SCHEMA, {"dataset": "d" * 64}, pack="p" * 64, extra={"ticks": 5})
    return path


def test_a_card_describes_and_accepts_its_file(artifact):
    card = check_card(artifact, SCHEMA, "p" * 64, {"dataset": "d" * 64})
    assert card["sha256"] == sha256_file(artifact)
    assert card["ticks"] == 5
    before = card_path(artifact).read_bytes()
    assert str(artifact.parent).encode() not in before
    write_card(artifact, "perception", SCHEMA, {"dataset": "d" * 64}, "p" * 64, {"ticks": 5})
    assert card_path(artifact).read_bytes() == before


def test_a_corrupt_file_is_refused_with_both_hashes(artifact):
    good = sha256_file(artifact)
    artifact.write_bytes(b"weightz")
    with pytest.raises(HamletError) as caught:
        check_card(artifact)
    text = str(caught.value)
    assert good in text
    assert sha256_file(artifact) in text
    assert "perception.pt2" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dtype": "int64"}, r"`view` is uint8 \[batch, 5, 5\], expected int64"),
        ({"shape": ["batch", 7, 7]}, r"expected uint8 \[batch, 7, 7\]"),
        ({"name": "seen"}, "`seen` is not on its card, which has view"),
    ],
)
def test_a_different_schema_is_refused_naming_the_field(artifact, change, says):
    wanted = {"inputs": [SCHEMA["inputs"][0] | change]}
    with pytest.raises(HamletError, match=says):
        check_card(artifact, wanted)


def test_an_unexpected_or_reordered_field_is_refused(artifact):
    with pytest.raises(HamletError, match="`action` is not expected"):
        check_card(artifact, {"outputs": []})
    two = [{"name": n, "dtype": "int64", "shape": []} for n in "ab"]
    write_card(artifact, "perception", {"inputs": two})
    with pytest.raises(HamletError, match="order"):
        check_card(artifact, {"inputs": two[::-1]})


def test_another_pack_or_upstream_is_refused_naming_both(artifact):
    with pytest.raises(HamletError, match=f"another town pack.*{'p' * 64}.*{'q' * 64}"):
        check_card(artifact, expect_pack="q" * 64)
    with pytest.raises(HamletError, match=f"another dataset.*{'d' * 64}.*{'e' * 64}"):
        check_card(artifact, expect_upstream={"dataset": "e" * 64})


def test_missing_and_broken_cards(artifact):
    card_path(artifact).write_text("[]")
    with pytest.raises(HamletError, match="is not a card"):
        check_card(artifact)
    card_path(artifact).unlink()
    with pytest.raises(HamletError, match=r"perception\.pt2\.json is missing"):
        check_card(artifact)
    artifact.unlink()
    with pytest.raises(HamletError, match=r"perception\.pt2 is missing"):
        check_card(artifact)


def test_errors_name_the_stage_that_makes_the_file(artifact):
    (artifact.parents[1] / "dvc.yaml").write_text(
        "stages:\n"
        "  collect: {cmd: a, outs: [artifacts/dataset]}\n"
        "  freeze: {cmd: a, outs: [artifacts/perception.pt2: {cache: true}], plots: [plots]}\n"
    )
    artifact.unlink()
    with pytest.raises(HamletError, match=r"missing: run `dvc repro freeze`$"):
        check_card(artifact)
    assert how_to_make(artifact.parent / "dataset" / "x.bin") == "run `dvc repro collect`"
    assert how_to_make(artifact.parent / "else.bin") == "run `dvc repro`"


def test_artifacts_needs_only_the_standard_library():
    code = "import sys, hamlet.artifacts; print(sorted({m.split('.')[0] for m in sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = set(json.loads(done.stdout.replace("'", '"')))
    assert not loaded & {"torch", "numpy", "yaml", "pydantic"}
