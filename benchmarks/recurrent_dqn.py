"""A recurrent DQN, one of the study's rivals: double Q-learning from a replay of rollouts.

In the manner of R2D2 (Kapturowski et al. 2019), without priorities and distributed actors: what is
replayed are sequences with the state in which the LSTM began them, whose first ticks only warm it
up; double Q-learning (van Hasselt et al. 2016) against a target network that follows at intervals.
The network is that of `benchmarks.learning_peers`, its critic and actor the value and the
advantages of a duelling network (Wang et al. 2016).
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.learning_peers import GAMMA, Everyone, LstmPolicy, State

LEARNING_RATE, MAX_NORM = 5e-4, 10.0
EXPLORED, EPSILON = 0.3, 0.02
"""Share of the iterations over which random actions become fewer, and how many stay."""
REPLAYED, BATCH, FOLLOWS = 4096, 32, 100
"""Sequences kept, sequences of an update, updates between copies to the target network."""
WARM_UP = 8


class RecurrentDQN:
    """A `Learner`.

    Args:
        lanes: what it plays.
        rollout: ticks collected per iteration: the length of the sequences.
        updates: of each iteration.
        iterations: over which exploration is planned.
        hidden: width of the linear layer and of the LSTM.
    """

    def __init__(
        self, lanes: Everyone, rollout: int, updates: int, iterations: int, hidden: int, seed: int
    ) -> None:
        torch.manual_seed(seed)
        self.lanes, self.rollout, self.updates, self.planned = lanes, rollout, updates, iterations
        self.now = torch.from_numpy(lanes.reset(seed=seed)[0])
        self.network = LstmPolicy(self.now.shape[1], hidden, lanes.town.num_actions)
        self.target = copy.deepcopy(self.network)
        self.optimizer = torch.optim.Adam(self.network.parameters(), LEARNING_RATE, eps=1e-5)
        count, kept = lanes.num_envs, max(REPLAYED, lanes.num_envs)
        self.begun = torch.ones(count)
        self.memory: State = torch.zeros(count, hidden), torch.zeros(count, hidden)
        self.replay = {
            "seen": torch.zeros(rollout + 1, kept, self.now.shape[1]),
            "begins": torch.zeros(rollout + 1, kept),
            "action": torch.zeros(rollout, kept, dtype=torch.int64),
            "reward": torch.zeros(rollout, kept),
            "h": torch.zeros(1, kept, hidden),
            "c": torch.zeros(1, kept, hidden),
        }
        self.stored = self.done = self.updated = 0

    def learn(self, iterations: int) -> None:
        for _ in range(iterations):
            self._collect(max(EPSILON, 1 - self.done / (EXPLORED * self.planned)))
            for _ in range(self.updates):
                self._update()
            self.done += 1

    @torch.no_grad()
    def _collect(self, epsilon: float) -> None:
        """A rollout of every lane into the replay, in place of the oldest sequences."""
        count, replay = self.lanes.num_envs, self.replay
        kept = replay["h"].shape[1]
        rows = (self.stored + torch.arange(count)) % kept
        replay["h"][0, rows], replay["c"][0, rows] = self.memory
        for t in range(self.rollout + 1):
            replay["seen"][t, rows], replay["begins"][t, rows] = self.now, self.begun
            if t == self.rollout:
                break  # the sequence's last observation is the next one's first
            q, self.memory = self._tick(self.now, self.memory, self.begun)
            action = _explore(q, epsilon)
            after, reward, ended, _, _ = self.lanes.step(action.numpy())
            replay["action"][t, rows] = action
            replay["reward"][t, rows] = torch.from_numpy(reward)
            self.now, self.begun = torch.from_numpy(after), torch.from_numpy(ended).float()
        self.stored += count

    def _update(self) -> None:
        replay, filled = self.replay, min(self.stored, self.replay["h"].shape[1])
        rows = torch.randint(filled, (BATCH,))
        batch = {name: value[:, rows] for name, value in replay.items()}
        inputs = batch["seen"], (batch["h"], batch["c"]), batch["begins"]
        q = _q(*self.network(*inputs))
        with torch.no_grad():
            best = q[1:].argmax(-1, keepdim=True)
            later = _q(*self.target(*inputs))[1:].gather(-1, best).squeeze(-1)
            wanted = batch["reward"] + GAMMA * (1 - batch["begins"][1:]) * later
        chosen = q[:-1].gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
        loss = F.smooth_l1_loss(chosen[WARM_UP:], wanted[WARM_UP:])
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), MAX_NORM)
        self.optimizer.step()
        self.updated += 1
        if self.updated % FOLLOWS == 0:
            self.target.load_state_dict(self.network.state_dict())

    def _tick(self, seen: Tensor, memory: State, begun: Tensor) -> tuple[Tensor, State]:
        """Q-values [L, A] of one tick, and the new memory."""
        kept = memory[0][None], memory[1][None]
        advantages, values, (h, c) = self.network(seen[None], kept, begun[None])
        return _q(advantages, values)[0], (h[0], c[0])

    @torch.no_grad()
    def act(self, seen: Tensor, memory: State) -> tuple[Tensor, State]:
        q, memory = self._tick(seen, memory, torch.zeros(len(seen)))
        return _explore(q, EPSILON), memory


def _q(advantages: Tensor, values: Tensor, *memory: State) -> Tensor:
    """float32 [T, L, A] from advantages [T, L, A] and values [T, L]."""
    return values.unsqueeze(-1) + advantages - advantages.mean(-1, keepdim=True)


def _explore(q: Tensor, epsilon: float) -> Tensor:
    """int64 [L] the best action of q float32 [L, A], or, rarely, any."""
    anything = torch.randint(q.shape[1], (len(q),))
    return torch.where(torch.rand(len(q)) < epsilon, anything, q.argmax(-1))
