"""Numbers that stay as they are until somebody means to change them.

    python -m tests.golden.recipes

writes them to `numbers.json` beside this file. A change that is meant is committed with the new
numbers; one that is not meant is seen. What each number should be is the other tests' business.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from benchmarks import device_work
from hamlet.learning import train_world_model
from hamlet.learning.train_policy import goal_targets
from hamlet.learning.train_prover import build_prover
from hamlet.modules.agent import AgentState, Mind, Thoughts
from hamlet.modules.contracts import (
    LEADS,
    LOOK,
    Features,
    RawObservation,
    TownShape,
    observation_from,
)
from hamlet.modules.critic import Critic, privileged_features
from hamlet.modules.perception import Perception, PerceptionHeads
from hamlet.modules.policy import Policy
from hamlet.modules.social import Social
from hamlet.modules.world_model import WorldModel
from hamlet.proofs import ask, build_world
from hamlet.proofs.kinship import kinship_graph
from hamlet.proofs.knowledge import find
from hamlet.proofs.ranking import evaluate_scores, pose, sampled_negatives
from hamlet.town import Scripted, Town, load_pack
from hamlet.town.evolution import GENES, founders, next_generation
from hamlet.town.personalities import NAMES, default_parameters
from hamlet.town.planner import Planner
from hamlet.town.tables import menu, timetable
from hamlet.town.tune import tune
from tests.learning.minds import first_state

FILE = Path(__file__).parent / "numbers.json"
ZOO = str(Path(__file__).parents[1] / "town" / "zoo.yaml")
PACKS = ("l0_full_view", "l4_contention", "l5_changing", "l6_family", "l7_scarce", ZOO)

Numbers = dict[str, float]


def weighed(x: Tensor) -> float:
    """One number of a tensor: its sum with weights of which no two are the same."""
    flat = x.detach().double().flatten().clamp(-1e4, 1e4)
    weights = torch.arange(1, len(flat) + 1, dtype=torch.float64).mul(0.6180339887498949).frac()
    return float((flat * (weights + 0.25)).sum())


def weigh_all(fields: Any, where: str) -> Numbers:
    """`weighed` of every tensor of a mapping or a named tuple."""
    items = fields.items() if hasattr(fields, "items") else fields._asdict().items()
    return {f"{where}.{name}": weighed(x) for name, x in items if isinstance(x, Tensor)}


@torch.no_grad()
def set_weights(module: nn.Module) -> nn.Module:
    """Weights by a formula: the same on every machine and in every release of PyTorch."""
    for number, parameter in enumerate(module.parameters()):
        place = torch.arange(parameter.numel(), dtype=torch.float64)
        value = (place * 0.7548776662466927 + 0.1 * number).frac() - 0.5
        width = parameter.shape[-1] if parameter.dim() > 1 else 4
        parameter.copy_(value.view(parameter.shape) * (2 / width**0.5))
    return module.eval()


# ------------------------------------------------------------------------------------------------
# Town


def town_of(pack: str) -> Numbers:
    """Twelve ticks of a town in which everybody is somebody else, and what is posted in it.

    The worlds are of every age, the last ones about to end; what their agents have differs.
    """
    town = Town(load_pack(pack), num_layouts=8, layout_seed=3)
    players = Scripted(town, NAMES, 5)
    worlds = 2 * len(NAMES)
    state, number = town.reset(11, worlds), torch.arange(worlds)
    tick = number * (town.lifespan - 6) // (worlds - 1)
    hour = (town.pack.start_hour + tick) % 24
    spread = torch.arange(state["meters"].numel()).mul(0.7548776662466927).frac()
    state = town.rearrange(
        state, tick=tick, hour=hour, meters=0.1 + 0.9 * spread.view_as(state["meters"])
    )
    memory, told = players.reset(state), {}
    told["places"] = weighed(town.affordance_cells)
    told["timetable"] = weighed(timetable(town.pack))
    told["menu"] = weighed(menu(town.pack))
    for tick in range(12):
        action, goal, memory = players.act(state, memory)
        state = town.step_and_reset_core(state, action)
        told[f"action.{tick}"], told[f"goal.{tick}"] = weighed(action), weighed(goal)
    return told | weigh_all(state, "state") | weigh_all(town.observe(state), "observation")


def characters() -> Numbers:
    """What each character gets in forty ticks of the scarce town, among its like."""
    town, told = Town(load_pack("l7_scarce"), num_layouts=8), {}
    for name in NAMES:
        players, state = Scripted(town, [name], 5), town.reset(13, 2)
        memory, reward = players.reset(state), torch.zeros(2, town.num_agents)
        for _ in range(40):
            action, _, memory = players.act(state, memory)
            state = town.step_core(state, action)
            reward = reward + state["reward"]
        told[name] = weighed(reward)
    return told


def planned() -> Numbers:
    """What the planner has everybody do, and what tuning and two generations come to."""
    town = Town(load_pack("l7_scarce"), num_layouts=8)
    state, planner = town.reset(29, 2), Planner(town, period=3, horizon=12)
    memory, told = planner.reset(state), {}
    for tick in range(7):
        action, goal, memory = planner.act(state, memory)
        told[f"action.{tick}"], told[f"goal.{tick}"] = weighed(action), weighed(goal)
        told[f"option.{tick}"] = weighed(memory["option"])
        state = town.step_core(state, action)
    pack = load_pack("l4_contention").model_copy(update={"lifespan": 24})
    found = tune(
        pack, default_parameters(pack), {"persistence": 0.4}, generations=2, candidates=8, worlds=8,
        seed=3, alone_weight=0.5,
    )  # fmt: skip
    told |= {f"tuned.{name}": value for name, value in found.items()}
    people, rng = founders(), torch.Generator().manual_seed(2)
    for _ in range(2):
        people = next_generation(people, torch.arange(len(people)).mul(0.61).frac(), rng)
    for gene in GENES:
        told[f"children.{gene}"] = weighed(torch.tensor([getattr(dna, gene) for dna in people]))
    kin = [[dna.family_id, dna.generation, *dna.parent_ids] for dna in people]
    return told | {"kin": float(crc32(repr(kin).encode()))}


def adapted() -> Numbers:
    """Twelve steps by each of the adapters, all agents doing one after the other what is legal."""
    from hamlet.town.adapters.gymnasium_env import TownVectorEnv

    told = {}
    env = TownVectorEnv(2, pack="l4_contention", names=["expert_searching"])
    seen, infos = env.reset(seed=[3, 4])
    for step in range(12):
        mask = torch.as_tensor(infos["action_mask"]).float()
        action = (mask * (1 + torch.arange(mask.shape[1]).mul(0.7 * step).frac())).argmax(1)
        seen, reward, _, _, infos = env.step(action.numpy())
        told[f"gymnasium.{step}"] = weighed(torch.as_tensor(seen))
        told[f"gymnasium.reward.{step}"] = weighed(torch.as_tensor(reward))
    return told


# ------------------------------------------------------------------------------------------------
# Mind


def mind_of(town: Town) -> tuple[Mind, Callable[[int], AgentState]]:
    shape = TownShape.of(town)
    perception = set_weights(Perception(shape, 16, 4))
    world_model = set_weights(WorldModel(shape, 4, 24, 2))
    social = set_weights(Social(shape, 8))
    told = goal_targets(town), timetable(town.pack), menu(town.pack)
    policy = set_weights(Policy(shape, perception.belief_dim, 24, *told, 4, 0.2))
    with torch.no_grad():
        policy.goal_prior.sharpness.fill_(2.7)
    mind = Mind(perception, world_model, social, policy, 3, 2).eval()
    dims = perception.recurrent_dim, shape.num_others, social.recurrent_dim, shape.num_meters
    return mind, lambda worlds: first_state(worlds, shape.num_agents, *dims)


@torch.no_grad()
def mind() -> Numbers:
    """All that an agent of given weights thinks in ten ticks of the scarce town."""
    town = Town(load_pack("l7_scarce"), num_layouts=8)
    mind, blank = mind_of(town)
    critic = set_weights(Critic(TownShape.of(town), 16))
    world, state, told = town.reset(17, 3), blank(3), {}
    for tick in range(10):
        obs = observation_from(town.observe(world), 2)
        action, *after = mind(*obs, *state)
        state = AgentState(*after[: len(state)])
        thoughts = Thoughts(*after[len(state) :])
        told |= weigh_all(thoughts, f"thoughts.{tick}") | {f"action.{tick}": weighed(action)}
        privileged = privileged_features(town, TownShape.of(town), world)
        told[f"value.{tick}"] = weighed(critic(privileged))
        told[f"privileged.{tick}"] = weighed(privileged)
        world = town.step_core(world, action.unflatten(0, (3, -1)))
    return told | weigh_all(state, "state")


def spread(*size: int, low: float = -1.0, high: float = 1.0, start: int = 0) -> Tensor:
    """float32 numbers spread evenly over a range, in no order."""
    count = torch.Size(size).numel()
    place = torch.arange(start, start + count, dtype=torch.float64)
    return (low + (high - low) * place.mul(0.5698402909980532).frac()).float().view(size)


@torch.no_grad()
def questions() -> Numbers:
    """What B, C and D of given weights say of moments that few lives have: all goals, all actions,
    places near and far, meters low and high."""
    town = Town(load_pack("l7_scarce"), num_layouts=8)
    mind, _ = mind_of(town)
    shape, rows, told = TownShape.of(town), 96, {}
    policy: Any = mind.policy
    d, f, g, m = policy.places, shape.num_affordances, shape.num_goals, shape.num_others
    belief = spread(rows, 4 + d + LOOK), spread(rows, 4 + d + LOOK, low=-5.0, high=-0.5)
    known = spread(rows, shape.self_dim, low=0.0)
    number = torch.arange(rows)
    at = 2 * (number % f)  # in every second moment the agent is in a place that it knows well
    for column in (at, at + 1):
        belief[0][number[::2], column[::2]], belief[1][number[::2], column[::2]] = 0.0, -4.0
    goal, action = number % g, number % shape.num_actions
    features = Features(
        belief[0], belief[1][:, :d], known, spread(rows, g, low=0.0, high=2.0),
        spread(rows, f, len(LEADS), low=0.0, high=2.0), number % (g + 1),
        number % (shape.num_actions + 1),
    )  # fmt: skip
    prior = policy.prior_logits(features)
    told["prior"] = weighed(prior)
    told["learned"] = weighed(policy.learned_logits(features))
    told["actions"] = weighed(policy.action_logits(features, goal))
    age = number % 7
    told["ended"] = weighed(policy.goal_ended(known, goal, age).float())
    candidates = torch.stack([goal, (goal + 3) % g, (goal + 5) % g], 1)
    imagined = spread(rows, 3), spread(rows, 3, low=0.0)
    told["weighed"] = weighed(policy.goal_logits(prior, candidates, *imagined))
    visible = number.unsqueeze(1) % 3 != torch.arange(m) % 3
    given = (
        *belief, known, spread(rows, m, shape.num_cues, low=0.0).round(), visible,
        spread(rows, m, 2) * visible.unsqueeze(-1),
        (number.unsqueeze(1) + torch.arange(m)) % (shape.num_actions + 1),
        spread(rows, m, mind.read_others.recurrent_dim),
    )  # fmt: skip
    for place, x in enumerate(mind.read_others(*given)):
        told[f"social.{place}"] = weighed(x)
    for place, x in enumerate(mind.imagine_tick(*belief, known, action)):
        told[f"world_model.{place}"] = weighed(x.float())
    return told


@torch.no_grad()
def heads() -> Numbers:
    """What A of given weights says of a recorded life, and what its heads make of it."""
    town = Town(load_pack("l7_scarce"), num_layouts=8)
    shape = TownShape.of(town)
    module = set_weights(Perception(shape, 16, 4))
    reading = set_weights(PerceptionHeads(shape, module.belief_dim))
    players, world = Scripted(town, ["expert_watching"], 5), town.reset(19, 2)
    memory, seen, actions = players.reset(world), [], []
    for _ in range(16):
        action, _, memory = players.act(world, memory)
        seen.append({name: x.flatten(0, 1) for name, x in town.observe(world).items()})
        actions.append(action.flatten())
        world = town.step_core(world, action)
    fields = RawObservation._fields
    obs = RawObservation(*(torch.stack([tick[name] for tick in seen]) for name in fields))
    first = torch.zeros(16, 2 * town.num_agents, dtype=torch.bool)
    first[[0, 9]] = True
    state = torch.zeros(2 * town.num_agents, module.recurrent_dim)
    now = torch.tensor([0, 5, 8, 9, 15])
    mean, log_std, location, state = module.sequence(obs, first, state, now)
    said = reading(mean, obs.self_state[now], torch.stack(actions)[now])
    names = ("mean", "log_std", "location", "state", "view", "occupancy", "next_view", "meters")
    return {
        name: weighed(x)
        for name, x in zip(names, (mean, log_std, location, state, *said), strict=True)
    }


# ------------------------------------------------------------------------------------------------
# Proofs


@torch.no_grad()
def proofs() -> Numbers:
    """Ten ticks of pursuing open goals, and how a prover of given weights scores and ranks."""
    world = build_world(kinship_graph(3, 3), rounds=4)
    closure, told = world.closure, {}
    for name in ("keys", "round"):
        told[f"closure.{name}"] = weighed(getattr(closure, name).double().remainder(977))
    told["closure.log_odds"] = weighed(closure.log_odds(closure.keys))
    prover = set_weights(build_prover(world, hidden=16))
    state = world.reset(23, 24)
    for tick in range(10):
        said = prover.see(world.observe(state))
        legal = state["action_mask"]
        action = torch.where(legal, said.logits.float(), -torch.inf).argmax(-1)
        told[f"logits.{tick}"] = weighed(torch.where(legal, said.logits.float(), 0.0))
        told[f"score.{tick}"], told[f"action.{tick}"] = weighed(said.score), weighed(action)
        state = world.step_core(state, action)
        told |= weigh_all(state.select("depth", "reward", "label", "dropped"), f"state.{tick}")
    graph = world.graph
    questions = pose(graph, closure, graph.splits["test"], graph.known())
    keys = closure.keys[closure.round > 0]
    negatives = sampled_negatives(graph, questions, 20, 0)
    scores = closure.log_odds(keys).double()
    told |= evaluate_scores(graph, questions, keys, scores, negatives)
    place, known = find(closure.keys, keys)
    told |= {"found": weighed(place), "known": float(known.sum())}
    for question in ("aunt(X, Y)", "grandparent(a, X)", "uncle(X, b)"):
        answers = ask(question, prover, world)
        told[question] = weighed(torch.tensor([answer.probability for answer in answers]))
        proofs = "\n".join(line for answer in answers for line in answer.proof.lines())
        told[f"{question} proofs"] = float(crc32(proofs.encode()))
    return told


# ------------------------------------------------------------------------------------------------
# Trainers


def trainers() -> Numbers:
    """What two updates of everything that is trained tell, and a match and a ranking."""
    before, train_world_model.REPORT_TICKS = train_world_model.REPORT_TICKS, (1, 5)
    try:
        with tempfile.TemporaryDirectory() as folder, chdir(folder):
            told = dict(device_work.done_on(torch.device("cpu"), device_work.recorded()))
    finally:
        train_world_model.REPORT_TICKS = before
    return {name: float(value) for name, value in device_work.numbers(told)}


RECIPES: dict[str, Callable[[], Numbers]] = {
    **{f"town {Path(pack).stem}": lambda pack=pack: town_of(pack) for pack in PACKS},
    "characters": characters,
    "planned": planned,
    "adapted": adapted,
    "mind": mind,
    "questions": questions,
    "heads": heads,
    "proofs": proofs,
    "trainers": trainers,
}


def kept() -> dict[str, Numbers]:
    return json.loads(FILE.read_text())


def changes(name: str, now: Numbers, close: float) -> Iterator[str]:
    """One line for every number of a recipe that is not what it was."""
    before = kept()[name]
    for key in sorted(before.keys() ^ now.keys()):
        yield f"{key}: {'gone' if key in before else 'new'}"
    for key in before.keys() & now.keys():
        if not abs(now[key] - before[key]) <= close * max(1.0, abs(before[key])):
            yield f"{key}: {before[key]} -> {now[key]}"


def main() -> None:
    torch.set_num_threads(1)
    made = {}
    for name, recipe in RECIPES.items():
        print(name, file=sys.stderr, flush=True)
        made[name] = {key: float(f"{value:.8g}") for key, value in recipe().items()}
    FILE.write_text(json.dumps(made, indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
