"""One version of the agent with the memory of everyone it acts for.

The state of every session lies in preallocated arrays (the slab), one row each; a batch gathers the
rows of its sessions into fixed buffers, ONNX Runtime reads and writes those buffers, and the new
state goes back to its rows. Nothing is allocated for a request but its own few bytes.

A *record* is one observation as bytes: its fields in the order of `Model.fields`, little endian,
without gaps. It is what a binary request carries and what JSON is packed into.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from hamlet.artifacts import HamletError
from hamlet.serving.agent import NEXT, STATE, Decision, OnnxAgent

assert sys.byteorder == "little", "records are little endian"

NAME = "hamlet-agent"  # as clients call the model
# Open Inference Protocol names of numpy's dtypes.
DATATYPES = {"uint8": "UINT8", "bool": "BOOL", "int64": "INT64", "float32": "FP32"}
RNG_RANGE = 2**31 - 2  # of the agent's random numbers, see AgentState.rng


@dataclass(frozen=True)
class Field:
    """One observation field of one session: where it stands in a record and what it may hold."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Without the batch."""
    datatype: str
    size: int
    """Numbers."""
    nbytes: int
    low: float
    high: float

    def expected(self) -> str:
        """What the field must be, for an error."""
        shape = ", ".join(map(str, (1, *self.shape)))
        return f"expected {self.datatype} [{shape}]"


@dataclass(frozen=True)
class _Group:
    """The fields of one dtype, next to one another in a record, so that one look checks all."""

    fields: list[Field]
    values: np.ndarray
    """[max_batch, numbers], bool as uint8."""
    low: np.ndarray
    high: np.ndarray


