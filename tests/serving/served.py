"""`hamlet serve` as a process of its own, and requests to it over real sockets."""

from __future__ import annotations

import http.client
import json
import queue
import signal
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.serving import json_request

INFER = "/v2/models/hamlet-agent/infer"
POLL_SECONDS, SAVE_SECONDS = 0.2, 0.5  # of the servers here: so that no test waits for two
SOONER = f"""
from hamlet.serving import server
server.POLL_SECONDS, server.SAVE_SECONDS = {POLL_SECONDS}, {SAVE_SECONDS}
"""


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        return self.json["error"]

    @property
    def action(self) -> int:
        assert self.status == 200, self.body
        return self.json["outputs"][0]["data"][0]


class Served:
    """A running server.

    Args:
        source: what it serves; options: of `hamlet serve`; env: its environment; before: Python
            that runs in it first.
    """

    def __init__(
        self, source: Path | str, *options: str, env: dict[str, str] | None = None, before: str = ""
    ) -> None:
        code = f"{before}\n{SOONER}\nfrom hamlet.cli import app\napp()"
        command = [sys.executable, "-c", code, "serve", str(source), "--port", "0", *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
        self.log: list[dict[str, Any]] = []
        self._events: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.port = int(self.wait("serving")["url"].rpartition(":")[2])

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            told = json.loads(line) if line.startswith("{") else {"event": "text", "text": line}
            self.log.append(told)
            self._events.put(told)
        self._events.put({"event": "closed"})

    def wait(self, event: str, seconds: float = 60.0) -> dict[str, Any]:
        """The next line of the log with this event."""
        until = time.monotonic() + seconds
        while True:
            try:
                told = self._events.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no '{event}' in {seconds} s: {self.log}") from None
            if told["event"] == event:
                return told
            assert told["event"] != "closed", self.log

    def first(self, event: str) -> dict[str, Any]:
        """The first line of the log with this event, also one from before the socket was open."""
        for told in list(self.log):
            if told["event"] == event:
                return told
        return self.wait(event)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal it and wait for its end; returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(60)
        self._reader.join(10)
        return code

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(signal.SIGKILL)

    # -- requests

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """One request on a connection of its own; a body that is not bytes is sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        try:
            connection.request(
                method, path, data, {k.replace("_", "-"): v for k, v in headers.items()}
            )
            response = connection.getresponse()
            return Answer(response.status, dict(response.headers), response.read())
        finally:
            connection.close()

    def tick(self, observation: dict[str, np.ndarray], name: str, **parameters: Any) -> Answer:
        """One tick of a session in JSON, asking for the action."""
        raw = json_request(observation, sequence_id=name, **parameters)
        return self.ask("POST", INFER, raw.partition(b"\r\n\r\n")[2])

    def metric(self, name: str) -> float:
        for line in self.ask("GET", "/metrics").body.decode().splitlines():
            if line.startswith(f"{name} "):
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"no metric {name}")


def action_of(response: bytes) -> tuple[int, str]:
    """The action and the version of a raw response, JSON or binary."""
    assert response.startswith(b"HTTP/1.1 200"), response[:300]
    body = response[response.find(b"\r\n\r\n") + 4 :]
    end = body.rfind(b"]}") + 2
    head = json.loads(body[:end])
    output = head["outputs"][0]
    if "data" in output:
        return output["data"][0], head["model_version"]
    return int(np.frombuffer(body[end:], np.int64)[0]), head["model_version"]


@cache
def raw_session(path: Path, written: int) -> Any:
    """A file by onnxruntime and nothing else; opened once for as long as it is not written anew."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def lives_by_raw_onnxruntime(
    path: Path, batches: list[list[dict[str, np.ndarray]]], seeds: list[int]
) -> np.ndarray:
    """int64 [T, S]: the actions of S lives, seeing `batches[t][s]`, by onnxruntime and nothing else
    (as the README does it)."""
    card = json.loads(path.with_name(path.name + ".json").read_text())
    session = raw_session(path, path.stat().st_mtime_ns)
    names = [o.name for o in session.get_outputs()]
    state = {
        e["name"]: np.zeros((len(seeds), *e["shape"][1:]), e["dtype"])
        for e in card["schema"]["inputs"]
        if e["name"].startswith("state_")
    }
    state["state_rng"][:] = seeds
    actions = []
    for rows in batches:
        feeds = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        outputs = dict(zip(names, session.run(None, {**feeds, **state}), strict=True))
        actions.append(outputs["action"])
        state = {name: outputs[name.replace("state_", "next_")] for name in state}
    return np.stack(actions)
