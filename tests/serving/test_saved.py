"""Sessions in a state file, and what is left of them when the process is killed."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from pilot import request, tick
from served import SAVE_SECONDS, Served

from hamlet.serving import saved
from hamlet.serving.agent import OnnxAgent
from hamlet.serving.engine import Engine
from hamlet.serving.metrics import Metrics


def until_saved(file: Path) -> None:
    """Wait for a write, and then as long as the next takes at most."""
    until, size = (
        time.monotonic() + 2 * SAVE_SECONDS + 1,
        file.stat().st_size if file.exists() else 0,
    )
    while time.monotonic() < until and (not file.exists() or file.stat().st_size == size):
        time.sleep(0.05)
    time.sleep(SAVE_SECONDS + 0.5)


def kill(server: Served) -> None:
    server.process.kill()
    server.process.wait(30)


def test_kill_loses_at_most_what_was_not_saved_yet(policy, rows, expected, tmp_path):
    """Every life goes on from where it was saved, never from another's state; what was answered
    before and is asked again is not ticked again."""
    file = tmp_path / "lives"
    options = ("--state-file", str(file))
    names = [f"life {i}" for i in range(12)]
    with Served(policy, *options) as server:
        for at in range(4):
            for i, name in enumerate(names):
                # Life i sees the rows from i on: no two are alike.
                answer = tick(server, rows[i + at], name, sequence_start=at == 0, id=f"r{at}")
                assert answer.status == 200
        until_saved(file)
        tick(server, rows[4], names[0])  # these two may be lost
        tick(server, rows[9], "lost", sequence_start=True)
        kill(server)
    with Served(policy, *options) as server:
        assert server.first("sessions restored")["sessions"] in (12, 13)
        alike = lives_of(policy, rows)
        for i, name in enumerate(names[1:], 1):
            # Its last request, which was answered: not a tick.
            assert tick(server, rows[i + 3], name, id="r3").action == alike(i, 4)
            assert tick(server, rows[i + 4], name).action == alike(i, 5)
        # The first one is at its fourth tick, or at its fifth.
        went_on = tick(server, rows[5], names[0]).action
        assert went_on in (skipping(policy, rows, 4), alike(0, 6))


SLOWLY = """
import sys, threading, time
from hamlet.serving import saved
write, ending = saved.StateFile.write, threading.Event()
def slowly(self, made):
    if threading.current_thread() is threading.main_thread():
        write(self, made)
        ending.set()
        return
    if len(made) > 1:
        print('{"event": "writing"}', file=sys.stderr, flush=True)
        ending.wait(2)
    write(self, made)
