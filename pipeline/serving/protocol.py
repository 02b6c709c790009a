"""The Open Inference Protocol v2 (KServe): bytes of a request to what it asks, results to bytes.

Both forms of a tensor are spoken: JSON `data`, flat or nested, and the binary extension, where the
body is a JSON header (of `Inference-Header-Content-Length` bytes) and then the tensors' raw bytes.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable
from itertools import chain
from math import inf, prod
from typing import Any

import numpy as np
import orjson

from hamlet.artifacts import HamletError
from hamlet.serving.agent import Decision
from hamlet.serving.model import DATATYPES, NAME, RNG_RANGE, Field, Model

Results = int | list[tuple[str, np.ndarray, bool]]
MAX_KNOWN, MAX_KNOWN_BYTES = 10_000, 4096  # headers remembered, and how long they may be
MAX_TIMEOUT = 3_600_000_000  # microseconds
MAX_NUMBER = 2**64 - 1  # as sequence_id
NAME_PATTERN = "^[A-Za-z0-9_-]{1,128}$"  # of a session: it can stand in a path as it is
_is_name = re.compile(NAME_PATTERN.rstrip("$") + r"\Z").match


class Ask:
    """One inference request, understood.

    Attributes:
        id: of the request, to be echoed.
        sequence: the session's name, or None for a tick whose state the client keeps.
        record: one observation (with a sequence).
        feeds: arrays by input name, without one (observation, and state where given).
        rows: of the feeds.
        outputs: (name, binary) of what is asked for; None: everything.
    """

    __slots__ = (
        "binary", "end", "feeds", "id", "outputs", "record", "rows", "seed", "sequence", "start",
        "timeout",
    )  # fmt: skip

    def __init__(self) -> None:
        self.id: str | None = None
        self.sequence: str | None = None
        self.start = self.end = self.binary = False
        self.timeout: float | None = None
        self.seed: int | None = None
        self.record = b""
        self.feeds: dict[str, np.ndarray] = {}
        self.rows = 1
        self.outputs: list[tuple[str, bool]] | None = None

    def copy(self) -> Ask:
        """The same request with a record of its own."""
        new = Ask.__new__(Ask)
        new.id, new.sequence, new.start, new.end = self.id, self.sequence, self.start, self.end
        new.binary, new.timeout, new.seed = self.binary, self.timeout, self.seed
        new.feeds, new.rows, new.outputs = self.feeds, self.rows, self.outputs
        return new


def header_of(body: bytes, header_length: bytes | None) -> tuple[dict[str, Any], memoryview]:
    """The JSON header of a request and the binary data behind it.

    Raises:
        HamletError: the length is no number or longer than the body, or the JSON is none.
    """
    end = len(body)
    if header_length is not None:
        if not header_length.isdigit() or not 0 < int(header_length) <= len(body):
            raise HamletError(
                f"Inference-Header-Content-Length is {header_length[:20].decode('latin-1')!r}",
                f"it must be the length of the JSON header, 1 to {len(body)}",
            )
        end = int(header_length)
    view = memoryview(body)
    try:
        header = orjson.loads(view[:end])
    except orjson.JSONDecodeError as error:
        raise HamletError(f"the body is not valid JSON ({error})") from None
    if not isinstance(header, dict):
        raise HamletError("the body is not a JSON object", "it needs 'inputs'")
    return header, view[end:]


class Parser:
    """Understands requests, and remembers the headers of binary ones: all ticks of a session have
    the same."""

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[Ask, str, list[slice]]] = {}

    def parse(
        self, body: bytes, header_length: bytes | None, models: Callable[[Ask], Model]
    ) -> tuple[Ask, Model]:
        """Understand a request.

        Args:
            body: of the request; header_length: of its header Inference-Header-Content-Length.
            models: the version that will serve, given id, sequence, start and end.

        Raises:
            HamletError: naming the field that is wrong; or what `models` raises.
        """
        head = None
        if header_length is not None and header_length.isdigit():
            head = body[: int(header_length)]
            known = self._known.get(head)
            if known is not None:
                ask, version, cuts = known
                model = models(ask)
                if len(body) - len(head) == model.record_bytes and model.version == version:
                    at = len(head)
                    again = ask.copy()
                    again.record = b"".join([body[at + c.start : at + c.stop] for c in cuts])
                    return again, model
        header, binary = header_of(body, header_length)
        ask, model = understand(header, binary, models)
        lasting = ask.sequence is not None and not ask.start and not ask.end
        usual = lasting and len(binary) == model.record_bytes
        if head and usual and len(head) <= MAX_KNOWN_BYTES:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[head] = ask, model.version, _cuts(model, header["inputs"])
        return ask, model


def understand(
    header: dict[str, Any], binary: memoryview, models: Callable[[Ask], Model]
) -> tuple[Ask, Model]:
    """A request from its JSON header and the binary data behind it; see `Parser.parse`."""
    ask = Ask()
    _parameters(ask, header)
    model = models(ask)
    inputs = header.get("inputs")
    if not isinstance(inputs, list):
        raise HamletError("'inputs' is missing or not an array", "it holds the observation")
    if ask.sequence is None:
        _arrays(ask, model, inputs, binary)
    else:
        ask.record = _plain(model, inputs) or _record(model, inputs, binary)
    if "outputs" in header:
        ask.outputs = _outputs(ask, model, header["outputs"])
    return ask, model


def _cuts(model: Model, inputs: list[dict[str, Any]]) -> list[slice]:
    """Where each field of a record lies in the binary data of such a request."""
    cuts = [slice(0)] * len(model.fields)
    at = 0
    for entry in inputs:
        index = model.by_name[entry["name"]]
        cuts[index] = slice(at, at + model.fields[index].nbytes)
        at = cuts[index].stop
    return cuts


def _parameters(ask: Ask, header: dict[str, Any]) -> None:
    if "id" in header:
        if not isinstance(header["id"], str):
            raise HamletError("'id' is not a string")
        ask.id = header["id"]
    parameters = header.get("parameters", {})
    if not isinstance(parameters, dict):
        raise HamletError("'parameters' is not an object")
    if "sequence_id" in parameters:
        ask.sequence = sequence_name(parameters["sequence_id"])
    elif "sequence_start" in parameters or "sequence_end" in parameters:
        raise HamletError("parameter 'sequence_id' is missing", "a sequence needs a name")
    ask.start, ask.end = flag(parameters, "sequence_start"), flag(parameters, "sequence_end")
    ask.binary = flag(parameters, "binary_data_output")
    microseconds = whole(parameters, "timeout", 1, MAX_TIMEOUT)
    ask.timeout = microseconds / 1e6 if microseconds else None
    ask.seed = whole(parameters, "seed", 0, RNG_RANGE - 1)


def sequence_name(value: Any) -> str:
    """A session's name from JSON: a positive integer or a string that `NAME_PATTERN` matches."""
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is int and 0 < value <= MAX_NUMBER:
        return str(value)
    if type(value) is str and _is_name(value):
        return value
    raise HamletError(
        f"'{value!s:.40}' cannot be the sequence_id of a session",
        f"a number from 1 to {MAX_NUMBER}, or {NAME_PATTERN}",
    )


