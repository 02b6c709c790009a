"""The messages of the Open Inference Protocol's gRPC form (KServe's `GRPCInferenceService`).

The classes are made from the tables below, which are the standard's `.proto` in short: no code is
generated, so any protobuf reads them, and they may stand in one process with another library's.
`uint64_param` and `double_param` are Triton's, and so are the two fields of a stream's answer.
The question of health is gRPC's own (`grpc.health.v1`), as Kubernetes' probes ask it.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

SERVICE = "inference.GRPCInferenceService"
METHODS = {  # name: request, answer
    "ServerLive": ("ServerLiveRequest", "ServerLiveResponse"),
    "ServerReady": ("ServerReadyRequest", "ServerReadyResponse"),
    "ModelReady": ("ModelReadyRequest", "ModelReadyResponse"),
    "ServerMetadata": ("ServerMetadataRequest", "ServerMetadataResponse"),
    "ModelMetadata": ("ModelMetadataRequest", "ModelMetadataResponse"),
    "ModelInfer": ("ModelInferRequest", "ModelInferResponse"),
}
STREAM = ("ModelStreamInfer", "ModelInferRequest", "ModelStreamInferResponse")
HEALTH = "grpc.health.v1.Health"
SERVING, NOT_SERVING = 1, 2

# "name number type": `*` repeated, `{T}` a map from string to message T.
_MODEL = "name 1 string; version 2 string"
_INFERENCE = "model_name 1 string; model_version 2 string; id 3 string; parameters 4 {P}"
_TENSOR = "name 1 string; datatype 2 string; shape 3 *int64; parameters 4 {P}"
_MESSAGES = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "live 1 bool",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "ready 1 bool",
    "ModelReadyRequest": _MODEL,
    "ModelReadyResponse": "ready 1 bool",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "name 1 string; version 2 string; extensions 3 *string",
    "ModelMetadataRequest": _MODEL,
    "ModelMetadataResponse": (
        "name 1 string; versions 2 *string; platform 3 string; "
        "inputs 4 *ModelMetadataResponse.TensorMetadata; "
        "outputs 5 *ModelMetadataResponse.TensorMetadata"
    ),
    "ModelMetadataResponse.TensorMetadata": "name 1 string; datatype 2 string; shape 3 *int64",
    "InferParameter": (
        "bool_param 1 bool; int64_param 2 int64; string_param 3 string; double_param 4 double; "
        "uint64_param 5 uint64"
    ),
    "InferTensorContents": (
        "bool_contents 1 *bool; int_contents 2 *int32; int64_contents 3 *int64; "
        "uint_contents 4 *uint32; uint64_contents 5 *uint64; fp32_contents 6 *float; "
        "fp64_contents 7 *double; bytes_contents 8 *bytes"
    ),
    "ModelInferRequest": (
        f"{_INFERENCE}; inputs 5 *ModelInferRequest.InferInputTensor; "
        "outputs 6 *ModelInferRequest.InferRequestedOutputTensor; raw_input_contents 7 *bytes"
    ),
    "ModelInferRequest.InferInputTensor": f"{_TENSOR}; contents 5 InferTensorContents",
    "ModelInferRequest.InferRequestedOutputTensor": "name 1 string; parameters 2 {P}",
    "ModelInferResponse": (
        f"{_INFERENCE}; outputs 5 *ModelInferResponse.InferOutputTensor; "
        "raw_output_contents 6 *bytes"
    ),
    "ModelInferResponse.InferOutputTensor": f"{_TENSOR}; contents 5 InferTensorContents",
    "ModelStreamInferResponse": "error_message 1 string; infer_response 2 ModelInferResponse",
    "HealthCheckRequest": "service 1 string",
    "HealthCheckResponse": "status 1 int32",  # an enum, which is sent as a number
}
_ONEOF = {"InferParameter": "parameter_choice"}  # all of its fields


def _made() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="hamlet/open_inference.proto", package="inference", syntax="proto3"
    )
    described: dict[str, Any] = {}
    for path, fields in _MESSAGES.items():
        outer, _, inner = path.rpartition(".")
        message = (described[outer].nested_type if outer else file.message_type).add(name=inner)
        described[path] = message
        if path in _ONEOF:
            message.oneof_decl.add(name=_ONEOF[path])
        for line in filter(None, fields.split("; ")):
            _field(message, path, *line.split())
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        path.rpartition(".")[2]: message_factory.GetMessageClass(
            pool.FindMessageTypeByName(f"inference.{path}")
        )
        for path in _MESSAGES
        if "." not in path
    }


def _field(message: Any, path: str, name: str, number: str, type_: str) -> None:
    field = message.field.add(name=name, number=int(number), label=1)
    if type_ == "{P}":
        entry = message.nested_type.add(name="ParametersEntry")
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, label=1, type=_scalar("string"))
        value = entry.field.add(name="value", number=2, label=1, type=_MESSAGE)
        value.type_name = ".inference.InferParameter"
        type_ = f"*{path}.ParametersEntry"
    if type_.startswith("*"):
        field.label, type_ = 3, type_[1:]
    if type_[0].isupper():
        field.type, field.type_name = _MESSAGE, f".inference.{type_}"
    else:
        field.type = _scalar(type_)
    if path in _ONEOF:
        field.oneof_index = 0


_MESSAGE = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE


def _scalar(name: str) -> Any:
    return descriptor_pb2.FieldDescriptorProto.Type.Value(f"TYPE_{name.upper()}")


MESSAGES = _made()
