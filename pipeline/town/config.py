"""What a town is made of: the pack, a strict schema over one YAML file.

Amounts are in meter units (0 to 1; money 1.0 = $100) and times in ticks (one tick = one hour).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hamlet.artifacts import HamletError

PACKS = Path(__file__).parent / "packs"
MOVES = ("UP", "DOWN", "LEFT", "RIGHT")
BASE_ACTIONS = (*MOVES, "INTERACT", "WAIT")
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


def one_line(error: ValidationError, source: str) -> str:
    """The first problem pydantic found, as `source: field: what is wrong`."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"]) or "pack"
    got = "" if first["type"] in ("missing", "value_error") else f", got {first['input']!r:.60}"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    message = first["msg"].removeprefix("Value error, ")
    return f"{source}: {where}: {message}{got}{more}"


def load_pack(source: str | Path) -> Pack:
    """Read a pack by name (`l4_contention`), from a YAML file, or from a Hamlet pack directory.

    A YAML pack may name another as `extends`: its own fields replace or, where they are mappings
    or lists of named things, amend the other's; null restores the schema's default.

    Raises PackError with one line that names the file, the field and the fix.
    """
    path = Path(source)
    if path.is_dir():
        from hamlet.town.hamlet import load_hamlet_pack

        return load_hamlet_pack(path)
    if not path.suffix and not path.exists():
        path = PACKS / f"{source}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in PACKS.glob("*.yaml")))
        raise PackError(
            f"{source}: no such pack; give a file, a Hamlet directory or one of {known}"
        )
    return build_pack(_read_with_parents(path), path.name)


def build_pack(content: dict[str, Any], source: str) -> Pack:
    """A checked pack from its fields. Raises PackError, see `load_pack`."""
    try:
        pack = Pack.model_validate(content)
    except ValidationError as error:
        raise PackError(one_line(error, source)) from None
    from hamlet.town.validate import check

    check(pack, source)
    return pack


def _read_with_parents(path: Path, depth: int = 0) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PackError(
            f"{path.name}: not readable as YAML: {' '.join(str(error).split())}"
        ) from None
    if not isinstance(content, dict):
        raise PackError(
            f"{path.name}: a pack is a mapping of fields, found {type(content).__name__}"
        )
    parent = content.pop("extends", None)
    if parent is None:
        return content
    candidates = (path.parent / f"{parent}.yaml", PACKS / f"{parent}.yaml")
    found = next((file for file in candidates if file.is_file()), None)
    if found is None or depth > 8:
        raise PackError(f"{path.name}: extends: no pack named {parent!r} beside it or built in")
    base = _read_with_parents(found, depth + 1)
    for settings in (base.get("experts") or {}).values():  # measured in another town
        settings.pop("contended", None)
        settings.pop("alone", None)
    return _amend(base, content)


def _amend(base: Any, change: Any) -> Any:
    """`change` on top of `base`: mappings by key, lists of named things by name."""
    if isinstance(base, dict) and isinstance(change, dict):
        merged = base | {key: _amend(base.get(key), value) for key, value in change.items()}
        return {key: value for key, value in merged.items() if value is not None}
    named = [base, change]
    if all(isinstance(x, list) and x and all(isinstance(i, dict) and "name" in i for i in x)
           for x in named):  # fmt: skip
        mine = {item["name"]: item for item in change}
        amended = [_amend(item, mine.pop(item["name"], {})) for item in base]
        return amended + list(mine.values())
    return change
