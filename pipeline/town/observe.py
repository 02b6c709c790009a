"""What agents may know and do: the legal actions, and what each of them sees."""

from __future__ import annotations

import math

import torch
from tensordict import TensorDict
from torch import Tensor

from hamlet.town.constants import TownConstants
from hamlet.town.schema import INTERACT, WAIT
from hamlet.town.vectors import agent_major, together, unfold


def is_open(town: TownConstants, place: Tensor, hour: Tensor, phase: Tensor) -> Tensor:
    """Whether a place, int32 [N, B], is open at the hour, int32 [B]."""
    return ((town.open_bits(place, phase) >> hour) & 1).bool()


def is_held(
    town: TownConstants, s: dict[str, Tensor], meters: list[Tensor], phase: Tensor
) -> Tensor:
    """Who is in the middle of an uninterruptible use and able to continue: bool [N, B]."""
    last = s["last_affordance"]
    held = (s["progress"] > 0) & (town.uninterruptible(last, phase) > 0)
    held = held & is_open(town, last, s["hour"], phase)
    for index, column in enumerate(town.prices):
        if column is not None:
            held = held & (meters[index] >= column(last, phase))
    return held


def legal(town: TownConstants, s: dict[str, Tensor]) -> Tensor:
    """The legal actions in compact form: int32 [N, B], bit a set where action a is legal.

    Being broke does not close a place (trying costs a tick). The dead may only WAIT.
    """
    x, y = s["position"]
    phase = town.phase_of(s["tick"])
    usable = s["place"] >= 0
    if town.pack.temporal:
        usable = usable & is_open(town, s["place"], s["hour"], phase)
    free = s["alive"]
    if town.has_held:
        free = free & ~is_held(town, s, list(s["meters"]), phase)
    bits = torch.full_like(x, sum(1 << a for a in range(WAIT, town.num_actions)))
    bits = torch.add(bits, usable, alpha=1 << INTERACT)
    bits = torch.where(s["alive"], bits, 1 << WAIT)
    inside = ((y > 0), (y < town.height - 1), (x > 0), (x < town.width - 1))
    for move, possible in enumerate(inside):
        bits = torch.add(bits, free & possible, alpha=1 << move)
    return bits


def legal_mask(town: TownConstants, s: dict[str, Tensor]) -> Tensor:
    """The legal actions: bool [A, N, B]."""
    return unfold(legal(town, s), town.each_action).bool()


def observe(town: TownConstants, state: TensorDict) -> TensorDict:
    """What each agent may see: a TensorDict of batch [B] with fields [B, N, ...].

    view uint8 [B,N,S,S] cell codes around the agent (S = 2 * vision + 1, first index dy);
    occupancy uint8 [B,N,S,S] other living agents in the cell; self_state f32 [B,N,K] named by
    `self_names`; of the M = N-1 others in slot order: visible bool [B,N,M], cues f32 [B,N,M,C],
    others_offset f32 [B,N,M,2] (cells / 4), others_action int64 [B,N,M] (A when not visible),
    comm int64 [B,N,M] (kin only, else 0); action_mask bool [B,N,A].
    """
    s = agent_major(state)
    reach, side = town.vision, 2 * town.vision + 1
    x, y = s["position"]
    cell = town.row_of(s["layout"], y * town.width + x)
    view = town.view_table[cell].view(torch.uint8)[..., : side * side]

    # Of the others, [M, N, B] by slot: the agents before one, then those after it.
    acted = torch.where(s["alive"], s["last_action"].int(), -1)
    told = s["comm"] if town.pack.families else torch.zeros_like(x)
    public = together([x, y, acted, s["cue_bits"], told, legal(town, s)])
    other_x, other_y, acted, bits, told = public[:5, town.others]
    dx, dy = other_x - x, other_y - y
    apart = torch.maximum(dx.abs(), dy.abs())
    near = (acted >= 0) & (apart <= reach)
    visible = (acted >= 0) & (apart <= town.pack.cue_distance)
    others = together(
        [
            torch.where(near, (dy + reach) * side + dx + reach, -1),
            torch.where(visible, dx, 0),
            torch.where(visible, dy, 0),
            torch.where(visible, acted, town.num_actions),
            torch.where(visible, bits & town.cue_rules.allowed(apart, town.kin), 0),
            torch.where(town.kin & (acted >= 0), told, 0),
        ]
    )
    spots, _, _, acts, bits, told = others
    # Laid out as it is read: to turn the cues, the most numbers of all, takes longer than the rest.
    shown = bits.permute(2, 1, 0).contiguous().unsqueeze(-1)
    crowd = torch.zeros((side * side, *x.shape), dtype=torch.uint8, device=x.device)
    for spot in spots:
        crowd = crowd + (spot == town.each_spot)

    angle = s["hour"].float() * (2.0 * math.pi / 24.0)
    known = [
        s["meters"].flatten(0, 1),
        x.float() * (1.0 / (town.width - 1)),
        y.float() * (1.0 / (town.height - 1)),
        angle.sin().expand(x.shape),
        angle.cos().expand(x.shape),
        s["progress"].float() * 0.1,
        (s["tick"].float() * (1.0 / town.lifespan)).expand(x.shape),
        s["blocked"].float(),
    ]
    return TensorDict(
        {
            "view": view.transpose(0, 1).unflatten(2, (side, side)),
            "occupancy": crowd.unflatten(0, (side, side)).permute(3, 2, 0, 1),
            "self_state": torch.cat(known).unflatten(0, (-1, len(x))).permute(2, 1, 0),
            "cues": unfold(shown, town.each_cue).float(),
            "visible": (acts < town.num_actions).permute(2, 1, 0),
            "others_offset": (others[1:3] * 0.25).permute(3, 2, 1, 0),
            "others_action": acts.long().permute(2, 1, 0),
            "comm": told.long().permute(2, 1, 0),
            "action_mask": unfold(public[5], town.each_action).bool().permute(2, 1, 0),
        },
        batch_size=[x.shape[1]],
    )
