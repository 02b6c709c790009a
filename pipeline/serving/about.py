"""What a server tells of itself: health, metadata, configuration, statistics, pages for people."""

from __future__ import annotations

from importlib.metadata import version as installed
from typing import TYPE_CHECKING, Any

import orjson

from hamlet.serving import protocol
from hamlet.serving.errors import JSON, HTTPError, Reply
from hamlet.serving.model import Field, Model
from hamlet.serving.openapi import document
from hamlet.serving.pages import docs_page, front_page

if TYPE_CHECKING:
    from hamlet.serving.app import App, Route

TEXT = (b"content-type", b"text/plain; version=0.0.4")
# Nothing of a page comes from elsewhere.
HTML = [
    (b"content-type", b"text/html; charset=utf-8"),
    (b"content-security-policy", b"default-src 'none'; style-src 'unsafe-inline'"),
]
EXTENSIONS = [
    "binary_tensor_data", "sequence", "sequence(string_id)", "schedule_policy", "parameters",
    "model_repository", "model_configuration", "statistics",
]  # fmt: skip


class About:
    """The routes that act for nobody."""

    def __init__(self, app: App) -> None:
        self.app, self.engine = app, app.engine

    def routes(self) -> dict[tuple[str, ...], dict[str, Route]]:
        """Path, "*" for anything -> method -> what answers it."""
        model = ("v2", "models", self.engine.name)
        return {
            ("",): {"GET": self._front},
            ("docs",): {"GET": self._docs},
            ("openapi.json",): {"GET": self._openapi},
            ("metrics",): {"GET": self._metrics},
            ("v2",): {"GET": self._server},
            ("v2", "health", "live"): {"GET": self._live},
            ("v2", "health", "ready"): {"GET": self._ready},
            ("v2", "repository", "index"): {"POST": self._index, "GET": self._index},
            ("v2", "repository", "models", "*", "load"): {"POST": self._load},
            ("v2", "repository", "models", "*", "unload"): {"POST": self._load},
            ("v2", "models"): {"GET": self._models},
            ("v2", "models", "stats"): {"GET": self._stats},
            model: {"GET": self._model},
            (*model, "ready"): {"GET": self._model_ready},
            (*model, "config"): {"GET": self._config},
            (*model, "stats"): {"GET": self._stats},
            (*model, "versions", "*"): {"GET": self._model},
            (*model, "versions", "*", "ready"): {"GET": self._model_ready},
            (*model, "versions", "*", "config"): {"GET": self._config},
            (*model, "versions", "*", "stats"): {"GET": self._stats},
        }

    async def _live(self, scope: Any, receive: Any) -> Reply:
        return 200, b'{"live":true}', [JSON]

    async def _ready(self, scope: Any, receive: Any) -> Reply:
        self.app.must_be_ready()
        return 200, b'{"ready":true}', [JSON]

    async def _model_ready(self, scope: Any, receive: Any, version: str = "") -> Reply:
        self.app.must_be_ready()
        model = self.app.version(version or None)
        return _json({"name": model.name, "version": model.version, "ready": True})

    async def _server(self, scope: Any, receive: Any) -> Reply:
        return _json({"name": "hamlet", "version": installed("hamlet"), "extensions": EXTENSIONS})

    async def _model(self, scope: Any, receive: Any, version: str = "") -> Reply:
        said = protocol.metadata(self.app.version(version or None))
        if not version:
            said["versions"] = list(self.engine.models)
        return _json(said)

    async def _index(self, scope: Any, receive: Any) -> Reply:
        # A body may say {"ready": true}: all that is listed is ready.
        return _json(
            [
                {"name": self.engine.name, "version": version, "state": "READY", "reason": ""}
                for version in self.engine.models
            ]
        )

    async def _load(self, scope: Any, receive: Any, name: str) -> Reply:
        if name != self.engine.name:
            raise HTTPError(404, f"model {name[:60]!r} is not served: {self.engine.name!r} is")
        raise HTTPError(
            409,
            "nothing is loaded or unloaded on request: put a new file where the served one is, or "
            "move the registry's alias",
        )

    async def _models(self, scope: Any, receive: Any) -> Reply:
        return _json({"models": [self.engine.name] if self.engine.models else []})

    async def _config(self, scope: Any, receive: Any, version: str = "") -> Reply:
        return _json(config(self.app.version(version or None), self.engine.session_ttl))

    async def _stats(self, scope: Any, receive: Any, version: str = "") -> Reply:
        models = [self.app.version(version)] if version else list(self.engine.models.values())
        return _json({"model_stats": [statistics(model) for model in models]})

    async def _metrics(self, scope: Any, receive: Any) -> Reply:
        engine = self.engine
        sessions = {version: model.sessions for version, model in engine.models.items()}
        current = engine.current
        provider = current.agent.session.get_providers()[0] if current else "none"
        version = current.version if current else "none"
        text = engine.metrics.text(sessions, engine.queued, provider, version)
        return 200, text.encode(), [TEXT]

    async def _openapi(self, scope: Any, receive: Any) -> Reply:
        return _json(document(self.engine.ready()))

    async def _front(self, scope: Any, receive: Any) -> Reply:
        return 200, front_page(self.engine.ready(), len(self.engine.sessions)).encode(), [*HTML]

    async def _docs(self, scope: Any, receive: Any) -> Reply:
        return 200, docs_page(document(self.engine.ready())).encode(), [*HTML]


def _json(said: Any) -> Reply:
    return 200, orjson.dumps(said), [JSON]


def config(model: Model, session_ttl: float) -> dict[str, Any]:
    """The model's configuration as Triton describes one (`model_config.proto` as JSON)."""
    signature = model.signature

    def tensor(field: Field) -> dict[str, Any]:
        kind = f"TYPE_{field.datatype}"
        return {"name": field.name, "data_type": kind, "dims": list(field.shape) or [1]}

    said: dict[str, Any] = {
        "name": model.name,
        "platform": "onnxruntime_onnx",
        "backend": "onnxruntime",
        "max_batch_size": model.max_batch if signature.batched else 0,
        "input": [tensor(signature.inputs[n]) for n in signature.observation],
        "output": [tensor(signature.outputs[n]) for n in protocol.outputs_of(model, True)],
    }
    if signature.states:
        states = []
        for given, following in signature.states.items():
            state = tensor(signature.inputs[given])
            del state["name"]
            states.append({"input_name": given, "output_name": following, **state})
        idle = min(int(min(session_ttl, 1e9) * 1e6), 2**53)
        said["sequence_batching"] = {"max_sequence_idle_microseconds": idle, "state": states}
    return said


def statistics(model: Model) -> dict[str, Any]:
    """What a version has done, as Triton's statistics extension tells it; times in nanoseconds."""
    counts = model.counts

    def told(count: int, seconds: float) -> dict[str, int]:
        return {"count": count, "ns": round(seconds * 1e9)}

    run = told(counts.rows, counts.run_seconds)
    nothing = told(counts.rows, 0.0)
    return {
        "name": model.name,
        "version": model.version,
        "last_inference": round(counts.last * 1e3),
        "inference_count": counts.rows,
        "execution_count": counts.runs,
        "inference_stats": {
            "success": told(counts.rows, counts.run_seconds + counts.queue_seconds),
            "fail": told(counts.failed, 0.0),
            "queue": told(counts.rows, counts.queue_seconds),
            "compute_input": nothing,
            "compute_infer": run,
            "compute_output": nothing,
        },
        "batch_stats": [],
    }
