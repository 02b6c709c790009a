"""Parquet and Arrow files as a log store: read batch by batch, checked, never whole in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hamlet.artifacts import HamletError
from hamlet.offline.checks import Checker, Report
from hamlet.offline.log_store import FINAL, TERMINATED, TRUNCATED, Writer
from hamlet.offline.schema import Schema

BATCH = 65_536
SUFFIXES = {".parquet", ".arrow", ".feather"}


def table_files(path: Path) -> list[Path]:
    """The Parquet or Arrow files of a path, a file or a folder, in the order of their names.

    Raises:
        HamletError: there is none.
    """
    if not path.exists():
        raise HamletError(f"{path} is missing", "name a Parquet or Arrow file, or a folder of them")
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.suffix in SUFFIXES)
    files = [file for file in files if file.suffix in SUFFIXES]
    if not files:
        raise HamletError(
            f"{path} holds no log", "name a .parquet, .arrow or .feather file, or a Minari data set"
        )
    return files


def read_tables(path: Path, schema: Schema, folder: Path, report: Report) -> int:
    """Write the log at `path` into a new store in `folder`; returns its rows.

    Args:
        report: told each problem of a row; while it returns, reading goes on.

    Raises:
        HamletError: a file cannot be read, has no rows, or lacks a column or its type.
    """
    files = [_open(file) for file in table_files(path)]
    for file in files:
        _check_columns(file, schema)
    rows = sum(file.rows for file in files)
    if not rows:
        raise HamletError(f"{path} has no rows", "log some decisions first")
    writer, checker = Writer(folder, schema, rows), Checker(schema, report)
    for file in files:
        offset = 0
        for batch in file.batches():
            arrays, episode, step = _extract(batch, schema, file.name, offset, report)
            begins = checker.check(file.name, offset, arrays, episode, step)
            arrays["action"] = np.clip(arrays["action"], 0, schema.num_actions - 1)
            writer.add(arrays, begins)
            offset += len(step)
    writer.close({"path": path.name})
    return rows


class _File:
    """One file of either format."""

    def __init__(self, name: str, schema: Any, rows: int, batches: Any) -> None:
        self.name, self.schema, self.rows, self._batches = name, schema, rows, batches

    def batches(self) -> Iterator[pa.RecordBatch]:
        try:
            yield from self._batches()
        except (pa.ArrowException, OSError) as error:
            raise _damaged(self.name, error) from None


def _open(path: Path) -> _File:
    name = str(path)
    if path.stat().st_size == 0:
        raise HamletError(f"{name} is empty (0 bytes)", "write the log again")
    try:
        if path.suffix == ".parquet":
            parquet = pq.ParquetFile(path, memory_map=True)
            return _File(
                name, parquet.schema_arrow, parquet.metadata.num_rows,
                lambda: parquet.iter_batches(BATCH),
            )  # fmt: skip
        arrow = pa.ipc.open_file(pa.memory_map(name))
        chunks = [arrow.get_batch(i) for i in range(arrow.num_record_batches)]
        return _File(
            name, arrow.schema, sum(len(c) for c in chunks),
            lambda: (c.slice(i, BATCH) for c in chunks for i in range(0, len(c), BATCH)),
        )  # fmt: skip
    except (pa.ArrowException, OSError) as error:
        raise _damaged(name, error) from None


def _damaged(name: str, error: Exception) -> HamletError:
    reason = str(error).strip().splitlines()[0][:120]
    return HamletError(f"{name} is damaged or cut short ({reason})", "copy or write it again")


def _check_columns(file: _File, schema: Schema) -> None:
    def need(column: str, use: str, kinds: dict[str, Any]) -> None:
        index = file.schema.get_field_index(column)
        if index < 0:
            have = ", ".join(file.schema.names[:12])
            raise HamletError(
                f"{file.name} has no column `{column}` ({use})",
                f"name the right one in the schema; the file has {have}",
            )
        found = file.schema.field(index).type
        if not any(test(found) for test in kinds.values()):
            raise HamletError(
                f"{file.name}, column `{column}` ({use}) is {found}",
                f"it must be {' or '.join(kinds)}",
            )

    integer = {"an integer": pa.types.is_integer}
    number = {"a number": _is_number}
    text = {"a string": lambda t: pa.types.is_string(t) or pa.types.is_large_string(t)}
    boolean = {"true or false": pa.types.is_boolean}
    for name, field in schema.fields.items():
        for column in field.columns:
            kinds: dict[str, Any] = integer if field.count else number
            if field.shape:
                kinds = {"a list of integers": _is_list_of(pa.types.is_integer)}
                if not field.count:
                    kinds = {"a list of numbers": _is_list_of(_is_number)}
            need(column, f"field `{name}`", kinds)
    need(schema.action, "the action", integer)
    need(schema.reward, "the reward", number)
    need(schema.episode, "the episode", integer | text)
    need(schema.step, "the step", integer)
    if schema.log_prob:
        need(schema.log_prob, "the behaviour's log-probability", number)
    for ending in (schema.terminated, schema.truncated):
        if ending:
            need(ending, "an ending", boolean)
    listed = {"a list of true and false": _is_list_of(pa.types.is_boolean)}
    if schema.action_mask:
        need(schema.action_mask, "the legal actions", listed)


def _is_number(kind: Any) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def _is_list_of(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Whether a type is a list, or a list of lists, of what passes the test."""

    def passes(kind: Any) -> bool:
        listed = _is_list(kind)
        while _is_list(kind):
            kind = kind.value_type
        return listed and test(kind)

    return passes


