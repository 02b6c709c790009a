"""Training of the prover: imitation of the symbolic baseline with labels, then PPO, then a choice.

Both phases run through the same buffer, update step, losses and returns as the town's policy. How
far the learnt corrections are trusted is chosen on the validation split, with "not at all" among
the choices, so the prover never starts or ends below the symbolic baseline there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from pipeline.learning.buffer import RolloutBuffer
from pipeline.learning.checkpoint import Checkpoint
from pipeline.learning.losses import (
    entropy_of,
    imitation_loss,
    log_prob_of,
    masked_logits,
    ppo_policy_loss,
    value_loss,
    weighted_mean,
)
from pipeline.learning.returns import gae
from pipeline.learning.rollout import Record, Step, collect, evaluate, fused_step, learn
from pipeline.learning.update import Update
from pipeline.proofs.knowledge import find
from pipeline.proofs.policy import Prover, ProverInput, ProverShape, entity_signature
from pipeline.proofs.ranking import (
    UNPROVEN,
    Questions,
    evaluate_scores,
    pose,
    sampled_negatives,
)
from pipeline.proofs.unify import beam_search
from pipeline.proofs.world import ProofWorld
from pipeline.town.counter import counter_uniform

_SAMPLE = 64  # first stream of the action sampler
BEAM_SEARCHES, BEAM_DEPTH = 200, 10  # queries searched breadth-first, and how deep
MAX_PASSES = 120  # times that imitation goes over the training pool, at most, beyond 20 steps
TRUSTS = (0.0, 0.03, 0.1, 0.3, 1.0)
Report = Callable[[str, int, int, dict[str, Tensor]], None]


@dataclass(frozen=True)
class TrainConfig:
    """How long and how to train; see `ProofsParams` for the meaning of the fields."""

    slots: int = 512
    ticks: int = 16
    imitation_steps: int = 150
    ppo_steps: int = 40
    epochs: int = 2
    minibatches: int = 8
    learning_rate: float = 1e-3
    ppo_learning_rate: float = 2e-4
    entropy: float = 0.1
    gamma: float = 0.99
    lam: float = 0.95
    clip: float = 0.2
    max_kl: float = 0.03
    weight_decay: float = 1e-4
    compile: bool = False


def build_prover(world: ProofWorld, use_prior: bool = True, hidden: int = 64) -> Prover:
    """An untrained prover for a world."""
    graph, engine = world.graph, world.engine
    shape = ProverShape(
        graph.num_predicates, graph.num_entities, engine.num_kinds, engine.width, hidden
    )
    return Prover(shape, entity_signature(graph), use_prior)


# ------------------------------------------------------------------------------------------------
# Players


class Student:
    """Gathers experience: the expert's choices, or the prover's own draws, as a `Player`."""

    def __init__(self, prover: Prover, imitate: bool) -> None:
        self.prover, self.imitate = prover, imitate

    def act(self, state: TensorDict, seen: TensorDict, memory: None) -> tuple[Tensor, None, Record]:
        out = self.prover.see(seen)
        logits = masked_logits(out.logits, seen["action_mask"])
        action = expert = expert_action(state)
        if not self.imitate:
            seed, slot, episode, depth = (
                state[k][:, None] for k in ("seed", "world", "episode", "depth")
            )
            streams = _SAMPLE + torch.arange(logits.shape[1])
            u = counter_uniform(seed, slot, episode, depth, streams)
            noise = -(-(u.clamp(1e-9, 1 - 1e-7)).log()).log()
            action = (logits + noise).argmax(-1)
        record = {name: seen[name] for name in (*ProverInput._fields, "active")}
        return (
            action,
            None,
            record
            | {
                "action": action,
                "expert": expert,
                "log_prob": log_prob_of(logits, action),
                "value": out.value,
                "label": state["label"],
            },
        )

    def outcome(self, before: TensorDict, after: TensorDict, memory: None) -> tuple[None, Record]:
        return None, {name: after[name] for name in ("reward", "done", "truncated")}


class Searcher:
    """Searches greedily for proofs, as a `Player` to be evaluated; counts what it did."""

    def __init__(self, prover: Prover) -> None:
        self.prover = prover

    def act(self, state: TensorDict, seen: TensorDict, memory: None) -> tuple[Tensor, None, Record]:
        out = self.prover.see(seen)
        action = masked_logits(out.logits, seen["action_mask"]).argmax(-1)
        return action, None, {"score": torch.where(seen["root"], out.score, 0.0)}

    def outcome(self, before: TensorDict, after: TensorDict, memory: None) -> tuple[None, Record]:
        return None, {
            "proven": after["done"] & after["success"],
            "transitions": torch.ones_like(after["done"]),
            "dropped": after["dropped"] - before["dropped"],
        }


def expert_action(state: TensorDict) -> Tensor:
    """int64 [B]: give up false queries, else the successor with the strongest evidence."""
    give_up = state["action_mask"].shape[1] - 1
    legal = state["action_mask"][:, :-1]
    best = state["evidence"].masked_fill(~legal, -1e9).argmax(-1)
    return torch.where(state["label"] & legal.any(-1), best, give_up)


# ------------------------------------------------------------------------------------------------
# Evaluation


class Proven(NamedTuple):
    """Results by query.

    Attributes:
        proven: bool [Q] the search found a proof.
        score: float64 [Q] log-odds of going on at the root; UNPROVEN without a proof.
        transitions: resolution steps made by slots that had a query.
        dropped: successors beyond the budget.
        seconds: of the search alone, without compilation if the steps were warm.
    """

    proven: Tensor
    score: Tensor
    transitions: int
    dropped: int
    seconds: float


def prove_all(
    world: ProofWorld, prover: Prover, queries: Tensor, slots: int, step: Step | None = None
) -> Proven:
    """Search greedily for a proof of each query int64 [Q, 3]; finished slots take the next one.

    What the learnt choices miss is searched once more by the symbolic evidence alone, and what that
    misses breadth-first, so learning never loses a proof; the score stays the learnt
    one. The results do not depend on the number of slots nor on the order of the queries.

    Args:
        step: a compiled `fused_step(world, Searcher(prover))` to use again; None: eager.
    """
    step = step or fused_step(world, Searcher(prover))
    first = _search(world, step, queries, slots)
    missed = ~first.proven
    if not prover.use_prior or not bool(missed.any()):
        return first._replace(score=torch.where(first.proven, first.score, UNPROVEN))
    trust = prover.trust.clone()
    prover.trust.zero_()
    again = _search(world, step, queries[missed], slots)
    prover.trust.copy_(trust)
    proven = first.proven.clone()
    proven[missed] = again.proven
    for case in (~proven).nonzero().flatten()[:BEAM_SEARCHES].tolist():
        proven[case] = beam_search(world.engine, queries[case], BEAM_DEPTH)
    return Proven(
        proven,
        torch.where(proven, first.score, UNPROVEN),
        first.transitions + again.transitions,
        first.dropped + again.dropped,
        first.seconds + again.seconds,
    )


def _search(world: ProofWorld, step: Step, queries: Tensor, slots: int) -> Proven:
    """One greedy pass over the queries; `score` is the root's, proven or not."""
    world.eval(queries)
    began = time.perf_counter()
    totals = evaluate(world, step, None, len(queries), slots)
    seconds = time.perf_counter() - began
    world.train()
    return Proven(
        totals["proven"] > 0,
        totals["score"],
        int(totals["transitions"].sum()),
        int(totals["dropped"].sum()),
        seconds,
    )


