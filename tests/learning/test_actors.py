"""Processes that act while another learns: the same training, and how they end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from hamlet.artifacts import HamletError
from hamlet.learning.actors import Actors, Cast
from hamlet.learning.learner import Learner, packed
from hamlet.learning.train_policy import train_policy
from hamlet.modules.contracts import TownShape
from hamlet.modules.critic import Critic
from hamlet.params import load_params
from hamlet.town import Scripted, Town, load_pack
from tests.learning.interrupted import StoppedLog
from tests.learning.minds import new_mind
from tests.learning.test_train_policy import class_of_twelve

ROOT = Path(__file__).parents[2]
TINY = load_params(ROOT / "params.yaml", "tiny")
PARAMS = TINY.policy.model_copy(
    update={
        "algorithm": "impala", "lag": 2, "worlds": 16, "rollout": 4, "minibatches": 2,
        "imitation_iterations": 1, "critic_iterations": 1, "ppo_iterations": 4,
        "learning_rate": 3e-3,
    }
)  # fmt: skip
SHARED = """
import gc
from hamlet.learning.actors import forks
with forks().Pool(1) as pool:
    print(pool.apply(gc.get_freeze_count), pool.apply(gc.isenabled))
"""
ORPHANS = """
import os, signal
from tests.learning.test_actors import started
if __name__ == "__main__":
    actors = started()
    print(*[process.pid for process in actors.processes], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def actor() -> Learner:
    torch.set_num_threads(1)
    town = Town(load_pack("l4_contention"), num_layouts=8)
    shape, mind = TownShape.of(town), new_mind(town, PARAMS)[0]
    return Learner(town, shape, mind, Critic(shape, 8), Scripted(town, [PARAMS.teacher], 0))


def started() -> Actors:
    _, memory, world = class_of_twelve()
    rows = packed(world[:8], memory._replace(co_players=()))
    agents = len(memory.agent.clock) // 12
    rows["agent"] = tuple(x[: 8 * agents] for x in memory.agent)
    rows["expert"] = {name: x[:8] for name, x in rows["expert"].items()}
    return Actors(Cast(2, actor), PARAMS, False, "fp32", 0, rows)


def trained(folder: Path, cast: Cast | None) -> dict[str, torch.Tensor]:
    folder.mkdir()
    town = Town(load_pack("l4_contention"), num_layouts=8)
    mind, blank = new_mind(town, PARAMS)
    train_policy(
        town, TownShape.of(town), mind, blank, PARAMS, TINY.compile, 0, folder / "checkpoint.pt",
        StoppedLog(), cast=cast,
    )  # fmt: skip
    return mind.policy.state_dict()


@pytest.mark.slow
def test_two_actors_make_the_training_of_one_process_and_end_with_it(tmp_path):
    alone = trained(tmp_path / "alone", None)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    acted = trained(tmp_path / "acted", Cast(2, actor))
    for name, value in alone.items():
        torch.testing.assert_close(acted[name], value, rtol=0, atol=1e-5, msg=name)
    left = [c for c in psutil.Process().children(recursive=True) if c.pid not in before]
    kept = "resource_tracker", "forkserver"  # of multiprocessing, until this process ends
    assert not [c for c in left if c.ppid() != os.getpid()], "an actor, a fork of the server"
    assert not [c for c in left if not any(name in " ".join(c.cmdline()) for name in kept)]


@pytest.mark.slow
def test_a_fork_does_not_look_through_what_it_shares():
    """What was imported before is no garbage, and new garbage is looked for. In a process of its
    own: the first in a process who forks says for all what is imported."""
    command = [sys.executable, "-c", SHARED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    frozen, looked_for = done.stdout.split()
    assert int(frozen) > 100_000
    assert looked_for == "True"


@pytest.mark.slow
def test_an_actor_that_dies_is_one_line():
    actors = started()
    try:
        actors.send(class_of_twelve()[0].mind.policy.state_dict())
        os.kill(actors.processes[1].pid, signal.SIGKILL)
        why = r"actor 1 of 2 ended by SIGKILL.*same command again"
        with pytest.raises(HamletError, match=why):
            actors.receive()
    finally:
        actors.close()
    assert not any(process.is_alive() for process in actors.processes)


@pytest.mark.parametrize(
    ("ending", "told"),
    [
        (lambda: sys.exit(3), "actor 0 of 1 ended with exit code 3"),
        (lambda: sys.exit(0), "actor 0 of 1 ended with exit code 0"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "actor 0 of 1 ended by SIGTERM"),
    ],
)
def test_how_an_actor_ended_is_told(ending, told):
    """Its pipe may be closed a moment before it has ended."""
    context = multiprocessing.get_context("fork")
    hear, rollouts = context.Pipe(duplex=False)

    def end():
        rollouts.close()
        time.sleep(0.3)
        ending()

    actors = object.__new__(Actors)
    actors.heard, actors.processes = [hear], [context.Process(target=end, name="actor 0")]
    actors.processes[0].start()
    rollouts.close()
    with pytest.raises(HamletError, match=told):
        actors.receive()


@pytest.mark.slow
def test_actors_end_with_a_learner_that_is_killed(tmp_path):
    script = tmp_path / "orphans.py"
    script.write_text(ORPHANS)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(script)], env=env, capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    until = time.monotonic() + 20
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.1)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
