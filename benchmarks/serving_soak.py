"""Does `hamlet serve` hold out: at 80 % of its peak, with nonsense, reloads and sudden ends.

    python -m benchmarks.serving_soak [--agent artifacts/agent.onnx] [--minutes 10]

1 % of the requests are malformed and another agent is deployed every 30 seconds; every action is
compared with raw ONNX Runtime. The last line is JSON and is also written to
benchmarks/results/serving_soak.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import threading
import urllib.request
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.serving import (
    RESULTS,
    Observation,
    another,
    hamlet,
    http,
    json_request,
    observations,
    put,
)
from benchmarks.serving_load import Talk, load
from hamlet.artifacts import HamletError
from hamlet.serving.agent import OnnxAgent

TICKS = 50  # of a life
LIVES = 100  # different ones
RELOAD_SECONDS = 30.0
MALFORMED = 100  # one request in so many
NAMELESS = "soak-........."


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
        with hamlet(served) as (port, _, process):
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
    parser.add_argument("--agent", type=Path, default=Path("artifacts/agent.onnx"))
    parser.add_argument("--minutes", type=float, default=10.0)
    given = parser.parse_args()
    try:
        result = soak(given.agent, given.minutes)
    except HamletError as error:
        raise SystemExit(str(error)) from None
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.with_stem("serving_soak").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
