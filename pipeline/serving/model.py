"""One version of a policy with the memory of everyone it acts for.

The state of every session lies in preallocated arrays (the slab), one row each; a batch gathers the
rows of its sessions into fixed buffers, ONNX Runtime reads and writes those buffers, and the new
state goes back to its rows. Nothing is allocated for a request but its own few bytes.

All arrays here have their rows first. Where the graph has its batch elsewhere ([layers, B, H]), a
run copies to and from buffers of the graph's layout.

A *record* is one observation as bytes: its fields in the order of `Model.fields`, little endian,
without gaps. It is what a binary request carries and what JSON is packed into.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from hamlet.artifacts import HamletError
from hamlet.serving.agent import Decision, OnnxAgent
from hamlet.serving.metrics import Counts
from hamlet.serving.signature import DATATYPES, Field, nothing_of

__all__ = ["DATATYPES", "NAME", "RNG_RANGE", "Field", "Model", "attempt", "pack", "warm_up"]
assert sys.byteorder == "little", "records are little endian"

NAME = "hamlet-agent"  # as clients call our own agent
RNG_RANGE = 2**31 - 2  # of the agent's random numbers, see AgentState.rng


@dataclass(frozen=True)
class _Group:
    """The fields of one dtype, next to one another in a record, so that one look checks all."""

    fields: list[Field]
    values: np.ndarray
    """[max_batch, numbers], bool as uint8."""
    low: np.ndarray
    high: np.ndarray

    def wrong_rows(self, values: np.ndarray) -> dict[int, HamletError]:
        """What is out of range in rows of this group, by row."""
        if ((values >= self.low) & (values <= self.high)).all():  # NaN is neither
            return {}
        wrong: dict[int, HamletError] = {}
        start = 0
        for field in self.fields:
            part = values[:, start : start + field.size]
            start += field.size
            fine = ((part >= field.low) & (part <= field.high)).all(axis=1)
            for row in np.flatnonzero(~fine).tolist():
                wrong.setdefault(row, _out_of_range(field, part[row]))
        return wrong


class Model:
    """A policy, the slab of its sessions and the buffers of its batches.

    Args:
        agent: the opened file.
        version: its name, as told to clients; name: the model's.
        capacity: sessions at most. Memory is taken when a row is first used.
        max_batch: rows at most in one run; 1 for a graph that takes one life at a time.

    Raises:
        HamletError: so many sessions do not fit into this machine's memory.

    Not thread-safe: `load`, `run` and `store` of one batch come after one another; `run` alone may
    happen in another thread.
    """

    def __init__(
        self, agent: OnnxAgent, version: str, capacity: int, max_batch: int, name: str = NAME
    ) -> None:
        self.agent, self.version, self.capacity, self.name = agent, version, capacity, name
        signature = self.signature = agent.signature
        self.max_batch = max_batch = max_batch if signature.batched else 1
        self.states = list(signature.states)
        self.following = {output: state for state, output in signature.states.items()}
        """Outputs that are the new state, and the state they are."""
        self.action = signature.action
        self.thoughts = [n for n in agent.outputs if n != self.action and n not in self.following]
        fields = [signature.inputs[n] for n in signature.observation]
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
        self.plain = {f.name: (f.datatype, f.sent(1), f.size) for f in self.fields}
        """Datatype, shape and length of what is sent for each field as flat JSON."""
        self.described = signature.inputs
        """Every input of the graph."""
        self.record_bytes = sum(f.nbytes for f in self.fields)
        try:
            self.slab = {n: _zeros(signature.inputs[n], capacity) for n in self.states}
        except (MemoryError, ValueError):
            size = sum(signature.inputs[n].nbytes for n in self.states)
            raise HamletError(
                f"{capacity} sessions of {size} bytes each do not fit into memory",
                "give a smaller --max-sessions",
            ) from None
        self.inputs = {n: _zeros(f, max_batch) for n, f in signature.inputs.items()}
        self.outputs = {n: _zeros(f, max_batch) for n, f in signature.outputs.items()}
        """All rows first, [max_batch, ...]."""
        self._moved = {
            n: np.zeros(f.sent(max_batch), f.dtype)
            for n, f in (signature.inputs | signature.outputs).items()
            if f.axis and prod(f.shape[: f.axis]) > 1
        }
        """Buffers of the graph's layout, where that is not rows first."""
        self._shared = [n for n, f in signature.outputs.items() if f.axis is None]
        """Outputs without a batch: the same for all rows."""
        action = signature.outputs[self.action]
        self.one_number = action.dtype == "int64" and action.size == 1 and action.axis == 0
        """Whether an action is one integer, which has a shorter way."""
        self._short_answers(action)
        self._groups = [
            _group([f for f in fields if f.dtype == dtype], max_batch) for dtype in dtypes
        ]
        self._record = np.dtype(
            [
                (dtype, g.values.dtype, (g.values.shape[1],))
                for dtype, g in zip(dtypes, self._groups, strict=True)
            ]
        )
        self._flat = {
            f.name: self.inputs[f.name].view(_raw(f.dtype)).reshape(max_batch, -1) for f in fields
        }
        self._mask = self.inputs[signature.mask] if signature.mask else None
        self.counts = Counts()
        self._bindings: dict[int, Any] = {}
        self._period = 1
        self.batch_seconds = float("inf")
        """What a full batch takes here, seen by `warm_up`."""
        self._free = list(range(capacity - 1, -1, -1))

    def _short_answers(self, action: Field) -> None:
        """The commonest answers but for the action itself."""
        head = f'{{"model_name":{json.dumps(self.name)},"model_version":{json.dumps(self.version)},'
        head += f'"outputs":[{{"name":{json.dumps(self.action)},"datatype":"INT64",'
        head += f'"shape":{json.dumps(action.sent(1))},'
        self.binary_answer = f'{head}"parameters":{{"binary_data_size":8}}}}]}}'.encode()
        self.json_answer = head.replace("%", "%%").encode() + b'"data":[%d]}]}'

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
            self.slab[name][slot] = self.signature.initial.get(name, 0)
        if self.signature.rng:
            self.slab[self.signature.rng][slot] = rng
        return slot

    def close(self, slot: int) -> None:
        """Give a row back; no batch that holds it may be running."""
        self._free.append(slot)

    def deliberates(self, slot: int) -> bool:
        """Whether the next tick of a row is one of the few at which the agent deliberates."""
        clock = self.signature.clock
        if clock is None or self._period <= 1:
            return False
        return not self.slab[clock][slot] % self._period

    # -- one batch

    def load(self, records: Sequence[bytes]) -> dict[int, HamletError]:
        """Put records (1 to `max_batch`) into the input buffers; returns what is wrong, by row."""
        n = len(records)
        wrong: dict[int, HamletError] = {}
        if not self.record_bytes:
            return wrong
        rows = np.frombuffer(records[0] if n == 1 else b"".join(records), self._record)
        for group in self._groups:
            values = group.values[:n]
            np.copyto(values, rows[group.fields[0].dtype])
            wrong = {**group.wrong_rows(values), **wrong}
            start = 0
            for field in group.fields:
                self._flat[field.name][:n] = values[:, start : start + field.size]
                start += field.size
        if self._mask is not None:
            allowed = self._mask[:n].reshape(n, -1).any(axis=1)
            for row in np.flatnonzero(~allowed).tolist():
                wrong.setdefault(row, self._no_action())
        return wrong

    def check(self, record: bytes) -> None:
        """What `load` says of one record, without the buffers: also while a batch runs.

        Raises:
            HamletError: a number is out of range.
        """
        row = np.frombuffer(record, self._record)
        for group in self._groups:
            for error in group.wrong_rows(row[group.fields[0].dtype]).values():
                raise error
        at = 0
        for field in self.fields:
            if field.name == self.signature.mask and not any(record[at : at + field.nbytes]):
                raise self._no_action()
            at += field.nbytes

    def _no_action(self) -> HamletError:
        return HamletError(f"field '{self.signature.mask}' forbids every action", "allow one")

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
        for name in self._moved:
            if name in self.inputs:
                self._in_layout(name, n)[:] = self.inputs[name][:n]
        self.agent.session.run_with_iobinding(binding)
        for name in self._moved:
            if name in self.outputs:
                self.outputs[name][:n] = self._in_layout(name, n)
        for name in self._shared:
            self.outputs[name][1:n] = self.outputs[name][0]

    def _in_layout(self, name: str, n: int) -> np.ndarray:
        """A view, rows first, of the first `n` rows of a buffer in the graph's layout."""
        field = self.signature.inputs.get(name) or self.signature.outputs[name]
        flat = self._moved[name].reshape(-1)[: n * field.size]
        return field.rows_first(flat.reshape(field.sent(n)))

    def look_at_deliberation(self) -> None:
        """Learn every how many ticks the agent deliberates, from a run with clocks 0, 1, 2, ...;
        one that has no clock never does."""
        if self.signature.clock is None:
            return
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
        for bind, fields, arrays in (
            (binding.bind_input, self.signature.inputs, self.inputs),
            (binding.bind_output, self.signature.outputs, self.outputs),
        ):
            for name, field in fields.items():
                array = self._moved.get(name, arrays[name])
                shape = tuple(field.sent(n))
                bind(name, "cpu", 0, array.dtype.type, shape, array.ctypes.data)
        return binding

    # -- one observation

    def checked(self, field: Field, raw: Any, rows: int) -> np.ndarray:
        """Bytes of any input of the graph as an array in the graph's layout.

        Raises:
            HamletError: a number out of range.
        """
        values = np.frombuffer(raw, _raw(field.dtype)).reshape(field.sent(rows))
        if not ((values >= field.low) & (values <= field.high)).all():
            raise _out_of_range(field, values)
        return values.astype(bool) if field.dtype == "bool" else values

    def decision(self, row: int) -> Decision:
        """Row `row` of the last run, as copies with their one row first."""
        at = slice(row, row + 1)
        state = {
            name: self.outputs[following][at].copy() for following, name in self.following.items()
        }
        thoughts = {name: self.outputs[name][at].copy() for name in self.thoughts}
        return Decision(self.outputs[self.action][at].copy(), state, thoughts)


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
            value = nothing_of(_array(field, value), field.shape)
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
        rounded = field.dtype[:5] == "float" and value.dtype.kind in "fiu"
        if not rounded and not np.array_equal(exact, value):
            raise HamletError(
                f"field '{field.name}' holds values that are not {field.datatype}",
                _without_batch(field),
            )
    return exact.tobytes()


