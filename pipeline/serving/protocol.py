"""The Open Inference Protocol v2 (KServe): bytes of a request to what it asks, results to bytes.

Both forms of a tensor are spoken: JSON `data`, flat or nested, and the binary extension, where the
body is a JSON header (of `Inference-Header-Content-Length` bytes) and then the tensors' raw bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import orjson

from hamlet.artifacts import HamletError
from hamlet.serving import lives
from hamlet.serving.agent import Decision
from hamlet.serving.model import DATATYPES, RNG_RANGE, Field, Model
from hamlet.serving.tensors import feeds_of, integer, listed_record, plain_record, record_of

Results = int | np.ndarray | list[tuple[str, np.ndarray, bool]]
MAX_KNOWN, MAX_KNOWN_BYTES = 10_000, 4096  # headers remembered, and how long they may be
MAX_LISTED = 1 << 16  # bytes of a JSON request whose lists are looked at apart
_flat_data = re.compile(rb'"data":\s*\[([^][{}"]*)\]')
_NOT_DONE = ("classification", "shared_memory_region")  # extensions that change an output
_BOM = b"\xef\xbb\xbf"
MAX_TIMEOUT = 3_600_000_000  # microseconds
MAX_NUMBER = 2**64 - 1  # as sequence_id
# Of a session: anything that can be printed.
NAME_PATTERN = "^[^\\x00-\\x1f\\x7f-\\x9f]{1,256}$"
_is_name = re.compile(NAME_PATTERN.rstrip("$") + r"\Z").match


class InferRequest:
    """One inference request, understood.

    Attributes:
        id: of the request, to be echoed.
        sequence: the session's name, or None for a tick whose state the client keeps.
        record: one observation (with a sequence).
        feeds: arrays by input name, without one (observation, and state where given).
        rows: of the feeds.
        lives: the request of each row, where the rows are lives of their own.
        version: that acted, where it may be another than the one that understood it.
        outputs: (name, binary) of what is asked for; None: everything.
    """

    __slots__ = (
        "binary", "end", "feeds", "id", "lives", "outputs", "record", "rows", "seed", "sequence",
        "start", "timeout", "version",
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
        self.lives: list[InferRequest] = []
        self.version = ""
        self.outputs: list[tuple[str, bool]] | None = None

    def copy(self) -> InferRequest:
        """The same request with a record of its own."""
        new = InferRequest.__new__(InferRequest)
        new.id, new.sequence, new.start, new.end = self.id, self.sequence, self.start, self.end
        new.binary, new.timeout, new.seed = self.binary, self.timeout, self.seed
        new.feeds, new.rows, new.outputs = self.feeds, self.rows, self.outputs
        new.lives, new.version = self.lives, self.version
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
    start = len(_BOM) if body.startswith(_BOM) else 0  # some writers of JSON begin so
    try:
        header = orjson.loads(view[start:end])
    except orjson.JSONDecodeError as error:
        raise HamletError(f"the body is not valid JSON ({error})") from None
    if not isinstance(header, dict):
        raise HamletError("the body is not a JSON object", "it needs 'inputs'")
    return header, view[end:]


class Known(NamedTuple):
    """A request of which only the numbers change.

    Attributes:
        request: without its record. version: that understood it.
        where: of the record's fields in the binary data; or, of a JSON request, the inputs' names.
    """

    request: InferRequest
    version: str
    where: list[Any]

    def again(self, record: bytes) -> InferRequest:
        request = self.request.copy()
        request.record = record
        return request


class Parser:
    """Understands requests, and remembers what is the same in all ticks of a session: the header of
    binary ones, and of JSON everything but the lists of numbers."""

    def __init__(self) -> None:
        self.known: dict[bytes, Known] = {}

    def parse(
        self, body: bytes, header_length: bytes | None, models: Callable[[InferRequest], Model]
    ) -> tuple[InferRequest, Model]:
        """Understand a request.

        Args:
            body: of the request; header_length: of its header Inference-Header-Content-Length.
            models: the version that will serve, given id, sequence, start and end.

        Raises:
            HamletError: naming the field that is wrong; or what `models` raises.
        """
        if header_length is None and len(body) <= MAX_LISTED:
            return self._listed(body, models)
        head = None
        if header_length is not None and header_length.isdigit():
            head = body[: int(header_length)]
            known = self.known.get(head)
            if known is not None:
                model = models(known.request)
                if len(body) - len(head) == model.record_bytes and model.version == known.version:
                    at = len(head)
                    cuts = known.where
                    record = b"".join([body[at + c.start : at + c.stop] for c in cuts])
                    return known.again(record), model
        header, binary = header_of(body, header_length)
        request, model = understand(header, binary, models)
        if head and len(binary) == model.record_bytes:
            self._remember(head, request, model, lambda: _cuts(model, header["inputs"]))
        return request, model

    def _listed(
        self, body: bytes, models: Callable[[InferRequest], Model]
    ) -> tuple[InferRequest, Model]:
        """`parse` of a JSON request."""
        pieces = _flat_data.split(body)
        frame = b"\0".join(pieces[::2])  # no JSON has this byte
        known = self.known.get(frame)
        if known is not None:
            model = models(known.request)
            if model.version == known.version:
                lists = b"[[%b]]" % b"],[".join(pieces[1::2])
                record = listed_record(model, known.where, lists)
                if record is not None:
                    return known.again(record), model
        header, binary = header_of(body, None)
        request, model = understand(header, binary, models)
        inputs = header["inputs"]
        # Every list is then the data of an input, and all inputs have one, in the same order.
        listed = len(pieces) // 2 == len(inputs) == body.count(b'"data"')
        if listed and request.record and plain_record(model, inputs) is not None:
            self._remember(frame, request, model, lambda: [entry["name"] for entry in inputs])
        return request, model

    def _remember(
        self, text: bytes, request: InferRequest, model: Model, where: Callable[[], list[Any]]
    ) -> None:
        lasting = request.sequence is not None and not request.start and not request.end
        if lasting and request.id is None and len(text) <= MAX_KNOWN_BYTES:
            if len(self.known) >= MAX_KNOWN:
                self.known.clear()
            self.known[text] = Known(request, model.version, where())


def understand(
    header: dict[str, Any], binary: memoryview, models: Callable[[InferRequest], Model]
) -> tuple[InferRequest, Model]:
    """A request from its JSON header and the binary data behind it; see `Parser.parse`."""
    request = InferRequest()
    _parameters(request, header)
    model = models(request)
    inputs = header.get("inputs")
    if not isinstance(inputs, list):
        raise HamletError("'inputs' is missing or not an array", "it holds the observation")
    if request.sequence is None and lives.are_in(inputs, model):
        request.lives = lives.rows_of(request, model, inputs, binary, sequence_name)
    elif request.sequence is None:
        request.feeds, request.rows = feeds_of(model, inputs, binary, request.seed)
    else:
        request.record = record_of(model, inputs, binary)
    if header.get("outputs") is not None:
        request.outputs = _outputs(request, model, header["outputs"])
    elif request.sequence is not None and not model.thoughts:
        request.outputs = [(model.action, request.binary)]
    return request, model


def _cuts(model: Model, inputs: list[dict[str, Any]]) -> list[slice]:
    """Where each field of a record lies in the binary data of such a request."""
    cuts = [slice(0)] * len(model.fields)
    at = 0
    for entry in inputs:
        index = model.by_name[entry["name"]]
        cuts[index] = slice(at, at + model.fields[index].nbytes)
        at = cuts[index].stop
    return cuts


def _parameters(request: InferRequest, header: dict[str, Any]) -> None:
    id_ = header.get("id")
    if id_ is not None and not isinstance(id_, str):
        raise HamletError("'id' is not a string")
    request.id = id_
    parameters = header.get("parameters")
    if parameters is None:
        parameters = {}
    if not isinstance(parameters, dict):
        raise HamletError("'parameters' is not an object")
    request.start = flag(parameters, "sequence_start")
    request.end = flag(parameters, "sequence_end")
    name = parameters.get("sequence_id")
    if name is not None:
        request.sequence = sequence_name(name)
    elif request.start or request.end:
        raise HamletError("parameter 'sequence_id' is missing", "a sequence needs a name")
    request.binary = flag(parameters, "binary_data_output")
    microseconds = whole(parameters, "timeout", 0, MAX_TIMEOUT)
    request.timeout = microseconds / 1e6 if microseconds else None
    request.seed = whole(parameters, "seed", 0, RNG_RANGE - 1)


def sequence_name(value: Any) -> str | None:
    """A session's name from JSON: a positive integer or a string that `NAME_PATTERN` matches;
    None for 0 and "", which mean no sequence."""
    number = integer(value)
    if number == 0 or value == "":
        return None
    if number is not None and 0 < number <= MAX_NUMBER:
        return str(number)
    if type(value) is str and _is_name(value):
        return value
    raise HamletError(
        f"{value!r:.40} cannot be the sequence_id of a session",
        f"a number from 1 to {MAX_NUMBER}, or at most 256 characters that can be printed",
    )


def whole(parameters: dict[str, Any], name: str, low: int, high: int) -> int | None:
    """An integer parameter; None if it is not given."""
    value = parameters.get(name)
    if value is None:
        return None
    number = integer(value)
    if number is None or not low <= number <= high:
        raise HamletError(f"'{name}' is not an integer from {low} to {high}")
    return number


def flag(parameters: dict[str, Any], name: str) -> bool:
    """A parameter that is true or false, also written as 1 or 0; false if it is not given."""
    value = parameters.get(name)
    if type(value) not in (bool, int, float, type(None)) or value not in (None, 0, 1):
        raise HamletError(f"'{name}' is not true or false")
    return bool(value)


# ------------------------------------------------------------------------------------------------
# Tensors out


def _outputs(request: InferRequest, model: Model, given: Any) -> list[tuple[str, bool]]:
    if not isinstance(given, list):
        raise HamletError("'outputs' is not an array")
    known = model.agent.outputs
    asked: list[tuple[str, bool]] = []
    for entry in given:
        name = entry.get("name") if isinstance(entry, dict) else None
        if name not in known:
            raise HamletError(f"output {name!r:.60} is unknown", f"known: {', '.join(known)}")
        parameters = entry.get("parameters")
        if parameters is None:
            parameters = {}
        if not isinstance(parameters, dict):
            raise HamletError(f"'parameters' of output '{name}' is not an object")
        for key in _NOT_DONE:
            if parameters.get(key):
                raise HamletError(f"output '{name}' asks for {key}, which is not done here")
        plain = parameters.get("binary_data") is None
        binary = request.binary if plain else flag(parameters, "binary_data")
        asked.append((str(name), binary))
    usual = outputs_of(model, request.sequence is not None or bool(request.lives))
    return asked or [(name, request.binary) for name in usual]


def outputs_of(model: Model, with_sequence: bool) -> list[str]:
    """What is returned to a request that does not say; the new state only where the client keeps
    it. Every output can be asked for."""
    if with_sequence:
        return [model.action, *model.thoughts]
    return model.agent.outputs


def answer(model: Model, request: InferRequest, results: Results) -> tuple[bytes, int | None]:
    """The body of a response and, if it has binary tensors, the length of its header.

    Args:
        results: (name, array, binary) of every output; or the action, where only that is asked for.
    """
    if not isinstance(results, list):
        asked = request.outputs or []
        if isinstance(results, int) and request.id is None and len(asked) == 1:
            if asked[0][1]:
                return model.binary_answer + results.to_bytes(8, "little", signed=True), len(
                    model.binary_answer
                )
            return model.json_answer % results, None
        array = shaped(model, model.action, results)
        results = [(name, array, binary) for name, binary in asked]
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
    version = request.version or model.version
    head: dict[str, Any] = {"model_name": model.name, "model_version": version}
    if request.id is not None:
        head["id"] = request.id
    header = orjson.dumps({**head, "outputs": outputs}, option=orjson.OPT_SERIALIZE_NUMPY)
    return b"".join([header, *tail]), len(header) if tail else None


def shaped(model: Model, name: str, value: int | np.ndarray) -> np.ndarray:
    """One life's output in the graph's shape."""
    field = model.signature.outputs[name]
    return np.asarray(value, field.dtype).reshape(field.sent(1))


def from_decision(model: Model, decision: Decision, name: str) -> np.ndarray:
    """Any output of one life, by its name in the graph."""
    if name == model.action:
        value = decision.action
    elif name in model.following:
        value = decision.state[model.following[name]]
    else:
        value = decision.thoughts[name]
    return shaped(model, name, value)


def metadata(model: Model) -> dict[str, Any]:
    """The model's metadata: what a client with a sequence sends and gets."""
    inputs, outputs = model.signature.inputs, model.signature.outputs
    return {
        "name": model.name,
        "versions": [model.version],
        "platform": "onnxruntime_onnx",
        "inputs": [_described(model, inputs[n]) for n in model.signature.observation],
        "outputs": [_described(model, outputs[n]) for n in outputs_of(model, True)],
    }


def _described(model: Model, field: Field) -> dict[str, Any]:
    rows = -1 if model.signature.batched else 1
    return {"name": field.name, "datatype": field.datatype, "shape": field.sent(rows)}


def fields_of(described: dict[str, Any]) -> list[Field]:
    """The observation's fields from a server's `metadata`, without their ranges."""
    dtypes = {datatype: dtype for dtype, datatype in DATATYPES.items()}
    fields = []
    for entry in described["inputs"]:
        shape = list(entry["shape"])
        axis = shape.index(-1) if -1 in shape else (0 if shape[:1] == [1] else None)
        if axis is not None:
            del shape[axis]
        fields.append(Field(entry["name"], dtypes[entry["datatype"]], tuple(shape), axis))
    return fields
