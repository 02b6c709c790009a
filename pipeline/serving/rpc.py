"""The Open Inference Protocol over gRPC, beside HTTP: the same engine, batches and lives.

`ModelInfer` is a request of HTTP's in protobuf: a sequence by the parameters `sequence_id`,
`sequence_start` and `sequence_end`, many lives by the tensors of `lives`. In `ModelStreamInfer` a
request that names no sequence belongs to the stream's own life, which begins with the first one
and ends with the stream; an error is an answer with `error_message`, and the stream goes on.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from importlib.metadata import version as installed
from typing import Any

import grpc

from hamlet.artifacts import HamletError
from hamlet.serving import protocol
from hamlet.serving.about import EXTENSIONS
from hamlet.serving.app import App
from hamlet.serving.errors import HTTPError
from hamlet.serving.headers import authorize
from hamlet.serving.oip import (
    HEALTH,
    MESSAGES,
    METHODS,
    NOT_SERVING,
    SERVICE,
    SERVING,
    STREAM,
)
from hamlet.serving.stream import Life, answered

MAX_MESSAGE = 1 << 20  # bytes, as of a body over HTTP
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
_CONTENTS = {
    "BOOL": "bool", "INT8": "int", "INT16": "int", "INT32": "int", "INT64": "int64",
    "UINT8": "uint", "UINT16": "uint", "UINT32": "uint", "UINT64": "uint64",
    "FP32": "fp32", "FP64": "fp64", "BYTES": "bytes",
}  # fmt: skip


async def start(app: App, host: str, port: int) -> tuple[grpc.aio.Server, int]:
    """Serve on this event loop; returns the server and its port (0 takes a free one).

    Raises:
        HamletError: the port is taken.
    """
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", MAX_MESSAGE),
            ("grpc.so_reuseport", 0),
        ]
    )
    service = Service(app)
    server.add_generic_rpc_handlers([service.handler(), service.health()])
    try:
        taken = server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    except RuntimeError:
        taken = 0
    if not taken:
        raise HamletError(
            f"{host}:{port} cannot be listened on", "another process has it: name another port"
        )
    await server.start()
    return server, taken


class Service:
    """The methods of `GRPCInferenceService`."""

    def __init__(self, app: App) -> None:
        self.app = app

    def handler(self) -> grpc.GenericRpcHandler:
        methods = {
            "ServerLive": self._live,
            "ServerReady": self._ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server,
            "ModelMetadata": self._model,
            "ModelInfer": self._infer,
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                self._told(methods[name], open_to_all=name in ("ServerLive", "ServerReady")),
                MESSAGES[request].FromString,
                MESSAGES[answer].SerializeToString,
            )
            for name, (request, answer) in METHODS.items()
        }
        name, request, answer = STREAM
        handlers[name] = grpc.stream_stream_rpc_method_handler(
            self._stream, MESSAGES[request].FromString, MESSAGES[answer].SerializeToString
        )
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    def health(self) -> grpc.GenericRpcHandler:
        check = grpc.unary_unary_rpc_method_handler(
            self._told(self._health, open_to_all=True),
            MESSAGES["HealthCheckRequest"].FromString,
            MESSAGES["HealthCheckResponse"].SerializeToString,
        )
        return grpc.method_handlers_generic_handler(HEALTH, {"Check": check})

    def _told(self, method: Any, open_to_all: bool) -> Any:
        """A method whose errors reach the client as gRPC's codes, in one line."""

        async def call(request: Any, context: Any) -> Any:
            try:
                if not open_to_all:
                    self._authorize(context)
                return await method(request)
            except Exception as error:
                status, text = self._error(error)
                code = _CODES.get(status, grpc.StatusCode.INTERNAL)
            return await context.abort(code, text)

        return call

    def _error(self, error: Exception) -> tuple[int, str]:
        """HTTP's status and one line; what no client should cause is logged."""
        status, body, _ = self.app.failed(error)
        return status, json.loads(body)["error"]

    def _authorize(self, context: Any) -> None:
        told = context.invocation_metadata() or ()
        authorize(
            [(b"authorization", v.encode()) for k, v in told if k == "authorization"],
            self.app.token,
        )

    # -- about the server

    async def _live(self, request: Any) -> Any:
        return MESSAGES["ServerLiveResponse"](live=True)

    async def _ready(self, request: Any) -> Any:
        return MESSAGES["ServerReadyResponse"](ready=self.app.is_ready())

    async def _health(self, request: Any) -> Any:
        if request.service not in ("", SERVICE):
            raise HTTPError(404, f"no service is called {request.service!r:.80}: {SERVICE} is")
        status = SERVING if self.app.is_ready() else NOT_SERVING
        return MESSAGES["HealthCheckResponse"](status=status)

    async def _model_ready(self, request: Any) -> Any:
        self.app.model_named(request.name, request.version or None)
        return MESSAGES["ModelReadyResponse"](ready=self.app.is_ready())

    async def _server(self, request: Any) -> Any:
        return MESSAGES["ServerMetadataResponse"](
            name="hamlet", version=installed("hamlet"), extensions=EXTENSIONS
        )

    async def _model(self, request: Any) -> Any:
        model = self.app.model_named(request.name, request.version or None)
        said = protocol.metadata(model)
        if not request.version:
            said["versions"] = list(self.app.engine.models)
        answer = MESSAGES["ModelMetadataResponse"]()
        for name in ("name", "platform"):
            setattr(answer, name, said[name])
        answer.versions.extend(said["versions"])
        for name in ("inputs", "outputs"):
            for entry in said[name]:
                getattr(answer, name).add(**entry)
        return answer

    # -- inference

    async def _infer(self, request: Any) -> Any:
        return await self._answer(request, None)

    async def _stream(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        answer = MESSAGES["ModelStreamInferResponse"]
        try:
            self._authorize(context)
        except HTTPError as error:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, error.message)
        life = Life(self.app)
        try:
            async for request in requests:
                try:
                    given = await self._answer(request, life)
                except Exception as error:
                    failed = answer(error_message=self._error(error)[1])
                    failed.infer_response.id = request.id
                    yield failed
                else:
                    yield answer(infer_response=given)
        finally:
            life.end()

    async def _answer(self, request: Any, life: Life | None) -> Any:
        version = request.model_version or None
        self.app.model_named(request.model_name, version)
        header, binary = header_of(request)
        asked, model, results = await answered(self.app, life, header, binary, version)
        answer = MESSAGES["ModelInferResponse"](
            model_name=request.model_name, model_version=asked.version or model.version
        )
        if asked.id is not None:
            answer.id = asked.id
        for name, values, _ in results:
            datatype = protocol.DATATYPES[str(values.dtype)]
            answer.outputs.add(name=name, datatype=datatype, shape=values.shape)
            answer.raw_output_contents.append(values.tobytes())
        return answer


