"""Where a policy comes from: a file, or an alias or version of MLflow's registry.

Only a registry source needs mlflow; it is imported when one is used.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from hamlet.artifacts import HamletError, card_path, in_one_line
from hamlet.serving.agent import OnnxAgent
from hamlet.serving.model import NAME

REGISTRY = re.compile(r"models:/([^/@]+)(?:@([\w.-]+)|/(\d+))")


class Source(Protocol):
    """Something that may hold another agent tomorrow."""

    name: str
    model: str
    """As clients call it."""

    def look(self) -> str:
        """What is there now, cheaply; another string when it may be another agent.

        Raises:
            HamletError: it cannot be seen.
        """

    def fetch(self) -> tuple[OnnxAgent, str]:
        """The agent and its version.

        Raises:
            HamletError: it is missing, corrupt or cannot be reached.
        """


def open_source(
    where: str, states: Mapping[str, str] | None = None, action: str | None = None
) -> Source:
    """`models:/NAME@ALIAS`, `models:/NAME/VERSION` or the path of an ONNX file.

    Args:
        states, action: for a policy without a card, see `OnnxAgent`.
    """
    if not where.startswith("models:"):
        return FileSource(where, states, action)
    found = REGISTRY.fullmatch(where)
    if found is None:
        raise HamletError(
            f"{where} names no model", "write models:/NAME@ALIAS, models:/NAME/VERSION or a file"
        )
    model, alias, version = found.groups()
    return RegistrySource(where, model, alias, version, states, action)


class FileSource:
    """An ONNX file, with its card beside it if it has one. Its version is the beginning of its
    hash."""

    def __init__(
        self, path: str, states: Mapping[str, str] | None = None, action: str | None = None
    ) -> None:
        self.name, self.path, self.states, self.action = path, Path(path), states, action
        self.model = self.path.stem
        with suppress(OSError, ValueError, AttributeError):
            if json.loads(card_path(path).read_text()).get("kind") == "agent":
                self.model = NAME

    def look(self) -> str:
        seen = []
        for suffix in ("", ".json", ".data"):
            path = self.path.with_name(self.path.name + suffix)
            try:
                seen.append(os.stat(path))
            except OSError as error:
                if not suffix:
                    raise HamletError(f"{path} cannot be read ({error.strerror})") from None
        return " ".join(f"{s.st_ino} {s.st_size} {s.st_mtime_ns}" for s in seen)

    def fetch(self) -> tuple[OnnxAgent, str]:
        agent = OnnxAgent(self.path, states=self.states, action=self.action)
        return agent, agent.sha[:12]


class RegistrySource:
    """A registered model of MLflow; its version is the registry's.

    The tracking server is MLFLOW_TRACKING_URI, else `mlflow.db` in the current folder. Files that a
    database names by a relative path are looked for beside it, wherever this process stands.
    """

    def __init__(
        self,
        uri: str,
        model: str,
        alias: str | None,
        version: str | None,
        states: Mapping[str, str] | None = None,
        action: str | None = None,
    ) -> None:
        self.name, self.model, self.alias, self.version = uri, model, alias, version
        self.states, self.action = states, action
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        try:
            import mlflow.tracking
        except ImportError:
            raise HamletError(
                f"{uri} is in MLflow's registry and mlflow is not installed",
                "run `pip install mlflow`, or serve a file",
            ) from None
        self.uri = os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
        self._mlflow: Any = mlflow
        self._file: int | None = None  # which SQLite file was read last

    def look(self) -> str:
        if self.version is not None:
            return self.version
        return str(self._asked("get_model_version_by_alias", self.alias).version)

    def fetch(self) -> tuple[OnnxAgent, str]:
        version = self.look()
        found = self._asked("get_model_version", version)
        with tempfile.TemporaryDirectory() as folder:
            place = f"models:/{self.model}/{version}"
            self._mlflow.set_tracking_uri(self.uri)
            self._mlflow.set_registry_uri(self.uri)
            try:
                held = self._held(found) or place
                local = Path(self._mlflow.artifacts.download_artifacts(held, dst_path=folder))
                info = self._mlflow.models.get_model_info(str(local))
            except Exception as error:
                raise HamletError(f"{place} cannot be loaded ({in_one_line(error)})") from None
            card = (info.metadata or {}).get("card")
            if card is None:
                return self._foreign(local, info, place), version
            card = json.loads(card)
            if found.tags.get("sha256") != card["sha256"]:
                raise HamletError(f"{place} holds another agent than its tag says")
            return OnnxAgent.of((local / "model.onnx").read_bytes(), card, place), version

    def _held(self, found: Any) -> str | None:
        """Where a version's files are if their name is relative: to a folder above the database."""
        kind, _, model_id = found.source.partition(":/")
        if kind != "models" or not self.uri.startswith("sqlite:///"):
            return None
        location = self._client().get_logged_model(model_id).artifact_location
        if ":" in location or Path(location).is_absolute():
            return None
        above = Path(self.uri[10:]).resolve().parents
        return next((f / location for f in above if (f / location).exists()), above[0]).as_uri()

    def _foreign(self, local: Path, info: Any, place: str) -> OnnxAgent:
        """The ONNX file of a model that somebody else logged."""
        if "onnx" not in info.flavors:
            kinds = ", ".join(info.flavors)
            raise HamletError(f"{place} is no ONNX model ({kinds})", "log it with mlflow.onnx")
        file = local / info.flavors["onnx"].get("data", "model.onnx")
        return OnnxAgent(file, states=self.states, action=self.action)

    def _client(self) -> Any:
        if not self.uri.startswith("sqlite:///"):
            return self._mlflow.tracking.MlflowClient(self.uri, registry_uri=self.uri)
        try:
            file = os.stat(self.uri[10:]).st_ino
        except OSError:
            # MLflow would make an empty one.
            raise HamletError(f"{self.uri[10:]} is missing", "set MLFLOW_TRACKING_URI") from None
        client = self._mlflow.tracking.MlflowClient(self.uri, registry_uri=self.uri)
        if self._file not in (None, file):  # its connections still read the file that was there
            client._get_registry_client().store.engine.dispose()
        self._file = file
        return client

    def _asked(self, question: str, key: str | None) -> Any:
        try:
            return getattr(self._client(), question)(self.model, key)
        except HamletError:
            raise
        except Exception as error:  # whatever MLflow, SQLite or the network say
            raise HamletError(f"{self.name} is not to be had ({in_one_line(error)})") from None
