"""What a town is made of: the pack, as a strict schema. Reading one is `load`, its sense `check`.

Amounts are in meter units (0 to 1; money 1.0 = $100) and times in ticks (one tick = one hour).
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hamlet.artifacts import HamletError

MOVES = ("UP", "DOWN", "LEFT", "RIGHT")
BASE_ACTIONS = (*MOVES, "INTERACT", "WAIT")
UP, DOWN, LEFT, RIGHT, INTERACT, WAIT = range(6)
GOALS = ("rest", "explore")
"""Goals beside that of using a place."""
SENSED = ("x", "y", "sin_hour", "cos_hour", "progress", "age", "blocked")
"""What an agent senses of itself beside its meters."""
Unit = Annotated[float, Field(ge=0.0, le=1.0)]
Amount = Annotated[float, Field(ge=-1.0, le=1.0)]
Amounts = dict[str, Amount]


class PackError(HamletError, ValueError):
    """A pack that cannot run. The message is one line: the file, the field and the fix."""


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Meter(Model):
    """A bodily or social quantity in [0, 1]."""

    name: str
    initial: Unit
    depletion: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0


class Cascade(Model):
    """While `source` < `threshold`, `target` loses strength * (threshold - source) / threshold."""

    source: str
    target: str
    threshold: Annotated[float, Field(gt=0.0, le=1.0)]
    strength: Unit


class Modulation(Model):
    """Every tick `target` loses rate * (base + range * (1 - source))."""

    source: str
    target: str
    rate: Unit
    base: Annotated[float, Field(ge=0.0)]
    range: Annotated[float, Field(ge=0.0)]


class Condition(Model):
    """A meter compared with a value."""

    meter: str
    op: Literal["<", "<=", ">", ">="]
    value: float


class CustomAction(Model):
    """An action beyond moving, interacting and waiting: its effects on the meters, per tick."""

    name: str
    effects: Amounts = {}


class Teleport(Model):
    """Named effect: on completion the agent appears at the nearest affordance with this tag."""

    effect: Literal["teleport"]
    tag: str


class Affordance(Model):
    """A place that changes meters when used.

    `hours` [open, close) modulo 24, equal means always; `capacity` users per tick; `exclusive`
    says aloud that one user at a time is the point (capacity must be 1); `quality` scales the
    effects, not the price; `distance_limit` Manhattan cells from which it can be used;
    `interruptible: false` holds a user in place while it can go on; `refund` is the share of the
    money paid that returns when a started use is abandoned.
    """

    name: str
    duration: Annotated[int, Field(ge=1, le=48)] = 1
    hours: tuple[Annotated[int, Field(ge=0, le=47)], Annotated[int, Field(ge=0, le=48)]] = (0, 24)
    price: dict[str, Unit] = {}
    price_per_tick: dict[str, Unit] = {}
    effects_per_tick: Amounts = {}
    effects_on_completion: Amounts = {}
    on_completion: tuple[Teleport, ...] = ()
    capacity: Annotated[int, Field(ge=1, le=64)] | None = None
    exclusive: bool = False
    quality: Annotated[float, Field(gt=0.0, le=4.0)] = 1.0
    distance_limit: Annotated[int, Field(ge=0, le=8)] = 0
    preconditions: tuple[Condition, ...] = ()
    interruptible: bool = True
    refund: Unit = 0.0
    tags: tuple[str, ...] = ()

    def is_open(self, hour: int) -> bool:
        start, end = self.hours[0] % 24, self.hours[1] % 24
        if start == end:
            return True
        return start <= hour < end if start < end else hour >= start or hour < end


class CueTest(Model):
    """One thing a cue looks at: exactly one of the fields."""

    meter: str | None = None
    below: float | None = None
    above: float | None = None
    using: tuple[str, ...] | None = None
    at: tuple[str, ...] | None = None
    action: tuple[str, ...] | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> CueTest:
        kinds = [self.meter, self.using, self.at, self.action]
        if sum(kind is not None for kind in kinds) != 1:
            raise ValueError("a cue test needs exactly one of meter, using, at, action")
        if (self.meter is not None) != ((self.below is None) != (self.above is None)):
            raise ValueError("a meter test needs exactly one of below, above")
        return self


class Cue(Model):
    """A public tell. Tests are joined by `all_of` or `any_of`.

    The cue is raised once its tests held `streak` ticks in a row and stays `decay` ticks longer;
    a raised cue shows with probability `reliability`, an idle one with `false_positive`.
    """

    name: str
    all_of: tuple[CueTest, ...] = ()
    any_of: tuple[CueTest, ...] = ()
    priority: int = 0
    visibility: Literal["public", "family", "private"] = "public"
    distance_limit: Annotated[int, Field(ge=0, le=64)] | None = None
    streak: Annotated[int, Field(ge=1, le=16)] = 1
    decay: Annotated[int, Field(ge=0, le=16)] = 0
    reliability: Unit = 1.0
    false_positive: Unit = 0.0

    @model_validator(mode="after")
    def _one_join(self) -> Cue:
        if bool(self.all_of) == bool(self.any_of):
            raise ValueError(f"cue {self.name}: give tests under exactly one of all_of, any_of")
        return self


class Reward(Model):
    """base * product(meters) per tick lived, plus `retirement_bonus` at the lifespan."""

    base: float = 1.0
    meters: tuple[str, ...] = ("energy", "health")
    retirement_bonus: float = 0.0


class Change(Model):
    """From `tick` of each life on, these values replace the pack's (scheduled non-stationarity)."""

    tick: Annotated[int, Field(ge=1)]
    hours: dict[str, tuple[int, int]] = {}
    price_factor: dict[str, Annotated[float, Field(ge=0.0, le=10.0)]] = {}
    quality: dict[str, Annotated[float, Field(ge=0.0, le=4.0)]] = {}
    depletion: dict[str, Unit] = {}
    cascade_factor: Annotated[float, Field(ge=0.0, le=10.0)] | None = None


