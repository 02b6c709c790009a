"""Logs as they are read: what is broken is told by file, row and fix; what is right is kept."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

pytest.importorskip("minari")
import gymnasium

from hamlet.artifacts import HamletError
from hamlet.offline import tables
from hamlet.offline.cli import app
from hamlet.offline.gym import record
from hamlet.offline.log_store import FINAL, TERMINATED, TRUNCATED
from hamlet.offline.minari_data import open_minari
from hamlet.offline.open_log import open_log
from hamlet.offline.schema import load_schema
from tests.offline.logged import BEHAVIOUR, SCHEMA, play, write

MASKED = SCHEMA + "action_mask: mask\n"


def good():
    """Four episodes of three steps, all actions legal."""
    n = 12
    rng = np.random.default_rng(0)
    step = np.tile(np.arange(3), 4)
    return {
        "episode": np.repeat(np.arange(4), 3),
        "step": step,
        "state": rng.integers(3, size=n),
        "action": np.tile([0, 1, 1], 4),
        "log_prob": np.full(n, -0.7),
        "reward": np.arange(12.0),
        "terminated": step == 2,
        "truncated": np.zeros(n, bool),
        "noise_a": rng.normal(size=n),
        "noise_b": rng.normal(size=n),
        "mask": [[True, True]] * n,
    }


def with_value(name, row, value):
    columns = good()
    columns[name] = list(columns[name])
    columns[name][row] = value
    return columns


def reordered(order):
    return {name: [list(x)[i] for i in order] for name, x in good().items()}


def without(name):
    return {key: x for key, x in good().items() if key != name}


ORDER = list(range(12))
BROKEN = {
    "missing column": (without("reward"), r"no column `reward` \(the reward\): name the right one"),
    "NaN reward": (with_value("reward", 4, np.nan), r"row 4: `reward` is nan: give every decision"),
    "null reward": (with_value("reward", 4, None), r"row 4: `reward` is null: give it a value"),
    "action out of range": (
        with_value("action", 5, 2), r"row 5: `action` is 2, the schema has 2 actions \(0 to 1\): c"
    ),
    "log-prob > 0": (with_value("log_prob", 6, 0.5), r"row 6: `log_prob` is 0\.5.*: take the"),
    "unsorted steps": (
        reordered([0, 2, 1, *ORDER[3:]]), r"row 2: `episode` 0, `step` 1 comes after step 2: sort"
    ),
    "steps backwards": (
        reordered([1, 0, *ORDER[2:]]), r"row 1: .*`step` 0 comes after step 1: sort the file by"
    ),
    "overlapping episodes": (
        reordered([*ORDER[:2], 3, 2, *ORDER[4:]]), r"row 3: `episode` 0, .* overlap: sort the file"
    ),
    "empty file": (pa.table(good()).slice(0, 0), "log.parquet has no rows: log some decisions"),
    "wrong type": (
        good() | {"action": [str(a) for a in good()["action"]]},
        r"column `action` \(the action\) is string: it must be an integer",
    ),
    "mask forbids the action": (
        with_value("mask", 7, [True, False]), r"row 7: `mask` forbids action 1, which was taken: th"
    ),
    "duplicate rows": (
        reordered([0, 1, 1, *ORDER[2:]]), r"row 2: `episode` 0, `step` 1 is there twice: drop"
    ),
    "category out of range": (with_value("state", 3, 9), r"row 3: field `state` holds 9: it must"),
    "feature not finite": (with_value("noise_b", 2, np.inf), r"row 2: field `noise` holds inf: it"),
    "mask of another length": (with_value("mask", 8, [True]), r"row 8: `mask` holds 1 numbers"),
    "text in a list": (
        good() | {"mask": [["yes", "no"]] * 12}, r"column `mask` .*: it must be a list of true and"
    ),
    "null in a list": (with_value("mask", 5, [None, True]), r"row 5: `mask` holds a null: give it"),
    "null category": (with_value("state", 3, None), r"row 3: `state` is null: give it a value"),
    "null episode": (with_value("episode", 4, None), r"row 4: `episode` is null: give it a value"),
    "after the end": (
        with_value("terminated", 1, True), r"row 2: .*goes on after its episode ended: give it anot"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_broken_is_told_by_file_row_and_fix(kind, tmp_path):
    columns, line = BROKEN[kind]
    path = write(tmp_path, columns, schema=MASKED)
    with pytest.raises(HamletError, match=line) as caught:
        open_log(path, None, tmp_path / "cache")
    assert str(path) in str(caught.value)
    assert caught.value.fix
    assert not list((tmp_path / "cache").glob("log-*"))  # nothing half-read is kept
    done = CliRunner().invoke(app, ["check", str(path)])
    assert done.exit_code == 1
    assert str(path) in done.output.replace("\n", "")


def test_a_cut_parquet_file_and_an_empty_one(tmp_path):
    path = write(tmp_path, good(), schema=MASKED)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(HamletError, match=rf"{path} is damaged or cut short .*: copy or write it"):
        open_log(path, None, tmp_path / "cache")
    # Cut in its data, with the footer in place: noticed while it is read.
    path.write_bytes(whole[:200] + bytes(300) + whole[500:])
    with pytest.raises(HamletError, match=rf"{path} is damaged or cut short"):
        open_log(path, None, tmp_path / "cache")
    path.write_bytes(b"")
    with pytest.raises(HamletError, match=rf"{path} is empty \(0 bytes\): write the log again"):
        open_log(path, None, tmp_path / "cache")


def test_lists_within_lists_are_counted_row_by_row(tmp_path):
    """Two rows whose lists are as long together as they should be, but not each."""
    grid = [[[1.0, 2.0], [3.0, 4.0]]] * 12
    schema = SCHEMA + "  history: {kind: sequence, columns: [history], shape: [2, 2]}\n"
    schema = schema.replace("log_prob: log_prob\nterminated: terminated\n", "")
    path = write(tmp_path, good() | {"history": grid}, schema=schema)
    store = open_log(path, None, tmp_path / "cache")
    np.testing.assert_array_equal(store.fields["history"][7], [[1, 2], [3, 4]])
    grid[3:5] = [[[1.0], [2.0, 3.0]], [[1.0, 2.0], [3.0, 4.0, 5.0]]]
    write(tmp_path, good() | {"history": grid}, schema=schema)
    with pytest.raises(HamletError, match=r"row 3: `history` holds 3 numbers, field .* has 4: c"):
        open_log(path, None, tmp_path / "cache")


def test_check_lists_every_problem_and_says_what_is_there(tmp_path):
    columns = with_value("reward", 4, np.nan)
    columns["action"][5] = 7
    path = write(tmp_path, columns, schema=MASKED)
    done = CliRunner().invoke(app, ["check", str(path)])
    assert done.exit_code == 1
    assert "row 4: `reward` is nan" in done.output
    assert "row 5: `action` is 7" in done.output
    path = write(tmp_path, good(), "fine.parquet", schema=MASKED)
    done = CliRunner().invoke(app, ["check", str(path)])
    assert done.exit_code == 0, done.output
    assert "12 decisions in 4 episodes of 3 to 3 steps" in done.output
    assert "actions: stay 33.3 %, go 66.7 %" in done.output
    assert "rewards: 0 to 11, 5.5 on average" in done.output
    assert "nothing is wrong" in done.output


def test_a_log_is_read_once_and_again_when_it_or_its_schema_changes(tmp_path):
    path = write(tmp_path, good(), schema=MASKED)
    first = open_log(path, None, tmp_path / "cache")
    made = (first.folder / "meta.json").stat().st_mtime_ns
    again = open_log(path, None, tmp_path / "cache")
    assert (again.folder / "meta.json").stat().st_mtime_ns == made
    path.with_suffix(".yaml").write_text(SCHEMA)
    other = open_log(path, None, tmp_path / "cache")
    assert other.folder != first.folder
    assert other.mask is None
    np.testing.assert_array_equal(first.reward, np.arange(12))
    np.testing.assert_array_equal(first.starts, [0, 3, 6, 9, 12])
    np.testing.assert_array_equal(first.flags, np.tile([0, 0, TERMINATED], 4))


def test_parquet_arrow_and_a_folder_of_files_give_the_same_store(tmp_path):
    columns = play(BEHAVIOUR, 50, 0)
    path = write(tmp_path / "one", columns)
    table = pa.table(columns)
    arrow = tmp_path / "log.arrow"
    with pa.OSFile(str(arrow), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)
    arrow.with_suffix(".yaml").write_text(SCHEMA)
    many = tmp_path / "many"
    many.mkdir()
    for i in range(0, len(table), 37):  # episodes go on from file to file
        pq.write_table(table.slice(i, 37), many / f"{i:05d}.parquet")
    (many / "schema.yaml").write_text(SCHEMA)
    stores = [open_log(p, None, tmp_path / "cache") for p in (path, arrow, many)]
    for store in stores[1:]:
        np.testing.assert_array_equal(store.starts, stores[0].starts)
        np.testing.assert_array_equal(store.log_prob, stores[0].log_prob)
        np.testing.assert_array_equal(store.fields["noise"], stores[0].fields["noise"])
        assert store.facts == stores[0].facts


def test_a_log_is_read_in_parts_and_mapped(tmp_path, monkeypatch):
    """Parts of seven rows give the same store, the right row numbers, and nothing in memory."""
    path = write(tmp_path, play(BEHAVIOUR, 50, 0))
    whole = open_log(path, None, tmp_path / "whole")
    monkeypatch.setattr(tables, "BATCH", 7)
    parts = open_log(path, None, tmp_path / "parts")
    assert parts.facts["rows"] == whole.facts["rows"]
    np.testing.assert_array_equal(parts.starts, whole.starts)
    np.testing.assert_array_equal(parts.reward, whole.reward)
    for name in ("noise", "state"):
        np.testing.assert_array_equal(parts.fields[name], whole.fields[name])
        assert isinstance(parts.fields[name], np.memmap)
    for statistic in ("mean", "std"):
        a, b = (s.facts["statistics"]["noise"][statistic] for s in (parts, whole))
        np.testing.assert_allclose(a, b, rtol=1e-9)
    path = write(tmp_path, with_value("reward", 9, np.nan), "late.parquet")
    with pytest.raises(HamletError, match="row 9: `reward` is nan"):
        open_log(path, None, tmp_path / "late")


def test_a_row_without_an_action_is_the_last_observation(tmp_path):
    columns = with_value("action", 5, None)
    columns["reward"][5], columns["log_prob"] = np.nan, list(columns["log_prob"])
    columns["log_prob"][5] = None
    columns["terminated"] = [i % 3 == 2 and i != 5 for i in range(12)]
    store = open_log(write(tmp_path, columns, schema=MASKED), None, tmp_path / "cache")
    assert store.flags[5] == FINAL
    np.testing.assert_array_equal(store.lengths(), [3, 2, 3, 3])
    assert store.facts["rows"] == 11
    windows = store.windows(2, np.ones(4, bool))
    rows = store.read(windows, np.arange(len(windows.start)), 2)
    at = windows.start.tolist().index(3)
    assert rows["known"][:, at].tolist() == [True, True, False]
    assert rows["acted"][:, at].tolist() == [True, True, False]
    assert rows["state"][2, at] == columns["state"][5]


def test_windows_hold_every_action_once_and_the_row_after(tmp_path):
    store = open_log(write(tmp_path, play(BEHAVIOUR, 40, 1)), None, tmp_path / "cache")
    windows = store.windows(4, np.ones(40, bool))
    rows = store.read(windows, np.arange(len(windows.start)), 4)
    assert int(rows["acted"].sum()) == store.facts["rows"]
    total = rows["reward"].sum().item()
    assert total == pytest.approx(store.reward.sum(), rel=1e-5)
    for w in range(len(windows.start)):
        n = windows.stop[w] - windows.start[w]
        last = windows.stop[w] == windows.end[w]
        assert rows["terminated"][:, w].sum() == last  # every episode of this world terminates
        assert rows["known"][:n, w].all()
        assert not rows["known"][n:, w].any()
        if not last:  # the value of the row after continues the window
            np.testing.assert_array_equal(
                rows["noise"][n, w].numpy(), store.fields["noise"][windows.stop[w]]
            )


def test_schema_errors_name_the_entry(tmp_path):
    path = tmp_path / "s.yaml"
    for text, line in (
        ("actions: 1\nfields: {x: {kind: vector, columns: [x]}}", "`actions` must be 2 or more"),
        (
            "actions: 2\nfields: {x: {kind: category, columns: [x]}}",
            "fields.x.* needs one",
        ),
        (
            "actions: 2\nfields: {x: {kind: grid, columns: [x], shape: [4]}}",
            "fields.x.*must be 3",
        ),
        (
            "actions: 2\nrewards: r\nfields: {x: {kind: vector, columns: [x]}}",
            "rewards: Extra",
        ),
        ("actions: [", "is not YAML"),
    ):
        path.write_text(text)
        with pytest.raises(HamletError, match=line):
            load_schema(path)
    with pytest.raises(HamletError, match="is missing: write the schema"):
        load_schema(tmp_path / "none.yaml")


# -- Minari


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A data set of CartPole: six episodes of a random policy, of 20 steps at most."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINARI_DATASETS_PATH", str(tmp_path_factory.mktemp("minari")))
        rng = np.random.default_rng(0)
        env = gymnasium.make("CartPole-v1", max_episode_steps=20)
        return record(env, "cartpole/random-v0", 6, lambda _: np.log([0.5, 0.5]), rng)


def test_a_minari_data_set_is_read_as_it_was_recorded(recorded, tmp_path):
    path = recorded
    dataset = open_minari(path / "data")
    store = open_log(path, None, tmp_path)
    assert store.episodes == 6
    at = 0
    for episode in dataset.iterate_episodes():
        n = len(episode)
        seen = store.fields["observation"][at : at + n + 1]
        np.testing.assert_array_equal(seen, episode.observations.astype("float32"))
        np.testing.assert_array_equal(store.action[at : at + n], episode.actions)
        flags = store.flags[at : at + n + 1]
        assert flags[n] == FINAL
        wanted = TERMINATED if episode.terminations[-1] else TRUNCATED
        assert flags[n - 1] == wanted
        assert not flags[: n - 1].any()
        at += n + 1
    assert at == len(store.action)
    done = CliRunner().invoke(app, ["check", str(path)])
    assert done.exit_code == 0, done.output
    assert "no behaviour log-probabilities" not in done.output
    np.testing.assert_allclose(store.log_prob[store.flags & FINAL == 0], np.log(0.5), rtol=1e-6)


def test_a_minari_data_set_of_the_future_is_refused(recorded, tmp_path):
    path = tmp_path / "future"
    shutil.copytree(recorded, path)
    file = path / "data" / "metadata.json"
    facts = json.loads(file.read_text())
    file.write_text(json.dumps(facts | {"minari_version": "9.1.0"}))
    with pytest.raises(
        HamletError, match=r"metadata.json: made by Minari 9.1.0, .* run `pip install \"minari"
    ):
        open_log(path, None, tmp_path / "cache")


def test_a_minari_data_set_that_is_broken_names_the_episode(recorded, tmp_path):
    import h5py

    path = tmp_path / "broken"
    shutil.copytree(recorded, path)
    with h5py.File(path / "data" / "main_data.hdf5", "a") as file:
        file["episode_3/rewards"][2] = np.nan
    with pytest.raises(HamletError, match=r"episode 3, row 2: `reward` is nan: give every"):
        open_log(path, None, tmp_path / "cache")
    (path / "data" / "main_data.hdf5").write_bytes(b"no hdf5")
    with pytest.raises(HamletError, match=r"cannot be (opened|read)"):
        open_log(path, None, tmp_path / "cache")
