"""Tensors of the Open Inference Protocol as they are sent, JSON or binary, to bytes and arrays.

JSON writers differ: null is absent, 1.0 is 1, and 0 and 1 are false and true. All of it is taken.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import orjson

from hamlet.artifacts import HamletError
from hamlet.serving.model import Field, Model


def integer(value: Any) -> int | None:
    """A whole number from JSON, which does not tell 1 from 1.0; None if it is none."""
    if type(value) is float and value.is_integer():
        return int(value)
    return value if type(value) is int else None


def record_of(model: Model, inputs: list[Any], binary: memoryview) -> bytes:
    """The observation of one session as a record.

    Raises:
        HamletError: naming the input that is wrong.
    """
    return plain_record(model, inputs) or checked_record(model, inputs, binary)


def plain_record(model: Model, inputs: list[Any]) -> bytes | None:
    """`checked_record` of what is sent most, every field once as flat JSON, in half the time.

    None for all else: `checked_record` understands it, or says what is wrong with it.
    """
    data: dict[str, list[Any]] = {}
    try:
        for entry in inputs:
            name = entry["name"]
            numbers = data[name] = entry["data"]
            if (entry["datatype"], entry["shape"], len(numbers)) != model.plain[name]:
                return None
    except (KeyError, TypeError):
        return None
    return _joined(model, data) if len(data) == len(inputs) else None


def listed_record(model: Model, names: list[str], lists: bytes) -> bytes | None:
    """`plain_record` of inputs that are known but for their data: JSON of a list for each name."""
    try:
        data = dict(zip(names, orjson.loads(lists), strict=True))
    except (orjson.JSONDecodeError, ValueError):
        return None
    for name, numbers in data.items():
        if len(numbers) != model.plain[name][2]:
            return None
    return _joined(model, data)


def _joined(model: Model, data: dict[str, list[Any]]) -> bytes | None:
    """A record of flat lists of the right lengths; None if a number in them is of another kind."""
    parts = []
    try:
        for dtype, names in model.names_by_dtype.items():
            numbers = [*chain.from_iterable(map(data.__getitem__, names))]
            types, pack = _PACKERS[dtype]
            if not types.issuperset(map(type, numbers)):
                return None
            parts.append(pack(numbers))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return b"".join(parts)


def checked_record(model: Model, inputs: list[Any], binary: memoryview) -> bytes:
    """The observation of one session, from inputs in any order."""
    parts: list[Any] = [None] * len(model.fields)
    by_name, fields = model.by_name, model.fields
    at = 0
    for entry in inputs:
        try:
            index = by_name[entry["name"]]
        except (KeyError, TypeError):
            raise _unknown(entry, by_name) from None
        field = fields[index]
        if parts[index] is not None:
            raise HamletError(f"input '{field.name}' is given twice")
        shape = entry.get("shape")
        if entry.get("datatype") != field.datatype or shape != field.sent(1):
            raise _misfit(field, entry)
        if entry.get("data") is not None:
            parts[index] = _packed(field, entry["data"], 1)
        else:
            parts[index] = _slice(field.name, entry, binary, at, field.nbytes)
            at += field.nbytes
    _all_used(at, binary)
    if None in parts:
        field = fields[parts.index(None)]
        raise HamletError(f"input '{field.name}' is missing", field.expected())
    return b"".join(parts)


def records_of(model: Model, inputs: list[Any], binary: memoryview, rows: int) -> list[bytes]:
    """The observations of many sessions, one row each, as a record each.

    Raises:
        HamletError: naming the input that is wrong, also where a number is out of range.
    """
    parts: list[Any] = [None] * len(model.fields)
    at = 0
    for entry in inputs:
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str) or name not in model.by_name:
            if name in model.states:
                raise HamletError(f"input '{name}' is kept here for lives with a sequence_id")
            raise _unknown(entry, model.by_name)
        index = model.by_name[name]
        field = model.fields[index]
        if field.axis is None:  # each row has one of its own
            field = replace(field, axis=0)
        if parts[index] is not None:
            raise HamletError(f"input '{name}' is given twice")
        if (own := _rows(field, entry)) != rows:
            raise HamletError(f"input '{name}' has {own} rows, 'sequence_id' {rows}")
        if entry.get("data") is not None:
            raw: Any = _packed(field, entry["data"], rows)
        else:
            raw = _slice(name, entry, binary, at, rows * field.nbytes)
            at += rows * field.nbytes
        values = field.rows_first(model.checked(field, raw, rows))
        if name == model.signature.mask and not values.reshape(rows, -1).any(axis=1).all():
            raise HamletError(f"input '{name}' forbids every action", "allow one")
        flat = np.ascontiguousarray(values).reshape(rows, -1)
        parts[index] = flat.view(np.uint8).reshape(rows, field.nbytes)
    _all_used(at, binary)
    for field, part in zip(model.fields, parts, strict=True):
        if part is None:
            raise HamletError(f"input '{field.name}' is missing", field.expected())
    return [row.tobytes() for row in np.concatenate(parts, axis=1)]


def feeds_of(
    model: Model, inputs: list[Any], binary: memoryview, seed: int | None
) -> tuple[dict[str, np.ndarray], int]:
    """Observations, and state where it is given, of any number of rows up to a batch: arrays in
    the graph's layout, by name, and how many rows they have. State that is not given is that of a
    new life.

    Raises:
        HamletError: naming the input that is wrong.
    """
    wanted, feeds, rows, at = model.described, {}, 0, 0
    for entry in inputs:
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str) or name not in wanted:
            raise _unknown(entry, wanted)
        if name in feeds:
            raise HamletError(f"input '{name}' is given twice")
        field = wanted[name]
        own = _rows(field, entry)
        if not 0 < own <= model.max_batch:
            raise HamletError(f"input '{name}' has {own} rows", f"1 to {model.max_batch}")
        if rows and own != rows:
            raise HamletError(f"input '{name}' has {own} rows, an earlier one {rows}")
        rows = own
        if entry.get("data") is not None:
            raw: Any = _packed(field, entry["data"], rows)
        else:
            raw = _slice(name, entry, binary, at, rows * field.nbytes)
            at += rows * field.nbytes
        feeds[name] = model.checked(field, raw, rows)
    _all_used(at, binary)
    for field in model.fields:
        if field.name not in feeds:
            raise HamletError(f"input '{field.name}' is missing", field.expected())
    mask = model.signature.mask
    if mask and not wanted[mask].rows_first(feeds[mask]).any(axis=-1).all():
        raise HamletError(f"input '{mask}' forbids every action", "allow one")
    for name, first in model.agent.start(rows or 1).items():
        if name in feeds:
            continue
        if name == model.signature.rng:
            first[:] = seed or 0
        feeds[name] = first
    return feeds, rows or 1


def _rows(field: Field, entry: dict[str, Any]) -> int:
    """How many rows an input says it has; 1 where it has no batch."""
    shape, rows = entry.get("shape"), 1
    if type(shape) is list and field.axis is not None and len(shape) > field.axis:
        rows = integer(shape[field.axis]) or 0
        if rows < 1 and shape[field.axis] not in (0, 0.0):
            raise _misfit(field, entry)
    if entry.get("datatype") != field.datatype or shape != field.sent(rows):
        raise _misfit(field, entry)
    return rows


def _slice(name: str, entry: dict[str, Any], binary: memoryview, at: int, nbytes: int) -> Any:
    parameters = entry.get("parameters")
    given = parameters.get("binary_data_size") if isinstance(parameters, dict) else None
    if given is None:
        raise HamletError(f"input '{name}' has no data", "give 'data' or 'binary_data_size'")
    if integer(given) != nbytes:
        raise HamletError(f"input '{name}' has binary_data_size {given!s:.20}", f"it is {nbytes}")
    part = binary[at : at + nbytes]
    if len(part) != nbytes:
        raise HamletError(f"input '{name}' is cut short", f"{nbytes} bytes, {len(part)} came")
    return part


def _packed(field: Field, data: Any, rows: int) -> bytes:
    """JSON data as bytes; flat, or nested as the shape says."""
    if type(data) is not list:
        raise HamletError(f"input '{field.name}' has data that is not an array", field.expected())
    if data and type(data[0]) is list:
        data = _flatten(field, data, tuple(field.sent(rows)))
    if len(data) != rows * field.size:
        raise HamletError(
            f"input '{field.name}' has {len(data)} numbers, its shape says {rows * field.size}"
        )
    types, pack = _PACKERS[field.dtype]
    found = set(map(type, data))
    if not found <= types and found <= {bool, int, float}:
        data = _as_meant(field, data, found)
        found = set(map(type, data))
    if found <= types:
        try:
            return pack(data)
        except (ValueError, OverflowError, struct.error):
            pass
    raise HamletError(f"input '{field.name}' holds what is not {field.datatype}", field.expected())


def _as_meant(field: Field, data: list[Any], found: set[type]) -> list[Any]:
    """Whole numbers written as 1.0, truth as 0 and 1; all else as it is."""
    if field.dtype == "bool":
        return [bool(x) if x in (0, 1) else x for x in data]
    if bool not in found:
        return [int(x) if type(x) is float and _is_exact(x) else x for x in data]
    return data


def _is_exact(x: float) -> bool:
    """Whether it is the whole number that was sent: a larger one may have been rounded."""
    return x.is_integer() and abs(x) <= 2**53


def _flatten(field: Field, data: list[Any], shape: tuple[int, ...]) -> list[Any]:
    for size in shape[1:]:
        flat = []
        for part in data:
            if type(part) is not list or len(part) != size:
                raise HamletError(
                    f"input '{field.name}' has nested data of another shape", field.expected()
                )
            flat += part
        data = flat
    if any(type(x) is list for x in data):
        raise HamletError(f"input '{field.name}' is nested too deeply", field.expected())
    return data


def _packer(code: str) -> Callable[[list[Any]], bytes]:
    return lambda data: array(code, data).tobytes()


_PACKERS: dict[str, tuple[set[type], Callable[[list[Any]], bytes]]] = {
    "bool": ({bool}, bytes),
    "uint8": ({int}, bytes),
    **{
        dtype: ({int}, _packer(code))
        for dtype, code in (
            ("int8", "b"), ("int16", "h"), ("int32", "i"), ("int64", "q"),
            ("uint16", "H"), ("uint32", "I"), ("uint64", "Q"),
        )
    },
    "float16": ({int, float}, lambda data: struct.pack(f"<{len(data)}e", *data)),
    "float32": ({int, float}, _packer("f")),
    "float64": ({int, float}, _packer("d")),
}  # fmt: skip


def _unknown(entry: Any, known: Any) -> HamletError:
    if not isinstance(entry, dict):
        return HamletError("an entry of 'inputs' is not an object")
    return HamletError(f"input {entry.get('name')!r:.60} is unknown", f"known: {', '.join(known)}")


def _misfit(field: Field, entry: dict[str, Any]) -> HamletError:
    datatype, shape = entry.get("datatype"), entry.get("shape")
    return HamletError(f"input '{field.name}' is {datatype!s:.20} {shape!s:.60}", field.expected())


def _all_used(at: int, binary: memoryview) -> None:
    if at != len(binary):
        raise HamletError(f"{len(binary) - at} bytes after the last binary tensor belong to none")
