"""`params.yaml`, typed: one section per stage, every field with its range and a line of its own.

A *preset* (`presets/NAME.yaml`) names only what differs from `params.yaml`. The chosen one's name
stands in the file `presets/chosen`, which Git ignores; `hamlet preset NAME` writes it.

A wrong file is one clear line (`HamletError`) that names the field, what was given and what is
expected; an unknown key names the nearest valid one.
"""

import difflib
import json
import re
import warnings
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from hamlet.artifacts import HamletError, atomic_path

PRESETS, CHOSEN = "presets", "chosen"


class Section(BaseModel):
    """Base of every section: no unknown keys, no silent conversions, no changes after loading."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True
    )


Model = TypeVar("Model", bound=BaseModel)


# ------------------------------------------------------------------------------------------------
# The sections


class TownParams(Section):
    """The world every stage plays in."""

    pack: str = Field(description="name of a pack in pipeline/town/packs, or a path to one")
    layouts: int = Field(ge=1, description="maps that training draws from")


class CollectParams(Section):
    """The data set of scripted personalities."""

    worlds: int = Field(ge=1, description="worlds of the personalities known in training")
    held_out_worlds: int = Field(ge=1, description="worlds of held-out personalities, to validate")
    ticks: int = Field(ge=2, description="ticks recorded per world")


ModulePrecision = Literal["fp32", "bf16", "fp8", "fp8-emulated"]
PRECISION = Field(
    description="of forward pass and loss; fp8: bf16 where nothing multiplies float8, and "
    "fp8-emulated rounds as it would, slowly"
)


class PerceptionParams(Section):
    """Module A."""

    hidden: int = Field(ge=8, description="width of the GRU")
    latent: int = Field(ge=2, description="belief dimensions beyond the affordances' places")
    steps: int = Field(ge=1, description="gradient steps")
    sequences: int = Field(ge=1, description="worlds per gradient step")
    chunk: int = Field(ge=2, description="ticks per gradient step; must divide collect.ticks")
    learning_rate: float = Field(gt=0, lt=1)
    kl_weight: float = Field(ge=0, description="pull of the latent towards a standard normal")
    precision: ModulePrecision = PRECISION


class FreezePerceptionParams(Section):
    """Export of module A."""

    parity_ticks: int = Field(ge=1, description="ticks over which the export must equal the module")


class WorldModelParams(Section):
    """Module B."""

    hidden: int = Field(ge=8, description="hidden units of each member")
    members: int = Field(ge=2, description="members E of the ensemble")
    horizon: int = Field(ge=1, description="ticks it is fed its own predictions in training")
    steps: int = Field(ge=1, description="gradient steps")
    batch: int = Field(ge=2, description="windows per member and gradient step")
    learning_rate: float = Field(gt=0, lt=1)
    precision: ModulePrecision = PRECISION
    shard: bool = Field(description="ranks share the weights: for a model larger than one GPU")


class SocialParams(Section):
    """Module C."""

    hidden: int = Field(ge=8, description="width of the GRU, per other agent")
    steps: int = Field(ge=1, description="gradient steps")
    sequences: int = Field(ge=1, description="worlds per gradient step")
    chunk: int = Field(ge=2, description="ticks per gradient step; must divide collect.ticks")
    learning_rate: float = Field(gt=0, lt=1)


class PolicyParams(Section):
    """Module D."""

    teacher: str = Field(description="scripted character that is imitated, an expert of the pack")
    hidden: int = Field(ge=8, description="hidden units of both controllers and the critic")
    meta_period: int = Field(ge=1, description="ticks between deliberations")
    emergency: float = Field(ge=0, le=1, description="vital meter under which goals change")
    candidates: int = Field(ge=1, description="goals C imagined when deliberating")
    horizon: int = Field(ge=1, description="ticks H imagined for each")
    worlds: int = Field(ge=1, description="worlds B; a multiple of meta_period")
    rollout: int = Field(
        ge=2, description="ticks T per iteration; with kickstart_coef near 0 PPO needs some hundred"
    )
    imitation_iterations: int = Field(ge=0, description="the expert drives ever fewer worlds")
    critic_iterations: int = Field(ge=0, description="updates of the critic alone, in between")
    algorithm: Literal["ppo", "impala"] = Field(description="what improves on imitation")
    lag: int = Field(
        ge=0, description="iterations by which the weights that act are behind, with impala"
    )
    ppo_iterations: int = Field(ge=0, description="iterations of the algorithm")
    epochs: int = Field(ge=1)
    minibatches: int = Field(ge=1, description="parts of a rollout per epoch of the algorithm")
    imitation_epochs: int = Field(ge=1)
    imitation_minibatches: int = Field(ge=1, description="the same while imitating")
    imitation_learning_rate: float = Field(gt=0, lt=1)
    learning_rate: float = Field(gt=0, lt=1)
    gamma: float = Field(gt=0, lt=1)
    lam: float = Field(ge=0, le=1, description="lambda of generalised advantage estimation")
    clip: float = Field(gt=0, lt=1)
    max_kl: float = Field(gt=0, description="PPO begins no further epoch beyond this divergence")
    entropy: float = Field(
        ge=0, description="initial weight of the goals' entropy; ends at a tenth"
    )
    kickstart_coef: float = Field(
        ge=0, description="weight of the expert's goals in the loss of the algorithm"
    )


class PopulationParams(Section):
    """Self-play of module D; what is not said here is as in `policy`."""

    rounds: int = Field(ge=0, description="members that learn, one after another")
    iterations: int = Field(ge=1, description="of PPO, a round")
    worlds: int = Field(ge=2, description="of every match by which members are compared")
    focal_worlds: int = Field(ge=2, description="held-out worlds of the final measure")


class AgentParams(Section):
    """The whole think() as one ONNX graph."""

    parity_ticks: int = Field(
        ge=1, description="ticks, at most a life, over which ONNX must equal PyTorch"
    )


class EvaluateParams(Section):
    """Episodes of the ONNX file on seeds never trained on."""

    worlds: int = Field(ge=2, description="held-out worlds, each played once by every player")
    gif_ticks: int = Field(ge=1, description="ticks of the recorded episode")


class RegisterParams(Section):
    """The gate of the champion alias."""

    min_ratio_over_rest: float = Field(
        ge=0, description="lower end of the 95 % interval of the return over that of always-REST"
    )
    min_mean_return: float = Field(description="of the agent on held-out worlds")
    max_loss: float = Field(description="of the policy at the end of its training")
    max_value_loss: float = Field(ge=0, description="of the critic at the end of its training")
    min_goal_entropy: float = Field(ge=0, description="nats, at the end of the training")


class ProofsParams(Section):
    """The second world: knowledge-graph proofs."""

    data: str = Field(description="kinship (made from a seed), or a benchmark folder")
    rounds: int = Field(ge=1, description="rounds of forward chaining that evidence may take")
    slots: int = Field(ge=1, description="proofs searched side by side")
    imitation_steps: int = Field(ge=0, description="updates towards the choices that prove")
    ppo_steps: int = Field(ge=0)
    learning_rate: float = Field(gt=0, lt=1)
    entropy: float = Field(ge=0)
    hidden: int = Field(ge=8, description="hidden units of the scorer")


class TuneParams(Section):
    """A population of trainings of module C, each with settings of its own: `hamlet tune`."""

    members: int = Field(ge=2, description="trainings side by side, social.steps each")
    generations: int = Field(ge=1, description="parts into which the steps are divided")
    replaced: float = Field(
        ge=0, le=0.5, description="share replaced between generations; 0 is random search"
    )
    space: dict[str, tuple[float, float]] = Field(
        description="lowest and highest value of each number of the section `social` to be tuned"
    )

    @field_validator("space")
    @classmethod
    def _known_and_positive(
        cls, space: dict[str, tuple[float, float]]
    ) -> dict[str, tuple[float, float]]:
        tunable = [n for n, f in SocialParams.model_fields.items() if f.annotation is float]
        for name, (low, high) in space.items():
            if name not in tunable:
                raise ValueError(f"{name} cannot be tuned; what can is {', '.join(tunable)}")
            if not 0 < low < high:
                raise ValueError(f"{name} must be two numbers above 0, the lower one first")
        return space


class CompileParams(Section):
    """How the policy is trained. Compiling ticks takes minutes; then they are twice as fast."""

    rollout: bool = Field(description="torch.compile PPO's ticks: town, four modules, critic")
    update: bool = Field(
        description="torch.compile forward pass and loss; those of PPO where its ticks are compiled"
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(
        description="autocast of rollout and update; auto: bf16 where the processor multiplies it"
    )


with warnings.catch_warnings():
    # A metaclass of pydantic's has a method called `register`; a section's name may still be that.
    warnings.filterwarnings("ignore", message='Field name "register"')

    class Params(Section):
        """All of params.yaml."""

        seed: int = Field(ge=0, lt=2**31)
        town: TownParams
        collect: CollectParams
        perception: PerceptionParams
        freeze_perception: FreezePerceptionParams
        world_model: WorldModelParams
        social: SocialParams
        policy: PolicyParams
        population: PopulationParams
        agent: AgentParams
        evaluate: EvaluateParams
        register: RegisterParams
        proofs: ProofsParams
        tune: TuneParams
        compile: CompileParams


# ------------------------------------------------------------------------------------------------
# Loading


def load_params(path: str | Path = "params.yaml", preset: str | None = None) -> Params:
    """Read and check params.yaml and, on top of it, a preset of the folder `presets` beside it.

    Args:
        preset: its name; by default the one that is chosen there, if any.

    Raises:
        HamletError: missing file, not YAML, unknown or missing key, wrong type, out of range.
    """
    path = Path(path)
    base = _read(path, Params)
    params = _checked(path, base, Params)
    name = preset or chosen_preset(path.parent)
    if name is None:
        return params
    file = preset_file(path.parent, name)
    overlay = _read(file, Params)
    merged = dict(base)
    for key, value in overlay.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = {**base[key], **value} if both else value
    return _checked(file, merged, Params)


def read_overlay(folder: Path, name: str) -> dict[str, Any]:
    """What a preset gives, unchecked: {section: {key: value}}. Errors as in `load_params`."""
    return _read(preset_file(folder, name), Params)


def preset_names(folder: Path) -> list[str]:
    """The presets of a checkout."""
    return sorted(file.stem for file in (folder / PRESETS).glob("*.yaml"))


def preset_file(folder: Path, name: str) -> Path:
    """The file of a preset.

    Raises:
        HamletError: there is none of this name.
    """
    if name not in preset_names(folder):
        known = ", ".join(preset_names(folder)) or "none"
        raise HamletError(f"no preset is called `{name}`", f"`hamlet preset NAME` with {known}")
    return folder / PRESETS / f"{name}.yaml"


def chosen_preset(folder: Path) -> str | None:
    """The preset that `presets/chosen` names, or None; an experiment follows its checkout."""
    for root in (folder, _checkout_of(folder)):
        file = root / PRESETS / CHOSEN
        if file.is_file():
            return file.read_text(encoding="utf-8").strip()
    return None


def choose_preset(folder: Path, name: str | None) -> None:
    """Make `name` the preset of a checkout; None: what params.yaml says and no more.

    Raises:
        HamletError: no such preset, or it is not valid.
    """
    file = folder / PRESETS / CHOSEN
    if name is None:
        file.unlink(missing_ok=True)
        return
    load_params(folder / "params.yaml", name)
    with atomic_path(file) as temporary:
        temporary.write_text(name + "\n", encoding="utf-8")


def _checkout_of(folder: Path) -> Path:
    """The checkout whose experiment runs in `folder`, a copy below `.dvc/tmp/exps`; or `folder`."""
    parts = folder.absolute().parts
    inside = (i for i in range(len(parts)) if parts[i : i + 3] == (".dvc", "tmp", "exps"))
    at = next(inside, None)
    return folder if at is None else Path(*parts[:at])


def load_model(path: str | Path, model: type[Model]) -> Model:
    """Read the YAML file at `path` into `model`; errors as in `load_params`."""
    path = Path(path)
    return _checked(path, _read(path, model), model)


def _read(path: Path, model: type[BaseModel]) -> dict[str, Any]:
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except FileNotFoundError:
        raise HamletError(f"{path} is missing", "run from the root of the repository") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        reason = getattr(error, "problem", None) or "bad characters"
        raise HamletError(f"{path} is not valid YAML{place} ({reason})", "mend that line") from None
    if not isinstance(data, dict):
        raise HamletError(f"{path} must hold keys and values", f"valid keys: {_keys(model)}")
    return data


def _checked(path: Path, data: dict[str, Any], model: type[Model]) -> Model:
    try:
        # JSON rules: a list is a tuple and an int is a float, nothing else is converted.
        return model.model_validate_json(json.dumps(data, default=str))
    except ValidationError as error:
        raise _explain(path, model, error) from None


class _Loader(yaml.SafeLoader):
    """Safe YAML that reads 1e-3 as a number, as YAML 1.2 and DVC do, and refuses a doubled key."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key `{key}` is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)$"),
    list("-+0123456789."),
)


