"""What an ONNX policy takes and gives: its observation, its state and its action.

A card says it. Where there is none, `card_of` reads it from the graph: shapes by running it with
two batch sizes, the pairs of state by their names (`state_X`/`next_X`, `h_in`/`h_out`, `h0`/`hn`,
...) or as told.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from hamlet.artifacts import HamletError

STATE, NEXT = "state_", "next_"
BATCH = "batch"  # how a schema writes the batch dimension
# Open Inference Protocol names of numpy's dtypes.
DATATYPES = {
    "bool": "BOOL", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64",
    "int8": "INT8", "int16": "INT16", "int32": "INT32", "int64": "INT64",
    "float16": "FP16", "float32": "FP32", "float64": "FP64",
}  # fmt: skip
# And of ONNX Runtime's names.
TYPES = {f"tensor({name})": name for name in DATATYPES} | {
    "tensor(float)": "float32", "tensor(double)": "float64",
}  # fmt: skip
# Names of a state's input, in small letters and with _ for other signs, and what its output is then
# called.
_PAIRS = (
    (r"state_(.+)", ("next_{}", "next_state_{}")),
    (r"(.+_)?in_(.+)", ("{}out_{}",)),
    (r"(.+)_ins", ("{}_outs",)),
    (r"past_(.+)", ("present_{}",)),
    (r"(.+)_in", ("{}_out", "{}", "next_{}", "new_{}")),
    (r"(.+)_input", ("{}_output",)),
    (r"input_(.+)", ("output_{}",)),
    (r"(.+)_(?:prev|previous|old)", ("{}_next", "{}_new", "{}")),
    (r"(?:prev|previous|last|old)_(.+)", ("next_{}", "new_{}", "{}", "{}_out")),
    (r"(.+?)_?0", ("{}_n", "{}n", "{}_1", "{}1", "{}_out", "{}")),
    (r"(.)x", ("{}y", "{}n")),
    (r"(.+)", (
        "{}_out", "{}_next", "{}_new", "{}_output", "next_{}", "new_{}", "out_{}", "{}_n", "{}n",
    )),
)  # fmt: skip
_NO_STATE = re.compile(r"(obs|observations?|actions?|masks?|action_masks?|rewards?)", re.I)
_ACTIONS = (
    "action", "actions", "discrete_actions", "continuous_actions", "deterministic_action",
    "mu", "mean", "action_logits", "logits",
)  # fmt: skip
_TIME = re.compile(r"(seq|time|step|len|^t$)", re.I)


@dataclass(frozen=True)
class Field:
    """One tensor of the graph: where its batch stands and what it may hold.

    Attributes:
        shape: without the batch.
        axis: of the batch in the graph's shape; None: it has none.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    axis: int | None = 0
    low: float = -np.inf
    high: float = np.inf

    @cached_property
    def datatype(self) -> str:
        """Its dtype as the Open Inference Protocol calls it."""
        return DATATYPES[self.dtype]

    @cached_property
    def size(self) -> int:
        """Numbers of one row."""
        return prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one row."""
        return self.size * np.dtype(self.dtype).itemsize

    def sent(self, rows: int) -> list[int]:
        """The shape of so many rows in the graph and on the wire."""
        if self.axis is None:
            return list(self.shape)
        return [*self.shape[: self.axis], rows, *self.shape[self.axis :]]

    def rows_first(self, array: np.ndarray) -> np.ndarray:
        """A view [rows, ...] of an array in the graph's layout."""
        return array[None] if self.axis is None else np.moveaxis(array, self.axis, 0)

    def expected(self) -> str:
        """What one row must be, for an error."""
        return f"expected {self.datatype} {self.sent(1)}"


