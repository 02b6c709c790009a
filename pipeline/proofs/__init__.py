"""The second world: knowledge-graph reasoning as a decision process, on the same RL core."""

from pipeline.proofs.data import Graph, load_graph
from pipeline.proofs.saved import build_world, load_prover, open_graph, save_prover
from pipeline.proofs.trace import Answer, Proof, ask
from pipeline.proofs.world import ProofWorld, WorldConfig

__all__ = [
    "Answer",
    "Graph",
    "Proof",
    "ProofWorld",
    "WorldConfig",
    "ask",
    "build_world",
    "load_graph",
    "load_prover",
    "open_graph",
    "save_prover",
]
