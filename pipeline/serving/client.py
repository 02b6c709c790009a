"""A policy for a program that acts: the same few calls in this process or over HTTP.

    with Agent("artifacts/agent.onnx") as agent:            # or "http://127.0.0.1:8080"
        action = agent.act(observation)

Over HTTP every request has an id, so that asking again after a connection broke is no tick too
many, and names its session in the header `Hamlet-Session`, for a proxy to hash on.

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
from urllib.parse import quote, urlsplit

import numpy as np

from hamlet.artifacts import HamletError
from hamlet.serving.model import RNG_RANGE, Model, pack

Observation = Mapping[str, Any]


class Agent:
    """One life of an agent.

    Args:
        where: an ONNX file, `models:/NAME@ALIAS`, or the URL of a server.
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

    def act(self, observation: Observation) -> Any:
        """The action for what is seen now: a number, or an array where it is several."""
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

    def act(self, observation: Observation) -> Any:
        model = self.model
        if not self.slots:
            raise HamletError("this agent is closed", "call reset()")
        wrong = model.load([pack(model.fields, observation)])
        if wrong:
            raise wrong[0]
        model.recall(self.slots)
        model.run(1)
        model.store(self.slots)
        return _action(model.outputs[model.action][0])

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
        token = (token or "").strip()
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.id: str | None = None
        self.begun = False
        self.asked = 0
        self.seed = 0
        served = json.loads(self._ask("POST", "/v2/repository/index", b"{}"))
        if not served:
            raise HamletError(f"{url} serves nothing yet", "try again when it is ready")
        model = f"/v2/models/{quote(served[0]['name'])}"
        described = json.loads(self._ask("GET", model))
        self.infer = f"{model}/infer"
        self.fields = fields_of(described)
        self.action = described["outputs"][0]["name"]

    def reset(self, seed: int) -> None:
        self.close()
        self.seed, self.id = seed, secrets.token_urlsafe(16)

    def act(self, observation: Observation) -> Any:
        record = pack(self.fields, observation)
        parameters: dict[str, Any] = {"sequence_id": self._session()}
        if not self.begun:
            parameters |= {"sequence_start": True, "seed": self.seed}
        header = json.dumps(
            {
                "id": self._request(),
                "parameters": parameters,
                "inputs": [
                    {
                        "name": f.name,
                        "datatype": f.datatype,
                        "shape": f.sent(1),
                        "parameters": {"binary_data_size": f.nbytes},
                    }
                    for f in self.fields
                ],
                "outputs": [{"name": self.action}],
            }
        ).encode()
        length = {"Inference-Header-Content-Length": str(len(header))}
        output = json.loads(self._ask("POST", self.infer, header + record, length))["outputs"][0]
        self.begun = True
        shape = output["shape"]
        return _action(np.array(output["data"]).reshape(shape[1:] if shape[:1] == [1] else shape))

    def think(self, observation: Observation) -> dict[str, Any]:
        plain = {name: np.asarray(value).tolist() for name, value in observation.items()}
        asked: dict[str, Any] = {"observation": plain, "session": self._session()}
        asked["id"] = self._request()
        asked |= {} if self.begun else {"start": True, "seed": self.seed}
        answer = json.loads(self._ask("POST", "/act?thoughts=1", json.dumps(asked).encode()))
        self.begun = True
        thoughts: dict[str, Any] = answer["thoughts"]
        return thoughts

    def close(self) -> None:
        begun, self.begun = self.begun, False
        if begun:
            self._ask("DELETE", f"/v2/sessions/{self.id}")
        self.id = None

    def _session(self) -> str:
        if self.id is None:
            raise HamletError("this agent is closed", "call reset()")
        return self.id

    def _request(self) -> str:
        self.asked += 1
        return str(self.asked)

    def _ask(
        self, method: str, path: str, body: bytes | None = None, more: Mapping[str, str] = {}
    ) -> bytes:
        headers = {**self.headers, **more}
        if self.id is not None:
            headers["Hamlet-Session"] = self.id
        # A connection that was kept may have died since the last call, which shows only when it is
        # used: then once more on a new one.
        again = self.connection.sock is not None
        while True:
            try:
                self.connection.request(method, self.base + path, body, headers)
                response = self.connection.getresponse()
                answer = response.read()
                break
            except (OSError, http.client.HTTPException) as error:
                self.connection.close()  # the next call connects anew
                if again and not isinstance(error, TimeoutError):
                    again = False
                    continue
                raise HamletError(
                    f"{self.url} does not answer ({error})", "is it running?"
                ) from None
        if response.status == 404 and method == "DELETE":
            return b""  # it ended by itself
        if response.status >= 400:
            try:
                reason = json.loads(answer)["error"]
            except (ValueError, KeyError, TypeError):
                reason = f"it answered {response.status}"
            raise HamletError(f"{self.url}: {reason}")
        return answer


def _action(value: np.ndarray) -> Any:
    """One number as such, several as an array of their own."""
    return value.reshape(()).item() if value.size == 1 else np.array(value)
