"""policy: train module D against the frozen A, B and C; freeze its four questions.

    python -m stages.policy [--actors N]

With `policy.algorithm: impala`, N further processes act while this one learns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hamlet.artifacts import HamletError, atomic_path, check_card, write_card, write_json
from hamlet.export.frozen import freeze, load_frozen
from hamlet.export.sense import load_sense
from hamlet.learning import distributed
from hamlet.learning.actors import Cast
from hamlet.learning.learner import Learner, first_state
from hamlet.learning.train_policy import Trained, goal_targets, policy_precision, train_policy
from hamlet.learning.trials import try_habits
from hamlet.modules.agent import AgentState, Mind
from hamlet.modules.contracts import LEADS, Features, TownShape
from hamlet.modules.critic import Critic
from hamlet.modules.menu import imagined_menu, menu_error
from hamlet.modules.policy import Policy, PolicyAct, PolicyEnded, PolicyPrior, PolicyWeigh
from hamlet.moving import moved
from hamlet.params import Params
from hamlet.town import Scripted, Town
from hamlet.town.tables import menu, timetable
from stages import paths
from stages.collect import make_town
from stages.common import prepare_torch, progress, stage
from stages.log import StageLog


def lazily(
    path: Path, pack: str, device: torch.device
) -> tuple[Callable[..., tuple[Tensor, ...]], dict[str, Any]]:
    """As `load_frozen`, but the graph is read when it is first asked: to read one takes seconds,
    and where A and C sense in one graph nobody asks them by themselves."""
    card, place = check_card(path, expect_pack=pack), path.absolute()
    load = cache(lambda: load_frozen(place, pack, device)[0])
    return lambda *inputs: load()(*inputs), card


def make_mind(
    params: Params, town: Town, kind: type[Policy] = Policy
) -> tuple[Mind, Callable[..., AgentState], list[dict[str, Any]]]:
    """The frozen A, B and C with a new D, where the town is; blank minds of a number of worlds, and
    of agents in each; and the cards."""
    shape, sizes = TownShape.of(town), params.policy
    # ONNX Runtime's calls cannot be a part of a compiled graph, and this graph is for the CPU.
    fused = not params.compile.rollout and town.device.type == "cpu"
    graph = lazily if fused else load_frozen
    perceive, a_card = graph(paths.PERCEPTION, shape.pack_hash, town.device)
    imagine_tick, b_card = load_frozen(paths.WORLD_MODEL, shape.pack_hash, town.device)
    read_others, c_card = graph(paths.SOCIAL, shape.pack_hash, town.device)
    posted = timetable(town.pack)
    hours = posted.to(town.device)
    offered = imagined_menu(imagine_tick, shape, a_card["belief_dim"], hours, town.pack.start_hour)
    torch.manual_seed(params.seed)
    policy = kind(
        shape,
        a_card["belief_dim"],
        sizes.hidden,
        goal_targets(town),
        posted,
        offered.cpu(),
        sizes.meta_period,
        sizes.emergency,
    ).to(town.device)
    mind = Mind(perceive, imagine_tick, read_others, policy, sizes.candidates, sizes.horizon)
    if fused:
        upstream = {"perception": a_card["sha256"], "social": c_card["sha256"]}
        mind.fused_sense = load_sense(paths.SENSE, shape.pack_hash, upstream)

    def blank(worlds: int, agents: int = shape.num_agents) -> AgentState:
        dims = a_card["recurrent_dim"], shape.num_others, c_card["recurrent_dim"]
        return first_state(worlds, agents, *dims, shape.num_meters, town.device)

    return mind, blank, [a_card, b_card, c_card]


def keep_policy(
    policy: Policy,
    trained: Trained,
    shape: TownShape,
    params: Params,
    cards: Sequence[Mapping[str, Any]],
    folder: Path,
    made_on: Mapping[str, str] | None = None,
) -> None:
    """Freeze the four questions to D in `folder`, each in its file, and keep what can learn on,
    and what imitation left before reinforcement, which `stages.reinforced` compares.

    `cards` are those of A, B and C; `made_on` the facts of `Stage.made_on`.
    """
    f = {
        "mean": torch.zeros(4, cards[0]["belief_dim"]),
        "log_std": torch.zeros(4, policy.places),
        "known_state": torch.rand(4, shape.self_dim, generator=torch.Generator().manual_seed(0)),
        "rivals": torch.zeros(4, shape.num_goals),
        "ahead": torch.zeros(4, shape.num_affordances, len(LEADS)),
        "pursued": torch.zeros(4, dtype=torch.int64),
        "moved": torch.zeros(4, dtype=torch.int64),
    }
    assert tuple(f) == Features._fields
    goal = {"goal": torch.zeros(4, dtype=torch.int64)}
    c = params.policy.candidates
    weighed = {
        "prior": torch.zeros(4, shape.num_goals),
        "candidates": torch.zeros(4, c, dtype=torch.int64),
        "returns": torch.zeros(4, c),
        "confidence": torch.zeros(4, c),
    }
    ended = {"known_state": f["known_state"], **goal, "age": goal["goal"].clone()}
    upstream = {card["kind"]: card["sha256"] for card in cards}
    folder.mkdir(parents=True, exist_ok=True)
    for part, module, inputs, output in (
        ("prior", PolicyPrior(policy), f, "goal_logits"),
        ("ended", PolicyEnded(policy), ended, "ended"),
        ("weigh", PolicyWeigh(policy), weighed, "goal_logits"),
        ("act", PolicyAct(policy), f | goal, "action_logits"),
    ):
        freeze(
            module,
            inputs,
            [output],
            folder / f"{part}.pt2",
            kind=f"policy_{part}",
            pack=shape.pack_hash,
            upstream=upstream,
            extra={
                "places": policy.places,
                "meta_period": params.policy.meta_period,
                "candidates": c,
                "horizon": params.policy.horizon,
                **(made_on or {}),
            },
        )
    weights = folder / "weights.pt"
    with atomic_path(weights) as temporary:
        learned = {
            "policy": policy.state_dict(),
            "critic": trained.critic.state_dict(),
            "imitated": trained.imitated,
        }
        torch.save(moved(learned, "cpu"), temporary)
    write_card(weights, "policy weights", {}, upstream, shape.pack_hash, made_on)


def make_actor(params: Params) -> Learner:
    """Who acts in a process of its own."""
    prepare_torch(params.seed)
    town = make_town(params)
    shape = TownShape.of(town)
    expert = Scripted(town, [params.policy.teacher], params.seed)
    mind = make_mind(params, town)[0]
    return Learner(town, shape, mind, Critic(shape, params.policy.hidden), expert)


def cast_of(count: int, params: Params) -> Cast | None:
    """The processes that `--actors` asks for.

    Raises:
        HamletError: nobody acts elsewhere with PPO, or on ranks; the worlds cannot be divided.
    """
    if not count:
        return None
    if params.policy.algorithm != "impala":
        raise HamletError(
            f"--actors {count}: with PPO nobody acts while it learns",
            "set policy.algorithm to impala in params.yaml, or leave --actors out",
        )
    if distributed.ranks() > 1:
        raise HamletError("--actors is for one process, not for ranks", "leave either out")
    unit = count * params.policy.meta_period
    if count < 0 or params.policy.worlds % unit:
        raise HamletError(
            f"params.yaml: policy.worlds is {params.policy.worlds}, which {count} actors cannot "
            "share",
            "let it be a multiple of actors times policy.meta_period "
            f"({params.policy.meta_period}), or ask for another number of actors",
        )
    return Cast(count, partial(make_actor, params))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m stages.policy", description="Train module D.")
    parser.add_argument(
        "--actors", type=int, default=0, metavar="N",
        help="processes that act while this one learns (impala)",
    )  # fmt: skip
    given = parser.parse_args(arguments)
    with stage("policy") as s:
        params = s.params.policy
        cast = cast_of(given.actors, s.params)
        town = make_town(s.params, device=s.device)
        shape = TownShape.of(town)
        mind, blank, cards = make_mind(s.params, town)
        policy: Any = mind.policy
        folder = s.checkpoint_dir("pipeline", extra=[card["sha256"] for card in cards])
        log = StageLog(s, folder, every=1)
        trained = train_policy(
            town, shape, mind, blank, params, s.params.compile, s.params.seed,
            folder / "checkpoint.pt", log, cast=cast,
        )  # fmt: skip
        tried = try_habits(
            town, shape, mind, blank, params.worlds, s.params.seed,
            partial(progress, description="policy: whole lives") if s.first else range,
        )  # fmt: skip

        if not s.first:
            return
        made_on = s.made_on(policy_precision(s.params.compile, s.device))
        keep_policy(policy, trained, shape, s.params, cards, paths.POLICY, made_on)
        log.write(paths.curve("policy"))
        imagined = menu_error(policy.prospects.menu.t().cpu(), menu(town.pack))
        found = {"menu_error": imagined, **tried}
        s.run.metrics(found)
        tail = log.rows[-1] if log.rows else {}
        numbers = {k: v for k, v in tail.items() if k != "step"} | found
        write_json(paths.metrics("policy"), numbers)


if __name__ == "__main__":
    main()
