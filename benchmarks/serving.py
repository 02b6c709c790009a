"""Speed of `hamlet serve` against raw ONNX Runtime and `mlflow models serve`, one model for all.

    python -m benchmarks.serving [--agent artifacts/agent.onnx] [--rounds 3] [--seconds 2]
    python -m benchmarks.serving soak [--minutes 10]

Every round measures everything once, so that what the machine does meanwhile meets all alike; the
ratios are those of the same round, their median counts. Both servers run with logs off on the same
machine as the load, MLflow with one thread for ONNX Runtime and one worker (its default). The last
line is JSON and is also written to benchmarks/results/serving.json.

`soak` runs the server at 80 % of its peak, with 1 % malformed requests and another agent every 30
seconds, and compares every action with raw ONNX Runtime; the last line is JSON too.
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.serving_load import Talk, load
from hamlet.artifacts import HamletError, write_card
from hamlet.serving.agent import NEXT, STATE, OnnxAgent
from hamlet.serving.client import Agent
from hamlet.serving.model import DATATYPES

RESULTS = Path(__file__).parent / "results" / "serving.json"
CONNECTIONS = (1, 16, 64, 256)
Observation = dict[str, np.ndarray]
Request = Callable[..., bytes]


# ------------------------------------------------------------------------------------------------
# Requests


def observations(agent: OnnxAgent, count: int, seed: int = 0) -> list[Observation]:
    """Random legal observations without a batch, numbers with four digits as people send them."""
    rng = np.random.default_rng(seed)

    def field(name: str, entry: Mapping[str, Any]) -> np.ndarray:
        shape, (low, high) = entry["shape"][1:], agent.card["limits"].get(name, (0, 1))
        if entry["dtype"] == "float32":
            return rng.uniform(max(low, -1), min(high, 1), shape).round(4).astype("float32")
        if name == "action_mask":
            return np.ones(shape, bool)
        return rng.integers(low, high, shape, endpoint=True).astype(entry["dtype"])

    inputs = {n: e for n, e in agent.inputs.items() if not n.startswith(STATE)}
    return [{n: field(n, e) for n, e in inputs.items()} for _ in range(count)]


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
def hamlet(agent: Path, *options: str) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """`hamlet serve`: its port and its process."""
    command = [sys.executable, "-c", "from hamlet.cli import app; app()", "serve", str(agent)]
    with subprocess.Popen(
        [*command, "--port", "0", *options], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        port = 0
        for line in process.stderr:
            told = json.loads(line) if line.startswith("{") else {"event": line}
            if told["event"] == "serving":
                port = int(told["url"].rpartition(":")[2])
                break
        else:
            raise SystemExit(f"hamlet serve ended: {line}")
        drained = threading.Thread(target=process.stderr.read)  # a full pipe would stop it
        drained.start()
        try:
            yield port, process
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

    from stages.register import _signature

    model = onnx.load(agent)
    mlflow.onnx.save_model(
        model,
        folder / "mlflow",
        signature=_signature(model),
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
    if found["statuses"].keys() != {"200"} or found["closed"]:
        raise SystemExit(f"not all requests were answered with 200: {found}")
    return found


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
        state = {
            name: np.zeros((1, *entry["shape"][1:]), entry["dtype"])
            for name, entry in agent.inputs.items()
            if name.startswith(STATE)
        }
        state["state_clock"][:] = clock
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
        self.state["state_clock"] = np.arange(batch)
        picked = [seen[i % len(seen)] for i in range(batch)]
        self.feeds = {name: np.stack([o[name] for o in picked]) for name in seen[0]}

    def tick(self) -> np.ndarray:
        values = self.agent.session.run(None, {**self.feeds, **self.state})
        named = dict(zip(self.agent.outputs, values, strict=True))
        self.state = {name: named[NEXT + name.removeprefix(STATE)] for name in self.state}
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
        hamlet(path) as (ours, _),
    ):
        folder = Path(name)
        for _ in range(rounds):
            one: dict[str, Any] = {}
            for batch, life in raw.items():
                t = times(life.tick, seconds / 2)
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
    }
    print(f"{'':>10} {'requests/s':>10} {'p50 ms':>8} {'p99 ms':>8}")
    for name in (n for n in found[0] if n != "client_over_ort"):
        row = [
            middle(lambda o, at=(name, key): o[at[0]][at[1]])  # type: ignore[misc]
            for key in ("requests_per_s", "p50_ms", "p99_ms")
        ]
        print(f"{name:>10} {row[0]:>10.0f} {row[1]:>8} {row[2]:>8}")
        result[name] = dict(zip(("requests_per_s", "p50_ms", "p99_ms"), row, strict=True))
    return result


# ------------------------------------------------------------------------------------------------
# Soak

TICKS = 50  # of a life
LIVES = 100  # different ones
RELOAD_SECONDS = 30.0
MALFORMED = 100  # one request in so many
NAMELESS = "soak-........."


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


def lives(agent: OnnxAgent, seen: list[Observation]) -> list[list[int]]:
    """The actions of LIVES lives by raw ONNX Runtime; life i has seed i, begins at seen[i]."""
    state = agent.start(LIVES)
    state["state_rng"] = np.arange(LIVES)
    actions = []
    for tick in range(TICKS):
        now = [seen[(i + tick) % len(seen)] for i in range(LIVES)]
        decision = agent.act({n: np.stack([o[n] for o in now]) for n in now[0]}, state)
        actions.append(decision.action.tolist())
        state = decision.state
    return [list(life) for life in zip(*actions, strict=True)]


class Judge:
    """Talks to the server as many sessions and compares every action with what it must be."""

    def __init__(self, seen: list[Observation], expected: dict[str, list[list[int]]]) -> None:
        self.seen, self.expected = seen, expected
        self.lives = self.ticks = self.malformed = 0
        self.wrong: list[str] = []
        self.versions: dict[str, int] = dict.fromkeys(expected, 0)
        self._names = itertools.count()
        self._turns = itertools.count(1)
        # Requests are prepared, with a name of the right length to be replaced, and so are answers.
        self._first = [
            [json_request(o, sequence_id=NAMELESS, sequence_start=True, seed=i) for o in seen]
            for i in range(LIVES)
        ]
        self._next = [json_request(o, sequence_id=NAMELESS) for o in seen]
        self._last = [json_request(o, sequence_id=NAMELESS, sequence_end=True) for o in seen]
        self._answers = {
            (
                f'{{"model_name":"hamlet-agent","model_version":"{version}","outputs":[{{"name":'
                f'"action","datatype":"INT64","shape":[1],"data":[{action}]}}]}}'
            ).encode(): (version, action)
            for version in expected
            for action in range(32)
        }

    def talk(self) -> Talk:
        while True:
            number = next(self._names)
            life, name = number % LIVES, b"soak-%09d" % number
            version = ""
            for tick in range(TICKS):
                while next(self._turns) % MALFORMED == 0:
                    response = yield self._nonsense(name.decode())
                    self.malformed += 1
                    if not response.startswith(b"HTTP/1.1 4"):
                        self.wrong.append(f"nonsense was answered with {response[:200]!r}")
                at = (life + tick) % len(self.seen)
                if tick == 0:
                    request = self._first[life][at]
                else:
                    request = (self._last if tick == TICKS - 1 else self._next)[at]
                response = yield request.replace(NAMELESS.encode(), name)
                answer = self._answers.get(response[response.find(b"\r\n\r\n") + 4 :])
                if answer is None or not response.startswith(b"HTTP/1.1 200"):
                    self.wrong.append(f"{name!r} tick {tick}: {response[:300]!r}")
                    break
                version = version or answer[0]
                if answer != (version, self.expected[version][life][tick]):
                    self.wrong.append(f"{name!r} tick {tick}: {answer}, begun on {version}")
                self.ticks += 1
            self.lives += 1
            self.versions[version] = self.versions.get(version, 0) + 1

    def _nonsense(self, name: str) -> bytes:
        kind = self.malformed % 5
        good = json_request(self.seen[0], sequence_id=name)
        if kind == 0:
            return http("POST", "/v2/models/hamlet-agent/infer", b'{"inputs": [')
        if kind == 1:
            return json_request({**self.seen[0], "view": np.full((5, 5), 99, "uint8")},
                                sequence_id=f"{name}-bad", sequence_start=True)  # fmt: skip
        if kind == 2:
            return json_request(self.seen[0], sequence_id=f"{name}-unknown")
        if kind == 3:
            return good.replace(b"UINT8", b"INT32")
        return http("POST", "/act", b"[]")


def memory_mb(pid: int) -> float:
    import psutil

    return psutil.Process(pid).memory_info().rss / 1e6


def soak(path: Path, minutes: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        versions = {"a": path, "b": another(path, folder / "b")}
        served = folder / "served" / path.name
        served.parent.mkdir()
        put(path, served)
        agents = [OnnxAgent(p) for p in versions.values()]
        seen = observations(agents[0], 16)
        expected = {a.card["sha256"][:12]: lives(a, seen) for a in agents}
        if expected[agents[0].card["sha256"][:12]] == expected[agents[1].card["sha256"][:12]]:
            raise SystemExit("both agents act alike: a mixed version could not be seen")
        with hamlet(served) as (port, process):
            judge = Judge(seen, expected)
            peak = load("127.0.0.1", port, [judge.talk() for _ in range(64)], 8.0)
            rate = 0.8 * peak["requests_per_s"]
            print(f"peak {peak['requests_per_s']:.0f} requests/s, soak at {rate:.0f}", flush=True)
            over = threading.Event()
            memory: list[float] = []

            def reload() -> None:
                for turn in itertools.cycle(("b", "a")):
                    for _ in range(int(RELOAD_SECONDS)):
                        if over.wait(1.0):
                            return
                        memory.append(memory_mb(process.pid))
                    put(versions[turn], served)

            thread = threading.Thread(target=reload)
            thread.start()
            judge = Judge(seen, expected)
            judge._names = itertools.count(10_000_000)
            talks = [judge.talk() for _ in range(64)]
            try:
                found = load("127.0.0.1", port, talks, 60 * minutes, rate)
            finally:
                over.set()
                thread.join()
            text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
        counted = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
        early = memory[len(memory) // 4 : len(memory) // 2]  # after the first reloads
        late = memory[-len(early) :]
        result = {
            **found,
            "lives": judge.lives,
            "ticks": judge.ticks,
            "malformed": judge.malformed,
            "wrong": len(judge.wrong),
            "lives_by_version": judge.versions,
            "reloads": int(counted['hamlet_reloads_total{result="done"}']),
            "reloads_failed": int(counted['hamlet_reloads_total{result="failed"}']),
            "memory_mb": {"early": median(early), "late": median(late), "most": max(memory)},
            "memory_mb_every_30_s": [round(x, 1) for x in memory[::30]],
        }
        for line in judge.wrong[:10]:
            print(line)
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="?", choices=["compare", "soak"], default="compare")
    parser.add_argument("--agent", type=Path, default=Path("artifacts/agent.onnx"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--minutes", type=float, default=10.0)
    given = parser.parse_args()
    try:
        if given.what == "soak":
            result = soak(given.agent, given.minutes)
        else:
            result = compare(given.agent, given.rounds, given.seconds)
    except HamletError as error:
        raise SystemExit(str(error)) from None
    name = "serving" if given.what == "compare" else "serving_soak"
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.with_stem(name).write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