def nothing_of(array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """An array of nested lists that hold nothing, in all of its shape: they tell only the beginning
    of it. Any other array as it is."""
    if array.size or 0 not in shape or list(array.shape) != list(shape[: array.ndim]):
        return array
    return array.reshape(shape)


@dataclass(frozen=True)
class Signature:
    """A policy's tensors by what they are for.

    Attributes:
        inputs, outputs: every tensor of the graph, in its order.
        observation: names of the inputs that a client sends.
        states: input that takes the state -> output that gives the next one.
        action: the output that is the action.
        mask: a bool input that says which actions are legal, or None.
        rng, clock: the agent's own random numbers (int64 [B]) and ticks, where it has them.
        initial: states that do not begin as zeros, without the batch.
        names: of the actions, or None.
        batched: whether several lives can share a run.
    """

    inputs: dict[str, Field]
    outputs: dict[str, Field]
    observation: list[str]
    states: dict[str, str]
    action: str
    mask: str | None
    rng: str | None
    clock: str | None
    initial: dict[str, np.ndarray]
    names: list[str] | None
    batched: bool


def signature_of(card: Mapping[str, Any], name: str) -> Signature:
    """What a card says; `name` is for errors.

    Raises:
        HamletError: the card names a tensor that its schema lacks, or of another kind.
    """
    policy = card.get("policy", {})
    limits = card.get("limits", {})
    schema = card["schema"]
    batched = all(BATCH in e["shape"] for e in schema["inputs"])
    inputs = {e["name"]: _field(e, limits.get(e["name"]), batched, name) for e in schema["inputs"]}
    outputs = {e["name"]: _field(e, None, batched, name) for e in schema["outputs"]}
    states = policy.get("states")
    if states is None:
        states = {
            n: NEXT + n.removeprefix(STATE)
            for n in inputs
            if n.startswith(STATE) and NEXT + n.removeprefix(STATE) in outputs
        }
    _check_pairs(states, inputs, outputs, name)
    action = policy.get("action") or _action_among(outputs, states)
    mask = policy.get("mask", "action_mask" if "action_mask" in inputs else None)
    for what, wanted, known in (("action", action, outputs), ("mask", mask, inputs)):
        if wanted is not None and wanted not in known:
            raise HamletError(
                f"{name}: its {what} is said to be '{wanted}', which the graph lacks",
                f"it is one of {', '.join(known)}",
            )
    if mask is not None and (inputs[mask].dtype != "bool" or mask in states):
        mask = None
    own = "state_rng" in states and inputs["state_rng"].dtype == "int64"
    clock = "state_clock" in states and "imagination_confidence" in outputs
    initial = {}
    for state, value in policy.get("initial", {}).items():
        if state not in states:
            raise HamletError(f"{name}: 'initial' of its card names '{state}', which is no state")
        field = inputs[state]
        try:
            initial[state] = np.asarray(value, field.dtype).reshape(field.shape)
        except (TypeError, ValueError):
            raise HamletError(
                f"{name}: 'initial' of '{state}' is not {field.datatype} {list(field.shape)}"
            ) from None
    names = policy.get("actions") or card.get("town", {}).get("action_names")
    return Signature(
        inputs=inputs,
        outputs=outputs,
        observation=[n for n in inputs if n not in states],
        states=dict(states),
        action=action,
        mask=mask,
        rng="state_rng" if own and not inputs["state_rng"].shape else None,
        clock="state_clock" if clock and not inputs["state_clock"].shape else None,
        initial=initial,
        names=names,
        batched=batched,
    )


def _field(
    entry: Mapping[str, Any], limit: Sequence[float] | None, batched: bool, name: str
) -> Field:
    dtype, shape = entry["dtype"], list(entry["shape"])
    if dtype not in DATATYPES:
        raise HamletError(f"{name}: '{entry['name']}' is {dtype}, which is not served")
    axis: int | None = shape.index(BATCH) if BATCH in shape else None
    if axis is None and shape[:1] == [1] and not batched:
        axis = 0  # a batch of one that the graph fixes
    if axis is not None:
        del shape[axis]
    if limit:
        low, high = limit
    elif dtype.startswith("float"):
        high = float(np.finfo(dtype).max)
        low = -high
    else:
        info = np.iinfo("uint8" if dtype == "bool" else dtype)
        low, high = (0, 1) if dtype == "bool" else (info.min, info.max)
    return Field(entry["name"], dtype, tuple(shape), axis, low, high)


def _check_pairs(
    states: Mapping[str, str], inputs: Mapping[str, Field], outputs: Mapping[str, Field], name: str
) -> None:
    for given, following in states.items():
        for what, wanted, known in (("input", given, inputs), ("output", following, outputs)):
            if wanted not in known:
                raise HamletError(
                    f"{name} has no {what} '{wanted}'", f"its {what}s are {', '.join(known)}"
                )
        a, b = inputs[given], outputs[following]
        if (a.dtype, a.sent(1)) != (b.dtype, b.sent(1)):
            raise HamletError(
                f"{name}: state '{given}' is {a.datatype} {a.sent(1)}, its next value "
                f"'{following}' {b.datatype} {b.sent(1)}",
                "a state must keep its type and shape",
            )
    if len(set(states.values())) < len(states):
        raise HamletError(f"{name}: two states have the same next value", "name each once")


def _action_among(outputs: Mapping[str, Field], states: Mapping[str, str]) -> str:
    """The output that is the action by its name, else the first that is no state."""
    others = [n for n in outputs if n not in states.values()] or list(outputs)
    lower = {n.lower(): n for n in others}
    return next((lower[n] for n in _ACTIONS if n in lower), others[0])


# ------------------------------------------------------------------------------------------------
# A card from the graph


def card_of(
    session: Any, name: str, states: Mapping[str, str] | None = None, action: str | None = None
) -> dict[str, Any]:
    """The card of a graph without one: `schema` and `policy`.

    Args:
        session: of ONNX Runtime. name: for errors.
        states: pairs of input and output; they are added to those found by their names.
        action: the output that is the action; default: by its name.

    Raises:
        HamletError: the graph cannot be served: a dimension that is open, a type that is no number,
            a state that changes its shape, or it does not run.
    """
    inputs, batched = _input_schema(session, name)
    shapes = _output_shapes(session, inputs, batched, name)
    outputs = [
        {"name": o.name, "dtype": _dtype(o, name), "shape": shape}
        for o, shape in zip(session.get_outputs(), shapes, strict=True)
    ]
    by_name = {e["name"]: e for e in outputs}
    pairs = {**_pairs_by_name(inputs, by_name), **(states or {})}
    schema = {"inputs": inputs, "outputs": outputs}
    card: dict[str, Any] = {"kind": "policy", "schema": schema, "policy": {"states": pairs}}
    if action:
        card["policy"]["action"] = action
    card["policy"]["action"] = signature_of(card, name).action
    return card


def _dtype(value: Any, name: str) -> str:
    if value.type not in TYPES:
        raise HamletError(f"{name}: '{value.name}' is {value.type}, which is not served")
    return TYPES[value.type]


def _input_schema(session: Any, name: str) -> tuple[list[dict[str, Any]], bool]:
    """The inputs as a card says them, and whether all have a batch."""
    values = session.get_inputs()
    # The symbol of the batch is the one that most inputs share.
    symbols = [d for v in values for d in dict.fromkeys(v.shape) if isinstance(d, str)]
    usual = max(symbols, key=symbols.count) if symbols else None
    schema = []
    for value in values:
        shape = list(value.shape)
        open_ = [i for i, d in enumerate(shape) if not isinstance(d, int)]
        named = [i for i in open_ if shape[i] == usual and usual is not None]
        batch = (named or [i for i in open_ if not _TIME.search(str(shape[i]))] or open_)[:1]
        for i in open_:
            if i in batch:
                shape[i] = BATCH
            elif _TIME.search(str(shape[i])) or shape[i] is None:
                shape[i] = 1  # one step of time
            else:
                raise HamletError(
                    f"{name}: dimension {i} of input '{value.name}' is open ({shape[i]})",
                    "export it with a number: only the batch may vary",
                )
        schema.append({"name": value.name, "dtype": _dtype(value, name), "shape": shape})
    batched = all(BATCH in e["shape"] for e in schema)
    if batched and _shapes_at(session, schema, 2) is None:
        batched = False  # the graph says that its batch is open, and fixes it inside
    if not batched:  # one at a time
        for entry in schema:
            entry["shape"] = [1 if d == BATCH else d for d in entry["shape"]]
    return schema, batched


def _shapes_at(session: Any, schema: list[dict[str, Any]], rows: int) -> list[list[int]] | None:
    """Shapes of all outputs for so many rows; None if it does not run."""
    feeds = {}
    for entry in schema:
        shape = [rows if d == BATCH else d for d in entry["shape"]]
        make = np.ones if entry["dtype"] == "bool" else np.zeros
        feeds[entry["name"]] = make(shape, entry["dtype"])
    try:
        return [list(np.shape(x)) for x in session.run(None, feeds)]
    except Exception:  # ONNX Runtime's own exceptions share no base
        return None


def _output_shapes(
    session: Any, inputs: list[dict[str, Any]], batched: bool, name: str
) -> list[list[Any]]:
    if not batched:
        shapes = _shapes_at(session, inputs, 1)
        if shapes is None:
            raise HamletError(f"{name} does not run with zeros as its inputs")
        return shapes
    two, three = _shapes_at(session, inputs, 2), _shapes_at(session, inputs, 3)
    if two is None or three is None:
        raise HamletError(f"{name} does not run with every batch size")
    found: list[list[Any]] = []
    for a, b in zip(two, three, strict=True):
        shape: list[Any] = list(a)
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            if x != y:
                shape[i] = BATCH
                break
        found.append(shape)
    return found


def _pairs_by_name(
    inputs: Sequence[Mapping[str, Any]], outputs: Mapping[str, Mapping[str, Any]]
) -> dict[str, str]:
    """Inputs whose next value is an output, by what they are called."""
    plain = {_plain(name): name for name in outputs}
    pairs: dict[str, str] = {}
    for entry in inputs:
        if _NO_STATE.fullmatch(entry["name"]):
            continue
        following = _following(_plain(entry["name"]), plain)
        if following is None or following in pairs.values():
            continue
        other = outputs[following]
        if (other["dtype"], other["shape"]) == (entry["dtype"], entry["shape"]):
            pairs[entry["name"]] = following
    return pairs


def _plain(name: str) -> str:
    """`lstm.hiddenIn` as `lstm_hidden_in`."""
    return re.sub(r"\W", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)).lower()


def _following(name: str, outputs: Mapping[str, str]) -> str | None:
    for pattern, called in _PAIRS:
        found = re.fullmatch(pattern, name)
        if found is None:
            continue
        for form in called:
            following = form.format(*(part or "" for part in found.groups()))
            if following in outputs:
                return outputs[following]
    return None


def maybe_state(signature: Signature) -> str | None:
    """What to say of a policy without a state that has an output like one of its inputs."""
    if signature.states:
        return None
    for given in signature.inputs.values():
        for other in signature.outputs.values():
            alike = (given.dtype, given.shape, given.axis) == (other.dtype, other.shape, other.axis)
            if alike and other.name != signature.action:
                return (
                    f"'{given.name}' and '{other.name}' are of one type and shape: if they are the "
                    f"memory, say so by --state {given.name}={other.name}; as it is, nothing is "
                    "remembered"
                )
    return None