def header_of(request: Any) -> tuple[dict[str, Any], memoryview]:
    """A request as HTTP has it: the JSON header, and the binary data behind it."""
    header: dict[str, Any] = {"parameters": _parameters(request.parameters)}
    if request.id:
        header["id"] = request.id
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise HamletError(
            f"{len(request.inputs)} inputs and {len(raw)} raw_input_contents", "one for each"
        )
    inputs = []
    for number, tensor in enumerate(request.inputs):
        entry: dict[str, Any] = {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": list(tensor.shape),
        }
        if raw:
            entry["parameters"] = {"binary_data_size": len(raw[number])}
        else:
            entry["data"] = _contents(tensor)
        inputs.append(entry)
    header["inputs"] = inputs
    if request.outputs:
        header["outputs"] = [
            {"name": output.name, "parameters": {"binary_data": True}} for output in request.outputs
        ]
    return header, memoryview(b"".join(raw))


def _contents(tensor: Any) -> list[Any]:
    kind = _CONTENTS.get(tensor.datatype)
    if kind is None:
        raise HamletError(
            f"input '{tensor.name}' is {tensor.datatype:.20}, which has no contents",
            "send raw_input_contents",
        )
    values = list(getattr(tensor.contents, f"{kind}_contents"))
    return [value.decode(errors="replace") for value in values] if kind == "bytes" else values


def _parameters(given: Any) -> dict[str, Any]:
    return {
        name: getattr(value, kind)
        for name, value in given.items()
        if (kind := value.WhichOneof("parameter_choice")) is not None
    }
