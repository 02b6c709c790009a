"""Speed of `hamlet serve` against raw ONNX Runtime and `mlflow models serve`, one model for all.

    python -m benchmarks.serving [--agent artifacts/agent.onnx] [--rounds 3] [--seconds 2]

First the agent, then a plain GRU (`benchmarks/gru.py`), under "gru". Every round measures
everything once, so that what the machine does meanwhile meets all alike; the ratios are those of
the same round, their median counts. Both servers run with logs off on the same machine as the load,
MLflow with one thread for ONNX Runtime and one worker (its default). The last line is JSON and is
also written to benchmarks/results/serving.json.

`json64` is 64 connections with a session each, `websocket64` and `grpc64` are 64 connections with a
life each, `lives32_json` and `lives32_binary` one connection whose requests tick 32 lives. Their
`ticks_per_s` is 32 times their requests; `lives32_over_single` compares it with one connection that
asks for one life at a time, the slower of JSON and binary.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.gru import write_gru
from benchmarks.serving_load import message, upgrade
from hamlet.artifacts import HamletError, write_card
from hamlet.export.mlflow_signature import mlflow_signature
from hamlet.serving.agent import OnnxAgent
from hamlet.serving.client import Agent
from hamlet.serving.model import DATATYPES

RESULTS = Path(__file__).parent / "results" / "serving.json"
CONNECTIONS = (1, 16, 64, 256)
LIVES = 32  # in one request
Observation = dict[str, np.ndarray]
Request = Callable[..., bytes]


# ------------------------------------------------------------------------------------------------
# Requests


def observations(agent: OnnxAgent, count: int, seed: int = 0) -> list[Observation]:
    """Random legal observations without a batch, numbers with four digits as people send them."""
    rng = np.random.default_rng(seed)
    signature = agent.signature

    def field(name: str) -> np.ndarray:
        wanted = signature.inputs[name]
        if name == signature.mask:
            return np.ones(wanted.shape, bool)
        if wanted.dtype == "float32":
            low, high = max(wanted.low, -1), min(wanted.high, 1)
            return rng.uniform(low, high, wanted.shape).round(4).astype("float32")
        limited = name in agent.card.get("limits", {})
        least, most = (int(wanted.low), int(wanted.high)) if limited else (0, 1)
        return rng.integers(least, most, wanted.shape, endpoint=True).astype(wanted.dtype)

    return [{name: field(name) for name in signature.observation} for _ in range(count)]


def as_json(x: np.ndarray) -> list[Any]:
    return [round(v, 4) for v in x.ravel().tolist()] if x.dtype == "float32" else x.ravel().tolist()


def json_request(observation: Observation, **parameters: Any) -> bytes:
    """A request of the Open Inference Protocol, asking for the action."""
    inputs = [
        {"name": n, "shape": [1, *x.shape], "datatype": DATATYPES[str(x.dtype)], "data": as_json(x)}
        for n, x in observation.items()
    ]
    body = {"parameters": parameters, "inputs": inputs, "outputs": [{"name": "action"}]}
    return http("POST", "/v2/models/hamlet-agent/infer", json.dumps(body).encode())


def binary_request(observation: Observation, **parameters: Any) -> bytes:
    """The same with the tensors as raw bytes, both ways."""
    inputs = [
        {
            "name": n, "shape": [1, *x.shape], "datatype": DATATYPES[str(x.dtype)],
            "parameters": {"binary_data_size": x.nbytes},
        }
        for n, x in observation.items()
    ]  # fmt: skip
    outputs = [{"name": "action", "parameters": {"binary_data": True}}]
    body = {"parameters": parameters, "inputs": inputs, "outputs": outputs}
    header = json.dumps(body).encode()
    tail = b"".join(x.tobytes() for x in observation.values())
    length = f"Inference-Header-Content-Length: {len(header)}\r\n"
    return http("POST", "/v2/models/hamlet-agent/infer", header + tail, length)


def lives_request(binary: bool, rows: list[Observation], name: str, start: bool) -> bytes:
    """One tick of as many lives as there are rows, asking for their actions."""
    count = len(rows)
    tensors = {field: np.stack([row[field] for row in rows]) for field in rows[0]}
    ids = [f"{name}-{i}".encode() for i in range(count)]
    described: list[dict[str, Any]] = [
        {"name": n, "shape": x.shape, "datatype": DATATYPES[str(x.dtype)]}
        for n, x in tensors.items()
    ]
    described.append({"name": "sequence_start", "shape": [count], "datatype": "BOOL"})
    described.append({"name": "sequence_id", "shape": [count], "datatype": "BYTES"})
    outputs: dict[str, Any] = {"name": "action"}
    if not binary:
        values = [*map(as_json, tensors.values()), [start] * count, [i.decode() for i in ids]]
        full = [{**d, "data": data} for d, data in zip(described, values, strict=True)]
        body = json.dumps({"inputs": full, "outputs": [outputs]}).encode()
        return http("POST", "/v2/models/hamlet-agent/infer", body)
    parts = [x.tobytes() for x in tensors.values()]
    parts += [bytes([start] * count), b"".join(len(i).to_bytes(4, "little") + i for i in ids)]
    inputs = [
        {**d, "parameters": {"binary_data_size": len(part)}}
        for d, part in zip(described, parts, strict=True)
    ]
    outputs["parameters"] = {"binary_data": True}
    header = json.dumps({"inputs": inputs, "outputs": [outputs]}).encode()
    length = f"Inference-Header-Content-Length: {len(header)}\r\n"
    return http("POST", "/v2/models/hamlet-agent/infer", header + b"".join(parts), length)


def grpc_request(observation: Observation) -> bytes:
    """A request of a stream's own life, asking for the action."""
    from hamlet.serving.oip import MESSAGES

    request = MESSAGES["ModelInferRequest"](model_name="hamlet-agent")
    for name, x in observation.items():
        datatype = DATATYPES[str(x.dtype)]
        request.inputs.add(name=name, datatype=datatype, shape=[1, *x.shape])
        request.raw_input_contents.append(x.tobytes())
    request.outputs.add(name="action")
    return request.SerializeToString()