def _group(fields: list[Field], max_batch: int) -> _Group:
    dtype = _raw(fields[0].dtype)
    sizes = [f.size for f in fields]

    def bound(values: list[float]) -> np.ndarray:
        return np.repeat(np.array(values, dtype), sizes)

    values = np.zeros((max_batch, sum(sizes)), dtype)
    return _Group(fields, values, bound([f.low for f in fields]), bound([f.high for f in fields]))


def _raw(dtype: str) -> str:
    return "uint8" if dtype == "bool" else dtype  # a byte that is neither 0 nor 1 must be seen


def _zeros(field: Field, rows: int) -> np.ndarray:
    return np.zeros((rows, *field.shape), field.dtype)


def _out_of_range(field: Field, values: np.ndarray) -> HamletError:
    bad = next(x for x in values.ravel().tolist() if not field.low <= x <= field.high)
    return HamletError(
        f"field '{field.name}' holds {bad:g}", f"it must be {field.low:g} to {field.high:g}"
    )


def _array(field: Field, value: Any) -> np.ndarray:
    """Nested lists as an array; JSON does not tell 1 from 1.0, and some write true as 1."""
    leaves = np.array(value, dtype=object)
    types = {type(x.item() if isinstance(x, np.generic) else x) for x in leaves.ravel()}
    if types <= ({bool, int, float} if field.dtype == "bool" else {int, float}):
        with suppress(OverflowError):
            return leaves.astype(np.int64 if types == {int} else np.float64)
    raise HamletError(
        f"field '{field.name}' is not an array of {field.datatype}", _without_batch(field)
    )


def _without_batch(field: Field) -> str:
    return f"expected {field.datatype} [{', '.join(map(str, field.shape))}]"


def attempt(run: Callable[[int], None], n: int) -> Exception | None:
    """Run; what ONNX Runtime says is returned: the server goes on."""
    try:
        run(n)
    except Exception as error:  # its own exceptions share no base
        return error
    return None


def warm_up(model: Model) -> None:
    """Run with one row and with many, so that the first request does not pay for it, and see how
    long a full batch takes and at which ticks of a life the agent deliberates.

    Raises:
        HamletError: the graph cannot run here.
    """
    example = np.zeros(model.record_bytes, np.uint8).tobytes()
    model.load([example])
    if model.signature.mask:
        model.inputs[model.signature.mask][:] = True
    if model.signature.clock:
        model.inputs[model.signature.clock][:] = np.arange(model.max_batch)
    for n in (1, model.max_batch, model.max_batch):
        began = time.perf_counter()
        error = attempt(model.run, n)
        if error is not None:
            raise HamletError(
                f"version {model.version} cannot run ({str(error).splitlines()[0][:200]})"
            )
        model.batch_seconds = time.perf_counter() - began
    model.look_at_deliberation()
