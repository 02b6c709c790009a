"""The prover's actor-critic: the symbolic prior plus what was learnt.

The actor decides twice: whether to go on or give up (`Endf`), and which successor to take. The
prior of going on is the noisy-or evidence for the query, that of a successor its evidence, so an
untrained prover is the plain symbolic baseline; learnt corrections start at zero. Nothing is learnt
by heart about an entity: it is seen through the predicates it occurs with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from hamlet.proofs.data import Graph

CERTAIN = 8.0  # log-odds of going on once the root was passed


@dataclass(frozen=True)
class ProverShape:
    """Sizes of the network, as plain numbers."""

    num_predicates: int
    num_entities: int
    num_kinds: int
    width: int
    hidden: int = 64


class ProverInput(NamedTuple):
    """One observation of `ProofWorld.observe`, as tensors: the inputs of the exported scorer."""

    query: Tensor
    hidden: Tensor
    prior: Tensor
    root: Tensor
    kind: Tensor
    evidence: Tensor
    ways: Tensor
    left: Tensor
    action_mask: Tensor


class ProverOutput(NamedTuple):
    """`logits` float [B, S + 1], `value` float [B], `score` float [B] log-odds of going on."""

    logits: Tensor
    value: Tensor
    score: Tensor


class Prover(nn.Module):
    """Actor and critic over proof states.

    Args:
        shape: sizes.
        signature: float [E, 2 P] log(1 + n) of how often an entity is head, then tail, of each
            predicate in the training facts; from `entity_signature`.
        use_prior: False hides all symbolic evidence (the baseline "RL only").
    """

    signature: Tensor
    trust: Tensor

    def __init__(self, shape: ProverShape, signature: Tensor, use_prior: bool = True) -> None:
        super().__init__()
        self.shape, self.use_prior = shape, use_prior
        hidden = shape.hidden
        self.register_buffer("signature", signature)
        self.register_buffer("trust", torch.ones(()))  # how far the corrections count
        self.predicate = nn.Embedding(shape.num_predicates, hidden)
        self.entities = nn.Linear(4 * shape.num_predicates, hidden, bias=False)
        self.by_ways = nn.Embedding(shape.num_kinds, hidden)
        self.by_presence = nn.Embedding(shape.num_kinds, hidden)
        self.situation = nn.Linear(3, hidden)
        self.trunk = nn.Linear(hidden, hidden)
        self.go_on = nn.Linear(hidden, 1)
        self.value = nn.Linear(hidden, 1)
        self.kind_key = nn.Embedding(shape.num_kinds, 16)
        self.kind_query = nn.Linear(hidden, 16)
        self.features = nn.Linear(4, 1, bias=False)
        for table in (self.by_ways, self.by_presence, self.predicate):
            nn.init.normal_(table.weight, std=0.1)
        for weight in (self.go_on.weight, self.kind_query.weight, self.features.weight):
            nn.init.zeros_(weight)
        for bias in (self.go_on.bias, self.kind_query.bias):
            nn.init.zeros_(bias)

    def forward(self, *observation: Tensor) -> ProverOutput:
        """Logits of all actions, value and score; fields of `ProverInput` in order."""
        x = ProverInput(*observation)
        evidence, ways, prior = x.evidence, torch.log1p(x.ways), x.prior
        if not self.use_prior:
            evidence, ways = torch.zeros_like(evidence), torch.zeros_like(ways)
            prior = torch.zeros_like(prior)
        legal = x.action_mask[:, :-1]
        kind = x.kind
        best = evidence.masked_fill(~legal, -1e9).amax(1, keepdim=True)
        relative = (evidence - best).clamp(-12.0, 0.0)
        present = (ways > 0 if self.use_prior else legal).float()

        # What there is to go on with: every rule that applies, and in how many ways.
        none = ways.new_zeros(ways.shape[0], self.shape.num_kinds)
        hidden = none.scatter_add(1, kind, ways) @ self.by_ways.weight
        hidden = hidden + none.scatter_add(1, kind, present) @ self.by_presence.weight
        hidden = hidden + self.predicate(x.query[:, 0]) + self.entities(self._context(x))
        closed = ((x.left == 0) & legal).any(1).float()
        here = torch.stack([(~x.root).float(), closed, prior.clamp(-10.0, 15.0) / 10.0], -1)
        hidden = torch.relu(hidden + self.situation(here))
        deep = torch.relu(self.trunk(hidden)) + hidden

        correction = self.trust * self.go_on(deep).squeeze(-1)
        score = torch.where(x.root, prior, torch.full_like(prior, CERTAIN)) + correction
        per_kind = (self.kind_query(deep) @ self.kind_key.weight.T).gather(1, kind)
        seen = torch.stack([relative / 12.0, ways, present, (x.left == 0).float()], -1)
        choice = relative + self.trust * (per_kind + self.features(seen).squeeze(-1))
        choice = choice.masked_fill(~legal, -1e9).log_softmax(-1)
        sure = score.clamp(-15.0, 15.0)
        logits = torch.cat(
            [
                choice + nn.functional.logsigmoid(sure)[:, None],
                nn.functional.logsigmoid(-sure)[:, None],
            ],
            -1,
        )
        return ProverOutput(logits, self.value(deep).squeeze(-1), score)

    def _context(self, x: ProverInput) -> Tensor:
        """float [B, 4 P]: the signatures of head and tail without the hidden fact's share."""
        asked = nn.functional.one_hot(x.query[:, 0], self.shape.num_predicates).float()
        none = torch.zeros_like(asked)
        as_head, as_tail = (asked * share[:, None].float() for share in x.hidden.unbind(1))
        head = self.signature[x.query[:, 1]].expm1() - torch.cat([as_head, none], -1)
        tail = self.signature[x.query[:, 2]].expm1() - torch.cat([none, as_tail], -1)
        return torch.log1p(torch.cat([head, tail], -1).clamp(min=0.0))

    def see(self, observation: TensorDict) -> ProverOutput:
        """`forward` on an observation of the world."""
        return self(*(observation[name] for name in ProverInput._fields))


def entity_signature(graph: Graph) -> Tensor:
    """float [E, 2 P]: log(1 + n) of the training facts with the entity as head, then as tail."""
    facts, predicates = graph.splits["train"], graph.num_predicates
    table = torch.zeros(graph.num_entities * 2 * predicates)
    ones = torch.ones(len(facts))
    table.index_add_(0, facts[:, 1] * 2 * predicates + facts[:, 0], ones)
    table.index_add_(0, (facts[:, 2] * 2 + 1) * predicates + facts[:, 0], ones)
    return torch.log1p(table).view(graph.num_entities, 2 * predicates)
