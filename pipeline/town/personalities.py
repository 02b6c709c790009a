"""Who lives in a town: scripted characters from AgentDNA, experts and baselines.

A character is a row of the parameters that `hamlet.town.players` plays by. AgentDNA bends the
expert's parameters: neuroticism acts early and fears low meters, greed values money,
agreeableness values company and keeps out of others' way, curiosity wanders.
"""

from __future__ import annotations

from dataclasses import dataclass

from hamlet.town.schema import Pack

# Marginal value, fear weight and comfort level per meter: value(x) = a x - b max(0, c - x)^2.
METER_DEFAULTS: dict[str, tuple[float, float, float]] = {
    "energy": (1.0, 2.0, 0.5),
    "hygiene": (0.05, 1.0, 0.45),
    "satiation": (0.1, 2.0, 0.5),
    "money": (0.3, 1.0, 0.4),
    "mood": (0.05, 1.0, 0.45),
    "social": (0.05, 1.0, 0.45),
    "health": (1.0, 2.0, 0.5),
    "fitness": (0.2, 0.5, 0.5),
}
OTHER_DEFAULTS = {
    "overhead": 2.0,  # ticks added to every plan: small means impatient
    "persistence": 0.3,  # bonus for what the agent is already heading to or doing
    "occupied_wait": 3.0,  # ticks expected to be lost per agent already in the place
    "foresight": 0.0,  # share counted of the wait for those who will be in the place before
    "rest_bonus": 0.0,  # added to the value per tick of resting
    "explore_rate": 0.01,  # value per tick of looking at unseen cells
    "search": 0.0,  # if not 0, that value is what may be found, so many ticks beyond the next cell
    "wander": 0.0,  # probability that a stretch of ticks is spent wandering
    "visit": 0.0,  # probability that a stretch is spent on trying some place out
}


@dataclass(frozen=True)
class AgentDNA:
    """Inherited temper, each in [0, 1]; 0.5 is the expert's own. And whose child this is."""

    neuroticism: float = 0.5
    greed: float = 0.5
    agreeableness: float = 0.5
    curiosity: float = 0.5
    family_id: int = 0
    parent_ids: tuple[int, ...] = ()
    """Places of the parents in their own generation."""
    generation: int = 0


DNA: dict[str, AgentDNA] = {
    "steady": AgentDNA(0.5, 0.5, 0.5, 0.1),
    "worrier": AgentDNA(1.0, 0.4, 0.4, 0.0),
    "worker": AgentDNA(0.5, 1.0, 0.2, 0.0),
    "socialite": AgentDNA(0.4, 0.2, 1.0, 0.2),
    "wanderer": AgentDNA(0.3, 0.3, 0.5, 1.0),
    "easygoing": AgentDNA(0.0, 0.2, 0.6, 0.3),
    "hustler": AgentDNA(0.8, 0.9, 0.0, 0.4),
    "neighbour": AgentDNA(0.7, 0.5, 0.9, 0.0),
    "recluse": AgentDNA(0.9, 0.6, 0.0, 0.0),
    "dreamer": AgentDNA(0.1, 0.1, 0.8, 0.8),
    "tycoon": AgentDNA(0.2, 1.0, 0.7, 0.6),
}
TRAIN = (
    "steady", "worrier", "worker", "socialite", "wanderer", "easygoing", "hustler", "neighbour",
)  # fmt: skip
HELD_OUT = ("recluse", "dreamer", "tycoon")
EXPERTS = (
    "expert", "expert_ignoring", "expert_sightings", "expert_sightings_ignoring",
    "expert_searching", "expert_watching", "expert_yesterday",
)  # fmt: skip
IGNORING = {"occupied_wait": 0.0, "foresight": 0.0}  # what makes others not matter to a plan
SEARCHING = {"search": 12.0}  # what makes what may be found matter to a plan
VISITING = {"visit": 1.0}  # what makes the expert a visitor of places that nobody would choose
BASELINES = ("random", "rest")
NAMES = (*TRAIN, *HELD_OUT, *EXPERTS, "visitor", *BASELINES)


def parameter_names(pack: Pack) -> tuple[str, ...]:
    """Order of a character's parameters: value, fear and comfort per meter, then the others."""
    per_meter = (
        f"{kind}.{meter}" for kind in ("value", "fear", "comfort") for meter in pack.meter_names
    )
    return (*per_meter, *OTHER_DEFAULTS)


def default_parameters(pack: Pack) -> dict[str, float]:
    """Untuned parameters, for packs whose experts were not tuned yet."""
    found: dict[str, float] = {}
    for place, meter in enumerate(pack.meter_names):
        # One of another name matters as the known one that has its part.
        lived_by = place in pack.vital_meters or meter in pack.reward.meters
        part = "energy" if lived_by else "money" if place == pack.paid_in else ""
        known = METER_DEFAULTS.get(meter) or METER_DEFAULTS.get(part)
        value, fear, comfort = known or (0.1, 1.0, 0.4)
        found |= {f"value.{meter}": value, f"fear.{meter}": fear, f"comfort.{meter}": comfort}
    return found | OTHER_DEFAULTS


def parameters(pack: Pack, name: str | AgentDNA) -> dict[str, float]:
    """The parameters a character plays by in this pack: a named one, or any by its DNA."""
    if isinstance(name, AgentDNA):
        return bend(parameters(pack, "expert"), name, pack.meter_names[pack.paid_in])
    base = default_parameters(pack)
    if "expert" in pack.experts:
        base |= pack.experts["expert"].parameters
    if name in pack.experts:
        base |= pack.experts[name].parameters
    elif name == "expert_searching":
        base |= parameters(pack, "expert_sightings") | SEARCHING
    elif name == "expert_watching":
        base |= parameters(pack, "expert_searching")
    elif name.endswith("_ignoring"):
        base |= parameters(pack, name.removesuffix("_ignoring")) | IGNORING
    elif name == "visitor":
        base |= VISITING
    if name in DNA:
        base = bend(base, DNA[name], pack.meter_names[pack.paid_in])
    return base


def bend(base: dict[str, float], dna: AgentDNA, money: str) -> dict[str, float]:
    """A character: the expert's parameters bent by its DNA; `money` is the meter prices are in."""

    def factor(gene: float, strength: float, weakness: float | None = None) -> float:
        """1 at gene 0.5, `strength` at 1, 1 / `weakness` at 0."""
        base = strength if gene > 0.5 or weakness is None else weakness
        return base ** (2.0 * gene - 1.0)

    bent = dict(base)
    for name in base:
        kind, _, meter = name.partition(".")
        if not meter:
            continue
        if meter == money:
            bent[name] *= factor(dna.greed, *((1.4, 1.1) if kind == "comfort" else (3.0, 1.25)))
        elif kind == "fear":
            bent[name] *= factor(dna.neuroticism, 2.0, 1.3)
        elif kind == "comfort":
            bent[name] = min(0.95, bent[name] * factor(dna.neuroticism, 1.4, 1.1))
        if meter in ("social", "mood") and kind != "comfort":
            bent[name] *= factor(dna.agreeableness, 2.5)
    bent["occupied_wait"] *= factor(dna.agreeableness, 2.5)
    bent["persistence"] *= factor(1.0 - dna.curiosity, 1.5)
    bent["wander"] = 0.2 * dna.curiosity**2
    return bent
