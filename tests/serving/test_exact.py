"""The server's actions are raw ONNX Runtime's, whatever is batched, restarted or reloaded."""

from __future__ import annotations

import random
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from served import Served, action_of, lives_by_raw_onnxruntime

from benchmarks.serving import binary_request, json_request, put
from benchmarks.serving_load import load
from hamlet.serving.agent import OnnxAgent


def test_a_row_is_the_same_bits_in_every_batch(agent, seen):
    """All outputs of 64 agents in the middle of a life, together and in random company."""
    player = OnnxAgent(agent)
    rng = np.random.default_rng(0)
    state = player.start(64)
    state["state_clock"] = np.arange(64)
    for tick in range(12):
        rows = [seen[(17 * i + tick) % len(seen)] for i in range(64)]
        feeds = {n: np.stack([row[n] for row in rows]) for n in rows[0]} | state
        together = player.session.run(None, feeds)
        for size in (1, 1, 2, 3, 5, 7, 8, 13, 16, 31, 32, 63):
            some = rng.permutation(64)[:size]
            apart = player.session.run(None, {n: x[some] for n, x in feeds.items()})
            for name, ours, theirs in zip(player.outputs, apart, together, strict=True):
                np.testing.assert_array_equal(ours, theirs[some], err_msg=f"{name}, batch {size}")
        named = dict(zip(player.outputs, together, strict=True))
        state = {name: named["next_" + name.removeprefix("state_")] for name in state}


def test_what_is_imagined_by_some_is_what_pytorch_imagines_for_all(mind, agent, seen):
    """The branch of the graph equals the module at every mix of those who deliberate."""
    import torch

    mind, inputs = mind
    player = OnnxAgent(agent)
    for batch in (1, 7, 64):
        state = player.start(batch)
        for clocks in (np.zeros, np.ones, lambda n: np.arange(n)):
            state["state_clock"] = clocks(batch).astype(np.int64)
            rows = [seen[(31 * i) % len(seen)] for i in range(batch)]
            feeds = {n: np.stack([row[n] for row in rows]) for n in rows[0]} | state
            got = player.session.run(None, feeds)
            want = mind(*(torch.from_numpy(feeds[name]) for name in inputs))
            for name, ours, theirs in zip(player.outputs, got, want, strict=True):
                theirs = theirs.numpy()
                if ours.dtype == np.float32:
                    np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=1e-4, err_msg=name)
                else:
                    np.testing.assert_array_equal(ours, theirs, err_msg=name)


class Crowd:
    """Sessions that live side by side; each goes on wherever a connection is free.

    Attributes:
        actions: int64 [T, S], -1 where no answer came yet.
        versions: of each session, as its first answer said.
    """

    def __init__(self, seen, sessions: int, ticks: int, seed: int) -> None:
        self.seen, self.ticks = seen, ticks
        self.actions = np.full((ticks, sessions), -1)
        self.versions: list[str | None] = [None] * sessions
        self.at = [0] * sessions
        self.free = list(range(sessions))
        self.random = random.Random(seed)
        self.answered, self.unanswered, self.pause_at = 0, 0, ticks * sessions
        self.mixed: list[str] = []

    def observation(self, session: int, tick: int):
        return self.seen[(37 * session + tick) % len(self.seen)]

    def talk(self):
        """A connection that takes a random free session for one tick, again and again."""
        while self.free and self.answered < self.pause_at:
            index = self.random.randrange(len(self.free))
            self.free[index], self.free[-1] = self.free[-1], self.free[index]
            session = self.free.pop()
            tick = self.at[session]
            request = self.random.choice((json_request, binary_request))
            more = {"seed": session} if tick == 0 else {}
            asked = request(
                self.observation(session, tick), sequence_id=f"crowd-{session}",
                sequence_start=tick == 0, sequence_end=tick == self.ticks - 1, **more,
            )  # fmt: skip
            try:
                response = yield asked
            except GeneratorExit:  # the server closed the connection instead of answering
                self.free.append(session)
                self.unanswered += 1
                return
            action, version = action_of(response)
            self.answered += 1
            if tick and version != self.versions[session]:
                self.mixed.append(f"session {session} moved to {version} at tick {tick}")
            self.versions[session] = version
            self.actions[tick, session] = action
            self.at[session] += 1
            if self.at[session] < self.ticks:
                self.free.append(session)

    def live(self, port: int, connections: int, until: int) -> None:
        """Go on until so many answers came."""
        self.pause_at = until
        load("127.0.0.1", port, [self.talk() for _ in range(connections)], 600)


