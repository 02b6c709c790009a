"""prove_evaluate: rank the held-out facts, beside the plain symbolic baseline, and show proofs."""

from __future__ import annotations

from PIL import Image
from torch import Tensor

from hamlet.artifacts import atomic_path, write_json
from hamlet.learning.train_prover import rank
from hamlet.proofs import load_prover
from hamlet.proofs.knowledge import find
from hamlet.proofs.picture import draw_proof
from hamlet.proofs.ranking import Questions, evaluate_scores, pose, rivals, sampled_negatives
from hamlet.proofs.trace import prove
from stages import paths
from stages.common import stage

PROOFS = paths.ARTIFACTS / "proofs.txt"
PICTURE = paths.ARTIFACTS / "proof.png"
SHOWN = 20


def write_ranks(questions: Questions, keys: Tensor, scores: Tensor, plain: Tensor) -> None:
    """The rank of every held-out fact among all entities, ties at their expected rank, as CSV.

    Args:
        keys: int64 [K] ascending keys that have a score.
        scores: float [K] the prover's.
        plain: float [K] the symbolic baseline's.
    """
    columns = []
    for each in (scores, plain):
        higher, equal = rivals(questions, keys, each)
        columns.append((1.0 + higher.double() + equal.double() / 2.0).tolist())
    triples = [" ".join(map(str, triple)) for triple in questions.triples.tolist()]
    rows = zip(triples, questions.side.tolist(), *columns, strict=True)
    lines = ["triple,open,rank,symbolic_rank", *(",".join(map(str, row)) for row in rows)]
    with atomic_path(paths.RANKS) as temporary:
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")


def main() -> None:
    with stage("prove_evaluate") as s:
        prover, world = load_prover(paths.PROVER, s.device)
        graph = world.graph
        questions = pose(graph, world.closure, graph.splits["test"], graph.known())
        negatives = sampled_negatives(graph, questions, 100, s.params.seed)
        ranked = rank(world, prover, questions, negatives, s.params.proofs.slots)
        plain = world.closure.log_odds(ranked.keys).double()
        baseline = evaluate_scores(
            graph, questions, ranked.keys, plain, negatives, lambda name: f"symbolic_{name}"
        )
        write_ranks(questions, ranked.keys, ranked.proven.score, plain)
        place, found = find(world.closure.keys, questions.answers)
        derived = found & (world.closure.round[place] > 0)
        numbers = ranked.metrics | baseline
        numbers["closure_fraction"] = float(derived.double().mean())
        numbers["closure_dropped"] = world.closure.dropped
        numbers["search_dropped"] = ranked.proven.dropped
        if s.device.type != "cpu":  # what is shown is searched there
            prover, world = load_prover(paths.PROVER)
        proofs = [prove(triple, prover, world) for triple in graph.splits["test"][:SHOWN]]
        lines = [line for proof in proofs if proof for line in (*proof.lines(), "")]
        with atomic_path(PROOFS) as temporary:
            temporary.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
        shown = max((p for p in proofs if p), key=lambda p: len(p.facts()), default=None)
        with atomic_path(PICTURE) as temporary:
            image = draw_proof(shown) if shown else Image.new("RGB", (1, 1))
            image.save(temporary, "PNG")
        write_json(paths.metrics("prove_evaluate"), numbers)
        s.run.metrics(numbers)
        s.run.artifact(PICTURE)


if __name__ == "__main__":
    main()
