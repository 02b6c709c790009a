"""Training of the prover: imitation of the symbolic baseline with labels, then PPO.

Both phases run through the same buffer, update step, losses and returns as the town's policy. When
to stop and how far to trust the learnt corrections is chosen on the validation split, with "not at
all" among the choices, so the prover never starts or ends below the symbolic baseline there.
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

from hamlet.learning import distributed
from hamlet.learning.buffer import RolloutBuffer
from hamlet.learning.checkpoint import Checkpoint
from hamlet.learning.losses import (
    entropy_of,
    imitation_loss,
    ppo_policy_loss,
    value_loss,
    weighted_mean,
)
from hamlet.learning.returns import gae
from hamlet.learning.rollout import Record, Step, collect, evaluate, fused_step, learn
from hamlet.learning.update import Update
from hamlet.modules.categorical import log_prob_of, masked_logits
from hamlet.moving import moved
from hamlet.proofs.knowledge import find
from hamlet.proofs.policy import Prover, ProverInput, ProverShape, entity_signature
from hamlet.proofs.ranking import (
    UNPROVEN,
    Questions,
    evaluate_scores,
    pose,
    rivals,
    sampled_negatives,
    surprise,
)
from hamlet.proofs.search import find_proofs
from hamlet.proofs.world import ProofWorld
from hamlet.town.counter import counter_uniform

_SAMPLE = 64  # first stream of the action sampler
LEAST_TRUST = 0.01  # enough to order what is tied
TRUSTS = (0.0, LEAST_TRUST, 0.03, 0.1, 0.3, 0.5, 0.7, 1.0)
LOOKS = 15  # times in a phase that the validation split is looked at
MAX_CHOOSING = 3000  # triples to choose by, at most
CHUNK = 4096  # queries observed at a time
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
    graph, kb = world.graph, world.kb
    shape = ProverShape(graph.num_predicates, graph.num_entities, kb.num_kinds, kb.width, hidden)
    return Prover(shape, entity_signature(graph), use_prior).to(world.device)


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
            streams = _SAMPLE + torch.arange(logits.shape[1], device=logits.device)
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
        transitions: resolution steps of the greedy search, of slots that had a query.
        dropped: successors beyond its budget.
        seconds: of everything.
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

    What the learnt choices miss is searched again by the symbolic evidence, so learning never loses
    a proof; the score stays the learnt one. The results do not depend on the number of slots nor on
    the order of the queries.

    Args:
        step: a compiled `fused_step(world, Searcher(prover))` to use again; None: eager.
    """
    began = time.perf_counter()
    found = _search(world, step or fused_step(world, Searcher(prover)), queries, slots)
    proven = found.proven.clone()
    missed = (~proven).nonzero().flatten()
    if prover.use_prior and len(missed):
        proofs = find_proofs(world.kb, queries[missed])
        proven[missed] = torch.tensor([proof is not None for proof in proofs])
    return found._replace(
        proven=proven,
        score=torch.where(proven, found.score, UNPROVEN),
        seconds=time.perf_counter() - began,
    )


