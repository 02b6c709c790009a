"""One life per connection: requests over a WebSocket, `/v2/models/NAME/stream`.

Every message is the body of an inference request, and is answered by one message, in order: text
is JSON; a binary message is the length of its JSON header (uint32, little endian), the header and
then the tensors, as over HTTP. A request that names no sequence belongs to the connection's own
life, which begins with the first one and ends with the connection; `sequence_start` begins another,
`sequence_end` ends it before. An error is a text message `{"error", "status"}`; the connection
stays.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from hamlet.artifacts import HamletError
from hamlet.serving import lives, protocol
from hamlet.serving.errors import HTTPError
from hamlet.serving.headers import authorize, same_origin
from hamlet.serving.model import Model
from hamlet.serving.protocol import InferRequest
from hamlet.serving.results import Results, results_of

if TYPE_CHECKING:
    from hamlet.serving.app import App, Receive, Scope, Send


class Life:
    """The life of a connection."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.name = f"connection-{secrets.token_urlsafe(12)}"
        self.begun = False

    def claim(self, header: dict[str, Any]) -> None:
        """Give a request that names no life this one."""
        parameters = header.get("parameters") or {}
        inputs = header.get("inputs")
        if not isinstance(parameters, dict) or not isinstance(inputs, list):
            return  # which is said when it is understood
        model = self.app.engine.ready()
        if parameters.get("sequence_id") is not None or lives.are_in(inputs, model):
            return
        if any(isinstance(entry, dict) and entry.get("name") in model.states for entry in inputs):
            return  # its state is the client's
        header["parameters"] = parameters = {**parameters, "sequence_id": self.name}
        if not self.begun:
            parameters["sequence_start"] = True

    def lived(self, request: InferRequest) -> None:
        """A request was answered."""
        if request.sequence == self.name:
            self.begun = not request.end

    def end(self) -> None:
        """End it, where it goes on."""
        session = self.app.engine.sessions.get(self.name)
        if session is not None:
            self.app.engine.close(session, "deleted")
        self.begun = False


Answer = tuple[InferRequest, Model, Results]


async def answered(
    app: App, life: Life | None, header: dict[str, Any], binary: memoryview, version: str | None
) -> Answer:
    """A request: what was asked, the model, and the outputs. `life` is its connection's, if any.

    Raises:
        HTTPError, HamletError: what is wrong with it.
    """
    began = time.monotonic()
    status = 500
    try:
        if life is not None:
            life.claim(header)
        request, model = protocol.understand(header, binary, partial(app.model_for, version))
        results = await results_of(app.engine, request, model)
        if life is not None:
            life.lived(request)
        status = 200
        return request, model, results
    except (HTTPError, HamletError) as error:
        status = error.status if isinstance(error, HTTPError) else 400
        raise
    finally:
        app.metrics.responses[status] += 1
        app.metrics.seconds["request"].observe(time.monotonic() - began)


async def talk(app: App, scope: Scope, receive: Receive, send: Send) -> None:
    """A WebSocket connection, from its beginning to its end."""
    await receive()
    try:
        authorize(scope["headers"], app.token)
        same_origin(scope["headers"], app.origins)
        if scope["path"].rstrip("/") != (path := f"/v2/models/{app.engine.name}/stream"):
            raise HTTPError(404, f"there is no WebSocket at {scope['path'][:100]}: it is at {path}")
        app.engine.ready()
    except HTTPError as error:
        await _refuse(scope, send, error)
        return
    await send({"type": "websocket.accept"})
    life = Life(app)
    try:
        while (message := await receive())["type"] == "websocket.receive":
            await send({"type": "websocket.send", **await _reply(app, life, message)})
    finally:
        life.end()


async def _refuse(scope: Scope, send: Send, error: HTTPError) -> None:
    body = json.dumps({"error": error.message}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    start = {"type": "websocket.http.response.start", "status": error.status, "headers": headers}
    await send(start)
    await send({"type": "websocket.http.response.body", "body": body})


async def _reply(app: App, life: Life, message: Mapping[str, Any]) -> dict[str, Any]:
    text, data = message.get("text"), message.get("bytes")
    id_ = None
    try:
        if text is not None:
            header, binary = protocol.header_of(text.encode(), None)
        else:
            assert data is not None
            if len(data) < 4:
                raise HamletError("a binary message begins with its header's length, a uint32")
            length = int.from_bytes(data[:4], "little")
            header, binary = protocol.header_of(data[4:], b"%d" % length)
        id_ = header.get("id")
        request, model, results = await answered(app, life, header, binary, None)
        body, header_length = protocol.answer(model, request, results)
    except Exception as error:
        status, body, _ = app.failed(error)
        said = {**json.loads(body), "status": status}
        return {"text": json.dumps(said if id_ is None else {**said, "id": id_})}
    if header_length is None:
        return {"text": body.decode()}
    return {"bytes": header_length.to_bytes(4, "little") + body}