def _explain(path: Path, model: type[BaseModel], error: ValidationError) -> HamletError:
    # A misspelt key is both an unknown and a missing one: the unknown one tells the cause.
    errors = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    first = errors[0]
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    where = ".".join(str(part) for part in first["loc"])
    match first["type"]:
        case "extra_forbidden":
            section = _model_at(model, first["loc"][:-1])
            valid = list(section.model_fields) if section else []
            key = str(first["loc"][-1])
            near = difflib.get_close_matches(key, valid, n=1, cutoff=0.4)
            guess = f"did you mean `{near[0]}`? " if near else ""
            return HamletError(
                f"{path}: unknown key `{where}`{more}", f"{guess}valid keys: {', '.join(valid)}"
            )
        case "missing":
            section = _model_at(model, first["loc"][:-1])
            field = section.model_fields.get(str(first["loc"][-1])) if section else None
            what = f" ({field.description})" if field and field.description else ""
            return HamletError(f"{path}: `{where}` is missing{more}", f"add it{what}")
        case "value_error" | "assertion_error":
            subject = f"`{where}`: " if where else ""
            return HamletError(f"{path}: {subject}{first['ctx']['error']}{more}")
    given = json.dumps(first["input"], default=str)
    given = given if len(given) <= 60 else given[:57] + "..."
    return HamletError(f"{path}: `{where}` is {given}{more}", _expected(first["msg"]))


def _expected(message: str) -> str:
    return re.sub(r"^Input should be", "it must be", message)


def _model_at(model: type[BaseModel], loc: tuple[int | str, ...]) -> type[BaseModel] | None:
    """The model whose key is wrong, following the path of the error through the fields."""
    current: Any = model
    for part in loc:
        if isinstance(part, str) and _is_model(current) and part in current.model_fields:
            current = current.model_fields[part].annotation
        else:  # an index or key inside a container, or the tag of a union
            current = next((a for a in get_args(current) if a is not NoneType), None)
        if get_origin(current) in (Union, UnionType):
            current = next((a for a in get_args(current) if _is_model(a)), None)
    return current if _is_model(current) else None


def _is_model(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, BaseModel)


def _keys(model: type[BaseModel]) -> str:
    return ", ".join(model.model_fields)