def whole(parameters: dict[str, Any], name: str, low: int, high: int) -> int | None:
    """An integer parameter; None if it is not given."""
    if name not in parameters:
        return None
    value = parameters[name]
    if type(value) is float and value.is_integer():  # JSON does not tell 1 from 1.0
        value = int(value)
    if type(value) is not int or not low <= value <= high:
        raise HamletError(f"'{name}' is not an integer from {low} to {high}")
    return value


def flag(parameters: dict[str, Any], name: str) -> bool:
    value = parameters.get(name, False)
    if type(value) is not bool:
        raise HamletError(f"'{name}' is not true or false")
    return value


# ------------------------------------------------------------------------------------------------
# Tensors in


def _plain(model: Model, inputs: list[Any]) -> bytes | None:
    """`_record` of what is sent most, every field once as flat JSON, in half the time.

    None for all else: `_record` understands it, or says what is wrong with it.
    """
    data: dict[str, list[Any]] = {}
    parts = []
    try:
        for entry in inputs:
            name = entry["name"]
            numbers = data[name] = entry["data"]
            if (entry["datatype"], entry["shape"], len(numbers)) != model.plain[name]:
                return None
        for dtype, names in model.names_by_dtype.items():
            numbers = [*chain.from_iterable(map(data.__getitem__, names))]
            types, pack = _PACKERS[dtype]
            if not types.issuperset(map(type, numbers)):
                return None
            parts.append(pack(numbers))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return b"".join(parts) if len(data) == len(inputs) else None


