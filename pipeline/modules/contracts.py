"""The language the modules speak: what each one receives and what it hands on.

All contracts are named tuples of tensors with one leading batch dimension ``[.]`` (agents of all
worlds, flattened). Named tuples are what ``torch.export``, ``torch.compile`` and the ONNX exporter
understand without registration, so the same type serves training, the frozen graphs and the agent.

Sizes: N meters, K self-state fields (the meters first), M other agents, C cue bits, A actions, F
affordances, G goals, S side of the view, V cell codes, D belief dimensions (2 per affordance, LOOK,
then L latent), R recurrent state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hamlet.artifacts import HamletError
from hamlet.moving import constant

STEPS = {"UP": (0.0, -1.0), "DOWN": (0.0, 1.0), "LEFT": (-1.0, 0.0), "RIGHT": (1.0, 0.0)}
"""Cells to the right and down that an action moves; others move none."""
LEADS = (0.0, 3.0, 6.0)
"""Ticks by which somebody may be at a place before the agent."""
OFFSET_UNIT = 4.0
"""Cells in which `others_offset` is told."""
PROGRESS = 10
"""Ticks of use that are told apart."""
PLACE_STD_MIN = 0.02
"""Deviation, in map sizes, of a place that is known: a sixth of a cell on an 8x8 map."""
WAY = 2
"""Dimensions of a way on the map."""
LOOK = 2 * WAY + 1
"""Dimensions of the belief that say where to look for what was not seen yet: the way of who looks
around, the way of who scouts, and how much is left to be seen."""


@dataclass(frozen=True)
class TownShape:
    """The sizes of one town, as plain numbers: all that a module needs to know of its world."""

    width: int
    height: int
    num_agents: int
    num_actions: int
    num_affordances: int
    num_goals: int
    num_cell_codes: int
    num_cues: int
    self_dim: int
    vision: int
    """Cells that the view shows to each side."""
    lifespan: int
    pack: str
    pack_hash: str
    action_names: tuple[str, ...]
    affordance_names: tuple[str, ...]
    goal_names: tuple[str, ...]
    meter_names: tuple[str, ...]
    cue_names: tuple[str, ...]
    self_names: tuple[str, ...]
    telling_cues: tuple[int, ...]
    """The cues that tell which place their bearer is at, those that tell it best last."""
    vital_meters: tuple[int, ...]
    """The meters whose running out ends a life."""
    paid_in: int
    """The meter in which prices are."""

    @property
    def num_others(self) -> int:
        return self.num_agents - 1

    @property
    def num_meters(self) -> int:
        return len(self.meter_names)

    @property
    def view_side(self) -> int:
        return 2 * self.vision + 1

    @property
    def num_cells(self) -> int:
        return self.width * self.height

    @classmethod
    def of(cls, town: Any) -> TownShape:
        width, height = town.grid
        return cls(
            width=width,
            height=height,
            num_agents=town.num_agents,
            num_actions=town.num_actions,
            num_affordances=town.num_affordances,
            num_goals=town.num_goals,
            num_cell_codes=town.num_cell_codes,
            num_cues=town.num_cues,
            self_dim=town.self_dim,
            vision=town.vision,
            lifespan=town.lifespan,
            pack=town.pack.name,
            pack_hash=town.pack.content_hash,
            action_names=tuple(town.action_names),
            affordance_names=tuple(town.affordance_names),
            goal_names=tuple(town.goal_names),
            meter_names=tuple(town.meter_names),
            cue_names=tuple(town.cue_names),
            self_names=tuple(town.self_names),
            telling_cues=tuple(town.telling_cues),
            vital_meters=tuple(town.vital_meters),
            paid_in=town.paid_in,
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TownShape:
        plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        return cls(**plain)

    def to_dict(self) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}


class RawObservation(NamedTuple):
    """What one agent senses in one tick. Nothing here is privileged."""

    view: Tensor
    """uint8 [., S, S] cell codes around the agent, which is in the middle, by row and column: 0
    empty, 1..F affordance, F+1 outside the map."""
    occupancy: Tensor
    """uint8 [., S, S] number of other living agents in the cell."""
    self_state: Tensor
    """float32 [., K] the meters in [0, 1], position / (size - 1), sin and cos of the hour,
    interaction progress / 10, age / lifespan, blocked flag."""
    cues: Tensor
    """float32 [., M, C] public cue bits of the others, zero when not visible."""
    visible: Tensor
    """bool [., M]."""
    others_offset: Tensor
    """float32 [., M, 2] (dx, dy) / 4 cells, zero when not visible."""
    others_action: Tensor
    """int64 [., M] last action; A when not visible."""
    comm: Tensor
    """int64 [., M] what the family wrote on the board; 0 for strangers."""
    action_mask: Tensor
    """bool [., A] legal actions."""


class BeliefDistribution(NamedTuple):
    """What the agent believes after perceiving (module A)."""

    mean: Tensor
    """float32 [., D] Gaussian mean. The first 2F numbers are the believed offset (dx, dy) of each
    affordance from the agent, in units of the map's size; then the offset of the cell from which
    most could be newly seen, that of the cell from which most could be seen that nobody was seen to
    look at, and the share of the map never seen; the rest is the latent."""
    log_std: Tensor
    """float32 [., D] logarithm of the standard deviation, same units: large = not known."""
    known_state: Tensor
    """float32 [., K] the self-state, known exactly."""
    social_cues: Tensor
    """float32 [., M, C]."""
    recurrent_state: Tensor
    """float32 [., R] hidden state, then one number per cell: 0 nothing known; its code + 1 where it
    was seen; V + 1 where somebody else was seen to have it in view; and V + 1 + the rank, from 1,
    among `telling_cues` of the one that somebody showed there."""


class ImaginedFuture(NamedTuple):
    """What the world model expects of C candidate goals over H ticks (module B)."""

    actions: Tensor
    """int64 [., C, H] what the controller would do."""
    known_state: Tensor
    """float32 [., C, H, K]."""
    rewards: Tensor
    """float32 [., C, H]."""
    continues: Tensor
    """float32 [., C, H] probability of being alive after the tick."""
    values: Tensor
    """float32 [., C, H] expected discounted return from there, in rewards."""
    confidence: Tensor
    """float32 [., C] in [0, 1], from the error to be expected of it."""
    uncertainty_reason: Tensor
    """int64 [., C] index into UNCERTAINTY_REASONS."""


class SocialPrediction(NamedTuple):
    """What the agent expects of each other agent (module C)."""

    goal_dist: Tensor
    """float32 [., M, G] probability of each hidden goal."""
    next_action_dist: Tensor
    """float32 [., M, A]."""
    confidence: Tensor
    """float32 [., M] probability that the likeliest goal is the true one."""
    reason: Tensor
    """int64 [., M] index into SOCIAL_REASONS."""
    ahead: Tensor
    """float32 [., F, 3] how many of the visible others are expected to want each place and to be
    there at least so many ticks of LEADS before the agent could be."""


class Goal(NamedTuple):
    """What the meta-controller wants (module D1); it ends when its target is reached, when it is
    `meta_period` ticks old, or in an emergency."""

    goal_type: Tensor
    """int64 [.] index into the town's goal names."""
    priority: Tensor
    """float32 [.] probability that the meta-controller gave it."""
    target_meters: Tensor
    """float32 [., N] meter levels at which the goal counts as reached (0 = not asked for)."""
    age: Tensor
    """int64 [.] ticks since it was chosen."""


