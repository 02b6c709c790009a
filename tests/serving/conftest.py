"""Two real agents (untrained, exported), what they see in the town, and servers of them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from exported import export, untrained
from filelock import FileLock
from served import Served

from benchmarks.serving import another
from hamlet.artifacts import card_path


@pytest.fixture(scope="session")
def shape():
    from hamlet.modules.contracts import TownShape
    from hamlet.town import Town, load_pack

    return TownShape.of(Town(load_pack("l4_contention"), num_layouts=8))


@pytest.fixture(scope="session")
def mind():
    """A whole mind with random weights, and example inputs by name."""
    from hamlet.town import Town, load_pack

    return untrained(Town(load_pack("l4_contention"), num_layouts=8))


@pytest.fixture(scope="session")
def agent(mind, shape, tmp_path_factory) -> Path:
    """The mind exported as the stage `agent` does it, with its card; once for all workers."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    (shared / "agent").mkdir(exist_ok=True)
    made, own = shared / "agent" / "agent.onnx", tmp_path_factory.mktemp("agent") / "agent.onnx"
    with FileLock(shared / "agent.lock"):
        if not card_path(made).exists():
            export(*mind, shape, made)
    for path in (made, card_path(made)):
        shutil.copy(path, own.parent)
    return own


@pytest.fixture(scope="session")
def other(agent, tmp_path_factory) -> Path:
    """Another agent: the same graph with other weights."""
    return another(agent, tmp_path_factory.mktemp("other"))


@pytest.fixture(scope="session")
def seen() -> list[dict[str, np.ndarray]]:
    """What 32 agents see in 40 ticks of town life, agent by agent, without a batch.

    With four digits, as `json_request` sends them: the same numbers however they are sent.
    """
    import torch

    from hamlet.modules.contracts import RawObservation
    from hamlet.town import Town, load_pack

    town = Town(load_pack("l4_contention"), num_layouts=8)
    rng = torch.Generator().manual_seed(5)
    world, ticks = town.reset(9, 8), []
    for _ in range(40):
        obs = town.observe(world)
        sensed = {n: obs[n].flatten(0, 1).numpy() for n in RawObservation._fields}
        ticks.append({n: x.round(4) if x.dtype == np.float32 else x for n, x in sensed.items()})
        world = town.step_core(world, torch.randint(town.num_actions, (8, 4), generator=rng))
    return [
        {n: np.ascontiguousarray(x[slot]) for n, x in tick.items()}
        for slot in range(32)
        for tick in ticks
    ]


@pytest.fixture(scope="module")
def server(agent):
    """A server that a whole file of tests shares."""
    with Served(agent, "--max-sessions", "300") as served:
        yield served


@pytest.fixture(scope="session")
def policy(tmp_path_factory) -> Path:
    """A small policy, see `pilot`."""
    from policies import masked_gru

    return masked_gru(tmp_path_factory.mktemp("policy")).path


@pytest.fixture(scope="module")
def pilot(policy):
    """A server of it that a whole file of tests shares."""
    with Served(policy) as served:
        yield served


@pytest.fixture(scope="session")
def rows() -> np.ndarray:
    """float32 [40, 6]: what one life of it sees."""
    return np.random.default_rng(8).uniform(-1, 1, (40, 6)).round(4).astype(np.float32)


@pytest.fixture(scope="session")
def expected(policy, rows) -> list[int]:
    """The actions of that life, by onnxruntime alone."""
    from pilot import life

    return life(policy, rows)


@pytest.fixture(scope="session")
def prover(tmp_path_factory) -> tuple[Path, dict[str, np.ndarray]]:
    """An untrained scorer as the stage writes it, and 24 rows of what it is asked."""
    import torch

    from hamlet.learning.train_prover import build_prover
    from hamlet.proofs import build_world
    from hamlet.proofs.kinship import kinship_graph
    from hamlet.proofs.saved import example_inputs
    from stages import paths, prove

    world = build_world(kinship_graph(3, 3), rounds=4)
    torch.manual_seed(5)
    made = build_prover(world).eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    file = tmp_path_factory.mktemp("prover") / "prover.onnx"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "PROVER_ONNX", file)
        prove.export(made, example_inputs(world))
    return file, {name: x.numpy() for name, x in example_inputs(world, 24).items()}


@pytest.fixture
def engine(agent):
    """An engine of its own for each test, with the agent current."""
    from hamlet.serving.agent import OnnxAgent
    from hamlet.serving.engine import Engine
    from hamlet.serving.metrics import Metrics

    engine = Engine(Metrics(), 100, 60.0)
    engine.install(engine.prepare(OnnxAgent(agent), "1"))
    yield engine
    engine.shutdown()
