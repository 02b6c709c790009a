"""Module B: an ensemble that predicts one tick from belief and action, fed its own predictions.

The members see different parts of every minibatch and start from different weights; where they
disagree the agent has not been. Each predicts changes, in units of the data's own deviation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.modules.contracts import METERS, TownShape


class Prediction(NamedTuple):
    """One predicted tick; [E, .] for the members, [.] for their mean."""

    mean: Tensor
    """float32 [., D] next belief mean."""
    log_std: Tensor
    """float32 [., D] next belief deviation; the latent's is carried over."""
    known_state: Tensor
    """float32 [., K]."""
    reward: Tensor
    """float32 [.]."""
    continue_logit: Tensor
    """float32 [.] log-odds of being alive after the tick."""
    value: Tensor
    """float32 [.] expected discounted return after the tick, in rewards."""
    legal_logit: Tensor
    """float32 [., A] log-odds of each action being legal at the next tick."""


class EnsembleLinear(nn.Module):
    """E independent linear layers as one batched product: [E, B, in] -> [E, B, out]."""

    def __init__(self, members: int, inputs: int, outputs: int) -> None:
        super().__init__()
        bound = inputs**-0.5
        self.weight = nn.Parameter(torch.empty(members, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(members, 1, outputs).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, x, self.weight)


class WorldModel(nn.Module):
    """Ensemble of one-tick predictors.

    Args:
        shape: sizes of the town.
        latent: L of the belief.
        width: hidden units of each member.
        members: E.
    """

    scale: Tensor
    disagreement_scale: Tensor
    novel_threshold: Tensor

    def __init__(self, shape: TownShape, latent: int, width: int, members: int) -> None:
        super().__init__()
        self.shape, self.latent, self.members = shape, latent, members
        self.places = 2 * shape.num_affordances
        d, k, a = self.places + latent, shape.self_dim, shape.num_actions
        self.sizes = [d, self.places, k, 1, 1, 1, a]
        inputs = d + self.places + k + shape.num_affordances + a
        self.layers = nn.ModuleList(
            [
                EnsembleLinear(members, inputs, width),
                EnsembleLinear(members, width, width),
                EnsembleLinear(members, width, sum(self.sizes)),
            ]
        )
        # Deviation of every predicted number in the training data: the unit of its error.
        self.register_buffer("scale", torch.ones(sum(self.sizes)))
        # Disagreement at which confidence has fallen to 1/e per tick, and that of a novel state.
        self.register_buffer("disagreement_scale", torch.tensor(1.0))
        self.register_buffer("novel_threshold", torch.tensor(1.0))

    def inputs(self, mean: Tensor, log_std: Tensor, known_state: Tensor, action: Tensor) -> Tensor:
        offsets = mean[..., : self.places].unflatten(-1, (-1, 2))
        cells = offsets * offsets.new_tensor([self.shape.width, self.shape.height])
        underfoot = (-4 * cells.square().sum(-1)).exp()
        chosen = F.one_hot(action, self.shape.num_actions).to(mean.dtype)
        spread = log_std[..., : self.places]
        return torch.cat([mean, spread, known_state, underfoot, chosen], -1)

    def members_step(
        self, mean: Tensor, log_std: Tensor, known_state: Tensor, action: Tensor
    ) -> Prediction:
        """Every member predicts from its own state: [E, B, ...] in, [E, B, ...] out."""
        x = self.inputs(mean, log_std, known_state, action)
        for layer in self.layers[:-1]:
            x = F.silu(layer(x))
        out = self.layers[-1](x) * self.scale
        d_mean, d_spread, d_known, reward, cont, value, legal = out.split(self.sizes, -1)
        spread, latent_spread = log_std.split([self.places, self.latent], -1)
        meters, rest = (known_state + d_known).split([METERS, self.shape.self_dim - METERS], -1)
        return Prediction(
            mean=mean + d_mean,
            log_std=torch.cat([spread + d_spread, latent_spread], -1),
            known_state=torch.cat([meters.clamp(0, 1), rest], -1),
            reward=reward.squeeze(-1),
            continue_logit=cont.squeeze(-1),
            value=value.squeeze(-1),
            legal_logit=legal,
        )

    def forward(
        self, mean: Tensor, log_std: Tensor, known_state: Tensor, action: Tensor
    ) -> tuple[Tensor, ...]:
        """The members' mean prediction from one shared state.

        Args:
            mean, log_std: float32 [., D]; known_state: float32 [., K]; action: int64 [.].

        Returns:
            mean, log_std, known_state, reward, continue probability, value, legal logits of
            `Prediction` without the member axis, then disagreement float32 [.] (deviation of the
            members' next meters and reward, root mean square), confidence float32 [.] in [0, 1]
            and novel bool [.].
        """
        expand = (self.members, -1, -1)
        members = self.members_step(
            mean.expand(expand),
            log_std.expand(expand),
            known_state.expand(expand),
            action.expand(self.members, -1),
        )
        disagreement = self.disagreement(members)
        p = Prediction(*(x.mean(0) for x in members))
        return (
            p.mean,
            p.log_std,
            p.known_state,
            p.reward,
            p.continue_logit.sigmoid(),
            p.value,
            p.legal_logit,
            disagreement,
            (-disagreement / self.disagreement_scale).exp(),
            disagreement > self.novel_threshold,
        )

    def disagreement(self, members: Prediction) -> Tensor:
        """float32 [B] spread of the members over next meters and reward."""
        looked_at = torch.cat([members.known_state[..., :METERS], members.reward[..., None]], -1)
        centred = looked_at - looked_at.mean(0)
        # The first axis: along the last one ONNX Runtime sums in an order that depends on where in
        # memory a row stands.
        squares = centred.square().permute(0, 2, 1).flatten(0, 1)
        return squares.mean(0).clamp_min(1e-12).sqrt()