def compare(crowd: Crowd, agents: list[Path]) -> Counter[str | None]:
    """Zero differences from raw ONNX Runtime; returns the sessions by version."""
    assert not crowd.mixed
    sessions = range(crowd.actions.shape[1])
    batches = [[crowd.observation(s, t) for s in sessions] for t in range(crowd.ticks)]
    for path in agents:
        version = OnnxAgent(path).card["sha256"][:12]
        expected = lives_by_raw_onnxruntime(path, batches, list(sessions))
        mine = [s for s in sessions if crowd.versions[s] == version]
        np.testing.assert_array_equal(crowd.actions[:, mine], expected[:, mine])
        for s in mine[:3]:  # and at batch 1
            alone = lives_by_raw_onnxruntime(path, [[rows[s]] for rows in batches], [s])
            np.testing.assert_array_equal(crowd.actions[:, s], alone[:, 0])
    return Counter(crowd.versions)


@pytest.mark.parametrize(
    ("sessions", "ticks"), [(60, 20), pytest.param(300, 60, marks=pytest.mark.slow)]
)
def test_actions_are_those_of_raw_onnxruntime(agent, other, seen, tmp_path, sessions, ticks):
    """Interleaved sessions over changing numbers of connections, two restarts and a reload."""
    served = tmp_path / "served" / agent.name
    served.parent.mkdir()
    put(agent, served)
    crowd = Crowd(seen, sessions, ticks, seed=1)
    crowd.free = list(range(sessions // 2))  # the other half begins after the reload
    total, options = sessions * ticks, ("--state-file", str(tmp_path / "sessions.npz"))
    with Served(served, *options) as server:
        crowd.live(server.port, 48, total // 8)
        assert server.stop() == 0
    with Served(served, *options) as server:
        crowd.live(server.port, 3, total // 6)
        under_load = threading.Thread(target=put, args=(other, served))
        under_load.start()
        crowd.live(server.port, 24, total // 4)
        under_load.join()
        server.wait("loaded", 30)
        crowd.free += range(sessions // 2, sessions)
        crowd.live(server.port, 64, total // 2)
        assert server.stop() == 0
        assert server.log[-2]["event"] == "sessions saved"
    with Served(served, *options) as server:
        crowd.live(server.port, 17, total)
        assert server.metric("hamlet_sessions_opened_total") == 0  # all had begun before
    assert crowd.answered == total
    by_version = compare(crowd, [agent, other])
    assert min(by_version.values()) == sessions // 2
    assert len(np.unique(crowd.actions)) > 3


def test_a_file_replaced_under_load_is_taken_up_and_sessions_stay(agent, other, seen, tmp_path):
    served = tmp_path / agent.name
    put(agent, served)
    first, second = (OnnxAgent(p).card["sha256"][:12] for p in (agent, other))
    with Served(served) as server:
        assert server.tick(seen[0], "old", sequence_start=True).json["model_version"] == first
        put(other, served)
        assert server.wait("loaded", 30)["version"] == second
        assert server.tick(seen[1], "old").json["model_version"] == first
        assert server.tick(seen[0], "new", sequence_start=True).json["model_version"] == second
        put(agent, served)  # back again
        assert server.wait("loaded", 30)["version"] == first
        assert server.tick(seen[1], "new").json["model_version"] == second
        assert server.tick(seen[1], "new", sequence_end=True).json["model_version"] == second
        assert server.tick(seen[0], "newer", sequence_start=True).json["model_version"] == first
        versions = server.ask("GET", "/v2/models/hamlet-agent").json["versions"]
        assert versions == [first]  # nobody is on the other one any more


def test_sigterm_under_load_loses_nothing(agent, seen, tmp_path):
    """What was answered was done and what was not was not: asked again, it is no tick too many."""
    crowd = Crowd(seen, 40, 100, seed=2)
    options = ("--state-file", str(tmp_path / "sessions.npz"))
    with Served(agent, *options) as server:
        timer = threading.Timer(0.3, server.process.terminate)
        timer.start()
        crowd.live(server.port, 32, 40 * 100)
        assert server.stop() == 0
    assert crowd.unanswered, "all was done before the signal came"
    assert crowd.answered < 40 * 100
    with Served(agent, *options) as server:
        crowd.live(server.port, 32, 40 * 100)
    assert crowd.answered == 40 * 100
    compare(crowd, [agent])