def http(method: str, path: str, body: bytes = b"", headers: str = "") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Content-Type: application/json\r\n{headers}\r\n".encode() + body


# ------------------------------------------------------------------------------------------------
# Servers


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextmanager
def hamlet(agent: Path, *options: str) -> Iterator[tuple[int, int, subprocess.Popen[str]]]:
    """`hamlet serve`: its ports for HTTP and, if asked for, gRPC, and its process."""
    command = [sys.executable, "-c", "from hamlet.cli import app; app()", "serve", str(agent)]
    options = ("--port", "0", "--name", "hamlet-agent", *options)
    with subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        port = grpc_port = 0
        for line in process.stderr:
            told: dict[str, Any] = json.loads(line) if line.startswith("{") else {"event": line}
            if told["event"] == "serving grpc":
                grpc_port = told["port"]
            if told["event"] == "serving":
                port = int(told["url"].rpartition(":")[2])
                break
        else:
            raise SystemExit(f"hamlet serve ended: {line}")
        drained = threading.Thread(target=process.stderr.read)  # a full pipe would stop it
        drained.start()
        try:
            yield port, grpc_port, process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            drained.join()


@contextmanager
def mlflow_serve(agent: Path, folder: Path) -> Iterator[int]:
    """`mlflow models serve` of the same graph: its port."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    import mlflow
    import onnx

    model = onnx.load(agent)
    mlflow.onnx.save_model(
        model,
        folder / "mlflow",
        signature=mlflow_signature(model),
        pip_requirements=["onnxruntime"],
        onnx_execution_providers=["CPUExecutionProvider"],
        onnx_session_options={"intra_op_num_threads": 1},
        save_as_external_data=False,
    )
    port = free_port()
    command = f"mlflow models serve -m {folder / 'mlflow'} --env-manager local -p {port}"
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "UVICORN_LOG_LEVEL": "critical",
        "UVICORN_ACCESS_LOG": "0",
    }
    quiet = subprocess.DEVNULL
    with subprocess.Popen(
        command.split(), env=env, stdout=quiet, stderr=quiet, start_new_session=True
    ) as process:
        try:
            until = time.monotonic() + 120
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/ping", timeout=5).close()
                    break
                except OSError:
                    if process.poll() is not None or time.monotonic() > until:
                        raise SystemExit(f"`{command}` does not answer") from None
                    time.sleep(0.5)
            yield port
        finally:
            os.killpg(process.pid, signal.SIGTERM)


# ------------------------------------------------------------------------------------------------
# Measuring


def over_http(port: int, plans: list[list[bytes]], seconds: float, folder: Path) -> dict[str, Any]:
    """Load from a process of its own; every connection has a plan [first, rest...]."""
    file = folder / "plans"
    file.write_text("\n".join(json.dumps([r.hex() for r in plan]) for plan in plans))
    script = Path(__file__).with_name("serving_load.py")
    command = [sys.executable, str(script), "127.0.0.1", str(port), str(seconds), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    if not {"200"} <= found["statuses"].keys() <= {"200", "101"} or found["closed"]:
        raise SystemExit(f"not all requests were answered with 200: {found}")
    return found


def over_websocket(
    port: int, seen: list[Observation], count: int, seconds: float, folder: Path
) -> dict[str, Any]:
    """A connection and a life each."""
    bodies = [json_request(o).partition(b"\r\n\r\n")[2] for o in seen]
    begin = upgrade("/v2/models/hamlet-agent/stream")
    plans = [[begin, *(message(body) for body in bodies[i % 4 :: 4])] for i in range(count)]
    return over_http(port, plans, seconds, folder)


def over_grpc(
    port: int, seen: list[Observation], count: int, seconds: float, folder: Path
) -> dict[str, Any]:
    """A stream and a life each."""
    file = folder / "streams"
    requests = [grpc_request(o).hex() for o in seen]
    file.write_text("\n".join(json.dumps(requests[i % 4 :: 4]) for i in range(count)))
    script = Path(__file__).with_name("serving_grpc_load.py")
    command = [sys.executable, str(script), str(port), str(seconds), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr.strip().splitlines()[-1])
    return json.loads(done.stdout)


def over_lives(
    binary: bool, port: int, seen: list[Observation], name: str, seconds: float, folder: Path
) -> dict[str, Any]:
    """One connection whose requests tick 32 lives."""
    rows = [[seen[(i + tick) % len(seen)] for i in range(LIVES)] for tick in range(len(seen))]
    plan = [
        lives_request(binary, row, name, tick == 0) for tick, row in enumerate([rows[0], *rows])
    ]
    found = over_http(port, [plan], seconds, folder)
    return {**found, "ticks_per_s": LIVES * found["requests_per_s"]}


def sessions(request: Request, seen: list[Observation], count: int, name: str) -> list[list[bytes]]:
    """A plan for each of `count` sessions: begin, then go on for ever."""
    return [
        [
            request(seen[0], sequence_id=f"{name}-{i}", sequence_start=True),
            *(request(o, sequence_id=f"{name}-{i}") for o in seen[i % 4 :: 4]),
        ]
        for i in range(count)
    ]


def mlflow_plans(agent: OnnxAgent, seen: list[Observation], count: int) -> list[list[bytes]]:
    """The same ticks, with the state in the request: the clock goes round as it does in a life."""

    def request(observation: Observation, clock: int) -> bytes:
        state = agent.start(1)
        if agent.signature.clock:
            state[agent.signature.clock][:] = clock
        rows = {n: x[None].round(4).tolist() for n, x in observation.items() if x.dtype != bool}
        rows |= {n: x[None].tolist() for n, x in observation.items() if x.dtype == bool}
        rows |= {n: x.tolist() for n, x in state.items()}
        return http("POST", "/invocations", json.dumps({"inputs": rows}).encode())

    return [
        [request(o, i + clock) for clock, o in enumerate(seen[: 1 + len(seen) // 4])]
        for i in range(count)
    ]


class Raw:
    """ONNX Runtime and nothing else: a batch of lives, ticked."""

    def __init__(self, agent: OnnxAgent, seen: list[Observation], batch: int) -> None:
        self.agent = agent
        self.state = agent.start(batch)
        if agent.signature.clock:
            self.state[agent.signature.clock] = np.arange(batch)
        picked = [seen[i % len(seen)] for i in range(batch)]
        self.feeds = {name: np.stack([o[name] for o in picked]) for name in seen[0]}

    def tick(self) -> np.ndarray:
        values = self.agent.session.run(None, {**self.feeds, **self.state})
        named = dict(zip(self.agent.outputs, values, strict=True))
        self.state = {name: named[after] for name, after in self.agent.signature.states.items()}
        return named["action"]


def times(do: Callable[[], Any], seconds: float) -> list[float]:
    found, until = [], time.perf_counter() + seconds
    while (began := time.perf_counter()) < until:
        do()
        found.append(time.perf_counter() - began)
    return sorted(found)


def compare(path: Path, rounds: int, seconds: float) -> dict[str, Any]:
    agent = OnnxAgent(path)
    seen = observations(agent, 16)
    raw = {batch: Raw(agent, seen, batch) for batch in (1, 32)}
    client = Agent(path)
    numbers = itertools.count()
    found: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory() as name,
        mlflow_serve(path, Path(name)) as theirs,
        hamlet(path, "--grpc-port", "0") as (ours, ours_grpc, _),
    ):
        folder = Path(name)
        for _ in range(rounds):
            one: dict[str, Any] = {}
            for batch, alone in raw.items():
                t = times(alone.tick, seconds / 2)
                one[f"ort{batch}"] = {
                    "requests_per_s": batch * len(t) / sum(t),
                    "p50_ms": 1e3 * median(t),
                    "p99_ms": 1e3 * t[int(len(t) * 0.99)],
                }
            pairs = []
            for _ in range(10):  # in short turns: a ratio near 1 needs the same machine
                here = times(lambda: client.act(seen[0]), seconds / 40)
                there = times(raw[1].tick, seconds / 40)
                pairs.append(sum(here) / len(here) / (sum(there) / len(there)))
            one["client_over_ort"] = median(pairs)
            one["mlflow64"] = over_http(theirs, mlflow_plans(agent, seen, 64), seconds, folder)
            for kind, request in (("json", json_request), ("binary", binary_request)):
                for count in CONNECTIONS:
                    plans = sessions(request, seen, count, f"bench-{next(numbers)}")
                    one[f"{kind}{count}"] = over_http(ours, plans, seconds, folder)
            one["websocket64"] = over_websocket(ours, seen, 64, seconds, folder)
            one["grpc64"] = over_grpc(ours_grpc, seen, 64, seconds, folder)
            for kind in ("json", "binary"):
                life = f"bench-{next(numbers)}"
                binary = kind == "binary"
                one[f"lives32_{kind}"] = over_lives(binary, ours, seen, life, seconds, folder)
            found.append(one)
    return summed_up(found)


def summed_up(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds, printed and as one dict; ratios are taken within a round."""

    def middle(value: Callable[[dict[str, Any]], float]) -> float:
        return float(f"{median(value(one) for one in found):.4g}")

    def speed(one: dict[str, Any], name: str) -> float:
        return one[name]["requests_per_s"]

    result: dict[str, Any] = {
        "json64_over_mlflow": middle(lambda o: speed(o, "json64") / speed(o, "mlflow64")),
        "binary64_over_mlflow": middle(lambda o: speed(o, "binary64") / speed(o, "mlflow64")),
        "p99_64_over_ort32": middle(
            lambda o: max(o["json64"]["p99_ms"], o["binary64"]["p99_ms"]) / o["ort32"]["p99_ms"]
        ),
        "p50_1_ms": middle(lambda o: max(o["json1"]["p50_ms"], o["binary1"]["p50_ms"])),
        "client_over_ort": middle(lambda o: o["client_over_ort"]),
        "lives32_over_single": middle(
            lambda o: min(
                o[f"lives32_{kind}"]["ticks_per_s"] / speed(o, f"{kind}1")
                for kind in ("json", "binary")
            )
        ),
    }
    print(f"{'':>14} {'requests/s':>10} {'p50 ms':>8} {'p99 ms':>8}")
    for name in (n for n in found[0] if n != "client_over_ort"):
        row = [
            middle(lambda o, at=(name, key): o[at[0]][at[1]])  # type: ignore[misc]
            for key in ("requests_per_s", "p50_ms", "p99_ms")
        ]
        print(f"{name:>14} {row[0]:>10.0f} {row[1]:>8} {row[2]:>8}")
        result[name] = dict(zip(("requests_per_s", "p50_ms", "p99_ms"), row, strict=True))
    return result