def _record(model: Model, inputs: list[Any], binary: memoryview) -> bytes:
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
        if (
            entry.get("datatype") != field.datatype
            or type(shape) is not list
            or shape[:1] != [1]
            or tuple(shape[1:]) != field.shape
        ):
            raise _misfit(field, entry)
        if "data" in entry:
            parts[index] = _packed(field, entry["data"], 1)
        else:
            parts[index] = _slice(field.name, entry, binary, at, field.nbytes)
            at += field.nbytes
    _all_used(at, binary)
    if None in parts:
        field = fields[parts.index(None)]
        raise HamletError(f"input '{field.name}' is missing", field.expected())
    return b"".join(parts)


def _arrays(ask: Ask, model: Model, inputs: list[Any], binary: memoryview) -> None:
    """Observations, and state where it is given, of any number of rows up to a batch."""
    wanted = model.agent.inputs
    at = 0
    for entry in inputs:
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str) or name not in wanted:
            raise _unknown(entry, wanted)
        if name in ask.feeds:
            raise HamletError(f"input '{name}' is given twice")
        field = model.described[name]
        shape = entry.get("shape")
        if (
            entry.get("datatype") != field.datatype
            or type(shape) is not list
            or type(shape[0] if shape else None) is not int
            or tuple(shape[1:]) != field.shape
        ):
            raise _misfit(field, entry)
        rows = shape[0]
        if not 0 < rows <= model.max_batch:
            raise HamletError(f"input '{name}' has {rows} rows", f"1 to {model.max_batch}")
        if ask.feeds and rows != ask.rows:
            raise HamletError(f"input '{name}' has {rows} rows, an earlier one {ask.rows}")
        ask.rows = rows
        if "data" in entry:
            raw: Any = _packed(field, entry["data"], rows)
        else:
            raw = _slice(name, entry, binary, at, rows * field.nbytes)
            at += rows * field.nbytes
        ask.feeds[name] = model.checked(field, raw, rows)
    _all_used(at, binary)
    for field in model.fields:
        if field.name not in ask.feeds:
            raise HamletError(f"input '{field.name}' is missing", field.expected())
    if not ask.feeds["action_mask"].any(axis=1).all():
        raise HamletError("input 'action_mask' forbids every action", "WAIT is legal")
    for name in model.states:
        if name not in ask.feeds:
            field = model.described[name]
            ask.feeds[name] = np.zeros((ask.rows, *field.shape), field.dtype)
            if name == "state_rng" and ask.seed is not None:
                ask.feeds[name][:] = ask.seed