class Families(Model):
    """Agents i with the same i // size are kin; SET_COMM_v puts v on their message board."""

    size: Annotated[int, Field(ge=1)]
    messages: Annotated[int, Field(ge=2, le=16)]


class ExpertSettings(Model):
    """Frozen parameters of a scripted expert and the return measured with them (mean per life)."""

    contended: float | None = None
    alone: float | None = None
    parameters: dict[str, float] = {}


class Pack(Model):
    """One town. `content_hash` identifies it wherever results are kept."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_\-]+$")]
    description: str = ""
    mode: Literal["atomic", "hamlet"] = "atomic"
    width: Annotated[int, Field(ge=2, le=64)]
    height: Annotated[int, Field(ge=2, le=64)]
    agents: Annotated[int, Field(ge=1, le=32)]
    lifespan: Annotated[int, Field(ge=1, le=100_000)] = 500
    start_hour: Annotated[int, Field(ge=0, le=23)] = 0
    temporal: bool = True
    depletion_multiplier: Annotated[float, Field(ge=0.0, le=10.0)] = 1.0
    vision: Annotated[int, Field(ge=1, le=63)] = 2
    cue_distance: Annotated[int, Field(ge=0, le=64)] = 2
    cues_broadcast: Annotated[int, Field(ge=1, le=32)] = 3
    meters: tuple[Meter, ...]
    modulations: tuple[Modulation, ...] = ()
    cascades: tuple[Cascade, ...] = ()
    terminal: tuple[Condition, ...]
    move_price: dict[str, Unit] = {}
    interact_price: dict[str, Unit] = {}
    actions: tuple[CustomAction, ...] = ()
    affordances: tuple[Affordance, ...]
    cues: tuple[Cue, ...] = ()
    families: Families | None = None
    schedule: tuple[Change, ...] = ()
    reward: Reward = Reward()
    experts: dict[str, ExpertSettings] = {}

    @property
    def content_hash(self) -> str:
        """sha256 (hex) of the canonical JSON of everything in the pack."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    @property
    def meter_names(self) -> tuple[str, ...]:
        return tuple(meter.name for meter in self.meters)

    @property
    def vital_meters(self) -> tuple[int, ...]:
        """Places of the meters whose running out ends a life."""
        ends = {condition.meter for condition in self.terminal if condition.op in ("<", "<=")}
        return tuple(i for i, name in enumerate(self.meter_names) if name in ends)

    @property
    def paid_in(self) -> int:
        """Place of the meter in which prices are: where nothing costs, that of `money`, else the
        last."""
        prices = [price for a in self.affordances for price in (a.price, a.price_per_tick)]
        spent = {meter for price in prices for meter, amount in price.items() if amount}
        names = self.meter_names
        paid = [i for i, name in enumerate(names) if name in (spent or {"money"})]
        return paid[0] if paid else len(names) - 1

    @property
    def affordance_names(self) -> tuple[str, ...]:
        return tuple(affordance.name for affordance in self.affordances)

    @property
    def action_names(self) -> tuple[str, ...]:
        comm = range(self.families.messages) if self.families else ()
        return (
            *BASE_ACTIONS,
            *(action.name for action in self.actions),
            *(f"SET_COMM_{value}" for value in comm),
        )
