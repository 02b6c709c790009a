"""A training in an own world that is stopped goes on from where it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from itertools import count
from pathlib import Path

import pytest
import torch
from copied_repo import warm
from own_worlds import Counting, Plain
from test_own_learning import recorded

from hamlet.learning.checkpoint import Checkpoint
from hamlet.own.params import PerceptionParams, PolicyParams, SocialParams, WorldModelParams
from hamlet.own.train_perception import train_perception
from hamlet.own.train_policy import train_policy
from hamlet.own.train_social import train_social
from hamlet.own.train_world_model import train_world_model
from hamlet.worlds.contract import Field, WorldShape
from hamlet.worlds.gymnasium_world import GymnasiumWorld
from hamlet.worlds.lanes import Lanes

ROOT = Path(__file__).parents[2]
STEPS, STOP = 7, 4


class Stopped(Exception):
    pass


class StopsAt(Plain):
    """A log that ends the training before a step, and notes where it begins."""

    def __init__(self, stop=None):
        self.stop, self.start = stop, None

    def steps(self, total, start):
        self.start = start
        for step in range(start, total):
            if step == self.stop:
                raise Stopped
            yield step


@pytest.fixture(autouse=True)
def always_saved(monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(Checkpoint.__init__, "__defaults__", (0.0,))


def counting():
    return GymnasiumWorld(Counting(5), "counting")


def weights(file, log):
    """Of A, B and C after a training each."""
    shape, data = recorded(counting, 20, 8)
    params = PerceptionParams(hidden=8, steps=STEPS, chunk=8)
    a, heads = train_perception(shape, data, params, 0, file / "a.pt", log)
    sizes = data["action"].shape
    rng = torch.Generator().manual_seed(5)
    seen = {
        name: torch.randn(*sizes, 3, generator=rng)
        for name in ("features", "belief", "next_features", "next_belief")
    }
    return shape, data, seen, [a, heads]


def model_b(shape, data, seen, file, log):
    from hamlet.own.data import Believed

    believed = Believed(*(seen[name] for name in Believed._fields))
    params = WorldModelParams(members=2, hidden=8, steps=STEPS, batch=16)
    both = (data, believed)
    return [train_world_model(shape, both, both, params, 0.9, 0, file, log)[0]]


def model_c(shape, data, seen, file, log):
    two = WorldShape("two", (Field("x", "vector", (3,), "float32"),), ("a", "b"), ("l", "r"),
                     (2, 2), False)  # fmt: skip
    played = {**seen, "action": data["action"] % 2, "alive": data["alive"]}
    params = SocialParams(hidden=8, steps=STEPS, batch=16)
    return [train_social(two, played, params, 0, file, log)[0]]


def values(modules) -> list[torch.Tensor]:
    return [x for module in modules for x in module.state_dict().values()]


@pytest.mark.parametrize("module", ["a", "b", "c"])
def test_a_module_ends_with_the_very_weights_of_a_training_that_nobody_stopped(module, tmp_path):
    shape, data, seen, trained_a = weights(tmp_path, Plain())

    def train(file, log):
        if module == "a":
            params = PerceptionParams(hidden=8, steps=STEPS, chunk=8)
            return train_perception(shape, data, params, 0, tmp_path / file, log)
        made = {"b": model_b, "c": model_c}[module]
        return made(shape, data, seen, tmp_path / file, log)

    whole = trained_a if module == "a" else train("whole.pt", Plain())
    with pytest.raises(Stopped):
        train("cut.pt", StopsAt(STOP))
    again = StopsAt()
    resumed = train("cut.pt", again)
    assert again.start == STOP
    for one, other in zip(values(whole), values(resumed), strict=True):
        assert torch.equal(one, other)


def test_d_goes_on_with_its_weights_in_episodes_that_begin_anew(tmp_path):
    params = PolicyParams(ticks=STEPS * 16, lanes=2, rollout=8, minibatch=8, epochs=1, hidden=8)
    used: list[int] = []

    def seeds():
        for seed in count():
            used.append(seed)
            yield seed

    def perceive(observation, before, belief):
        return observation[:, :1], belief + 1

    def train(log):
        lanes = Lanes(counting, 2, seeds(), 1000)
        return train_policy(lanes, perceive, (1, 1), params, 0, tmp_path / "d.pt", log), lanes

    with pytest.raises(Stopped):
        train(StopsAt(STOP))
    saved = torch.load(tmp_path / "d.pt", weights_only=True)
    assert saved["step"] == STOP
    ended = 2 * (STOP * 8 // 5)  # episodes of five ticks in each lane
    assert len(saved["extra"]["lanes"]["returns"]) == ended
    assert saved["extra"]["lanes"]["begun"] == ended + 2
    before = len(used)
    saved["extra"] |= {"best_trailing": [1e6, 0.5], "taken": 1}  # as if an earlier one were best
    torch.save(saved, tmp_path / "d.pt")

    class Sees(StopsAt):
        """Also the weights with which the first update begins."""

        def steps(self, total, start):
            self.first = {k: x.clone() for k, x in self.policy().items()}
            return super().steps(total, start)

        def policy(self):
            return torch.load(tmp_path / "d.pt", weights_only=True)["parts"]["policy"]

    log = Sees()
    learned, lanes = train(log)
    assert log.start == STOP
    assert learned.numbers["updates"] == STEPS
    # Two for the lanes that are made, then on from the seeds that were used before.
    assert used[before + 2 : before + ended + 2] == list(range(2, ended + 2))
    assert lanes.begun == ended + 2 + 2 + 2 * ((STEPS - STOP) * 8 // 5)
    assert learned.numbers["episodes"] == ended + 2 * ((STEPS - STOP) * 8 // 5)
    assert learned.played["action"].shape[0] == STEPS * 8  # what came before is kept as well
    kept = torch.load(tmp_path / "d.pt", weights_only=True)["extra"]
    assert kept["scale"][0] == pytest.approx(STEPS * 16, abs=0.01)  # rewards of both processes
    assert (kept["best_trailing"], kept["taken"]) == ([1e6, 0.5], 1)
    now = learned.policy.state_dict()
    assert any(not torch.equal(now[name], x) for name, x in log.first.items())


EAGER = """
from hamlet.learning.checkpoint import Checkpoint
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
Checkpoint.__init__.__defaults__ = (0.0,)
from hamlet.cli import app
app(prog_name='hamlet')
"""
PARAMS = """
seed: 0
world: {make: 'gymnasium:CartPole-v1'}
collect: {ticks: 320, lanes: 4}
perception: {hidden: 16, steps: 100, chunk: 16}
policy: {ticks: 512, lanes: 4, rollout: 32, epochs: 1}
"""


@pytest.mark.slow
def test_an_interrupted_stage_says_what_is_kept_and_goes_on(tmp_path):
    (tmp_path / "params.yaml").write_text(PARAMS)
    (tmp_path / ".dvc").mkdir()
    drop = ("PYTEST_", "MLFLOW_", "DVC_", "HAMLET_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(drop)}
    env = warm(env | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})

    def own(stage, **options):
        command = ["python", "-c", EAGER, "own", stage]
        return subprocess.Popen(
            command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, **options,
        )  # fmt: skip

    for stage in ("world", "collect"):
        _, said = (made := own(stage)).communicate()
        assert made.returncode == 0, said
    stopped = own("perception")
    until = time.monotonic() + 120
    while not (kept := list(tmp_path.glob("checkpoints/perception-*/checkpoint.pt"))):
        assert stopped.poll() is None, stopped.stderr.read()
        assert time.monotonic() < until
        time.sleep(0.05)
    stopped.send_signal(signal.SIGINT)
    _, said = stopped.communicate()
    assert stopped.returncode == 130
    where = kept[0].parent.relative_to(tmp_path)
    assert f"perception was interrupted: {where} is kept, `dvc repro` goes on from it" in said
    assert not (tmp_path / "artifacts/perception.pt").exists()
    curve = json.loads((kept[0].parent / "curve.json").read_text())
    step = torch.load(kept[0], weights_only=True)["step"]
    told, said = (again := own("perception")).communicate()
    assert again.returncode == 0, said
    assert f"perception goes on from step {step} of 100" in told
    assert not kept[0].parent.exists()
    lines = (tmp_path / "artifacts/plots/perception.csv").read_text().splitlines()
    assert len(lines) == 1 + 100  # of both processes, none twice
    assert lines[1].startswith("0,")
    assert len(curve) < 100