def to_triples(keys: Tensor, entities: int) -> Tensor:
    return torch.stack([keys // entities**2, keys // entities % entities, keys % entities], -1)


class Ranked(NamedTuple):
    metrics: dict[str, float]
    proven: Proven
    keys: Tensor


def rank(
    world: ProofWorld,
    prover: Prover,
    questions: Questions,
    negatives: Tensor,
    slots: int,
    step: Step | None = None,
) -> Ranked:
    """Prove all derivable candidates of the questions and rank by score."""
    keys = derivable(world, questions)
    queries = to_triples(keys, world.graph.num_entities)
    found = prove_all(world, prover, queries, slots, step)
    metrics = evaluate_scores(world.graph, questions, keys, found.score, negatives)
    place, known = find(keys, questions.answers)
    metrics["proved_fraction"] = float((known & found.proven[place]).double().mean())
    return Ranked(metrics, found, keys)


def derivable(world: ProofWorld, questions: Questions) -> Tensor:
    """Ascending keys of the candidates and true triples that forward chaining derives."""
    keys = questions.keys()
    place, found = find(world.closure.keys, keys)
    return keys[found & (world.closure.round[place] > 0)]


def selection_score(metrics: dict[str, float]) -> float:
    """What the validation split decides by."""
    names = [n for n in ("mrr_all", "mrr_100", "auc_pr") if n in metrics]
    return sum(metrics[n] for n in names) / len(names)


# ------------------------------------------------------------------------------------------------
# Training


def train_prover(
    world: ProofWorld,
    prover: Prover,
    config: TrainConfig,
    seed: int,
    report: Report | None = None,
    checkpoint: Path | None = None,
    save_every: float = 20.0,
) -> dict[str, float]:
    """Train a prover in place; returns what was measured and chosen.

    Imitation and PPO each leave a candidate; with the symbolic prior, the best of them and the best
    trust in its corrections are chosen on the validation split.

    Args:
        report: told (phase, step, steps, numbers) after every step.
        checkpoint: file from which an interrupted training resumes, exactly.
        save_every: seconds between saves; an interrupt loses at most this much.
    """
    began = time.perf_counter()
    candidates = {}
    if config.imitation_steps and prover.use_prior:
        file = checkpoint and checkpoint.with_suffix(".imitation.pt")
        _train(world, prover, config, seed, "imitation", report, file, save_every)
        candidates["imitation"] = _copy(prover)
    if config.ppo_steps:
        file = checkpoint and checkpoint.with_suffix(".ppo.pt")
        _train(world, prover, config, seed + 1, "ppo", report, file, save_every)
        candidates["ppo"] = _copy(prover)
    result = {"training_seconds": time.perf_counter() - began}
    if prover.use_prior and len(world.graph.splits["valid"]):
        result |= _choose(world, prover, candidates, config)
    return result


def _train(
    world: ProofWorld,
    prover: Prover,
    config: TrainConfig,
    seed: int,
    phase: str,
    report: Report | None,
    file: Path | None,
    save_every: float,
) -> None:
    """One phase: fill the buffer with the expert's or the policy's experience, update, repeat."""
    imitating = phase == "imitation"
    total = config.imitation_steps if imitating else config.ppo_steps
    if imitating:  # a small pool would be learnt by heart
        passes = MAX_PASSES * len(world.train_pool()) // (config.slots * config.ticks)
        total = min(total, max(passes, 20))
    rate = config.learning_rate if imitating else config.ppo_learning_rate
    update = Update(
        _imitation(prover) if imitating else _improvement(prover, config),
        prover.parameters(),
        learning_rate=rate,
        max_grad_norm=1.0 if imitating else 0.5,
        weight_decay=config.weight_decay if imitating else 0.0,
    )
    generator = torch.Generator().manual_seed(seed)
    world.train()
    state = world.reset(seed, config.slots)
    start = 0
    saver = None
    if file is not None:
        parts: dict[str, Any] = {"prover": prover, "update": update, "generator": generator}
        saver = Checkpoint(file, parts, save_every)
        start, kept = saver.load()
        if kept:
            state = TensorDict(kept, batch_size=[config.slots])
    buffer = RolloutBuffer(config.ticks)
    tick = fused_step(world, Student(prover, imitating), config.compile)
    for step in range(start, total):
        update.set_learning_rate(rate * (1 - step / total))
        state, _ = collect(tick, state, None, buffer)
        assert buffer.data is not None
        data = buffer.data
        if not imitating:
            _add_advantages(world, prover, data, state, config)
        epochs = 1 if imitating else config.epochs
        numbers = learn(update, buffer, epochs, config.minibatches, generator, config.max_kl)
        ended = data["done"].sum().clamp(min=1)
        numbers["return"] = (data["reward"] * data["done"]).sum() / ended
        if report:
            report(phase, step, total, numbers)
        if saver:
            saver.save(step + 1, dict(state.items()), force=step + 1 == total)


def _imitation(prover: Prover) -> Callable[[TensorDict], tuple[Tensor, dict[str, Tensor]]]:
    def loss(batch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        out = prover.see(batch)
        weight = batch["active"].float()
        logits = masked_logits(out.logits, batch["action_mask"])
        cloning, numbers = imitation_loss(logits, batch["expert"], weight)
        value = weighted_mean((out.value - batch["label"].float()).square(), weight)
        numbers |= {"imitation_loss": cloning, "value_loss": value}
        return cloning + 0.5 * value, numbers

    return loss


def _improvement(
    prover: Prover, config: TrainConfig
) -> Callable[[TensorDict], tuple[Tensor, dict[str, Tensor]]]:
    def loss(batch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        out = prover.see(batch)
        weight = batch["active"].float()
        logits = masked_logits(out.logits, batch["action_mask"])
        log_prob = log_prob_of(logits, batch["action"])
        policy, numbers = ppo_policy_loss(
            log_prob, batch["log_prob"], batch["advantages"], weight, config.clip
        )
        value, more = value_loss(out.value, batch["value"], batch["returns"], weight, config.clip)
        entropy = weighted_mean(entropy_of(logits), weight)
        numbers |= more | {"policy_loss": policy, "value_loss": value, "entropy": entropy}
        return policy + 0.5 * value - config.entropy * entropy, numbers

    return loss


@torch.no_grad()
def _add_advantages(
    world: ProofWorld, prover: Prover, data: TensorDict, state: TensorDict, config: TrainConfig
) -> None:
    """Add `advantages` and `returns`; a truncated episode is bootstrapped from its last state."""
    last = prover.see(world.observe(state)).value
    following = torch.cat([data["value"][1:], last[None]])
    terminated = data["done"] & ~data["truncated"]
    data["advantages"], data["returns"] = gae(
        data["reward"], data["value"], following, terminated, data["done"],
        config.gamma, config.lam,
    )  # fmt: skip


def _choose(
    world: ProofWorld,
    prover: Prover,
    candidates: dict[str, dict[str, Tensor]],
    config: TrainConfig,
) -> dict[str, float]:
    """Keep the weights and the trust that rank the validation split best; ties to less trust."""
    questions = pose(world.graph, world.closure, "valid")
    negatives = sampled_negatives(world.graph, questions, 100, seed=1)
    step = fused_step(world, Searcher(prover), config.compile)
    best, chosen = (-1.0, 0.0), ("symbolic", 0.0)
    result = {}
    for name, weights in candidates.items():
        for trust in TRUSTS:
            prover.load_state_dict(weights | {"trust": torch.tensor(trust)})
            found = rank(world, prover, questions, negatives, config.slots, step).metrics
            score = round(selection_score(found), 4)
            result[f"valid_{name}_{trust}"] = score
            # Between equals a little trust: it orders what the baseline leaves tied.
            order = (score, -abs(trust - 0.1))
            if order > best:
                best, chosen = order, (name, trust)
    weights = candidates[chosen[0]]
    prover.load_state_dict(weights | {"trust": torch.tensor(chosen[1])})
    return result | {"trust": chosen[1], "chose_ppo": float(chosen[0] == "ppo")}


def _copy(prover: Prover) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in prover.state_dict().items()}
