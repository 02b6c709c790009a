"""The OpenAPI document, made from the card of the agent that serves."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from hamlet.serving.model import RNG_RANGE, Field, Model
from hamlet.serving.protocol import MAX_NUMBER, MAX_TIMEOUT, NAME_PATTERN

Schema = dict[str, Any]
# Writers of JSON differ: null is absent, 0 and 1 are false and true.
_OR_NULL: Schema = {"type": ["string", "null"]}
_FLAG: Schema = {"enum": [True, False, 0, 1, None]}
_OFF: Schema = {"enum": [False, 0, None]}
_BYTES = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


def document(model: Model) -> Schema:
    """The document (OpenAPI 3.1) for a server whose current version is `model`."""
    infer = {
        "summary": "One tick: of a session with sequence_id, else of state the client keeps",
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _request(model)}},
        },
        "responses": _responses(
            {
                "200": {
                    "description": "The outputs asked for.",
                    "content": _json("Inferred"),
                }
            },
            "400", "404", "408", "409", "413", "415", "429", "503",
        ),
    }  # fmt: skip
    act = {
        "summary": "One tick for people: names instead of numbers",
        "parameters": [
            {
                "name": "thoughts",
                "in": "query",
                "description": "1: also what the agent believes, imagines, expects and wants.",
                "schema": {"enum": ["0", "1"]},
            }
        ],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _act(model)}},
        },
        "responses": _responses(
            {
                "200": {
                    "description": "The action.",
                    "content": _json("Acted"),
                }
            },
            "400", "404", "408", "409", "413", "415", "429", "503",
        ),
    }  # fmt: skip
    version = {
        "name": "version", "in": "path", "required": True,
        "schema": {"type": "string", "enum": [model.version]},
    }  # fmt: skip
    name = quote(model.name)
    paths: Schema = {
        "/v2/health/live": {"get": _get("The process answers", "live")},
        "/v2/health/ready": {"get": _get("An agent is loaded", "ready", "503")},
        "/v2": {"get": _get("About the server", "name")},
        f"/v2/models/{name}": {"get": _get("About the agent", "inputs", "503")},
        f"/v2/models/{name}/ready": {"get": _get("Whether it serves", "ready", "503")},
        f"/v2/models/{name}/config": {"get": _get("Its configuration", "input", "503")},
        f"/v2/models/{name}/stats": {"get": _get("What it has done", "model_stats", "503")},
        f"/v2/models/{name}/infer": {"post": infer},
        f"/v2/models/{name}/versions/{{version}}": {
            "parameters": [version],
            "get": _get("About one version", "inputs", "404", "503"),
        },
        f"/v2/models/{name}/versions/{{version}}/ready": {
            "parameters": [version],
            "get": _get("Whether a version serves", "ready", "404", "503"),
        },
        f"/v2/models/{name}/versions/{{version}}/config": {
            "parameters": [version],
            "get": _get("A version's configuration", "input", "404", "503"),
        },
        f"/v2/models/{name}/versions/{{version}}/stats": {
            "parameters": [version],
            "get": _get("What a version has done", "model_stats", "404", "503"),
        },
        f"/v2/models/{name}/versions/{{version}}/infer": {"parameters": [version], "post": infer},
        "/v2/models": {"get": _get("Names of the models", "models")},
        "/v2/models/stats": {"get": _get("What all versions have done", "model_stats")},
        "/v2/repository/index": {"get": _index(), "post": _index()},
        **{
            f"/v2/repository/models/{name}/{what}": {
                "post": {
                    "summary": f"To {what} on request: refused, a new file is taken up by itself",
                    "responses": _responses({}, "404", "409"),
                }
            }
            for what in ("load", "unload")
        },
        "/v2/sessions/{id}": {
            "parameters": [
                {
                    "name": "id", "in": "path", "required": True,
                    "schema": {"type": "string", "pattern": NAME_PATTERN},
                }
            ],
            "delete": {
                "summary": "End a session",
                "responses": _responses({"204": {"description": "It ended."}}, "404"),
            },
            "get": {
                "summary": "A session's state, to be taken up by another server",
                "responses": _responses(
                    {"200": {"description": "Its state.", "content": _BYTES}}, "404", "409"
                ),
            },
            "put": {
                "summary": "Go on with a session of another server",
                "requestBody": {"required": True, "content": _BYTES},
                "responses": _responses(
                    {"204": {"description": "It goes on here."}},
                    "400", "408", "409", "413", "415", "429",
                ),
            },
        },
        "/act": {"post": act},
        "/metrics": {
            "get": {
                "summary": "Counters for Prometheus",
                "responses": _responses(
                    {"200": {"description": "Text.", "content": {"text/plain": {}}}}
                ),
            }
        },
        "/openapi.json": {"get": _get("This document", "openapi", "503")},
    }  # fmt: skip
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Hamlet",
            "version": model.version,
            "description": "Stateful agents over the Open Inference Protocol v2.",
        },
        "paths": paths,
        "components": {"schemas": _schemas(model)},
    }


def _get(summary: str, key: str, *errors: str) -> Schema:
    schema = {"type": "object", "required": [key]}
    found = {"description": summary, "content": {"application/json": {"schema": schema}}}
    return {"summary": summary, "responses": _responses({"200": found}, *errors)}


def _index() -> Schema:
    listed = {"type": "object", "required": ["name", "version", "state"]}
    content = {"application/json": {"schema": {"type": "array", "items": listed}}}
    found = {"description": "Every version that is loaded", "content": content}
    return {"summary": "Every version that is loaded", "responses": _responses({"200": found})}


def _json(schema: str) -> Schema:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}


def _responses(good: Schema, *errors: str) -> Schema:
    meaning = {
        "400": "A field is wrong; the error names it.",
        "401": "The bearer token is missing or wrong.",
        "404": "No such session, version or path.",
        "405": "Another method is meant.",
        "408": "The body did not come in time.",
        "409": "The session is open already, or on another version; nothing is loaded on request.",
        "413": "The body is too large.",
        "415": "Content-Encoding is not supported.",
        "429": "Too many sessions or requests, or no turn in time; Retry-After says when.",
        "503": "No agent is loaded, or the server is going away.",
    }
    content = _json("Error")
    codes = ("401", "405", *errors)
    return {**good, **{c: {"description": meaning[c], "content": content} for c in sorted(codes)}}


def _schemas(model: Model) -> Schema:
    names = model.signature.names
    tensor = {
        "type": "object",
        "required": ["name", "datatype", "shape"],
        "properties": {
            "name": {"type": "string"},
            "datatype": {"type": "string"},
            "shape": {"type": "array", "items": {"type": "integer"}},
            "data": {"type": "array"},
        },
    }
    return {
        "Error": {
            "type": "object",
            "required": ["error"],
            "properties": {"error": {"type": "string"}},
        },
        "Inferred": {
            "type": "object",
            "required": ["model_name", "model_version", "outputs"],
            "properties": {
                "model_name": {"const": model.name},
                "model_version": {"type": "string"},
                "id": {"type": "string"},
                "outputs": {"type": "array", "items": tensor},
            },
        },
        "Acted": {
            "type": "object",
            "required": ["session", "tick", "action", "version"],
            "properties": {
                "session": {"type": "string"},
                "tick": {"type": "integer", "minimum": 1},
                "action": {"enum": names} if names else {},
                "version": {"type": "string"},
                "thoughts": {"type": "object"},
            },
        },
    }


def _request(model: Model) -> Schema:
    fields = [model.described[name] for name in model.signature.observation]
    one = [_tensor(field, model.signature.mask) for field in fields]
    return {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": _OR_NULL,
            "parameters": {
                "type": ["object", "null"],
                "anyOf": [
                    {"required": ["sequence_id"], "properties": {"sequence_id": _name(0)}},
                    {"properties": {"sequence_start": _OFF, "sequence_end": _OFF}},
                ],
                "properties": {
                    "sequence_id": {
                        "description": "Name of the session; without it, the client keeps state.",
                        "anyOf": [_name(0), {"type": "null"}],
                    },
                    "sequence_start": {"description": "Begin it.", **_FLAG},
                    "sequence_end": {"description": "End it after this tick.", **_FLAG},
                    "binary_data_output": _OFF,
                    "timeout": {
                        "type": ["integer", "null"],
                        "description": "Microseconds in which its turn must come.",
                        "minimum": 0,
                        "maximum": MAX_TIMEOUT,
                    },
                    "seed": {
                        "type": ["integer", "null"],
                        "description": "Random numbers of a new session.",
                        "minimum": 0,
                        "maximum": RNG_RANGE - 1,
                    },
                },
            },
            "inputs": {
                "description": "Every field of the observation once, in any order.",
                "type": "array",
                "prefixItems": one,
                "items": False,
                "minItems": len(one),
            },
            "outputs": {
                "description": "What to return; default: everything.",
                "type": ["array", "null"],
                "items": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {"name": {"enum": model.agent.outputs}},
                },
            },
        },
    }


def _name(least: int) -> Schema:
    """Of a session; 0 and "" are none."""
    names: list[Schema] = [
        {"type": "integer", "minimum": least, "maximum": MAX_NUMBER},
        {"type": "string", "pattern": NAME_PATTERN},
    ]
    return {"anyOf": names if least else [*names, {"const": ""}]}


def _tensor(field: Field, mask: str | None) -> Schema:
    return {
        "type": "object",
        "required": ["name", "datatype", "shape", "data"],
        "properties": {
            "name": {"const": field.name},
            "datatype": {"const": field.datatype},
            "shape": {"const": field.sent(1)},
            "data": _flat(field, field.size, mask),
        },
    }


def _flat(field: Field, size: int, mask: str | None) -> Schema:
    if field.dtype == "bool":
        item: Schema = {"anyOf": [{"type": "boolean"}, {"enum": [0, 1]}]}
    else:
        whole = field.dtype[:5] != "float"
        low, high = (int(x) if whole else x for x in (field.low, field.high))
        item = {"type": "integer" if whole else "number", "minimum": low, "maximum": high}
    schema: Schema = {"type": "array", "items": item, "minItems": size, "maxItems": size}
    if field.name == mask:  # at least one action is legal
        schema["contains"] = {"enum": [True, 1]}
    return schema


def _act(model: Model) -> Schema:
    fields = [model.described[name] for name in model.signature.observation]

    mask = model.signature.mask

    def nested(field: Field) -> Schema:
        if not field.shape:
            return _flat(field, 1, mask)["items"]
        schema = _flat(field, field.shape[-1], mask)
        for size in reversed(field.shape[:-1]):
            schema = {"type": "array", "items": schema, "minItems": size, "maxItems": size}
        return schema

    return {
        "type": "object",
        "required": ["observation"],
        "not": {
            "required": ["session", "seed"],
            "properties": {
                "session": {"type": ["integer", "string"]},
                "seed": {"type": "integer"},
                "start": _OFF,
            },
        },
        "additionalProperties": False,
        "properties": {
            "session": {
                "description": "As the first answer named it; without it, a new session begins.",
                "anyOf": [_name(1), {"type": "null"}],
            },
            "seed": {
                "description": "Random numbers of a new session.",
                "type": ["integer", "null"],
                "minimum": 0,
                "maximum": RNG_RANGE - 1,
            },
            "start": {"description": "Begin the session named.", **_FLAG},
            "end": {"description": "End the session after this tick.", **_FLAG},
            "id": {"description": "Asked again with it, it is no second tick.", **_OR_NULL},
            "observation": {
                "type": "object",
                "required": [f.name for f in fields],
                "additionalProperties": False,
                "properties": {f.name: nested(f) for f in fields},
            },
        },
    }