class Model:
    """An agent, the slab of its sessions and the buffers of its batches.

    Args:
        agent: the opened file.
        version: its name, as told to clients.
        capacity: sessions at most. Memory is taken when a row is first used.
        max_batch: rows at most in one run.

    Not thread-safe: `load`, `run` and `store` of one batch come after one another; `run` alone may
    happen in another thread.
    """

    def __init__(self, agent: OnnxAgent, version: str, capacity: int, max_batch: int) -> None:
        self.agent, self.version, self.capacity, self.max_batch = (
            agent,
            version,
            capacity,
            max_batch,
        )
        limits = agent.card["limits"]
        self.states = [name for name in agent.inputs if name.startswith(STATE)]
        self.following = {NEXT + name.removeprefix(STATE): name for name in self.states}
        """Outputs that are the new state, and the state they are."""
        self.thoughts = [n for n in agent.outputs if n != "action" and n not in self.following]
        fields = [
            _field(entry, limits.get(name))
            for name, entry in agent.inputs.items()
            if name not in self.states
        ]
        # Wide numbers first, so that every group is aligned within a record.
        dtypes = sorted({f.dtype for f in fields}, key=lambda d: (-np.dtype(d).itemsize, d))
        self.fields = [f for dtype in dtypes for f in fields if f.dtype == dtype]
        """The observation, in the order of a record."""
        self.by_name = {f.name: i for i, f in enumerate(self.fields)}
        """Where each field stands in `fields`."""
        self.names_by_dtype = {
            dtype: [f.name for f in self.fields if f.dtype == dtype] for dtype in dtypes
        }
        """A record again, by its dtypes."""
        self.plain = {f.name: (f.datatype, [1, *f.shape], f.size) for f in self.fields}
        """Datatype, shape and length of what is sent for each field as flat JSON."""
        states = [_field(agent.inputs[name], None) for name in self.states]
        self.described = {f.name: f for f in [*fields, *states]}
        """Every input of the graph."""
        self.record_bytes = sum(f.nbytes for f in self.fields)

        self.slab = {name: _zeros(agent.inputs[name], capacity) for name in self.states}
        self.inputs = {name: _zeros(entry, max_batch) for name, entry in agent.inputs.items()}
        outputs = {entry["name"]: entry for entry in agent.card["schema"]["outputs"]}
        self.outputs = {name: _zeros(entry, max_batch) for name, entry in outputs.items()}
        # The commonest answers but for the action itself.
        head = f'{{"model_name":"{NAME}","model_version":{json.dumps(version)},"outputs":['
        head += '{"name":"action","datatype":"INT64","shape":[1],'
        self.binary_answer = f'{head}"parameters":{{"binary_data_size":8}}}}]}}'.encode()
        self.json_answer = head.replace("%", "%%").encode() + b'"data":[%d]}]}'
        self._groups = [
            _group([f for f in fields if f.dtype == dtype], max_batch) for dtype in dtypes
        ]
        self._record = np.dtype(
            [
                (dtype, g.values.dtype, (g.values.shape[1],))
                for dtype, g in zip(dtypes, self._groups)
            ]
        )
        self._flat = {
            f.name: self.inputs[f.name].view(_raw(f.dtype)).reshape(max_batch, -1) for f in fields
        }
        self._mask = self.inputs["action_mask"]
        self._bindings: dict[int, Any] = {}
        self._period = 1
        self._free = list(range(capacity - 1, -1, -1))

    # -- sessions

    @property
    def sessions(self) -> int:
        """Rows in use."""
        return self.capacity - len(self._free)

    def open(self, rng: int) -> int | None:
        """Begin a life in a free row, None if there is none; `rng`: see `RNG_RANGE`."""
        if not self._free:
            return None
        slot = self._free.pop()
        for name in self.states:
            self.slab[name][slot] = 0
        self.slab["state_rng"][slot] = rng
        return slot

    def close(self, slot: int) -> None:
        """Give a row back; no batch that holds it may be running."""
        self._free.append(slot)

    def deliberates(self, slot: int) -> bool:
        """Whether the next tick of a row is one of the few at which the agent deliberates."""
        return self._period > 1 and not self.slab["state_clock"][slot] % self._period

    # -- one batch

    def load(self, records: Sequence[bytes]) -> dict[int, HamletError]:
        """Put records (1 to `max_batch`) into the input buffers; returns what is wrong, by row."""
        n = len(records)
        rows = np.frombuffer(records[0] if n == 1 else b"".join(records), self._record)
        wrong: dict[int, HamletError] = {}
        for group in self._groups:
            values = group.values[:n]
            np.copyto(values, rows[group.fields[0].dtype])
            if not ((values >= group.low) & (values <= group.high)).all():  # NaN is neither
                _what_is_wrong(group, values, wrong)
            start = 0
            for field in group.fields:
                self._flat[field.name][:n] = values[:, start : start + field.size]
                start += field.size
        allowed = self._mask[:n].any(axis=1)
        if not allowed.all():
            for row in np.flatnonzero(~allowed).tolist():
                wrong.setdefault(
                    row, HamletError("field 'action_mask' forbids every action", "WAIT is legal")
                )
        return wrong

    def recall(self, slots: Sequence[int]) -> None:
        """Put the state of these rows of the slab into the input buffers."""
        n = len(slots)
        if n == 1:
            for name in self.states:
                self.inputs[name][0] = self.slab[name][slots[0]]
            return
        index = np.array(slots)
        for name in self.states:
            self.slab[name].take(index, axis=0, out=self.inputs[name][:n], mode="clip")

    def run(self, n: int) -> None:
        """One tick of the first `n` rows of the input buffers into the output buffers."""
        binding = self._bindings.get(n)
        if binding is None:
            binding = self._bindings[n] = self._bind(n)
        self.agent.session.run_with_iobinding(binding)

    def look_at_deliberation(self) -> None:
        """Learn every how many ticks the agent deliberates, from a run with clocks 0, 1, 2, ..."""
        confident = self.outputs["imagination_confidence"].max(axis=1) > 0
        period = int(confident[1:].argmax()) + 1
        if confident.any() and np.array_equal(confident, np.arange(len(confident)) % period == 0):
            self._period = period

    def store(self, slots: Sequence[int]) -> None:
        """The new state of the first rows of the output buffers becomes that of these sessions."""
        n = len(slots)
        index = slots[0] if n == 1 else np.array(slots)
        for following, name in self.following.items():
            new = self.outputs[following]
            self.slab[name][index] = new[0] if n == 1 else new[:n]

    def _bind(self, n: int) -> Any:
        binding = self.agent.session.io_binding()
        for name, array in self.inputs.items():
            shape = (n, *array.shape[1:])
            binding.bind_input(name, "cpu", 0, array.dtype.type, shape, array.ctypes.data)
        for name, array in self.outputs.items():
            shape = (n, *array.shape[1:])
            binding.bind_output(name, "cpu", 0, array.dtype.type, shape, array.ctypes.data)
        return binding

    # -- one observation

    def checked(self, field: Field, raw: Any, rows: int) -> np.ndarray:
        """Bytes of any input of the graph as an array [rows, ...].

        Raises:
            HamletError: a number out of range.
        """
        values = np.frombuffer(raw, _raw(field.dtype)).reshape(rows, *field.shape)
        if not ((values >= field.low) & (values <= field.high)).all():
            raise _out_of_range(field, values)
        return values.astype(bool) if field.dtype == "bool" else values

    def decision(self, row: int) -> Decision:
        """Row `row` of the last run, as copies with a batch of one."""
        at = slice(row, row + 1)
        state = {
            name: self.outputs[following][at].copy() for following, name in self.following.items()
        }
        thoughts = {name: self.outputs[name][at].copy() for name in self.thoughts}
        return Decision(self.outputs["action"][at].copy(), state, thoughts)


