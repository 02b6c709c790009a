"""Many lives in one request, as a vectorised environment has them: one row each.

The rows are told apart by tensors beside the observation, in JSON, binary and gRPC alike:

- `sequence_id` INT64, UINT64 or BYTES [N]: whose row it is; each at most once;
- `sequence_start`, `sequence_end` BOOL [N], optional: this tick is its first, its last;
- `seed` INT64 [N], optional: of the random numbers of those that start.

The answer has a row for each.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from struct import unpack_from
from typing import TYPE_CHECKING, Any

import numpy as np

from hamlet.artifacts import HamletError
from hamlet.serving.model import RNG_RANGE, Model
from hamlet.serving.tensors import integer, records_of

if TYPE_CHECKING:
    from hamlet.serving.protocol import InferRequest

MAX_LIVES = 256  # in one request
IDS = "sequence_id"
_KINDS = {
    IDS: ("INT64", "UINT64", "BYTES"),
    "sequence_start": ("BOOL",),
    "sequence_end": ("BOOL",),
    "seed": ("INT64",),
}
_DTYPES = {"BOOL": "uint8", "INT64": "<i8", "UINT64": "<u8"}


def are_in(inputs: list[Any], model: Model) -> bool:
    """Whether a request names the lives of its rows (and the graph has no such input itself)."""
    return IDS not in model.described and any(
        isinstance(entry, dict) and entry.get("name") == IDS for entry in inputs
    )


def rows_of(
    request: InferRequest,
    model: Model,
    inputs: list[Any],
    binary: memoryview,
    named: Callable[[Any], str | None],
) -> list[InferRequest]:
    """The request of each row of `request`, whose inputs these are.

    Args:
        named: makes a session's name of a value.

    Raises:
        HamletError: naming the input that is wrong.
    """
    told, inputs, binary = _told(model, inputs, binary)
    names = [named(value) for value in told[IDS]]
    if len(names) > MAX_LIVES:
        raise HamletError(f"input '{IDS}' has {len(names)} rows", f"1 to {MAX_LIVES}")
    for name, values in told.items():
        if len(values) != len(names):
            raise HamletError(f"input '{name}' has {len(values)} rows, '{IDS}' {len(names)}")
    if None in names:
        raise HamletError(f"row {names.index(None)} of input '{IDS}' names no life", "not 0 or ''")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise HamletError(
            f"sequence_id '{twice}' has two rows in one request", "a life has one tick at a time"
        )
    records = records_of(model, inputs, binary, len(names))
    rows = []
    for row, life in enumerate(names):
        one = request.copy()
        one.sequence, one.record = life, records[row]
        if "sequence_start" in told:
            one.start = bool(told["sequence_start"][row])
        if "sequence_end" in told:
            one.end = bool(told["sequence_end"][row])
        if "seed" in told and one.start:
            one.seed = told["seed"][row]
        rows.append(one)
    return rows


def _told(
    model: Model, inputs: list[Any], binary: memoryview
) -> tuple[dict[str, list[Any]], list[Any], memoryview]:
    """What the tensors beside the observation say; the observation's inputs and binary data."""
    told: dict[str, list[Any]] = {}
    kept, parts, at = [], [], 0
    for entry in inputs:
        size = _binary_size(entry)
        piece, at = binary[at : at + size], at + size
        name = entry.get("name") if isinstance(entry, dict) else None
        if name in _KINDS and name not in model.described:
            if name in told:
                raise HamletError(f"input '{name}' is given twice")
            told[name] = _values(entry, piece)
        else:
            kept.append(entry)
            parts.append(piece)
    parts.append(binary[at:])
    return told, kept, memoryview(b"".join(parts))


def _binary_size(entry: Any) -> int:
    """Bytes of binary data that an input has; what is wrong with it is found out later."""
    parameters = entry.get("parameters") if isinstance(entry, dict) else None
    size = parameters.get("binary_data_size") if isinstance(parameters, dict) else None
    size = integer(size) or 0
    return max(size, 0) if size and entry.get("data") is None else 0


def _values(entry: dict[str, Any], piece: memoryview) -> list[Any]:
    name, datatype, shape = entry["name"], entry.get("datatype"), entry.get("shape")
    if datatype not in _KINDS[name]:
        raise HamletError(
            f"input '{name}' is {datatype!s:.20}", f"it is {' or '.join(_KINDS[name])} [N]"
        )
    sizes = [integer(n) for n in shape] if type(shape) is list else []
    rows = sizes[0] if sizes else None
    if (
        not rows
        or rows < 0
        or any(not n or n < 0 for n in sizes)
        or prod(n or 0 for n in sizes) != rows
    ):
        raise HamletError(f"input '{name}' has shape {shape!s:.60}", "[N], a value for each row")
    data = entry.get("data")
    if data is None:
        data = _unpacked(name, datatype, piece, rows)
    elif type(data) is not list:
        raise HamletError(f"input '{name}' has data that is not an array")
    elif data and type(data[0]) is list:  # [N, 1]
        data = [value for row in data for value in (row if type(row) is list else [row])]
    if len(data) != rows:
        raise HamletError(f"input '{name}' has {len(data)} values, its shape says {rows}")
    if datatype == "BOOL" and any(integer(int(x) if x is True or x is False else x) not in (0, 1)
                                  for x in data):  # fmt: skip
        raise HamletError(f"input '{name}' holds what is not true or false")
    if name == "seed":
        data = [integer(x) for x in data]
        if any(x is None or not 0 <= x < RNG_RANGE for x in data):
            raise HamletError("input 'seed' holds what is no seed", f"0 to {RNG_RANGE - 1}")
    return data


def _unpacked(name: str, datatype: str, piece: memoryview, rows: int) -> list[Any]:
    if datatype != "BYTES":
        dtype = np.dtype(_DTYPES[datatype])
        if len(piece) != rows * dtype.itemsize:
            raise HamletError(
                f"input '{name}' has {len(piece)} bytes", f"it is {rows * dtype.itemsize}"
            )
        return np.frombuffer(piece, dtype).tolist()
    values, at = [], 0
    while at + 4 <= len(piece):
        (size,) = unpack_from("<I", piece, at)
        values.append(bytes(piece[at + 4 : at + 4 + size]).decode(errors="replace"))
        at += 4 + size
    if at != len(piece):
        raise HamletError(f"input '{name}' is cut short", "each string: its length, uint32, and it")
    return values
