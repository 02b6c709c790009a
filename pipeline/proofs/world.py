"""The proofs world: prove a query, or give it up, one resolution step per tick.

The state is a TensorDict with batch [B]. An action is the index of a successor state, or the last
one, `Endf`, which gives up. An episode ends with a proof, with `Endf` (the only legal action where
nothing is left to try), or truncated at the depth limit. Everything here is a pure function of the
state; randomness comes from counters, so a slot's fate does not depend on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from hamlet.artifacts import HamletError
from hamlet.moving import moved
from hamlet.proofs.closure import Closure
from hamlet.proofs.data import Graph
from hamlet.proofs.knowledge import Index, build_index, find
from hamlet.proofs.knowledge_base import Budget, KnowledgeBase, build_knowledge_base, state_hash
from hamlet.proofs.unify import Successors, compact, expand
from hamlet.town.counter import counter_uniform

TRIES = 4  # uniform corruptions tried before a slot asks a positive query instead
_PICK, _DERIVABLE, _CORRUPT, _ENTITY = 0, 1, 2, 3  # streams of the counter generator


@dataclass(frozen=True)
class WorldConfig:
    """How the world plays.

    Attributes:
        max_depth: resolution steps after which an episode is truncated.
        negatives: corrupted queries after each positive one.
        derivable: share of the corrupted queries that are drawn from what the rules derive.
        unary_skips: resolution steps without a choice that are made at once, at most.
        rewards: by label and outcome: (negative given up, negative proven), (positive given up,
            positive proven).
    """

    max_depth: int = 20
    negatives: int = 1
    derivable: float = 0.9
    unary_skips: int = 0
    rewards: tuple[tuple[float, float], tuple[float, float]] = ((0.0, -1.0), (0.0, 1.0))


class ProofWorld:
    """A knowledge graph as a world; `train()` asks training facts, `eval(queries)` given ones.

    Args:
        graph: the data.
        closure: evidence for the graph; from `close(graph)`.
        config, budget: sizes and rules of play.
        device: where it is played; `graph`, `closure` and `kb` stay on the CPU, for searches.
    """

    def __init__(
        self,
        graph: Graph,
        closure: Closure,
        config: WorldConfig | None = None,
        budget: Budget | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        self.graph, self.closure, self.device = graph, closure, torch.device(device)
        self.config = config or WorldConfig()
        self.kb: KnowledgeBase = build_knowledge_base(graph, closure, budget)
        self.num_actions = self.kb.width + 1
        self.training = True
        # Only training facts are known: to leave other true triples out of the corruptions would
        # tell which derived atoms they are.
        known = graph.key(graph.splits["train"]).unique()
        keys = closure.keys[closure.round > 0]
        fresh = keys[~find(known, keys)[1]]
        size = graph.num_entities
        triples = torch.stack([fresh // size**2, fresh // size % size, fresh % size], -1)
        derivable: Index = build_index(triples, graph.num_predicates, size)
        rewards = torch.tensor(self.config.rewards)
        self._known, self._derivable, self._rewards, self._kb = moved(
            (known, derivable, rewards, self.kb), self.device
        )
        self.pool = self.train_pool()

    # --- query pools --------------------------------------------------------------------------

    def train_pool(self) -> Tensor:
        """int64 [n, 3] training facts that the rules derive, in the first round, without the fact.

        For other facts the evidence would lean on the fact itself, or there is none.
        """
        facts = self.graph.splits["train"]
        place, found = find(self.closure.keys, self.graph.key(facts))
        return facts[found & (self.closure.round[place] == 1)].to(self.device)

    def train(self) -> None:
        """Ask training facts and corruptions of them, for ever, in random order."""
        self.training, self.pool = True, self.train_pool()

    def eval(self, queries: Tensor) -> None:
        """Ask the atoms int64 [Q, 3] once each, in order; a finished slot takes the next one.

        Raises:
            HamletError: there are none, or an id is out of range.
        """
        limits = queries.new_tensor([self.graph.num_predicates] + [self.graph.num_entities] * 2)
        if queries.ndim != 2 or len(queries) == 0:
            raise HamletError("there is no query to prove", "give at least one")
        if bool((queries < 0).any()) or bool((queries >= limits).any()):
            raise HamletError("a query names an unknown predicate or entity", "check its ids")
        self.training, self.pool = False, queries.long().to(self.device)

    def playing(self, state: TensorDict) -> tuple[Tensor, Tensor]:
        """The case int64 [B] of every slot, and whether it still has one, bool [B]."""
        return state["case"], ~state["idle"]

    # --- stepping -----------------------------------------------------------------------------

    def reset(self, seed: int, num_worlds: int) -> TensorDict:
        """The first state of `num_worlds` slots.

        Raises:
            HamletError: the training pool is empty.
        """
        if len(self.pool) == 0:
            raise HamletError(
                "no training fact is derivable by the rules", "give rules that explain some facts"
            )
        slot = torch.arange(num_worlds, device=self.device)
        whole = {"seed": seed, "episode": 0, "next_case": num_worlds, "finished_case": -1}
        whole |= {"dropped": 0, "depth": 0}
        state = TensorDict(
            {name: torch.full_like(slot, value) for name, value in whole.items()}
            | {
                n: torch.zeros_like(slot, dtype=torch.bool)
                for n in ("done", "success", "truncated")
            }
            | {
                "world": slot.clone(),
                "case": slot.clone(),
                "reward": torch.zeros(num_worlds, device=self.device),
                "idle": slot >= (num_worlds if self.training else len(self.pool)),
            },
            batch_size=[num_worlds],
        )
        query, label, hidden = self._ask(state)
        state["query"], state["label"], state["hidden"] = query, label, hidden
        state["goals"] = self._kb.start(query)
        state["history"] = slot.new_zeros(num_worlds, self.config.max_depth)
        return self._look(state)

    def step_core(self, state: TensorDict, actions: Tensor) -> TensorDict:
        """One resolution step; finished slots stay as they are.

        Args:
            actions: int64 [B] legal actions.
        """
        frozen = state["done"] | state["idle"]
        moved = self._look(self._move(state, actions))
        return _where(frozen, state, moved)

    def step_and_reset_core(self, state: TensorDict, actions: Tensor) -> TensorDict:
        """One resolution step; a slot that finished holds the next query.

        `reward`, `done`, `success`, `truncated` and `finished_case` tell of the step. A truncated
        slot shows its last state for one tick, so that its value can be taken, and then begins
        anew whatever the action (`active` is False in that tick).
        """
        waited = state["truncated"]
        moved = self._move(state, actions)
        quiet = waited | state["idle"]
        for name, value in (("reward", 0.0), ("done", False), ("success", False)):
            moved[name] = moved[name].masked_fill(quiet, value)
        moved["truncated"] = moved["truncated"] & ~quiet
        moved["finished_case"] = torch.where(
            moved["done"], state["case"], torch.full_like(state["case"], -1)
        )
        fresh = (moved["done"] & ~moved["truncated"]) | waited
        return self._look(self._restart(moved, fresh))

    def _move(self, state: TensorDict, actions: Tensor) -> TensorDict:
        """Take the chosen successor: new goals, reward and end; what follows is not yet known."""
        width = self.kb.width
        gave_up = actions >= width
        chosen = actions.clamp(max=width - 1)[:, None, None]
        goals = (
            state["successors"]
            .gather(1, chosen.expand(-1, 1, state["successors"].shape[2]))
            .squeeze(1)
        )
        goals = torch.where(gave_up[:, None], state["goals"], goals)
        proven = ~gave_up & (goals < 0).all(-1)
        depth = state["depth"] + 1
        truncated = ~gave_up & ~proven & (depth >= self.config.max_depth)
        ended = gave_up | proven
        reward = self._rewards[state["label"].long(), proven.long()]
        column = torch.arange(self.config.max_depth, device=self.device)
        history = torch.where(
            column == state["depth"][:, None], state_hash(state["goals"])[:, None], state["history"]
        )
        moved = state.clone(recurse=False)
        moved["goals"], moved["depth"], moved["history"] = goals, depth, history
        moved["reward"] = torch.where(ended, reward, 0.0)
        moved["done"], moved["success"], moved["truncated"] = ended | truncated, proven, truncated
        return moved

    def _restart(self, state: TensorDict, fresh: Tensor) -> TensorDict:
        """Give the slots `fresh` their next query."""
        state = state.clone(recurse=False)
        state["episode"] = state["episode"] + fresh
        if self.training:
            state["case"] = torch.where(fresh, state["next_case"], state["case"])
        else:
            turn = fresh.long().cumsum(0)
            state["case"] = torch.where(fresh, state["next_case"] + turn - 1, state["case"])
            state["next_case"] = state["next_case"] + turn[-1]
            state["idle"] = state["case"] >= len(self.pool)
        query, label, hidden = self._ask(state)
        state["query"] = torch.where(fresh[:, None], query, state["query"])
        state["hidden"] = torch.where(fresh[:, None], hidden, state["hidden"])
        state["label"] = torch.where(fresh, label, state["label"])
        start = self._kb.start(query)
        state["goals"] = torch.where(fresh[:, None], start, state["goals"])
        state["depth"] = torch.where(fresh, 0, state["depth"])
        state["history"] = torch.where(fresh[:, None], 0, state["history"])
        return state

    def _look(self, state: TensorDict) -> TensorDict:
        """Find the successors of the goals, without those already visited."""
        state = state.clone(recurse=False)
        key = self._kb.pack(state["query"])
        goals, depth, history = state["goals"], state["depth"], state["history"]
        found = self._successors(goals, key, history)
        dropped = found.dropped
        for _ in range(self.config.unary_skips):
            only = found.legal.sum(1) == 1
            step = found.goals[:, 0]
            skip = only & (step >= 0).any(-1) & (depth > 0)
            skip = skip & (depth < self.config.max_depth - 1)
            column = torch.arange(self.config.max_depth, device=self.device)
            here = (column == depth[:, None]) & skip[:, None]
            history = torch.where(here, state_hash(goals)[:, None], history)
            goals = torch.where(skip[:, None], step, goals)
            depth = depth + skip
            after = self._successors(goals, key, history)
            dropped = dropped + torch.where(skip, after.dropped, 0)
            found = after
        state["goals"], state["depth"], state["history"] = goals, depth, history
        state["dropped"] = state["dropped"] + dropped
        state["successors"], state["kind"], state["atom"] = found.goals, found.kind, found.atom
        state["evidence"], state["ways"] = found.evidence, found.ways
        give_up = torch.ones_like(found.legal[:, :1])
        if not self.training:  # a question is pursued as long as anything is left to try
            give_up = ~found.legal.any(1, keepdim=True)
        state["action_mask"] = torch.cat([found.legal, give_up], 1)
        return state

    def _successors(self, goals: Tensor, query: Tensor, history: Tensor) -> Successors:
        """Successors of states, without those on the way here; legal ones first."""
        found = expand(self._kb, goals, query)
        hashes = state_hash(found.goals)
        seen = hashes == state_hash(goals)[:, None]
        seen = seen | (hashes[:, :, None] == history[:, None, :]).any(-1)
        return compact(found._replace(legal=found.legal & ~seen))

    # --- queries ------------------------------------------------------------------------------

    def _ask(self, state: TensorDict) -> tuple[Tensor, Tensor, Tensor]:
        """The query int64 [B, 3] of each slot's episode, its label bool [B], and `hidden`.

        hidden: bool [B, 2] whether the fact that is hidden while this is asked has the query's
        predicate and head, or its tail. Of a training query and its corruption that is the same
        fact: else what the graph says of the entity that both share would tell them apart.
        """
        if not self.training:
            query = self.pool[state["case"].clamp(max=len(self.pool) - 1)]
            known = find(self._kb.facts.keys, self.graph.key(query))[1]
            return query, torch.ones_like(state["done"]), known[:, None].expand(-1, 2)
        counters = (state["seed"], state["world"])
        cycle = self.config.negatives + 1
        turn = state["episode"] % cycle
        group = state["episode"] // cycle

        def draw(stream: int, count: Tensor, episode: Tensor) -> Tensor:
            u = counter_uniform(*counters, episode, torch.zeros_like(episode), stream)
            return (u.double() * count).long().clamp(max=(count - 1).clamp(min=0))

        pool_size = torch.full_like(turn, len(self.pool))
        positive = self.pool[draw(_PICK, pool_size, group * cycle)]
        side = 1 + (state["episode"] + group) % 2  # head and tail in turn
        corrupted, valid = self._corrupt(positive, side, draw, state["episode"])
        negative = (turn > 0) & valid
        hidden = torch.stack([side == 2, side == 1], -1) | ~negative[:, None]
        return torch.where(negative[:, None], corrupted, positive), ~negative, hidden

    def _corrupt(
        self, triple: Tensor, side: Tensor, draw, episode: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Corruptions of triples [B, 3] at `side` [B]; and whether one was found.

        Mostly another atom that the rules derive and that is no training fact, where there is one:
        these are the errors that a ranking meets. Else a random entity.
        """
        index, size = self._derivable, self.graph.num_entities
        tail = side == 2
        bound = torch.where(tail, triple[:, 1], triple[:, 2])
        group = triple[:, 0] * size + bound
        start = torch.where(tail, index.starts[0][group], index.starts[1][group])
        end = torch.where(tail, index.starts[0][group + 1], index.starts[1][group + 1])
        count = end - start
        wanted = draw(_CORRUPT, torch.full_like(count, 1000), episode)
        use = (count > 0) & (wanted < int(1000 * self.config.derivable))
        entity = torch.zeros_like(bound)
        if index.keys.shape[0]:
            place = (start + draw(_DERIVABLE, count, episode)).clamp(max=index.keys.shape[0] - 1)
            entity = torch.where(tail, index.partners[0][place], index.partners[1][place])
        valid = use
        for attempt in range(TRIES):
            other = draw(_ENTITY + attempt, torch.full_like(count, size), episode)
            query = _replaced(triple, tail, other)
            fine = ~find(self._known, self.graph.key(query))[1]
            entity = torch.where(~valid & fine, other, entity)
            valid = valid | fine
        return _replaced(triple, tail, entity), valid

    # --- observations -------------------------------------------------------------------------

    def observe(self, state: TensorDict) -> TensorDict:
        """What the policy sees, compact.

        `query` int64 [B, 3]; `hidden` bool [B, 2], whether a training fact is hidden that has the
        query's predicate and head, or tail (its share in counts is then taken off); `prior` float
        [B] log-odds of the query by the symbolic baseline; `root` bool [B]; `kind` int64 [B, S];
        `evidence`, `ways` float [B, S]; `left` int64 [B, S] goals that a successor leaves;
        `action_mask` bool [B, S + 1]; `active` bool [B].
        """
        key = self.graph.key(state["query"])
        return TensorDict(
            {
                "query": state["query"],
                "hidden": state["hidden"],
                "prior": self._kb.closure.log_odds(key),
                "root": state["depth"] == 0,
                "kind": state["kind"],
                "evidence": state["evidence"],
                "ways": state["ways"],
                "left": (state["successors"] >= 0).sum(-1),
                "action_mask": state["action_mask"],
                "active": ~state["idle"] & ~state["truncated"],
            },
            batch_size=state.batch_size,
        )


def _replaced(triple: Tensor, tail: Tensor, entity: Tensor) -> Tensor:
    return torch.stack(
        [
            triple[:, 0],
            torch.where(tail, triple[:, 1], entity),
            torch.where(tail, entity, triple[:, 2]),
        ],
        -1,
    )


def _where(condition: Tensor, one: TensorDict, other: TensorDict) -> TensorDict:
    fields = {}
    for name in other.keys():  # noqa: SIM118
        shape = (-1, *[1] * (other[name].ndim - 1))
        fields[name] = torch.where(condition.view(shape), one[name], other[name])
    return TensorDict(fields, batch_size=other.batch_size)