def _slice(name: str, entry: dict[str, Any], binary: memoryview, at: int, nbytes: int) -> Any:
    parameters = entry.get("parameters")
    given = parameters.get("binary_data_size") if isinstance(parameters, dict) else None
    if given is None:
        raise HamletError(f"input '{name}' has no data", "give 'data' or 'binary_data_size'")
    if type(given) is not int or given != nbytes:
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
        data = _flatten(field, data, (rows, *field.shape))
    if len(data) != rows * field.size:
        raise HamletError(
            f"input '{field.name}' has {len(data)} numbers, its shape says {rows * field.size}"
        )
    types, pack = _PACKERS[field.dtype]
    found = set(map(type, data))
    if found == {int, float} or found == {float}:  # JSON does not tell 1 from 1.0
        data = [int(x) if x == x // 1 else x for x in data] if int in types else data
        found = set(map(type, data))
    if found <= types:
        try:
            return pack(data)
        except (ValueError, OverflowError):
            pass
    raise HamletError(f"input '{field.name}' holds what is not {field.datatype}", field.expected())


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


_PACKERS: dict[str, tuple[set[type], Callable[[list[Any]], bytes]]] = {
    "uint8": ({int}, bytes),
    "bool": ({bool}, bytes),
    "int64": ({int}, lambda data: array("q", data).tobytes()),
    "float32": ({int, float}, lambda data: array("f", data).tobytes()),
}


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


# ------------------------------------------------------------------------------------------------
# Tensors out


def _outputs(ask: Ask, model: Model, given: Any) -> list[tuple[str, bool]]:
    if not isinstance(given, list):
        raise HamletError("'outputs' is not an array")
    known = outputs_of(model, ask.sequence is not None)
    asked: list[tuple[str, bool]] = []
    for entry in given:
        name = entry.get("name") if isinstance(entry, dict) else None
        if name not in known:
            raise HamletError(f"output {name!r:.60} is unknown", f"known: {', '.join(known)}")
        parameters = entry.get("parameters") or {}
        if not isinstance(parameters, dict):
            raise HamletError(f"'parameters' of output '{name}' is not an object")
        binary = flag(parameters, "binary_data") if "binary_data" in parameters else ask.binary
        asked.append((name, binary))
    return asked or [(name, ask.binary) for name in known]


def outputs_of(model: Model, with_sequence: bool) -> list[str]:
    """What can be asked for; the new state only where the client keeps it."""
    if with_sequence:
        return ["action", *model.thoughts]
    return model.agent.outputs


def answer(model: Model, ask: Ask, results: Results) -> tuple[bytes, int | None]:
    """The body of a response and, if it has binary tensors, the length of its header.

    Args:
        results: (name, array, binary) of every output; or the action, where only that is asked for.
    """
    if isinstance(results, int):
        if ask.id is None and ask.outputs is not None and len(ask.outputs) == 1:
            if ask.outputs[0][1]:
                return model.binary_answer + results.to_bytes(8, "little"), len(model.binary_answer)
            return model.json_answer % results, None
        array = np.array([results])
        results = [(name, array, binary) for name, binary in ask.outputs or []]
    outputs, tail = [], []
    for name, values, binary in results:
        described: dict[str, Any] = {
            "name": name,
            "datatype": DATATYPES[str(values.dtype)],
            "shape": values.shape,
        }
        if binary:
            described["parameters"] = {"binary_data_size": values.nbytes}
            tail.append(values.tobytes())
        else:
            described["data"] = np.ascontiguousarray(values).ravel()
        outputs.append(described)
    head: dict[str, Any] = {"model_name": NAME, "model_version": model.version}
    if ask.id is not None:
        head["id"] = ask.id
    header = orjson.dumps({**head, "outputs": outputs}, option=orjson.OPT_SERIALIZE_NUMPY)
    return b"".join([header, *tail]), len(header) if tail else None


def from_decision(decision: Decision, name: str) -> np.ndarray:
    """The action or a thought, by its name in the graph."""
    return decision.action if name == "action" else decision.thoughts[name]


def metadata(model: Model) -> dict[str, Any]:
    """The model's metadata: what a client with a sequence sends and gets."""
    outputs = {entry["name"]: entry for entry in model.agent.card["schema"]["outputs"]}
    return {
        "name": NAME,
        "versions": [model.version],
        "platform": "onnxruntime_onnx",
        "inputs": [
            {"name": f.name, "datatype": f.datatype, "shape": [-1, *f.shape]}
            for name in model.agent.inputs
            if name in model.by_name
            for f in [model.described[name]]
        ],
        "outputs": [
            {
                "name": name,
                "datatype": DATATYPES[outputs[name]["dtype"]],
                "shape": [-1, *outputs[name]["shape"][1:]],
            }
            for name in outputs_of(model, True)
        ],
    }


def fields_of(described: dict[str, Any]) -> list[Field]:
    """The observation's fields from a server's `metadata`, without their ranges."""
    dtypes = {datatype: dtype for dtype, datatype in DATATYPES.items()}
    fields = []
    for entry in described["inputs"]:
        shape, dtype = tuple(entry["shape"][1:]), dtypes[entry["datatype"]]
        size = prod(shape)
        nbytes = size * np.dtype(dtype).itemsize
        fields.append(
            Field(entry["name"], dtype, shape, entry["datatype"], size, nbytes, -inf, inf)
        )
    return fields