def _is_list(kind: Any) -> bool:
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(test(kind) for test in lists)


def _extract(
    batch: pa.RecordBatch, schema: Schema, file: str, offset: int, report: Report
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """The batch as a store's arrays, with episode and step; what is null is reported."""
    final = np.asarray(batch.column(schema.action).is_null())

    def column(name: str, dtype: str, may_be_null: bool) -> np.ndarray:
        values = batch.column(name)
        if values.null_count:
            null = np.asarray(values.is_null()) & ~(final if may_be_null else False)
            for i in np.flatnonzero(null):
                report(
                    HamletError(
                        f"{file}, row {offset + i}: `{name}` is null",
                        "give it a value, or drop its episode",
                    )
                )
            values = values.fill_null(_filling(values.type))
        array = values.to_numpy(zero_copy_only=False)
        return array if dtype == "any" else array.astype(dtype)

    def lists(name: str, size: int, dtype: str, what: str) -> np.ndarray:
        flat, per_row = _flattened(batch.column(name))
        wrong = np.flatnonzero(per_row != size)
        if len(wrong):
            i = wrong[0]
            had = f"{per_row[i]} numbers" if per_row[i] else "nothing"
            raise HamletError(
                f"{file}, row {offset + i}: `{name}` holds {had}, {what} has {size}",
                "correct the row, or `shape` in the schema",
            )
        null = np.flatnonzero(np.asarray(flat.is_null()))
        if len(null):
            raise HamletError(
                f"{file}, row {offset + null[0] // size}: `{name}` holds a null",
                "give it a value, or drop its episode",
            )
        return flat.to_numpy(zero_copy_only=False).astype(dtype).reshape(len(batch), size)

    arrays: dict[str, np.ndarray] = {}
    for name, field in schema.fields.items():
        dtype = str(field.dtype)
        if field.shape:
            x = lists(field.columns[0], prod(field.shape), dtype, f"field `{name}`")
        else:
            x = np.stack([column(c, dtype, False) for c in field.columns], 1)
        arrays[f"field.{name}"] = x.reshape(len(batch), *field.trailing)
    arrays["action"] = np.where(final, 0, column(schema.action, "int64", True))
    arrays["reward"] = column(schema.reward, "float32", True)
    flags = np.where(final, FINAL, 0).astype("uint8")
    for ending, bit in ((schema.terminated, TERMINATED), (schema.truncated, TRUNCATED)):
        if ending:
            flags |= np.where(column(ending, "bool", True) & ~final, bit, 0).astype("uint8")
    arrays["flags"] = flags
    if schema.log_prob:
        arrays["log_prob"] = column(schema.log_prob, "float32", True)
    if schema.action_mask:
        arrays["action_mask"] = lists(
            schema.action_mask, schema.num_actions, "bool", "`actions` of the schema"
        )
    return arrays, column(schema.episode, "any", False), column(schema.step, "int64", False)


def _flattened(values: Any) -> tuple[Any, np.ndarray]:
    """The numbers in a column of lists (of lists), and int64 [R] how many each row has."""
    row = np.arange(len(values))
    count = len(values)
    while _is_list(values.type):
        row = np.repeat(row, np.asarray(values.value_lengths().fill_null(0)))
        values = values.flatten()
    return values, np.bincount(row, minlength=count)


def _filling(kind: Any) -> Any:
    """What stands for a null that was reported, or that a final row may have."""
    if pa.types.is_boolean(kind):
        return False
    return 0 if _is_number(kind) else ""