def pack(fields: Sequence[Field], observation: Mapping[str, Any]) -> bytes:
    """One observation, arrays or nested lists without a batch, as a record.

    Raises:
        HamletError: naming the first field that is missing, unknown, misshapen or mistyped.
            Ranges are looked at by `Model.load`.
    """
    parts = []
    for field in fields:
        try:
            value = observation[field.name]
        except KeyError:
            raise HamletError(f"field '{field.name}' is missing", _without_batch(field)) from None
        if not isinstance(value, np.ndarray):
            value = _array(field, value)
        if value.shape != field.shape:
            raise HamletError(
                f"field '{field.name}' has shape {list(value.shape)}", _without_batch(field)
            )
        parts.append(value.tobytes() if value.dtype == field.dtype else _cast(field, value))
    if len(observation) > len(parts):
        known = [field.name for field in fields]
        unknown = next(name for name in observation if name not in known)
        raise HamletError(f"field '{unknown:.40}' is unknown", f"known fields: {', '.join(known)}")
    return b"".join(parts)


def _cast(field: Field, value: np.ndarray) -> bytes:
    with np.errstate(all="ignore"):
        exact = value.astype(field.dtype)
        rounded = field.dtype == "float32" and value.dtype.kind in "fiu"
        if not rounded and not np.array_equal(exact, value):
            raise HamletError(
                f"field '{field.name}' holds values that are not {field.datatype}",
                _without_batch(field),
            )
    return exact.tobytes()


def _field(entry: Mapping[str, Any], limit: Sequence[float] | None) -> Field:
    name, dtype, shape = entry["name"], entry["dtype"], tuple(entry["shape"][1:])
    if dtype not in DATATYPES:
        raise HamletError(f"input '{name}' of the agent is {dtype}, which is not served")
    size = prod(shape)
    if limit:
        low, high = limit
    elif dtype == "float32":
        high = float(np.finfo(dtype).max)
        low = -high
    else:
        info = np.iinfo(_raw(dtype))
        low, high = (0, 1) if dtype == "bool" else (info.min, info.max)
    nbytes = size * np.dtype(dtype).itemsize
    return Field(name, dtype, shape, DATATYPES[dtype], size, nbytes, low, high)


def _group(fields: list[Field], max_batch: int) -> _Group:
    dtype = _raw(fields[0].dtype)
    sizes = [f.size for f in fields]

    def bound(values: list[float]) -> np.ndarray:
        return np.repeat(np.array(values, dtype), sizes)

    values = np.zeros((max_batch, sum(sizes)), dtype)
    return _Group(fields, values, bound([f.low for f in fields]), bound([f.high for f in fields]))


def _raw(dtype: str) -> str:
    return "uint8" if dtype == "bool" else dtype  # a byte that is neither 0 nor 1 must be seen


def _zeros(entry: Mapping[str, Any], rows: int) -> np.ndarray:
    return np.zeros((rows, *entry["shape"][1:]), entry["dtype"])


def _what_is_wrong(group: _Group, values: np.ndarray, wrong: dict[int, HamletError]) -> None:
    start = 0
    for field in group.fields:
        part = values[:, start : start + field.size]
        start += field.size
        fine = ((part >= field.low) & (part <= field.high)).all(axis=1)
        for row in np.flatnonzero(~fine).tolist():
            wrong.setdefault(row, _out_of_range(field, part[row]))


def _out_of_range(field: Field, values: np.ndarray) -> HamletError:
    bad = next(x for x in values.ravel().tolist() if not field.low <= x <= field.high)
    return HamletError(
        f"field '{field.name}' holds {bad:g}", f"it must be {field.low:g} to {field.high:g}"
    )


def _array(field: Field, value: Any) -> np.ndarray:
    """Nested lists as an array; JSON does not tell 1 from 1.0, but true from 1."""
    leaves = np.array(value, dtype=object)
    types = {type(x.item() if isinstance(x, np.generic) else x) for x in leaves.ravel()}
    if types <= ({bool} if field.dtype == "bool" else {int, float}):
        with suppress(OverflowError):
            return leaves.astype(bool if field.dtype == "bool" else np.float64)
    raise HamletError(
        f"field '{field.name}' is not an array of {field.datatype}", _without_batch(field)
    )


def _without_batch(field: Field) -> str:
    return f"expected {field.datatype} [{', '.join(map(str, field.shape))}]"
