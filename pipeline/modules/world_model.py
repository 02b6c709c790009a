"""Module B: one tick from belief and action, fed its own predictions.

Two parts. An ensemble of networks says what can only be guessed: whether a place is free, how the
belief will move, what the future is worth, how wrong all this may be. A table of rules, one for all
members, says what follows exactly: what a tick of use does at every stage of it, what a move or a
low meter costs, what a set of meters is worth. Everything in it is learned; given are only the
forms. The rules are sharp, and what is sharp enlarges rounding: so they are piecewise linear with
level tops, and the frozen graph works them out in double precision, once, for the mean of the
members.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hamlet.modules.contracts import LOOK, PROGRESS, TownShape
from hamlet.moving import constant, one_hot

HOURS = 24
KNOTS = 10  # per meter: where its effect on the others may change its slope
RULE_UNIT = 0.2
ERROR_UNIT = 0.01


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
    free_logit: Tensor
    """float32 [.] log-odds that the place the agent would use is free for it."""
    log_error: Tensor
    """float32 [.] logarithm of the error to be expected of the next meters, their mean."""


class EnsembleLinear(nn.Module):
    """E independent linear layers as one batched product: [E, B, in] -> [E, B, out]."""

    def __init__(self, members: int, inputs: int, outputs: int) -> None:
        super().__init__()
        bound = inputs**-0.5
        self.weight = nn.Parameter(torch.empty(members, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(members, 1, outputs).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, x, self.weight)


class Rule(nn.Module):
    """A linear layer that begins at zero and computes in the precision of its input."""

    def __init__(self, inputs: int, outputs: int, unit: float = 1.0) -> None:
        super().__init__()
        self.unit = unit  # of what it says, so that one learning rate suits all
        self.weight = nn.Parameter(torch.zeros(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.to(x.dtype) * self.unit, self.bias.to(x.dtype) * self.unit
        return x @ weight + bias


def level(distance: Tensor) -> Tensor:
    """1 up to a distance of 1/4, 0 from 3/4 on, linear between: whole numbers' neighbours add to
    1, and a small error in what is nearly whole changes nothing."""
    return (1.5 - 2 * distance).clamp(0.0, 1.0)


class WorldModel(nn.Module):
    """Rules and an ensemble of one-tick predictors.

    Args:
        shape: sizes of the town.
        latent: L of the belief.
        width: hidden units of each member.
        members: E.
    """

    hours: Tensor
    scale: Tensor
    error_scale: Tensor
    novel_threshold: Tensor

    def __init__(self, shape: TownShape, latent: int, width: int, members: int) -> None:
        super().__init__()
        # To this module all of the belief but the places is one latent.
        self.shape, self.latent, self.members = shape, LOOK + latent, members
        f, k, a = shape.num_affordances, shape.self_dim, shape.num_actions
        meters = shape.num_meters
        self.places = 2 * f
        d = self.places + self.latent
        self.sizes = [d, self.places, k, 1, 1, a, 1, 1]
        inputs = d + self.places + k + f + a + 1
        self.layers = nn.ModuleList(
            [
                EnsembleLinear(members, inputs, width),
                EnsembleLinear(members, width, width),
                EnsembleLinear(members, width, sum(self.sizes)),
            ]
        )
        self.effects = Rule(f * PROGRESS + f + 2 * a + meters * KNOTS + k + 1, k, RULE_UNIT)
        self.shift = Rule(a, self.places, RULE_UNIT)
        self.worth = Rule(meters * meters + meters + 1, 1)
        self.survival = Rule(meters + 1, 1, 10.0)
        self.open = nn.Parameter(torch.zeros(HOURS, f))
        self.legal = Rule(1 + 4, a, 10.0)
        angle = torch.arange(HOURS) * (2 * torch.pi / HOURS)
        self.register_buffer("hours", torch.stack([angle.sin(), angle.cos()]))
        # Deviation of every number the networks predict in the training data: their unit.
        self.register_buffer("scale", torch.ones(sum(self.sizes)))
        # Expected error at which confidence has fallen to 1/e, and disagreement of a novel state.
        self.register_buffer("error_scale", torch.tensor(ERROR_UNIT))
        self.register_buffer("novel_threshold", torch.tensor(1.0))

    def fields(self, known_state: Tensor, *names: str) -> Tensor:
        """[., len(names)] of the self-state."""
        # Not by a list in brackets: that is exported with transposes, and a product of a transpose
        # in float64 has no kernel in ONNX Runtime before 1.26.
        index = [self.shape.self_names.index(name) for name in names]
        return known_state.index_select(-1, constant(index, torch.int64, known_state.device))

    def places_of(self, mean: Tensor, log_std: Tensor) -> tuple[Tensor, Tensor]:
        """[., F], [., F]: 1 where the agent knows the affordance's place, and where, known, it is
        the agent's own."""
        size = (self.shape.width, self.shape.height)
        places = mean[..., : self.places]
        cells = places * constant(size * self.shape.num_affordances, mean.dtype, mean.device)
        distance = cells.abs().unflatten(-1, (-1, 2)).sum(-1)
        # Known: a deviation of at most half a cell; from a whole cell on it is not.
        spread = log_std[..., : self.places].unflatten(-1, (-1, 2)).amax(-1)
        known = (-math.log2(max(size)) - spread / math.log(2.0)).clamp(0.0, 1.0)
        return known, known * level(distance)

    def inputs(
        self, mean: Tensor, log_std: Tensor, known_state: Tensor, here: Tensor, chosen: Tensor
    ) -> Tensor:
        """[., I] what the networks see; at last, that something is used that is not known."""
        interact = self.shape.action_names.index("INTERACT")
        strange = chosen[..., interact] * (1 - here.sum(-1))
        spread = log_std[..., : self.places]
        return torch.cat([mean, spread, known_state, here, chosen, strange.unsqueeze(-1)], -1)

    def networks(self, x: Tensor) -> Tensor:
        """[E, B, I] -> [E, B, sum(sizes)]: what each member says, in units of `scale`."""
        for layer in self.layers[:-1]:
            x = F.silu(layer(x))
        return self.layers[-1](x)

    def apply_rules(
        self,
        mean: Tensor,
        log_std: Tensor,
        known_state: Tensor,
        places: tuple[Tensor, Tensor],
        chosen: Tensor,
        said: Tensor,
        free: Tensor | None = None,
    ) -> Prediction:
        """The next tick, in the precision of its inputs.

        Args:
            mean, log_std, known_state: [., D], [., D], [., K]; places: of `places_of`.
            chosen: [., A] 1 at the action taken.
            said: [., sum(sizes)] what a network, or their mean, says of it.
            free: [.] whether the place was free for the agent, where that is known; else what is
                predicted is the mean over what is said of it.
        """
        out = said * self.scale.to(mean.dtype)
        d_mean, d_spread, d_known, cont, value, legal, free_logit, log_error = out.split(
            self.sizes, -1
        )
        interact = self.shape.action_names.index("INTERACT")
        located, here = places
        tries = here * chosen[..., interact : interact + 1]
        served = free_logit.sigmoid() if free is None else free.unsqueeze(-1)
        used = tries * served
        refused = tries.sum(-1, keepdim=True) * (1 - served)
        progress = 10 * self.fields(known_state, "progress")
        ticks = torch.arange(PROGRESS, device=mean.device).to(progress.dtype)
        stage = level((progress - ticks).abs())
        using = (used.unsqueeze(-1) * stage.unsqueeze(-2)).flatten(-2)
        knots = torch.arange(1, KNOTS + 1, device=mean.device).to(mean.dtype) / KNOTS
        count = self.shape.num_meters
        low = F.relu(knots - known_state[..., :count].unsqueeze(-1)).flatten(-2)
        facts = [using, used, refused, chosen, chosen * progress, low, known_state]
        d_known = d_known + self.effects(torch.cat(facts, -1))
        meters, rest = (known_state + d_known).split([count, self.shape.self_dim - count], -1)

        # A life ends with a meter, or with age; rewards are products of meters in most packs.
        age = rest[..., self.shape.self_names.index("age") - count, None].detach()
        old = (age * self.shape.lifespan - (self.shape.lifespan - 1)).clamp(0.0, 1.0)
        ends = torch.cat([(-50 * F.relu(meters + 0.02)).exp(), old], -1)
        cont = cont + self.survival(ends)
        meters = meters.clamp(0.0, 1.0)
        known = torch.cat([meters, rest], -1)
        products = (meters.unsqueeze(-1) * meters.unsqueeze(-2)).flatten(-2)
        reward = self.worth(torch.cat([meters, products, old], -1))

        spread, latent_spread = log_std.split([self.places, self.latent], -1)
        # What is known to be somewhere stays there; the agent moves.
        moves, d_latent = d_mean.split([self.places, self.latent], -1)
        unsure = torch.stack([1 - located, 1 - located], -1).flatten(-2)
        moves = moves * unsure + self.shift(chosen)
        mean = mean + torch.cat([moves, d_latent], -1)
        log_std = torch.cat([spread + d_spread, latent_spread], -1)
        clock = self.fields(known, "sin_hour", "cos_hour")
        hour = (clock @ self.hours.to(clock.dtype)).argmax(-1)
        usable = (
            self.places_of(mean, log_std)[1] * F.embedding(hour, self.open.to(mean.dtype)).sigmoid()
        )
        right, down = float(self.shape.width - 1), float(self.shape.height - 1)
        at = self.fields(known, "y", "y", "x", "x")
        walls = at * constant([down, -down, right, -right], known.dtype, known.device)
        walls = walls + constant([0.0, down, 0.0, right], known.dtype, known.device)
        borders = torch.cat([usable.sum(-1, keepdim=True), level(walls.abs())], -1)
        return Prediction(
            mean=mean,
            log_std=log_std,
            known_state=known,
            reward=reward.squeeze(-1),
            continue_logit=cont.squeeze(-1),
            value=value.squeeze(-1),
            legal_logit=legal + self.legal(borders),
            free_logit=free_logit.squeeze(-1),
            log_error=log_error.squeeze(-1).clamp(-4.0, 3.0),
        )

    def members_step(
        self,
        mean: Tensor,
        log_std: Tensor,
        known_state: Tensor,
        action: Tensor,
        free: Tensor,
    ) -> tuple[Prediction, Prediction]:
        """Every member predicts from its own state: [E, B, ...] in, [E, B, ...] out.

        Returns:
            what follows if the place was `free` [E, B] or not, and what follows in the mean.
        """
        places = self.places_of(mean, log_std)
        chosen = one_hot(action, self.shape.num_actions, mean.dtype)
        said = self.networks(self.inputs(mean, log_std, known_state, places[1], chosen))
        given = mean, log_std, known_state, places, chosen, said
        told = self.apply_rules(*given, free)
        with torch.no_grad():
            return told, self.apply_rules(*given)

    def forward(
        self, mean: Tensor, log_std: Tensor, known_state: Tensor, action: Tensor
    ) -> tuple[Tensor, ...]:
        """Predict the next tick.

        Args:
            mean, log_std: float32 [., D]; known_state: float32 [., K]; action: int64 [.].

        Returns:
            mean, log_std, known_state, reward, continue probability, value, legal logits of
            `Prediction` without the member axis, then disagreement float32 [.] (deviation of what
            the members say in units of the data's deviation, root mean square), confidence
            float32 [.] in [0, 1] and novel bool [.].
        """
        exact = mean.double(), log_std.double(), known_state.double()
        places = self.places_of(*exact[:2])
        chosen, exactly = (
            one_hot(action, self.shape.num_actions, x.dtype) for x in (mean, exact[0])
        )
        x = self.inputs(mean, log_std, known_state, places[1].float(), chosen)
        said = self.networks(x.expand(self.members, -1, -1))
        disagreement = self.disagreement(said)
        p = self.apply_rules(*exact, places, exactly, said.mean(0))
        return (
            p.mean.float(),
            p.log_std.float(),
            p.known_state.float(),
            p.reward.float(),
            p.continue_logit.sigmoid().float(),
            p.value.float(),
            p.legal_logit.float(),
            disagreement,
            (-ERROR_UNIT * p.log_error.exp() / self.error_scale.double()).exp().float(),
            disagreement > self.novel_threshold,
        )

    def disagreement(self, said: Tensor) -> Tensor:
        """float32 [B] spread of the members over all they say of anything but the next belief."""
        told = said[..., sum(self.sizes[:2]) :]
        centred = told - told.mean(0)
        # First axes: along the last one ONNX Runtime sums in an order that depends on where in
        # memory a row stands.
        return centred.square().mean(0).t().mean(0).clamp_min(1e-12).sqrt()
