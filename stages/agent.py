"""agent: put the frozen A, B, C and D together as think() and export it as one ONNX graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from hamlet.artifacts import HamletError, write_card, write_json
from hamlet.export.frozen import load_frozen, tensor_schema
from hamlet.export.frozen_policy import load_policy
from hamlet.export.onnx import OPSET, export_mind, runtimes_of
from hamlet.export.triton import write_repository
from hamlet.modules.agent import AgentState, Mind, Thoughts
from hamlet.modules.contracts import (
    SOCIAL_REASONS,
    UNCERTAINTY_REASONS,
    RawObservation,
    TownShape,
    observation_from,
)
from hamlet.serving.agent import NEXT, STATE, OnnxAgent
from hamlet.town import Town
from stages import paths
from stages.collect import make_town
from stages.common import progress, stage

TOLERANCE = 1e-4  # absolute up to 1, relative beyond
SPLITS = 1e-4  # share of agent-ticks in which the two runtimes may break a tie differently
PARITY_BATCHES = (1, 7, 256)
SURPRISED_WORLDS = 16
OUTPUTS = (
    "action",
    *(NEXT + name for name in AgentState._fields),
    *Thoughts._fields,
)


def limits(shape: TownShape) -> dict[str, list[float]]:
    """Inclusive range of every observation field that has one."""
    return {
        "view": [0, shape.num_cell_codes - 1],
        "occupancy": [0, shape.num_others],
        "self_state": [-1, 10],
        "cues": [0, 1],
        "others_offset": [-32, 32],
        "others_action": [0, shape.num_actions],
        "comm": [0, 1023],
    }


def blank(slots: int, recurrent_dim: int, others: int, social_dim: int, meters: int) -> AgentState:
    zeros = torch.zeros(slots, dtype=torch.int64)
    return AgentState(
        belief=torch.zeros(slots, recurrent_dim),
        social=torch.zeros(slots, others, social_dim),
        goal=zeros,
        goal_age=zeros,
        clock=zeros,
        moved=zeros,
        foreseen=torch.zeros(slots, meters),
        surprise=torch.zeros(slots),
        rng=zeros,
    )


def thinking(mind: Mind) -> Callable[..., tuple[Tensor, ...]]:
    """`mind`, imagining at those ticks only at which somebody deliberates, as the ONNX file does.

    The first tick must be such a one.
    """
    nothing: list[Tensor] = []

    def consider(deliberate: Tensor, *asked: Tensor) -> Sequence[Tensor]:
        if not deliberate.any():
            return nothing
        considered = mind.considered(deliberate, *asked)
        nothing[:] = [torch.zeros_like(x) for x in considered]
        return considered

    return lambda *tensors: mind.think(tensors, consider)


@torch.no_grad()
def usual_surprise(mind: Mind, town: Town, state: AgentState, seed: int) -> float:
    """The surprise that one tick in 200 exceeds where nothing is new.

    Args:
        town: of the maps that were trained on.
        state: blank minds of some worlds.
    """
    rng = torch.Generator().manual_seed(seed)
    state = state._replace(rng=torch.randint(2**31 - 2, state.rng.shape, generator=rng))
    world, found, think = town.reset(seed, len(state.rng) // town.num_agents), [], thinking(mind)
    for _ in progress(town.lifespan, "agent: what surprises"):
        action, *after = think(*observation_from(town.observe(world), 2), *state)
        state = AgentState(*after[: len(AgentState._fields)])
        found.append(state.surprise[world["alive"].flatten()])
        world = town.step_core(world, action.unflatten(0, (-1, town.num_agents)))
    return torch.cat(found).quantile(0.995).item()


class Parity:
    """The differences between two runs of think(), tick by tick.

    Sums differ in their last bits between runtimes, so where two choices are as good as equal one
    may take the one and the other the other: that is a split. Its row is not compared further.
    """

    CHOICES = ("action", NEXT + "goal", "candidates", "imagined_actions")

    def __init__(self) -> None:
        self.rows = self.splits = self.actions = 0
        self.gap, self.name = 0.0, ""

    def add(self, expected: dict[str, Tensor], found: dict[str, Tensor]) -> Tensor:
        """Compare one tick; returns the rows that split, bool [B]."""
        unequal = [(expected[name] != found[name]).flatten(1 if expected[name].ndim > 1 else 0)
                   for name in self.CHOICES]  # fmt: skip
        split = torch.stack([x.any(1) if x.ndim > 1 else x for x in unequal]).any(0)
        self.rows += len(split)
        self.splits += int(split.sum())
        self.actions += int(unequal[0].sum())
        for name, left in expected.items():
            if left.is_floating_point():
                gap = difference(left[~split], found[name][~split])
                if gap > self.gap:
                    self.gap, self.name = gap, name
        return split

    def holds(self) -> bool:
        return self.gap <= TOLERANCE and self.splits <= max(1.0, SPLITS * self.rows)


def difference(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to numbers beyond 1 (an imagined return may be 30).

    Entries that forbid an action count as equal.
    """
    a, b = a.double(), b.double()
    gap = (a - b).abs() / a.abs().clamp_min(1.0)
    both_forbidden = (a < -1e30) & (b < -1e30)
    return torch.where(both_forbidden, 0.0, gap).amax().item() if a.numel() else 0.0


