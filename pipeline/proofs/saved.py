"""A trained prover on disk: weights, graph and rules in one folder, hash-checked, never pickled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from hamlet.artifacts import HamletError, atomic_dir, check_card, read_json, write_card, write_json
from hamlet.proofs.closure import close
from hamlet.proofs.data import Graph, load_graph, write_graph
from hamlet.proofs.kinship import kinship_graph
from hamlet.proofs.knowledge_base import Budget
from hamlet.proofs.policy import Prover, ProverInput, ProverShape, entity_signature
from hamlet.proofs.world import ProofWorld, WorldConfig


def open_graph(data: str, seed: int) -> Graph:
    """The graph named in the params: "kinship" for the embedded one, else a data set folder.

    Raises:
        HamletError: the folder is missing or cannot be read.
    """
    if data == "kinship":
        return kinship_graph(seed=seed)
    if not Path(data).is_dir():
        raise HamletError(
            f"proofs.data is {data!r}, which is no folder",
            "give a folder with train.txt, or kinship",
        )
    return load_graph(data)


def build_world(
    graph: Graph,
    rounds: int,
    config: WorldConfig | None = None,
    device: str | torch.device = "cpu",
) -> ProofWorld:
    """Forward-chain a graph and make its world, on a device."""
    return ProofWorld(graph, close(graph, rounds), config, device=device)


def save_prover(
    folder: str | Path,
    prover: Prover,
    world: ProofWorld,
    rounds: int,
    made_on: Mapping[str, str] | None = None,
) -> None:
    """Write `folder` (whole or not at all) and its card beside it, with what it was `made_on`."""
    with atomic_dir(folder) as temporary:
        torch.save(
            {k: v.cpu() for k, v in prover.state_dict().items() if k != "signature"},
            temporary / "weights.pt",
        )
        write_graph(world.graph, temporary / "graph")
        write_json(
            temporary / "prover.json",
            {
                "graph": world.graph.name,
                "hidden": prover.shape.hidden,
                "rounds": rounds,
                "budget": world.kb.budget._asdict(),
                "config": asdict(world.config),
            },
        )
    write_card(folder, kind="prover", schema={}, extra=made_on)


def load_prover(
    folder: str | Path = "artifacts/prover", device: str | torch.device = "cpu"
) -> tuple[Prover, ProofWorld]:
    """The prover and its world on a device, ready for `hamlet.proofs.ask` on the CPU.

    Raises:
        HamletError: the folder is missing or differs from its card.
    """
    folder = Path(folder)
    check_card(folder)
    told = read_json(folder / "prover.json")
    graph = load_graph(folder / "graph")
    config = told["config"] | {"rewards": tuple(map(tuple, told["config"]["rewards"]))}
    world = ProofWorld(
        graph,
        close(graph, told["rounds"]),
        WorldConfig(**config),
        Budget(**told["budget"]),
        device,
    )
    shape = ProverShape(
        graph.num_predicates,
        graph.num_entities,
        world.kb.num_kinds,
        world.kb.width,
        told["hidden"],
    )
    prover = Prover(shape, entity_signature(graph))
    weights = torch.load(folder / "weights.pt", weights_only=True)
    prover.load_state_dict(weights | {"signature": prover.signature})
    return prover.to(device).eval(), world


def example_inputs(world: ProofWorld, count: int = 3) -> dict[str, torch.Tensor]:
    """Observations to export the scorer with: training queries at their roots."""
    world.train()
    seen = world.observe(world.reset(0, count))
    return {name: seen[name].cpu() for name in ProverInput._fields}