saved.StateFile.write = slowly
"""


def test_a_write_that_has_begun_ends_before_the_last_one(policy, rows, tmp_path):
    """Or else what is older would lie behind what is newer, or the one where the other lies."""
    from pilot import life

    def after(*seen):
        return life(policy, rows[list(seen)])[-1]

    asked = next(i for i in range(2, len(rows)) if after(0, 1, i) != after(0, i))
    options = ("--state-file", str(tmp_path / "lives"))
    with Served(policy, *options, before=SLOWLY) as server:
        tick(server, rows[0], "one", sequence_start=True)
        server.wait("writing")
        tick(server, rows[1], "one")
        tick(server, rows[5], "another", sequence_start=True)
        assert server.stop() == 0
    with Served(policy, *options) as server:
        assert server.first("sessions restored")["sessions"] == 2
        assert tick(server, rows[asked], "one").action == after(0, 1, asked)
        assert tick(server, rows[6], "another").action == after(5, 6)


def lives_of(policy, rows):
    """(i, n) -> the n-th action of a life that sees the rows from i on, by onnxruntime alone."""
    from pilot import life

    return lambda i, n: life(policy, rows[i : i + n])[-1]


def skipping(policy, rows, lost: int) -> int:
    from pilot import life

    return life(policy, np.delete(rows[:6], lost, axis=0))[-1]


def test_a_file_cut_off_anywhere_holds_whole_lives(policy, tmp_path):
    """A writer that is killed at any byte: the file opens again, and each life is whole."""
    file, names = tmp_path / "lives", [f"life {i}" for i in range(5)]
    engine = Engine(Metrics(), 100, 600.0, "masked")
    engine.install(engine.prepare(OnnxAgent(policy), "1"))
    store = saved.StateFile(engine, file, print)
    model = engine.current
    states = {}
    for i, name in enumerate(names):
        session = engine.open(name)
        model.slab["h"][session.slot] = states[name] = np.full(16, i + 1, np.float32)
        session.ticks = 1
    store.write(store.changes())
    whole = file.stat().st_size
    for name in names:
        session = engine.sessions[name]
        model.slab["h"][session.slot] = -states[name]
        session.ticks = 2
    store.write(store.changes())
    data = file.read_bytes()
    one = (len(data) - whole) // len(names)
    engine.shutdown()
    for cut in [*range(whole, len(data), one // 4), len(data)]:
        place = tmp_path / str(cut)
        place.mkdir()
        (place / "lives").write_bytes(data[:cut])
        told: list[str] = []
        again = Engine(Metrics(), 100, 600.0, "masked")
        again.install(again.prepare(OnnxAgent(policy), "1"))
        log = partial(lambda told, event, **_: told.append(event), told)
        restored = saved.StateFile(again, place / "lives", log)
        assert restored.restore() == len(names)
        assert ("sessions cut" in told) == ((cut - whole) % one != 0)
        done = (cut - whole) // one
        for i, name in enumerate(names):
            kept = again.current.slab["h"][again.sessions[name].slot]
            np.testing.assert_array_equal(kept, -states[name] if i < done else states[name])
        # What follows is appended behind the whole frames.
        session = again.sessions[names[0]]
        session.ticks += 1
        restored.write(restored.changes())
        found = [*saved.frames((place / "lives").read_bytes(), len(saved.MAGIC))]
        assert found[-1].head["ticks"] == session.ticks
        assert sum(f.size for f in found) + len(saved.MAGIC) == (place / "lives").stat().st_size
        again.shutdown()
        shutil.rmtree(place)


def test_the_file_is_bounded(policy, tmp_path, monkeypatch):
    """Whatever comes and goes, the file is at most as large as twice what lives, and some."""
    monkeypatch.setattr(saved, "SPARE", 20_000)
    file = tmp_path / "lives"
    engine = Engine(Metrics(), 100, 600.0, "masked")
    engine.install(engine.prepare(OnnxAgent(policy), "1"))
    store = saved.StateFile(engine, file, print)
    sizes, most = [], 0
    for turn in range(300):
        for i in range(10):
            name = f"{turn // 7} {i}"  # others every seven turns
            session = engine.sessions.get(name) or engine.open(name)
            session.ticks += 1
        for name in [n for n in engine.sessions if not n.startswith(f"{turn // 7} ")]:
            engine.close(engine.sessions[name], "ended")
        made = store.changes()
        store.write(made)
        most = max(most, sum(map(len, made)))
        sizes.append(file.stat().st_size)
    live = sum(store.session_bytes.values()) + sum(store.agent_bytes.values())
    assert max(sizes) <= 2 * live + saved.SPARE + most
    assert sum(b < a for a, b in pairwise(sizes)) > 3  # it was written anew
    assert set(store.session_bytes) == set(engine.sessions)
    engine.shutdown()


def test_two_servers_do_not_share_a_file(policy, rows, tmp_path):
    file = tmp_path / "lives"
    told = pytest.raises(AssertionError, match="is another server's")
    with Served(policy, "--state-file", str(file)), told:
        Served(policy, "--state-file", str(file))
    with Served(policy, "--state-file", str(file)) as server:  # the lock went with its process
        assert tick(server, rows[0], "a", sequence_start=True).status == 200


def test_the_killed_server_s_lives_go_on_at_another(policy, rows, expected, tmp_path):
    """The other server takes the file of the one that was killed."""
    file = tmp_path / "lives"
    with Served(policy, "--state-file", str(file)) as server:
        for at in range(3):
            assert tick(server, rows[at], "moved", sequence_start=at == 0).status == 200
        until_saved(file)
        kill(server)
    with Served(policy, "--state-file", str(file), "--max-sessions", "5") as server:
        got = [tick(server, rows[at], "moved").action for at in range(3, 10)]
        assert got == expected[3:10]
        assert server.ask("POST", "/v2/models/masked/infer", request(rows[0], "x")).status == 404


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files as Linux does")
def test_a_full_disk_for_the_sessions(policy, rows, tmp_path):
    """The old file stays, the end is one line and exit code 1; the limit of a file's size stands in
    for a full disk."""
    file = tmp_path / "sessions.npz"
    options = ("--state-file", str(file))
    with Served(policy, *options) as server:
        assert tick(server, rows[0], "kept", sequence_start=True).status == 200
        assert server.stop() == 0
    before = file.read_bytes()
    limit = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, {resource.RLIM_INFINITY}))"
    )
    with Served(policy, *options, before=limit) as server:
        assert tick(server, rows[1], "kept").status == 200
        assert server.stop() == 1
        assert "disk is full" in server.log[-1]["text"]
    assert file.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == [".sessions.npz.lock", "sessions.npz"]


def test_a_state_file_that_is_none(policy, tmp_path):
    file = tmp_path / "sessions.npz"
    for data in (b"", b"PK\x03\x04 nonsense", b"x" * 1000):
        file.write_bytes(data)
        with pytest.raises(AssertionError, match="does not hold sessions"):
            Served(policy, "--state-file", str(file))
        assert file.read_bytes() == data


def test_ctrl_c_is_an_orderly_end_too(policy, rows, tmp_path):
    file = tmp_path / "sessions.npz"
    with Served(policy, "--state-file", str(file)) as server:
        tick(server, rows[0], "kept", sequence_start=True)
        assert server.stop(signal.SIGINT) == 0
    assert file.exists()
