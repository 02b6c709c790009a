"""How well and how fast the prover ranks, against the plain symbolic baseline and RL alone.

    python -m benchmarks.proofs DATA_DIR [--compile] [--json benchmarks/results/proofs_NAME.json]

Trains on two threads, ranks the test split by both protocols, and measures transitions and
candidates per second of the fused search. The reference's published speed on two cores is 100 to
835 transitions/s and 10 to 45 candidates/s. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path

import torch

from pipeline.files import HamletError, write_json
from pipeline.learning.rollout import fused_step
from pipeline.learning.train_prover import (
    Searcher,
    Student,
    TrainConfig,
    build_prover,
    derivable,
    prove_all,
    rank,
    to_triples,
    train_prover,
)
from pipeline.proofs import ProofWorld, build_world, open_graph
from pipeline.proofs.knowledge import find
from pipeline.proofs.policy import Prover
from pipeline.proofs.ranking import Questions, evaluate_scores, pose, sampled_negatives
from pipeline.proofs.world import prior_log_odds

REFERENCE_TRANSITIONS = 835.0
REFERENCE_CANDIDATES = 45.0


def symbolic_metrics(
    world: ProofWorld, questions: Questions, negatives: torch.Tensor
) -> dict[str, float]:
    """Ranking by the noisy-or of the rules alone, named `symbolic_*`."""
    keys = derivable(world, questions)
    scores = prior_log_odds(world.closure, keys).double()
    return evaluate_scores(
        world.graph, questions, keys, scores, negatives, lambda name: f"symbolic_{name}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", help="data set folder, or `kinship` for the embedded one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--imitation-steps", type=int, default=TrainConfig.imitation_steps)
    parser.add_argument("--ppo-steps", type=int, default=TrainConfig.ppo_steps)
    parser.add_argument("--rl-only-steps", type=int, default=60, help="0 leaves RL alone out")
    parser.add_argument("--slots", type=int, default=TrainConfig.slots)
    parser.add_argument("--rounds", type=int, default=8, help="rounds of forward chaining")
    parser.add_argument("--compile", action="store_true", help="compile the search (minutes)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    try:
        result = measure(options)
    except HamletError as error:
        sys.exit(str(error))
    if options.json:
        write_json(options.json, result)
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in result.items()}))


def measure(options: argparse.Namespace) -> dict:
    began = time.perf_counter()
    graph = open_graph(options.data, options.seed)
    world = build_world(graph, options.rounds)
    questions = pose(graph, world.closure, "test")
    negatives = sampled_negatives(graph, questions, 100, options.seed)
    place, found = find(world.closure.keys, questions.answers)
    result: dict = {
        "data": graph.name,
        "entities": graph.num_entities,
        "facts": len(graph.splits["train"]),
        "closure_fraction": float((found & (world.closure.round[place] > 0)).double().mean()),
        "closure_dropped": world.closure.dropped,
    } | symbolic_metrics(world, questions, negatives)
    result["setup_seconds"] = time.perf_counter() - began
    print({k: v for k, v in result.items() if "symbolic" in k}, flush=True)

    config = TrainConfig(
        slots=options.slots,
        imitation_steps=options.imitation_steps,
        ppo_steps=options.ppo_steps,
    )
    prover = build_prover(world)

    def report(phase: str, step: int, total: int, numbers: dict) -> None:
        if step % 20 == 0 or step == total - 1:
            shown = {k: round(float(v), 4) for k, v in numbers.items()}
            print(f"{phase} {step + 1}/{total} {shown}", flush=True)

    trained = len(world.pool) > 0
    if trained:
        result |= train_prover(world, prover, config, options.seed, report)
    step = fused_step(world, Searcher(prover), options.compile)
    warm = time.perf_counter()
    if len(derivable(world, questions)):
        rank(world, prover, questions, negatives, options.slots, step)
    warm = time.perf_counter() - warm
    ranked = rank(world, prover, questions, negatives, options.slots, step)
    result |= ranked.metrics
    result["candidates"] = len(ranked.keys)
    result["search_dropped"] = ranked.proven.dropped
    result["compile_seconds"] = max(warm - ranked.proven.seconds, 0.0)
    if len(ranked.keys):  # small data sets would measure half-empty slots: ask them many times
        queries = to_triples(ranked.keys, graph.num_entities)
        queries = queries.repeat(-(-8 * options.slots // len(queries)), 1)
        if options.compile:  # another number of queries is another graph: keep it out of the time
            prove_all(world, prover, queries, options.slots, step)
        searched = prove_all(world, prover, queries, options.slots, step)
        result["candidates_per_s"] = len(queries) / searched.seconds
        result["transitions_per_s"] = searched.transitions / searched.seconds
    result["rollout_transitions_per_s"] = _rollout_speed(world, prover, options)

    if options.rl_only_steps and trained:
        alone = build_prover(world, use_prior=False)
        config = TrainConfig(
            slots=options.slots,
            imitation_steps=0,
            ppo_steps=options.rl_only_steps,
            ppo_learning_rate=1e-3,
        )
        train_prover(world, alone, config, options.seed, report)
        metrics = rank(world, alone, questions, negatives, options.slots).metrics
        result |= {f"rl_only_{k}": v for k, v in metrics.items() if "mrr" in k or "proved" in k}
    result["peak_memory_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    result["transitions_vs_reference"] = (
        result.get("transitions_per_s", 0.0) / REFERENCE_TRANSITIONS
    )
    result["candidates_vs_reference"] = result.get("candidates_per_s", 0.0) / REFERENCE_CANDIDATES
    print(
        f"ratio: {result['transitions_vs_reference']:.1f} x the reference's transitions/s, "
        f"{result['candidates_vs_reference']:.1f} x its candidates/s"
    )
    return result


def _rollout_speed(world: ProofWorld, prover: Prover, options: argparse.Namespace) -> float:
    """Transitions per second of the fused training rollout."""
    if len(world.pool) == 0:
        return 0.0
    world.train()
    step, slots = fused_step(world, Student(prover, False), options.compile), options.slots
    state, *_ = step(world.reset(0, slots), None)
    began, ticks = time.perf_counter(), 0
    while time.perf_counter() - began < 3.0:
        state, *_ = step(state, None)
        ticks += 1
    return ticks * slots / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
