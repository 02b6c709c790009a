"""The second world: knowledge-graph reasoning as a decision process, on the same RL core."""

from hamlet.proofs.data import Graph, load_graph
from hamlet.proofs.saved import build_world, load_prover, open_graph, save_prover
from hamlet.proofs.trace import Answer, Proof, ask
from hamlet.proofs.world import ProofWorld, WorldConfig

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
