"""`params.yaml` of an own world: one section per stage; what it does not say is as here."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator

from hamlet.artifacts import HamletError, parse_yaml
from hamlet.params import Section


class WorldParams(Section):
    """Where the world comes from."""

    make: str = Field(description="gymnasium:ID, pettingzoo:MODULE or python:module.function")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="given to what makes it")
    longest: int = Field(default=10_000, ge=1, description="ticks after which an episode is cut")

    @field_validator("make")
    @classmethod
    def _of_a_kind(cls, value: str) -> str:
        if value.partition(":")[0] not in ("gymnasium", "pettingzoo", "python"):
            raise ValueError("write gymnasium:ID, pettingzoo:MODULE or python:module.function")
        return value


class CollectParams(Section):
    """Experience of random legal actions."""

    ticks: int = Field(default=4000, ge=64, description="of all worlds together")
    lanes: int = Field(default=8, ge=4, description="worlds side by side; a quarter is held out")


class PerceptionParams(Section):
    """Module A."""

    hidden: int = Field(default=64, ge=4, description="width of the belief")
    steps: int = Field(default=600, ge=1, description="gradient steps")
    chunk: int = Field(default=32, ge=2, description="ticks through which a step goes back")
    learning_rate: float = Field(
        default=2e-3, gt=0, lt=1, description="at first; it falls to a tenth"
    )
    recall: float = Field(
        default=1.0, ge=0, description="weight of telling what was observed earlier in this life"
    )


class HeadParams(Section):
    """A network that is fitted to recorded beliefs."""

    hidden: int = Field(default=128, ge=8, description="width of its layers")
    steps: int = Field(default=600, ge=1, description="gradient steps")
    batch: int = Field(default=256, ge=2, description="rows of a gradient step")
    learning_rate: float = Field(
        default=1e-3, gt=0, lt=1, description="at first; it falls to a tenth"
    )


class WorldModelParams(HeadParams):
    """Module B."""

    members: int = Field(default=3, ge=2, description="of the ensemble")


class SocialParams(HeadParams):
    """Module C; of no use in a world of one agent."""


class PolicyParams(Section):
    """Module D."""

    ticks: int = Field(default=36_000, ge=1, description="of all worlds together")
    lanes: int = Field(default=8, ge=2, description="worlds side by side")
    rollout: int = Field(default=64, ge=2, description="ticks of each between updates")
    minibatch: int = Field(default=128, ge=2, description="rows of one gradient step")
    epochs: int = Field(default=10, ge=1, description="passes over a rollout, at most")
    hidden: int = Field(default=64, ge=4, description="width of actor and critic")
    learning_rate: float = Field(default=1e-3, gt=0, lt=1, description="at first; it falls to 0")
    gamma: float = Field(default=0.99, gt=0, lt=1, description="discount per tick")
    lam: float = Field(default=0.95, ge=0, le=1, description="lambda of the advantages")
    clip: float = Field(default=0.2, gt=0, lt=1, description="of PPO's ratio")
    entropy: float = Field(default=0.01, ge=0, description="weight of the odds' entropy")
    max_kl: float = Field(default=0.015, gt=0, description="no further epoch beyond it")
    kept_ticks: int = Field(
        default=14_000, ge=64, description="last ticks, of all worlds, that B and C learn from"
    )


class EvaluateParams(Section):
    """The exported file plays episodes whose seeds no training met."""

    episodes: int = Field(default=200, ge=2, description="held-out ones that are played")
    lanes: int = Field(
        default=16, ge=1, description="episodes side by side; no result depends on it"
    )
    best: float | None = Field(
        default=None, description="the best return known: scores are then also given from 0 to 1"
    )


class RegisterParams(Section):
    """The gate, and the name under which the agent is registered."""

    model: str = Field(
        default="own-agent", pattern=r"^[\w.-]+$", description="its name in the registry"
    )
    min_return: float | None = Field(default=None, description="least mean return, None: any")
    beats_random: bool = Field(
        default=True, description="its return must be above random play's, beyond doubt"
    )


with warnings.catch_warnings():
    # A metaclass of pydantic's has a method called `register`; a section's name may still be that.
    warnings.filterwarnings("ignore", message='Field name "register"')

    class OwnParams(Section):
        """All of params.yaml."""

        seed: int = Field(default=0, ge=0, description="of everything that is drawn")
        world: WorldParams
        collect: CollectParams = Field(default_factory=CollectParams)
        perception: PerceptionParams = Field(default_factory=PerceptionParams)
        world_model: WorldModelParams = Field(default_factory=WorldModelParams)
        social: SocialParams = Field(default_factory=SocialParams)
        policy: PolicyParams = Field(default_factory=PolicyParams)
        evaluate: EvaluateParams = Field(default_factory=EvaluateParams)
        register: RegisterParams = Field(default_factory=RegisterParams)


def load_own_params(path: Path = Path("params.yaml")) -> OwnParams:
    """Read a project's parameters.

    Raises:
        HamletError: naming the file and the entry that is wrong.
    """
    import yaml

    try:
        return OwnParams.model_validate(parse_yaml(path.read_text(encoding="utf-8")) or {})
    except FileNotFoundError:
        raise HamletError(
            f"{path} is missing", "run this in a folder that `hamlet new` made"
        ) from None
    except yaml.YAMLError as error:
        raise HamletError(f"{path} is not YAML: {error}", "correct it") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise HamletError(f"{path}: `{where}`: {first['msg']}", "correct the entry") from None


def is_own(folder: Path = Path()) -> bool:
    """Whether a folder is the project of an own world."""
    import yaml

    try:
        read = parse_yaml((folder / "params.yaml").read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return False
    world = read.get("world") if isinstance(read, dict) else None
    return isinstance(world, dict) and "make" in world