class Features(NamedTuple):
    """What D sees of the frozen modules' outputs; plain tensors, so updates need no recurrence."""

    mean: Tensor
    """float32 [., D]."""
    log_std: Tensor
    """float32 [., 2F] of the affordances' places."""
    known_state: Tensor
    """float32 [., K]."""
    rivals: Tensor
    """float32 [., G] expected number of others pursuing each goal, weighted by confidence."""
    ahead: Tensor
    """float32 [., F, 3] of `SocialPrediction`."""
    pursued: Tensor
    """int64 [.] the goal that was pursued until now; G at the beginning of a life."""
    moved: Tensor
    """int64 [.] the last action + 1; 0 at the beginning of a life."""


def rivals_of(social: SocialPrediction) -> Tensor:
    """float32 [., G] from a `SocialPrediction`; zeros where there are no others."""
    if not social.goal_dist.shape[-2]:
        return social.goal_dist.new_zeros(*social.goal_dist.shape[:-2], social.goal_dist.shape[-1])
    return (social.goal_dist * social.confidence.unsqueeze(-1)).sum(-2)


def others_of(x: Tensor) -> Tensor:
    """[T, B, N, ...] -> [T, B, N, N-1, ...]: for every agent, the others in slot order."""
    n = x.shape[2]
    if n == 1:
        return x.unsqueeze(3)[:, :, :, :0]
    others = [[j for j in range(n) if j != i] for i in range(n)]
    index = constant(others, torch.int64, x.device)
    return x[:, :, index]


UNCERTAINTY_REASONS = ("none", "novel_state", "high_variance")
SOCIAL_REASONS = ("none", "unseen", "conflicting_cues")

OBSERVATION_DTYPES = {
    "view": "uint8",
    "occupancy": "uint8",
    "self_state": "float32",
    "cues": "float32",
    "visible": "bool",
    "others_offset": "float32",
    "others_action": "int64",
    "comm": "int64",
    "action_mask": "bool",
}


def observation_shapes(shape: TownShape) -> dict[str, tuple[int, ...]]:
    """Trailing shape of every observation field, without the batch."""
    m, side = shape.num_others, shape.view_side
    return {
        "view": (side, side),
        "occupancy": (side, side),
        "self_state": (shape.self_dim,),
        "cues": (m, shape.num_cues),
        "visible": (m,),
        "others_offset": (m, 2),
        "others_action": (m,),
        "comm": (m,),
        "action_mask": (shape.num_actions,),
    }


def validate_observation(fields: Mapping[str, Tensor], shape: TownShape) -> None:
    """Check names, dtypes and trailing shapes once, at a stage's boundary.

    Raises:
        HamletError: naming the first field that is missing or wrong, and what it should be.
    """
    for name, trailing in observation_shapes(shape).items():
        if name not in fields.keys():  # noqa: SIM118 - a TensorDict iterates over its batch
            raise HamletError(f"observation field '{name}' is missing: collect the dataset again")
        tensor = fields[name]
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype != OBSERVATION_DTYPES[name] or tuple(tensor.shape[-len(trailing) :]) != trailing:
            raise HamletError(
                f"observation field '{name}' is {dtype} {list(tensor.shape)}, expected "
                f"{OBSERVATION_DTYPES[name]} [..., {', '.join(map(str, trailing))}]"
            )


def observation_from(fields: Mapping[str, Tensor], batch_dims: int) -> RawObservation:
    """Flatten the first `batch_dims` dimensions of every field into one batch."""
    return RawObservation(
        *(fields[name].flatten(0, batch_dims - 1) for name in RawObservation._fields)
    )