def assembled(shape: TownShape) -> tuple[Mind, dict[str, Any], tuple[int, int, int, int]]:
    """The frozen A, B, C and the winner's D as one mind; their cards by kind; and the sizes of a
    blank mind.

    Raises:
        HamletError: D was trained on another A, B or C.
    """
    cards, graphs = {}, {}
    files = {
        "perception": paths.PERCEPTION,
        "world_model": paths.WORLD_MODEL,
        "social": paths.SOCIAL,
    }
    for kind, path in files.items():
        graphs[kind], cards[kind] = load_frozen(path, shape.pack_hash)
    policy, parts = load_policy(paths.WINNER, shape)
    decided = parts["prior"]
    for kind, path in files.items():
        if decided["upstream"][kind] != cards[kind]["sha256"]:
            raise HamletError(
                f"the policy was trained on another {path}: its card names "
                f"{decided['upstream'][kind]}, the file is {cards[kind]['sha256']}",
                "run `dvc repro`",
            )
    cards |= {card["kind"]: card for card in parts.values()}
    mind = Mind(
        graphs["perception"],
        graphs["world_model"],
        graphs["social"],
        policy,
        decided["candidates"],
        decided["horizon"],
    )
    of_a, of_c = (cards[kind]["recurrent_dim"] for kind in ("perception", "social"))
    return mind, cards, (of_a, shape.num_others, of_c, shape.num_meters)


def export(
    mind: Mind,
    town: Town,
    cards: dict[str, Any],
    obs: RawObservation,
    sizes: tuple[int, int, int, int],
) -> None:
    """Write the mind as paths.AGENT with its card; `obs` are what some agents see."""
    shape = TownShape.of(town)
    inputs = dict(
        zip(
            [*RawObservation._fields, *(STATE + name for name in AgentState._fields)],
            [*(x[:4] for x in obs), *blank(4, *sizes)],
            strict=True,
        )
    )
    export_mind(mind, inputs, OUTPUTS, paths.AGENT)
    with torch.no_grad():
        produced = mind(*inputs.values())
    write_card(
        paths.AGENT,
        kind="agent",
        schema={
            "inputs": tensor_schema(list(inputs), list(inputs.values())),
            "outputs": tensor_schema(OUTPUTS, produced),
        },
        pack=shape.pack_hash,
        upstream={kind: card["sha256"] for kind, card in cards.items()},
        extra={
            "town": shape.to_dict(),
            "resolved_pack": town.pack.model_dump(mode="json"),
            "opset": OPSET,
            "limits": limits(shape),
            "runtimes": runtimes_of(paths.AGENT),
            "surprise_limit": mind.surprise_limit,
            "reasons": {
                "uncertainty": list(UNCERTAINTY_REASONS),
                "social": list(SOCIAL_REASONS),
            },
        },
    )


def compare(
    agent: OnnxAgent, mind: Mind, town: Town, world: TensorDict, state: AgentState, ticks: int
) -> dict[int, Parity]:
    """Let PyTorch and ONNX Runtime think the same lives; their differences by batch size.

    Args:
        world: from which the lives go on; state: blank minds of all its agents.
    """
    theirs = {batch: agent.start(batch) for batch in PARITY_BATCHES}
    for started in theirs.values():
        started["state_rng"][:] = 0  # as ours
    parity, think = {batch: Parity() for batch in PARITY_BATCHES}, thinking(mind)
    for _ in progress(min(ticks, town.lifespan), "agent: parity"):
        obs = observation_from(town.observe(world), 2)
        with torch.no_grad():
            ours = think(*obs, *state)
        for batch in PARITY_BATCHES:
            fields = {name: x[:batch].numpy() for name, x in zip(obs._fields, obs, strict=True)}
            decision = agent.act(fields, theirs[batch])
            got = [decision.action, *decision.state.values(), *decision.thoughts.values()]
            expected = {name: x[:batch] for name, x in zip(OUTPUTS, ours, strict=True)}
            found = dict(zip(OUTPUTS, map(torch.from_numpy, got), strict=True))
            split = parity[batch].add(expected, found)
            theirs[batch] = {
                STATE + name: torch.where(
                    split.view(-1, *[1] * (expected[NEXT + name].ndim - 1)),
                    expected[NEXT + name],
                    found[NEXT + name],
                ).numpy()
                for name in AgentState._fields
            }
        state = AgentState(*ours[1 : 1 + len(AgentState._fields)])
        world = town.step_core(world, ours[0].unflatten(0, (-1, town.num_agents)))
    return parity


def main() -> None:
    with stage("agent") as s:
        town = make_town(s.params, held_out=True)
        shape = TownShape.of(town)
        mind, cards, sizes = assembled(shape)
        worlds = -(-max(PARITY_BATCHES) // shape.num_agents)
        world = town.reset(s.params.seed + 2, worlds)
        minds = blank(SURPRISED_WORLDS * shape.num_agents, *sizes)
        ticks, seed = s.params.agent.parity_ticks, s.params.seed + 3
        mind.surprise_limit = usual_surprise(mind, make_town(s.params), minds, seed)
        export(mind, town, cards, observation_from(town.observe(world), 2), sizes)

        agent = OnnxAgent(paths.AGENT)
        write_repository(paths.AGENT, agent.card, paths.TRITON)
        parity = compare(agent, mind, town, world, blank(worlds * shape.num_agents, *sizes), ticks)
        numbers = {
            **{f"parity_batch_{batch}": found.gap for batch, found in parity.items()},
            **{f"different_actions_batch_{batch}": p.actions for batch, p in parity.items()},
            **{f"split_ties_batch_{batch}": found.splits for batch, found in parity.items()},
            "onnx_bytes": paths.AGENT.stat().st_size,
        }
        write_json(paths.metrics("agent"), numbers)
        s.run.metrics(numbers)
        bad = next((found for found in parity.values() if not found.holds()), None)
        if bad:
            raise HamletError(
                f"agent.onnx differs from PyTorch: {bad.splits} decisions ({bad.actions} actions) "
                f"of {bad.rows}, '{bad.name}' by up to {bad.gap:.2g}",
                "run `hamlet doctor`: these versions of torch and onnxruntime do not agree",
            )


if __name__ == "__main__":
    main()
