"""The agent for a program that acts: the same few calls in this process or over HTTP.

    with Agent("artifacts/agent.onnx") as agent:            # or "http://127.0.0.1:8080"
        action = agent.act(observation)

An observation is a mapping of the fields to arrays or nested lists, without a batch; `hamlet act
--example` prints one. The agent remembers what it saw until `reset`.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from hamlet.artifacts import HamletError
from hamlet.serving.model import NAME, RNG_RANGE, Model, pack

Observation = Mapping[str, Any]


class Agent:
    """One life of an agent.

    Args:
        where: an ONNX file with its card, `models:/NAME@ALIAS`, or the URL of a server.
        seed: of the agent's random numbers, in [0, 2^31 - 2); default: drawn.
        token: for a server that asks for one; default: HAMLET_TOKEN.

    Raises:
        HamletError: what is there cannot be used; or, from any call, what is wrong with it.
    """

    def __init__(
        self, where: str | Path, seed: int | None = None, token: str | None = None
    ) -> None:
        text = str(where)
        self._mind: _Here | _There
        if text.startswith(("http://", "https://")):
            self._mind = _There(text, token or os.environ.get("HAMLET_TOKEN"))
        else:
            self._mind = _Here(text)
        self.reset(seed)

    def reset(self, seed: int | None = None) -> None:
        """Begin a new life."""
        if seed is None:
            seed = secrets.randbelow(RNG_RANGE)
        elif not 0 <= seed < RNG_RANGE:
            raise HamletError(f"seed is {seed}", f"0 to {RNG_RANGE - 1}")
        self._mind.reset(seed)

    def act(self, observation: Observation) -> int:
        """The action for what is seen now, as its number."""
        return self._mind.act(observation)

    def think(self, observation: Observation) -> dict[str, Any]:
        """As `act`, but the action's name with the thoughts behind it, as `hamlet act` prints."""
        return self._mind.think(observation)

    def close(self) -> None:
        """End the life; on a server its session."""
        self._mind.close()

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Here:
    """ONNX Runtime in this process."""

    def __init__(self, where: str) -> None:
        from hamlet.serving.source import open_source

        agent, version = open_source(where).fetch()
        self.model = Model(agent, version, capacity=1, max_batch=1)
        self.slots: list[int] = []

    def reset(self, seed: int) -> None:
        self.close()
        slot = self.model.open(seed)
        assert slot is not None
        self.slots = [slot]

    def act(self, observation: Observation) -> int:
        model = self.model
        if not self.slots:
            raise HamletError("this agent is closed", "call reset()")
        wrong = model.load([pack(model.fields, observation)])
        if wrong:
            raise wrong[0]
        model.recall(self.slots)
        model.run(1)
        model.store(self.slots)
        return int(model.outputs["action"][0])

    def think(self, observation: Observation) -> dict[str, Any]:
        self.act(observation)
        return self.model.agent.readable(self.model.decision(0))

    def close(self) -> None:
        for slot in self.slots:
            self.model.close(slot)
        self.slots = []


class _There:
    """A server, over one connection that is kept."""

    def __init__(self, url: str, token: str | None) -> None:
        from hamlet.serving.protocol import fields_of

        parts = urlsplit(url)
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        self.url, self.base = url, parts.path.rstrip("/")
        self.connection = kind(parts.hostname or "", parts.port, timeout=30)
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.infer = f"/v2/models/{NAME}/infer"
        self.fields = fields_of(json.loads(self._ask("GET", f"/v2/models/{NAME}")))
        self.id: str | None = None
        self.seed = 0

    def reset(self, seed: int) -> None:
        self.close()
        self.seed = seed

    def act(self, observation: Observation) -> int:
        record = pack(self.fields, observation)
        start = self.id is None
        id_ = self.id or secrets.token_urlsafe(16)
        parameters = {"sequence_id": id_, "sequence_start": start}
        header = json.dumps(
            {
                "parameters": {**parameters, "seed": self.seed} if start else parameters,
                "inputs": [
                    {
                        "name": f.name,
                        "datatype": f.datatype,
                        "shape": [1, *f.shape],
                        "parameters": {"binary_data_size": f.nbytes},
                    }
                    for f in self.fields
                ],
                "outputs": [{"name": "action"}],
            }
        ).encode()
        length = {"Inference-Header-Content-Length": str(len(header))}
        answer = json.loads(self._ask("POST", self.infer, header + record, length))
        self.id = id_
        return answer["outputs"][0]["data"][0]

    def think(self, observation: Observation) -> dict[str, Any]:
        plain = {name: np.asarray(value).tolist() for name, value in observation.items()}
        asked: dict[str, Any] = {"observation": plain}
        asked |= {"seed": self.seed} if self.id is None else {"session": self.id}
        body = json.dumps(asked).encode()
        answer = json.loads(self._ask("POST", "/act?thoughts=1", body))
        self.id = answer["session"]
        return answer["thoughts"]

    def close(self) -> None:
        if self.id is not None:
            id_, self.id = self.id, None
            self._ask("DELETE", f"/v2/sessions/{id_}")

    def _ask(
        self, method: str, path: str, body: bytes | None = None, more: Mapping[str, str] = {}
    ) -> bytes:
        try:
            self.connection.request(method, self.base + path, body, {**self.headers, **more})
            response = self.connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            self.connection.close()  # the next call connects anew
            raise HamletError(f"{self.url} does not answer ({error})", "is it running?") from None
        if response.status >= 400:
            try:
                reason = json.loads(answer)["error"]
            except (ValueError, KeyError, TypeError):
                reason = f"it answered {response.status}"
            raise HamletError(f"{self.url}: {reason}")
        return answer
