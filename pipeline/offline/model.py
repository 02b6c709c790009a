"""The policy of a log, built from its schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from hamlet.modules.categorical import masked_logits
from hamlet.offline.schema import Field, Schema

CODES = 8  # numbers that stand for a code of a grid


class LogPolicy(nn.Module):
    """Logits over the actions and a value, from the fields of a log.

    Vectors are scaled by their mean and deviation in the log; a sequence is read by a GRU, a
    category by an embedding, a grid by two convolutions.

    Args:
        statistics: {"mean", "std"} by field, as `Writer.close` counted them.
        hidden: width.
        recurrent: carry a GRU's state from row to row of an episode.
        scale: size of the returns; the value's network gives parts of it.
    """

    scale: Tensor

    def __init__(
        self,
        schema: Schema,
        statistics: Mapping[str, Any],
        hidden: int,
        recurrent: bool,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.hidden, self.recurrent = hidden, recurrent
        self.register_buffer("scale", torch.tensor(scale))
        self.encoders = nn.ModuleDict(
            {
                f"of_{name}": _Encoder(field, statistics.get(name), hidden)
                for name, field in schema.fields.items()
            }
        )
        self.names = list(schema.fields)
        width = sum(e.width for e in self.encoders.values())  # type: ignore[misc]
        self.body = nn.Sequential(nn.Linear(width, hidden), nn.SiLU())
        self.memory = nn.GRUCell(hidden, hidden) if recurrent else None
        self.trunk = nn.Sequential(nn.Linear(hidden, hidden), nn.SiLU())
        self.logits = nn.Linear(hidden, schema.num_actions)
        self.value = nn.Linear(hidden, 1)
        nn.init.zeros_(self.logits.weight)
        nn.init.zeros_(self.logits.bias)

    def encode(self, rows: Mapping[str, Tensor]) -> Tensor:
        """float [R, hidden] of rows [R, ...], before the memory."""
        parts = [self.encoders[f"of_{name}"](rows[name]) for name in self.names]
        return self.body(torch.cat(parts, -1))

    def features(self, rows: TensorDict) -> Tensor:
        """float [T, W, hidden]: what both heads read; memory begins anew where `first`."""
        shape = rows.batch_size
        x = self.encode({name: rows[name].flatten(0, 1) for name in self.names})
        x = x.unflatten(0, shape)
        if self.memory is not None:
            state = x.new_zeros(shape[1], self.hidden)
            states = []
            for t in range(shape[0]):
                state = self.memory(x[t], state * ~rows["first"][t].unsqueeze(-1))
                states.append(state)
            x = torch.stack(states)
        return self.trunk(x)

    def heads(self, features: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Logits float32 [..., A], of illegal actions -3.4e38, and values float32 [...]."""
        logits = self.logits(features).float()
        if mask is not None:
            logits = masked_logits(logits, mask)
        return logits, self.value_of(features)

    def value_of(self, features: Tensor) -> Tensor:
        """Values float32 [...]."""
        return self.value(features).squeeze(-1).float() * self.scale

    def forward(self, rows: TensorDict) -> tuple[Tensor, Tensor]:
        """Logits [T, W, A] and values [T, W] of time-major rows, as `LogStore.read` gives them."""
        return self.heads(self.features(rows), rows.get("action_mask", None))


class _Encoder(nn.Module):
    mean: Tensor
    std: Tensor

    def __init__(self, field: Field, statistics: Any, hidden: int) -> None:
        super().__init__()
        self.kind, self.codes = field.kind, field.count
        shape = field.trailing
        if field.count is None:
            broadcast = {"vector": (-1,), "sequence": (-1,), "grid": (-1, 1, 1)}[field.kind]
            for name in ("mean", "std"):
                self.register_buffer(name, torch.tensor(statistics[name]).view(broadcast))
        self.width = hidden
        if field.kind == "vector":
            self.width = shape[0]
        elif field.kind == "sequence":
            self.cell = nn.GRUCell(shape[1], hidden)
        elif field.kind == "category":
            assert field.count is not None
            self.table = nn.Embedding(field.count, hidden)
        else:
            channels, rows, columns = shape if field.count is None else (CODES, *shape)
            if field.count:
                self.table = nn.Embedding(field.count, CODES)
            self.picture = nn.Sequential(
                nn.Conv2d(channels, 16, 3, padding=1),
                nn.SiLU(),
                nn.Conv2d(16, 16, 3, stride=2, padding=1),
                nn.SiLU(),
                nn.Flatten(),
                nn.Linear(16 * ((rows + 1) // 2) * ((columns + 1) // 2), hidden),
                nn.SiLU(),
            )

    def forward(self, x: Tensor) -> Tensor:
        """float [R, width] of one field's rows [R, ...]."""
        if self.codes is None:
            x = (x - self.mean) / self.std
        if self.kind == "vector":
            return x
        if self.kind == "category":
            return self.table(x)
        if self.kind == "sequence":
            state = x.new_zeros(x.shape[0], self.width)
            for i in range(x.shape[1]):
                state = self.cell(x[:, i], state)
            return state
        if self.codes:
            x = self.table(x).permute(0, 3, 1, 2)
        return self.picture(x)


class Tick(nn.Module):
    """One decision, for export: the fields in order, `action_mask` if the log has one, and
    `state_memory` if the policy is recurrent.

    Returns `action` int64 [B], the likeliest; `probability` float32 [B, A]; `value` float32 [B];
    and `next_memory` if the policy is recurrent.
    """

    def __init__(self, policy: LogPolicy, masked: bool) -> None:
        super().__init__()
        self.policy, self.masked = policy, masked

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        policy = self.policy
        n = len(policy.names)
        x = policy.encode(dict(zip(policy.names, tensors[:n])))
        after: tuple[Tensor, ...] = ()
        if policy.memory is not None:
            x = policy.memory(x, tensors[-1])
            after = (x,)
        logits, value = policy.heads(policy.trunk(x), tensors[n] if self.masked else None)
        return (logits.argmax(-1), logits.softmax(-1), value, *after)