# ------------------------------------------------------------------------------------------------
# Deployments


def another(path: Path, folder: Path) -> Path:
    """The same agent with other weights in its controller, as if trained a little longer."""
    import onnx
    from onnx import numpy_helper

    model = onnx.load(path)
    for weight in model.graph.initializer:
        values = numpy_helper.to_array(weight)
        if values.dtype == np.float32 and values.ndim == 2 and min(values.shape) > 1:
            weight.CopyFrom(numpy_helper.from_array(values * np.float32(1.05), weight.name))
    folder.mkdir(exist_ok=True)
    copy = folder / path.name
    onnx.save(model, copy)
    card = OnnxAgent(path).card
    extra = {k: card[k] for k in card if k not in ("file", "kind", "schema", "upstream", "pack")}
    write_card(copy, "agent", card["schema"], card["upstream"], card["pack"], extra)
    return copy


def put(source: Path, target: Path) -> None:
    """Replace a model and its card, as a deployment does: by renaming."""
    for name in (source.name, f"{source.name}.json"):
        shutil.copy(source.with_name(name), target.with_name(f"{name}.new"))
        os.replace(target.with_name(f"{name}.new"), target.with_name(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--agent", type=Path, default=Path("artifacts/agent.onnx"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    given = parser.parse_args()
    try:
        result = compare(given.agent, given.rounds, given.seconds)
        print("a plain GRU:")
        with tempfile.TemporaryDirectory() as folder:
            gru = write_gru(Path(folder) / "gru.onnx")
            result["gru"] = compare(gru, given.rounds, given.seconds)
    except HamletError as error:
        raise SystemExit(str(error)) from None
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
