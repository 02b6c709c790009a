"""How well and how fast the prover ranks, against the plain symbolic baseline and RL alone.

    python -m benchmarks.proofs DATA_DIR [--seeds 3] [--compile]

DATA_DIR is a data set folder, `kinship` (the embedded one) or `synthetic` (a graph of 40,000
entities and 87,000 facts, as large as WordNet's). Every data set is trained with the same
`TrainConfig`; what is chosen is chosen on the validation split. For each seed the test split is
ranked by the trained prover, by the symbolic baseline of the same run, and by RL alone. Then come
transitions and candidates per second of the fused search, by an untrained prover so that it takes
no training to repeat, and the peak memory. The reference's published speed on two cores is 100 to
835 transitions/s and 10 to 45 candidates/s. The last line is JSON: means over the seeds, and the
speed. Every seed's numbers are kept in benchmarks/results/proofs.json. `--seeds 0` measures speed
alone.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from hamlet.artifacts import HamletError, read_json, write_json
from hamlet.learning.rollout import fused_step
from hamlet.learning.train_prover import (
    Proven,
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
from hamlet.proofs import ProofWorld, build_world, open_graph
from hamlet.proofs.data import Graph, Rule, Triple, build_graph, parse_atom
from hamlet.proofs.knowledge import find
from hamlet.proofs.ranking import Questions, evaluate_scores, pose, sampled_negatives

RESULTS = Path(__file__).parent / "results" / "proofs.json"
REFERENCE_TRANSITIONS = 835.0
REFERENCE_CANDIDATES = 45.0
RL_ONLY = TrainConfig(imitation_steps=0, ppo_steps=60, ppo_learning_rate=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", help="data set folder, `kinship` or `synthetic`")
    parser.add_argument("--seeds", type=int, default=1, help="how many trainings")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=8, help="rounds of forward chaining")
    parser.add_argument("--no-speed", action="store_true", help="leave speed and memory out")
    parser.add_argument("--queries", type=int, default=10_000, help="to measure the speed with")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measure of speed")
    parser.add_argument("--compile", action="store_true", help="compile the search (a minute)")
    parser.add_argument("--no-rl-only", action="store_true", help="leave RL alone out")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, default=RESULTS, help="file that keeps the numbers")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    try:
        began = time.perf_counter()
        graph = synthetic_graph() if options.data == "synthetic" else open_graph(options.data, 0)
        world = build_world(graph, options.rounds)
        about = describe(world) | {"setup_seconds": time.perf_counter() - began}
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            keep(options.json, graph.name, str(seed), about | quality(world, seed, options))
        if not options.no_speed:
            keep(options.json, graph.name, "speed", about | speed(world, options))
        entry = read_json(options.json)[graph.name]
        found = entry.get("mean", {}) | entry.get("speed", {})
    except HamletError as error:
        sys.exit(str(error))
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in found.items()}))


def describe(world: ProofWorld) -> dict:
    graph, closure = world.graph, world.closure
    answers = graph.key(graph.splits["test"])
    place, found = find(closure.keys, answers)
    derived = found & (closure.round[place] > 0)
    return {
        "data": graph.name,
        "entities": graph.num_entities,
        "facts": len(graph.splits["train"]),
        "derived": int((closure.round > 0).sum()),
        "closure_fraction": float(derived.double().mean()) if len(derived) else 0.0,
        "closure_dropped": closure.dropped,
    }


def keep(file: Path, data: str, kind: str, numbers: dict) -> None:
    """Put the numbers of a seed, or `speed`, into the file; seeds of another configuration go."""
    configuration = asdict(TrainConfig())
    saved = read_json(file) if file.exists() else {}
    entry = saved.get(data, {})
    seeds = entry.get("seeds", {}) if entry.get("configuration") == configuration else {}
    entry = entry | {"configuration": configuration, "seeds": seeds}
    if kind == "speed":
        entry[kind] = numbers
    else:
        seeds[kind] = numbers
    if seeds:
        entry["mean"] = means(seeds)
    write_json(file, saved | {data: entry})


def means(seeds: dict[str, dict]) -> dict:
    """The mean of every number over the seeds, and how many there were."""
    first = next(iter(seeds.values()))
    mean = {
        name: sum(s[name] for s in seeds.values()) / len(seeds) if isinstance(value, float)
        else value
        for name, value in first.items()
    }  # fmt: skip
    return mean | {"seeds": len(seeds)}


# ------------------------------------------------------------------------------------------------
# Quality


def quality(world: ProofWorld, seed: int, options: argparse.Namespace) -> dict:
    """One training, and the ranks of the test split: learnt, symbolic, and RL alone."""
    graph = world.graph
    questions = pose(graph, world.closure, graph.splits["test"], graph.known())
    negatives = sampled_negatives(graph, questions, 100, seed)
    result = symbolic_metrics(world, questions, negatives)
    print({k: round(v, 4) for k, v in result.items() if "mrr" in k}, flush=True)

    def report(phase: str, step: int, total: int, numbers: dict) -> None:
        if step % 20 == 0 or step == total - 1:
            shown = {k: round(float(v), 4) for k, v in numbers.items()}
            print(f"{phase} {step + 1}/{total} {shown}", flush=True)

    torch.manual_seed(seed)
    config = TrainConfig()
    prover = build_prover(world)
    if len(world.pool):
        result |= train_prover(world, prover, config, seed, report)
    ranked = rank(world, prover, questions, negatives, config.slots)
    result |= ranked.metrics | {"candidates": len(ranked.keys)}
    result["search_dropped"] = ranked.proven.dropped
    if len(world.pool) and not options.no_rl_only:
        alone = build_prover(world, use_prior=False)
        train_prover(world, alone, RL_ONLY, seed, report)
        metrics = rank(world, alone, questions, negatives, config.slots).metrics
        result |= {f"rl_only_{k}": v for k, v in metrics.items()}
    return result


def symbolic_metrics(
    world: ProofWorld, questions: Questions, negatives: torch.Tensor
) -> dict[str, float]:
    """Ranking by the noisy-or of the rules alone, named `symbolic_*`."""
    keys = derivable(world, questions)
    scores = world.closure.log_odds(keys).double()
    return evaluate_scores(
        world.graph, questions, keys, scores, negatives, lambda name: f"symbolic_{name}"
    )


# ------------------------------------------------------------------------------------------------
# Speed and memory


def speed(world: ProofWorld, options: argparse.Namespace) -> dict:
    """Speed of the fused search and of the training rollout; peak memory of this process."""
    torch.manual_seed(0)
    graph, slots = world.graph, TrainConfig.slots
    prover = build_prover(world)
    questions = pose(graph, world.closure, graph.splits["test"], graph.known())
    keys = derivable(world, questions)
    result: dict = {"threads": options.threads, "compile_seconds": 0.0}
    if len(keys):
        some = keys[torch.randperm(len(keys))[: options.queries]]
        queries = to_triples(some, graph.num_entities)
        queries = queries.repeat(-(-8 * slots // len(queries)), 1)  # no half-empty slots
        step = fused_step(world, Searcher(prover), options.compile)
        began = time.perf_counter()
        if options.compile:  # another number of queries would be another graph
            prove_all(world, prover, queries, slots, step)
            result["compile_seconds"] = time.perf_counter() - began
        began = time.perf_counter()
        runs: list[Proven] = []
        while not runs or time.perf_counter() - began < options.seconds:
            runs.append(prove_all(world, prover, queries, slots, step))
        best = min(runs, key=lambda found: found.seconds)
        result["candidates_per_s"] = len(queries) / best.seconds
        result["transitions_per_s"] = best.transitions / best.seconds
        result["proved_fraction_of_candidates"] = float(best.proven.double().mean())
        result["transitions_vs_reference"] = result["transitions_per_s"] / REFERENCE_TRANSITIONS
        result["candidates_vs_reference"] = result["candidates_per_s"] / REFERENCE_CANDIDATES
        print(
            f"ratio: {result['transitions_vs_reference']:.1f} x the reference's transitions/s, "
            f"{result['candidates_vs_reference']:.1f} x its candidates/s"
        )
    if len(world.pool):
        config = TrainConfig(imitation_steps=2, ppo_steps=2)
        result["rollout_transitions_per_s"] = _rollout_speed(world, prover, slots, options)
        train_prover(world, prover, config, 0)  # for the memory that training takes
    result["peak_memory_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return result


def _rollout_speed(world: ProofWorld, prover, slots: int, options: argparse.Namespace) -> float:
    """Transitions per second of the fused training rollout."""
    world.train()
    step = fused_step(world, Student(prover, imitate=False), options.compile)
    state, _, _ = step(world.reset(0, slots), None)
    began, ticks = time.perf_counter(), 0
    while time.perf_counter() - began < options.seconds:
        state, _, _ = step(state, None)
        ticks += 1
    return ticks * slots / (time.perf_counter() - began)


SYNTHETIC_RULES = (
    "hyponym(X,Y) -> hypernym(Y,X)",
    "hypernym(X,Y) -> hyponym(Y,X)",
    "part_of(X,Y) -> has_part(Y,X)",
    "has_part(X,Y) -> part_of(Y,X)",
    "related(X,Y) -> related(Y,X)",
    "similar(X,Y) -> similar(Y,X)",
    "hypernym(X,Z), has_part(Z,Y) -> has_part(X,Y)",
    "part_of(X,Z), hypernym(Z,Y) -> part_of(X,Y)",
    "hypernym(X,Z), hypernym(Z,Y) -> domain(X,Y)",
    "related(X,Z), hypernym(Z,Y) -> domain(X,Y)",
    "similar(X,Z), hypernym(Z,Y) -> hypernym(X,Y)",
)


def synthetic_graph(entities: int = 41_000, facts: int = 87_000, seed: int = 0) -> Graph:
    """A graph of WordNet's size and kind: a tree of hypernyms with parts and symmetric links.

    The inverse of a fact is known half the time. Entities with low numbers are hubs: the one of
    rank r is drawn with probability proportional to r ** -0.5.
    """
    draw = torch.Generator().manual_seed(seed)

    def number(high: torch.Tensor) -> torch.Tensor:
        return (torch.rand(high.shape, generator=draw) ** 2 * high).long()

    child = torch.arange(1, entities)
    edges = [("hypernym", child, number(child))]
    for name, share in (("has_part", 0.12), ("related", 0.2), ("similar", 0.08)):
        one = torch.randint(entities, (int(facts * share),), generator=draw)
        edges.append((name, one, number(torch.full_like(one, entities))))
    inverse = {"hypernym": "hyponym", "has_part": "part_of"}
    triples: dict[Triple, None] = {}
    for name, one, other in edges:
        both = torch.rand(len(one), generator=draw) < 0.5
        for a, b, twice in zip(one.tolist(), other.tolist(), both.tolist()):
            if a != b:
                triples[Triple(name, f"e{a}", f"e{b}")] = None
                if twice:
                    triples[Triple(inverse.get(name, name), f"e{b}", f"e{a}")] = None
    every = list(triples)
    order = torch.randperm(len(every), generator=draw).tolist()
    train, rest = order[:facts], order[facts : facts + 2000]
    splits = {"train": train, "valid": rest[:500], "test": rest[500:]}
    rules = []
    for i, text in enumerate(SYNTHETIC_RULES):
        body, head = text.split(" -> ")
        atoms = tuple(parse_atom(part + ")") for part in body.rstrip(")").split("), "))
        rules.append(Rule(f"w{i}", 1.0, atoms, parse_atom(head)))
    return build_graph("synthetic", {k: [every[i] for i in v] for k, v in splits.items()}, rules)


if __name__ == "__main__":
    main()
