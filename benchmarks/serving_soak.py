"""Does `hamlet serve` hold out: at 80 % of its peak, with nonsense, reloads and sudden ends.

    python -m benchmarks.serving_soak [--agent artifacts/agent.onnx] [--minutes 10]

1 % of the requests are malformed, another agent is deployed every 30 seconds, and every minute the
server is killed (SIGKILL) under load and started again with the same state file. Every action is
compared with raw ONNX Runtime. After a kill the client asks for each life how far the server knows
it, and goes on from there; what was answered before and is not known any more is lost, and
`lost_s` says how long before the kill that was at most. The last line is JSON and is also written
to benchmarks/results/serving_soak.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

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
from hamlet.serving.saved import frames
from hamlet.serving.server import SAVE_SECONDS

TICKS = 100  # of a life
LIVES = 100  # different ones
OPEN = 640  # at a time
CLIENTS = 64  # connections
RELOAD_SECONDS = 30
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


class Life:
    """A life as its client knows it."""

    def __init__(self, number: int) -> None:
        self.number, self.name = number % LIVES, b"soak-%09d" % number
        self.version = ""
        self.answered: list[float] = []  # when, tick by tick

    @property
    def tick(self) -> int:
        return len(self.answered)


class Judge:
    """Talks to the server as many sessions and compares every action with what it must be.

    Attributes:
        open: lives that wait for a connection, whoever waits longest first.
        broken: those whose request was not answered.
    """

    def __init__(self, seen: list[Observation], expected: dict[str, list[list[int]]]) -> None:
        self.seen, self.expected = seen, expected
        self.ended = self.ticks = self.malformed = self.lost = 0
        self.lost_s = 0.0
        self.wrong: list[str] = []
        self.versions: dict[str, int] = dict.fromkeys(expected, 0)
        self._numbers, self._turns = itertools.count(), itertools.count(1)
        self.open = deque(Life(next(self._numbers)) for _ in range(OPEN))
        self.broken: list[Life] = []
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
        """A connection: a tick of whichever life waits longest, again and again."""
        while True:
            life = self.open.popleft()
            try:
                while next(self._turns) % MALFORMED == 0:
                    response = yield self._nonsense(life.name.decode())
                    self.malformed += 1
                    if not response.startswith(b"HTTP/1.1 4"):
                        self.wrong.append(f"nonsense was answered with {response[:200]!r}")
                response = yield self._request(life)
            except GeneratorExit:  # the server closed the connection instead of answering
                self.broken.append(life)
                return
            self._look(life, response)
            if life.tick == TICKS:
                self.ended += 1
                self.versions[life.version] += 1
                life = Life(next(self._numbers))
            self.open.append(life)

    def _request(self, life: Life) -> bytes:
        at = (life.number + life.tick) % len(self.seen)
        if life.tick == 0:
            request = self._first[life.number][at]
        else:
            request = (self._last if life.tick == TICKS - 1 else self._next)[at]
        return request.replace(NAMELESS.encode(), life.name)

    def _look(self, life: Life, response: bytes) -> None:
        told = f"{life.name!r} tick {life.tick}: "
        answer = self._answers.get(response[response.find(b"\r\n\r\n") + 4 :])
        if answer is None or not response.startswith(b"HTTP/1.1 200"):
            self.wrong.append(f"{told}{response[:300]!r}")
            life.version, life.answered = "", []  # begin it anew
            return
        life.version = life.version or answer[0]
        if answer != (life.version, self.expected[life.version][life.number][life.tick]):
            self.wrong.append(f"{told}{answer}, begun on {life.version}")
        life.answered.append(time.monotonic())
        self.ticks += 1

    def recover(self, port: int, killed: float) -> None:
        """Ask the server that was started again how far it knows every life."""
        lives, self.broken = [*self.open, *self.broken], []
        self.open.clear()
        for life in lives:
            known, version = self._known(port, life.name.decode())
            if known is None and life.tick == TICKS - 1:
                life = Life(next(self._numbers))  # its last request was done, and not answered
            elif (known or 0) > life.tick + 1:
                self.wrong.append(f"{life.name!r} had {known} ticks of {life.tick}")
            else:
                self._goes_on(life, known or 0, version, killed)
            self.open.append(life)

    def _goes_on(self, life: Life, known: int, version: str, killed: float) -> None:
        if known and life.version and version != life.version:
            self.wrong.append(f"{life.name!r} came back on {version}, was on {life.version}")
        if known < life.tick:
            self.lost += life.tick - known
            self.lost_s = max(self.lost_s, killed - life.answered[known])
            del life.answered[known:]
        elif known > life.tick:  # done, and not answered
            life.answered.append(killed)
        life.version = version

    @staticmethod
    def _known(port: int, name: str) -> tuple[int | None, str]:
        try:
            url = f"http://127.0.0.1:{port}/v2/sessions/{name}"
            with urllib.request.urlopen(url, timeout=30) as answer:
                (found,) = frames(answer.read())
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            return None, ""
        return found.head["ticks"], found.head["sha"][:12]

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


class Deployments(threading.Thread):
    """Puts the other agent where the served one is, again and again; looks at memory meanwhile."""

    def __init__(self, versions: list[Path], served: Path) -> None:
        super().__init__()
        self.versions, self.served = itertools.cycle(versions), served
        self.over = threading.Event()
        self.pid: int | None = None
        self.memory: list[float] = []  # MB of the process that runs, every second

    def run(self) -> None:
        for second in itertools.count(1):
            if self.over.wait(1.0):
                return
            with suppress(psutil.Error):  # between two processes
                if self.pid is not None:
                    self.memory.append(psutil.Process(self.pid).memory_info().rss / 1e6)
            if second % RELOAD_SECONDS == 0:
                put(next(self.versions), self.served)


def soak(path: Path, minutes: float, kill_seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        other = another(path, folder / "b")
        served = folder / "served" / path.name
        served.parent.mkdir()
        put(path, served)
        agents = [OnnxAgent(p) for p in (path, other)]
        seen = observations(agents[0], 16)
        expected = {a.card["sha256"][:12]: lives(a, seen) for a in agents}
        if len({str(actions) for actions in expected.values()}) < 2:
            raise SystemExit("both agents act alike: a mixed version could not be seen")
        with hamlet(served) as (port, _, _process):
            judge = Judge(seen, expected)
            peak = load("127.0.0.1", port, [judge.talk() for _ in range(CLIENTS)], 8.0)
        rate = 0.8 * peak["requests_per_s"]
        print(f"peak {peak['requests_per_s']:.0f} requests/s, soak at {rate:.0f}", flush=True)
        deployments = Deployments([other, path], served)
        deployments.start()
        judge = Judge(seen, expected)
        try:
            place = Place(served, folder / "lives", deployments, rate)
            turns = _turns(judge, place, minutes, kill_seconds)
        finally:
            deployments.over.set()
            deployments.join()
        for line in judge.wrong[:10]:
            print(line)
        return {
            "peak_requests_per_s": peak["requests_per_s"],
            "requests_per_s": median(turn["requests_per_s"] for turn in turns),
            "p50_ms": median(turn["p50_ms"] for turn in turns),
            "p99_ms": median(turn["p99_ms"] for turn in turns),
            "lives": judge.ended,
            "ticks": judge.ticks,
            "malformed": judge.malformed,
            "wrong": len(judge.wrong),
            "lives_by_version": judge.versions,
            "kills": len(turns) - 1,
            "saved_every_s": SAVE_SECONDS,
            "lost_s": judge.lost_s,
            "lost_ticks": judge.lost,
            "reloads": sum(turn["reloads"] for turn in turns),
            "reloads_failed": sum(turn["reloads_failed"] for turn in turns),
            "memory_mb": {
                "of_each_process": [turn["memory_mb"] for turn in turns],
                "most": max(deployments.memory, default=None),
            },
            "state_file_mb": [turn["state_file_mb"] for turn in turns],
        }


@dataclass
class Place:
    """Where the soak runs: the served agent, the state file, who deploys, requests per second."""

    served: Path
    file: Path
    deployments: Deployments
    rate: float


def _turns(judge: Judge, place: Place, minutes: float, kill_seconds: float) -> list[dict[str, Any]]:
    """One process after another; all but the last are killed."""
    until, killed = time.monotonic() + 60 * minutes, 0.0
    turns: list[dict[str, Any]] = []
    while (left := until - time.monotonic()) > 1:
        with hamlet(place.served, "--state-file", str(place.file)) as (port, _, process):
            if turns:
                judge.recover(port, killed)
            turns.append(_turn(judge, place, port, process, (left, kill_seconds)))
            killed = turns[-1].pop("killed")
        told = turns[-1] | {"state_file_mb": place.file.stat().st_size / 1e6}
        turns[-1] = told
        print(
            f"{len(turns)}: {told['requests_per_s']:.0f} requests/s, {told['memory_mb']:.0f} MB, "
            f"{len(judge.wrong)} wrong, lost {judge.lost} ticks of {judge.lost_s:.2f} s at most",
            flush=True,
        )
    return turns


def _turn(
    judge: Judge, place: Place, port: int, process: Any, seconds: tuple[float, float]
) -> dict[str, Any]:
    """One process: load until it is killed, or until the end."""
    left, kill_seconds = seconds
    deployments, counted, killed = place.deployments, {}, [0.0]
    deployments.pid, before = process.pid, len(deployments.memory)

    def kill() -> None:
        killed[0] = time.monotonic()
        process.kill()

    timers = [threading.Timer(min(left, kill_seconds) - 1, lambda: counted.update(_counts(port)))]
    if left > kill_seconds:
        timers.append(threading.Timer(kill_seconds, kill))
    for timer in timers:
        timer.start()
    talks = [judge.talk() for _ in range(CLIENTS)]
    # Until all connections are broken, or the end.
    found = load("127.0.0.1", port, talks, min(left, kill_seconds + 30), place.rate)
    for timer in timers:
        timer.join()
    memory = deployments.memory[before:]
    late = median(memory[len(memory) // 2 :]) if memory else 0.0
    return {**found, **counted, "memory_mb": late, "killed": killed[0]}


def _counts(port: int) -> dict[str, int]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    told = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    return {
        "reloads": int(float(told['hamlet_reloads_total{result="done"}'])),
        "reloads_failed": int(float(told['hamlet_reloads_total{result="failed"}'])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--agent", type=Path, default=Path("artifacts/agent.onnx"))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--kill-seconds", type=float, default=60.0, help="inf: never")
    given = parser.parse_args()
    try:
        result = soak(given.agent, given.minutes, given.kill_seconds)
    except HamletError as error:
        raise SystemExit(str(error)) from None
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.with_stem("serving_soak").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