def _search(world: ProofWorld, step: Step, queries: Tensor, slots: int) -> Proven:
    """One greedy pass over the queries; `score` is the root's, proven or not."""
    world.eval(queries)
    totals = moved(evaluate(world, step, None, len(queries), slots), "cpu")
    world.train()
    return Proven(
        totals["proven"] > 0,
        totals["score"],
        int(totals["transitions"].sum()),
        int(totals["dropped"].sum()),
        0.0,
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


# ------------------------------------------------------------------------------------------------
# Choice


class Choice:
    """The weights and the trust in them that rank the validation split best so far.

    What counts is the gain in reciprocal rank over the symbolic baseline, less one standard error:
    what may be luck is no gain. Between equals the least trust is best, but for none at all: a
    little orders what the baseline leaves tied. Then the weights of least `surprise` are best. The
    test split plays no part. Ranks depend on the scores at the roots alone, so the roots are looked
    at once and every derived candidate counts as proven.

    Attributes:
        best: (gain, minus the trust, minus the surprise at full trust) of what is chosen.
        label: what was chosen: phase (0 imitation, 1 PPO), step, trust.
    """

    def __init__(self, world: ProofWorld, prover: Prover) -> None:
        self.world, self.prover = world, prover
        self.best = (-1.0, 0.0, 0.0)
        self.label: dict[str, float] = {}
        self.weights = _copy(prover)
        graph = world.graph
        asked = graph.splits["valid"]
        if len(asked) > MAX_CHOOSING:
            order = torch.randperm(len(asked), generator=torch.Generator().manual_seed(0))
            asked = asked[order[:MAX_CHOOSING]]
        known = torch.cat([graph.splits["train"], graph.splits["valid"]])
        self.questions = pose(graph, world.closure, asked, known)
        self.negatives = sampled_negatives(graph, self.questions, 100, seed=1)
        self.keys = derivable(world, self.questions)
        self.roots = observe_roots(world, to_triples(self.keys, graph.num_entities))
        self.prior = world.closure.log_odds(self.keys).double() * prover.use_prior
        self.baseline = self.reciprocal_ranks(self.prior) * prover.use_prior

    @torch.no_grad()
    def consider(self, **label: float) -> None:
        """Compare the prover's weights, under every trust, with the best so far."""
        if len(self.keys) == 0:  # nothing to choose by: the last weights order what is tied
            trust = LEAST_TRUST if self.prover.use_prior else 1.0
            self.label = label | {"trust": trust}
            self.weights = _copy(self.prover) | {"trust": torch.tensor(trust)}
            return
        self.prover.trust.fill_(1.0)
        score = [self.prover.see(part).score.double() for part in self.roots.split(CHUNK)]
        self.weigh(torch.cat(score).cpu() - self.prior, **label)

    def weigh(self, correction: Tensor, **label: float) -> None:
        """Compare scores, by a correction float64 of the prior of each of `keys`, with the best."""
        loss = surprise(self.questions, self.keys, self.prior + correction)
        trusts = TRUSTS if bool(correction.any()) else (0.0,)  # untrained: the baseline itself
        for trust in trusts if self.prover.use_prior else (1.0,):
            order = (self.gain(self.prior + trust * correction), -(trust or 2.0), -loss)
            if order > self.best:
                self.best, self.label = order, label | {"trust": trust}
                self.weights = _copy(self.prover) | {"trust": torch.tensor(trust)}

    def gain(self, scores: Tensor) -> float:
        """Gain of scores float64 of `keys` over the baseline, less its standard error."""
        gained = self.reciprocal_ranks(scores) - self.baseline
        error = gained.std() / len(gained) ** 0.5 if len(gained) > 1 else gained.abs().sum()
        return round(float(gained.mean() - error), 4)

    def reciprocal_ranks(self, scores: Tensor) -> Tensor:
        """float64 [Q] of each question, the mean of both protocols."""
        found = [
            1.0 / (1.0 + higher.double() + equal.double() / 2.0)
            for higher, equal in (
                rivals(self.questions, self.keys, scores, sample)
                for sample in (None, self.negatives)
            )
        ]
        return torch.stack(found).mean(0)

    def state_dict(self) -> dict[str, Any]:
        return {"best": list(self.best), "label": self.label, "weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        gain, trust, loss = state["best"]
        self.best = (gain, trust, loss)
        self.label, self.weights = state["label"], state["weights"]


def observe_roots(world: ProofWorld, queries: Tensor) -> TensorDict:
    """What the prover sees of each query int64 [Q, 3] before its first step, batch [Q]."""
    parts = []
    for part in queries.split(CHUNK) if len(queries) else ():
        world.eval(part)
        seen = world.observe(world.reset(0, len(part)))
        parts.append(seen.select(*ProverInput._fields))
    world.train()
    names = ProverInput._fields if parts else ()
    columns = {name: torch.cat([part[name] for part in parts]) for name in names}
    return TensorDict(columns, batch_size=[len(queries)])


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

    Imitation comes first (with the symbolic prior only), then PPO from the best weights so far.
    What stays is the best of either phase and of the symbolic baseline, by `Choice`.

    Args:
        report: told (phase, step, steps, numbers) after every step.
        checkpoint: file from which an interrupted training resumes, exactly.
        save_every: seconds between saves; an interrupt loses at most this much.
    """
    began = time.perf_counter()
    choice = Choice(world, prover)
    choice.consider(phase=0.0, step=0.0)
    for number, phase in enumerate(("imitation", "ppo")):
        if phase == "imitation" and not prover.use_prior:
            continue
        prover.load_state_dict(choice.weights)
        prover.trust.fill_(1.0)
        file = checkpoint and checkpoint.with_suffix(f".{phase}.pt")
        _train(world, prover, choice, config, seed + number, phase, report, file, save_every)
    prover.load_state_dict(choice.weights)
    chosen = {f"chosen_{name}": value for name, value in choice.label.items()}
    seconds = time.perf_counter() - began
    return {"training_seconds": seconds, "valid_gain": choice.best[0]} | chosen


def _train(
    world: ProofWorld,
    prover: Prover,
    choice: Choice,
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
    slots = distributed.local_count(config.slots, "params.yaml: proofs.slots")
    state = distributed.local_shard(world.reset(seed, config.slots))
    start = 0
    saver = None
    if file is not None:
        parts: dict[str, Any] = {"prover": prover, "update": update, "generator": generator}
        parts["choice"] = choice
        saver = Checkpoint(file, parts, save_every)
        start, kept = saver.load()
        if kept:
            state = TensorDict(moved(kept, world.device), batch_size=[slots])
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
        numbers = learn(update, [buffer], epochs, config.minibatches, generator, config.max_kl)
        numbers["return"] = weighted_mean(data["reward"], data["done"].float())
        if (step + 1) * LOOKS // total > step * LOOKS // total:
            choice.consider(phase=float(not imitating), step=step + 1.0)
            prover.trust.fill_(1.0)
        numbers["valid_gain"] = torch.tensor(choice.best[0])
        if report:
            report(phase, step, total, numbers)
        if saver:
            saver.save(step + 1, rows=dict(state.items()), force=step + 1 == total)


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


def _copy(prover: Prover) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in prover.state_dict().items()}
